"""Linear layers of blocks computed in FP8 by torchao, and their weights gathered in FP8.

A layer becomes torchao's `Float8Linear` in place; its weight stays a plain parameter in every shard, state and file.
FSDP2 asks a shard that has `fsdp_pre_all_gather` what to gather in its place: here the bytes of the FP8 weight, scaled
by the largest value of the whole weight. The scales of all weights are computed together, by one all-reduce, before
each forward pass of the model: nothing tells that a script has written to `parameter.data`.

Where ranks share a layer (tp_size), torchao finds the largest values of what each has a part of, through DTensors.
"""

import importlib.metadata
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_tools.distributed.steps import Step, at_steps
from hf_fsdp_tools.errors import ConfigError, warn
from hf_fsdp_tools.modeling.module_tree import ModuleTree, plain_name, reads_child
from hf_fsdp_tools.modeling.notes import Divided, Note, install_style
from hf_fsdp_tools.modeling.roles import is_adapter, lists_of_experts, routers
from hf_fsdp_tools.planning.stacks import find_blocks
from hf_fsdp_tools.sharding.fsdp2_internals import Entry, entries_of, places_of
from hf_fsdp_tools.sharding.phases import Hook, Phase
from hf_fsdp_tools.sharding.sharding import Feature, Float8Policy, Sharded, Sharding
from hf_fsdp_tools.text import did_you_mean

_MULTIPLE = 16
"""What both dimensions of a weight must be divisible by (source: `torch._scaled_mm`)."""

_CAPABILITY = (8, 9)
"""Compute capability from which NVIDIA's GPUs multiply FP8 matrices: Ada, Hopper (source: `torch._scaled_mm`)."""

_CAPABILITY_ROWWISE = (9, 0)
"""The same for scales per row (source: torchao's `float8` README)."""

_STYLES = ("colwise", "rowwise", "mla_kv_a_proj")
"""How transformers' styles begin in which a linear layer takes DTensors, by which torchao finds shared scales, or has
whole inputs and gradients."""


# ---- what can be converted ----


def float8_config(policy: Float8Policy, device_type: str) -> Any:
    """torchao's config for a policy on a device, checked. Nothing is communicated.

    Raises:
        ConfigError: torchao is missing or too old, it has no such recipe, or the device cannot multiply in FP8.
    """
    torchao, config = import_torchao(), policy.config
    if config is None:
        config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, pad_inner_dim=True)
    elif isinstance(config, str):
        known = [each.value for each in torchao.Float8LinearRecipeName]
        if config not in known:
            raise ConfigError(f"torchao has no FP8 recipe {config!r}{did_you_mean(config, known)}")
        is_tensorwise = config == "tensorwise"
        config = torchao.Float8LinearConfig.from_recipe_name(config)
        config = replace(config, pad_inner_dim=True, enable_fsdp_float8_all_gather=is_tensorwise)
    elif not isinstance(config, torchao.Float8LinearConfig):
        raise ConfigError(
            f"The config of FP8 is a {type(config).__name__}; give torchao's Float8LinearConfig, or the name of a "
            "recipe: tensorwise, rowwise or rowwise_with_gw_hp."
        )
    if device_type == "cpu":
        return replace(config, emulate=True)
    if not config.emulate:
        _check_device(config, device_type)
    return config


def _check_device(config: Any, device_type: str) -> None:
    if device_type != "cuda":
        raise ConfigError(f"FP8 is for NVIDIA's and AMD's GPUs, and this device is {device_type}. Use bf16.")
    if torch.version.hip:
        return  # torchao knows which of AMD's formats a GPU has
    is_rowwise = config.cast_config_weight.scaling_granularity.value != "tensorwise"
    least = _CAPABILITY_ROWWISE if is_rowwise else _CAPABILITY
    if (found := torch.cuda.get_device_capability()) < least:
        raise ConfigError(
            f"FP8{' with scales per row' * is_rowwise} needs a GPU of compute capability {least[0]}.{least[1]} "
            f"({'Hopper' if is_rowwise else 'Ada, Hopper'} or newer); {torch.cuda.get_device_name()} has "
            f"{found[0]}.{found[1]}. Use bf16."
        )


