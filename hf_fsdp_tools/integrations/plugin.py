"""Accelerate's FSDP plugin with a `WrapPolicy`, made of other libraries' policies too, and with fp32 reduction."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardedStateDictConfig
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from hf_fsdp_tools.distributed.mesh import local_device, rank_on_node, world_size
from hf_fsdp_tools.errors import ConfigError, warn
from hf_fsdp_tools.extensions.float8 import import_torchao
from hf_fsdp_tools.extensions.fsdp1.policy import hybrid_auto_wrap_policy
from hf_fsdp_tools.extensions.fsdp1.wrap import refuse_copies
from hf_fsdp_tools.integrations.accelerator import ShardedAccelerator
from hf_fsdp_tools.integrations.settings import (
    ARGUMENTS,
    VARIABLES,
    as_setting,
    is_by_launcher,
    read_strategies,
    strategy_name,
    warn_on_node,
)
from hf_fsdp_tools.integrations.version1 import prefer_possible_settings
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.planning.policy import UnitPredicate, WrapPolicy, matching_nodes, nearest_names
from hf_fsdp_tools.sharding.recompute import Recompute, as_recompute
from hf_fsdp_tools.sharding.sharding import Float8Policy
from hf_fsdp_tools.text import did_you_mean


def _settings(wrap: Any, class_names: tuple[str, ...], min_num_params: int) -> dict[str, Any]:
    """Fields of `WrapPolicy` for an `auto_wrap_policy` of Accelerate or torch, of any kind."""
    function, keywords = (wrap.func, wrap.keywords) if isinstance(wrap, functools.partial) else (wrap, {})
    if wrap is None:
        return {}
    if isinstance(wrap, ModuleWrapPolicy):
        return _block_types(wrap._module_classes)
    if function is transformer_auto_wrap_policy:
        return _block_types(keywords.get("transformer_layer_cls") or class_names)
    if function is size_based_auto_wrap_policy:
        size = keywords.get("min_num_params") or min_num_params
        return {"min_unit_params": size} if size else {}
    if function is _or_policy:
        together: dict[str, Any] = {}
        for part in keywords["policies"]:
            for name, value in _settings(part, class_names, min_num_params).items():
                is_size, other = name == "min_unit_params", together.get(name)
                together[name] = value if other is None else min(other, value) if is_size else other + value
        return together
    if not callable(wrap):
        raise ConfigError(
            f"auto_wrap_policy is {wrap!r}; expected TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP, one of torch's "
            "policies or a function of a module. Or give a WrapPolicy as `policy`."
        )
    own = wrap._lambda_fn if isinstance(wrap, CustomPolicy) else keywords.get("lambda_fn", wrap)
    return {"units": (_predicate(own),)}


def _block_types(classes: Iterable[Any]) -> dict[str, Any]:
    """The classes as `block_types`; a set, as torch keeps them, is sorted, so that all ranks make the same plan."""
    if isinstance(classes, set | frozenset):
        classes = sorted(classes, key=lambda item: item if isinstance(item, str) else item.__qualname__)
    return {"block_types": types} if (types := tuple(classes)) else {}


def _predicate(function: Callable[..., Any]) -> UnitPredicate:
    """A callable by its arguments: (module), (name, module), or torch's (module, recurse, nonwrapped_numel)."""
    count = sum(parameter.default is parameter.empty for parameter in inspect.signature(function).parameters.values())

    def ask(fqn: str, module: nn.Module) -> bool:
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(fqn and function(module, **({"recurse": False, "nonwrapped_numel": size} if count > 2 else {})))

    return function if count == 2 else ask


def narrowed(policy: WrapPolicy, model: nn.Module) -> WrapPolicy:
    """`policy` without the block types that `model` lacks, with a warning: Accelerate has one list of class names for
    all models of a process, and a reward model of another architecture has none of these classes."""
    if policy.block_types is None:
        return policy
    tree = ModuleTree(model)
    problems: list[str] = []
    present = tuple(each for each in policy.block_types if matching_nodes(tree, each, problems=problems))
    if not problems:
        return policy
    warn_on_node(
        f"Layer classes to wrap, in {type(model).__name__}: "
        f"{' '.join(problems)} "
        f"{'The others are used' if present else 'The blocks that its structure shows are used'}."
    )
    return replace(policy, block_types=present or None)


def without_modules(policy: WrapPolicy, ignored: Iterable[nn.Module] | str | None, model: nn.Module) -> WrapPolicy:
    """`policy` extended so that Accelerate's `ignored_modules` of `model` stay whole on every rank."""
    if ignored is None:
        return policy
    meant = set() if isinstance(ignored, str) else {id(module) for module in ignored}
    modules = {
        name: module
        for name, module in model.named_modules()
        if name and (re.fullmatch(ignored, name) if isinstance(ignored, str) else id(module) in meant)
    }
    if not modules:
        alien = ": they belong to another model."
        hint = nearest_names(ModuleTree(model), ignored) if isinstance(ignored, str) else alien
        raise ConfigError(f"ignored_modules {ignored!r} matches no module of {type(model).__name__}{hint}")
    names = (name for name, module in modules.items() if any(True for _ in module.parameters()))
    return replace(policy, replicate=(*policy.replicate, *names))


