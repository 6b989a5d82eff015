"""Rows of bases that stay quantised: a tiny checkpoint of each type in FP8, packed and dequantised.

Linear layers (but the head) and stacks of experts are stored as 8-bit floats with a scale for each block of 8 x 16. The
same adapter is made on the stored bytes and on the floats; losses and outputs are to be the same bits, and its
gradients too, but for rounding: where experts run one by one, a stack of products is summed.
"""

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_fsdp_tools import from_pretrained
from hf_fsdp_tools.steps import build_meta_model
from tests._rounding import with_rounding
from tests.api import (
    PRECISIONS,
    Case,
    CheckpointIndex,
    PackedForm,
    evaluate,
    forward,
    keep_stored,
    local_tensor,
    loss_of,
    map_loading,
    packed_parameters,
    persistent_tensors,
    tiny_case,
)
from tests.census import trained
from tests.census.defaults import build_config
from tests.census.rows import Census, Row, is_causal, model_classes
from tests.census.sizes import SIZES

BLOCK = (8, 16)


def quantised_case(model_type: str, folder: Path) -> Row:
    """Facts of a case, which is left in the folder with its quantised checkpoint."""
    config = build_config(model_type)
    case, row = tiny_case(config, model_classes(model_type, config), folder / "checkpoint", sizes=SIZES)
    row["quantised"] = quantise(case)
    torch.save(case, folder / "case.pt")
    return {**row, "verdict": "ready" if row["quantised"] else "nothing is quantised"}


def quantise(case: Case) -> int:
    """Store the linear layers and experts of a checkpoint in FP8; return how many tensors are."""
    wanted, file, tensors = set(quantisable(case)), case.folder / "model.safetensors", dict[str, torch.Tensor]()
    for key, tensor in load_file(file).items():
        tensors |= in_fp8(key, tensor) if key in wanted else {key: tensor}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
    path = case.folder / "config.json"
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": BLOCK}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))
    return len(wanted)


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


def examine_on_ranks(folder: Path) -> Row:
    """What differs on this rank between the packed and the dequantised base."""
    case: Case = torch.load(folder / "case.pt", weights_only=False)
    forms, lora = adapter_of(case)
    row: Row = {"packed": len(forms)}
    for precision in PRECISIONS:
        ours, run = (
            computed(case, precision, lora, dequantize=False),
            partial(computed, case, precision, lora, dequantize=True),
        )
        theirs, allowed = run(), {}
        if any(not torch.equal(ours[name], tensor) for name, tensor in theirs.items() if name in ours):
            theirs, allowed = with_rounding(run)
        row[f"{precision}_trained"] = "" if any(n.startswith("gradient") for n in theirs) else "nothing has a gradient"
        row[f"{precision}_apart"] = apart(ours, theirs, allowed)
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


def apart(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], allowed: dict[str, float]
) -> tuple[float, str]:
    """The largest relative difference, and the first tensor that differs by more than it may."""
    if ours.keys() != theirs.keys():
        return math.inf, f"other names: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    largest, what = 0.0, ""
    for name, tensor in theirs.items():
        a, b = torch.nan_to_num(ours[name].double()), torch.nan_to_num(tensor.double())
        difference = float((a - b).abs().max()) if b.numel() else 0.0
        relative = difference / max(float(b.abs().max()), 1e-12) if difference else 0.0
        largest = max(largest, relative)
        if difference > (allowed.get(name, 0.0) if name.startswith("gradient") else 0.0) and not what:
            what = f"{name} ({relative:.1e})"
    return largest, what


CENSUS = Census(
    about="LoRA on FP8 that stays, beside its floats: losses and outputs to the bit, gradients but for rounding.",
    takes_part=is_causal,
    prepare=quantised_case,
    compare=examine_on_ranks,
    judge=trained.judged,
    refusals=("cannot be kept as stored", "PEFT cannot make"),
)
