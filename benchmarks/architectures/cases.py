"""A tiny checkpoint and a batch of a model type: the first class, size and batch with which the plain model trains."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, initialization

from benchmarks.architectures.agree import Case, forward, loss_of
from benchmarks.architectures.batches import Batch, candidates, random_batch
from benchmarks.architectures.defaults import build_config, classes_of
from benchmarks.architectures.shrink import LEVELS, shrink

MOST_PARAMETERS = 40_000_000
MOST_CLASSES = 3


class NotBuiltError(Exception):
    """No class of the type was built and run at a small size; says what each said."""


def make_case(model_type: str, folder: Path) -> tuple[Case, dict[str, Any]]:
    """The case of a type, its checkpoint written by transformers to `folder`; and the row's facts of it."""
    said: list[str] = []
    config = build_config(model_type)
    classes = classes_of(model_type, config)
    for name in dict.fromkeys([*classes.get("main", [])[:MOST_CLASSES], *classes.get("base", [])]):
        for level in LEVELS:
            try:
                model = build(getattr(transformers, name), shrink(config, level))
            except Exception as error:
                said.append(f"{name} {level}: {_said(error)}")
                continue
            for batch in _batches(model, said):
                if problem := trains(model, batch):
                    said.append(f"{name} {level} ({' '.join(batch)}): {problem}")
                    continue
                model.save_pretrained(folder)
                count = sum(parameter.numel() for parameter in model.parameters())
                facts = {"class": name, "size": level, "parameters": count, "inputs": " ".join(batch)}
                frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
                return Case(model_class=type(model), folder=folder, batch=batch, frozen=frozen), facts
    raise NotBuiltError("; ".join(dict.fromkeys(said)))


def build(model_class: Any, config: Any) -> PreTrainedModel:
    """A plain model in fp32 on the CPU in evaluation mode, random throughout."""
    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        size = sum(p.numel() for p in model_class._from_config(config, dtype=torch.float32).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = model_class._from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # what is initialised with zeros or ones would hide what is read or averaged wrongly
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def trains(model: nn.Module, batch: Batch) -> str:
    """Why the plain model does not train on a batch; empty where it does."""
    model.zero_grad()
    try:
        loss = loss_of(forward(model, random_batch(batch, 1000)))
        if not loss.isfinite():
            return f"loss {float(loss)}"
        loss.backward()
    except Exception as error:
        return _said(error)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        return "gradients are not finite"
    return "" if any(bool(gradient.any()) for gradient in gradients) else "no gradients"


def _batches(model: nn.Module, said: list[str]) -> list[Batch]:
    try:
        return list(candidates(model))
    except Exception as error:
        said.append(f"no batch: {_said(error)}")
        return []


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
