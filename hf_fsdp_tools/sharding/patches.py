"""All that stands in the place of something of a library: in a process (`HABITS`, `BOXES`), or on a model, Accelerator
or trainer, or for a block (`ELSEWHERE`).

Habits of scripts that would do something else on shards, in silence, work as on one process, or say what does:

    drawing     `nn.init.normal_(weight)`, `weight.data.uniform_()`, `torch.randn_like(weight)`: what one process draws
    deciding    `if p.grad.isnan().any():`, `float(p.norm())`: an error, for each rank would answer for its own part
    writing     `weight.grad[:n].zero_()`: an error, for what an index gives of shards is a copy
    asking      `torch.autograd.grad(loss, model.parameters())`: an error, for shards are in no graph

torch (2.13) takes a shard for one box from the first to the last index: of fused weights that tensor parallelism cuts
in two ranges, ranks would overlap, and what is read into them would be wrong. With `BOXES`, DCP saves and loads each
box of a DTensor of which this rank holds several.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.shards import Box, Held, HeldShard, memory_view
from hf_fsdp_tools.errors import ConfigError

_SHARDED: WeakSet[nn.Module] = WeakSet()
"""The models whose shards are known to be in no graph."""


def guard_habits(model: nn.Module) -> None:
    """Let torch call `HABITS` in this process, of which the last looks at sharded models alone. Nothing is
    communicated."""
    _SHARDED.add(model)
    replace_in_process(HABITS)


@cache
def replace_in_process(rows: "tuple[Replaced, ...]") -> None:
    """Put functions in their places, from now on."""
    for row in rows:
        for name in row.names:
            is_table = isinstance(row.owner, dict)
            new = _around(row.new, row.owner.get(name) if is_table else getattr(row.owner, name))
            row.owner.update({name: new}) if is_table else setattr(row.owner, name, new)


def _around(new: Callable[..., Any], own: Any) -> Callable[..., Any]:
    def replaced_by(*args: Any, **kwargs: Any) -> Any:
        return new(own, *args, **kwargs)

    return replaced_by


# ---- habits ----


def _answer(own: None, operator: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if any(not p.is_replicate() and tensor.device_mesh.size(i) > 1 for i, p in enumerate(tensor.placements)):
        raise ConfigError(
            "A number or a decision (if, float(), .item()) is taken of a DTensor, of which this rank holds a part of "
            "the answer. On every rank, take that of the whole: p.grad.isnan().any().full_tensor(), "
            "p.norm().full_tensor(). This rank's part is x.to_local()."
        )
    return tensor.to_local().item()


def _draw(own: None, operator: Any, args: Any, kwargs: Any) -> Any:
    tensor, whole = args[0], torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].to_local().device)
    operator(whole, *args[1:], **kwargs)
    Held.of(tensor).memory.copy_(Held.of(tensor).part_of(whole))
    return _as_first_replica(tensor)


def _draw_like(own: None, operator: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)
    shard = HeldShard(tensor)
    return _as_first_replica(shard.around(shard.part_of(operator(empty, *args[1:], **kwargs)).contiguous()))


def _draw_truncated(own: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Of shards what `own` draws for the whole, of which it decides by a part of the answer."""
    if isinstance(tensor, DTensor):
        return _draw(None, own, (tensor, *args), kwargs)
    return own(tensor, *args, **kwargs)


def _as_first_replica(drawn: DTensor) -> DTensor:
    """Let replicas, whose ranks may have their own seeds, have what the first one drew; all of them must draw."""
    own = Held.of(drawn).memory
    for axis, at in enumerate(drawn.placements):
        if at.is_replicate() and drawn.device_mesh.size(axis) > 1 and own.numel() and not own.is_meta:
            dist.broadcast(own, group=drawn.device_mesh.get_group(axis), group_src=0)
    return drawn


