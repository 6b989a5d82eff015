"""A sharded model compared with the plain one: what each computes of the same batches, and how far they are apart.

Each rank of the sharded model sees its own batch, and those of one row the same. The random state is set before each
forward pass. In fp32 both sides hold fp32. In bf16 the sharded model holds fp32 and computes in bf16
(`MixedPrecisionPolicy`), which is how it is trained: the same operations on the same rounded weights as in the plain
model, so that even roundings agree; and it is given the experts that the plain one has chosen (`routing`).

A difference is relative to the largest value of a tensor, of a gradient at least 0.01 times the largest of all. In
bf16 it may be a small multiple of what the plain model is from itself, where its sums are taken in another order or in
fp32 (`rounding`).
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.extensions.fsdp1.flat_shards import plain_view
from hf_fsdp_tools.extensions.fsdp1.wrap import load_weights_fsdp1, wrap_fsdp1
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.modeling.module_tree import plain_name
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.pretrained import from_pretrained
from hf_fsdp_tools.proof.plain import (
    PRECISIONS,
    Case,
    Figures,
    Tensors,
    base_outputs,
    evaluate,
    forward,
    load_plain,
    loss_of,
    names_of,
    noted_modules,
    optimizer_of,
    tensors_of,
)
from hf_fsdp_tools.proof.rounding import MULTIPLE
from hf_fsdp_tools.proof.routing import Choices, choices
from hf_fsdp_tools.saving.save import save_pretrained
from hf_fsdp_tools.sharding.replicated import clip_norm
from hf_fsdp_tools.sharding.sharding import sharding_of
from hf_fsdp_tools.text import first_line

TOLERANCE = {"fp32": 1e-4, "bf16": 2**-8}
"""Relative differences that no second rounding has to explain. (assumed in fp32: sums of another order over tens to
thousands of terms; in bf16 one rounding more of the largest value)"""

Found = tuple[float, str]
"""A relative difference, and a problem: "" where there is none."""


# ---- the sharded model ----


def load_sharded(case: Case, precision: str) -> Any:
    """The model of a case in shards, in evaluation mode. Every rank must call."""
    torch.manual_seed(3)
    dtype = PRECISIONS[precision]
    if case.fsdp_version == 1:
        model = build_meta_model(case.folder, auto_class=case.model_class, dtype=torch.float32)
        options: dict[str, Any] = (
            {} if precision == "fp32" else {"mixed_precision": MixedPrecision(dtype, torch.float32)}
        )
        wrapped = wrap_fsdp1(model, make_wrap_plan(model), initialize=False, **options)
        load_weights_fsdp1(wrapped, case.folder, progress=False)
        return wrapped.eval()
    mp_policy = None if precision == "fp32" else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    return from_pretrained(
        case.folder,
        auto_class=case.model_class,
        dtype=torch.float32,
        mp_policy=mp_policy,
        mesh=case.dims.build_mesh("cpu"),
        distributed_config={"enable_sequence_parallel": case.sequence_parallel},
        is_trainable=case.is_adapter,
        activation_checkpointing=case.activation_checkpointing,
        load_kwargs={"progress": False},
    )


@dataclass(frozen=True)
class Sharded:
    """The sharded model of a case on this rank; in bf16, its choices (which expert) are those of the plain model."""

    case: Case
    model: Any
    plain: Figures
    precision: str

    @property
    def group(self) -> int:
        """Which batch this rank has."""
        return dist.get_rank() // self.case.dims.ranks_per_row

    def _chosen(self, of_plain: dict[str, list[Choices]], kind: str, batch: dict[str, Any]) -> Any:
        sharding = sharding_of(self.model)
        rows = sharding.axes.groups.get("cp") if sharding else None
        place = (rows.get_local_rank(), rows.size()) if rows is not None else (0, 1)
        part = (*place, batch["input_ids"].shape[1]) if "input_ids" in batch else (0, 1, 0)
        made = of_plain[kind][self.group] if self.precision == "bf16" else {}
        return choices(self.model, names_of(self.model), made, part)

    def outputs(self, kind: str) -> Any:
        """Outputs in evaluation, without labels."""
        batch = self.case.batches_of(kind, "fp32", has_labels=self.case.has_labels_in_evaluation)[self.group]
        with self._chosen(self.plain.chosen_in_evaluation, kind, batch):
            return evaluate(self.model, batch)

    def look(self) -> Tensors | str:
        """Outputs of the base model alone, if it has one, in evaluation, or its error; it also runs with gradients, and
        no backward pass follows."""
        batch = self.case.first_batches()[self.group]
        if self.case.fsdp_version == 1 or not any(self.plain.base):
            return {}
        try:
            with torch.no_grad():
                alone = base_outputs(self.model.eval(), batch)
            base_outputs(self.model, batch)
        except Exception as error:
            self.plain.base.clear()  # it is not tried again
            return first_line(error)
        return alone

    def backward(self, kind: str) -> tuple[Any, torch.Tensor, Tensors]:
        """Output, loss and outputs of modules of a training pass, which leaves gradients."""
        batch = self.case.batches_of(kind, "fp32")[self.group]
        with self._chosen(self.plain.chosen, kind, batch):
            with noted_modules(self.model) as modules:
                output = forward(self.model.train(self.case.is_training), batch)
                loss = loss_of(output)
            loss.backward()  # type: ignore[no-untyped-call]
        return output, loss, modules


def examine(case: Case, model: Any, precision: str, plain: Figures, state: Tensors) -> dict[str, Any]:
    """What each check of a sharded model says on this rank; every rank must call.

    `load`, `save` and `module` say what is wrong, or ""; `gradients` gives a difference for each parameter, the others
    one, each with its problem. Where batches are of another kind than the first, names begin with the kind. `state` is
    what the model must have loaded.
    """
    run = Sharded(case, model, plain, precision)
    group, bound, others = run.group, TOLERANCE[precision], plain.others
    near = partial(apart, bound=bound, absent_is_zero=True)
    alone = run.look()  # before any other pass
    seen: dict[str, Any] = {"load": unequal(shards_of(model), state)}
    if isinstance(alone, str):
        seen["base"] = (math.inf, alone)
    elif alone and precision == "fp32":
        seen["base"] = worst(apart(alone, plain.base[group], [], bound))
    for number, kind in enumerate(case.batches):
        title = f"{kind} " if number else ""
        of_others = [each.outputs[kind][group] for each in others]
        seen[f"{title}outputs"] = worst(apart(run.outputs(kind), plain.outputs[kind][group], of_others, bound))
        model.zero_grad(set_to_none=True)
        output, loss, modules = run.backward(kind)
        theirs, *again = ({"loss": torch.tensor(each.losses[kind][group])} for each in (plain, *others))
        seen[f"{title}loss"] = worst(apart({"loss": loss.detach()}, theirs, again, bound))
        own = output.get("loss") if isinstance(output, dict) else None
        if isinstance(own, torch.Tensor) and own.dtype != torch.float32:
            seen[f"{title}loss"] = (seen[f"{title}loss"][0], f"computed in {own.dtype}, not in fp32 as by autocast")
        if not number:
            seen["module"] = _first_apart(modules, plain, bound, case.dims) if group == 0 else ""
        seen[f"{title}gradients"] = near(
            _gradients(model), plain.gradients[kind], [each.gradients[kind] for each in others]
        )
        if not number and precision == "bf16" and dist.get_world_size() > case.dims.tp_size:
            seen["gradients"] |= _rounded(_gradients(model))
    run.backward(next(iter(case.batches)))
    seen["accumulated"] = worst(near(_gradients(model), plain.accumulated, [each.accumulated for each in others]))
    if precision == "fp32":
        if not _is_wrapped(model):  # FSDP1 has a method of its own
            norm = clip_norm(model.parameters(), math.inf, 2.0, torch.device("cpu"))
            whole = nn.utils.get_total_norm(plain.accumulated.values())
            seen["norm"] = worst(apart({"norm": norm}, {"norm": whole}, [], bound))
            run.look()
            forward(model, case.first_batches()[group])  # the optimizer is made late
        optimizer_of(model).step()  # by the accumulated gradients
        # AdamW divides rounding by gradients that are near zero.
        seen["step"] = worst(apart(shards_of(model), plain.stepped, [], 10 * bound, is_part=True))
        seen["save"] = _saved(case, model)
    return seen


def shards_of(model: nn.Module) -> Tensors:
    """Parameters and buffers of a sharded model by the plain model's names; under FSDP1 whole. Every rank must call."""
    with _summoned(model):
        found = {plain_name(name): tensor for name, tensor in tensors_of(model).items()}
        return {name: tensor.detach().clone() for name, tensor in found.items()} if _is_wrapped(model) else found


