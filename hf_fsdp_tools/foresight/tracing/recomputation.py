"""Activation checkpointing in a dry run: which blocks compute again, and what runs for the second time."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.tracing.recorder import Recorder
from hf_fsdp_tools.modeling.module_tree import ModuleTree, class_name
from hf_fsdp_tools.planning.stacks import find_blocks
from hf_fsdp_tools.sharding.shard import checkpoint_activations

_COMPUTED_AGAIN = "computed_again"  # Attribute of a block during a dry run


@contextmanager
def blocks_marked(model: nn.Module, setup: TrainingSetup) -> Iterator[None]:
    """A block in which the model's blocks say whether they are computed again, in an attribute that copies have too."""
    every = setup.checkpoint_every if setup.activation_checkpointing else 1
    lists: dict[Any, list[nn.Module]] = {}
    for stack in find_blocks(ModuleTree(model)) if every > 1 else ():
        for node in stack:
            lists.setdefault(node.parent, []).append(node.module)
    marked = [(block, number % every == 0) for blocks in lists.values() for number, block in enumerate(blocks, 1)]
    for block, again in marked:
        if not hasattr(block, "gradient_checkpointing"):
            raise ConfigError(f"checkpoint_every is {every}, and {class_name(block)} has no checkpointing of its own.")
        block.__dict__[_COMPUTED_AGAIN] = again
    try:
        yield
    finally:
        for block, _ in marked:
            block.__dict__.pop(_COMPUTED_AGAIN, None)


def checkpoint_marked(model: nn.Module, recorder: Recorder) -> None:
    """Let the blocks of a copy compute again that are not marked otherwise, and the recorder know what does."""
    checkpoint_activations(model)

    def count(change: int, *_: object) -> None:
        recorder.repeated += change if recorder.phase == "backward" else 0

    for module in model.modules():
        if not module.__dict__.get(_COMPUTED_AGAIN, True):
            module.__dict__["gradient_checkpointing"] = False
        module.register_forward_pre_hook(partial(count, 1), prepend=True)
        module.register_forward_hook(
            partial(count, -1), always_call=True
        )  # also where what is needed has been computed