@dataclass
class FSDPPlugin(FullyShardedDataParallelPlugin):  # type: ignore[misc]  # accelerate is not typed
    """Accelerate's FSDP plugin with a `WrapPolicy`, for FSDP2 and FSDP1.

    It differs from the plugin that it extends: version 2 is the default; the units are those of `policy`, into which
    Accelerate's and torch's own policies are translated; mixed precision reduces gradients in fp32 and does not cast
    outputs and buffers; CPU offload works without a device to pin memory for. `docs/settings.md` says what becomes of
    every setting. FSDP1 (`fsdp_version=1`, deprecated in PyTorch) shards plain models in `prepare`.

    Raises:
        ConfigError: torch cannot honour a setting here, or would silently honour it wrongly.

    Example:
        >>> plugin = FSDPPlugin(policy=WrapPolicy(min_unit_params=2e7), activation_checkpointing=True)
        >>> accelerator = make_accelerator(fsdp_plugin=plugin, cpu=True)
        >>> model = from_pretrained("checkpoint", accelerator=accelerator, load_kwargs={"progress": False})
    """

    policy: WrapPolicy | None = None
    """What becomes a unit; None translates the other fields and variables, and means `WrapPolicy()` without any."""

    ep_size: int = 0
    """How many neighbouring processes share the experts; 0 reads FSDP_EP_SIZE, and means 1 without it."""

    sequence_parallel: bool | None = None
    """Between layers that processes share (`tp_size`), each holds its own tokens alone; None reads the variable
    FSDP_SEQUENCE_PARALLEL, and means False without it."""

    activation_checkpointing_every_n_layers: int = 0
    """Checkpoint the first of every n blocks; 0 reads the variable FSDP_ACTIVATION_CHECKPOINTING_EVERY_N_LAYERS, and
    means 1 without it."""

    activation_checkpointing_save_ops: Any = None
    """Operators whose results checkpointed blocks keep, a list of names or a text with commas; None reads the variable
    FSDP_ACTIVATION_CHECKPOINTING_SAVE_OPS."""

    def __post_init__(self) -> None:
        self.is_explicit = True  # made by a script; False where variables or TrainingArguments alone made it
        self.takes_recipe = False  # whether the Accelerator's `AORecipeKwargs` say what FP8 means
        for name in sorted(os.environ):
            if name.startswith("FSDP_") and name not in VARIABLES:
                warn_on_node(f"The variable {name} has no effect{did_you_mean(name, VARIABLES)}")
        self.fsdp_version, is_unversioned = _read_version(self.fsdp_version)
        self.copies: ParallelismConfig | None = None  # that the launch config asks for by HYBRID_SHARD
        on_cpu = local_device().type == "cpu"
        if self.fsdp_version == 2:
            self._read_as_fsdp2(is_unversioned=is_unversioned)
        else:
            prefer_possible_settings(self, on_cpu=on_cpu)
        self._read_recompute()
        self.mixed_precision_policy = _as_policy(self.mixed_precision_policy, self.fsdp_version)
        super().__post_init__()
        self.ignored_modules = self.ignored_modules or None
        self.ep_size = 1 if (size := self._said("ep_size")) is None else size
        if type(self.ep_size) is not int or self.ep_size < 1:
            raise ConfigError(f"ep_size is {size!r}; it must be a whole number, 1 or more.")
        self.sequence_parallel = bool(self._said("sequence_parallel"))
        self.translated = self.policy is None
        self.policy = self.policy or self._translate_wrap()
        self.auto_wrap_policy = None  # `policy` decides, once there is a model
        if self.fsdp_version == 1:
            if on_cpu or rank_on_node()[1] == 1 < world_size(os.environ):
                refuse_copies(self.sharding_strategy or self.reshard_after_forward)
        elif isinstance(self.cpu_offload, CPUOffloadPolicy) and on_cpu:
            self.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs an accelerator

    def shard_arguments(self, accelerator: Accelerator) -> dict[str, Any]:
        """Keywords of `shard_model` but the mesh, for an Accelerator with this plugin."""
        if self.fsdp_version != 2:
            raise ConfigError(
                "The accelerator runs FSDP1, which the plugin, FSDP_VERSION or the launch config asks for, and "
                "from_pretrained shards with FSDP2. Write `fsdp_version: 2` under `fsdp_config`, or pass "
                "fsdp_plugin=FSDPPlugin(fsdp_version=2). Settings of FSDP1 are translated."
            )
        if not isinstance(accelerator, ShardedAccelerator):
            raise ConfigError(
                f"This {type(accelerator).__name__} would prepare and save models by Accelerate's own rules. Make it "
                "with make_accelerator(fsdp_plugin=…), which takes the same arguments."
            )
        policy, recipe = self.mixed_precision_policy, getattr(accelerator, "ao_recipe_handler", None)
        if self.takes_recipe and recipe is not None:
            policy = Float8Policy(config=recipe.config, module_filter=recipe.module_filter_func)
        return {
            "mp_policy": policy,
            "offload_policy": self.cpu_offload,
            "activation_checkpointing": self.recompute or False,
        }

    @property
    def recompute(self) -> Recompute | None:
        """Which blocks recompute their activations, and what they keep; None where none do."""
        return as_recompute(self.activation_checkpointing and self._recompute)

    def policy_for(self, model: nn.Module) -> WrapPolicy:
        """`policy` for one model: without layer classes that the model lacks, with its `ignored_modules` kept whole."""
        assert self.policy is not None
        policy = narrowed(self.policy, model) if self.translated else self.policy
        return policy if self.fsdp_version == 1 else without_modules(policy, self.ignored_modules, model)

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set the type of states, and its config as Accelerate does, but that shards are written and read where they
        lie: Accelerate's default for shards copies all that a rank holds to the host first, on one thread."""
        super().set_state_dict_type(state_dict_type)
        if self.fsdp_version == 2 and isinstance(self.state_dict_config, ShardedStateDictConfig):
            self.state_dict_config.offload_to_cpu = False

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Set the wrap policy for FSDP1; Accelerate calls it before it wraps a model itself. Under FSDP2 that is an
        error: the Accelerator has no `prepare` of this package. A call before there is one changes nothing."""
        if self.fsdp_version == 2:
            if not AcceleratorState._shared_state:
                return
            raise ConfigError(
                f"Accelerate is about to wrap {type(model).__name__} by its own rules. In a Trainer, put "
                "FSDPTrainerMixin before the Trainer: class MyTrainer(FSDPTrainerMixin, Trainer). In a loop, make the "
                "Accelerator with make_accelerator(fsdp_plugin=…)."
            )
        self.auto_wrap_policy = hybrid_auto_wrap_policy(model, policy=self.policy_for(model))  # type: ignore[assignment]

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Compute in `mixed_precision`, reduce gradients in fp32, cast neither outputs nor buffers.

        For "fp8", what the Accelerator's `AORecipeKwargs` say holds, which it makes of the launcher's variables too.
        """
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = _precision(mixed_precision, self.fsdp_version)
            self.takes_recipe = mixed_precision == "fp8"

    def _said(self, name: str) -> Any:
        """A setting as the plugin has it, else as its variable says it; names in the words of the table."""
        row, value = ARGUMENTS[name], getattr(self, name)
        if value is None or (row.kind is int and value == 0):
            text = os.environ.get(row.variable or "", "none")
            value = None if text.lower() in ("", "none") else text
        return as_setting(row, value)

    def _read_recompute(self) -> None:
        """Read what becomes of activations, with its variables, in place; refuse what contradicts itself."""
        prefix = "activation_checkpointing"
        said = {name: self._said(f"{prefix}_{name}") for name in vars(Recompute())}
        more = as_recompute({name: value for name, value in said.items() if value is not None})
        assert more is not None
        self._recompute, self.activation_checkpointing_save_ops = more, more.save_ops
        self.activation_checkpointing_every_n_layers = more.every_n_layers
        for name in (f"{prefix}_{name}" for name, usual in vars(Recompute()).items() if getattr(more, name) != usual):
            if self._said(prefix) is not True:
                raise ConfigError(
                    f"{name} says how activations are recomputed, and {prefix} is off. Turn it on, or leave {name} out."
                )
            if self.fsdp_version != 2:
                raise ConfigError(f"{name} needs FSDP2, and fsdp_version is 1. Use 2, or leave it out.")

    def _read_as_fsdp2(self, *, is_unversioned: bool) -> None:
        """Translate or drop the settings of FSDP1, in place, and say so once, on rank 0 of each machine."""
        strategy = self._said("sharding_strategy")
        values = (self._said("reshard_after_forward"), strategy)
        self.reshard_after_forward, has_copies = read_strategies(values, may_copy=is_unversioned)
        self.sharding_strategy = None
        old = {name: row.fsdp2 for name, row in ARGUMENTS.items() if row.is_old}
        said = ((name, self._said(name)) for name in old)
        left_out = ", ".join(f"{name}={value}" for name, value in said if value not in (None, old[name]))
        for name in old:
            setattr(self, name, True if name == "limit_all_gathers" else None)
        if not is_unversioned:
            if left_out:
                warn_on_node(
                    f"Only FSDP1 has {left_out}. FSDP2 gathers ahead, keeps original parameters and limits memory by "
                    "itself: left out."
                )
            return
        if self._said("state_dict_type") == "LOCAL_STATE_DICT":
            self.state_dict_type = "SHARDED_STATE_DICT"
        size = rank_on_node()[1]
        machines = world_size(os.environ) // size
        means = f"reshard_after_forward={self.reshard_after_forward}"
        if has_copies and machines > 1:
            self.copies = ParallelismConfig(dp_replicate_size=machines, dp_shard_size=size)
            means += f" in {machines} copies, one per machine"
        if os.environ.get("RANK", "0") == "0":
            warn(
                "The launch config has no fsdp_version, as `accelerate config` wrote it for years, and is read as "
                f"FSDP2: {strategy_name(strategy or 'FULL_SHARD')} means {means}; "
                f"{f'left out: {left_out}' if left_out else 'the rest means the same'}. `hf-fsdp convert FILE "
                "--output NEW` writes the file for FSDP2; FSDPPlugin(fsdp_version=1) asks for FSDP1."
            )

    def _translate_wrap(self) -> WrapPolicy:
        wrap = getattr(getattr(self.auto_wrap_policy, "func", self.auto_wrap_policy), "__name__", "")
        names, size = self.transformer_cls_names_to_wrap or (), self.min_num_params or 0
        idle = []
        if names and wrap != "transformer_auto_wrap_policy":
            idle.append(f"transformer_cls_names_to_wrap={','.join(names)} has effect only with TRANSFORMER_BASED_WRAP")
        if size and wrap != "size_based_auto_wrap_policy":
            idle.append(f"min_num_params={size} has effect only with SIZE_BASED_WRAP")
        if idle:
            warn_on_node(f"{'; '.join(idle)}. Set auto_wrap_policy so.")
        settings = _settings(self.auto_wrap_policy, tuple(name.strip() for name in names if name.strip()), size)
        settings |= {"reshard_after_forward": {"*": False}} if self.reshard_after_forward is False else {}
        return WrapPolicy(**settings)