def _gradients(model: nn.Module) -> Tensors:
    """Gradients of a sharded model, as `shards_of` gives its parameters."""
    with _summoned(model):
        found = {plain_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: tensor.clone() for name, tensor in found.items()}


def _rounded(gradients: Tensors) -> dict[str, Found]:
    """A problem where the mean over ranks has no more bits than bf16 has, which a mean in fp32 of many values has."""
    values = [Held.of(gradient).memory.float() for gradient in gradients.values()]
    is_rounded = bool(values) and all(torch.equal(each, each.bfloat16().float()) for each in values)
    return {"reduction": (math.inf, "reduced in bf16, not in fp32")} if is_rounded else {}


def _is_wrapped(model: nn.Module) -> bool:
    return isinstance(model, FullyShardedDataParallel)


def _summoned(model: nn.Module) -> AbstractContextManager[Any]:
    """A block in which FSDP1's parameters and gradients are whole."""
    if not _is_wrapped(model):
        return nullcontext()
    whole: AbstractContextManager[Any] = FullyShardedDataParallel.summon_full_params(
        model, writeback=False, with_grads=True
    )
    return whole


def held_part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank holds of a sharded one; without communication."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    if not Held.of(like).boxes:
        return whole.flatten()[:0].reshape(Held.of(like).memory.shape)
    return Held.of(like).part_of(whole)


