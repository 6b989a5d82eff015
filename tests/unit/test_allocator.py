"""The caching allocator as a model: rounding, pools, segments, splitting, best fit, merging, streams, a full device."""

import pytest

from hf_fsdp_tools.foresight.allocator import CachingAllocator, replay
from tests.api import Alloc, Free

MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # what is left of a segment of its own is no more than 1 MiB, so the block is not split
        (11 * MIB, 12 * MIB, 12 * MIB),
        (30 * MIB + 1, 30 * MIB + 512, 32 * MIB),
    ],
)
def test_a_request_takes_a_block_and_a_segment(num_bytes, allocated, reserved):
    allocator = CachingAllocator()
    allocator.take(num_bytes)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_the_smallest_free_block_is_taken_and_split():
    allocator = CachingAllocator()
    large, small = allocator.take(40 * MIB), allocator.take(30 * MIB)
    allocator.give_back(large)
    allocator.give_back(small)
    taken = allocator.take(12 * MIB)
    assert taken is small and taken.size == 12 * MIB
    assert allocator.take(18 * MIB).address == small.address + 12 * MIB  # the rest of it
    assert allocator.reserved == 70 * MIB


def test_a_freed_block_serves_its_own_stream_only():
    allocator = CachingAllocator()
    allocator.give_back(allocator.take(20 * MIB, "copy_in"))
    allocator.take(20 * MIB, "compute")
    assert allocator.reserved == 40 * MIB
    allocator.take(20 * MIB, "copy_in")
    assert allocator.reserved == 40 * MIB


def test_expandable_segments_grow_where_others_would_be_added():
    def events():
        for number in range(10):  # each block is longer than all that was freed
            yield Alloc(number, (20 + 4 * number) * MIB, "activations", "")
            yield Free(number)

    assert replay(events())[1] == sum(20 + 4 * number for number in range(10)) * MIB
    assert replay(events(), expandable=True)[1] == 60 * MIB
