"""Clipping and the optimizer's step: the memory and the traffic of torch's own, as a dry run of it counts them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.muon.matrices import BUCKET_BYTES, NEWTON_SCHULZ_STEPS, newton_schulz_flops
from hf_fsdp_tools.foresight.events import EventWriter, TensorSize, Work
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.sharding.checks import check_kind


@dataclass(frozen=True)
class _Rule:
    """What an optimizer has and does for one shard, in multiples of the shard's bytes."""

    states: int
    touched: float  # Tensors that its kernels read or write, each counted once for a kernel
    temporary: int = 0


OPTIMIZERS: dict[str, tuple[str, _Rule | None]] = {
    "adamw": ("adamw_torch_fused", _Rule(states=2, touched=4)),
    "adamw_foreach": ("adamw_torch", _Rule(states=2, touched=14, temporary=1)),
    "adamw_8bit": ("adamw_torch_8bit", None),
    "muon": ("muon", None),
    "sgd": ("sgd", _Rule(states=0, touched=2)),
    "sgd_momentum": ("sgd --optim_args momentum=0.9", _Rule(states=1, touched=5)),
}
"""By name in `TrainingSetup.optimizer`: `--optim` of transformers' `TrainingArguments`, and the rule, which a test
compares with torch's own optimizers. `adamw_8bit` is torchao's; `muon` is this package's: AdamW, SGD's momentum, and
`write_muon`."""


def optimizer_step(writer: EventWriter, updated: Sequence[TensorSize], setup: TrainingSetup) -> list[int]:
    """Write clipping and one step of the optimizer of a setup, of Muon what each rank does alone; return the bytes of
    each tensor of its state."""
    if setup.optimizer == "muon":
        matrices = [each for each in updated if _matrices(each) is not None]
        others = [each for each in updated if _matrices(each) is None]
        sizes = optimizer_step(writer, others, replace(setup, optimizer="adamw"))
        return sizes + optimizer_step(writer, matrices, replace(setup, optimizer="sgd_momentum"))
    if setup.optimizer == "adafactor":
        check_kind(torch.optim.Adafactor)
    if setup.optimizer not in OPTIMIZERS:
        known = ", ".join(map(repr, OPTIMIZERS))
        raise ConfigError(f"optimizer is {setup.optimizer!r}; it must be one of {known}.")
    sizes = [each.num_bytes for each in updated if each.numel]
    if setup.max_grad_norm is not None:
        writer.phase = "clip"
        writer.work("memory", 2 * sum(sizes), dtype_bytes=4)
    writer.phase = "optimizer"
    rule = OPTIMIZERS[setup.optimizer][1]
    if rule is None:
        states = [size for each in updated if each.numel for size in _states_8bit(each)]
        writer.work("memory", 2 * sum(states) + 3 * sum(sizes), dtype_bytes=1)
        return states
    taken = [writer.take(rule.temporary * size, "temporaries") for size in sizes if rule.temporary]
    writer.work("memory", rule.touched * sum(sizes), dtype_bytes=4)
    writer.free(*taken)
    return [own for own in sizes for _ in range(rule.states)]


def _states_8bit(shard: TensorSize) -> list[int]:
    """torchao's AdamW8bit: two states of a byte per element, each with a scale for each block of 256 and a table; of
    small shards, and of those that no whole blocks make, in the shard's dtype."""
    if shard.numel < 4096 or shard.numel % 256:
        return 2 * [shard.num_bytes]
    return 2 * [shard.numel, 4 * shard.numel // 256, 4 * 256]


def _matrices(updated: TensorSize) -> tuple[int, int, int] | None:
    """(number, rows, columns) of the hidden matrices of a shard, or of a whole parameter, that an optimizer updates."""
    found: tuple[int, int, int] | None = getattr(getattr(updated, "parameter", updated), "matrices", None)
    return found


def write_muon(writer: EventWriter, updated: Sequence[TensorSize], setup: TrainingSetup) -> None:
    """What the ranks do of Muon's step together: matrices travel to their owners, which have about as many operations
    each, are orthogonalised, and travel back, a bucket after the other."""
    ranks, travelling, flops, traffic, largest = setup.num_gpus, 0.0, 0.0, 0.0, 0
    for each in updated:
        if (matrices := _matrices(each)) is None:
            continue
        count, rows, columns = matrices
        flops += count / ranks * newton_schulz_flops(rows, columns)
        traffic += count / ranks * NEWTON_SCHULZ_STEPS * 10 * (rows * columns + min(rows, columns) ** 2)
        largest = max(largest, 2 * rows * columns)
        stacked = getattr(each, "parameter", each).shape[0] * (len(each.shape) > 2)
        is_home = getattr(each, "dim", None) == 0 and stacked and stacked % ranks == 0
        travelling += 0.0 if is_home else 2.0 * count * rows * columns / ranks
    if not flops:
        return
    num_buckets = max(1, math.ceil(travelling / BUCKET_BYTES))
    writer.phase = "optimizer"
    for _ in range(num_buckets):
        block = writer.take(int(4 * travelling / num_buckets) + 3 * largest, "temporaries")
        for copies in (1, setup.dp_replicate_size) if ranks > 1 else ():
            writer.work("all_to_all", copies * travelling / num_buckets, "all_gather", ranks=ranks, axis="all")
        writer.events.append(Work("matmul", flops / num_buckets, traffic / num_buckets, "", "optimizer"))
        writer.free(block)
