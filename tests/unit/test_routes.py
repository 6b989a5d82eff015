"""Routes of tensors between ranks, as data: what is wanted arrives once, from who holds it, in bounded buckets."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from hf_fsdp_tools.streaming.routes import Bucket, Spread
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