def float8_layers(tree: ModuleTree, policy: Float8Policy) -> dict[str, nn.Linear]:
    """The linear layers that a policy converts, by fqn; it depends on classes, names and shapes alone.

    Raises:
        ConfigError: there is none.
    """
    layers: dict[str, nn.Linear] = {}
    small = 0
    for block in (block for stack in find_blocks(tree) for block in stack):
        left = {below for listed in lists_of_experts(block) for below in listed.walk()}
        left |= {owner for weight in routers(block) for owner in weight.owners}
        for node in block.walk():
            module = node.module
            if type(module) is not nn.Linear or node in left or is_adapter(node):
                continue
            if node.parent is not None and reads_child(node.parent.module, node.name):
                continue  # a kernel takes the weight itself, as Mamba's do
            if any(size % _MULTIPLE for size in _part_of(module)):
                small += 1
            elif len(tree.weight(f"{node.fqn}.weight").owners) == 1 and (
                policy.module_filter is None or policy.module_filter(module, plain_name(node.fqn, adapters=True))
            ):
                layers[node.fqn] = module
    if not layers:
        others = f" ({small} have a dimension that is not divisible by {_MULTIPLE})" * bool(small)
        raise ConfigError(
            f"FP8: {type(tree.root.module).__name__} has no plain linear layer in its blocks that can be converted"
            f"{others}. Use bf16."
        )
    return layers


def _part_of(module: nn.Linear) -> list[int]:
    """The shape that a rank multiplies with, of a shared layer a part; before units are sharded or after."""
    shape = list(module.weight.shape)
    mesh, placements = Divided.of(module).parallel.get("weight", (None, ()))
    for placement in placements:
        if isinstance(placement, Shard):
            shape[placement.dim] //= mesh.size()
    return shape


# ---- conversion ----


@cache
def _evaluable(cls: Any) -> type[nn.Module]:
    """A class like torchao's layer that runs in inference mode too, where torchao's weight cannot be transposed."""

    def forward(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        if not torch.is_inference_mode_enabled():
            output: torch.Tensor = cls.forward(layer, hidden)
            return output
        with torch.inference_mode(False), torch.no_grad():
            output = cls.forward(layer, hidden)
        return output

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {"forward": forward, **names})


