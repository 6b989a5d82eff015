"""What shards of each type give away and take back: live weights, and the state of a run, which goes on elsewhere."""

import zlib
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_tools import from_pretrained, live_weights, make_accelerator
from hf_fsdp_tools.proof.compare import held_part
from tests._checkpoints import stored_tensors
from tests.api import PRECISIONS, Case, Held, load_sharded, tiny_case
from tests.census.defaults import build_config, classes_by_default
from tests.census.rows import Census, Row, model_classes
from tests.census.sizes import SIZES
from tests.ranks.test_live_weights import buckets_hold, parts_make_up


def saved_after_a_step(model_type: str, folder: Path) -> Row:
    """Facts of a case, which is left in the folder with a state after one step and the weights after two."""
    config = build_config(model_type)
    case, row = tiny_case(config, model_classes(model_type, config), folder / "checkpoint", sizes=SIZES)
    accelerator, model, optimizer = made(case)
    step(model, optimizer)
    accelerator.save_state(str(folder / "state"))
    step(model, optimizer)
    expected = {name: Held.of(each).memory.detach() for name, each in model.named_parameters()}
    torch.save((case, expected), folder / "case.pt")
    return {**row, "verdict": "ready"}


def made(case: Case) -> tuple[Any, Any, Any]:
    """An Accelerator with a model in fp32 and AdamW. Every rank must call."""
    torch.manual_seed(3)
    accelerator, given = make_accelerator(cpu=True), {"auto_class": case.model_class, "dtype": torch.float32}
    model = from_pretrained(case.folder, **given, accelerator=accelerator, load_kwargs={"progress": False})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in case.frozen and parameter.is_floating_point())
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(model: Any, optimizer: Any) -> None:
    """A step by gradients that are drawn from the names of parameters, so that weights and moments alone decide."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(parameter.shape, generator=drawn)
            part = held_part(whole, parameter)
            parameter.grad = whole if part is whole else Held.of(parameter).around(part.contiguous())
    optimizer.step()


def resumed(folder: Path) -> Row:
    """How far weights are from those of a run that was not interrupted, on this rank."""
    case, expected = torch.load(folder / "case.pt", weights_only=False)
    accelerator, model, optimizer = made(case)
    accelerator.load_state(str(folder / "state"))
    step(model, optimizer)
    for name, each in model.named_parameters():
        whole, part = held_part(expected[name], each), Held.of(each).memory.detach()
        torch.testing.assert_close(part, whole, rtol=1e-6, atol=1e-6, equal_nan=True, msg=name)
    return {"verdict": "agrees"}


def stored_case(model_type: str, folder: Path) -> Row:
    """Facts of a case, which is left in the folder."""
    config = build_config(model_type)
    case, row = tiny_case(config, model_classes(model_type, config), folder / "checkpoint", sizes=SIZES)
    torch.save(case, folder / "case.pt")
    return {**row, "verdict": "ready"}


def streamed(folder: Path) -> Row:
    """The stream of a case's shards beside its file; every rank must call."""
    case: Case = torch.load(folder / "case.pt", weights_only=False)
    for precision, dtype in PRECISIONS.items():
        weights, stored = live_weights(load_sharded(case, precision), dtype=dtype), stored_tensors(case.folder)
        files = {name: t.to(dtype) if t.is_floating_point() else t for name, t in stored.items()}
        parts_make_up(weights, files, precision)
        buckets_hold(weights, files, precision)
    return {"verdict": "agrees"}


RESUMED = Census(
    about="A state of one process goes on in shards of 2 ranks: the next step's weights are those of no interruption.",
    takes_part=lambda model_type: bool(classes_by_default(model_type)),
    prepare=saved_after_a_step,
    compare=resumed,
)
STREAMED = Census(
    about="Parts of all ranks hold each element once, and buckets whole tensors, in fp32 and bf16 as in the file.",
    takes_part=lambda model_type: bool(classes_by_default(model_type)),
    prepare=stored_case,
    compare=streamed,
)
