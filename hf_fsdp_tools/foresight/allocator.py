"""PyTorch's caching allocator for CUDA as a model: what a list of allocations takes from the GPU.

The allocator rounds every request, cuts it out of segments that it asks the driver for, and gives a freed block to the
same stream only. Near the limit it must give segments back and ask again, for which the GPU stands still.

Source of all rules and constants: `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h` of PyTorch 2.11
to 2.14 (`round_size`, `get_pool`, `get_free_block`, `should_split`, `get_allocation_size`, `free_block`,
`release_cached_blocks`). The address of a new segment is the driver's choice; here each lies above all earlier ones,
which decides between free blocks of the same size only.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_fsdp_tools.foresight.events import Alloc, Event, Free

_UNIT = 512  # `kMinBlockSize`: every block is a multiple
_SMALL = 2**20  # `kSmallSize`: requests up to here are served from the small pool
_SMALL_SEGMENT = 2 * 2**20  # `kSmallBuffer`: size of the small pool's segments
_LARGE_SEGMENT = 20 * 2**20  # `kLargeBuffer`: segment for requests below `kMinLargeAlloc`
_LARGE = 10 * 2**20  # `kMinLargeAlloc`: requests from here on get a segment of their own size …
_LARGE_UNIT = 2 * 2**20  # `kRoundLarge`: … rounded up to a multiple of this
_RANGE = 2**50  # Addresses of an expandable segment


class OutOfMemory(Exception):
    """The device has no room for a block, also after all cached segments were given back."""


class _Block:
    """A part of a segment, in use or free."""

    __slots__ = ("address", "before", "behind", "in_use", "pool", "size")

    def __init__(self, address: int, size: int, pool: "_Pool", before: "_Block | None", behind: "_Block | None"):
        self.address, self.size, self.pool, self.before, self.behind = address, size, pool, before, behind
        self.in_use = False


class _Pool:
    """The blocks of one stream that are small, or those that are large."""

    def __init__(self, is_small: bool, is_expandable: bool) -> None:
        self.least_rest = _UNIT if is_small or is_expandable else _SMALL + _UNIT  # of a block that is split
        self.page = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        self.last: _Block | None = None  # The block at the end of an expandable segment
        self.free: list[tuple[int, int, _Block]] = []  # with size and address, sorted by these

    def add(self, block: _Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


class CachingAllocator:
    """One GPU's allocator. Counts bytes as `torch.cuda.memory_stats` does."""

    def __init__(self, limit: int | None = None, *, expandable: bool = False) -> None:
        self.allocated = 0  # Bytes of the blocks in use (`allocated_bytes.all.current`)
        self.reserved = 0  # Bytes of all segments (`reserved_bytes.all.current`)
        self.retries: list[int] = []  # Segments that were given back each time that the device was full
        self._limit, self._expandable = limit, expandable
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._top = 0

    def take(self, num_bytes: int, stream: str = "compute") -> _Block:
        """A block for `num_bytes`, which only work on `stream` uses."""
        size = -(-num_bytes // _UNIT) * _UNIT or _UNIT
        is_small = size <= _SMALL
        if (pool := self._pools.get((stream, is_small))) is None:
            pool = self._pools[stream, is_small] = _Pool(is_small, self._expandable)
        at = bisect_left(pool.free, (size,))  # the smallest that holds it, of these the one at the lowest address
        if at < len(pool.free):
            block = pool.free.pop(at)[2]
        elif self._expandable:
            block = self._grown(pool, size)
        else:
            wanted = pool.page if size < _LARGE else -(-size // _LARGE_UNIT) * _LARGE_UNIT
            self._reserve(wanted)
            self._top += wanted
            block = _Block(self._top - wanted, wanted, pool, None, None)
        if block.size - size >= pool.least_rest:
            rest = _Block(block.address + size, block.size - size, pool, block, block.behind)
            if block.behind is not None:
                block.behind.before = rest
            block.behind, block.size = rest, size
            pool.last = rest if pool.last is block else pool.last
            pool.add(rest)
        block.in_use = True
        self.allocated += block.size
        return block

    def give_back(self, block: _Block) -> None:
        """Free a block and join it with free neighbours."""
        self.allocated -= block.size
        block.in_use = False
        pool, before, behind = block.pool, block.before, block.behind
        if before is not None and not before.in_use:
            pool.remove(before)
            block = _joined(before, block)
        if behind is not None and not behind.in_use:
            pool.remove(behind)
            block = _joined(block, behind)
        pool.add(block)

    def _grown(self, pool: _Pool, size: int) -> _Block:
        """Map more pages at the end of the pool's only segment (`try_allocate_expandable_block`)."""
        if (block := pool.last) is None:
            block = _Block(self._top, 0, pool, None, None)
            self._top += _RANGE
        elif block.in_use:
            before, block = block, _Block(block.address + block.size, 0, pool, block, None)
            before.behind = block
        else:
            pool.remove(block)
        missing = -(-(size - block.size) // pool.page) * pool.page
        self._reserve(missing)
        block.size += missing
        pool.last = block
        return block

    def _reserve(self, num_bytes: int) -> None:
        if self._limit is not None and self.reserved + num_bytes > self._limit:
            count = 0  # of segments without a block in use, which go back to the driver
            for pool in self._pools.values():
                for *_, block in list(pool.free):
                    if block.before is None and block.behind is None and not self._expandable:
                        pool.remove(block)
                        count += 1
                        self.reserved -= block.size
            self.retries.append(count)
            if self.reserved + num_bytes > self._limit:
                raise OutOfMemory(f"no room for {num_bytes} bytes")
        self.reserved += num_bytes


def _joined(low: _Block, high: _Block) -> _Block:
    """A block that takes in the next."""
    low.size += high.size
    low.behind = high.behind
    if high.behind is not None:
        high.behind.before = low
    if low.pool.last is high:
        low.pool.last = low
    return low


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What the allocator did with a list of events."""

    allocated: Sequence[int]  # Bytes in use after each event
    peak_reserved: int  # Bytes taken from the driver at most
    retried: tuple[tuple[int, int], ...]
    """Where the device was full: index of the event, and how many cached segments were given back for it."""
    out_of_memory_at: int | None
    """Index of the event for which there was no room at all; the lists end there. None if all fitted."""

    @property
    def peak_allocated(self) -> int:
        return max(self.allocated, default=0)


def replay(*lists: Iterable[Event], limit: int | None = None, expandable: bool = False, again: int = 0) -> Replay:
    """Run lists of events through an allocator one after the other; the last list is what the result speaks of, which
    runs up to `again` times more, until it takes nothing new from the driver.

    A block may be freed in a later list than it was allocated in, such as that of the making of the model.
    """
    allocator = CachingAllocator(limit, expandable=expandable)
    take, give_back, retries = allocator.take, allocator.give_back, allocator.retries
    held: dict[int, _Block] = {}
    allocated: list[int] = []
    retried: list[tuple[int, int]] = []
    full_at, most = None, 0
    for number, events in enumerate((*lists, *lists[-1:] * again)):
        before = most = allocator.reserved
        allocated, retried = [], []
        for at, event in enumerate(events):
            if type(event) is Alloc:
                try:
                    if event.num_bytes:
                        held[event.block] = take(event.num_bytes, event.stream)
                except OutOfMemory:
                    full_at = at
                    break
                if retries:
                    retried.append((at, sum(retries)))
                    retries.clear()
                most = max(most, allocator.reserved)
            elif type(event) is Free and (block := held.pop(event.block, None)) is not None:  # of no bytes
                give_back(block)
            allocated.append(allocator.allocated)
        is_settled = allocator.reserved == before and not retried
        if full_at is not None or (number >= len(lists) - 1 and is_settled):
            break
    return Replay(allocated=allocated, peak_reserved=most, retried=tuple(retried), out_of_memory_at=full_at)
