"""A sharded model beside the plain one: what each computes of the same batches, and how far they are apart.

The plain model (`Model.from_pretrained`, one process) sees the batches of all ranks, one after the other; its gradients
are their mean. Of the sharded model (`hf_fsdp_tools.from_pretrained`) each rank sees its own batch. Both are in
evaluation mode, since dropout draws other values on each rank; the random state is set before each forward pass.

In fp32 both sides hold fp32. In bf16 the sharded model holds fp32 and computes in bf16 (`MixedPrecisionPolicy`), which
is how it is trained. Beside it stands the plain model with its parameters in bf16 and its buffers as they are: the same
operations on the same rounded weights, so that even roundings agree. AdamW steps in fp32 alone.

A difference is relative to the largest value of a tensor, of a gradient at least 0.01 times the largest of all. In
bf16 a tensor may also be as far from the plain model in fp32 as the plain model in bf16 is, twice at most.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import hf_fsdp_tools
from benchmarks.architectures.batches import Batch, random_batch
from hf_fsdp_tools.distributed.shards import local_boxes_of, local_tensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.sharding.fsdp2_internals import parameters_of_unit, unit_modules
from hf_fsdp_tools.sharding.shard import sharding_of

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
# The eps is larger than usual: a gradient of zero must not step by the sign of its rounding.
STEP = {"lr": 1e-3, "eps": 1e-4}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny checkpoint and the batch that its model takes."""

    model_class: type[PreTrainedModel]
    folder: Path
    batch: Batch
    frozen: frozenset[str] = frozenset()
    """Parameters that the class freezes."""
    cp_size: int = 1
    """Ranks that share the rows of a batch (context parallelism)."""

    def batch_of(self, rank: int, dtype: torch.dtype, *, has_labels: bool = True) -> dict[str, Any]:
        """The values that a rank sees; floats that the model computes with in the dtype of its weights."""
        made = random_batch(self.batch, 1000 + rank // self.cp_size)
        if not has_labels:
            made.pop("labels", None)
        return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in made.items()}


@dataclass(kw_only=True)
class Figures:
    """What the plain model computes in one precision."""

    state: Tensors
    outputs: list[Tensors]  # evaluation, of each rank's batch
    losses: list[float]
    gradients: Tensors
    stepped: Tensors


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
    torch.manual_seed(7)
    copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}  # some models write to them
    return model(**copies)


def evaluate(model: nn.Module, batch: dict[str, Any]) -> Tensors:
    with torch.no_grad():
        found = dict(outputs_of(forward(model, batch)))
    return {name: tensor.detach().clone() for name, tensor in found.items()}


# ---- the plain model ----


def plain_figures(case: Case, precision: str, world_size: int) -> Figures:
    """What the plain model computes of the batches of all ranks."""
    model, dtype = load_plain(case), PRECISIONS[precision]
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dim():  # 0-d ones are not gathered, and stay as they are
            parameter.data = parameter.data.to(dtype)
    state = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    total: Tensors = {}
    outputs, losses = [], []
    for rank in range(world_size):
        outputs.append(evaluate(model, case.batch_of(rank, dtype, has_labels=case.cp_size == 1)))
        loss = loss_of(forward(model, case.batch_of(rank, dtype)))
        model.zero_grad(set_to_none=True)
        loss.backward()
        losses.append(float(loss.detach()))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                part = parameter.grad.float() / world_size
                total[name] = total[name] + part if name in total else part
    if not all(bool(gradient.isfinite().all()) for gradient in total.values()):
        raise ValueError("gradients are not finite")
    stepped = step(load_plain(case), total)
    return Figures(state=state, outputs=outputs, losses=losses, gradients=total, stepped=stepped)


def load_plain(case: Case) -> PreTrainedModel:
    torch.manual_seed(3)
    model = case.model_class.from_pretrained(case.folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():  # transformers 5 makes all that it loads trainable
        parameter.requires_grad_(name not in case.frozen and parameter.is_floating_point())
    return model.eval()


def step(model: nn.Module, gradients: Tensors) -> Tensors:
    """The weights after one step of AdamW by given gradients."""
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].to(parameter.dtype) if name in gradients else None
    optimizer_of(model).step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **STEP)


