"""Copies in host memory: complete when the call returns, packed and kept, and refused where they do not fit."""

from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from hf_fsdp_tools.saving import copies
from hf_fsdp_tools.saving.copies import copied_transfers, host_copies
from tests._late import LateSideStream, Machine
from tests.api import Transfer, available_bytes, pinned_bytes, write_in_turn

MIB = 2**20


def test_what_an_accelerator_holds_is_copied_when_the_call_returns() -> None:
    """On a stand-in whose copies are late: same dtype and another, any strides, 0-d, empty, and some on the host."""
    with Machine(seed=1) as machine, patch.object(copies, "_BUFFER_BYTES", 512):
        on_device = [
            machine.tensor(40, 30, dtype=torch.float32),
            machine.tensor(40, 30, dtype=torch.bfloat16).t(),
            machine.tensor(64, 30, dtype=torch.float32)[::2],
            machine.tensor(100, dtype=torch.int64),
            machine.tensor(1, dtype=torch.float32)[0],
            machine.tensor(0, 3, dtype=torch.float32),
        ]
        sources = [*on_device, torch.zeros(7, 5)]
        generator = torch.Generator().manual_seed(1)
        for tensor in sources:
            machine.raw(tensor).copy_(torch.randint(-99, 99, tensor.shape, generator=generator))
        dtypes = [torch.bfloat16 if tensor.is_floating_point() else tensor.dtype for tensor in sources]
        for wanted in (dtypes, [tensor.dtype for tensor in sources]):
            expected = [machine.raw(t).to(dtype).clone() for t, dtype in zip(sources, wanted, strict=True)]
            queued = machine.raw(on_device[0]).clone() + 1  # by the program, and not done yet
            machine.stream(1).add(partial(machine.raw(on_device[0]).copy_, queued), late_s=0.02)
            expected[0] = queued.to(wanted[0])
            machine.set_device(1)
            with patch.object(copies, "side_stream_for", lambda _: LateSideStream(machine, 1)):
                made = host_copies(list(zip(sources, wanted, strict=True)))
            for tensor in sources:
                machine.raw(tensor).fill_(1)  # the next step
            assert [copy.dtype for copy in made] == wanted and all(copy.is_contiguous() for copy in made)
            assert all(map(torch.equal, made, expected))
            assert set(machine.pinned_bytes) == {512} and machine.pinned_alive == machine.copies_under_way == 0
            for tensor, values in zip(sources, expected, strict=True):
                machine.raw(tensor).copy_(values)
        assert machine.named.count(0) == 0, "nothing was made on device 0"


def test_copies_are_plain_memory_also_in_inference_mode_and_pinned_memory_is_rounded() -> None:
    source = torch.rand(77)
    with torch.inference_mode():
        (made,) = host_copies([(source, torch.float32)])
    assert torch.equal(made, source)
    made.add_(1)
    asked = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:16"}
    assert [pinned_bytes(n * MIB, {}) // MIB for n in (0, 1, 12, 33, 300)] == [0, 1, 16, 64, 512]
    assert [pinned_bytes(n * MIB, asked) // MIB for n in (0, 1, 12, 33, 300)] == [0, 1, 16, 33, 300]


def test_copied_transfers_write_the_same_bytes(tmp_path: Path) -> None:
    """Rows, columns, a cast, and what lies in memory in another order than in the file."""
    memory = torch.arange(48.0).reshape(6, 8)
    whole = Transfer(file=tmp_path / "f", start=0, dtype=torch.bfloat16, strides=(8, 1), memory=memory)
    left = Transfer(file=tmp_path / "f", start=96, dtype=torch.float32, strides=(8, 1), memory=memory[:, :3])
    right = Transfer(file=tmp_path / "f", start=108, dtype=torch.float32, strides=(8, 1), memory=memory[:, 3:])
    turned = Transfer(file=tmp_path / "f", start=288, dtype=torch.float32, strides=(1, 6), memory=memory)
    (tmp_path / "f").write_bytes(bytes(480))
    transfers = copied_transfers([whole, left, right, turned])
    expected = memory.bfloat16().view(torch.uint8).numpy().tobytes() + memory.numpy().tobytes()
    expected += memory.t().contiguous().numpy().tobytes()
    memory.zero_()
    stats = write_in_turn(transfers)
    assert (tmp_path / "f").read_bytes() == expected
    assert stats.num_bytes == len(expected) and stats.staging_bytes == 0


LIMITS = {
    "no container": ({}, 1000 * 1024),
    "cgroups 2": (
        {"memory.max": "900000", "memory.current": "800000", "memory.stat": "inactive_file 50000\n"},
        150_000,
    ),
    "cgroups 2 without a limit": ({"memory.max": "max", "memory.current": "8", "memory.stat": "anon 1\n"}, 1000 * 1024),
    "cgroups 1": (
        {
            "memory/memory.limit_in_bytes": "900000",
            "memory/memory.usage_in_bytes": "950000",
            "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 60000\n",
        },
        10_000,
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_is_available_is_the_least_of_machine_and_container(tmp_path: Path, name: str) -> None:
    files, expected = LIMITS[name]
    for file, text in files.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with patch("psutil.virtual_memory", lambda: Mock(available=1000 * 1024)):
        assert available_bytes(tmp_path) == expected
