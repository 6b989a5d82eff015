"""Checks of parameters, before they are sharded and before the first training pass; and of optimizers of shards."""

from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import rank_and_size
from hf_fsdp_tools.errors import ConfigError, warn
from hf_fsdp_tools.modeling.arguments import CACHES
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.modeling.packed import require_floats
from hf_fsdp_tools.sharding.phases import Hook, Phase
from hf_fsdp_tools.sharding.replica_checks import compare_inputs, sync_rng
from hf_fsdp_tools.sharding.sharding import Feature, Sharding, sharding_of
from hf_fsdp_tools.text import listed


def check_parameters(model: nn.Module, replicated: Collection[str]) -> None:
    """Refuse trained parameters that shards would change: complex ones, and several that share memory."""
    plain = {n: p for n, p in model.named_parameters() if not isinstance(p, DTensor) and p.numel()}
    if numbers := [n for n, p in plain.items() if p.is_complex() and p.requires_grad and n not in replicated]:
        raise ConfigError(
            f"{len(numbers)} trained parameter(s) are complex, whose gradients FSDP2 cannot reduce: {listed(numbers)}. "
            "Keep them as real numbers (torch.view_as_real) and make them complex in forward."
        )
    ranges = sorted(
        (str(p.device), p.data_ptr(), _end_of(p), name, p.requires_grad) for name, p in plain.items() if not p.is_meta
    )
    for (device, start, end, name, trained), (*where, _, other, other_trained) in pairwise(ranges):
        if start == 0:
            raise ConfigError(
                f"{name} has no memory: a shard was written into a plain parameter, as some of PEFT's methods do. Give "
                "peft_config to from_pretrained, or make the adapter on the plain model."
            )
        if [device, start] <= where < [device, end] and (trained or other_trained):
            raise ConfigError(
                f"{name} and {other} are views of the same memory, and as shards they would be trained separately. "
                "Register one nn.Parameter under both names; of PEFT's LoRA, leave ensure_weight_tying out."
            )


