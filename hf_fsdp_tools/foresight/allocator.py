"""PyTorch's caching allocator for CUDA as a model: what a list of allocations takes from the GPU.

The allocator rounds every request, cuts it out of segments that it asks the driver for, and gives a freed block to the
same stream only: rules and constants of `CUDACachingAllocator.cpp` and `AllocatorConfig.h` of PyTorch 2.11 to 2.14. The
address of a new segment, the driver's choice, lies above all earlier ones. No segment goes back to the driver.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from hf_fsdp_tools.foresight.events import Alloc, Event, Free

_UNIT = 512  # `kMinBlockSize`: every block is a multiple
_SMALL = 2**20  # `kSmallSize`: requests up to here are served from the small pool
_SMALL_SEGMENT = 2 * 2**20  # `kSmallBuffer`: size of the small pool's segments
_LARGE_SEGMENT = 20 * 2**20  # `kLargeBuffer`: segment for requests below `kMinLargeAlloc`
_LARGE = 10 * 2**20  # `kMinLargeAlloc`: requests from here on get a segment of their own size …
_LARGE_UNIT = 2 * 2**20  # `kRoundLarge`: … rounded up to a multiple of this
_RANGE = 2**50  # Addresses of an expandable segment


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

    def __init__(self, *, expandable: bool = False) -> None:
        self.allocated = 0  # Bytes of the blocks in use (`allocated_bytes.all.current`)
        self.reserved = 0  # Bytes of all segments (`reserved_bytes.all.current`)
        self._expandable = expandable
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
            self.reserved += wanted
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
        for other in (block.behind, block.before):
            if other is None or other.in_use:
                continue
            block.pool.remove(other)
            low, high = (block, other) if other is block.behind else (other, block)
            low.size += high.size
            low.behind = high.behind
            if high.behind is not None:
                high.behind.before = low
            if low.pool.last is high:
                low.pool.last = low
            block = low
        block.pool.add(block)

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
        self.reserved += missing
        block.size += missing
        pool.last = block
        return block


def replay(*lists: Iterable[Event], expandable: bool = False, again: int = 0) -> tuple[Sequence[int], int]:
    """Run lists of events through an allocator one after the other; the last list is what the result speaks of, which
    runs up to `again` times more, until it takes nothing new from the driver. Return the bytes in use after each of its
    events, and the bytes taken from the driver. A block may be freed in a later list than it was allocated in."""
    allocator = CachingAllocator(expandable=expandable)
    take, give_back = allocator.take, allocator.give_back
    held: dict[int, _Block] = {}
    allocated: list[int] = []
    for number, events in enumerate((*lists, *lists[-1:] * again)):
        before, allocated = allocator.reserved, []
        for event in events:
            if type(event) is Alloc and event.num_bytes:
                held[event.block] = take(event.num_bytes, event.stream)
            elif type(event) is Free and (block := held.pop(event.block, None)) is not None:  # of no bytes
                give_back(block)
            allocated.append(allocator.allocated)
        if number >= len(lists) - 1 and allocator.reserved == before:
            break
    return allocated, allocator.reserved
