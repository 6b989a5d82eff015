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
from dataclasses import dataclass, field

from hf_fsdp_tools.foresight.events import Alloc, Event, Free

_UNIT = 512  # `kMinBlockSize`: every block is a multiple
_SMALL = 2**20  # `kSmallSize`: requests up to here are served from the small pool
_SMALL_SEGMENT = 2 * 2**20  # `kSmallBuffer`: size of the small pool's segments
_LARGE_SEGMENT = 20 * 2**20  # `kLargeBuffer`: segment for requests below `kMinLargeAlloc`
_LARGE = 10 * 2**20  # `kMinLargeAlloc`: requests from here on get a segment of their own size …
_LARGE_UNIT = 2 * 2**20  # `kRoundLarge`: … rounded up to a multiple of this


class OutOfMemory(Exception):
    """The device has no room for a block, also after all cached segments were given back."""


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment, in use or free."""

    address: int
    size: int
    pool: "_Pool"
    before: "_Block | None" = None
    behind: "_Block | None" = None
    in_use: bool = False


@dataclass(slots=True, eq=False)
class _Pool:
    """The blocks of one stream that are small, or those that are large."""

    is_small: bool
    least_rest: int  # Bytes that a block must be longer than a request to be split
    free: list[tuple[int, int, _Block]] = field(default_factory=list)  # with size and address, sorted by these
    last: _Block | None = None  # The block at the end of an expandable segment

    def add(self, block: _Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def take_best(self, size: int) -> _Block | None:
        """The smallest free block that holds `size` bytes, of these the one at the lowest address."""
        at = bisect_left(self.free, (size,))
        return self.free.pop(at)[2] if at < len(self.free) else None


class CachingAllocator:
    """One GPU's allocator. Counts bytes as `torch.cuda.memory_stats` does."""

    def __init__(self, limit: int | None = None, *, expandable: bool = False) -> None:
        self.allocated = 0  # Bytes of the blocks in use (`allocated_bytes.all.current`)
        self.reserved = 0  # Bytes of all segments (`reserved_bytes.all.current`)
        self.retries: list[int] = []  # Segments that were given back each time that the device was full
        self._limit = limit
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._top = 0

    def take(self, num_bytes: int, stream: str = "compute") -> _Block:
        """A block for `num_bytes`, which only work on `stream` uses."""
        size = -(-num_bytes // _UNIT) * _UNIT or _UNIT
        is_small = size <= _SMALL
        if (pool := self._pools.get((stream, is_small))) is None:
            least = _UNIT if is_small or self._expandable else _SMALL + _UNIT
            pool = self._pools[stream, is_small] = _Pool(is_small, least)
        block = pool.take_best(size)
        if block is None:
            block = self._grow(pool, size) if self._expandable else self._new_segment(pool, size)
        if block.size - size >= pool.least_rest:
            self._split(block, size)
        block.in_use = True
        self.allocated += block.size
        return block

    def give_back(self, block: _Block) -> None:
        """Free a block and join it with free neighbours."""
        self.allocated -= block.size
        block.in_use = False
        pool = block.pool
        if (before := block.before) is not None and not before.in_use:
            pool.remove(before)
            self._join(before, block)
            block = before
        if (behind := block.behind) is not None and not behind.in_use:
            pool.remove(behind)
            self._join(block, behind)
        pool.add(block)

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        wanted = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        if size >= _LARGE:
            wanted = -(-size // _LARGE_UNIT) * _LARGE_UNIT
        self._reserve(wanted)
        block = _Block(self._top, wanted, pool)
        self._top += wanted
        return block

    def _grow(self, pool: _Pool, size: int) -> _Block:
        """Map more pages at the end of the pool's only segment (`try_allocate_expandable_block`)."""
        last = pool.last
        ready = last if last is not None and not last.in_use else None
        page = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        missing = -(-(size - (ready.size if ready else 0)) // page) * page
        self._reserve(missing)
        if last is None:
            last = ready = _Block(self._top, 0, pool)
            self._top += 2**50  # each segment has a range of addresses of its own
        elif ready is None:
            ready = _Block(last.address + last.size, 0, pool)
            ready.before, last.behind = last, ready
        else:
            pool.remove(ready)
        assert ready is not None
        ready.size += missing
        pool.last = ready
        return ready

    def _reserve(self, num_bytes: int) -> None:
        if self._limit is not None and self.reserved + num_bytes > self._limit:
            count = 0  # of segments without a block in use, which go back to the driver
            for pool in self._pools.values():
                for *_, block in list(pool.free):
                    if block.before is None and block.behind is None:
                        pool.remove(block)
                        count += 1
                        self.reserved -= block.size
                        if pool.last is block:
                            pool.last = None
            self.retries.append(count)
            if self.reserved + num_bytes > self._limit:
                raise OutOfMemory(f"no room for {num_bytes} bytes")
        self.reserved += num_bytes

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.pool)
        rest.before, rest.behind = block, block.behind
        if block.behind is not None:
            block.behind.before = rest
        block.behind = rest
        block.size = size
        if block.pool.last is block:
            block.pool.last = rest
        block.pool.add(rest)

    def _join(self, low: _Block, high: _Block) -> None:
        """Let a block take in the next."""
        low.size += high.size
        low.behind = high.behind
        if high.behind is not None:
            high.behind.before = low
        if low.pool.last is high:
            low.pool.last = low


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What the allocator did with a list of events."""

    allocated: Sequence[int]  # Bytes in use after each event
    reserved: Sequence[int]  # Bytes taken from the driver after each event
    retried: tuple[tuple[int, int], ...]
    """Where the device was full: index of the event, and how many cached segments were given back for it."""
    out_of_memory_at: int | None
    """Index of the event for which there was no room at all; the lists end there. None if all fitted."""

    @property
    def peak_allocated(self) -> int:
        return max(self.allocated, default=0)

    @property
    def peak_reserved(self) -> int:
        return max(self.reserved, default=0)


def replay(*lists: Iterable[Event], limit: int | None = None, expandable: bool = False) -> Replay:
    """Run lists of events through an allocator one after the other; the last list is what the result speaks of.

    A block may be freed in a later list than it was allocated in, such as that of the making of the model.
    """
    allocator = CachingAllocator(limit, expandable=expandable)
    held: dict[int, _Block] = {}
    allocated: list[int] = []
    reserved: list[int] = []
    retried: list[tuple[int, int]] = []
    full_at = None
    for events in lists:
        allocated, reserved, retried, full_at = [], [], [], None
        take, give_back = allocator.take, allocator.give_back
        for at, event in enumerate(events):
            if type(event) is Alloc:
                try:
                    if event.num_bytes:
                        held[event.block] = take(event.num_bytes, event.stream)
                except OutOfMemory:
                    full_at = at
                    break
            elif type(event) is Free and (block := held.pop(event.block, None)) is not None:  # of no bytes
                give_back(block)
            if allocator.retries:
                retried.append((at, sum(allocator.retries)))
                allocator.retries.clear()
            allocated.append(allocator.allocated)
            reserved.append(allocator.reserved)
        if full_at is not None:
            break
    return Replay(allocated=allocated, reserved=reserved, retried=tuple(retried), out_of_memory_at=full_at)