class _Float8Weight(Entry):
    """FSDP2's record of one weight, which it also takes for its shard: it answers with the bytes of the FP8 weight."""

    gathered_as = torch.uint8
    layer: Any
    scales: "_Scales"
    scale: torch.Tensor | None = None

    def init_unsharded_param(self) -> None:
        """As FSDP2's, which fails in inference mode with tensors that are made of others."""
        with torch.inference_mode(False), torch.no_grad():
            super().init_unsharded_param()  # type: ignore[no-untyped-call]  # torch's own

    def reset_sharded_param(self) -> None:
        """As FSDP2's, which calls it where a state was loaded, or other memory given."""
        super().reset_sharded_param()  # type: ignore[no-untyped-call]  # torch's own
        self.scales.seen = None

    def size(self) -> torch.Size:
        """The size of what is gathered, with its padding."""
        return self.padded_sharded_param_size

    def to(self, device: torch.device, non_blocking: bool = False) -> "_Float8Weight":
        """Itself: what is gathered goes to the device."""
        return self

    @property
    def float8_dtype(self) -> torch.dtype:
        """The dtype of the FP8 weight."""
        dtype: torch.dtype = self.layer.config.cast_config_weight.target_dtype
        return dtype

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor]]:
        """The bytes of the FP8 shard, to be gathered, and the scale, which every rank has."""
        self.scales.renew()
        assert self.scale is not None
        torchao = import_torchao()
        shard = self.memory.to(self.device, non_blocking=True)
        cast = torchao.hp_tensor_and_scale_to_float8(shard, self.scale, self.float8_dtype)
        return (cast._data.view(torch.uint8).view(self.size()),), (self.scale,)

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole weight, of gathered bytes; with `out`, which has their memory, its scale alone is set."""
        (scale,) = metadata
        if out is not None:
            getattr(out, "_local_tensor", out)._scale = scale
            return None
        torchao, shape = import_torchao(), self.gathered_size
        with torch.inference_mode(False):
            data = gathered[0].view(-1)[: math.prod(shape)].view(self.float8_dtype).view(shape)
            role = torchao.GemmInputRole.WEIGHT
            whole = torchao.Float8TrainingTensor(data, scale, param_dtype, self.layer.linear_mm_config, role)
        return whole, ()


class _Scales:
    """The scales of all weights of a model that are gathered as FP8; `layers`: the ranks that share each layer."""

    def __init__(self, layers: DeviceMesh | None) -> None:
        self.layers = layers
        self.weights: list[_Float8Weight] = []
        self.seen: int | None = None
        """Steps of optimizers after which the scales were computed."""

    def before_pass(self, model: nn.Module, args: object, kwargs: object) -> None:
        """Renew the scales before a forward pass of the model."""
        if not Sharded.of(model).gathered:  # then nothing is gathered
            self._compute()

    def renew(self) -> None:
        """Renew the scales where an optimizer has stepped; what gathers may run during a forward pass of the model."""
        if self.seen != _steps:
            self._compute()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def _compute(self) -> None:
        """Compute all scales as torchao's `precompute_float8_dynamic_scale_for_fsdp` does; one all-reduce for each axis
        along which weights are divided."""
        with torch.inference_mode(False), torch.no_grad():
            largest = torch.stack(torch._foreach_norm([weight.memory for weight in self.weights], math.inf))
            largest = largest.to(self.weights[0].device)
            layers = [] if self.layers is None else [self.layers.get_group()]
            for group in (self.weights[0].ranks, *layers):
                if group.size() > 1:
                    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            for weight, amax in zip(self.weights, largest, strict=True):
                is_rounded = weight.layer.config.round_scales_to_power_of_2
                weight.scale = import_torchao().amax_to_scale(amax, weight.float8_dtype, is_rounded)
        self.seen = _steps


@dataclass(frozen=True)
class Float8Layer(Note):
    """What is known of a linear layer that computes in FP8."""

    config: Any = None
    """torchao's."""


