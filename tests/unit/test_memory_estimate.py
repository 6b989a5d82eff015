"""Estimates of memory: what they say, whether a training fits, and that what-ifs need no other dry run."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import BertConfig, LlamaConfig

from hf_fsdp_tools import ConfigError, estimate_memory
from hf_fsdp_tools.foresight.allocator import CachingAllocator, replay
from hf_fsdp_tools.foresight.memory import MemoryEstimate
from hf_fsdp_tools.steps import build_meta_model
from tests.api import Alloc, Free, gpu_named

GPU = gpu_named("a100-80gb")


@pytest.fixture(scope="module")
def config() -> LlamaConfig:
    sizes = dict(hidden_size=256, intermediate_size=700, num_hidden_layers=4, vocab_size=8000)
    return LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def estimate(config: LlamaConfig) -> MemoryEstimate:
    return estimate_memory(
        config, num_processes=8, gpu="a100-80gb", per_device_train_batch_size=2, max_length=512, loss="full"
    )


def test_the_parts_at_the_peak_make_the_peak(estimate: MemoryEstimate) -> None:
    assert sum(estimate.at_peak.values()) == estimate.peak_allocated
    assert min(estimate.at_peak.values()) > 0
    outside = estimate.total - estimate.peak_reserved
    assert estimate.peak_allocated <= estimate.total_expandable - outside != estimate.peak_reserved
    # two states for each shard; 256 bytes of the parameters are buffers
    assert estimate.at_peak["optimizer"] == 2 * (estimate.at_peak["parameters"] - 256)
    # two logits of fp32 and one of bf16, of 2 x 512 tokens, stand at the peak
    assert estimate.at_peak["logits and loss"] >= 10 * 2 * 512 * 8000
    assert (estimate.peak_phase, estimate.peak_unit) in {("loss", ""), ("backward", "")}


def test_the_loss_is_made_in_pieces_where_words_are_predicted() -> None:
    """As the recipes train it; in whole logits where it is asked for, and for every other model."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100_000)
    shape = dict(per_device_train_batch_size=4, max_length=512)
    made, chunked, whole = (
        estimate_memory(LlamaConfig(**sizes), loss=loss, **shape) for loss in (None, "chunked", "full")
    )
    assert made == chunked and made.setup.loss == "chunked"
    assert whole.setup.loss == "full" and made.peak_allocated < whole.peak_allocated / 2
    bert = BertConfig(**sizes, architectures=["BertForMaskedLM"])
    assert estimate_memory(bert, **shape).setup.loss == "full"


def sized(config: LlamaConfig, num_bytes: int) -> MemoryEstimate:
    gpu = replace(GPU, memory_bytes=num_bytes)
    return estimate_memory(config, num_processes=8, gpu=gpu, per_device_train_batch_size=2, max_length=512, loss="full")


def test_a_full_gpu_needs_segments_that_grow_and_a_fuller_one_stops(
    config: LlamaConfig, estimate: MemoryEstimate
) -> None:
    outside = estimate.total - estimate.peak_reserved
    exact = sized(config, estimate.total)
    assert exact.fits and exact.spare_bytes == 0
    assert "fits barely: 0 B of 1.3 GB free" in str(exact)
    least = min(estimate.total, estimate.total_expandable)
    assert outside + estimate.peak_allocated <= least < estimate.total
    tight = sized(config, least)
    assert tight.fits and tight.spare_bytes < 0
    assert " only with PYTORCH_ALLOC_CONF=expandable_segments:True, which takes " in str(tight)
    full = sized(config, least - 1)
    assert not full.fits and full.spare_bytes < 0
    assert "does not fit" in str(full)


def test_what_has_changed_is_estimated_anew(tmp_path: Path) -> None:
    """A configuration, its file and a model, changed in place."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=100, num_attention_heads=2
    )
    small = estimate_memory(config, max_length=8).num_params
    config.num_hidden_layers = 3
    large = estimate_memory(config, max_length=8).num_params
    assert large > small
    model = build_meta_model(config)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    models = []
    for length in (2, 1):
        config.num_hidden_layers = length
        config.save_pretrained(tmp_path)
        models.append(estimate_memory(tmp_path, max_length=8).num_params)
    assert models == [(small + large) // 2, small] and estimate_memory(model, max_length=8).num_params == small
    model.lm_head = nn.Linear(64, 50, bias=False, device="meta")
    assert estimate_memory(model, max_length=8).num_params == small - 50 * 64
    assert estimate_memory(deepcopy(config), max_length=8).num_params == small


def test_what_ifs(config: LlamaConfig) -> None:
    changes: list[dict[str, Any]] = [
        dict(num_processes=64, gpu="h100"),
        dict(num_processes=64, dp_replicate_size=8, gradient_accumulation_steps=2),
        dict(offload_params=True),
        dict(optimizer="sgd", max_grad_norm=None),
        dict(reshard_after_forward=False),
        *(dict(gradient_accumulation_steps=count) for count in (4, 10**6)),
    ]
    more = [
        estimate_memory(config, **dict(num_processes=8, per_device_train_batch_size=2, max_length=512) | each)
        for each in changes
    ]
    assert more[-1].peak_allocated == more[-2].peak_allocated and more[-1].peak_reserved == more[-2].peak_reserved
    assert more[2].host_bytes > 0 and more[2].at_peak["parameters"] == 256  # buffers
    assert more[0].at_peak["parameters"] < more[1].at_peak["parameters"]
    far = [
        dict(num_processes=4096, dp_replicate_size=copies, per_device_train_batch_size=2, max_length=512)
        for copies in (1, 8)
    ]
    said = [str(estimate_memory(config, **each)) for each in far]
    assert ["torch's fully_shard" in text for text in said] == [True, False], "the copies of HSDP are its cure"
    with pytest.raises(ConfigError, match=r"'train_batch_size': did you mean per_device_train_batch_size"):
        estimate_memory(config, train_batch_size=2)


MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # what is left of a segment of its own is no more than 1 MiB, so the block is not split
        (11 * MIB, 12 * MIB, 12 * MIB),
        (30 * MIB + 1, 30 * MIB + 512, 32 * MIB),
    ],
)
def test_a_request_takes_a_block_and_a_segment(num_bytes, allocated, reserved):
    allocator = CachingAllocator()
    allocator.take(num_bytes)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_the_smallest_free_block_is_taken_and_split():
    allocator = CachingAllocator()
    large, small = allocator.take(40 * MIB), allocator.take(30 * MIB)
    allocator.give_back(large)
    allocator.give_back(small)
    taken = allocator.take(12 * MIB)
    assert taken is small and taken.size == 12 * MIB
    assert allocator.take(18 * MIB).address == small.address + 12 * MIB  # the rest of it
    assert allocator.reserved == 70 * MIB


def test_a_freed_block_serves_its_own_stream_only():
    allocator = CachingAllocator()
    allocator.give_back(allocator.take(20 * MIB, "copy_in"))
    allocator.take(20 * MIB, "compute")
    assert allocator.reserved == 40 * MIB
    allocator.take(20 * MIB, "copy_in")
    assert allocator.reserved == 40 * MIB


def test_expandable_segments_grow_where_others_would_be_added():
    def events():
        for number in range(10):  # each block is longer than all that was freed
            yield Alloc(number, (20 + 4 * number) * MIB, "activations", "")
            yield Free(number)

    assert replay(events())[1] == sum(20 + 4 * number for number in range(10)) * MIB
    assert replay(events(), expandable=True)[1] == 60 * MIB
