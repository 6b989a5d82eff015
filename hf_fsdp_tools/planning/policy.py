"""The wishes of a user about a wrap plan, as one frozen value: types, sizes and exceptions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hf_fsdp_tools.errors import ConfigError, WrapPlanError
from hf_fsdp_tools.modeling.module_tree import ModuleNode, ModuleTree, class_name
from hf_fsdp_tools.text import did_you_mean, listed, quoted

UnitPredicate = Callable[[str, nn.Module], bool | Mapping[str, Any] | None]
"""`(fqn, module) -> True | {"reshard_after_forward": ..., "reason": ...}` for a unit, False or None otherwise."""


@dataclass(frozen=True, kw_only=True)
class WrapPolicy:
    """How units are chosen. Every default comes from the model itself, so `WrapPolicy()` fits any model.

    Precedence, strongest first: the rules of a correct plan (a policy that would break one raises) · `replicate` ·
    `units` · `block_types` · detected blocks · `expert_unit_params` · `min_unit_params` · the tail.
    `reshard_after_forward` is laid over the finished units.

    Example:
        >>> policy = WrapPolicy(block_types=("LlamaMLP", "LlamaAttention"), min_unit_params=2e7)
        >>> len(make_wrap_plan(build_meta_model("checkpoint"), policy=policy).units)
        9
    """

    block_types: tuple[type[nn.Module] | str, ...] | None = None
    """Classes, class names, or fqn patterns (`"model.layers.*"`) of modules that are units; None means the detected
    blocks. Detected blocks inside a match are no units of their own; all other detected blocks are."""
    min_unit_params: float | None = None
    """Ceiling, in parameters: a module outside blocks is a unit if it holds more than this outside other units. None
    means the largest block, or, without blocks, the largest set on one module. Classic values are 2e7 and 1e6."""
    floor_params: float | None = None
    """Floor, in parameters: a module that holds less (norm, bias, small adapter) stays with its neighbours. None means
    1 % of the ceiling, at most 1e5 (200 kB in bf16, where a collective's latency exceeds its transfer; assumed)."""
    expert_unit_params: float = 1e9
    """Parameters from which the experts of a block are a unit of their own (2 GB in bf16; assumed). They are then
    gathered only while they run, not while attention runs. `math.inf` means never. A single expert is never a unit."""
    units: tuple[UnitPredicate, ...] = ()
    """Predicates that make a module a unit; the first that answers True or options wins."""
    reshard_after_forward: Mapping[str, bool | int | None] = field(default_factory=dict)
    """`reshard_after_forward` by fqn pattern of a unit's module (`{"model.layers.31": False}`; "" is the root)."""
    replicate: tuple[str, ...] = ()
    """Fqn patterns of modules or parameters that stay whole on every rank and that FSDP ignores."""
    group_tail: bool = True
    """Gather the final norm with a head that is its own unit, and keep both gathered: backward begins there."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("min_unit_params", "floor_params", "expert_unit_params"):
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int | float) and number >= 0):
                problems.append(f"{name} is {number!r}: it must be a number of parameters, 0 or more.")
        for name in ("block_types", "units", "replicate"):
            value = getattr(self, name)
            if isinstance(value, str | type) or callable(value):
                problems.append(f"{name} is {value!r}: it must be a tuple; write ({value!r},).")
        if not isinstance(self.reshard_after_forward, Mapping):
            problems.append(
                f"reshard_after_forward is {self.reshard_after_forward!r}: it must be a dict from fqn patterns of "
                f"units; for all units, write {{'*': {self.reshard_after_forward!r}}}."
            )
        if problems:
            raise WrapPlanError("WrapPolicy: " + " ".join(problems))


def as_policy(value: Any) -> WrapPolicy | None:
    """A policy; of the name or class of a block, or several, one with these `block_types`. None stays None."""
    if value is None or isinstance(value, WrapPolicy):
        return value
    types = value if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(one, str) or (isinstance(one, type) and issubclass(one, nn.Module)) for one in types):
        raise ConfigError(
            f"policy is {quoted(value)}: it must be a WrapPolicy(…), or names or classes of blocks, as "
            "'LlamaDecoderLayer'."
        )
    return WrapPolicy(block_types=tuple(types))


def matching_nodes(tree: ModuleTree, wanted: type[nn.Module] | str, *, problems: list[str]) -> list[ModuleNode]:
    """The nodes that match a class, a class name or an fqn pattern; adds a line to `problems` where there are none."""
    if isinstance(wanted, type):
        nodes = [node for node in tree if isinstance(node.module, wanted)]
        name = wanted.__name__
    else:
        name = wanted
        nodes = [node for node in tree if class_name(node.module) == name]
        nodes = nodes or [node for node in tree if fnmatchcase(node.fqn, name)]
    if not nodes:
        problems.append(f"{name!r} matches no module{nearest_names(tree, name)}")
    return nodes


def nearest_names(tree: ModuleTree, name: str) -> str:
    """The end of a message about a name that matched nothing: the nearest class names or fqns, or the first few."""
    classes = sorted({class_name(node.module) for node in tree})
    fqns = [node.fqn for node in tree if node.fqn] + [weight.names[0] for weight in tree.weights]
    wanted = fqns if "." in name else classes
    return did_you_mean(name, wanted, otherwise=f"; the model has {listed(wanted)}.")