def unequal(found: Tensors, expected: Tensors) -> str:
    """What differs bit for bit, of the shards too; empty where nothing does."""
    if list(found) != list(expected):
        return f"other names: {sorted(set(found) ^ set(expected))[:3] or 'another order'}"
    wrong = [name for name, value in expected.items() if not _same(found[name], value)]
    return f"{len(wrong)} tensors differ, {wrong[0]} first" if wrong else ""


def _same(found: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a tensor, or this rank's shard of it, equals the whole one bit for bit."""
    if found.dtype != whole.dtype or found.shape != whole.shape:
        return False
    a, b = Held.of(found).memory, held_part(whole, found)
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def worst(of_names: dict[str, Found]) -> Found:
    """The largest difference, and the problem of the tensor that differs most of those that have one."""
    problems = [found for found in of_names.values() if found[1]]
    return max((found[0] for found in of_names.values()), default=0.0), max(problems, default=(0.0, ""))[1]


def apart(
    found: Tensors,
    plain: Tensors,
    others: Sequence[Tensors],
    bound: float,
    *,
    absent_is_zero: bool = False,
    is_part: bool = False,
) -> dict[str, Found]:
    """The relative difference of each tensor and, where it is too large, what is apart: more than `bound`, and more
    than `MULTIPLE` times what the `others`, which differ by rounding alone, are from the plain model."""
    floor = 0.01 * max([float(t.abs().max()) for t in plain.values() if absent_is_zero and t.numel()], default=0.0)
    names = set(found) | set(plain) if absent_is_zero else set(plain)
    if not (absent_is_zero or is_part) and set(found) != set(plain):
        return {"": (math.inf, f"other names: {sorted(set(found) ^ set(plain))[:3]}")}
    differences: dict[str, Found] = {}
    for name in sorted(names):
        a, b = found.get(name), plain.get(name)
        if a is None or b is None:  # no gradient is a gradient of zeros
            assert a is not None or b is not None
            a = torch.zeros_like(b) if a is None and b is not None else a
            b = torch.zeros(a.shape) if b is None and a is not None else b
        assert a is not None and b is not None
        if a.shape != b.shape:
            differences[name] = math.inf, f"{name}: shape {tuple(a.shape)} and not {tuple(b.shape)}"
            continue
        difference = _relative(a, b, floor)
        allowed = max([bound, *(MULTIPLE * _relative(other[name], b, floor) for other in others if name in other)])
        differences[name] = difference, f"{name}: {difference:.1e}" if difference > allowed else ""
    return differences


def _relative(found: torch.Tensor, whole: torch.Tensor, floor: float) -> float:
    """The largest difference of a tensor, or of this rank's shard, relative to the largest value of the whole one."""
    a, b = Held.of(found).memory, held_part(whole, found)
    if not b.numel():
        return 0.0
    if not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    a, b = torch.nan_to_num(a.double()), torch.nan_to_num(b.double())
    return float((a - b).abs().max() / max(float(torch.nan_to_num(whole.double()).abs().max()), floor, 1e-12))


def _first_apart(found: Tensors, plain: Figures, bound: float, dims: ParallelDims) -> str:
    """The module whose outputs are the first to differ from the plain model's, of this rank's part of the rows too."""
    place = dist.get_rank() // dims.tp_size % dims.cp_size
    for name, whole in plain.modules.items():
        part, far = found.get(name), [_relative(each.modules[name], whole, 0.0) for each in plain.others]
        if part is None or part.dim() != whole.dim():
            continue
        is_alike = part.shape[:1] == whole.shape[:1] and part.shape[2:] == whole.shape[2:]
        if is_alike and part.shape != whole.shape:  # a part of the rows, the last one with a padded end
            start = place * part.shape[1]
            whole = whole[:, start : start + part.shape[1]]
            part = part[:, : whole.shape[1]]
        allowed = max([bound, *(MULTIPLE * each for each in far)])
        if part.shape == whole.shape and (difference := _relative(part, whole, 0.0)) > allowed:
            return f"{name} ({difference:.1e})"
    return ""


def _saved(case: Case, model: Any) -> str:
    """What is wrong with the model's saved form, reopened by transformers; empty where nothing is."""
    folder = case.folder.with_name("saved")
    save_pretrained(plain_view(model) if _is_wrapped(model) else model, folder)
    if (a := _headers(folder)) != (b := _headers(case.folder)):
        return f"files differ from transformers': {sorted(set(a.items()) ^ set(b.items()))[:3]}"
    again = load_plain(case, folder)
    kept = again.state_dict().keys()  # rotary rules that depend on the length change buffers that no file holds
    sides = (shards_of(model), tensors_of(again))
    return unequal(*({name: tensor for name, tensor in side.items() if name in kept} for side in sides))


def _headers(folder: Path) -> dict[str, str]:
    from safetensors import safe_open

    if (folder / "adapter_config.json").exists():
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (it is no dictionary)
            return {key: f"{each.get_dtype()} {each.get_shape()}" for key, each in slices.items()}
    return {key: f"{stored.dtype} {stored.shape}" for key, stored in CheckpointIndex.open(folder).tensors.items()}
