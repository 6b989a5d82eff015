"""A case to be compared, and what its plain model computes: transformers' own `from_pretrained`, in one process.

The plain model sees the batches of all ranks, one after the other; its gradients are their mean. In bf16, buffers stay
as they are and parameters are in bf16 but for those that transformers keeps in fp32, and those of recurrences, with
which all models compute in fp32. AdamW steps in fp32 alone.
"""

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.modeling.module_tree import plain_name
from hf_fsdp_tools.modeling.tree_copy import base_of
from hf_fsdp_tools.proof.rounding import SHARES, summed_in_parts
from hf_fsdp_tools.proof.routing import Choices, choices
from hf_fsdp_tools.sharding.injection import names_as_saved
from hf_fsdp_tools.sharding.precision import OF_RECURRENCES

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

_LABELS = ("labels", "shift_labels", "num_items_in_batch")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny checkpoint, the batches that its model takes, and how ranks share both."""

    model_class: type[PreTrainedModel]
    folder: Path
    """Where the checkpoint is, or the adapter of one."""
    batches: dict[str, list[dict[str, Any]]]
    """One batch of each kind (rows, padded, packed) for each group of ranks with the same rows."""
    dims: ParallelDims = field(default_factory=ParallelDims)
    sequence_parallel: bool = False
    fsdp_version: int = 2
    activation_checkpointing: bool = False
    frozen: frozenset[str] = frozenset()
    """Parameters that the class freezes."""
    is_adapter: bool = False
    is_training: bool = False
    """Whether passes with a loss are in training mode, for models in which nothing is left to chance; else none is."""

    def batches_of(self, kind: str, precision: str, *, has_labels: bool = True) -> list[dict[str, Any]]:
        """The batches of a kind; floats that the model computes with in the dtype of its weights."""
        return [
            {
                name: value.to(PRECISIONS[precision])
                if isinstance(value, torch.Tensor) and value.is_floating_point()
                else value
                for name, value in batch.items()
                if has_labels or name not in _LABELS
            }
            for batch in self.batches[kind]
        ]

    def first_batches(self, precision: str = "fp32") -> list[dict[str, Any]]:
        """The batches of the first kind."""
        return self.batches_of(next(iter(self.batches)), precision)

    @property
    def has_labels_in_evaluation(self) -> bool:
        """Whether outputs are compared next to a loss; ranks of context parallelism then have a part of the logits."""
        return self.dims.cp_size == 1


@dataclass(kw_only=True)
class Figures:
    """What the plain model computes in one precision."""

    state: Tensors
    modules: Tensors
    """The outputs of modules in the first batch, in the order of their calls."""
    outputs: dict[str, list[Tensors]]
    """Outputs of each kind and batch, in evaluation."""
    losses: dict[str, list[float]]
    gradients: dict[str, Tensors]
    accumulated: Tensors
    """The gradients of the last kind and the first one together."""
    stepped: Tensors
    base: list[Tensors] = field(default_factory=list)
    """Outputs of the base model alone of each first batch, in evaluation."""
    continued: list[torch.Tensor] = field(default_factory=list)
    """The losses of three steps more, each of the first batches."""
    chosen: dict[str, list[Choices]] = field(default_factory=dict)
    """The experts of each kind and batch, in training."""
    chosen_in_evaluation: dict[str, list[Choices]] = field(default_factory=dict)
    others: "list[Figures]" = field(default_factory=list)
    """Below fp32, the same with sums in another order, and in fp32, all with the same experts: right results, too."""


# ---- one forward pass ----


def loss_of(output: Any) -> torch.Tensor:
    """The model's loss; without one, a weighted mean and mean square of all floating-point outputs."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss.float().reshape(())
    parts = []
    for _, tensor in outputs_of(output):
        if tensor.is_floating_point() and tensor.requires_grad and tensor.numel():
            values = tensor.float().flatten()
            values = torch.where(values.isfinite(), values, 0.0)
            weights = torch.sin(torch.arange(len(values)) + 0.5)
            parts.append((values * weights).mean() + 0.1 * (values * values).mean())
    if not parts:
        raise ValueError("no output has a gradient")
    return torch.stack(parts).sum()


def forward(model: nn.Module, batch: dict[str, Any]) -> Any:
    """The outputs of a batch, from a known random state."""
    torch.manual_seed(7)
    copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}  # some models write to them
    return model(**copies)


def evaluate(model: nn.Module, batch: dict[str, Any]) -> Tensors:
    """All outputs of a batch in evaluation mode, without gradients."""
    with torch.no_grad():
        found = dict(outputs_of(forward(model.eval(), batch)))
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def base_outputs(model: nn.Module, batch: dict[str, Any]) -> Tensors:
    """All outputs of the base model alone, which loops call for features; none where the model is its own base."""
    whole = base_of(model)
    base: Any = getattr(whole, "base_model", whole)
    if base is whole:
        return {}
    known = inspect.signature(base.forward).parameters
    given = {name: value for name, value in batch.items() if name in known and name not in _LABELS}
    return {name: tensor.detach().clone() for name, tensor in outputs_of(forward(base, given))}


_SKIPPED = ("past_key_values", "cache", "state", "encoder_outputs", "decoder_past_key_values")


