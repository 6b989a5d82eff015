"""Rows of the census of bases that stay quantised: a tiny checkpoint of each type in FP8, packed and dequantised.

Linear layers (but the head) and stacks of experts are stored as 8-bit floats with a scale for each block of 8 x 16. The
same adapter is made on the stored bytes and on the floats; losses, logits and its gradients are to be the same bits.
"""

import copy
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from benchmarks.architectures.cases import TIMEOUT_S, WORLD, Row
from benchmarks.architectures.defaults import build_config, class_names, classes_of
from benchmarks.measuring import table_of
from hf_fsdp_tools.distributed.shards import local_tensor
from hf_fsdp_tools.loading.conversion import map_loading, persistent_tensors
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.quantized.keep import keep_stored
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.modeling.packed import packed_parameters
from hf_fsdp_tools.modeling.packed_weight import PackedForm
from hf_fsdp_tools.pretrained import from_pretrained
from hf_fsdp_tools.proof.case import NotBuiltError, tiny_case
from hf_fsdp_tools.proof.compare import PRECISIONS, Case, evaluate, forward, loss_of
from hf_fsdp_tools.testing import run_ranks

BLOCK = (8, 16)
LAST_BIT = 1e-6
"""Relative difference of gradients of adapters on experts that run one by one: a stack of products is summed."""
MOST_CLASSES = 3
PREFACE = """# Census of bases that stay quantised

Every model type that transformers registers with a causal model or a model of images and text, at a small size, on
{size} ranks (gloo, CPU). Made with {versions} by

    python benchmarks/census.py --train --dequantize false

`{output}` holds one row of each type. transformers writes a checkpoint of random weights; its linear layers (but the
head) and stacks of experts are then stored in FP8 with a scale for each block of 8 x 16 values. `from_pretrained` loads
it with `dequantize=False` and with the floats of the same checkpoint, with the same LoRA adapter on every quantised
weight, in fp32 and in bf16. A type agrees where losses, outputs and gradients of the adapter are the same bits;
gradients of adapters on stacks of experts may differ in the last (1e-6 of the largest). Rows are kept between runs.
"""