def _end_of(tensor: torch.Tensor) -> int:
    """The address behind a tensor's last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def never_called(model: nn.Module, *, is_sharded: bool) -> str:
    """A sentence on hooks of parameters that FSDP2 does not call, with the cure; empty where there are none."""
    parameters = [(name, p) for name, p in model.named_parameters() if isinstance(p, DTensor) == is_sharded]
    hooked = [name for name, p in parameters if p._backward_hooks or (not is_sharded and p._post_accumulate_grad_hooks)]
    if not hooked:
        return ""
    return (
        f"{len(hooked)} parameter(s) of {type(model).__name__} have hooks that FSDP2 never calls: {listed(hooked)}. "
        "Use parameter.register_post_accumulate_grad_hook on the sharded model: the hook gets the parameter with "
        "this rank's shard of the gradient, summed up so far (parameter.grad, a DTensor)."
    )


class ParameterChecks(Feature):
    """Parameters are looked at before they are sharded, and once more before the first training pass."""

    def check(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """Trained parameters that shards would change are refused."""
        check_parameters(model, sharding.plan.replicated)

    def before_units(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """Hooks that nobody will call are named."""
        if rank_and_size()[0] == sharding.mesh.mesh.min() and (problem := never_called(model, is_sharded=False)):
            warn(problem)

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook]:
        """Before anything is gathered for the first training pass, refuse shards that were moved from their device, and
        different rows on ranks that share layers, which from then on draw the same random numbers.

        A warning on rank 0 names fp16 master weights, and hooks that nobody calls.
        """
        device, axes = sharding.device, sharding.axes
        is_checked = False

        def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal is_checked
            if is_checked or not module.training or not torch.is_grad_enabled():
                return
            parameters = list(module.parameters())
            moved = {p.device.type for p in parameters if isinstance(p, DTensor)} - {device.type, "meta"}
            if moved:
                raise ConfigError(
                    f"Shards of {type(module).__name__} are on {' and '.join(sorted(moved))}, and its mesh is on "
                    f"{device.type}: they were moved after they were made. Leave out model.to(…), model.cuda() and "
                    "model.cpu(); the mesh decides where shards are."
                )
            trained = any(getattr(each, "requires_grad", False) for each in (*parameters, *args, *kwargs.values()))
            is_prefixed = any(kwargs.get(name) is not None for name in CACHES)  # by PEFT's prefix tuning
            if not trained and not is_prefixed:
                require_floats(
                    module,
                    f"Nothing of {type(module).__name__} can be trained: its weights are quantised as stored. Give "
                    "from_pretrained a peft_config, or dequantize=True; or run it under torch.no_grad().",
                )
            is_checked = True
            for group in axes.sharing(of_rows=False):
                compare_inputs((*args, *kwargs.values()), group.get_group(), "layers (tp_size)")
                sync_rng([group], device)  # what dropout leaves out
            problems = [never_called(module, is_sharded=True)]
            if any(parameter.requires_grad and parameter.dtype == torch.float16 for parameter in parameters):
                problems.append(
                    f"The trained weights of {type(module).__name__} are float16: small updates of them vanish. Load "
                    "them in float32 and compute in float16: make_accelerator(mixed_precision='fp16')."
                )
            if rank_and_size()[0] == 0:
                for problem in filter(None, problems):
                    warn(problem)

        yield Hook(model, Phase.FIRST_PASS, check)


# ---- optimizers ----

_NOT_FOR_SHARDS = (
    "apollo_torch", "bitsandbytes", "distributed_shampoo", "galore_torch", "lomo_optim", "peft.optimizers.lorafa",
    "pytorch_optimizer.optimizer.shampoo", "pytorch_optimizer.optimizer.soap", "transformers.optimization",
    "torch.optim.Adafactor", "torch.optim.rprop.Rprop",
)  # fmt: skip
"""Modules and classes of optimizers that fail on DTensors (measured: a step with bitsandbytes 0.50, with APOLLO, with
LoRA-FA of PEFT 0.21, with Shampoo and SOAP of pytorch-optimizer 4.1, with the Adafactors of transformers 5.23 and torch
2.13, and with torch 2.13's Rprop), or that lose their state (GaLore, LOMO: see `scripting.checks`). Not tried: Meta's
distributed Shampoo, which shards by itself."""

_NOT_FUSED = (torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused step DTensors lack (measured: torch 2.13); Adam's and AdamW's they have."""


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[nn.Module]) -> None:
    """Refuse an optimizer of other tensors than the models' parameters, and one that cannot step what they are."""
    models = list(models)
    known = {id(parameter) for model in models for parameter in model.parameters()}
    shardings = [sharding_of(model) for model in models]
    has_shards = not all(sharding is not None and sharding.is_whole for sharding in shardings)
    for optimizer in optimizers:
        own = getattr(optimizer, "optimizer", optimizer)
        check_kind(type(own), has_shards=has_shards)
        if has_shards and isinstance(own, _NOT_FUSED) and any(group.get("fused") for group in own.param_groups):
            raise ConfigError(
                f"{type(own).__name__}(fused=True) cannot step sharded parameters (DTensor). Leave fused out; "
                "foreach=True works."
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(parameter) not in known for parameter in parameters)
        if strange:
            raise ConfigError(
                f"{strange} of the {len(parameters)} parameters of {type(optimizer).__name__} belong to no prepared "
                "model: it was made before the model was sharded, or of attributes of modules, or has those of a "
                "criterion too. Make it from model.parameters() right before prepare(model, optimizer); a "
                "criterion that is trained is prepared as well: prepare(model, criterion, optimizer)."
            )


def check_kind(kind: type, *, has_shards: bool = True) -> None:
    """Refuse a class of optimizers that cannot step sharded parameters, or whose state cannot be resumed."""
    name = f"{kind.__module__}.{kind.__name__}"
    if not has_shards and name.startswith("bitsandbytes"):
        raise ConfigError(
            f"{kind.__name__} of bitsandbytes keeps a state that cannot be resumed here. Use torchao.optim.AdamW8bit, "
            "whose state is small too (in TrainingArguments: optim='adamw_torch_8bit')."
        )
    if has_shards and name.startswith(_NOT_FOR_SHARDS):
        raise ConfigError(
            f"{kind.__name__} of {kind.__module__} cannot step sharded parameters (DTensor). Use "
            "torch.optim.AdamW, or torchao.optim.AdamW8bit, whose state is small too (in TrainingArguments: "
            "optim='adamw_torch_8bit')."
        )
