"""Compile the blocks of a plan in place, each by itself, because FSDP2 gathers between them."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import Cache

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.planning.plan import WrapPlan

_WITHOUT_GRAPHS = {"max-autotune": "max-autotune-no-cudagraphs", "reduce-overhead": "default"}
"""The modes of `torch.compile` that record CUDA graphs, and what each is without them (torch's documentation of
`torch.compile`)."""


def check_options(options: Mapping[str, Any], device_type: str) -> None:
    """Refuse options of `torch.compile` that record CUDA graphs; on CPUs there are none.

    A CUDA graph reads parameters where they were when it was recorded. FSDP2 frees gathered parameters after their use
    and gathers them elsewhere: at best, each step would record anew.
    """
    if device_type == "cpu":
        return
    asked: dict[str, str] = {}
    if (mode := options.get("mode")) in _WITHOUT_GRAPHS:
        asked[f"mode={mode!r}"] = f"mode={_WITHOUT_GRAPHS[mode]!r}"
    if (options.get("options") or {}).get("triton.cudagraphs"):
        asked["options={'triton.cudagraphs': True}"] = "False there"
    if options.get("backend") == "cudagraphs":
        asked["backend='cudagraphs'"] = "backend='inductor'"
    if asked:
        raise ConfigError(
            f"torch.compile with {' and '.join(asked)} records CUDA graphs, which read parameters at fixed addresses, "
            f"and FSDP2 gathers parameters elsewhere in each step. Use {' and '.join(asked.values())}."
        )


def compile_blocks(model: nn.Module, plan: WrapPlan, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Compile every block of `plan` with `nn.Module.compile`, at its first call; return their names.

    A block is a unit that has modules inside it. Equal blocks share one compiled code. Where a block holds another unit
    (experts), its parts without a unit are compiled instead, because FSDP's gathering must stay between compiled
    regions. The model stays the same object with the same parameter names. A call with a cache (`generate`) runs
    without compiled code: caches differ from layer to layer and grow with every token, and torch would compile each
    call anew up to its limit of 8 (`recompile_limit` of torch._dynamo).

    No rank communicates.
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
