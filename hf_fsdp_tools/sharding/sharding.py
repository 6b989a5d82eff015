"""How a model was sharded, as a value that it carries; what a feature does to it, as a class."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from hf_fsdp_tools.accelerator import runs_documents
from hf_fsdp_tools.axes import AXES
from hf_fsdp_tools.distributed.mesh import Axes
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.modeling.notes import Note
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.sharding.phases import Hook, Undo

if TYPE_CHECKING:
    from hf_fsdp_tools.sharding.recompute import Recompute


@dataclass(frozen=True)
class Float8Policy(MixedPrecisionPolicy):
    """Mixed precision with FP8: what `mp_policy="fp8"` and Accelerate's `mixed_precision: fp8` mean, for other values.

    Linear layers of blocks multiply in FP8 (torchao's `Float8Linear`), and FSDP2 gathers their weights in FP8; all else
    computes in bf16, and gradients are reduced in fp32. Not converted are heads, embeddings, routers, experts,
    adapters, and layers of which a rank's part has a dimension that is not divisible by 16. Weights and states are
    saved as without FP8.

    On a CPU, products are emulated in fp32 from the same FP8 values: to test a training, not to save time.

    Raises:
        ConfigError: from the function that takes the policy, on all ranks: torchao is missing, the device has no FP8,
            nothing can be converted, or ranks cannot agree on scales of a layer that they share.

    Example:
        >>> rowwise = Float8Policy(config="rowwise")
        >>> attention = Float8Policy(module_filter=lambda module, name: "self_attn" in name)
        >>> attention.param_dtype
        torch.bfloat16
    """

    param_dtype: torch.dtype | None = torch.bfloat16
    reduce_dtype: torch.dtype | None = torch.float32
    config: Any = None
    """torchao's `Float8LinearConfig`, or the name of one of its recipes. None: scales per tensor, FP8 all-gather.
    Weights with scales per row ("rowwise", "rowwise_with_gw_hp") are gathered in bf16."""
    module_filter: Callable[[nn.Module, str], bool] | None = None
    """Which of the layers named above are converted: a function of module and name; None: all."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model was sharded: the arguments of `shard_model`, as a value that can be printed."""

    plan: WrapPlan
    """The units."""
    axes: Axes
    """What the axes of the whole mesh are for."""
    mp_policy: MixedPrecisionPolicy
    """The dtypes of computation and of gradient reduction."""
    offload_policy: OffloadPolicy
    """Whether the shards live on the CPU between uses."""
    activation_checkpointing: "Recompute | None" = None
    """Which blocks recompute their activations in the backward pass, and what they keep; None where none do."""
    compile: Mapping[str, Any] | None = None
    """Options of `torch.compile` for the blocks; None where they are not compiled."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the shards: one axis for FSDP, (replicate, shard) for HSDP."""
        return self.axes.shards

    @property
    def device(self) -> torch.device:
        """The device of the shards: the mesh's, or the CPU under CPU offload."""
        return torch.device("cpu" if self.is_offloaded else self.mesh.device_type)

    @property
    def is_offloaded(self) -> bool:
        """Whether FSDP2 keeps the shards in memory of its own between uses."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds the whole model on its device: then it is a plain model (`sharding.precision`).

        FP8 is the exception: its scales are those of gathered weights.
        """
        is_alone = self.mesh.size() == 1 and not self.is_divided
        return is_alone and not self.is_offloaded and not isinstance(self.mp_policy, Float8Policy)

    @property
    def asked(self) -> frozenset[str]:
        """The features of `extensions/` that these options ask for."""
        asked = {
            "float8": isinstance(self.mp_policy, Float8Policy),
            "packed_rows": runs_documents(self.mesh.device_type) or self.axes.dims.cp_size > 1,
            "streamed": self.is_offloaded,
        }
        return asked_by(self.axes) | {name for name, is_asked in asked.items() if is_asked}

    @property
    def is_divided(self) -> bool:
        """Whether ranks share layers or experts."""
        return is_divided(self.axes)


def is_divided(axes: Axes) -> bool:
    """Whether the ranks of a mesh have parts of weights, which are divided before they are sharded."""
    return any(getattr(axes.dims, axis.size) > 1 for axis in AXES if axis.weights == "divide")


def asked_by(axes: Axes) -> frozenset[str]:
    """The features of `extensions/` that the axes of a mesh ask for."""
    return frozenset(axis.feature for axis in AXES if axis.feature and getattr(axes.dims, axis.size) > 1)


@dataclass(frozen=True)
class Sharded(Note):
    """What is known of a model that `shard_model` sharded."""

    sharding: Any = None
    """The `Sharding`."""
    is_prepared: bool = False
    """Whether an Accelerator of FSDP2 has prepared it."""
    cached: tuple[int, ...] = ()
    """Which configs (its own, that of its text) had `use_cache` before it was turned off for training."""
    gathered: bool | None = None
    """Whether units stay gathered while it generates; None where memory decides."""
    takes_adapter: bool = False
    """Whether this package lets PEFT make an adapter of it now."""


def sharding_of(model: nn.Module) -> Sharding | None:
    """How `shard_model` sharded a model; None if it did not. Any rank may call; nothing is communicated.

    Args:
        model: also inside PEFT's wrapper or that of `torch.compile`.
    """
    return next((sharding for _, sharding in sharded_modules(model)), None)


def sharded_module(model: nn.Module) -> nn.Module | None:
    """The module at or below `model` that `shard_model` sharded, in which the plan's names are; None without one."""
    return next((module for module, _ in sharded_modules(model)), None)


def sharded_modules(model: nn.Module) -> Iterator[tuple[nn.Module, Sharding]]:
    """Yield the modules at or below `model` that `shard_model` sharded, with how."""
    for module in model.modules():
        if (sharding := Sharded.of(module).sharding) is not None:
            yield module, sharding


class Feature:
    """What one feature does to a model that is sharded. `shard.features_of` has those that a user asked for, in the
    order in which they are asked; of forward passes, `phases.Phase` has the order."""

    def divide(self, model: nn.Module, axes: Axes, rules: Mapping[str, Any]) -> None:
        """Change a model that ranks are to share, before it is planned, by the rules of `parallelize_model`."""

    def check(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """Refuse, with a ConfigError, what cannot be; change nothing. Every rank calls."""

    def before_units(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """Change the model before FSDP2 is applied to it for the first time. Communicate nothing."""

    def again(self, model: nn.Module, sharding: Sharding) -> None:
        """Change a copied model, before FSDP2 is applied to it, where copies do not have what was changed."""

    def added(self, model: nn.Module) -> None:
        """Change adapters that were added to a sharded model, before FSDP2 is applied to it again, or refuse them."""

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterable[Hook | Undo]:
        """What runs around the forward passes, of a model whose units are made. Communicate nothing."""
        return ()

    def describe(self, model: nn.Module) -> str:
        """What `describe_sharding` says of the computation of such a model; "" for nothing."""
        return ""
