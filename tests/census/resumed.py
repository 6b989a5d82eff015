"""Rows of resumed runs: what one process saved, weights and the moments of AdamW, goes on in shards of 2 ranks.

Gradients are drawn, the same for both steps of every run, so that nothing but weights and moments decides.
"""

import zlib
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_tools import from_pretrained, make_accelerator
from hf_fsdp_tools.proof.compare import held_part
from hf_fsdp_tools.proof.plain import load_plain, tensors_of
from tests.api import Case, as_dtensor, local_tensor, tiny_case
from tests.census.defaults import build_config, classes_by_default
from tests.census.rows import Census, Row, model_classes
from tests.census.sizes import SIZES

NEAR = 1e-6
"""The difference of a weight that kernels of another length explain."""


def saved_after_a_step(model_type: str, folder: Path) -> Row:
    """Facts of a case, which is left in the folder with a state after one step and the weights after two."""
    config = build_config(model_type)
    case, row = tiny_case(config, model_classes(model_type, config), folder / "checkpoint", sizes=SIZES)
    plain = load_plain(case)
    optimizer = optimizer_of(plain)
    for _ in range(2):
        step(plain, optimizer)
    torch.save((case, {name: each.detach() for name, each in plain.named_parameters()}), folder / "case.pt")
    accelerator, model, optimizer = made(case)
    step(model, optimizer)
    accelerator.save_state(str(folder / "state"))
    return {**row, "verdict": "ready"}


def made(case: Case) -> tuple[Any, Any, Any]:
    """An Accelerator with a model in fp32 and AdamW. Every rank must call."""
    torch.manual_seed(3)
    accelerator = make_accelerator(cpu=True)
    model = from_pretrained(
        case.folder,
        auto_class=case.model_class,
        dtype=torch.float32,
        accelerator=accelerator,
        load_kwargs={"progress": False},
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case.frozen and parameter.is_floating_point())
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    return accelerator, model, optimizer


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def step(model: Any, optimizer: Any) -> None:
    """A step by gradients that are drawn from the names of parameters."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(parameter.shape, generator=drawn)
            part = held_part(whole, parameter)
            parameter.grad = whole if part is whole else as_dtensor(part.contiguous(), parameter)
    optimizer.step()


def resumed(folder: Path) -> Row:
    """How far weights are from those of a run that was not interrupted, on this rank."""
    case, expected = torch.load(folder / "case.pt", weights_only=False)
    accelerator, model, optimizer = made(case)
    accelerator.load_state(str(folder / "state"))
    step(model, optimizer)
    found = {name: tensor for name, tensor in tensors_of(model).items() if name in expected}
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:3]
    apart = {name: difference(local_tensor(each), held_part(expected[name], each)) for name, each in found.items()}
    largest = max(apart.values(), default=0.0)
    what = next((f"{name} ({far:.1e})" for name, far in apart.items() if far > NEAR), "")
    return {"verdict": "failed" if what else "agrees", "why": what, "apart": largest}


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if not b.numel():
        return 0.0
    a, b = torch.nan_to_num(a.double()), torch.nan_to_num(b.double())
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def worse(ranks: list[Row]) -> Row:
    """The row of the rank whose weights are the farthest away."""
    return max(ranks, key=lambda row: (row["verdict"] == "failed", row["apart"]))


CENSUS = Census(
    about="""What an Accelerator of one process saved after a step of AdamW goes on in shards of 2 ranks; weights after
the second step are those of a run that was not interrupted.""",
    takes_part=lambda model_type: bool(classes_by_default(model_type)),
    prepare=saved_after_a_step,
    compare=resumed,
    judge=worse,
)
