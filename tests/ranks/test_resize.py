"""Added tokens: a vocabulary resized while loading, or on a model that is sharded already, equals a plain resize."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, PreTrainedModel

from hf_fsdp_tools import (
    CheckpointError,
    ConfigError,
    ParallelDims,
    WrapPolicy,
    describe_sharding,
    from_config,
    from_pretrained,
    make_accelerator,
    resize_token_embeddings,
    save_pretrained,
)
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import assert_same_model, full, make_model, sharded_meta_model
from tests._dist import named, run_cases, run_ranks
from tests._training import train
from tests.api import allocate, initialize_missing, local_device, sharding_of


def loaded_model(kind: str, folders: dict[str, Path], **sharding: Any) -> PreTrainedModel:
    model = sharded_meta_model(kind, folders[kind], **sharding)
    load_weights(model, folders[kind])
    return model


def expected(kind: str, folder: Path, size: int) -> PreTrainedModel:
    """The plain model resized by transformers, new rows made the mean of the old ones without its noise."""
    model = type(make_model(kind)).from_pretrained(folder)
    old = {id(p): p.detach().clone() for p in model.parameters()}
    names = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            before = old[names[name]]
            if parameter.shape[0] > before.shape[0]:
                parameter[before.shape[0] :] = before.double().mean(0).float()
    return model


def inputs_of(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    decoder = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    return {"input_ids": tokens, "labels": tokens} | decoder


def check(kind: str, model: PreTrainedModel, reference: PreTrainedModel, size: int) -> None:
    """Bit for bit, ties included, but for the last bit of a mean, which torch's own sum rounds otherwise; trained."""
    state, other = model.state_dict(), reference.state_dict()
    for key, tensor in other.items():
        torch.testing.assert_close(full(state[key]), tensor, rtol=1e-6, atol=1e-9)
        if key in state and tensor.shape[:1] and tensor.shape[0] > 131:
            assert torch.equal(full(state[key])[:131], tensor[:131]), (kind, key)
            with torch.no_grad():
                tensor.copy_(full(state[key]))  # now the very same start for training
    assert_same_model(model, reference, kind)
    assert model.config.get_text_config().vocab_size == size == model.get_input_embeddings().num_embeddings
    tokens = (torch.arange(24).reshape(2, 12) * 7) % size
    tokens[:, 3] = size - 1  # the newest
    steps = [inputs_of(model, tokens)] * 2
    losses = [train(each, torch.optim.SGD(each.parameters(), lr=0.1), steps) for each in (model, reference)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def resized_while_loading(kind: str, size: int, folders: dict[str, Path], root: Path) -> None:
    loaded = build_meta_model(folders[kind], auto_class=type(make_model(kind)))
    loaded.resize_token_embeddings(size, mean_resizing=False)
    fully_shard(loaded)
    report = load_weights(loaded, folders[kind], added_tokens="mean")
    assert report.resized_keys and not report.missing_keys and not report.initialized_keys
    assert report.bytes_read <= report.share_bytes
    check(kind, loaded, expected(kind, folders[kind], size), size)


def resized_when_sharded(kind: str, size: int, folders: dict[str, Path], root: Path) -> None:
    live = loaded_model(kind, folders)
    with torch.no_grad():
        live(**inputs_of(live, torch.ones(1, 4, dtype=torch.int64)))
    assert resize_token_embeddings(live, size) is live.get_input_embeddings()
    check(kind, live, expected(kind, folders[kind], size), size)


def drawn_rows(kind: str, folders: dict[str, Path], root: Path) -> torch.Tensor:
    """By the model's own initialisation: the rows that were added."""
    live = loaded_model(kind, folders)
    resize_token_embeddings(live, 140, mean_resizing=False, seed=3)
    rows = full(live.get_input_embeddings().weight)[131:]
    assert 0.005 < rows.std() < 1.5, (kind, rows.std())
    return rows


def the_plan_has_the_new_sizes_and_the_model_is_saved(folders, root):
    policy = WrapPolicy(group_tail=False, units=(lambda name, module: name.endswith("mlp"),))
    live, resized = (
        from_pretrained(folders["tied"], policy=policy, num_tokens=n, pad_to_multiple_of=4) for n in (None, 138)
    )
    assert sharding_of(resized).plan.num_params == sum(p.numel() for p in resized.parameters())
    resize_token_embeddings(live, 140)
    assert sharding_of(live).plan == sharding_of(resized).plan
    save_pretrained(live, root / "saved")
    llama = folders["llama"]
    with pytest.raises(ConfigError, match=r"num_tokens is 0; it must be at least 1"):
        resize_token_embeddings(live, 0)
    with pytest.raises(ConfigError, match=r"have no weights yet .*num_tokens="):
        resize_token_embeddings(sharded_meta_model("llama", llama), 150)
    with pytest.raises(
        CheckpointError, match=r"\[131, 48\] in the checkpoint, \[140, 48\] in the model(.|\n)*added_tokens"
    ):
        load_weights(build_meta_model(llama, vocab_size=140), llama)
    with pytest.raises(CheckpointError, match=r"another shape"):
        load_weights(build_meta_model(llama, intermediate_size=60), llama, added_tokens="mean")


def resize_what_is_not_sharded(folders, root):
    bert = type(make_model("bert"))
    live = from_pretrained(folders["bert"], auto_class=bert, policy=WrapPolicy(replicate=("cls.predictions.bias",)))
    resize_token_embeddings(live, 140)
    assert live.cls.predictions.bias.shape == (140,)
    tokens = torch.arange(12).reshape(1, 12) * (dist.get_rank() + 1)
    live(input_ids=tokens, labels=tokens).loss.backward()
    gradients = [torch.empty(140) for _ in range(dist.get_world_size())]
    dist.all_gather(gradients, live.cls.predictions.bias.grad)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


CASES: dict[int, dict[str, Any]] = {  # of 131 tokens: a few more, fewer more than there are ranks, and less
    2: {
        "while loading": partial(resized_while_loading, "t5", 140),
        "sharded": partial(resized_when_sharded, "tied", 77),
        **named(the_plan_has_the_new_sizes_and_the_model_is_saved),
        **named(resize_what_is_not_sharded),
    },
    3: {
        "while loading": partial(resized_while_loading, "tied", 132),
        "sharded": partial(resized_when_sharded, "llama", 140),
    },
}


def test_resizing_equals_a_plain_resize_and_does_not_depend_on_the_ranks(folders, tmp_path) -> None:
    drawn = {kind: partial(drawn_rows, kind) for kind in ("llama", "tied")}
    results = [result for n in (2, 3) for result in run_ranks(run_cases, n, CASES[n] | drawn, folders, tmp_path)]
    for kind in drawn:
        assert all(torch.equal(result[kind], results[0][kind]) for result in results), kind
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["vocab_size"] == 140
    saved = type(make_model("tied")).from_pretrained(tmp_path / "saved")
    assert saved.lm_head.weight.shape == (140, 48) and saved.lm_head.weight is saved.model.embed_tokens.weight


def resize_otherwise(folders: dict[str, Path]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    live = loaded_model("llama", folders, mesh=mesh)
    resize_token_embeddings(live, 140)
    check("llama", live, expected("llama", folders["llama"], 140), 140)
    live(**inputs_of(live, torch.ones(1, 4, dtype=torch.int64))).loss.backward()
    with pytest.raises(ConfigError, match=r"have gradients .*Resize before training, then make the optimizer"):
        resize_token_embeddings(live, 150)


def test_replicated_shards_and_refusals(folders: dict[str, Path]) -> None:
    run_ranks(resize_otherwise, 4, folders)


# ---- new models ----

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
