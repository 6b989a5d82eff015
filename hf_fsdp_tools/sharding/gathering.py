"""Weights of all units gathered once for a block, as while text is generated: one gather in place of one per token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools.accelerator import free_bytes
from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.modeling.notes import add_to_note, note_of
from hf_fsdp_tools.sharding.alike import compare_inputs, draw_alike
from hf_fsdp_tools.sharding.fsdp2_internals import (
    bytes_gathered,
    forward_begun,
    gather_units,
    keep_gathered,
    reshard_units,
)

_SHARE = 0.5
"""The share of free memory that gathered weights may take; the rest is for keys, values and activations. (assumed)"""


@contextmanager
def gathered_units(model: nn.Module, gathered: bool = True) -> Iterator[None]:
    """A block in which a sharded model keeps all its weights gathered, for any number of `generate` calls in it.

    A single `model.generate(…)` does so by itself where the weights take at most half of the memory that is free on
    every rank, and gathers unit by unit for each token where they do not. This block is for several calls, and to
    decide otherwise. While weights are gathered, forward passes communicate nothing: ranks may generate texts of other
    lengths and numbers, or none. Where ranks share layers, experts or rows, they still run each forward pass together.

    Args:
        model: sharded by this package, also inside PEFT's wrapper; of any other model nothing is done.
        gathered: False: `generate` in this block gathers unit by unit, which takes the memory of one unit.

    The weights are in the dtype of computation, as they are where the block begins: train and step outside of it, and
    run its forward passes without gradients. Every rank must call. Each unit is gathered once, at the beginning; at the
    end everything is sharded again, after an error too.

    Example:
        >>> model = from_pretrained("checkpoint")
        >>> with gathered_units(model):
        ...     first = model.generate(torch.tensor([[3, 4]]), max_new_tokens=2)
        ...     second = model.generate(torch.tensor([[5]]), max_new_tokens=4)
        >>> second.shape[0]
        1
    """
    root = next((module for module in model.modules() if note_of(module).sharding), None)
    if root is None:
        yield
        return
    before = note_of(root).gathered
    add_to_note(root, gathered=gathered)
    try:
        if gathered:
            with _kept(root):
                yield
        else:
            yield
    finally:
        add_to_note(root, gathered=before)


@contextmanager
def _kept(root: nn.Module) -> Iterator[None]:
    """A block in which the units of a root are gathered, and ranks that share nothing else do not wait for others."""
    marked: list[Any] = []
    if not (note_of(root).sharding.is_divided or any(note_of(module).rows for module in root.modules())):
        marked = [module for module in root.modules() if getattr(module, "_is_fsdp_managed_module", False)]
    # By the mark, `generate` goes on until every rank has finished.
    with replaced(*marked, _is_fsdp_managed_module=False), keep_gathered(root):
        yield


def generate_on_shards(model: nn.Module, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer `model.generate(…)` on shards; every rank must call, but within `gathered_units`."""
    assert isinstance(model, FSDPModule)
    asked = note_of(model).gathered
    if asked is None:
        with gathered_units(model, _fits(model)):
            return generate_on_shards(model, plain, *args, **kwargs)
    if asked:
        gather_units(model)  # nothing, unless a save in the block has sharded them
    axes = note_of(model).sharding.axes
    shared = [mesh for mesh in (axes.layers, axes.rows) if mesh is not None and mesh.size() > 1]
    for mesh in shared:
        compare_inputs((*args, *kwargs.values()), mesh.get_group(), "rows (cp_size, tp_size) and are to generate")
    draw_alike(shared, note_of(model).sharding.device)
    try:
        with forward_begun(model):
            return plain(*args, **kwargs)
    finally:  # after an error, too
        if not asked:
            reshard_units(model)


def _fits(model: nn.Module) -> bool:
    """Whether the weights can be gathered on every rank. Every rank must call."""
    sharding = note_of(model).sharding
    mesh = sharding.mesh
    share = _SHARE / (rank_on_node()[1] if mesh.device_type == "cpu" else 1)
    ranks = None if sharding.is_divided else sorted(mesh.mesh.flatten().tolist())
    return all(all_ranks(bytes_gathered(model) <= share * free_bytes(mesh.device_type), "generating", ranks=ranks))
