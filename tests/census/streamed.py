"""Rows of weights as a stream: what shards of each type give back, beside the file they came from."""

from pathlib import Path

import torch
from torch.distributed.tensor import Replicate, Shard

from hf_fsdp_tools import live_weights
from tests._checkpoints import stored_tensors
from tests.api import (
    PRECISIONS,
    Case,
    Holders,
    LiveWeights,
    load_sharded,
    local_boxes,
    persistent_tensors,
    spread_of,
    tiny_case,
)
from tests.census.defaults import build_config, classes_by_default
from tests.census.rows import Census, Row, model_classes
from tests.census.sizes import SIZES
from tests.ranks.test_live_weights import buckets_hold, parts_make_up


def stored_case(model_type: str, folder: Path) -> Row:
    """Facts of a case, which is left in the folder; and whether any number of ranks makes up its tensors."""
    config = build_config(model_type)
    case, row = tiny_case(config, model_classes(model_type, config), folder / "checkpoint", sizes=SIZES)
    torch.save(case, folder / "case.pt")
    weights = live_weights(case.model_class.from_pretrained(case.folder))
    row |= {"tensors": len(weights.tensors), "bytes": weights.num_bytes}
    if wrong := [name for name in weights.tensors if not is_made_up(weights, name)]:
        return {**row, "verdict": "failed", "why": f"boxes do not make up {wrong[0]}"}
    return {**row, "verdict": "ready"}


def is_made_up(weights: LiveWeights, name: str) -> bool:
    """Whether the boxes of 1 to 4 ranks, split along any dimension, hold each element of a tensor once."""
    tensor, state = weights.tensors[name], persistent_tensors(weights._model)
    shapes = {key: tuple(state[key].shape) for key in tensor.symbol.sources}
    for dim in range(max(1, *map(len, shapes.values()))):
        for size in range(1, 5):
            held: dict[str, Holders] = {}
            for key, shape in shapes.items():
                how = (Shard(min(dim, len(shape) - 1)),) if shape else (Replicate(),)
                boxes = [box for rank in range(size) for box, _ in local_boxes(shape, how, (size,), (rank,))]
                held[key] = Holders(shape, [(box, (0,)) for box in dict.fromkeys(boxes)])
            times = torch.zeros(tensor.symbol.shape, dtype=torch.int32)
            for box, _ in spread_of(tensor, held):
                times[box.slices] += 1
            if not bool((times == 1).all()):
                return False
    return True


def streamed(folder: Path) -> Row:
    """The stream of a case's shards beside its file; every rank must call."""
    case: Case = torch.load(folder / "case.pt", weights_only=False)
    for precision, dtype in PRECISIONS.items():
        model = load_sharded(case, precision)
        weights, stored = live_weights(model, dtype=dtype), stored_tensors(case.folder)
        files = {name: t.to(dtype) if t.is_floating_point() else t for name, t in stored.items()}
        parts_make_up(weights, files, precision)
        buckets_hold(weights, files, precision)
    return {"verdict": "agrees"}


CENSUS = Census(
    about="""Parts of all ranks hold each element of each tensor once, and buckets give whole tensors to one rank or to
all, in fp32 and bf16, bit for bit as in the file; the boxes of 1 to 4 ranks, split along each dimension, make up
each tensor once.""",
    takes_part=lambda model_type: bool(classes_by_default(model_type)),
    prepare=stored_case,
    compare=streamed,
)