def _refuse_lost_write(own: Any, operator: Any, args: Any, *others: Any) -> Any:
    written: Any = args[0] if operator._schema.is_mutable and args else None
    base = written._base if isinstance(written, DTensor) else None
    if isinstance(base, DTensor) and len({Held.of(t).memory.untyped_storage()._cdata for t in (written, base)}) > 1:
        raise ConfigError(
            f"{operator.__name__.split('.')[0]} writes to a copy of shards ({list(written.shape)} of "
            f"{list(base.shape)}), which would stay as they are: an index of a sharded tensor (weight.grad[:n], "
            "weight.data[-3:]) copies. On every rank, multiply by a mask of all rows, or change x.full_tensor() and "
            "put it back (docs/migrate.md)."
        )
    return own(operator, args, *others)


def _refuse_shards(
    own: Any, losses: Any, grads: Any, retain: Any, create: Any, inputs: Any, *others: Any, **kwargs: Any
) -> Any:
    known = {id(each) for model in _SHARDED if inputs for each in model.parameters() if isinstance(each, DTensor)}
    if shards := sum(id(each) in known for each in inputs):
        raise ConfigError(
            f"Gradients are asked for by {shards} shards (torch.autograd.grad, or inputs= of backward), which are in "
            "no graph: a pass computes with gathered weights. Call accelerator.backward(loss) on every rank and read "
            "p.grad; of several losses one after the other, with p.grad copied and set to None between them."
        )
    return own(losses, grads, retain, create, inputs, *others, **kwargs)


# ---- boxes ----


def _write_items(own: Any, tensor: DTensor, fqn: str, value: Any) -> Any:
    if len(boxes := Held.of(tensor).boxes) < 2:
        return own(tensor, fqn, value)
    properties = dcp.TensorProperties.create_from_tensor(tensor.to_local())
    return [
        WriteItem(
            index=dcp.MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in (_chunk(box) for box, _ in boxes)
    ]


def _chunk_list(own: Any, tensor: DTensor) -> Any:
    boxes = Held.of(tensor).boxes
    return own(tensor) if len(boxes) < 2 else [_chunk(box) for box, _ in boxes]


def _tensor_shard(own: Any, tensor: DTensor, index: dcp.MetadataIndex) -> Any:
    if len(boxes := Held.of(tensor).boxes) < 2:
        return own(tensor, index)
    box, start = next(each for each in boxes if each[0].start == tuple(index.offset or ()))
    return memory_view(Held.of(tensor).memory, start, box.length)


def _chunk(box: Box) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.length))


# ---- the table ----


@dataclass(frozen=True, eq=False)
class Replaced:
    """Functions of a library that are called by another one, from when it is asked for in a process."""

    owner: Any
    names: tuple[Any, ...]
    new: Callable[..., Any]
    """Called with what stood there, then as that."""
    why: str
    """With upstream's thread and versions, where it is a gap and no wish of ours."""


_dispatcher: Any = DTensor._op_dispatcher
_handlers: Any = _dispatcher._custom_op_handlers
aten = torch.ops.aten

HABITS = (
    Replaced(_handlers, (aten._local_scalar_dense.default,), _answer, "deciding: torch gives each rank its part's"),
    Replaced(
        _handlers,
        (aten.uniform_.default, aten.normal_.default, aten.bernoulli_.float, aten.exponential_.default),
        _draw,
        "drawing",
    ),
    Replaced(_handlers, (aten.randn_like.default, aten.rand_like.default), _draw_like, "drawing"),
    Replaced(nn.init, ("_no_grad_trunc_normal_",), _draw_truncated, "drawing"),
    # asked once for equal shards
    Replaced(_dispatcher, ("_propagate_op_sharding_dispatch_slow_path",), _refuse_lost_write, "writing"),
    Replaced(torch.autograd, ("_engine_run_backward",), _refuse_shards, "asking"),
)
BOXES = (
    Replaced(DTensor, ("__create_write_items__",), _write_items, "pytorch#167859, torch 2.11 to 2.15"),
    Replaced(DTensor, ("__create_chunk_list__",), _chunk_list, "the same"),
    Replaced(DTensor, ("__get_tensor_shard__",), _tensor_shard, "the same"),
)

