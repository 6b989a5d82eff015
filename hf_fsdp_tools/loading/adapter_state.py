"""The values of a PEFT adapter that lie in a training state: found there, and read into the shards of an adapter."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, warn
from hf_fsdp_tools.loading.conversion import persistent_tensors
from hf_fsdp_tools.loading.fill import fill_shards
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.patterns import matched_in
from hf_fsdp_tools.sharding.adapters import add_adapter, open_adapter_config
from hf_fsdp_tools.text import listed, listed_lines, quoted


@dataclass(frozen=True, kw_only=True)
class AdapterState:
    """A PEFT adapter whose values lie in a training state."""

    index: CheckpointIndex
    """The adapter's tensors, by their names in the state."""
    config: Any
    """PEFT's config of the adapter, or the folder in which its `adapter_config.json` is; None if neither is known."""
    holds_base: bool
    """Whether the state holds the base too."""


def adapter_prefixes() -> tuple[str, ...]:
    """How the names of the parameters begin that PEFT adds."""
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    return tuple(sorted({*PEFT_TYPE_TO_PREFIX_MAPPING.values(), "vera_"}))


def restore_adapter(model: nn.Module, state: AdapterState, *, is_trainable: bool) -> Any:
    """Add the adapter of a training state to a sharded, loaded base; return the `PeftModel`, in evaluation mode.

    Every rank must call. The ranks exchange errors and what `add_adapter` exchanges, and under HSDP shards.
    """
    name, doing = state.index.name, "reading the adapter"
    with agreed("opening the config of the adapter", name):
        config = copy.deepcopy(state.config)
        if isinstance(config, str):
            import peft

            config = open_adapter_config(peft, Path(config))
    config.inference_mode = not is_trainable
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and (state.holds_base or start == "eva"):
        config.init_lora_weights = True  # the state holds the values, and the base as PEFT had changed it
    with matched_in("peft", name):
        adapted = add_adapter(model, config)
    with agreed("matching the adapter with the state", name):
        loaded = _match(adapted, state.index)
    fill_shards(adapted, state.index, loaded, doing=doing, progress=False)
    with agreed(doing):
        state.index.refuse_changed()
    return adapted


def _match(model: nn.Module, index: CheckpointIndex) -> dict[str, PieceTensor]:
    """The tensor of the state that fills each tensor of the adapter, by model key.

    States have the names of the model's own state dict, or those under which PEFT saves adapters, without their names.
    """
    state = persistent_tensors(model)
    by_peft = tensors_by_peft(model, state, save_embedding_layers=False)  # otherwise PEFT asks the hub
    own = {id(tensor): key for key, tensor in reversed(state.items())}
    names = {saved: own[id(tensor)] for saved, tensor in by_peft.items() if id(tensor) in own}
    needed = list(names.values()) or [key for key, tensor in state.items() if tensor.requires_grad]
    names |= {key: key for key in state}
    stored = {names[key]: tensor for key, tensor in index.tensors.items() if key in names}
    filled = {id(state[key]) for key in stored}
    strange = sorted(index.tensors.keys() - names.keys())
    if lacking := [key for key in needed if id(state[key]) not in filled]:
        unknown = f", and holds tensors of other names: {listed(map(quoted, strange))}" if strange else ""
        raise CheckpointError(
            f"{index.name!r} lacks {len(lacking)} of the adapter's {len(needed)} tensors: "
            f"{listed(map(quoted, lacking))}{unknown}. Give the peft_config that it was trained with; with "
            "fsdp_version 1, Accelerate 1.15 does not save the adapters inside units (adapter_only): use version 2, "
            "or save_pretrained."
        )
    if wrong := [
        f"{key}: {list(tensor.shape)} in the state, {list(state[key].shape)} in the model"
        for key, tensor in stored.items()
        if tensor.shape != tuple(state[key].shape)
    ]:
        raise CheckpointError(
            f"{len(wrong)} tensors of {index.name!r} have another shape than the adapter's:\n{listed_lines(wrong)}\n"
            "Give the peft_config that it was trained with; where the vocabulary was resized, also num_tokens."
        )
    if strange and rank_and_size()[0] == 0:
        warn(
            f"{index.name!r}: {len(strange)} tensors belong to no adapter of this model and were left out: "
            f"{listed(map(quoted, strange))}."
        )
    return {key: PieceTensor.stored(tensor, state[key].dtype) for key, tensor in stored.items()}


def tensors_by_peft(model: Any, state: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """The tensors that PEFT writes unchanged, by the names under which it writes them; of prompt methods none."""
    from peft import get_peft_model_state_dict

    tensors: dict[str, torch.Tensor] = {}
    for name, config in model.peft_config.items():
        if not config.is_prompt_learning:
            tensors |= get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=name, **options)
    return tensors
