"""Combinations drawn at random beside one plain process: two steps, a state, two more steps in another layout.

    FUZZ_SEED=7 FUZZ_DRAWS=300 pytest -m nightly tests/ranks/test_fuzz.py

A draw ends in the plain process's losses, norms and weights, or in one refusal, the same on every rank.
"""

import os
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import ParallelismConfig
from accelerate.utils import GradientAccumulationPlugin
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import (
    FSDPPlugin,
    FSDPToolsError,
    ParallelDims,
    clip_grad_norm_,
    from_pretrained,
    make_accelerator,
    save_pretrained,
)
from tests._checkpoints import randomize, tiny_config
from tests._dist import run_ranks
from tests._training import ShardedTrainer, arguments, logged, new_accelerator
from tests.api import telling

DENSE = (
    "llama", "qwen3", "gemma3_text", "mistral", "olmo2", "phi3", "granite", "cohere2", "glm4", "starcoder2", "gpt_neox",
    "smollm3", "exaone4", "nemotron", "apertus",
)  # fmt: skip
MOE = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss", "ernie4_5_moe", "qwen3_next")
SIZES = {
    1: ({},),
    2: ({}, {"tp_size": 2}, {"cp_size": 2}, {"ep_size": 2}),
    4: (
        {}, {"dp_replicate_size": 2}, {"tp_size": 2}, {"cp_size": 2}, {"ep_size": 2}, {"tp_size": 4}, {"cp_size": 4},
        {"ep_size": 4}, {"tp_size": 2, "cp_size": 2}, {"tp_size": 2, "ep_size": 2}, {"cp_size": 2, "ep_size": 2},
        {"dp_replicate_size": 2, "tp_size": 2}, {"dp_replicate_size": 2, "cp_size": 2},
        {"dp_replicate_size": 2, "ep_size": 2},
    ),
}  # fmt: skip
ROWS, STEPS = 4, 2
"""Rows of all ranks in a micro-batch, steps before and after the state."""
CLIP = 0.5
BOUNDS = {"fp32": (2e-4, 3e-4), "bf16": (8e-3, 1e-3)}
"""The first is for losses, which a Trainer rounds to 1e-4, the second for weights, which four steps move by 4e-3: for
each in fp32; for their mean in bf16, where AdamW makes a whole step of the sign of a rounding."""
Layout = tuple[int, dict[str, int]]


@dataclass(frozen=True)
class Draw:
    model_type: str
    host: str
    precision: str
    lora: bool
    recompute: Any
    accumulation: int
    keeps_gradients: bool
    """Whether micro-batches before the last one reduce nothing."""
    optimizer: str
    layouts: tuple[Layout, Layout] = field(default=((1, {}), (1, {})))


def drawn(chance: random.Random) -> Draw:
    model_type, host = chance.choice(DENSE + MOE), chance.choice(("loop", "accelerate", "trainer"))
    layouts = []
    for _ in range(2):
        ranks = chance.choice((1, 2, 2, 2, 4, 4))
        sizes = [each for each in SIZES[ranks] if model_type in MOE or "ep_size" not in each]
        if host != "loop":  # Accelerate's ParallelismConfig refuses copies of one shard that share rows or layers
            sizes = [each for each in sizes if "dp_replicate_size" not in each or len(each) == 1 or "ep_size" in each]
        layouts.append((ranks, chance.choice(sizes)))
    return Draw(
        model_type=model_type,
        host=host,
        # Qwen3-Next under autocast is itself 1e-2 away from fp32: each order of sums gives another loss.
        precision=chance.choice(("fp32", "fp32", "fp32" if model_type == "qwen3_next" else "bf16")),
        lora=chance.random() < 0.35,
        recompute=chance.choice((False, False, True, {"every_n_layers": 2}, {"save_ops": ("matmul",)})),
        accumulation=chance.choice((1, 2)),
        keeps_gradients=chance.random() < 0.5,
        optimizer=chance.choice(("adamw", "adamw", "sgd")),
        layouts=(layouts[0], layouts[1]),
    )


