"""Routes of tensors between ranks, as data: what is wanted arrives once, from who holds it, in bounded buckets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.streaming.routes import EVERY, Bucket, Spread
from tests.api import Box, local_boxes, plan_buckets


def holders(shape: tuple[int, ...], placements: tuple[Shard | Replicate, ...], mesh: tuple[int, ...]) -> Spread:
    ranks_of: dict[Box, list[int]] = {}
    for rank in range(torch.Size(mesh).numel()):
        coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(rank), mesh))
        for box, _ in local_boxes(shape, placements, mesh, coordinate):
            ranks_of.setdefault(box, []).append(rank)
    return Spread((box, tuple(ranks)) for box, ranks in ranks_of.items())


def routes(bucket: Bucket, ranks: int) -> list[tuple[str, Box, int, int]]:
    """What travels, or is copied: name, box, source and target; both ends see the same."""
    ends: dict[str, list[tuple[str, Box, int, int]]] = {"sent": [], "got": []}
    for each in bucket.arrivals:
        for rank in range(ranks):
            for box, source in each.parts(rank):
                found = each.name, box, source, each.to
                ends["got"] += [found] * (rank == max(each.to, 0))
                ends["sent"] += [found] * (rank == source)
    assert len(ends["sent"]) == len(ends["got"]) and set(ends["sent"]) == set(ends["got"])
    return ends["got"]


sizes, axes = st.integers(1, 7), st.integers(0, 1)


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5), st.tuples(axes, axes), st.booleans())
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
            for other, box, source, to in (route for bucket in buckets for route in routes(bucket, 4)):
                if other == name and to == worker:
                    times[box.slices] += 1
                    holding = [ranks for held, ranks in spread[name] if held.intersect(box) == box]
                    assert source in holding[0]
                    assert source == worker or worker not in holding[0], "what is there is not sent"
            assert torch.equal(times, torch.ones_like(times))
    assert all(bucket.most_bytes <= bound for bucket in buckets)
    assert [each.name for bucket in buckets for each in bucket.arrivals if each.to == 0] == list(names), "in order"


def test_what_all_ranks_want_is_broadcast_and_replicas_send_in_turns():
    spread = holders((8, 4), (Shard(0),), (4,))
    wanted = dict.fromkeys("ab", (Box.whole((8, 4)), torch.bfloat16))
    (bucket,) = plan_buckets(range(4), wanted, lambda name: spread, 4, 8 * 64)
    assert {to for _, _, _, to in routes(bucket, 4)} == {EVERY}
    assert [source for _, _, source, _ in routes(bucket, 4)] == [0, 1, 2, 3] * 2
    assert bucket.most_bytes == 256, "each, and once more aside, as they are small"
    assert len(plan_buckets(range(4), wanted, lambda name: spread, 4, 128)) == 2
    with pytest.raises(ConfigError, match=r"bucket_bytes=127 does not hold 'a'.*bucket_bytes=128"):
        plan_buckets(range(4), wanted, lambda name: spread, 4, 127)
    spread = holders((2, 2), (Replicate(), Shard(0)), (4, 2))
    wanted = {f"{i}": (Box.whole((2, 2)), torch.float32) for i in range(64)}
    buckets = plan_buckets((0,), wanted, lambda name: spread, 8, 2**20)
    sources = [source for bucket in buckets for _, _, source, _ in routes(bucket, 8) if source != 0]
    assert set(sources) == {1, 3, 5, 7} and min(map(sources.count, set(sources))) > 4