def tensors_of(model: nn.Module) -> Tensors:
    """Parameters and buffers, those that no file holds too."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


# ---- the sharded model ----


def held_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank holds of a sharded one; without communication."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    boxes = local_boxes_of(like)
    if not boxes:
        return whole.flatten()[:0].reshape(local_tensor(like).shape)
    ((box, _),) = boxes
    return whole[tuple(slice(start, start + length) for start, length in zip(box.start, box.length, strict=True))]


def examine_sharded(case: Case, precision: str, plain: Figures, exact: Figures) -> dict[str, Any]:
    """Outcome and largest difference of each check, on this rank; every rank must call."""
    rank, dtype = dist.get_rank(), PRECISIONS[precision]
    policy = None if precision == "fp32" else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    torch.manual_seed(3)
    model = hf_fsdp_tools.from_pretrained(
        case.folder,
        auto_class=case.model_class,
        dtype=torch.float32,
        mp_policy=policy,
        mesh=hf_fsdp_tools.ParallelDims(cp_size=case.cp_size),
    )
    row: dict[str, Any] = {"units": len(sharding_of(model).plan.units)}
    row["load"] = _unequal(tensors_of(model), exact.state)
    gathered = Gathered()
    batch = case.batch_of(rank, torch.float32)
    with gathered.counted():
        # beside a loss, ranks that share rows have a part of the logits
        outputs = evaluate(model, case.batch_of(rank, torch.float32, has_labels=case.cp_size == 1))
        left_gathered = len(gathered.now)
        with first_units(model) as first:
            output = forward(model, batch)
            loss = loss_of(output)
        loss.backward()
    row["gathered"], row["allowed"] = gathered.most, most_allowed(model, first)
    row["resharded"] = "" if not left_gathered else f"{left_gathered} units stay gathered after an evaluation"
    bound = TOLERANCE[precision]
    row["outputs"] = _apart(outputs, plain.outputs[rank], exact.outputs[rank], bound)
    losses = [{"loss": torch.tensor(value)} for value in (float(loss.detach()), plain.losses[rank], exact.losses[rank])]
    row["loss"] = _apart(*losses, bound)
    own = output.get("loss") if isinstance(output, dict) else None
    if isinstance(own, torch.Tensor) and own.dtype != torch.float32:
        row["loss"] = (row["loss"][0], f"computed in {own.dtype}, and not in fp32 as by autocast")
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    row["gradients"] = _apart(gradients, plain.gradients, exact.gradients, bound, absent_is_zero=True)
    if precision == "fp32":
        optimizer_of(model).step()
        # AdamW divides rounding by gradients that are near zero.
        row["step"] = _apart(dict(model.named_parameters()), plain.stepped, exact.stepped, 10 * bound)
        row["save"] = _saved(case, model)
    return row


def _unequal(found: Tensors, expected: Tensors) -> str:
    """What differs bit for bit, of the shards too; empty where nothing does."""
    if list(found) != list(expected):
        return f"other names: {sorted(set(found) ^ set(expected))[:3] or 'another order'}"
    wrong = [name for name, value in expected.items() if not _same(found[name], value)]
    return f"{len(wrong)} tensors differ, {wrong[0]} first" if wrong else ""


def _same(found: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor, or this rank's shard of it, equals the whole one bit for bit."""
    if found.dtype != whole.dtype or found.shape != whole.shape:
        return False
    a, b = local_tensor(found), held_part(whole, found)
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _apart(
    found: Tensors, plain: Tensors, exact: Tensors, bound: float, *, absent_is_zero: bool = False
) -> tuple[float, str]:
    """The largest relative difference and, where it is too large, what is apart; "" otherwise.

    In lower precision a value may also be as far from fp32 as the plain model is, twice at most.
    """
    floor = 0.01 * max([float(t.abs().max()) for t in plain.values() if absent_is_zero and t.numel()], default=0.0)
    names = set(found) | set(plain) if absent_is_zero else set(plain)
    if not absent_is_zero and set(found) != set(plain):
        return float("inf"), f"other names: {sorted(set(found) ^ set(plain))[:3]}"
    worst, what = 0.0, ""
    for name in sorted(names):
        a, b = found.get(name), plain.get(name)
        if a is None or b is None:  # no gradient is a gradient of zeros
            a = torch.zeros_like(b) if a is None else a
            b = torch.zeros(a.shape) if b is None else b
        if a.shape != b.shape:
            return float("inf"), f"{name}: shape {tuple(a.shape)} and not {tuple(b.shape)}"
        difference = _relative(a, b, floor)
        if difference > worst:
            worst = difference
            far = exact.get(name)
            is_rounded = bound >= 1e-3 and far is not None and far.shape == b.shape
            if difference > bound and not (is_rounded and _relative(a, far, floor) <= 2 * _relative(b, far, floor)):
                what = f"{name}: {difference:.1e}"
    return worst, what


