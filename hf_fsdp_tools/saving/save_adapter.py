"""Save the adapters of a sharded PEFT model as the folder that PEFT itself writes."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.distributed.shards import refuse_ended
from hf_fsdp_tools.errors import library_errors
from hf_fsdp_tools.hub import CARD
from hf_fsdp_tools.loading.io.files import STAGING_BYTES
from hf_fsdp_tools.loading.weight_files import CONFIG
from hf_fsdp_tools.modeling.configs import save_tokenizer
from hf_fsdp_tools.modeling.tree_copy import bare_model, base_of
from hf_fsdp_tools.saving.durable import UNCHANGED
from hf_fsdp_tools.saving.publish import SaveReport, publish_adapter
from hf_fsdp_tools.saving.target import Target
from hf_fsdp_tools.sharding.adapters import ADAPTER_WEIGHTS
from hf_fsdp_tools.streaming.exchange import gather_to_first
from hf_fsdp_tools.streaming.outgoing import chosen_by_peft


def save_adapter(
    model: nn.Module, target: Target, *, tokenizer: Any = None, dtype: torch.dtype | None = None
) -> SaveReport:
    """Write `adapter_model.safetensors` and `adapter_config.json`; `PeftModel.from_pretrained` opens them.

    PEFT on rank 0 chooses which tensors belong to an adapter (`modules_to_save` too) and writes them. Adapters are
    small, so they are gathered whole, one tensor at a time.

    Every rank of the default process group must call; the adapters' tensors are gathered.
    """
    start_s = time.perf_counter()
    refuse_ended(model)
    is_first = rank_and_size()[0] == 0
    names: tuple[str, ...] = ()
    with target:
        with agreed("preparing the save", target.where):
            target.begin(CONFIG)
            chosen = adapter_tensors(model)
        tensors = gather_tensors(chosen, dtype)
        with agreed("writing the adapter", target.where):
            if is_first:
                with library_errors(f"Cannot save the adapter to {target.where!r}", UNCHANGED):
                    if (card := target.read(CARD)) is not None:  # to which PEFT adds
                        (target.new / CARD).write_bytes(card)
                    model.save_pretrained(str(target.new), state_dict=tensors)  # type: ignore[operator]  # PEFT's own
                    if tokenizer is not None:
                        save_tokenizer(tokenizer, target.new)
                names = target.new_names()
            publish_adapter(target)
            names = all_ranks(names, "finishing the save")[0]
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return SaveReport(
        folder=target.where,
        files=(ADAPTER_WEIGHTS,),
        total_bytes=num_bytes,
        bytes_written=num_bytes if is_first else 0,
        gathered_bytes=num_bytes,
        write_calls=int(is_first),
        seconds=round(time.perf_counter() - start_s, 4),
        others=tuple(name for name in names if name != ADAPTER_WEIGHTS),
    )


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a saved adapter needs, by their names in the state dict of the `PeftModel`.

    They are those that are trained, those that the base without adapters does not have (of wrappers and prompt
    encoders), and those of the base that PEFT chooses (embeddings that were resized or have an adapter). Every rank
    must call, in a block of `agreed`: rank 0 decides for all, as PEFT may ask the hub which vocabulary the base has.
    """
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    chosen = {id(state[key]) for key in chosen_by_peft(model, state).values()}  # tied ones have several names
    own = own_tensors(model, state)
    return {name: tensor for name, tensor in state.items() if name in own or id(tensor) in chosen}


def own_tensors(model: nn.Module, state: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the tensors that are trained, or that the base without adapters does not have; PEFT is not asked."""
    base = {id(tensor) for tensor in bare_model(base_of(model)).model.state_dict(keep_vars=True).values()}
    return {name for name, tensor in state.items() if tensor.requires_grad or id(tensor) not in base}


def gather_tensors(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The tensors gathered whole, one at a time: on the CPU of rank 0, on meta elsewhere. Every rank must call."""
    whole = {}
    for name, tensor in tensors.items():
        full = gather_to_first(tensor, staging_bytes=STAGING_BYTES)
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if full is None else full
        whole[name] = full.to(dtype if full.is_floating_point() else None)
    return whole