def rows_of(step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randint(3, 60, (ROWS, 16), generator=generator)


def optimizer_of(draw: Draw, model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if draw.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(trained, lr=1e-3, eps=1e-4, weight_decay=0.0)  # of zeros' rounding no step is made


# ---- one process ----


def make_files(draw: Draw, folder: Path) -> Path:
    config = telling(tiny_config(draw.model_type, 4))
    model = randomize(AutoModelForCausalLM.from_config(config))
    model.save_pretrained(folder / "base")
    if not draw.lora:
        return folder / "base"
    torch.manual_seed(3)
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), adapter).save_pretrained(folder / "adapter")
    return folder / "adapter"


def opened(draw: Draw, folder: Path, base: Path) -> torch.nn.Module:
    if not draw.lora:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(plain, folder, is_trainable=True)


def plain_run(draw: Draw, folder: Path, base: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = opened(draw, folder, base).train()
    optimizer, losses = optimizer_of(draw, model), []
    for step in range(2 * STEPS):
        total = 0.0
        for micro in range(draw.accumulation):
            ids = rows_of(step, micro)
            with torch.autocast("cpu", torch.bfloat16) if draw.precision == "bf16" else nullcontext():
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss / draw.accumulation
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


# ---- ranks ----


def on_ranks(draw: Draw, part: int, files: Path, folder: Path) -> dict[str, Any]:
    try:
        return {"losses": HOSTS[draw.host](draw, part, files, folder)}
    except FSDPToolsError as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def own_rows(draw: Draw, part: int, step: int, micro: int) -> torch.Tensor:
    dims = ParallelDims(**draw.layouts[part][1])
    groups = dist.get_world_size() // dims.ranks_per_row
    return rows_of(part * STEPS + step, micro).chunk(groups)[dist.get_rank() // dims.ranks_per_row]


def mean(value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def loop(draw: Draw, part: int, files: Path, folder: Path) -> list[float]:
    dims = ParallelDims(**draw.layouts[part][1]).resolve(dist.get_world_size())
    options: dict[str, Any] = {"mp_policy": "bf16"} if draw.precision == "bf16" else {}
    model = from_pretrained(
        files, mesh=dims.build_mesh("cpu"), dtype=torch.float32, is_trainable=draw.lora,
        activation_checkpointing=draw.recompute, load_kwargs={"progress": False}, **options,
    ).train()  # fmt: skip
    optimizer = optimizer_of(draw, model)
    if part:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder / "state")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(draw.accumulation):
            ids = own_rows(draw, part, step, micro)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / draw.accumulation
            loss.backward()
            total += float(loss.detach())
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(total))
    if part:
        save_pretrained(model, folder / "out")
    else:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder / "state")
    return losses


def accelerate(draw: Draw, part: int, files: Path, folder: Path) -> list[float]:
    sizes = dict(draw.layouts[part][1])
    plugin = FSDPPlugin(ep_size=sizes.pop("ep_size", 1), activation_checkpointing=bool(draw.recompute))
    settings: dict[str, Any] = {"gradient_accumulation_steps": draw.accumulation}
    if draw.keeps_gradients:
        settings = {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=draw.accumulation)}
    accelerator = new_accelerator(
        fsdp_plugin=plugin,
        parallelism_config=parallelism(sizes),
        mixed_precision=PRECISIONS[draw.precision],
        **settings,
    )
    model = from_pretrained(
        files, accelerator=accelerator, is_trainable=draw.lora, load_kwargs={"progress": False}
    ).train()
    model, optimizer = accelerator.prepare(model, optimizer_of(draw, model))
    if part:
        accelerator.load_state(folder / "state")
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(draw.accumulation):
            with accelerator.accumulate(model):
                ids = own_rows(draw, part, step, micro)
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                accelerator.backward(loss)
                total += float(loss.detach()) / draw.accumulation
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(mean(total))
    if part:
        save_pretrained(model, folder / "out")
    else:
        accelerator.save_state(folder / "state")
    return losses


