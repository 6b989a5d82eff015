"""Hooks of a sharded model next to FSDP2's own: they keep memory, outputs and gradients right where it leaves a gap."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.distributed.steps import Step, at_steps
from hf_fsdp_tools.modeling.module_tree import ModuleTree, has_forward
from hf_fsdp_tools.modeling.roles import lists_of_experts
from hf_fsdp_tools.sharding.fsdp2_internals import (
    complete_unit,
    end_alone,
    follow_training,
    forward_begun,
    gather_for_backward,
    in_backward,
    in_pass,
    make_gathered_memory,
    make_root,
    refuse_gathered,
    reshard_units,
    show_shards,
    unit_modules,
    use_frozen_in_place,
)
from hf_fsdp_tools.sharding.phases import Hook, Phase
from hf_fsdp_tools.sharding.sharding import Feature, Sharded, Sharding
from hf_fsdp_tools.sharding.zero_grads import first_float, in_graph, own_weights, with_tensor, with_zero_grads

_IS_BEFORE_2_13 = not hasattr(FSDPModule, "reset_iter_state")
"""Whether torch is older than 2.13."""


class Units(Feature):
    """What FSDP2 leaves open around units: memory, views, gradients of what did not run."""

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook]:
        """Each hook says below which gap it closes."""
        yield from hooks_of_experts(tree)
        if sharding.is_whole:
            return
        at_steps(Step.STOP, refuse_gathered)
        units = {module for module in model.modules() if isinstance(module, FSDPModule)}
        for module in units:
            assert isinstance(module, nn.Module)
            if module is not model and module._parameters:
                yield Hook(module, Phase.COPY, _part_from_weights)
            yield Hook(module, Phase.COPY, _as_no_views)
            yield Hook(module, Phase.MEMORY, partial(_prepare_unit, model=model, is_alone=sharding.mesh.shape[-1] == 1))
            if len(unit_modules(module)) > 1:
                yield Hook(module, Phase.KEEP, gather_for_backward)
            if module is not model:
                yield Hook(module, Phase.KEEP, partial(end_alone, model=model))
        head = getattr(model, "get_output_embeddings", lambda: None)()
        base = getattr(model, "base_model", model)
        if isinstance(head, FSDPModule) and base is not model:
            yield Hook(base, Phase.KEEP, partial(_gather_head, head=head))
        yield Hook(model, Phase.CONTEXT, partial(_pass, model))
        for part in model.modules():
            is_within = part is not model and part not in units and has_forward(part)
            if is_within and units.intersection(part.modules()):  # the base, a decoder, a tower
                yield Hook(part, Phase.CONTEXT, partial(_pass_within, model))
        if _IS_BEFORE_2_13:
            yield Hook(model, Phase.OUTPUT, _complete_units)


def hooks_of_experts(tree: ModuleTree) -> Iterator[Hook]:
    """Let every expert of a list be part of the result of the module that runs the list."""
    for node in lists_of_experts(tree.root):
        runner = next((above for above in (node, *node.ancestors()) if has_forward(above.module)), None)
        if runner is not None:
            yield Hook(runner.module, Phase.REACH, partial(_reach_experts, experts=node.module))


@contextmanager
def _pass(model: nn.Module) -> Iterator[None]:
    """A pass of a model, or of its base alone, at whose end modules register shards: an optimizer made now, or a change
    in place, is of these. What FSDP2 keeps gathered for backward stays so; without gradients, or after an error, it
    does not."""
    yield
    if in_pass(model):  # FSDP2 waits for the end of a pass that has failed
        reshard_units(model)
    if Sharded.of(model).gathered:
        return
    for module in model.modules() if not torch.is_grad_enabled() else ():
        if isinstance(module, FSDPModule):
            module.reshard()
    show_shards(model)


@contextmanager
def _pass_within(model: nn.Module) -> Iterator[None]:
    """Let a pass of the base or a tower alone be one of the model, in whose own unit weights of it may lie."""
    with nullcontext() if in_pass(model) else _pass(model), forward_begun(model):
        yield


def _gather_head(base: nn.Module, args: object, output: object, *, head: FSDPModule) -> None:
    """Gather a head before its weight is read: chunked losses, as TRL's, do not call it. The gradient of a shard that
    is read would be that of this rank's rows alone."""
    if torch.is_grad_enabled():
        head.unshard()


