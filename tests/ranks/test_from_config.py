"""A new model in shards has the values of one process, whatever the number of ranks, and what transformers draws."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from hf_fsdp_tools import CheckpointError, ConfigError, ParallelDims, describe_sharding, from_config, make_accelerator
from hf_fsdp_tools.steps import build_meta_model
from tests._checkpoints import assert_same_model
from tests._dist import run_cases, run_ranks
from tests.api import allocate, initialize_missing, local_device

SIZES = {
    "vocab_size": 101, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.1,
}  # fmt: skip


def alone(seed: int, **sizes: object) -> torch.nn.Module:
    model = build_meta_model(LlamaConfig(**SIZES | sizes))
    allocate(model, device=torch.device("cpu"))
    initialize_missing(model, missing_keys={name for name, _ in model.named_parameters()}, seed=seed)
    return model


def values(folder: Path) -> None:
    for tied in (False, True):
        model = from_config(LlamaConfig(**SIZES, tie_word_embeddings=tied), seed=5)
        assert_same_model(model, alone(5, tie_word_embeddings=tied))
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    embedded = model.model.embed_tokens.weight.full_tensor()
    assert 0.08 < embedded.std() < 0.12, "drawn as the config says"
    torch.manual_seed(3)
    drawn = [from_config(LlamaConfig(**SIZES)).lm_head.weight.full_tensor() for _ in range(2)]
    assert torch.equal(*drawn), "the same state of the generator"
    torch.manual_seed(4)
    assert not torch.equal(from_config(LlamaConfig(**SIZES)).lm_head.weight.full_tensor(), drawn[0])


def masters_and_what_is_refused(folder: Path) -> None:
    accelerator = make_accelerator(mixed_precision="bf16", cpu=local_device().type == "cpu")
    model = from_config(LlamaConfig(**SIZES), accelerator=accelerator, dtype="bfloat16", attn_implementation="eager")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.config._attn_implementation == "eager"
    with pytest.raises(CheckpointError, match="absent"):
        from_config(folder / "absent")
    rank = torch.distributed.get_rank()
    with pytest.raises(ConfigError, match="seed"):
        from_config(LlamaConfig(**SIZES), seed=rank)


def settings_of_from_pretrained(folder: Path) -> None:
    of_units = {"policy": "LlamaMLP", "mp_policy": "bf16", "activation_checkpointing": True}
    model = from_config(LlamaConfig(**SIZES), seed=5, mesh=ParallelDims(dp_replicate_size=2), **of_units)
    shown = describe_sharding(model)
    assert "LlamaMLP" in shown and "computation  bfloat16" in shown and "kept" not in shown
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_same_model(model, alone(5))


def test_a_new_model_is_the_same_on_any_number_of_ranks(tmp_path):
    run_ranks(run_cases, 2, (values, masters_and_what_is_refused, settings_of_from_pretrained), tmp_path)
