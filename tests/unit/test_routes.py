"""Routes of tensors between ranks, as data: what is wanted arrives once, from who holds it, in bounded buckets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from hf_fsdp_tools.distributed.shards import Box, local_boxes
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.streaming.routes import EVERY, Spread, most_of, plan_buckets


def holders(shape: tuple[int, ...], placements: tuple[Shard | Replicate, ...], mesh: tuple[int, ...]) -> Spread:
    ranks_of: dict[Box, list[int]] = {}
    for rank in range(torch.Size(mesh).numel()):
        coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(rank), mesh))
        for box, _ in local_boxes(shape, placements, mesh, coordinate):
            ranks_of.setdefault(box, []).append(rank)
    return [(box, tuple(ranks)) for box, ranks in ranks_of.items()]


sizes = st.integers(1, 7)


@given(
    shapes=st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5),
    dims=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    replicas=st.booleans(),
)
def test_what_is_wanted_arrives_once(shapes, dims, replicas):
    """Shards of 4 ranks, or of 2 and their replicas, to two of them."""
    names = {f"tensor {i}": shape for i, shape in enumerate(shapes)}
    placements = (Replicate() if replicas else Shard(dims[0]), Shard(dims[1]))
    spread = {name: holders(shape, placements, (2, 2)) for name, shape in names.items()}
    bound = 4 * 49 * 4  # a rank gets a tensor, once more aside, and gives it to both
    wanted = {name: (Box.whole(shape), torch.float32) for name, shape in names.items()}
    buckets = plan_buckets((0, 1), wanted, spread.__getitem__, 4, bound)
    for worker in (0, 1):
        for name, shape in names.items():
            times = torch.zeros(shape, dtype=torch.int32)
            for route in (route for bucket in buckets for route in bucket.routes):
                if route.name == name and route.to == worker:
                    times[route.box.slices] += 1
                    holding = [ranks for held, ranks in spread[name] if held.intersect(route.box) == route.box]
                    assert route.source in holding[0]
                    assert route.source == worker or worker not in holding[0], "what is there is not sent"
            assert torch.equal(times, torch.ones_like(times))
    assert all(most_of(bucket.bytes_of) <= bound for bucket in buckets)
    assert [name for bucket in buckets for name in bucket.arrivals_at(0)] == list(names), "in order"


def test_what_all_ranks_want_is_broadcast_and_replicas_send_in_turns():
    spread = holders((8, 4), (Shard(0),), (4,))
    wanted = dict.fromkeys("ab", (Box.whole((8, 4)), torch.bfloat16))
    (bucket,) = plan_buckets(range(4), wanted, lambda name: spread, 4, 4 * 64)
    assert [route.to for route in bucket.routes] == 8 * [EVERY]
    assert [route.source for route in bucket.routes] == [0, 1, 2, 3] * 2
    assert dict(bucket.bytes_of) == {EVERY: 128}
    assert len(plan_buckets(range(4), wanted, lambda name: spread, 4, 64)) == 2
    with pytest.raises(ConfigError, match=r"bucket_bytes=63 does not hold 'a'.*bucket_bytes=64"):
        plan_buckets(range(4), wanted, lambda name: spread, 4, 63)
    spread = holders((2, 2), (Replicate(), Shard(0)), (4, 2))
    wanted = {f"{i}": (Box.whole((2, 2)), torch.float32) for i in range(64)}
    routes = [r for b in plan_buckets((0,), wanted, lambda name: spread, 8, 2**20) for r in b.routes]
    sources = [route.source for route in routes if route.source != 0]
    assert set(sources) == {1, 3, 5, 7} and min(map(sources.count, set(sources))) > 4
