"""What the usual rows and calls do not show where ranks share rows or layers: angles that follow the length, logits of
some tokens, odd rows with a count, copies, labels that are no words, padded routers, and models with real weights."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import ConfigError, ParallelDims
from hf_fsdp_tools.steps import make_wrap_plan, parallelize_model, shard_model
from tests._checkpoints import full, randomize, tiny_config
from tests._dist import run_cases, run_ranks

CP, TP = ParallelDims(cp_size=2), ParallelDims(tp_size=2)
SIZES = {"vocab_size": 132, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5], "original_max_position_embeddings": 11}
ANGLES = {
    "dynamic": transformers.LlamaConfig(
        **SIZES,
        max_position_embeddings=8,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    ),
    "longrope": transformers.Phi3Config(
        **SIZES,
        original_max_position_embeddings=11,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS},
    ),
}


@cache
def plain(kind: str) -> Any:
    config = ANGLES.get(kind) or tiny_config(kind, 2)
    if kind.startswith("qwen3_omni"):
        return randomize(transformers.Qwen3OmniMoeThinkerForConditionalGeneration._from_config(config)).eval()
    return randomize(AutoModelForCausalLM.from_config(config)).eval()


def shared(kind: str, dims: ParallelDims) -> Any:
    """The same model with real weights, made by the public steps."""
    model, mesh = copy.deepcopy(plain(kind)), dims.build_mesh("cpu")
    parallelize_model(model, mesh)
    return shard_model(model, make_wrap_plan(model), mesh=mesh)


def words(length: int) -> torch.Tensor:
    return torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(1))


def same_gradients(model: Any, one: Any, times: int = 1, **batch: Any) -> None:
    """After so many passes."""
    losses = []
    for each in (model, one):
        each.zero_grad()
        for _ in range(times):
            losses.append(each(**batch, use_cache=False).loss)
            losses[-1].backward()
    losses = losses[::times]
    torch.testing.assert_close(losses[0].detach(), losses[1].detach())
    for name, parameter in model.named_parameters():
        found, expected = parameter.grad, one.get_parameter(name).grad  # towers of images have none
        assert (found is None) == (expected is None), name
        if found is not None:
            torch.testing.assert_close(full(found), expected, rtol=1e-4, atol=1e-6, msg=name)


def angles_that_follow_the_length() -> None:
    for kind in ANGLES:
        model = shared(kind, CP)
        for length in (11, 12):  # of 11 words, longrope takes short angles, and of 12 long ones
            same_gradients(model, plain(kind), input_ids=words(length), labels=words(length))


def logits_of_some_tokens() -> None:
    model, ids = shared("llama", CP), words(9)
    for kept in (1, 3, 6, torch.tensor([2, 5])):
        found, expected = (
            m(input_ids=ids, use_cache=False, logits_to_keep=kept).logits for m in (model, plain("llama"))
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="logits_to_keep is for passes without labels"):
        model(input_ids=ids, labels=ids, logits_to_keep=2)


def masks_of_ones_own() -> None:
    """Masks have four dimensions, in both dtypes: two documents in an odd row, and a count, as every Trainer sends."""
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    seen[4:, :4] = False
    batch = {"input_ids": words(9), "labels": words(9), "num_items_in_batch": torch.tensor(7)}
    for mask in (seen, torch.where(seen, 0.0, torch.finfo(torch.float32).min)):
        own = mask.expand(2, 1, 9, 9)
        same_gradients(shared("llama", CP), plain("llama"), **batch, attention_mask=own)


def routers_of_padded_rows() -> None:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 7:] = 0
    options = {"attention_mask": mask, "output_router_logits": True, "use_cache": False}
    found, expected = (m(input_ids=words(9), **options) for m in (shared("qwen3_moe", CP), plain("qwen3_moe")))
    torch.testing.assert_close(found.router_logits, expected.router_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)


def labels_that_are_no_words() -> None:
    labels = words(9)
    labels[0, 3] = plain("llama").config.vocab_size + 5
    with pytest.raises(RuntimeError, match="a label is none of the"):
        shared("llama", TP).train()(input_ids=words(9), labels=labels)


def real_weights_that_see_a_part() -> None:
    """The activation function of Apertus, and norms of queries and keys of Qwen3-Omni, of which no rule of their plans
    speaks."""
    for kind in ("apertus", "qwen3_omni_moe_thinker"):
        model = shared(kind, TP)
        for times in (1, 2):  # what has accumulated is not summed again
            same_gradients(model, plain(kind), times, input_ids=words(9), labels=words(9))


def test_what_usual_rows_do_not_show() -> None:
    cases = (
        angles_that_follow_the_length, logits_of_some_tokens, masks_of_ones_own, routers_of_padded_rows,
        labels_that_are_no_words, real_weights_that_see_a_part,
    )  # fmt: skip
    run_ranks(run_cases, 2, cases)
