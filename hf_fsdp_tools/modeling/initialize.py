"""Initialise tensors that are in no file by the model's own code, with the same values for any number of ranks."""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.modeling.module_tree import original_classes, replaced

ModulePath = tuple[tuple[str, nn.Module], ...]
"""A module and its ancestors, root first, each with its fqn."""


def initialize_missing(model: nn.Module, *, missing_keys: Collection[str], seed: int = 0) -> None:
    """Fill missing parameters and persistent buffers, and every non-persistent buffer.

    The model's own `_init_weights` (or `reset_parameters` of a plain module) makes the values. The tensors of one
    module at a time are drawn whole on the CPU, by a generator seeded by `seed` and the module's name, and then cut to
    the shard. So the values do not depend on the number of ranks, on their order, or on what else is missing.

    No rank communicates.
    """
    missing = set(missing_keys)
    _mark_initialized(model)
    untouched: list[str] = []
    loaded = [m for name, m in model.named_modules() if isinstance(m, nn.Embedding) and f"{name}.weight" not in missing]
    with original_classes(model), _without_padding(*loaded):
        for path in _module_paths(model):
            name, module = path[-1]
            own = _own_tensors(module)
            wanted = {k: t for k, t in own if k in module._non_persistent_buffers_set or _fqn(name, k) in missing}
            if wanted:
                _refuse_adapters(path, wanted)
                made = _draw(path, {key: tensor.shape for key, tensor in wanted.items()}, seed)
                untouched += [_fqn(name, key) for key in wanted if key not in made]
                for key, tensor in wanted.items():
                    if key in made:
                        Held.of(tensor).fill(made[key])
                    tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own mark
    if untouched:
        raise CheckpointError(
            f"In no checkpoint file, and not initialised by the model's own code: {', '.join(untouched)}. "
            "Initialise them in the model's `_init_weights`, or register the buffers as persistent and save them."
        )


def draw_values(model: nn.Module, shapes: Mapping[str, Sequence[int]], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Values of some tensors of a model in other shapes, by its own initialisation: rows for added tokens, by key.

    They are drawn per module on the CPU, as in `initialize_missing`, in the dtypes of the model, which is not changed.

    No rank communicates; the values are the same on all.
    """
    _mark_initialized(model)
    drawn: dict[str, torch.Tensor] = {}
    with original_classes(model):
        for path in _module_paths(model):
            name, module = path[-1]
            own = {key: _fqn(name, key) for key, _ in _own_tensors(module)}
            wanted = {key: shapes[fqn] for key, fqn in own.items() if fqn in shapes}
            if wanted:
                with _without_padding(module):  # which may lie outside the other shape
                    made = _draw(path, wanted, seed)
                drawn |= {own[key]: value for key, value in made.items()}
    if untouched := sorted(shapes.keys() - drawn.keys()):
        raise CheckpointError(f"Not initialised by the model's own code: {', '.join(untouched)}.")
    return drawn


def _refuse_adapters(path: ModulePath, wanted: Collection[str]) -> None:
    """Refuse adapter weights on meta: PEFT draws them when it adds an adapter, and the model's code would differ."""
    if any(hasattr(module, "adapter_layer_names") for _, module in path[:-1]):
        names = ", ".join(f"{path[-1][0]}.{key}" for key in wanted)
        raise CheckpointError(
            f"Adapter weights on meta, which no checkpoint fills: {names}. Add the adapter to a model with real "
            "weights and let prepare() shard it."
        )


def _module_paths(model: nn.Module) -> Iterator[ModulePath]:
    """Every module once, children before parents, as transformers initialises them."""
    seen: set[nn.Module] = set()

    def walk(path: ModulePath) -> Iterator[ModulePath]:
        name, module = path[-1]
        seen.add(module)
        for child_name, child in module.named_children():
            if child not in seen:
                yield from walk((*path, (_fqn(name, child_name), child)))
        yield path

    return walk((("", model),))


def _fqn(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    own = [*module._parameters.items(), *module._buffers.items()]
    return [(key, tensor) for key, tensor in own if tensor is not None]


def _mark_initialized(model: nn.Module) -> None:
    """Mark all tensors as initialised: transformers' initialisers, of which some reach into other modules, leave them
    alone, and write to the tensors without a mark that `_draw` puts in their place."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own mark


def _draw(path: ModulePath, shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, torch.Tensor]:
    """Tensors of these shapes, drawn on the CPU by the initialisers of the last module of `path`, by name."""
    name, module = path[-1]
    stores: dict[str, dict[str, Any]] = {
        key: module._parameters if key in module._parameters else module._buffers for key in shapes
    }
    own = {key: stores[key][key] for key in shapes}
    whole = {key: _zeros_on_cpu(own[key], shape) for key, shape in shapes.items()}
    versions = {key: tensor._version for key, tensor in whole.items()}
    for key, tensor in whole.items():
        stores[key][key] = tensor
    try:
        with torch.random.fork_rng(devices=()), torch.no_grad(), init.guard_torch_init_functions():
            torch.default_generator.manual_seed(seed ^ zlib.crc32(name.encode()))  # GPUs' generators are left alone
            for initialize in _initializers(path):
                initialize()
        made = {key: stores[key][key] for key in shapes}  # a module may have set a new tensor in its place
    finally:
        for key, tensor in own.items():
            stores[key][key] = tensor
    return {key: t for key, t in made.items() if t is not whole[key] or t._version != versions[key]}


def _initializers(path: ModulePath) -> Iterator[Callable[[], object]]:
    """Yield the initialisers of the last module of a path: its own, then those of ancestors that write its tensors."""
    for depth in range(len(path), 0, -1):
        module = path[depth - 1][1]
        owners = [ancestor for _, ancestor in path[:depth] if isinstance(ancestor, PreTrainedModel)]
        if not owners:
            if depth == len(path) and callable(reset := getattr(module, "reset_parameters", None)):
                yield reset
        elif depth == len(path) or not owners[-1].is_custom_code():
            # Code outside transformers may write tensors without looking at the mark, so it sees no other module.
            yield partial(owners[-1]._init_weights, module)


def _without_padding(*modules: nn.Module) -> AbstractContextManager[None]:
    """Unset the `padding_idx` of embeddings for a block; initialisers of some models zero that row of loaded weights.

    They index the weight, and the mark of what is initialised is not on the row.
    """
    return replaced(*(each for each in modules if getattr(each, "padding_idx", None) is not None), padding_idx=None)


def _zeros_on_cpu(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    zeros = torch.zeros(tuple(shape), dtype=like.dtype, device="cpu")
    return nn.Parameter(zeros, requires_grad=False) if isinstance(like, nn.Parameter) else zeros
