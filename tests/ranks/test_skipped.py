"""Units that one rank does not run, and others do: towers without inputs, dropped layers, early exits."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers as hf

from hf_fsdp_tools import from_pretrained
from hf_fsdp_tools.distributed import rounds
from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.proof.case import tiny_case
from hf_fsdp_tools.proof.compare import Case
from tests._dist import run_cases, run_ranks
from tests._training import full_gradients

KINDS = ("llava", "qwen2_5_vl", "qwen3_vl", "mllama", "qwen2_audio")
Batch = dict[str, Any]
Log = list[tuple[str, int]]


def text_only(batch: Batch, seed: int) -> Batch:
    """Rows of text alone, of the same shape."""
    ids = torch.randint(5, 20, batch["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


@contextmanager
def logged_collectives() -> Iterator[Log]:
    """FSDP2's collectives of this rank, in their order."""
    log: Log = []

    def noting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = kwargs.get("input_tensor", kwargs.get("input"))
            log.append((name, (args[1] if sent is None else sent).numel()))
            return own(*args, **kwargs)

        return call

    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
    patches = [patch.object(dist, name, noting(name, getattr(dist, name))) for name in names]
    own = rounds.Rounds.exchange

    def exchange(self: Any, *args: Any, **kwargs: Any) -> Any:
        log.append(("round", 0))
        return own(self, *args, **kwargs)

    patches.append(patch.object(rounds.Rounds, "exchange", exchange))
    for each in patches:
        each.start()
    try:
        yield log
    finally:
        for each in patches:
            each.stop()


def same_on_all(log: Log) -> Log:
    """The collectives, which are the same on all ranks."""
    logs = all_ranks(log)
    assert all(other == log for other in logs), logs
    return log


def gradients(model: Any, batches: list[Batch], *, scale: float = 1.0) -> list[float]:
    """Backward passes over some batches; their losses."""
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        (loss * scale).backward()
        losses.append(loss.item())
    return losses


def compared(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """How far gradients are apart, one that is missing counts as zeros; relative to the largest of all."""
    largest = max(each.abs().max().item() for each in expected.values())
    zero = torch.zeros(())
    names = found.keys() | expected.keys()
    return max((found.get(n, zero) - expected.get(n, zero)).abs().max().item() for n in names) / largest


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, tuple[Case, list[list[Batch]]]]:
    """Tiny models, and batches of two ranks, of which some have images or sound."""
    made = {}
    for kind in KINDS:
        config = hf.CONFIG_MAPPING[kind]()
        classes = [hf.AutoModelForImageTextToText._model_mapping.get(type(config), None)]
        classes = [hf.Qwen2AudioForConditionalGeneration] if kind == "qwen2_audio" else classes
        case, _ = tiny_case(config, classes, tmp_path_factory.mktemp(kind))
        first, second = case.batches["rows"]
        plain = text_only(first, 1)
        made[kind] = case, [[first, text_only(first, 2)], [plain, second], [plain, text_only(first, 3)]]
    return made


def expected_of(case: Case, steps: list[list[Batch]]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    model = case.model_class.from_pretrained(case.folder).eval()
    losses = [gradients(model, step, scale=0.5) for step in steps]
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train_case(case: Case, steps: list[list[Batch]], plain: Any, **settings: Any) -> None:
    rank = dist.get_rank()
    model = from_pretrained(case.folder, auto_class=case.model_class, load_kwargs={"progress": False}, **settings)
    model.train() if settings else model.eval()
    losses, expected = plain
    for number, step in enumerate(steps):
        with torch.no_grad(), logged_collectives() as log:
            assert abs(model(**step[rank]).loss.item() - losses[number][rank]) < 1e-4
        same_on_all(log)
        with logged_collectives() as log:
            found = gradients(model, [step[rank]])
        same_on_all(log)
        assert abs(found[0] - losses[number][rank]) < 1e-4, (number, found)
    assert compared(full_gradients(model), expected) < 2e-5


def run_towers(all_cases: dict[str, Any]) -> Any:
    named = {kind: (lambda args=args: train_case(*args)) for kind, args in all_cases.items()}
    return run_cases(named)


def test_images_or_sound_on_one_rank_only(cases):
    """Training and evaluation, gradients accumulated over passes with images on rank 0, on rank 1 and on none."""
    run_ranks(run_towers, 2, {kind: (case, steps, expected_of(case, steps)) for kind, (case, steps) in cases.items()})
