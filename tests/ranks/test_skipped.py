"""Units that one rank does not run, and others do: towers without inputs, dropped layers, early exits."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers as hf

from hf_fsdp_tools import RanksError, from_pretrained
from tests._dist import run_cases, run_ranks
from tests._training import full_gradients
from tests.api import Sharding, build_case, shrink

KINDS = {
    "llava": hf.LlavaForConditionalGeneration,
}
NO_CHANCE = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
Batch = dict[str, Any]


def text_only(batch: Batch, seed: int) -> Batch:
    ids = torch.randint(5, 20, batch["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def gradients(model: Any, batches: list[Batch], *, scale: float = 1.0, of_logits: bool = False) -> list[float]:
    """Backward passes over some batches, by the model's loss or one that a script makes of the logits; the losses."""
    losses = []
    for batch in batches:
        output = model(**batch)
        loss = output.loss
        if of_logits:
            loss = model.loss_function(output.logits, batch["labels"], vocab_size=output.logits.shape[-1])
        (loss * scale).backward()
        losses.append(loss.item())
    return losses


def compared(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """How far gradients are apart, one that is missing counts as zeros; relative to the largest of all."""
    largest = max(each.abs().max().item() for each in expected.values())
    zero = torch.zeros(())
    names = found.keys() | expected.keys()
    return max((found.get(n, zero) - expected.get(n, zero)).abs().max().item() for n in names) / largest


def with_media(model: Any, seed: int) -> Batch:
    """Rows of 40 tokens with an image at their beginning."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 20, (2, 40), generator=generator)
    ids[:, :16] = model.config.image_token_id
    images = torch.randn(2, 3, 32, 32, generator=generator)
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": images}


def cases_of(kinds: Iterable[str], root: Path) -> dict[str, Any]:
    """Tiny models, the batches of two ranks, of which some have images, and what one process makes of them."""
    made = {}
    for kind in kinds:
        kind_class, folder = KINDS[kind], root / kind
        config = shrink(hf.CONFIG_MAPPING[kind](), "tiny")
        model = build_case(kind_class, config)
        model.save_pretrained(folder)
        first, second = (with_media(model, seed) for seed in range(2))
        plain = text_only(first, 1)
        steps = [[first, text_only(first, 2)], [plain, second], [plain, text_only(first, 3)]]
        losses = [gradients(model, step, scale=0.5) for step in steps]
        made[kind] = folder, kind_class, steps, losses, {n: p.grad for n, p in model.named_parameters()}
    return made


def train_on_towers(
    folder: Path,
    kind: Any,
    steps: list[list[Batch]],
    losses: list[list[float]],
    expected: Any,
    *,
    frozen: str | None = None,
    of_logits: bool = False,
    **settings: Any,
) -> None:
    """Evaluate and accumulate."""
    rank = dist.get_rank()
    model = from_pretrained(folder, auto_class=kind, load_kwargs={"progress": False}, **settings)
    model.train(bool(settings))
    if frozen is not None:
        model.get_submodule(frozen).requires_grad_(False)
        expected = {name: gradient for name, gradient in expected.items() if not name.startswith(f"{frozen}.")}
    for step, of_ranks in zip(steps, losses, strict=True):
        with torch.no_grad():
            assert model(**step[rank]).loss.item() == pytest.approx(of_ranks[rank], abs=1e-4)
        assert gradients(model, [step[rank]], of_logits=of_logits)[0] == pytest.approx(of_ranks[rank], abs=1e-4)
    assert compared(full_gradients(model), {n: g for n, g in expected.items() if g is not None}) < 2e-5


def run_towers(cases: dict[str, Any]) -> Any:
    runs: dict[str, Any] = {kind: partial(train_on_towers, *case) for kind, case in cases.items()}
    runs["llava, loss of its logits"] = partial(train_on_towers, *cases["llava"], of_logits=True)
    runs["llava, tower frozen"] = partial(train_on_towers, *cases["llava"], frozen="model.vision_tower")
    runs["tensor parallel"] = partial(refused_where_layers_are_shared, *cases["llava"])
    return run_cases(runs)


def refused_where_layers_are_shared(folder: Path, kind: Any, steps: list[list[Batch]], *_: Any) -> None:
    model = from_pretrained(folder, auto_class=kind, load_kwargs={"progress": False})
    with patch.object(Sharding, "is_divided", True), pytest.raises(RanksError, match="text alone on rank 1"):
        model(**steps[0][dist.get_rank()])


def test_images_on_one_rank_only(tmp_path):
    run_ranks(run_towers, 2, cases_of(KINDS, tmp_path))


# ---- layers ----


def exit_early(model: Any, layers: int) -> None:
    model.config.num_hidden_layers = layers


LAYERS: dict[str, tuple[Any, Callable[[Any, int], Any]]] = {
    "early exit": (hf.LlamaConfig(num_hidden_layers=4), lambda model, row: exit_early(model, 1 + row)),
    "no layer": (hf.LlamaConfig(num_hidden_layers=4), lambda model, row: exit_early(model, 2 * (row % 2))),
    "dropped": (
        hf.BartConfig(encoder_layerdrop=0.5, decoder_layerdrop=0.5, **NO_CHANCE),
        lambda _, row: torch.manual_seed(row),
    ),
}


@pytest.fixture(scope="module")
def layered(tmp_path_factory) -> dict[str, Any]:
    """Models that leave layers out, rows for four passes on two ranks, and what one process makes of them."""
    made = {}
    for name, (config, prepare) in LAYERS.items():
        kind = hf.LlamaForCausalLM if config.model_type == "llama" else hf.BartForConditionalGeneration
        model = build_case(kind, shrink(config, "tiny")).train()
        folder = tmp_path_factory.mktemp("layers")
        model.save_pretrained(folder)
        ids = torch.randint(5, 20, (4, 1, 8), generator=torch.Generator().manual_seed(0))
        batches = [{"input_ids": i, "labels": i} for i in ids]
        losses = []
        for row, batch in enumerate(batches):
            prepare(model, row)
            losses += gradients(model, [batch], scale=0.5)
        made[name] = folder, kind, name, batches, losses, {n: p.grad for n, p in model.named_parameters()}
    return made


def train_on_layers(
    folder: Path, kind: Any, name: str, batches: list[Batch], losses: list[float], expected: Any, **settings: Any
) -> None:
    model = from_pretrained(folder, auto_class=kind, load_kwargs={"progress": False}, **settings).train()
    for first in (0, 2):
        row = first + dist.get_rank()
        LAYERS[name][1](model, row)
        assert gradients(model, [batches[row]]) == pytest.approx([losses[row]], abs=1e-4)
    assert compared(full_gradients(model), {n: g for n, g in expected.items() if g is not None}) < 2e-5


def run_layers(layered: dict[str, Any]) -> Any:
    runs = {name: partial(train_on_layers, *case) for name, case in layered.items()}
    runs["early exit, recomputed"] = partial(train_on_layers, *layered["early exit"], activation_checkpointing=True)
    return run_cases(runs)


def test_layers_that_one_rank_leaves_out(layered):
    """Each rank leaves out others: gradients are those of one process."""
    run_ranks(run_layers, 2, layered)
