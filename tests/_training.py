"""What tests of training share: rows, a loop, Accelerators as in a new process, TrainingArguments, gathered weights."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_fsdp_tools import FSDPTrainerMixin, make_accelerator
from hf_fsdp_tools.testing import forget_accelerate
from tests._checkpoints import full
from tests.api import local_device


class ShardedTrainer(FSDPTrainerMixin, Trainer):
    """The Trainer as the README has it."""


def make_rows(count: int, *, ragged: bool = False) -> list[dict[str, torch.Tensor]]:
    """Rows of six words, soon learned; ragged ones train on 1 to 11 of their tokens."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 9, (count, 12), generator=generator)
    labels = ids.clone()
    if ragged:
        for row, kept in zip(labels, torch.randint(2, 13, (count,), generator=generator), strict=True):
            row[int(kept) :] = -100
    return [{"input_ids": i, "labels": row} for i, row in zip(ids, labels, strict=True)]


def on_device(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with its tensors on this rank's device."""
    return {key: each.to(local_device()) if isinstance(each, torch.Tensor) else each for key, each in batch.items()}


def batches_of(rows: list[dict[str, torch.Tensor]], size: int) -> list[dict[str, torch.Tensor]]:
    """All batches of that size, in order, on this rank's device."""
    return [on_device(batch) for batch in DataLoader(rows, batch_size=size)]  # type: ignore[arg-type]


def new_accelerator(**settings: Any) -> Accelerator:
    """An Accelerator as in a new process: its state is shared by all of a process, which goes through several here."""
    forget_accelerate()
    return make_accelerator(cpu=local_device().type == "cpu", **settings)


def train(
    model: Any,
    optimizer: Any,
    batches: Iterable[dict[str, torch.Tensor]],
    *,
    accelerator: Accelerator | None = None,
    clip: float | None = None,
) -> list[float]:
    """One step for each batch; the losses, with an accelerator their means over the ranks."""
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        if clip is not None:
            (accelerator or nn.utils).clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss if accelerator is None else accelerator.reduce(loss.detach(), "mean")).item())
    return losses


Run = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""The loss of each step, the weights after the first, and after the last."""


def by_hand(
    folder: Path,
    steps: Sequence[Sequence[dict[str, torch.Tensor]]],
    masters: torch.dtype,
    compute: torch.dtype,
    *,
    clip: float,
    scale: float = 1.0,
) -> Run:
    """One process that does what FSDP promises: each rank's batch of a step forward and backward in `compute`, its loss
    times `scale`, gradients averaged in fp32, a step of the masters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=compute).to(local_device()).train()
    exact = AutoModelForCausalLM.from_pretrained(folder).to(local_device())
    copies = [nn.Parameter(parameter.detach().to(masters)) for parameter in exact.parameters()]
    optimizer = torch.optim.AdamW(copies, lr=1e-2, weight_decay=0.0)
    names = [name for name, _ in model.named_parameters()]
    losses, first = [], {}
    for parts in steps:
        mean, total = [torch.zeros_like(p, dtype=torch.float32) for p in copies], 0.0
        for batch in parts:
            loss = model(**on_device(batch)).loss
            for sum_, gradient in zip(mean, torch.autograd.grad(loss * scale, list(model.parameters())), strict=True):
                sum_ += gradient.float() / scale / len(parts)
            total += loss.item() / len(parts)
        for master, gradient in zip(copies, mean, strict=True):
            master.grad = gradient.to(masters)
        nn.utils.clip_grad_norm_(copies, clip)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), copies, strict=True):
                parameter.copy_(master)
        losses.append(total)
        first = first or {name: p.detach().float().cpu().clone() for name, p in zip(names, copies, strict=True)}
    return losses, first, {name: p.detach().float().cpu() for name, p in zip(names, copies, strict=True)}


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **settings: Any) -> Any:
    """Quick steps, every loss logged, nothing saved; each setting may be another. The kind may be a config of TRL."""
    defaults = {
        "max_steps": 10, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 0.5,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "per_device_train_batch_size": 2, "use_cpu": local_device().type == "cpu", "dataloader_pin_memory": False,
    }  # fmt: skip
    return kind(output_dir=str(folder), **{**defaults, **settings})


def logged(trainer: Any, key: str = "loss") -> list[float]:
    """Every value of that name in the Trainer's history."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def num_units(model: nn.Module) -> int:
    """FSDP2's units, by its own records: modules of one unit count as one."""
    return len({module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)})


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, gathered, in fp32 on the CPU."""
    return {name: full(parameter).float().clone() for name, parameter in model.named_parameters()}


def full_states(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Copies of the weights and of the optimizer's state, by name, gathered, on the CPU."""
    tensors = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {name: full(tensor).clone() for name, tensor in tensors.items()}


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients that there are, gathered, on the CPU."""
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference between two models' weights, which have the same names."""
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)
