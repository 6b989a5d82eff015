"""Rows of mixtures under activation checkpointing: whether a router chooses the same experts when its block runs again.

A changed choice would be silent where experts are multiplied as groups: the backward pass would belong to other experts
than the loss.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools import ConfigError
from tests._training import full_gradients
from tests.api import PRECISIONS, Case, Tensors, forward, load_sharded, loss_of, telling, tiny_case
from tests.census.defaults import build_config, classes_by_default
from tests.census.rows import Census, Row, is_causal, model_classes
from tests.census.sizes import SIZES

Chosen = dict[str, list[torch.Tensor]]
"""Indices that a module chose, in the order of its calls."""


def is_mixture(model_type: str) -> bool:
    """Whether the default configuration of a type, or a part of it, has a number of experts."""
    if not (classes_by_default(model_type) and is_causal(model_type)):
        return False
    parts = [build_config(model_type)]
    for part in parts:
        parts += [value for value in vars(part).values() if isinstance(value, PreTrainedConfig)]
    return any("expert" in name for part in parts for name, value in vars(part).items() if value)


class Choices:
    """What `topk`, `argmax` and `max` choose in modules of a model, in the forward pass and when blocks run again."""

    def __init__(self, model: nn.Module) -> None:
        self.first, self.again = defaultdict[str, list[torch.Tensor]](list), defaultdict[str, list[torch.Tensor]](list)
        self._into, self._running, self._model = self.first, list[str](), model

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A block in which they are noted."""
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                begin = partial(lambda name, *_: self._running.append(name), name)
                stack.callback(module.register_forward_pre_hook(begin).remove)
                stack.callback(module.register_forward_hook(self._end, always_call=True).remove)
            for owner in (torch, torch.Tensor):
                for name in ("topk", "argmax", "max"):
                    stack.enter_context(patch.object(owner, name, self._noting(getattr(owner, name))))
            yield

    def _end(self, *_: Any) -> None:
        self._running.pop()

    def _noting(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            indices = result if isinstance(result, torch.Tensor) else result[1]
            if self._running and not indices.is_floating_point():
                self._into[self._running[-1]].append(indices)
            return result

        return call

    def begin_again(self) -> None:
        """Say that the forward pass is over."""
        self._into = self.again


def mixture(model_type: str, folder: Path) -> Row:
    """Facts of a case, which is left in the folder."""
    config = telling(build_config(model_type))
    classes = model_classes(model_type, config)
    case, row = tiny_case(config, classes, folder / "checkpoint", is_training=True, sizes=SIZES)
    torch.save(case, folder / "case.pt")
    return {**row, "verdict": "ready"}


def run_again(folder: Path) -> Row:
    """The choices of both passes and the gradients beside those without checkpointing; every rank must call."""
    case: Case = torch.load(folder / "case.pt", weights_only=False)
    row: Row = {}
    for precision in PRECISIONS:
        kept, _ = passes(case, precision)
        try:
            gradients, choices = passes(replace(case, activation_checkpointing=True), precision)
        except ConfigError as error:
            return {"verdict": "refused", "why": str(error)}
        row |= {f"{precision}_{key}": value for key, value in compared(choices.first, choices.again).items()}
        other = [name for name, gradient in kept.items() if not torch.equal(gradients[name], gradient)]
        row[f"{precision}_gradients"] = f"{len(other)} other gradients, {other[0]} first" if other else ""
    return row


def passes(case: Case, precision: str) -> tuple[Tensors, Choices]:
    """Whole gradients of one forward and backward pass in training, and what was chosen in each."""
    model = load_sharded(case, precision)
    choices, batch = Choices(model), case.batches_of("rows", "fp32")[dist.get_rank()]
    with choices.noted():
        loss = loss_of(forward(model.train(), batch))
        choices.begin_again()
        loss.backward()  # type: ignore[no-untyped-call]
    return full_gradients(model), choices


def compared(first: Chosen, again: Chosen) -> Row:
    """How many choices were made, how many again, and what is wrong with those."""
    pairs = [(name, one, other) for name in again for one, other in zip(first[name], again[name], strict=False)]
    other = [name for name in again if len(again[name]) != len(first[name])]
    other += [name for name, one, two in pairs if not torch.equal(one, two)]
    sizes = {
        key: sum(each.numel() for part in side.values() for each in part)
        for key, side in (("chosen", first), ("again", again))
    }
    return {**sizes, "choices": f"other choices in {len(other)} modules, {other[0]} first" if other else ""}


def judged(ranks: list[Row]) -> Row:
    """One row of both ranks."""
    if "verdict" in ranks[0]:
        return ranks[0]
    faults = [f"{key}: {rank[key]}" for rank in ranks for key in rank if isinstance(rank[key], str) and rank[key]]
    row: Row = {key: value for key, value in ranks[0].items() if not isinstance(value, str)}
    if not row["fp32_chosen"]:
        return row | {"verdict": "chooses nothing", "why": "no topk, argmax or max"}
    if not row["fp32_again"]:
        return row | {"verdict": "routers outside", "why": "no router is in a block that is checkpointed"}
    why = "; ".join(dict.fromkeys(faults))
    return row | {"verdict": "failed" if why else "agrees", "why": why}


CENSUS = Census(
    about="""A tiny mixture of each type, its default configuration shrunk, trains one pass on 2 ranks with activation
checkpointing, in fp32 and in bf16: the indices that `topk`, `argmax` and `max` give in each module, in the forward pass
and when its block runs again, and all gradients beside those of a pass that keeps its activations, are to be the same
bits. On CPUs: kernels of a GPU that are not deterministic are not judged.""",
    takes_part=is_mixture,
    prepare=mixture,
    compare=run_again,
    judge=judged,
)
