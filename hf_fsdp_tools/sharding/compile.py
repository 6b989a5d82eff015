"""Short forms of mesh, precision, offload and compilation; blocks compiled in place, as FSDP2 gathers between them."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from transformers import Cache

from hf_fsdp_tools.distributed.mesh import ParallelDims, dims_of
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.sharding.hf_interface import turn_cache_off
from hf_fsdp_tools.sharding.recompute import Recompute
from hf_fsdp_tools.sharding.sharding import Feature, Float8Policy, Sharding
from hf_fsdp_tools.text import did_you_mean, quoted


def check_options(options: Mapping[str, Any], device_type: str, recompute: Recompute | None = None) -> None:
    """Refuse options of `torch.compile` that record CUDA graphs, which read parameters at fixed addresses, and compiled
    code where results of operators are to be kept: it writes to their memory again."""
    if recompute is not None and recompute.save_ops and options.get("backend") in (None, "inductor"):
        raise ConfigError(
            "save_ops of activation checkpointing keeps results of single operators, which compiled blocks do not "
            "have. Leave save_ops out, or do not compile."
        )
    has_graphs = options.get("mode") in ("max-autotune", "reduce-overhead") or options.get("backend") == "cudagraphs"
    if device_type != "cpu" and (has_graphs or (options.get("options") or {}).get("triton.cudagraphs")):
        raise ConfigError(
            f"torch.compile with {dict(options)} records CUDA graphs, and parameters are at other addresses in each "
            "step, where FSDP2 gathers them or one GPU casts them. Use mode='max-autotune-no-cudagraphs', or leave "
            "the mode out."
        )


def compile_blocks(model: nn.Module, plan: WrapPlan, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Compile every block of `plan` with `nn.Module.compile`, at its first call; return their names.

    Where a block holds another unit (experts), its parts without a unit are compiled instead, because FSDP's gathering
    must stay between compiled regions. A call with a cache (`generate`) runs without compiled code: caches grow with
    every token, and torch would compile each call anew. So the config's `use_cache` is turned off, with which models of
    transformers make a cache in training too.
    """
    turn_cache_off(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    units = {name for unit in plan.units for name in unit.modules}
    chosen = [name for unit in units - {""} for name in _regions(unit, modules[unit], units - {unit})]
    for name in chosen:
        _compile(modules[name], options)
    return tuple(sorted(chosen))


class CompiledBlocks(Feature):
    """Blocks are compiled in place, as a model's `compile` says."""

    def check(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """The options are looked at."""
        if sharding.compile is not None:
            check_options(sharding.compile, sharding.mesh.device_type, sharding.activation_checkpointing)

    def before_units(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """Each block is compiled when it is called first."""
        self.again(model, sharding)

    def again(self, model: nn.Module, sharding: Sharding) -> None:
        """A copied block is compiled again."""
        if sharding.compile is not None:
            compile_blocks(model, sharding.plan, sharding.compile)


def _compile(module: nn.Module, options: Mapping[str, Any]) -> None:
    module.compile(**options)
    compiled = module._compiled_call_impl
    assert compiled is not None

    def call(*args: Any, **kwargs: Any) -> Any:
        cached = any(isinstance(value, Cache) for value in (*args, *kwargs.values()))
        run: Any = module._call_impl if cached else compiled
        return run(*args, **kwargs)

    module._compiled_call_impl = call


def _regions(name: str, module: nn.Module, others: set[str]) -> Iterator[str]:
    """Yield the largest parts of a unit without other units; single leaves (embeddings, heads) would gain nothing."""
    if name in others or not any(module.children()):
        return
    if not any(other.startswith(f"{name}.") for other in others):
        yield name
        return
    for child_name, child in module.named_children():
        yield from _regions(f"{name}.{child_name}", child, others)


_HONOURED = (
    "tp_size", "ep_size", "fsdp_size", "dp_replicate_size", "pp_size", "tp_plan", "ep_plan", "ep_implementation",
    "enable_sequence_parallel",
)  # fmt: skip
"""Fields of transformers' `DistributedConfig`; of `pp_size`, 1 alone."""


def as_parallel(config: Any) -> dict[str, Any]:
    """What transformers' `DistributedConfig`, or a dict of its arguments, asks for; refuse what cannot be honoured."""
    given = config if isinstance(config, Mapping) else vars(config)
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    if unknown := [name for name in asked if name not in _HONOURED]:
        otherwise = ". Leave it out: precision, offload and plans are arguments of from_pretrained."
        end = did_you_mean(unknown[0], _HONOURED, otherwise=otherwise)
        raise ConfigError(f"distributed_config: {unknown[0]} {asked[unknown[0]]!r} cannot be honoured{end}")
    return asked


def as_mesh(value: Any) -> DeviceMesh | None:
    """The mesh; that of `ParallelDims`, or of transformers' `DistributedConfig`, for which every rank must call."""
    if (getattr(value, "pp_size", None) or 1) > 1:
        raise ConfigError(f"pp_size {value.pp_size}: pipeline parallelism is not part of this package. Leave it out.")
    if isinstance(value, DeviceMesh | None):
        return value
    return (value if isinstance(value, ParallelDims) else dims_of(value)).build_mesh()


def as_mp_policy(value: Any) -> MixedPrecisionPolicy | None:
    """The policy; for a dtype or its name ("bf16"), computation in it and reduction in fp32. "no" is None."""
    if value is None or value == "no":
        return None
    if value == "fp8":
        return Float8Policy()
    if isinstance(value, str | torch.dtype):
        return MixedPrecisionPolicy(param_dtype=as_dtype(value, "mp_policy"), reduce_dtype=torch.float32)
    if not isinstance(value, MixedPrecisionPolicy):
        raise ConfigError(
            f"mp_policy is {quoted(value)}: it must be a MixedPrecisionPolicy of torch.distributed.fsdp, or a dtype of "
            "computation, such as 'bf16', or 'fp8'."
        )
    names = [each.name for each in fields(value) if each.name.endswith("dtype")]
    return replace(value, **{name: as_dtype(getattr(value, name), f"mp_policy.{name}") for name in names})


def as_offload_policy(value: Any) -> OffloadPolicy | None:
    """The policy; `CPUOffloadPolicy()` for True and "cpu", None for False."""
    if value is None or value is False or isinstance(value, OffloadPolicy):
        return value or None
    if value is True or value == "cpu":
        return CPUOffloadPolicy()
    raise ConfigError(
        f"offload_policy is {quoted(value)}: give CPUOffloadPolicy() of torch.distributed.fsdp (or True) to keep the "
        "shards on the CPU between uses, or leave it out."
    )


def as_compile(value: bool | str | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Options of `torch.compile`; a text is the name of a backend, None and False mean none."""
    if isinstance(value, str):
        backends = torch.compiler.list_backends(exclude_tags=())
        if value not in backends:
            raise ConfigError(f"compile={value!r} is no backend of torch.compile{did_you_mean(value, backends)}")
        return {"backend": value}
    if value is None or isinstance(value, bool):
        return {} if value else None
    return dict(value)
