"""Rows of the census of weights as a stream: what shards of each type give back, beside the file they came from."""

import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import Replicate, Shard

from benchmarks.architectures import cases
from benchmarks.architectures.cases import MOST_CLASSES, TIMEOUT_S, WORLD, Row
from benchmarks.architectures.defaults import build_config, classes_by_default, classes_of
from benchmarks.measuring import table_of
from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.distributed.shards import Box, local_boxes
from hf_fsdp_tools.loading.conversion import assume_conversions, persistent_tensors
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.proof.case import NotBuiltError, tiny_case
from hf_fsdp_tools.proof.compare import PRECISIONS, Case, load_sharded
from hf_fsdp_tools.sharding.placement import split_dim
from hf_fsdp_tools.streaming.live import LiveWeights, live_weights
from hf_fsdp_tools.streaming.outgoing import SavedTensor, outgoing_tensors
from hf_fsdp_tools.streaming.routes import Holders, spread_of
from hf_fsdp_tools.testing import run_ranks
from tests._checkpoints import stored_tensors

PREFACE = """# Census of weights as a stream

Every model type that transformers registers with a model class, at a small size, on {size} ranks (gloo, CPU). Made with
{versions} by

    python benchmarks/census.py --stream

`{output}` holds one row of each type. transformers writes a checkpoint of random weights, `from_pretrained` shards it,
and `live_weights` gives it back, in fp32 and in bf16: the parts of all ranks, each element of each tensor exactly once,
and whole tensors in buckets, on rank 0 alone and on all ranks. A type agrees where names, shapes, dtypes and every bit
are those of the file; and where by arithmetic the boxes of 1, 2, 3 and 4 ranks, split along each dimension, make up
each tensor exactly once. The same arithmetic is done for the default model of each type on meta, at full size,
split as this package splits it (the classes that can be built here, whether or not the small one trains). Rows are kept
between runs.
"""


def takes_part(model_type: str) -> bool:
    """Whether a type has a row."""
    return cases.takes_part(model_type, "")


def row_of(model_type: str) -> Row:
    """The row of a type; a crash or a hang of its processes is in it as their error."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="census-", ignore_cleanup_errors=True) as name:
        row: Row = {"type": model_type, "verdict": "not built", "why": ""}
        try:
            row |= run_ranks(on_meta, 1, model_type, timeout_s=TIMEOUT_S)[0]
            row |= run_ranks(stored_case, 1, model_type, Path(name), timeout_s=TIMEOUT_S)[0]
            if row["verdict"] == "stored":
                row["verdict"] = "failed"
                ranks = run_ranks(streamed, WORLD, Path(name), timeout_s=TIMEOUT_S)
                faults = [fault for found in ranks for fault in found]
                row |= {"verdict": "failed" if faults else "agrees", "why": "; ".join(dict.fromkeys(faults))[:400]}
        except AssertionError as error:  # with the traceback of a rank
            row["why"] = str(error).strip().splitlines()[-1].replace(name, "")[:400]
    return row | {"seconds": round(time.monotonic() - start, 1)}


def on_meta(model_type: str) -> Row:
    """How many tensors the default model of a type is saved as, and the first that 1 to 4 ranks do not make up."""
    for auto_class in (
        getattr(transformers, name) for names in classes_by_default(model_type).values() for name in names
    ):
        try:
            model = build_meta_model(build_config(model_type), auto_class=auto_class, dtype=torch.bfloat16)
            break
        except Exception:  # the next class of the type may be built
            continue
    else:
        return {"on_meta": 0, "on_meta_wrong": ""}
    assume_conversions(model)
    tensors, state = outgoing_tensors(model), persistent_tensors(model)
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    wrong = ""
    for size in range(1, 5):
        held = {key: shares_of(tensor, size) for key, tensor in state.items()}
        wrong = wrong or next(
            (name for name, each in tensors.items() if not fits(each, spread_of(each, shapes, held))), ""
        )
    return {"on_meta": len(tensors), "on_meta_wrong": wrong}


def shares_of(tensor: torch.Tensor, size: int) -> Holders:
    """The boxes of a tensor that is split over ranks as this package splits it."""
    how = (Shard(split_dim(tensor.shape, tensor.nbytes, size)),) if tensor.ndim else (Replicate(),)
    boxes = [box for rank in range(size) for box, _ in local_boxes(tensor.shape, how, (size,), (rank,))]
    return [(box, (0,)) for box in dict.fromkeys(boxes)]


def fits(tensor: SavedTensor, spread: Holders) -> bool:
    """Whether boxes are disjoint and fill a tensor."""
    boxes = [box for box, _ in spread]
    inside = all(box.intersect(Box.whole(tensor.symbol.shape)) == box for box in boxes)
    apart = not any(a.intersect(b).numel for a, b in combinations(boxes, 2))
    return inside and apart and sum(box.numel for box in boxes) == tensor.symbol.numel() and not tensor.is_computed


def stored_case(model_type: str, folder: Path) -> Row:
    """Facts of a case, which is left in the folder; and whether any number of ranks makes up its tensors."""
    config = build_config(model_type)
    classes = classes_of(model_type, config)
    names = dict.fromkeys([*classes.get("main", [])[:MOST_CLASSES], *classes.get("base", [])])
    try:
        case, row = tiny_case(config, [getattr(transformers, name) for name in names], folder / "checkpoint")
    except NotBuiltError as error:
        return {"why": str(error)[:1500]}
    torch.save(case, folder / "case.pt")
    weights = live_weights(case.model_class.from_pretrained(case.folder))
    row |= {"tensors": len(weights.tensors), "bytes": weights.num_bytes}
    if wrong := [name for name in weights.tensors if not is_made_up(weights, name)]:
        return {**row, "verdict": "failed", "why": f"boxes do not make up {wrong[0]}"}
    return {**row, "verdict": "stored"}


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


def render(rows: Iterable[Row], versions: str, output: str) -> str:
    """The summary in Markdown."""
    rows = sorted(rows, key=lambda row: row["type"].lower())
    agrees = [row for row in rows if row["verdict"] == "agrees"]
    counts = [(verdict, str(count)) for verdict, count in Counter(row["verdict"] for row in rows).items()]
    counts.append(("tensors of those that agree", f"{sum(row['tensors'] for row in agrees):,}"))
    built = [row for row in rows if row["on_meta"]]
    counts.append(("built on meta at full size", str(len(built))))
    counts.append(("of these, 1 to 4 ranks make up every tensor", str(sum(not row["on_meta_wrong"] for row in built))))
    counts.append(("their tensors", f"{sum(row['on_meta'] for row in built):,}"))
    others = [(row["type"], row.get("class", ""), row["verdict"], row["why"]) for row in rows if row not in agrees]
    cells = [[cell[:200].replace("|", "\\|").replace("\n", " ") for cell in row] for row in others]
    lines = [PREFACE.format(versions=versions, output=output, size=WORLD), *table_of(("", "types"), counts), ""]
    lines += ["## Do not agree, or take no part", "", *table_of(("type", "class", "", "why"), cells)]
    return "\n".join(lines) + "\n"
