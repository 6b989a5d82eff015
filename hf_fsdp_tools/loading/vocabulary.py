"""Another number of tokens: rows of embeddings and heads are added or dropped, in a plain, sharded or loading model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_fsdp_tools.distributed.agreement import all_ranks, own_seed
from hf_fsdp_tools.distributed.cpu_backend import all_reduced
from hf_fsdp_tools.distributed.shards import Box, Held, memory_view
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.conversion import persistent_tensors
from hf_fsdp_tools.modeling.configs import text_config
from hf_fsdp_tools.modeling.initialize import draw_values
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.modeling.module_tree import ModuleTree, original_classes, swap
from hf_fsdp_tools.modeling.packed import none_unpacked, pack_alike
from hf_fsdp_tools.planning.rules import measured
from hf_fsdp_tools.sharding.allocate import allocate, with_data
from hf_fsdp_tools.sharding.fsdp2_internals import replace_parameter, reshard_units
from hf_fsdp_tools.sharding.placement import parallel_parameters
from hf_fsdp_tools.sharding.sharding import Sharded, sharded_module, sharding_of
from hf_fsdp_tools.text import first_line, listed

_SLAB_ELEMENTS = 2**20
"""Values that are summed at a time, which bounds the memory of a sum to 16 MiB for any vocabulary. (assumed)"""

AddedTokens = Literal["mean", "random"]
"""How rows of added tokens are filled: with the mean of the old rows, or by the model's own initialisation."""


def resize_token_embeddings(
    model: PreTrainedModel,
    num_tokens: int | None = None,
    *,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
    seed: int | None = None,
) -> nn.Module:
    """Give a model that FSDP2 has sharded another number of tokens, in place; return its input embedding.

    Every tensor with one row per token (input embedding, head, biases) is replaced inside its unit; old rows and ties
    stay as they are, and the config follows. New rows do not depend on the number of ranks. Where the checkpoint is not
    loaded yet, `from_pretrained(…, num_tokens=…)` does the same without gathering.

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
        ConfigError: the model is no transformers model, cannot be resized, is on meta, shares layers among ranks that
            cannot divide the tokens, or has gradients, so that it is being trained already.

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
    _refuse_uneven(model, wanted)
    added: dict[str, Box] = {}
    replaced: dict[int, torch.Tensor] = {}
    for key, old in persistent_tensors(model).items():
        shape = wanted[key].shape
        if shape == old.shape or id(old) in replaced:
            continue
        replaced[id(old)] = old  # kept, so that its id stays its own
        _replace(model, key, old, shape)
        if (new := added_part(old.shape, shape)).numel:
            added[key] = new
    shared = all_ranks(own_seed(seed), "sharing the random state")[0]
    fill_added(model, added, "mean" if mean_resizing else "random", shared)
    _follow(model, twin)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Module)
    return embedding


def _refuse(model: nn.Module) -> None:
    """Refuse, on all ranks alike, a model whose tensors cannot or must not be replaced."""
    is_flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    if is_flat or not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"The vocabulary of {type(model).__name__} cannot be resized: it "
            f"{'has flat parameters' if is_flat else 'is no model of transformers'}. Give the model itself, below "
            "PEFT's or Accelerate's wrapper and sharded by FSDP2, or resize it before it is wrapped."
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


def _refuse_uneven(model: nn.Module, wanted: Mapping[str, torch.Tensor]) -> None:
    """Refuse a number of tokens that the ranks which share layers cannot divide evenly, as `parallelize_model` does."""
    divided = parallel_parameters(model)
    for key, tensor in persistent_tensors(model).items():
        mesh, (placement,) = divided.get(tensor, (None, (None,)))  # type: ignore[call-overload]  # buffers are in no unit
        if mesh is not None and (count := wanted[key].shape[placement.dim]) % mesh.size():
            raise ConfigError(
                f"{key} of {count} tokens cannot be divided by tp_size {mesh.size()}. Add rows: "
                f"pad_to_multiple_of={mesh.size()}."
            )


def _replace(model: nn.Module, key: str, old: torch.Tensor, shape: torch.Size) -> None:
    """Put a tensor of another shape in the place of `old`, under all its names; rows that both have are copied."""
    gathered = Held.of(old).gather()
    if not isinstance(old, nn.Parameter):
        swap(model, {old: gathered.new_zeros(shape)})
    elif isinstance(old, DTensor):
        replace_parameter(model, key, old, shape)
        allocate(model, device=Held.of(old).memory.device)
    else:
        swap(model, {old: with_data(old, gathered.new_empty(shape))})
    for kept, memory in Held.of(persistent_tensors(model)[key]).parts(Box.whole(old.shape)):
        memory.copy_(gathered[kept.slices])


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
        Sharded.put(base, sharding=replace(sharding, plan=plan))


# ---- twins and values ----


def resize_vocabulary(model: PreTrainedModel, num_tokens: int | None, pad_to_multiple_of: int | None) -> None:
    """Resize embeddings, head and config of a plain meta model, by transformers' own code; ties stay."""
    for name, count in (("num_tokens", num_tokens), ("pad_to_multiple_of", pad_to_multiple_of)):
        if count is not None and count < 1:
            raise ConfigError(f"{name} is {count}; it must be at least 1.")
    with none_unpacked(model):
        try:
            with torch.device("meta"):
                model.resize_token_embeddings(num_tokens, pad_to_multiple_of, mean_resizing=False)
        except (TypeError, ValueError, NotImplementedError, AttributeError, RuntimeError) as error:
            # each of them is how some class of transformers says that it cannot; the sentence is passed on
            raise ConfigError(
                f"The vocabulary of {type(model).__name__} cannot be resized: {first_line(error)}. Load it with the "
                "vocabulary that its checkpoint has."
            ) from None


