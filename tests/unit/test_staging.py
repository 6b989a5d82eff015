"""Staging buffers: bounded, in turn, and never given out while somebody copies from them."""

from concurrent.futures import ThreadPoolExecutor

import torch

from hf_fsdp_tools.checkpoint.io.staging import Ring, Staging


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