class Float8(Feature):
    """Linear layers compute in FP8, where the policy of a model is a `Float8Policy`."""

    def check(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """The model, the device and the mesh are looked at."""
        policy = sharding.mp_policy
        assert isinstance(policy, Float8Policy)
        if not isinstance(policy.param_dtype, torch.dtype | None) or policy.param_dtype == torch.float16:
            raise ConfigError(f"FP8 with {policy.param_dtype} is not part of this package. Use bf16 with it.")
        partly = [unit for unit in sharding.plan.units if type(unit.reshard_after_forward) is int]
        config = float8_config(policy, sharding.mesh.device_type)
        if config.enable_fsdp_float8_all_gather and partly:
            raise ConfigError(
                f"reshard_after_forward {partly[0].reshard_after_forward} keeps parts of gathered weights, which FSDP2 "
                "cannot of FP8. Use True or False, or bf16."
            )
        for name, layer in float8_layers(tree, policy).items():
            style = "colwise" if (own := Divided.of(layer).style) is None else own.keywords["style"]
            if not style.startswith(_STYLES):
                last = name.rpartition(".")[2]
                raise ConfigError(
                    f"{name}: ranks cannot agree on scales of a layer that tp_size divides in the style {style!r}. "
                    f"Leave it in bf16: Float8Policy(module_filter=lambda _, name: {last!r} not in name)."
                )

    def describe(self, model: nn.Module) -> str:
        """How many layers."""
        return f"FP8 in {sum(Float8Layer.of(module).config is not None for module in model.modules())} linear layers"

    def before_units(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """Layers get a class that computes in FP8; no value changes."""
        policy, device_type = sharding.mp_policy, sharding.mesh.device_type
        assert isinstance(policy, Float8Policy)
        config = float8_config(policy, device_type)
        if device_type == "cpu" and (not dist.is_initialized() or dist.get_rank() == 0):
            warn("FP8 is emulated on CPUs, in fp32: right values, and no time saved.")
        own = replace(config, enable_fsdp_float8_all_gather=False)  # torchao would wrap the parameter; see `hooks`
        for layer in float8_layers(tree, policy).values():
            made = import_torchao().convert_to_float8_training(layer, config=own)
            layer.__class__ = _evaluable(type(made))  # type: ignore[assignment, arg-type]  # a class of layers
            layer.__dict__.update({key: value for key, value in made.__dict__.items() if key not in layer.__dict__})
            Float8Layer.put(layer, config=config)
            install_style(layer)

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook]:
        """Units gather weights of FP8 layers as FP8, with scales that are renewed before each forward pass."""
        scales = _Scales(sharding.axes.groups.get("tp"))
        for weight in entries_of(model):
            layer, name = places_of(weight)[0]
            config = Float8Layer.of(layer).config if name == "weight" else None
            if config is not None and config.enable_fsdp_float8_all_gather:
                weight.become(_Float8Weight, layer=layer, scales=scales)
                scales.weights.append(weight)
        if scales.weights:  # others are whole on every rank
            at_steps(Step.COUNT, _count)
            yield Hook(model, Phase.SCALES, scales.before_pass)


FEATURE = Float8()


_steps = 0
"""Steps of optimizers of shards that this process has made since a model was converted."""


def _count(optimizer: Any) -> None:
    global _steps  # on every rank the same: an optimizer of one rank alone has no shards
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    _steps += any(isinstance(parameter, DTensor) for parameter in held)


# ---- torchao ----


@cache
def import_torchao() -> Any:
    """What is used of torchao (0.16 or newer), imported without what it prints about kernels that it does not find."""
    try:
        version = importlib.metadata.version("torchao")
        if tuple(map(int, version.split(".")[:2])) < (0, 16):
            raise ConfigError(f"FP8 needs torchao 0.16 or newer, and this is {version}. pip install -U torchao")
        with _quiet("torchao", "torch.utils._pytree"):
            from torchao import float8
            from torchao.float8.config import Float8LinearRecipeName
            from torchao.float8.float8_training_tensor import (
                Float8TrainingTensor,
                GemmInputRole,
                hp_tensor_and_scale_to_float8,
            )
            from torchao.float8.float8_utils import amax_to_scale
    except ImportError as error:
        raise ConfigError(f"FP8 needs torchao ({error}). Install it, pip install torchao; or use bf16.") from None
    return SimpleNamespace(
        Float8LinearConfig=float8.Float8LinearConfig,
        Float8LinearRecipeName=Float8LinearRecipeName,
        Float8TrainingTensor=Float8TrainingTensor,
        GemmInputRole=GemmInputRole,
        amax_to_scale=amax_to_scale,
        convert_to_float8_training=float8.convert_to_float8_training,
        hp_tensor_and_scale_to_float8=hp_tensor_and_scale_to_float8,
    )


@contextmanager
def _quiet(*loggers: str) -> Iterator[None]:
    """A block in which loggers say errors alone."""
    former: Mapping[logging.Logger, int] = {logging.getLogger(name): logging.getLogger(name).level for name in loggers}
    for logger in former:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in former.items():
            logger.setLevel(level)
