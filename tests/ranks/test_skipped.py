"""Units that one rank does not run, and others do: towers without inputs, dropped layers, early exits."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp2

from hf_fsdp_tools import from_pretrained
from hf_fsdp_tools.distributed import rounds
from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.proof.batches import candidates, random_batch
from hf_fsdp_tools.proof.case import build
from hf_fsdp_tools.proof.shrink import shrink
from tests._dist import run_cases, run_ranks
from tests._training import full_gradients

KINDS = {
    "llava": hf.LlavaForConditionalGeneration,
    "qwen2_5_vl": hf.Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": hf.Qwen3VLForConditionalGeneration,
    "mllama": hf.MllamaForConditionalGeneration,
    "qwen2_audio": hf.Qwen2AudioForConditionalGeneration,
}
Batch = dict[str, Any]
Log = list[tuple[str, str]]


def text_only(batch: Batch, seed: int) -> Batch:
    """Rows of text alone, of the same shape."""
    ids = torch.randint(5, 20, batch["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


@contextmanager
def logged() -> Iterator[Log]:
    """FSDP2's collectives of this rank in their order, each with what it gathers or reduces, and rounds of the store."""
    log: Log = []

    def noting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            log.append((name, first[0]._param_fqn if isinstance(first, list) else ""))
            return own(first, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, owner in (("foreach_all_gather", fsdp2), ("foreach_reduce", fsdp2), ("exchange", rounds.Rounds)):
            stack.enter_context(patch.object(owner, name, noting(name, getattr(owner, name))))
        yield log


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


def with_media(kind: str, model: Any, seed: int) -> Batch:
    """Rows of 40 tokens with an image, or sound, at their beginning."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 20, (2, 40), generator=generator)
    config = model.config
    if kind == "qwen2_audio":
        media = {"input_features": torch.randn(2, 128, 128, generator=generator)}
        media["feature_attention_mask"] = torch.ones(2, 128, dtype=torch.long)
        ids[:, :32] = config.audio_token_id
    elif kind == "llava":
        media = {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
        ids[:, :16] = config.image_token_id
    elif kind == "mllama":
        side = config.vision_config.image_size
        media = {"pixel_values": torch.randn(2, 1, 4, 3, side, side, generator=generator)}
        media["aspect_ratio_ids"] = torch.ones(2, 1, dtype=torch.long)
        media["aspect_ratio_mask"] = torch.tensor([1, 0, 0, 0]).expand(2, 1, 4)
        media["cross_attention_mask"] = torch.tensor([1, 0, 0, 0]).expand(2, 40, 1, 4)
    else:
        batch = next(candidates(model))
        return random_batch(batch, seed)
    return {"input_ids": ids, "labels": ids.clone(), **media}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Any]:
    """Tiny models, the batches of two ranks, of which some have images or sound, and what one process makes of them."""
    made = {}
    for kind, kind_class in KINDS.items():
        config = shrink(hf.CONFIG_MAPPING[kind](), "tiny")
        if kind == "mllama":  # layers between others read the images, and are left out without
            config.vision_config.vision_output_dim = 5 * config.vision_config.hidden_size
            config.text_config.cross_attention_layers = [1, 3]
        model = build(kind_class, config)
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        first, second = (with_media(kind, model, seed) for seed in range(2))
        plain = text_only(first, 1)
        steps = [[first, text_only(first, 2)], [plain, second], [plain, text_only(first, 3)]]
        losses = [gradients(model, step, scale=0.5) for step in steps]
        made[kind] = folder, kind_class, steps, losses, {n: p.grad for n, p in model.named_parameters()}
    return made


def train_on_towers(
    folder: Path, kind: Any, steps: list[list[Batch]], losses: list[list[float]], expected: Any, **settings: Any
) -> list[Log]:
    """Evaluate and accumulate; the collectives of each forward and backward pass, which all ranks run alike."""
    rank, logs = dist.get_rank(), []
    model = from_pretrained(folder, auto_class=kind, load_kwargs={"progress": False}, **settings)
    model.train(bool(settings))
    for step, of_ranks in zip(steps, losses, strict=True):
        with torch.no_grad(), logged() as log:
            assert model(**step[rank]).loss.item() == pytest.approx(of_ranks[rank], abs=1e-4)
        same_on_all(log)
        with logged() as log:
            assert gradients(model, [step[rank]])[0] == pytest.approx(of_ranks[rank], abs=1e-4)
        logs.append(same_on_all(log))
    assert compared(full_gradients(model), {n: g for n, g in expected.items() if g is not None}) < 2e-5
    return logs


def run_towers(cases: dict[str, Any]) -> Any:
    runs = {kind: partial(train_on_towers, *case) for kind, case in cases.items()}
    checkpointed = {"activation_checkpointing": True}
    runs |= {f"{kind}, recomputed": partial(train_on_towers, *cases[kind], **checkpointed) for kind in ("llava",)}
    return run_cases(runs)


def test_images_or_sound_on_one_rank_only(cases):
    """Training and evaluation, gradients accumulated over passes with images on rank 0, on rank 1 and on none."""
    for kind, logs in run_ranks(run_towers, 2, cases)[0].items():
        *differ, alike = ([name for name, _ in log].count("exchange") for log in logs)
        assert alike == 1, kind  # the names of the inputs are compared, and nothing else
        assert all(2 < count < 20 for count in differ), (kind, differ)
