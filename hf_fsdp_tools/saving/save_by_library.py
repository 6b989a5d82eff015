"""Save a model of another library: its own `save_pretrained` writes its files, and this package the weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import ConfigError, library_errors, storage_errors
from hf_fsdp_tools.hub import CARD
from hf_fsdp_tools.modeling.configs import save_tokenizer
from hf_fsdp_tools.modeling.module_tree import original_classes, own_class, swap
from hf_fsdp_tools.modeling.tree_copy import is_adapted
from hf_fsdp_tools.saving.durable import UNCHANGED
from hf_fsdp_tools.saving.hidden_folder import Folder
from hf_fsdp_tools.saving.publish import SaveReport
from hf_fsdp_tools.saving.push import model_card_of
from hf_fsdp_tools.saving.target import Target
from hf_fsdp_tools.sharding.fsdp2_internals import reshard_units
from hf_fsdp_tools.streaming.exchange import gather_to_first


def is_of_library(model: nn.Module) -> bool:
    """Whether a model is neither transformers' nor PEFT's, and its class has a `save_pretrained` of its own."""
    return not _is_ours(model) and hasattr(own_class(model), "save_pretrained")


def save_by_library(
    model: nn.Module,
    target: Target,
    write: Callable[[nn.Module, Target], SaveReport],
    *,
    tokenizer: Any = None,
    card: bool = False,
    staging_bytes: int,
) -> SaveReport:
    """Let rank 0 save a model by the `save_pretrained` of its class, and all ranks the transformers models inside it.

    The library gets the other parameters (a pooling layer, a projection) whole, on rank 0 and on the CPU: a model
    without a transformers model inside is gathered there. Its files and all weights appear together. Every rank must
    call.
    """
    if not isinstance(target, Folder):
        raise ConfigError(
            f"{type(model).__name__} saves itself, to a folder alone. Save it to one, then copy that to "
            f"{target.where!r} (fsspec's put)."
        )
    reshard_units(model)
    inside = dict(_outermost(model))
    within = tuple(f"{name}." for name in inside)
    gathered = {
        name: gather_to_first(tensor, staging_bytes=staging_bytes)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not name.startswith(within)
    }
    folder, is_first, places, own_card = target.folder, rank_and_size()[0] == 0, dict[str, str](), b""
    with target:
        with agreed("saving the files of the model's library", folder), storage_errors("save to", folder):
            target.begin()
            if is_first:
                with library_errors(f"Cannot save the model to {str(folder)!r}", UNCHANGED), _alone(model, gathered):
                    places = _save(model, inside, target.new)
                    if tokenizer is not None:
                        save_tokenizer(tokenizer, target.new)
                    if card and not (target.new / CARD).exists() and target.read(CARD) is None:
                        model_card_of(model).save(target.new / CARD)
                own_card = (target.new / CARD).read_bytes() if (target.new / CARD).exists() else b""
            target.mark, places = all_ranks((target.mark, places), "saving the files of the model's library")[0]
        reports = {place: write(inside[name], Folder(folder / place, target)) for name, place in places.items()}
        with agreed("finishing the save", folder), storage_errors("save to", folder):
            if own_card:
                (target.new / CARD).write_bytes(own_card)  # rather than that of an adapter inside
            names = all_ranks(target.new_names() if is_first else (), "finishing the save")[0]
            target.publish("", {})
    num_bytes = sum(tensor.nbytes for tensor in gathered.values() if tensor is not None)
    files = [Path(place, name).as_posix() for place, report in reports.items() for name in report.files]
    own = {"total_bytes": num_bytes, "bytes_written": num_bytes, "gathered_bytes": num_bytes}
    sums: dict[str, Any] = {
        name: own.get(name, 0) + sum(getattr(report, name) for report in reports.values())
        for name in (*own, "write_calls", "seconds")
    }
    others = tuple(name for name in names if name not in files)
    return SaveReport(folder=str(folder), files=tuple(files), others=others, **sums)


def _is_ours(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel) or is_adapted(model)


def _outermost(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The transformers and PEFT models below a module that lie in no other, by name."""
    for name, child in module.named_children():
        if _is_ours(child):
            yield prefix + name, child
        else:
            yield from _outermost(child, f"{prefix}{name}.")


@contextmanager
def _alone(model: nn.Module, gathered: dict[str, torch.Tensor | None]) -> Iterator[None]:
    """Let a library look at a model on this rank alone, for a block: whole tensors by name, and its own classes.

    Forward passes are refused, in which this rank would wait for the others: some libraries run one for a model card.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks = [module.register_forward_pre_hook(_refuse_forward, prepend=True) for module in units]
    whole: dict[torch.Tensor, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (new := gathered.get(name)) is not None:
            whole[tensor] = nn.Parameter(new, requires_grad=False) if isinstance(tensor, nn.Parameter) else new
    swap(model, whole)
    try:
        with original_classes(model):
            yield
    finally:
        swap(model, {new: old for old, new in whole.items()})
        for hook in hooks:
            hook.remove()


def _refuse_forward(module: nn.Module, args: Any) -> None:
    raise ConfigError(
        f"{type(module).__name__} is being saved by rank 0, which cannot run it without the others. Run it on every "
        "rank, after the save."
    )


def _save(model: nn.Module, inside: dict[str, nn.Module], staging: Path) -> dict[str, str]:
    """Let the library save to a folder; the places in it, by the names of the models inside that it saved there."""
    places: dict[str, str] = {}
    for name, module in inside.items():

        def note(folder: Any, *args: Any, _name: str = name, state_dict: Any = None, **kwargs: Any) -> None:
            if state_dict is not None:
                raise ConfigError(
                    f"{type(model).__name__}.save_pretrained hands a state_dict to {_name!r}, of which each rank has a "
                    "part. Call it with state_dict=accelerator.get_state_dict(model)."
                )
            places[_name] = Path(folder).resolve().relative_to(staging.resolve()).as_posix()

        module.__dict__["save_pretrained"] = note
    found = model.__dict__.pop("save_pretrained", None)
    try:
        MethodType(own_class(model).save_pretrained, model)(str(staging))  # type: ignore[attr-defined]
    finally:
        if found is not None:
            model.__dict__["save_pretrained"] = found
        for module in inside.values():
            del module.__dict__["save_pretrained"]
    return places
