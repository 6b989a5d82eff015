"""Long rows: what a rank of context parallelism holds falls with the ranks, and more ranks than heads are refused."""

import copy
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from benchmarks.long_rows import compared
from hf_fsdp_tools import ParallelDims
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from tests._checkpoints import randomize, tiny_config
from tests._dist import named, run_cases, run_ranks
from tests._grids import fast_and_nightly
from tests._noted import LiveBytes

KINDS = {  # with how many tokens the shortest row has
    "llama": 160,
    "llama, chunked loss": 160,
    "llama, packed": 160,
    "gemma3_text, packed": 160,
    "qwen3_moe": 160,
    "gpt2": 160,
    "mamba2": 160,
    "mamba": 20,
    "qwen3_next": 160,
    "qwen3_vl": 160,
}
FAST = ["llama, chunked loss", "gemma3_text, packed", "qwen3_next", "qwen3_vl"]
TIMES = (1, 2, 3, 4)
CHUNK = 16
"""Tokens of one chunk of logits."""


@cache
def plain(kind: str) -> Any:
    config = tiny_config(kind.partition(",")[0], 4)
    text = config.get_text_config()
    text.max_position_embeddings, text.sliding_window = 4096, 8
    auto: Any = AutoModelForImageTextToText if kind == "qwen3_vl" else AutoModelForCausalLM
    torch.manual_seed(0)
    return randomize(auto.from_config(config)).eval()


def batch_of(kind: str, config: Any, length: int) -> dict[str, Any]:
    """A row; in the first half of one for a model of images stands an image."""
    ids = torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(0))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    if "packed" in kind:
        batch["position_ids"] = torch.cat([torch.arange(length // 4)] * 4)[None]
    if "chunked" in kind:
        batch["fused_lm_head"] = True
    if kind == "qwen3_vl":
        eye, side = config.vision_config, 4 * config.vision_config.spatial_merge_size
        batch["image_grid_thw"] = torch.tensor([[1, side, side]])
        of_patch = eye.in_channels * eye.temporal_patch_size * eye.patch_size**2
        batch["pixel_values"] = torch.randn(side * side, of_patch, generator=torch.Generator().manual_seed(0))
        ids[0, length // 2 - 20 : length // 2 - 4] = config.image_token_id
        batch["mm_token_type_ids"] = (ids == config.image_token_id).int()
    return batch


def stepped(model: Any, kind: str, length: int) -> tuple[Any, LiveBytes]:
    model.zero_grad()
    with LiveBytes() as seen:
        loss = model(**batch_of(kind, model.config, length)).loss
        loss.backward()
    return loss.detach(), seen


def most(seen: LiveBytes, tokens: int) -> int:
    """Elements of the largest tensor of so many tokens, or of several experts or heads for each."""
    shapes = (shape for shape in seen.shapes if len(shape) > 1)
    return max(torch.Size(shape).numel() for shape in shapes if any(size and size % tokens == 0 for size in shape))


def bytes_fall_with_the_ranks(kind: str, ranks: int) -> None:
    one, model = plain(kind), copy.deepcopy(plain(kind))
    mesh = ParallelDims(cp_size=ranks).build_mesh("cpu")
    shard_model(model, make_wrap_plan(model), mesh=mesh)
    for each in (one, model) if "chunked" in kind else ():
        if "forward" not in vars(each):
            add_fused_lm_head(each)
    first, last = (KINDS[kind] * times for times in (TIMES[0], TIMES[-1]))
    text, peaks = one.config.get_text_config(), {}
    for length in (KINDS[kind] * times for times in TIMES):
        with (
            patch.object(chunked_logprob, "TOKEN_CHUNK_SIZE", CHUNK),
            patch("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", text.vocab_size),
        ):
            (expected, whole), (loss, own) = (stepped(each, kind, length) for each in (one, model))
        torch.testing.assert_close(loss, expected)
        peaks[length] = whole.peak, own.peak
        of_whole_rows = {(1, length, text.hidden_size), (1, length, text.vocab_size), (length, text.vocab_size)}
        assert not own.shapes & of_whole_rows, (kind, length)
        if "chunked" in kind:
            assert (CHUNK, text.vocab_size) in own.shapes
            assert not own.shapes & {(length // ranks, text.vocab_size), (1, length // ranks, text.vocab_size)}
    largest = most(whole, last), most(own, last // ranks)
    assert largest[1] <= 1.05 * largest[0] / ranks, (kind, largest)
    growth = [peaks[last][each] - peaks[first][each] for each in (0, 1)]
    assert growth[1] < 1.15 * growth[0] / ranks, (kind, peaks)


def rows_that_are_not_padded_need_no_mask() -> None:
    """A collator's mask leaves no word out, and the ranks do not divide the row: causal attention, and windows."""
    length, model = 161, copy.deepcopy(plain("gemma3_text"))
    shard_model(model, make_wrap_plan(model), mesh=ParallelDims(cp_size=2).build_mesh("cpu"))
    given = batch_of("gemma3_text", model.config, length) | {"attention_mask": torch.ones(1, length, dtype=torch.int64)}
    with LiveBytes() as seen:
        loss = model(**given).loss
        loss.backward()
    torch.testing.assert_close(loss.detach(), plain("gemma3_text")(**given).loss.detach())
    assert not [shape for shape in seen.shapes if sum(size >= length for size in shape) > 1]


@fast_and_nightly(lambda kinds, ranks: [*((kind, ranks[0]) for kind in FAST), (FAST[1], ranks[1])], list(KINDS), [2, 4])
def test_bytes_of_a_rank_fall_with_the_ranks(combinations: Any) -> None:
    for ranks in (2, 4):
        cases = {kind: partial(bytes_fall_with_the_ranks, kind, ranks) for kind, of in combinations if of == ranks}
        cases |= named(rows_that_are_not_padded_need_no_mask) if ranks == 2 else {}
        run_ranks(run_cases, ranks, cases)


@pytest.mark.nightly
@pytest.mark.parametrize("documents", [1, 40])
def test_steps_on_a_long_row_are_those_of_one_process(documents: int) -> None:
    """As `benchmarks/long_rows.py` runs on 131,072 tokens."""
    one, *shared = compared(3072, documents, 3, [2, 4])
    assert one["loss apart"] == 0 and [each["ranks"] for each in shared] == [2, 4]
    for each in shared:
        assert each["loss apart"] < 1e-6 and each["weights apart"] < 1e-6, each
