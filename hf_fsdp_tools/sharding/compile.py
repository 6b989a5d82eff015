"""Compile the blocks of a plan in place, each by itself, because FSDP2 gathers between them."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import Cache

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.planning.plan import WrapPlan


def check_options(options: Mapping[str, Any], device_type: str) -> None:
    """Refuse options of `torch.compile` that record CUDA graphs, which read parameters at fixed addresses."""
    has_graphs = options.get("mode") in ("max-autotune", "reduce-overhead") or options.get("backend") == "cudagraphs"
    if device_type != "cpu" and (has_graphs or (options.get("options") or {}).get("triton.cudagraphs")):
        raise ConfigError(
            f"torch.compile with {dict(options)} records CUDA graphs, and FSDP2 gathers parameters at other addresses "
            "in each step. Use mode='max-autotune-no-cudagraphs', or leave the mode out."
        )


def compile_blocks(model: nn.Module, plan: WrapPlan, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Compile every block of `plan` with `nn.Module.compile`, at its first call; return their names.

    Equal blocks share one compiled code. Where a block holds another unit (experts), its parts without a unit are
    compiled instead, because FSDP's gathering must stay between compiled regions. A call with a cache (`generate`) runs
    without compiled code: caches grow with every token, and torch would compile each call anew up to its limit of 8
    (`recompile_limit` of torch._dynamo). No rank communicates.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    units = {name for unit in plan.units for name in unit.modules}
    chosen = [name for unit in units - {""} for name in _regions(unit, modules[unit], units - {unit})]
    for name in chosen:
        _compile(modules[name], options)
    return tuple(sorted(chosen))


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