def outputs_of(output: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a model's output by name, caches left out."""
    if isinstance(output, torch.Tensor):
        yield prefix, output
    elif isinstance(output, dict):
        for key, value in output.items():
            if key not in _SKIPPED and "cache" not in str(key):
                yield from outputs_of(value, f"{prefix}.{key}")
    elif isinstance(output, list | tuple):
        for i, value in enumerate(output):
            yield from outputs_of(value, f"{prefix}.{i}")


@contextmanager
def noted_modules(model: nn.Module) -> Iterator[Tensors]:
    """What each module gives in a block, by name, in the order of calls.

    Modules that are called again are left out: some models call theirs in the order of a set, of rotary angles.
    """
    noted: Tensors = {}
    calls: Counter[str] = Counter()

    def note(module: nn.Module, args: Any, output: Any, *, name: str) -> None:
        calls[name] += 1
        first = next((tensor for _, tensor in outputs_of(output) if tensor.is_floating_point()), None)
        if first is not None and calls[name] == 1:
            noted[name] = first.detach().clone()
        elif calls[name] > 1:
            noted.pop(name, None)

    with ExitStack() as stack:
        for name, known in names_of(model).items():
            stack.callback(model.get_submodule(name).register_forward_hook(partial(note, name=known)).remove)
        yield noted


def names_of(model: nn.Module) -> dict[str, str]:
    """The plain names of a model's modules, by their own."""
    return {name: known for name, _ in model.named_modules() if (known := plain_name(name))}


# ---- the plain model ----


def plain_figures(case: Case, precision: str) -> Figures:
    """What the plain model computes of the batches of all ranks."""
    figures = _figures(case, precision)
    for share in SHARES if precision != "fp32" else ():
        with summed_in_parts(share):
            figures.others.append(_figures(case, precision, figures))
    figures.others += [_figures(case, "fp32", figures)] if precision != "fp32" else []
    return figures


def _figures(case: Case, precision: str, before: Figures | None = None) -> Figures:
    """What the plain model computes; with the experts that it chose `before`."""
    model, dtype = load_plain(case), PRECISIONS[precision]
    kept = {name for name, p in load_plain(case, dtype=dtype).named_parameters() if p.dtype == torch.float32}
    for name, parameter in model.named_parameters():
        is_kept = (name in kept and "lora_" not in name) or name.endswith(OF_RECURRENCES)  # PEFT makes its own in fp32
        if parameter.is_floating_point() and parameter.dim() and not is_kept:  # 0-d ones are not gathered
            parameter.data = parameter.data.to(dtype)
    state = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    figures = Figures(state=state, modules={}, outputs={}, losses={}, gradients={}, accumulated={}, stepped={})
    for kind in case.batches:
        silent = case.batches_of(kind, precision, has_labels=case.has_labels_in_evaluation)
        figures.outputs[kind] = []
        for i, batch in enumerate(silent):
            given = before.chosen_in_evaluation[kind][i] if before else None
            with choices(model, names_of(model), given) as made:
                figures.outputs[kind].append(evaluate(model, batch))
            figures.chosen_in_evaluation.setdefault(kind, []).append(made.once())
        total = figures.gradients.setdefault(kind, {})
        batches = case.batches_of(kind, precision)
        for i, batch in enumerate(batches):
            given = before.chosen[kind][i] if before else None
            with noted_modules(model) as modules, choices(model, names_of(model), given) as made:
                loss = loss_of(forward(model.train(case.is_training), batch))
            figures.chosen.setdefault(kind, []).append(made.once())
            figures.modules = figures.modules or modules
            model.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            figures.losses.setdefault(kind, []).append(float(loss.detach()))
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    part = parameter.grad.float() / len(batches)
                    total[name] = total[name] + part if name in total else part
        if not all(bool(gradient.isfinite().all()) for gradient in total.values()):
            raise ValueError("gradients are not finite")
    first, last = next(iter(figures.gradients.values())), total
    both = (first, last)
    figures.accumulated = {
        name: torch.stack([each[name] for each in both if name in each]).sum(0) for name in first | last
    }
    if before is None:
        with torch.no_grad(), suppress(Exception):  # a base that takes other inputs is not compared
            figures.base = [base_outputs(model.eval(), batch) for batch in case.first_batches(precision)]
        if precision == "fp32":
            _go_on(case, figures)
    return figures


def load_plain(case: Case, folder: Path | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """The plain model of a case as transformers loads it; of another folder in the same form, where one is given."""
    torch.manual_seed(3)
    folder = folder or case.folder
    if case.is_adapter:
        from peft import PeftConfig, PeftModel

        base = case.model_class.from_pretrained(
            PeftConfig.from_pretrained(str(folder)).base_model_name_or_path, dtype=dtype
        )
        with names_as_saved():
            return PeftModel.from_pretrained(base, str(folder), is_trainable=True).eval()
    model = case.model_class.from_pretrained(folder, dtype=dtype)
    for name, parameter in model.named_parameters():  # transformers 5 makes all that it loads trainable
        parameter.requires_grad_(name not in case.frozen and parameter.is_floating_point())
    return model.eval()


def _go_on(case: Case, figures: Figures) -> None:
    """Step by the accumulated gradients; then train on the first batches with an optimizer and a schedule, alone."""
    model, batches = load_plain(case), case.first_batches()
    for name, parameter in model.named_parameters():
        parameter.grad = figures.accumulated.get(name)
    optimizer_of(model).step()
    figures.stepped = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        losses = torch.stack([loss_of(forward(model.train(case.is_training), batch)) for batch in batches])
        losses.mean().backward()  # type: ignore[no-untyped-call]
        figures.continued.append(losses.detach())
        optimizer.step()
        for _ in batches:  # as Accelerate's schedules step, once for each group of ranks
            schedule.step()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, its eps larger than usual: a gradient of zero must not step by the sign of its rounding."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)


schedule_of = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9)


def tensors_of(model: nn.Module) -> Tensors:
    """Parameters and buffers, those that no file holds too."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
