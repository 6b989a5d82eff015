"""The order in which everything runs around the forward passes of a sharded model: one table for all features.

A feature gives its hooks as data: a module, a phase, a function. `install` registers at most one hook on each side of
FSDP2's own hooks (which gather and reshard), and each runs its functions by phase; `describe_hooks` prints them.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools.modeling.notes import Note
from hf_fsdp_tools.text import grouped, merge_alike


class Phase(IntEnum):
    """When a function runs, the lowest first. Those up to `OWN` are called with (module, args, kwargs) and return None
    or other (args, kwargs), but those of `CONTEXT`; the others with (module, args, output), and return None or another
    output."""

    FIRST_PASS = 1  # checks before the first training pass, and nothing later
    BUFFERS = 2  # ranks take over buffers, before anything is computed with them
    MEET = 3  # ranks agree on the units that run next; a skipped one runs on a dummy input
    SCALES = 4  # scales of FP8 weights, before these are gathered
    MEMORY = 5  # into which a unit gathers; or its shard is used in place
    GATHER = 6  # FSDP2's own hook
    STACK = 7  # a stack of blocks begins
    CAST = 8  # inputs to the dtype of gathered weights
    CONTEXT = 9  # a function without arguments gives a context, which is left last, also after an error
    LABELS = 10  # a divided head looks at labels of whole rows
    TOKENS = 11  # whether the ranks that share layers hold own tokens in this pass
    REGION = 12  # own tokens of these ranks are joined before divided layers
    ROWS = 13  # are cut into the parts of ranks, as is all that belongs to tokens
    OWN = 14  # of a part, the tokens of each rank that shares layers
    JOIN = 15  # units of a stack that did not run take part with a dummy input
    REACH = 16  # experts without tokens become part of the output
    COPY = 17  # of outputs that are views of gathered weights
    RESHARD = 18  # FSDP2's own hook
    KEEP = 19  # what the backward pass needs is asked for, or gathered
    OUTPUT = 20  # in fp32; FSDP2 is given the units that end here
    WORDS = 21  # logits of a divided head become DTensors
    WHOLE_TOKENS = 22  # own tokens of ranks that share layers are joined after the decoder
    WHOLE = 23  # parts of rows are joined, and losses are those of whole rows
    OWN_AGAIN = 24  # of what divided layers made


_SIDES = [(Phase.FIRST_PASS, Phase.MEMORY), (Phase.STACK, Phase.OWN)]
_SIDES += [(Phase.JOIN, Phase.COPY), (Phase.KEEP, Phase.OWN_AGAIN)]
"""The phases before and after FSDP2 gathers, and before and after it reshards."""


@dataclass(frozen=True)
class Hook:
    """One function that runs around the forward passes of one module."""

    module: nn.Module
    phase: Phase
    call: Callable[..., Any]


@dataclass(frozen=True)
class Installed(Note):
    """What features have installed on a sharded model or a module of it; its copies have nothing of it."""

    hooks: tuple[Any, ...] = ()
    """Hooks, and what was changed in addition to these."""
    casts: tuple[Any, ...] = ()
    """The `CastWeights` of a module whose weights no unit gathers."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Installed":
        return Installed()


class Undo(Protocol):
    """What a feature has changed in a model in addition to hooks."""

    def remove(self) -> None:
        """Undo it."""


def install(model: nn.Module, made: Iterable["Hook | Undo"]) -> None:
    """Register the hooks of all features on a model and the modules below, in place of those registered before."""
    _unregister(model)
    made = tuple(made)
    hooks = grouped((hook.module, hook) for hook in made if isinstance(hook, Hook))
    for module, own in hooks.items():
        _register(module, sorted(own, key=lambda hook: hook.phase))
    Installed.put(model, hooks=made)


def remove_hooks(model: nn.Module) -> None:
    """Take everything off a model that features have installed."""
    for each in Installed.of(model).hooks:
        if not isinstance(each, Hook):
            each.remove()
    for module in model.modules():
        for cast in (casts := Installed.of(module).casts):
            cast.restore()
        if casts:
            Installed.put(module, casts=())
    _unregister(model)
    Installed.put(model, hooks=())


