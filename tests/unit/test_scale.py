"""A rank's own work follows its share: what it plans, reads and checks among many ranks, counted and not timed."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests._dist import fake_ranks
from tests.api import (
    Limits,
    PieceTensor,
    StoredTensor,
    as_dtensor,
    band_of,
    cut_batches,
    transfer_of,
    views_into,
)


def test_neighbours_read_long_runs_of_thin_shards(tmp_path: Path) -> None:
    """Qwen3-235B's down projections on 512 ranks: 128 runs of 24 KB for each; eight together read 16 of 197 KB each."""
    fake_ranks(ranks := 512, rank=171)
    mesh, shape = init_device_mesh("cpu", (ranks,)), (128, 4096, 1536)
    part = torch.empty(128, 4096 // ranks, 1536, dtype=torch.bfloat16)
    weight = as_dtensor(part, DTensor.from_local(part.to("meta"), mesh, [Shard(1)], run_check=False))
    file = StoredTensor(
        key="w", file=tmp_path, dtype=torch.bfloat16, shape=shape, offset=0, num_bytes=part.nbytes * ranks
    )
    band = band_of(weight, stored := PieceTensor.named("w", shape, torch.bfloat16), 2)
    assert band is not None and band.ranks == tuple(range(168, 176))
    places, moves = band.begin(171)
    assert len(moves) == 14 and sum(memory.numel() for memory, *_ in places) == part.numel()
    reads = [
        transfer_of(file, view, to) for memory, _, box in places for _, view, to in views_into(memory, stored, box)
    ]
    limits = Limits(request_bytes=2**23, buffer_bytes=2**23, host_gap_bytes=0, device_gap_bytes=0)
    batches = list(cut_batches(reads, limits, on_device=lambda memory: False))
    assert len(batches) == 16 and sum(batch.num_bytes for batch in batches) == part.nbytes
    wide = torch.empty(128, 4096 // 8, 1536, dtype=torch.bfloat16, device="meta")
    fine = DTensor.from_local(wide, init_device_mesh("cpu", (64, 8)), [Replicate(), Shard(1)], run_check=False)
    assert band_of(fine, stored, 2) is None, "a run of 1.5 MB"