def _prepare_unit(module: Any, args: object, kwargs: object, *, model: nn.Module, is_alone: bool) -> None:
    """Let the model be the root, whichever unit runs first (scripts run the base, PEFT's prompts the embedding); follow
    what is trained now; and make the memory into which a unit gathers outside of inference mode.

    FSDP2 (torch 2.11 to 2.13) makes it when a unit is gathered for the first time. Made in inference mode, it fails in
    the first training step; on one GPU, and with parameters split along another dimension than 0, in the forward pass.
    """
    make_root(model)
    if is_alone:
        use_frozen_in_place(module)
    follow_training(module)
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            make_gathered_memory(module)


def _part_from_weights(module: nn.Module, args: object, output: Any) -> Any:
    """Copy an output that is a view of the module's own weights."""
    weights = (weight for weight in module._parameters.values() if weight is not None)
    if not isinstance(output, torch.Tensor) or isinstance(output, DTensor):  # tensor parallel: it has no storage
        return output
    own = {weight.untyped_storage().data_ptr() for weight in weights if not isinstance(weight, DTensor)}
    return output.clone() if output.untyped_storage().data_ptr() in own else output


def _as_no_views(module: nn.Module, args: object, output: Any) -> Any:
    """Hand on the same memory in tensors that are no views. A write to a view (RoCBert's) takes FSDP2's hook from it,
    and the unit is not gathered for the backward pass; FSDP2 warns of each."""
    for tensor in dict.fromkeys(in_graph(output)):
        if not isinstance(tensor, DTensor) and tensor._is_view():
            output = with_tensor(output, tensor, with_zero_grads(tensor))
    return output


def _reach_experts(runner: nn.Module, args: object, output: Any, *, experts: nn.Module) -> Any:
    """Give experts that got no token a gradient of zeros.

    FSDP2 reduces the gradients that a rank has. Where the tokens of ranks choose different experts, the ranks would
    reduce different ones: the run hangs, or sums up what does not belong together.
    """
    weights = own_weights([experts])  # experts that are units of their own are gathered one by one (`skipped`)
    if not weights or not torch.is_grad_enabled():
        return output
    tensor = None if isinstance(output, dict) else first_float(output)
    return output if tensor is None else with_tensor(output, tensor, with_zero_grads(tensor, *weights))


def _complete_units(model: nn.Module, args: object, output: Any) -> Any:
    """Complete every unit with a module that did not run, as when TRL uses the head's weight without its forward.

    Otherwise FSDP2 waits for this forward for ever: the unit is not resharded after an evaluation, and not gathered
    again for its backward pass or in the next step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            output = complete_unit(module, output)
    return output


class Buffers(Feature):
    """All ranks of a mesh take over the first one's buffers before a forward pass, as under DDP.

    These are the buffers that a checkpoint holds (others are caches of a rank's own rows), once a forward pass changes
    any: BatchNorm, queues. The ranks compare that before passes 2, 3, 5, 9 and so on.
    """

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook]:
        """The broadcast, where the model has such buffers."""
        if (mesh := sharding.mesh).size() == 1:
            return
        holders = [module for module in model.modules() if module._buffers.keys() - module._non_persistent_buffers_set]
        ranks, count, is_changed = sorted(mesh.mesh.flatten().tolist()), 0, False
        seen: dict[torch.Tensor, int] = {}
        broadcast: Any = dist._broadcast_coalesced  # type: ignore[attr-defined]  # which DDP calls

        def share(model: nn.Module, args: object, kwargs: object) -> None:
            nonlocal seen, count, is_changed
            if in_backward() or Sharded.of(model).gathered:  # then ranks run passes of their own
                return
            own = ({**m._buffers, **dict.fromkeys(m._non_persistent_buffers_set)}.values() for m in holders)
            held = [buffer for each in own for buffer in each if buffer is not None]
            if not is_changed and not count & (count - 1):
                before, seen = seen, {buffer: 0 if buffer.is_inference() else buffer._version for buffer in held}
                is_changed = count > 0 and any(all_ranks(before != seen, "comparing buffers", ranks=ranks))
            count += 1
            if is_changed:
                with torch.no_grad():
                    for group in reversed(mesh.get_all_groups()):
                        broadcast(group, held, 250 * 2**20, 0)

        if holders:
            yield Hook(model, Phase.BUFFERS, share)