class InOrder(ShardedTrainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer(draw: Draw, part: int, files: Path, folder: Path) -> list[float]:
    sizes = dict(draw.layouts[part][1])
    dims = ParallelDims(**sizes)
    options = {"ep_size": sizes.pop("ep_size", 1), "activation_checkpointing": bool(draw.recompute)}
    args = arguments(
        folder / "trainer",
        max_steps=(part + 1) * STEPS,
        save_strategy="steps",
        save_steps=STEPS,
        bf16=draw.precision == "bf16",
        gradient_accumulation_steps=draw.accumulation,
        per_device_train_batch_size=ROWS * dims.ranks_per_row // dist.get_world_size(),
        parallelism_config=parallelism(sizes),
        max_grad_norm=CLIP,
        fsdp=True,
        fsdp_config=options,
    )
    model = from_pretrained(
        files, accelerator=make_accelerator(args), is_trainable=draw.lora, load_kwargs={"progress": False}
    )
    every = [rows_of(step, micro) for step in range(2 * STEPS) for micro in range(draw.accumulation)]
    data = [{"input_ids": ids, "labels": ids} for ids in torch.cat(every)]
    made = InOrder(model=model, args=args, train_dataset=data, optimizers=(optimizer_of(draw, model), None))
    made.train(resume_from_checkpoint=bool(part))
    if part:
        save_pretrained(made.model, folder / "out")
    return logged(made)[-STEPS:]


HOSTS = {"loop": loop, "accelerate": accelerate, "trainer": trainer}
PRECISIONS = {"fp32": "no", "bf16": "bf16"}


def parallelism(sizes: dict[str, int]) -> ParallelismConfig | None:
    shards = dist.get_world_size()
    for size in sizes.values():
        shards //= size
    return ParallelismConfig(**sizes, dp_shard_size=shards) if sizes else None


# ---- the test ----


def outcome(draw: Draw, folder: Path) -> tuple[str, str]:
    """("ok", "refused" or "WRONG", and what was seen)."""
    files = make_files(draw, folder)
    losses, weights = plain_run(draw, files, folder / "base")
    loss_bound, weight_bound = BOUNDS[draw.precision]
    for part, (ranks, _) in enumerate(draw.layouts):
        try:
            found = run_ranks(on_ranks, ranks, draw, part, files, folder, timeout_s=150)
        except AssertionError as error:
            return "WRONG", str(error)
        refusals = {rank.get("refused", "") for rank in found}
        if any(refusals):
            return ("refused" if len(refusals) == 1 else "WRONG"), " | ".join(sorted(refusals))
        expected = losses[part * STEPS : (part + 1) * STEPS]
        if apart := [r["losses"] for r in found if r["losses"] != pytest.approx(expected, abs=loss_bound)]:
            return "WRONG", f"part {part}: losses {apart[0]} and not {expected}"
    saved = dict(opened(draw, folder / "out", folder / "base").named_parameters())
    if saved.keys() != weights.keys():
        return "WRONG", f"other names: {sorted(saved.keys() ^ weights.keys())[:4]}"
    summed = torch.mean if draw.precision == "bf16" else torch.max
    far = {name: float(summed((saved[name].detach() - weight).abs())) for name, weight in weights.items()}
    worst = max(far, key=far.__getitem__)
    return ("ok", "") if far[worst] < weight_bound else ("WRONG", f"weights: {worst} by {far[worst]:.1e}")


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_combinations_drawn_at_random_are_those_of_one_process(tmp_path: Path) -> None:
    seed, count = int(os.environ.get("FUZZ_SEED", time.time_ns() % 10**9)), int(os.environ.get("FUZZ_DRAWS", "40"))
    told: dict[str, list[str]] = {"ok": [], "refused": [], "WRONG": []}
    for number in range(count):
        draw = drawn(random.Random(f"{seed} {number}"))
        kind, said = outcome(draw, tmp_path / str(number))
        told[kind].append(f"FUZZ_SEED={seed}, draw {number}: {draw}\n  {said}")
        print(kind, told[kind][-1], flush=True)
    assert not told["WRONG"], "\n".join(told["WRONG"])
    assert len(told["ok"]) >= count // 2, "\n".join(told["refused"])
