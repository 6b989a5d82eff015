"""Rows of weights as a stream: what shards of each type give back, beside the file they came from."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.distributed.shards import local_boxes
from hf_fsdp_tools.loading.conversion import persistent_tensors
from hf_fsdp_tools.proof.case import NotBuiltError, tiny_case
from hf_fsdp_tools.proof.compare import PRECISIONS, Case, load_sharded
from hf_fsdp_tools.streaming.live import LiveWeights, live_weights
from hf_fsdp_tools.streaming.routes import Holders, spread_of
from tests._checkpoints import stored_tensors
from tests.census.defaults import build_config, classes_by_default
from tests.census.rows import Census, Row, model_classes
from tests.census.sizes import SIZES


def stored_case(model_type: str, folder: Path) -> Row:
    """Facts of a case, which is left in the folder; and whether any number of ranks makes up its tensors."""
    config = build_config(model_type)
    try:
        case, row = tiny_case(config, model_classes(model_type, config), folder / "checkpoint", sizes=SIZES)
    except NotBuiltError as error:
        return {"why": str(error)[:1500]}
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
                held[key] = [(box, (0,)) for box in dict.fromkeys(boxes)]
            times = torch.zeros(tensor.symbol.shape, dtype=torch.int32)
            for box, _ in spread_of(tensor, shapes, held):
                times[box.slices] += 1
            if not bool((times == 1).all()):
                return False
    return True


def streamed(folder: Path) -> list[str]:
    """What is wrong with the stream of a case's shards; every rank must call."""
    case: Case = torch.load(folder / "case.pt", weights_only=False)
    expected, faults = stored_tensors(case.folder), list[str]()
    for precision, dtype in PRECISIONS.items():
        model = load_sharded(case, precision)
        weights = live_weights(model, dtype=dtype)
        looks = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.tensors.items()}
        files = {name: t.to(dtype) if t.is_floating_point() else t for name, t in expected.items()}
        if looks != (stored := {name: (tuple(t.shape), t.dtype) for name, t in files.items()}):
            faults.append(f"{precision}: names, shapes or dtypes differ: {sorted(set(looks) ^ set(stored))[:3]}")
            continue
        parts = all_ranks([(part.name, part.box, part.values()) for part in weights.parts()])
        found = {name: torch.zeros_like(tensor) for name, tensor in files.items()}
        times = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in files.items()}
        for name, box, values in (part for of_rank in parts for part in of_rank):
            found[name][box.slices] = values
            times[name][box.slices] += 1
        faults += [f"{precision}: {name} is not given once" for name in files if not bool((times[name] == 1).all())][:1]
        faults += [f"{precision}: parts of {name} differ" for name in files if not same(found[name], files[name])][:1]
        most = max(tensor.num_bytes for tensor in weights.tensors.values())
        for to in ((0,), None):
            arrived = {name: tensor for bucket in weights.buckets(3 * most, to=to) for name, tensor in bucket.items()}
            if list(arrived) != (list(weights.tensors) if to is None or dist.get_rank() == 0 else []):
                faults.append(f"{precision}: other tensors arrive, or in another order")
            changed = [name for name, tensor in arrived.items() if not same(tensor, files[name])]
            faults += [f"{precision}: {name} arrives changed" for name in changed[:1]]
    return faults


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are the same bits."""
    a, b = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected))
    return torch.equal(a, b)


def judged(ranks: list[list[str]]) -> Row:
    """The faults of all ranks."""
    why = "; ".join(dict.fromkeys(fault for found in ranks for fault in found))[:400]
    return {"verdict": "failed" if why else "agrees", "why": why}


CENSUS = Census(
    about="""Parts of all ranks hold each element of each tensor once, and buckets give whole tensors to one rank or to
all, in fp32 and bf16, bit for bit as in the file; the boxes of 1 to 4 ranks, split along each dimension, make up
each tensor once.""",
    takes_part=lambda model_type: bool(classes_by_default(model_type)),
    prepare=stored_case,
    compare=streamed,
    judge=judged,
)
