"""A rank's own work follows its share: what it plans, reads and checks among many ranks, counted and not timed."""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_fsdp_tools import CheckpointError
from hf_fsdp_tools.loading.formats import dcp as dcp_format
from tests._dist import fake_ranks
from tests.api import (
    METADATA,
    Box,
    Exchange,
    Limits,
    Part,
    Piece,
    PieceTensor,
    StoredTensor,
    View,
    as_dtensor,
    assign_owners,
    band_of,
    check_dcp,
    cut_batches,
    holders_of,
    patched,
    plan_buckets,
    refuse_damage,
    slice_view,
    transfer_of,
    views_into,
)

RANKS = 64


def calls_of(work: Callable[[], object]) -> int:
    """How many functions a piece of work calls, of Python's and of C's."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def write_metadata(folder: Path, chunks: int) -> Path:
    folder.mkdir(exist_ok=True)
    entries, places = {}, {}
    for key in ("exp_avg", "exp_avg_sq"):
        offsets = [torch.Size((8 * i, 0)) for i in range(chunks // 2)]
        entries[key] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(),
            torch.Size((4 * chunks, 3)),
            [dcp.ChunkStorageMetadata(offset, torch.Size((8, 3))) for offset in offsets],
        )
        places |= {dcp.MetadataIndex(key, o, i): _StorageInfo(f"__{i}_0.distcp", 0, 96) for i, o in enumerate(offsets)}
    for i in range(chunks // 2):
        (folder / f"__{i}_0.distcp").write_bytes(bytes(96))
    content = dcp.Metadata(entries, storage_data=places)  # type: ignore[arg-type]
    (folder / METADATA).write_bytes(pickle.dumps(content))
    return folder


def test_a_chunk_is_checked_in_few_steps_and_a_folder_once(tmp_path: Path) -> None:
    few, many = (write_metadata(tmp_path / str(n), n) for n in (64, 128))
    steps = [calls_of(lambda folder=folder: check_dcp(folder)) for folder in (few, many)]
    assert steps[1] - steps[0] < 64 * 150, "calls for 64 chunks more; by pickletools there were 1,000 for each"
    assert calls_of(lambda: check_dcp(many)) < 200, "it is as it was; a thread that watches the storage may begin"
    (few / METADATA).write_bytes(b"\x80\x02cos\nsystem\n.")
    with pytest.raises(CheckpointError, match=r"os\.system is nothing that DCP writes"):
        check_dcp(few)
    folder = write_metadata(tmp_path / "optimizer_0", 64)
    with patch.object(dcp_format, "_read_metadata", side_effect=dcp_format._read_metadata) as read:
        refuse_damage(tmp_path)
        assert check_dcp(folder) == {key: (256, 3) for key in ("exp_avg", "exp_avg_sq")} and read.call_count == 1
        (folder / "__5_0.distcp").unlink()
        with pytest.raises(CheckpointError, match=r"__5_0\.distcp: is not there"):
            refuse_damage(tmp_path)


def test_one_rank_of_a_node_checks_for_the_others(tmp_path: Path) -> None:
    fake_ranks(RANKS, rank=3)
    write_metadata(tmp_path / "optimizer_0", 64)
    for local in ("0", "3"):
        here = patch.dict(os.environ, {"LOCAL_RANK": local})
        with here, patched(check_dcp=(check := Mock())):
            refuse_damage(tmp_path)
        assert check.called == (local == "0")


def piece_of(expert: int, shape: tuple[int, int, int]) -> Piece:
    _, rows, columns = shape
    view = View(offset=expert * rows * columns, length=(rows, columns), strides=(columns, 1))
    return Piece(box=Box.whole((rows, columns)), source="experts", view=view)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_only_boxes_that_a_piece_meets_are_looked_at(dim: int) -> None:
    """Experts on dimension 0 are on one rank each; split within, they are cut alike, and that is worked out once."""
    fake_ranks(ranks := RANKS, rank=3)
    shape, mesh = (ranks, 2 * ranks, ranks), init_device_mesh("cpu", (ranks,))
    part = torch.empty([n // ranks if d == dim else n for d, n in enumerate(shape)], device="meta")
    layers = {layer: DTensor.from_local(part, mesh, [Shard(dim)], run_check=False) for layer in range(2)}
    held = holders_of(layers, ranks)
    assert held[0] is held[1], "tensors that are sharded alike share what is worked out"
    pieces = [(layer, piece_of(expert, shape)) for layer in layers for expert in range(ranks)]
    tested = Mock(side_effect=slice_view)
    with patched(slice_view=tested):
        ownership = assign_owners(pieces, list(held.values()), ranks, 2**20)
    assert tested.call_count == ranks
    spreads = [matrix.arrival.spread for matrix in ownership.matrices]
    assert {len(spread) for spread in spreads} == {1 if dim == 0 else ranks}
    assert (len(set(map(id, spreads))) == 1) == (dim > 0), "what is cut alike is there once"
    by_all = [(part, each) for box, each in held[0] for part, _ in slice_view(pieces[5][1].view, shape, box)]
    assert spreads[ranks + 5] == by_all
    assert (dim == 0) == all(m.is_home for m in ownership.matrices)
    wanted = {str(i): (Box.whole(shape[1:]), torch.float32) for i in range(len(pieces))}
    (bucket,) = plan_buckets((0,), wanted, lambda name: spreads[int(name)], ranks, 2**30)
    assert len(bucket.arrivals) == len(pieces), "an entry for each tensor, not for each rank"
    own = {each.name: [box for box, _ in each.parts(3)] for each in bucket.arrivals}
    assert sum(map(len, own.values())) == (2 if dim == 0 else len(pieces))
    make = lambda box: Part(name="", box=box, data=torch.zeros(box.length), dtype=torch.float32)  # noqa: E731
    parts = {name: list(map(make, boxes)) for name, boxes in own.items()}
    with patch.object(dist, "batch_isend_irecv", return_value=[]) as sent:
        Exchange(bucket.arrivals, parts, torch.device("cpu"))
    assert len(sent.call_args.args[0]) == 1, "one message to the rank that gets them"


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
