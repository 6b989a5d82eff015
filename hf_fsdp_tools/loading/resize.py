"""Resize the vocabulary of a sharded model: embeddings and head get rows for added tokens."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_fsdp_tools.distributed.agreement import shared_seed
from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.distributed.shards import gather_on_device, local_boxes_of, local_tensor, memory_view
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.loading.conversion import persistent_tensors
from hf_fsdp_tools.loading.vocabulary import AddedRows, fill_added, resized_twin
from hf_fsdp_tools.modeling.configs import text_config
from hf_fsdp_tools.modeling.module_tree import ModuleTree, swap
from hf_fsdp_tools.modeling.notes import add_to_note
from hf_fsdp_tools.planning.rules import measured
from hf_fsdp_tools.sharding.allocate import allocate, with_data
from hf_fsdp_tools.sharding.fsdp2_internals import replace_parameter, reshard_units
from hf_fsdp_tools.sharding.shard import sharded_module, sharding_of
from hf_fsdp_tools.text import listed


def resize_token_embeddings(
    model: PreTrainedModel,
    num_tokens: int | None = None,
    *,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
    seed: int | None = None,
) -> nn.Module:
    """Give a model that FSDP2 has sharded another number of tokens, in place; return its input embedding.

    Does what `model.resize_token_embeddings` cannot do with shards. Every tensor with one row per token (input
    embedding, head, biases) is replaced inside its unit; old rows and ties stay as they are, and the config follows.
    New rows do not depend on the number of ranks.

    Where the checkpoint is not loaded yet, `from_pretrained(…, num_tokens=…)` does the same without gathering.

    Args:
        model: sharded by `shard_model`, `from_pretrained` or `fully_shard`, with its weights. Make the optimizer
            afterwards: it would keep the parameters that are replaced here.
        num_tokens: usually `len(tokenizer)`; fewer drop rows from the end. None keeps the number (for padding alone).
        pad_to_multiple_of: round the number of rows up.
        mean_resizing: new rows are the mean of the old ones (transformers adds noise of 3e-5 of their spread); False:
            the model's own initialisation.
        seed: of that initialisation; None: it follows from rank 0's generator.

    Every rank must call. Each replaced tensor is gathered whole on every rank, one at a time.

    Raises:
        ConfigError: the model is no transformers model, cannot be resized, is on meta, is under tensor
            parallelism, or has gradients, so that it is being trained already.

    Example:
        >>> model = from_pretrained("checkpoint", load_kwargs={"progress": False})
        >>> embeddings = resize_token_embeddings(model, 140)
        >>> model.lm_head.weight.shape, model.config.vocab_size
        (torch.Size([140, 48]), 140)
    """
    _refuse(model)
    reshard_units(model)
    twin = resized_twin(model, num_tokens, pad_to_multiple_of)
    wanted = persistent_tensors(twin)
    added: dict[str, AddedRows] = {}
    replaced: dict[int, torch.Tensor] = {}
    for key, old in persistent_tensors(model).items():
        shape = wanted[key].shape
        if shape == old.shape or id(old) in replaced:
            continue
        (dim,) = (d for d, (n, m) in enumerate(zip(old.shape, shape, strict=True)) if n != m)
        replaced[id(old)] = old  # kept, so that its id stays its own
        _replace(model, key, old, shape)
        if shape[dim] > old.shape[dim]:
            added[key] = AddedRows(dim=dim, start=old.shape[dim])
    fill_added(model, added, "mean" if mean_resizing else "random", shared_seed(seed))
    _follow(model, twin)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Module)
    return embedding


def _refuse(model: nn.Module) -> None:
    """Refuse, on all ranks alike, a model whose tensors cannot or must not be replaced."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{type(model).__name__} is no model of transformers, which knows what its vocabulary is. Give the model "
            "itself, below PEFT's or Accelerate's wrapper, or resize it before sharding."
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError(
            "The model is not sharded by FSDP2, and flat parameters cannot be resized. Call "
            "model.resize_token_embeddings() before it is wrapped, or use FSDP2."
        )
    parameters = list(model.named_parameters())
    if on_meta := [name for name, p in parameters if p.is_meta]:
        raise ConfigError(
            f"{len(on_meta)} parameters have no weights yet ({listed(on_meta)}). Load them first, or resize while "
            "loading: from_pretrained(…, num_tokens=…)."
        )
    if trained := [name for name, p in parameters if p.grad is not None]:
        raise ConfigError(
            f"{len(trained)} parameters have gradients ({listed(trained)}): the model is being trained, and its "
            "optimizer would go on with the old parameters. Resize before training, then make the optimizer."
        )


def _replace(model: nn.Module, key: str, old: torch.Tensor, shape: torch.Size) -> None:
    """Put a tensor of another shape in the place of `old`, under all its names; rows that both have are copied."""
    gathered = gather_on_device(old)
    if not isinstance(old, nn.Parameter):
        swap(model, {old: gathered.new_zeros(shape)})
    elif isinstance(old, DTensor):
        replace_parameter(model, key, old, shape)
        allocate(model, device=local_tensor(old).device)
    else:
        swap(model, {old: with_data(old, gathered.new_empty(shape))})
    tensor = persistent_tensors(model)[key]
    local = local_tensor(tensor)
    for box, start in local_boxes_of(tensor):
        kept = [max(0, min(n, m - s)) for s, n, m in zip(box.start, box.length, old.shape, strict=True)]
        source = gathered[Box(start=box.start, length=tuple(kept)).slices]
        memory_view(local, start, kept).copy_(source)


def _follow(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Set the number of tokens in modules and config as transformers set it in the twin, and in the plan."""
    changed = dict(twin.named_modules(remove_duplicate=False))  # the twin may share a module where the model ties two
    for name, module in model.named_modules():
        other = changed[name]
        for attribute in ("num_embeddings", "out_features", "padding_idx", "vocab_size"):
            if attribute in vars(other):
                setattr(module, attribute, getattr(other, attribute))
    text: Any = text_config(model.config)
    text.vocab_size = text_config(twin.config).vocab_size
    base, sharding = sharded_module(model), sharding_of(model)
    if base is not None and sharding is not None:
        plan = measured(sharding.plan, ModuleTree(base))
        add_to_note(base, sharding=replace(sharding, plan=plan))