def _relative(found: torch.Tensor, whole: torch.Tensor, floor: float) -> float:
    """The largest difference of a tensor, or of this rank's shard, relative to the largest value of the whole one."""
    a, b = local_tensor(found), held_part(whole, found)
    if not b.numel():
        return 0.0
    if not torch.equal(a.isnan(), b.isnan()):
        return float("inf")
    a, b = torch.nan_to_num(a.double()), torch.nan_to_num(b.double())
    return float((a - b).abs().max() / max(float(torch.nan_to_num(whole.double()).abs().max()), floor, 1e-12))


def _saved(case: Case, model: nn.Module) -> str:
    """What is wrong with the model's saved form, reopened by transformers; empty where nothing is."""
    folder = case.folder.with_name("saved")
    hf_fsdp_tools.save_pretrained(model, folder)
    if (a := _headers(folder)) != (b := _headers(case.folder)):
        return f"files differ from transformers': {sorted(set(a.items()) ^ set(b.items()))[:3]}"
    torch.manual_seed(3)
    reopened = case.model_class.from_pretrained(folder, dtype=torch.float32)
    return _unequal(tensors_of(model), tensors_of(reopened))


def _headers(folder: Path) -> dict[str, str]:
    return {key: f"{stored.dtype} {stored.shape}" for key, stored in CheckpointIndex.open(folder).tensors.items()}


# ---- how many units are gathered at a time, and how many may be ----

SKIPPED = ("past_key_values", "cache", "encoder_outputs", "decoder_past_key_values")


def outputs_of(output: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a model's output by name, caches left out."""
    if isinstance(output, torch.Tensor):
        yield prefix, output
    elif isinstance(output, dict):
        for key, value in output.items():
            if key not in SKIPPED and "cache" not in str(key):
                yield from outputs_of(value, f"{prefix}.{key}")
    elif isinstance(output, list | tuple):
        for i, value in enumerate(output):
            yield from outputs_of(value, f"{prefix}.{i}")


class Gathered:
    """How many units are gathered at a time."""

    def __init__(self) -> None:
        self.now: set[int] = set()
        self.most = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A block in which every unit that FSDP2 gathers or frees is noted."""
        with ExitStack() as stack:
            for name in ("unshard", "_to_unsharded", "_to_sharded"):
                stack.enter_context(patch.object(FSDPParamGroup, name, self._noting(getattr(FSDPParamGroup, name))))
            yield

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(group, *args, **kwargs)
            if group.is_unsharded or group._all_gather_result is not None:
                self.now.add(id(group.modules[0]))
                self.most = max(self.most, len(self.now))
            else:
                self.now.discard(id(group.modules[0]))
            return result

        return call


def most_allowed(model: nn.Module, first: set[int]) -> int:
    """The units that may be gathered at a time, after a backward pass.

    The root, the units around each other where they are nested, the next one, the kept tail; and those that FSDP2 frees
    only at the end of the backward pass: units whose inputs need no gradient (`first`), and units that are fetched for
    a backward pass which does not reach them.
    """
    plan = sharding_of(model).plan
    units = [fqn for unit in plan.units for fqn in unit.modules if fqn]
    depth = max((sum(fqn == other or fqn.startswith(f"{other}.") for other in units) for fqn in units), default=0)
    kept = sum(unit.reshard_after_forward is False for unit in plan.units)
    unreached = {
        id(unit_modules(module)[0])
        for module in model.modules()
        if isinstance(module, FSDPModule)
        and module is not model
        and all(shard.grad is None for shard, _ in parameters_of_unit(module))
    }
    return 2 + depth + kept + len(first | unreached)


@contextmanager
def first_units(model: nn.Module) -> Iterator[set[int]]:
    """The units whose inputs need no gradient in a forward pass."""
    found: set[int] = set()

    def look(module: Any, args: Any, kwargs: Any) -> None:
        if not any(t.requires_grad for _, t in outputs_of([args, dict(kwargs)])):
            found.add(id(unit_modules(module)[0]))

    units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    handles = [module.register_forward_pre_hook(look, with_kwargs=True) for module in units]
    yield found
    for handle in handles:
        handle.remove()