def takes_part(model_type: str) -> bool:
    """Whether a type has a row."""
    return any(class_names(name, model_type) for name in ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT"))


def row_of(model_type: str) -> Row:
    """The row of a type; a crash or a hang of its processes is in it as their error."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="census-", ignore_cleanup_errors=True) as name:
        row: Row = {"type": model_type, "verdict": "not built", "why": ""}
        try:
            row |= run_ranks(quantised_case, 1, model_type, Path(name), timeout_s=TIMEOUT_S)[0]
            if row["verdict"] == "stored":
                row["verdict"] = "failed"
                row |= judged(run_ranks(examine_on_ranks, WORLD, Path(name), timeout_s=TIMEOUT_S))
        except AssertionError as error:  # with the traceback of a rank
            row["why"] = str(error).strip().splitlines()[-1].replace(name, "")[:400]
            if "cannot stay quantised" in row["why"]:
                row["verdict"] = "refused"
    return row | {"seconds": round(time.monotonic() - start, 1)}


# ---- the checkpoint ----


def quantised_case(model_type: str, folder: Path) -> Row:
    """Facts of a case, which is left in the folder with its quantised checkpoint."""
    config = build_config(model_type)
    names = dict.fromkeys(classes_of(model_type, config).get("main", [])[:MOST_CLASSES])
    try:
        case, row = tiny_case(config, [getattr(transformers, name) for name in names], folder / "checkpoint")
    except NotBuiltError as error:
        return {"why": str(error)[:1500]}
    row["quantised"] = quantise(case)
    torch.save(case, folder / "case.pt")
    return {**row, "verdict": "stored" if row["quantised"] else "nothing is quantised"}


def quantise(case: Case) -> int:
    """Store the linear layers and experts of a checkpoint in FP8; return how many tensors are."""
    wanted = set(quantisable(case))
    total = 0
    weight_map = {}
    for file in case.folder.glob("*.safetensors"):
        tensors: dict[str, torch.Tensor] = {}
        for key, tensor in load_file(file).items():
            tensors |= in_fp8(key, tensor) if key in wanted else {key: tensor}
        total += len(wanted & tensors.keys())
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    if (listing := case.folder / "model.safetensors.index.json").exists():
        listing.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    path = case.folder / "config.json"
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": BLOCK}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))
    return total


def quantisable(case: Case) -> Iterator[str]:
    """The stored tensors that fill nothing but linear layers and experts."""
    model = build_meta_model(case.folder, auto_class=case.model_class, dtype=torch.float32)
    state = persistent_tensors(model)
    index = CheckpointIndex.open(case.folder).of_model(state)
    load_map = map_loading(model, state, index.tensors, is_model_state=index.is_model_state)
    times = Counter(map(id, state.values()))
    head = model.get_output_embeddings()
    fills: dict[str, set[bool]] = {}
    for key, made in load_map.tensors.items():
        owner, tensor = model.get_submodule(key.rpartition(".")[0]), state[key]
        is_weight = isinstance(owner, (nn.Linear, Conv1D)) and key.endswith("weight") and owner is not head
        is_stack = tensor.dim() == 3 and "experts" in key
        for source in made.sources:
            fills.setdefault(source, set()).add((is_weight or is_stack) and times[id(tensor)] == 1)
    yield from (source for source, kinds in fills.items() if kinds == {True} and len(index.tensors[source].shape) > 1)


def in_fp8(key: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight, or a stack of them, as values of 8 bits with a scale for each block."""
    *outer, rows, columns = weight.shape
    high, wide = math.gcd(rows, BLOCK[0]), math.gcd(columns, BLOCK[1])
    grid = weight.float().view(*outer, rows // high, high, columns // wide, wide)
    scales = grid.abs().amax((-3, -1)).clamp(min=1e-6) / 448
    values = (grid / scales.unsqueeze(-1).unsqueeze(-3)).view(weight.shape).to(torch.float8_e4m3fn)
    return {key: values, f"{key}_scale_inv": scales}


# ---- packed and dequantised ----


def examine_on_ranks(folder: Path) -> Row:
    """What differs on this rank between the packed and the dequantised base."""
    case: Case = torch.load(folder / "case.pt", weights_only=False)
    forms, lora = adapter_of(case)
    row: Row = {"packed": len(forms)}
    for precision in PRECISIONS:
        ours, theirs = (computed(case, precision, lora, dequantize=dequantize) for dequantize in (False, True))
        row[f"{precision}_gradients"] = sum(name.startswith("gradient") for name in theirs)
        row[f"{precision}_apart"] = apart(ours, theirs)
    return row


def adapter_of(case: Case) -> tuple[dict[str, PackedForm], LoraConfig]:
    """What stays packed, and an adapter on all of it that PEFT adapts."""
    model = build_meta_model(case.folder, auto_class=case.model_class, dtype=torch.float32)
    adapted = {fqn for fqn, module in model.named_modules() if is_adapted(model, fqn, module)}
    keep_stored(model, CheckpointIndex.open(case.folder))
    forms = packed_parameters(model)
    matrices = {fqn.removesuffix(".weight") for fqn, form in forms.items() if len(form.shape) == 2}
    lora = LoraConfig(
        r=4,
        target_modules=sorted(adapted & matrices),
        target_parameters=[fqn for fqn, form in forms.items() if len(form.shape) == 3] or None,
        init_lora_weights=False,
    )
    return forms, lora


def is_adapted(model: nn.Module, fqn: str, module: nn.Module) -> bool:
    """Whether PEFT adapts a linear layer: none that gives more than a product, none that is read and not called."""
    above = model.get_submodule(fqn.rpartition(".")[0])
    is_read = isinstance(above, nn.MultiheadAttention) or (fqn.endswith("out_proj") and hasattr(above, "conv1d"))
    return type(module).forward in (nn.Linear.forward, Conv1D.forward) and not is_read


def computed(case: Case, precision: str, lora: LoraConfig, *, dequantize: bool) -> dict[str, torch.Tensor]:
    """Outputs, loss and this rank's gradients."""
    model = from_pretrained(
        case.folder,
        auto_class=case.model_class,
        dtype=PRECISIONS[precision],
        dequantize=dequantize,
        peft_config=copy.deepcopy(lora),  # PEFT changes it
        load_kwargs={"progress": False, "seed": 1},
    )
    batch = case.batches_of("rows", precision)[torch.distributed.get_rank()]
    found = {f"output {name}": tensor for name, tensor in evaluate(model, batch).items()}
    loss = loss_of(forward(model.eval(), batch))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach()} | {f"gradient {n}": local_tensor(g) for n, g in gradients.items()}


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative difference, and the first tensor that differs by more than it may."""
    if ours.keys() != theirs.keys():
        return math.inf, f"other names: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    largest, what = 0.0, ""
    for name, tensor in theirs.items():
        a, b = torch.nan_to_num(ours[name].double()), torch.nan_to_num(tensor.double())
        difference = float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) if b.numel() else 0.0
        largest = max(largest, difference)
        if difference > (LAST_BIT if name.startswith("gradient") and ".experts." in name else 0.0) and not what:
            what = f"{name} ({difference:.1e})"
    return largest, what


def judged(ranks: list[Row]) -> Row:
    """One row of all ranks: the worst of each check, a verdict, and why."""
    row: Row = {"packed": ranks[0]["packed"]}
    faults = []
    for precision in PRECISIONS:
        found = [rank[f"{precision}_apart"] for rank in ranks]
        row[f"{precision}_apart"] = max(value for value, _ in found)
        row[f"{precision}_gradients"] = ranks[0][f"{precision}_gradients"]
        faults += [f"{precision}: {what}" for _, what in found if what][:1]
        if not row[f"{precision}_gradients"]:
            faults.append(f"{precision}: no adapter has a gradient")
    return row | {"verdict": "failed" if faults else "agrees", "why": "; ".join(faults)}


def render(rows: Iterable[Row], versions: str, output: str) -> str:
    """The summary in Markdown."""
    rows = sorted(rows, key=lambda row: row["type"].lower())
    agrees = [row for row in rows if row["verdict"] == "agrees"]
    counts = [(verdict, str(count)) for verdict, count in Counter(row["verdict"] for row in rows).items()]
    bits = [(p, str(sum(not row[f"{p}_apart"] for row in agrees))) for p in PRECISIONS]
    others = [(row["type"], row.get("class", ""), row["verdict"], row["why"]) for row in rows if row not in agrees]
    cells = [[cell[:200].replace("|", "\\|").replace("\n", " ") for cell in row] for row in others]
    lines = [PREFACE.format(versions=versions, output=output, size=WORLD), *table_of(("", "types"), counts), ""]
    lines += table_of(("bit for bit in all that is compared", "types"), bits)
    lines += ["", "## Do not agree, or take no part", "", *table_of(("type", "class", "", "why"), cells)]
    return "\n".join(lines) + "\n"