def _register(module: nn.Module, hooks: list[Hook]) -> None:
    before_gather, before, after, after_reshard = (
        [hook for hook in hooks if first <= hook.phase <= last] for first, last in _SIDES
    )
    entered: list[ExitStack] | None = [] if any(hook.phase is Phase.CONTEXT for hook in before) else None
    if before_gather:
        module.register_forward_pre_hook(
            _marked(partial(_change_inputs, before_gather)), prepend=True, with_kwargs=True
        )
    if before:
        run = partial(_change_inputs, before, entered=entered)
        module.register_forward_pre_hook(_marked(run), with_kwargs=True)
    if after:
        module.register_forward_hook(_marked(partial(_change_output, after)), prepend=True)
    if after_reshard:
        module.register_forward_hook(_marked(partial(_change_output, after_reshard)))
    if entered is not None:
        module.register_forward_hook(_marked(partial(_leave, entered)), always_call=True)


def _change_inputs(
    hooks: list[Hook], module: nn.Module, args: Any, kwargs: Any, entered: list[ExitStack] | None = None
) -> Any:
    if entered is not None:
        entered.append(ExitStack())
    for hook in hooks:
        if entered is not None and hook.phase is Phase.CONTEXT:
            context: AbstractContextManager[Any] = hook.call()
            entered[-1].enter_context(context)
        elif (changed := hook.call(module, args, kwargs)) is not None:
            args, kwargs = changed
    return args, kwargs


def _change_output(hooks: list[Hook], module: nn.Module, args: Any, output: Any) -> Any:
    for hook in hooks:
        changed = hook.call(module, args, output)
        output = output if changed is None else changed
    return output


def _leave(entered: list[ExitStack], module: nn.Module, args: object, output: object) -> None:
    if entered:  # nothing where an earlier hook raised
        entered.pop().close()


_MARK = "_hf_fsdp_hook"


def _marked(run: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that is known as ours, also on a copied module; torch's compiler does not look into it."""
    hook: Callable[..., Any] = torch.compiler.disable(lambda *given: run(*given))  # type: ignore[no-untyped-call]
    hook.__dict__[_MARK] = True
    return hook


def _unregister(model: nn.Module) -> None:
    for module in model.modules():
        for registered in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in registered.items() if _MARK in getattr(hook, "__dict__", {})]:
                del registered[key]
                for others in (
                    module._forward_pre_hooks_with_kwargs,
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                ):
                    others.pop(key, None)


def describe_hooks(model: nn.Module) -> str:
    """What runs around the forward passes of the modules of a sharded model, in its order, with FSDP2's own hooks.

    Modules with the same list stand together. Any rank may call; nothing is communicated.
    """
    names = {module: name for name, module in model.named_modules()}
    lists: dict[nn.Module, list[tuple[int, str]]] = {
        module: [(Phase.GATHER, "FSDP2"), (Phase.RESHARD, "FSDP2")] if isinstance(module, FSDPModule) else []
        for module in names
    }
    for root in names:
        for hook in Installed.of(root).hooks:
            if isinstance(hook, Hook):
                lists[hook.module].append((hook.phase, _name_of(hook.call)))
    alike = grouped(
        (tuple(sorted(rows, key=lambda row: row[0])), names[module] or type(module).__name__)
        for module, rows in lists.items()
        if rows
    )
    return "\n".join(
        "\n  ".join(
            [" ".join(merge_alike(modules)), *(f"{Phase(phase).name.lower():<11} {name}" for phase, name in rows)]
        )
        for rows, modules in alike.items()
    )


def _name_of(call: Any) -> str:
    while isinstance(call, partial):
        call = call.func
    return f"{(call.__module__ or '').rpartition('.')[2]}.{call.__qualname__.rpartition('.')[2].lstrip('_')}"