def _read_version(version: int | None) -> tuple[int, bool]:
    """The version of FSDP, and whether a config that names none was launched, for which `accelerate launch` says 1.

    Only files that know of versions give FSDP1 its strategy as `fsdp_reshard_after_forward`; with others the launcher
    leaves that at true, which FSDP1 does not have.
    """
    text = str(os.environ.get("FSDP_VERSION", "2") if version is None else version).strip()
    if text not in ("1", "2"):
        raise ConfigError(
            f"fsdp_version is {text}: use 2 (fully_shard), or 1 (FullyShardedDataParallel, deprecated in PyTorch)."
        )
    is_open = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "").lower() in ("true", "false")
    is_unversioned = version is None and text == "1" and is_open and is_by_launcher()
    return (2 if is_unversioned else int(text)), is_unversioned


def _as_policy(policy: Any, version: int) -> Any:
    """`mixed_precision_policy` as a policy object: Accelerate also takes a name, or a mapping of dtypes."""
    if isinstance(policy, str):
        return _precision(policy, version)
    if not isinstance(policy, Mapping):
        return policy
    kind = MixedPrecisionPolicy if version == 2 else MixedPrecision
    known = {each.name for each in fields(kind)}
    if unknown := sorted(set(policy) - known):
        raise ConfigError(
            f"mixed_precision_policy has no {', '.join(unknown)}; FSDP{version} takes {', '.join(sorted(known))}."
        )
    values = {n: as_dtype(v, f"mixed_precision_policy's {n}") if n.endswith("dtype") else v for n, v in policy.items()}
    return kind(**values)


def _precision(name: Any, version: int) -> MixedPrecisionPolicy | MixedPrecision:
    if name == "fp8":
        return _float8(version)
    dtype = None if name in (None, "no") else as_dtype(name, "mixed_precision_policy")
    if version == 1:
        return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)  # for bf16 weights without a policy too


def _float8(version: int) -> Float8Policy:
    """What Accelerate's fp8 means, where torchao does it, which is imported here: Accelerate would do so noisily."""
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", "ao")
    if version == 1:
        raise ConfigError("mixed precision 'fp8' needs FSDP2, and the plugin has fsdp_version 1. Use 2, or bf16.")
    if backend.upper() not in ("AO", "NO"):
        raise ConfigError(
            f"mixed precision 'fp8' is torchao's here, and the FP8 backend is {backend}. Write `backend: AO` under "
            "`fp8_config`, or use bf16."
        )
    if "ACCELERATE_FP8_BACKEND" in os.environ:  # Accelerate (1.15) does not know its own launcher's word, ao
        os.environ["ACCELERATE_FP8_BACKEND"] = backend.upper()
    import_torchao()
    return Float8Policy()