def resized_twin(
    model: PreTrainedModel, num_tokens: int | None, pad_to_multiple_of: int | None = None
) -> PreTrainedModel:
    """A resized model on meta of the same config; its differences from `model` are what resizing has to change."""
    with original_classes(model):
        twin = build_meta_model(model.config, auto_class=type(model), dtype=model.dtype)
    pack_alike(twin, model)
    resize_vocabulary(twin, num_tokens, pad_to_multiple_of)
    return twin


def token_dims(model: nn.Module) -> dict[str, int]:
    """The dimension that counts tokens, by key: what changes in a twin on meta that transformers' own code resizes."""
    if not isinstance(model, PreTrainedModel):
        return {}
    twin = persistent_tensors(resized_twin(model, model.get_input_embeddings().weight.shape[0] + 1))
    pairs = {key: (tensor.shape, twin[key].shape) for key, tensor in persistent_tensors(model).items()}
    return {key: _changed_dim(old, new) for key, (old, new) in pairs.items() if old != new}


def _changed_dim(old: torch.Size, new: torch.Size) -> int:
    return next(d for d, (n, m) in enumerate(zip(old, new, strict=True)) if n != m)


def added_part(old: torch.Size, new: torch.Size) -> Box:
    """The part of a resized tensor that is of added tokens, after all old ones; empty where tokens were dropped."""
    dim = _changed_dim(old, new)
    start = tuple(n if d == dim else 0 for d, n in enumerate(old))
    return Box(start=start, length=tuple(max(0, n - s) for s, n in zip(start, new, strict=True)))


def fill_added(model: nn.Module, added: Mapping[str, Box], how: AddedTokens, seed: int) -> None:
    """Fill the added part of each tensor, in place, with values that do not depend on the number of ranks.

    "mean": each new row is the mean of the old rows, summed in float64. "random", and buffers in any case: the model's
    own initialisation, from a generator seeded by `seed` and the module's name. Every rank must call, outside of
    `agreed` blocks: one row per tensor is summed over all ranks.
    """
    if not added:
        return
    state = persistent_tensors(model)
    by_mean = {key for key in added if how == "mean" and isinstance(state[key], nn.Parameter)}
    values = draw_values(model, {key: added[key].length for key in sorted(added.keys() - by_mean)}, seed=seed)
    for key in sorted(by_mean):
        mean = all_reduced(_sum_of_old(state[key], added[key])) / max(added[key].start)
        if not mean.isfinite().all():
            raise CheckpointError(
                f"{key!r} holds values that are not finite, so its rows have no mean. "
                "Use added_tokens='random', or another checkpoint."
            )
        values[key] = mean.to(state[key].dtype).expand(added[key].length)
    for key, new in added.items():
        for part, memory in Held.of(state[key]).parts(new):
            memory.copy_(memory_view(values[key], part.start_in(new), part.length))


def _sum_of_old(tensor: torch.Tensor, added: Box) -> torch.Tensor:
    """The sum of this rank's part of the old rows, zero elsewhere; of zeros on ranks other than the first replica."""
    dim = added.start.index(max(added.start))
    old = Box.whole([added.start[d] if d == dim else n for d, n in enumerate(tensor.shape)])
    total = torch.zeros([1 if d == dim else n for d, n in enumerate(tensor.shape)], dtype=torch.float64)
    for part, memory in Held.of(tensor).parts(old) if Held.of(tensor).is_first else ():
        place = tuple(slice(None) if d == dim else s for d, s in enumerate(part.slices))
        for rows in torch.split(memory, max(1, _SLAB_ELEMENTS * memory.shape[dim] // memory.numel()), dim):
            total[place] += rows.double().sum(dim, keepdim=True).cpu()
    return total