ELSEWHERE = {
    "extensions.context_parallel": "_deepstack_process: a decoder adds images to parts of rows",
    "extensions.entry": "create_causal_mask and its like, in files of transformers for a pass; get_placeholder_mask, "
    "compute_3d_position_ids: what a model makes of whole rows, of which a rank has a part",
    "extensions.float8": "__class__ of torchao's layer: its weight has no transpose in inference mode (torchao 0.16)",
    "extensions.streamed": "__class__ of FSDP2's record of an offloaded unit",
    "extensions.sequence_parallel": "forward of layers: sums of ranks, in parts",
    "extensions.tensor_parallel": "all_reduce of tensors on meta; merge_adapter, merge_and_unload of divided layers",
    "extensions.vllm": "sync_weights, _move_model_to_vllm, _sync_weight_merged, _sync_weight_lora, save_lora_adapter, "
    "send_weights, wait_for_everyone, _streaming_iter, merge_adapter, unmerge_adapter: trl#6798, trl#7103 (TRL 1.16)",
    "foresight.tracing.delta_rule": "kernels of recurrences, in a file of transformers while it is traced",
    "foresight.tracing.dry_run": "find_packed_sequence_indices: fake tensors would get a mask",
    "integrations.accelerator": "scaler, _models, _optimizers, _schedulers while a state is read",
    "integrations.embedders": "_load_model of sentence-transformers 6.2, which loads a model whole on every rank; "
    "forward of that model; set_widget_examples of its card",
    "integrations.pushing": "_name_or_path of a config, where it is a folder",
    "integrations.streams": "skip_first_batches, use_stateful_dataloader, for a call of the Trainer; _fetch_batches, "
    "_update_state_dict, end, set_epoch of loaders, which go on where a state ends (Accelerate 1.15)",
    "integrations.trainer": "Accelerator, while a Trainer makes its own; has_mixed_dtensor, by which transformers 5.23 "
    "parts groups; bf16_full_eval, fp16_full_eval, fsdp_plugin_args, save_only_model, mixed_precision, "
    "ddp_find_unused_parameters, for a call of the Trainer; set_epoch of a sampler of TRL (1.16)",
    "integrations.trl": "create_model_from_path, hash_module, get_peft_model, pack_dataset, reward_funcs, for a call "
    "of TRL (1.16); "
    "_calculate_rewards, _calculate_rewards_from_functions, by which its ranks come to collectives",
    "loading.dcp_reader": "FileSystemReader, which reads no stores",
    "modeling.configs": "save_pretrained of a config, which gets older keys in the same upload",
    "modeling.initialize": "padding_idx: initialisers of some models zero that row of loaded weights",
    "modeling.packed": "__class__ of modules whose weights are bytes",
    "modeling.patterns": "re, which a pattern in a file keeps busy for ever",
    "sharding.added": "add_adapter, load_adapter of a PeftModel, forward of an adaption prompt",
    "sharding.fsdp2_internals": "__class__ of FSDP2's records (pytorch#196996); nn, by which torch before 2.13 takes "
    "bytes for trained (pytorch#177844); grad, while a module is copied",
    "sharding.hf_interface": "generate, save_pretrained, push_to_hub, resize_token_embeddings, requires_grad_, "
    "get_parameter of a model; merge_adapter, unmerge_adapter, merge_and_unload, disable_adapter_layers of PEFT's "
    "tuner; use_cache, _is_fsdp_managed_module, for a block",
    "sharding.injection": "_activate_lora of PEFT's ParamWrapper (peft#3578, PEFT 0.19 to 0.21); "
    "convert_peft_adapter_state_dict_for_transformers (PEFT 0.21)",
}
"""By the module that does it: names, and why; with upstream's thread and versions where it is a gap."""
