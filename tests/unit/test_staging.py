"""Staging buffers: bounded, in turn, and never given out while somebody copies from them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hf_fsdp_tools.checkpoint.reader import read_transfers
from hf_fsdp_tools.checkpoint.slices import View
from hf_fsdp_tools.checkpoint.staging import Ring, Staging
from hf_fsdp_tools.checkpoint.transfer import Transfer


class Copy:
    """Stands for an event of a stream: notes in what order it was waited for."""

    def __init__(self, name: str, waited: list[str]) -> None:
        self.name, self.waited = name, waited

    def synchronize(self) -> None:
        self.waited.append(self.name)


def test_a_buffer_comes_back_only_after_the_copy_from_it() -> None:
    waited: list[str] = []
    made: list[torch.Tensor] = []

    def make() -> torch.Tensor:
        made.append(torch.empty(4))
        return made[-1]

    ring = Ring(make, 2)
    given = []
    for name in "abcde":
        given.append(ring.next())
        ring.copied_when(Copy(name, waited))
    assert [id(b) for b in given] == [id(made[i % 2]) for i in range(5)] and len(made) == 2
    assert waited == ["a", "b", "c"]  # one copy runs while the other buffer is filled
    ring.drain()
    assert waited == ["a", "b", "c", "d", "e"]


def test_a_buffer_that_nobody_copies_from_is_not_waited_for() -> None:
    ring = Ring(lambda: torch.empty(4), 1)
    assert ring.next() is ring.next()
    ring.drain()


def test_each_thread_has_its_own_buffers() -> None:
    staging = Staging(num_bytes=100, device=None)
    with ThreadPoolExecutor(3) as pool:
        buffers = list(pool.map(lambda _: staging.next_buffer(), range(30)))
    distinct = {buffer.data_ptr() for buffer in buffers}
    assert 1 <= len(distinct) <= 3 and staging.allocated_bytes == 100 * len(distinct)
    seen: list[torch.Tensor] = []
    staging.next_buffer()
    staging.hand_over(torch.ones(3), seen.append)
    assert torch.equal(seen[0], torch.ones(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_files_reach_a_gpu(tmp_path: Path, dtype: torch.dtype) -> None:
    """More bytes than all buffers hold, every second column, cast on the way."""
    tensor = torch.randn(4096, 512).to(torch.bfloat16)
    file = tmp_path / "stored.bin"
    file.write_bytes(tensor.view(torch.uint8).numpy().tobytes())
    memory = torch.zeros(4096, 256, dtype=dtype, device="cuda")
    stored = View(offset=0, length=(4096, 256), strides=(512, 2))
    transfer = Transfer(key="x", file=file, offset=0, dtype=torch.bfloat16, stored=stored, memory=memory)
    stats = read_transfers([transfer], staging_bytes=2**20)
    assert torch.equal(memory.cpu(), tensor[:, ::2].to(dtype)) and stats.staging_bytes <= 2**20
