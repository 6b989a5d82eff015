"""Clipping and the optimizer's step: the memory and the traffic of torch's own, as a dry run of it counts them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.events import EventWriter, TensorSize, Work
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.sharding.checks import check_kind
from hf_fsdp_tools.sharding.matrices import BUCKET_BYTES, NEWTON_SCHULZ_STEPS, newton_schulz_flops


@dataclass(frozen=True)
class _Rule:
    """What an optimizer has and does for one shard, in multiples of the shard's bytes."""

    states: int
    touched: float  # Tensors that its kernels read or write, each counted once for a kernel
    temporary: int = 0
    counter: int = 0  # Bytes of its counter of steps, where that is on the device


OPTIMIZERS: dict[str, tuple[str, _Rule | None]] = {
    "adamw": ("adamw_torch_fused", _Rule(states=2, touched=4, counter=4)),
    "adamw_foreach": ("adamw_torch", _Rule(states=2, touched=14, temporary=1)),
    "adamw_8bit": ("adamw_torch_8bit", None),
    "muon": ("muon", None),
    "sgd": ("sgd", _Rule(states=0, touched=2)),
    "sgd_momentum": ("sgd --optim_args momentum=0.9", _Rule(states=1, touched=5)),
}
"""By name in `TrainingSetup.optimizer`: `--optim` of transformers' `TrainingArguments`, and the rule, which a test
compares with torch's own optimizers. `adamw_8bit` is torchao's; `muon` is this package's: AdamW, SGD's momentum, and
`write_muon`."""

_SMALLEST_8BIT = 4096  # Elements below which torchao keeps its state in the shard's dtype (`_AdamBase._new_buffer`)
_BLOCK_8BIT = 256  # Elements with one fp32 scale (`block_size`); shards of other multiples stay whole too


def optimizer_step(writer: EventWriter, updated: Sequence[TensorSize], setup: TrainingSetup) -> list[int]:
    """Write clipping and one step of the optimizer of a setup, of Muon what each rank does alone; return the bytes of
    each tensor of its state."""
    if setup.optimizer == "muon":
        matrices = [each for each in updated if matrices_in(each) is not None]
        others = [each for each in updated if matrices_in(each) is None]
        return [
            *optimizer_step(writer, others, replace(setup, optimizer="adamw")),
            *optimizer_step(writer, matrices, replace(setup, optimizer="sgd_momentum")),
        ]
    if setup.optimizer == "adafactor":
        check_kind(torch.optim.Adafactor)
    if setup.optimizer not in OPTIMIZERS:
        known = ", ".join(map(repr, OPTIMIZERS))
        raise ConfigError(f"optimizer is {setup.optimizer!r}; it must be one of {known}.")
    sizes = [each.num_bytes for each in updated if each.numel]
    if not sizes:
        return []
    if setup.max_grad_norm is not None:
        writer.phase = "clip"
        norms = [writer.take(4, "temporaries") for _ in sizes]
        writer.work("memory", 2 * sum(sizes), dtype_bytes=4)
        writer.free(*norms)
    writer.phase = "optimizer"
    rule = OPTIMIZERS[setup.optimizer][1]
    if rule is None:
        states = [_states_8bit(each) for each in updated if each.numel]
        writer.work("memory", 2 * sum(map(sum, states)) + 3 * sum(sizes), dtype_bytes=1)
        return [size for each in states for size in each]
    taken = [writer.take(rule.temporary * size, "temporaries") for size in sizes if rule.temporary]
    writer.work("memory", rule.touched * sum(sizes), dtype_bytes=4)
    writer.free(*taken)
    return [size for own in sizes for size in (*[rule.counter] * (rule.counter > 0), *[own] * rule.states)]


def _states_8bit(shard: TensorSize) -> list[int]:
    """torchao's AdamW8bit: two states of a byte per element, each with a scale for each block and a table of 256."""
    if shard.numel < _SMALLEST_8BIT or shard.numel % _BLOCK_8BIT:
        return 2 * [shard.num_bytes]
    return 2 * [shard.numel, 4 * shard.numel // _BLOCK_8BIT, 4 * 256]


def matrices_in(updated: TensorSize) -> tuple[int, int, int] | None:
    """(number, rows, columns) of the hidden matrices of a shard, or of a whole parameter, that an optimizer updates."""
    found: tuple[int, int, int] | None = getattr(getattr(updated, "parameter", updated), "matrices", None)
    return found


def write_muon(writer: EventWriter, updated: Sequence[TensorSize], setup: TrainingSetup) -> None:
    """What the ranks do of Muon's step together: matrices travel to their owners, which have about as many operations
    each, are orthogonalised, and travel back, a bucket after the other."""
    ranks = setup.num_gpus
    sizes: dict[tuple[int, int], float] = {}
    travelling = 0.0
    for each in updated:
        if (matrices := matrices_in(each)) is None:
            continue
        count, rows, columns = matrices
        sizes[rows, columns] = sizes.get((rows, columns), 0.0) + count / ranks
        stacked, over = getattr(each, "parameter", each).shape[0] * (len(each.shape) > 2), getattr(each, "ranks", ranks)
        is_home = getattr(each, "dim", None) == 0 and stacked and stacked % over == 0 and over == ranks
        travelling += 0.0 if is_home else 2.0 * count * rows * columns / ranks
    num_buckets = max(1, math.ceil(travelling / BUCKET_BYTES))
    largest = max((2 * rows * columns for rows, columns in sizes), default=0)
    back = travelling * max(setup.dp_replicate_size, 1)
    writer.phase = "optimizer"
    for at in range(num_buckets if sizes else 0):
        block = writer.take(int(4 * travelling / num_buckets) + 3 * largest, "temporaries")
        if at == 0 and ranks > 1:
            writer.work("all_to_all", travelling / num_buckets, "all_gather", ranks=ranks, axis="all")
        if at + 1 < num_buckets and ranks > 1:
            writer.work("all_to_all", travelling / num_buckets, "all_gather", ranks=ranks, axis="all")
        for (rows, columns), number in sizes.items():
            own, short = number / num_buckets, min(rows, columns)
            flops = own * newton_schulz_flops(rows, columns)
            moved = own * NEWTON_SCHULZ_STEPS * 2 * (5 * rows * columns + 5 * short**2)
            writer.events.append(Work("matmul", flops, moved, "", "optimizer"))
        if ranks > 1:
            writer.work("all_to_all", back / num_buckets, "all_gather", ranks=ranks, axis="all")
        writer.free(block)
    writer.phase = "forward"
