"""Save states so that an interruption destroys nothing, and read states of another format or number of ranks."""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.constants import OPTIMIZER_NAME
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from hf_fsdp_tools.checkpoint.formats.dcp import METADATA, check_dcp
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.fsdp1.flat_shards import plain_view
from hf_fsdp_tools.modeling.module_tree import plain_name

__all__ = [
    "awaiting_state",
    "complete_checkpoint",
    "former_of",
    "refuse_code",
    "replacing",
    "saveable",
    "stored_format",
    "using_format",
    "warn_of_other_world",
]

_SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")
"""Folders that Accelerate writes under SHARDED_STATE_DICT; source: accelerate 1.15, utils/fsdp_utils.py."""

_FULL = ("pytorch_model_fsdp.bin", "optimizer.bin")
"""Files that Accelerate writes under FULL_STATE_DICT; source: accelerate 1.15, utils/fsdp_utils.py."""

_ACCELERATE_FILES = re.compile(
    r"(random_states|pytorch_model_fsdp|optimizer|scheduler|sampler|dl_state_dict|scaler|custom_checkpoint)[_.].*"
)
"""Files that `save_state` writes, which are deleted with their state; source: accelerate 1.15, checkpointing.py."""


def saveable(model: nn.Module) -> nn.Module:
    """The model that `save_pretrained` takes: inside `torch.compile`'s wrapper, and FSDP1 as its plain view."""
    model = getattr(model, "_orig_mod", model)
    return plain_view(model) if FullyShardedDataParallel.fsdp_modules(model) else model


# ---- saving ----


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give a staging folder to write to; it replaces `folder` once every rank has finished.

    Until then an older `folder` stays as it is, whatever happens. Its files of other origin than Accelerate (a user's
    own) are kept.

    Every rank must enter, and see the same file system; at the end the ranks exchange whether they succeeded.

    Raises:
        CheckpointError: writing failed on some rank, or the folder cannot be replaced; the same on every rank. A rank
            whose own error is no `CheckpointError` raises that error.
    """
    rank, _ = rank_and_size()
    folder = folder.resolve()
    staging = folder.with_name(f".{folder.name}.incomplete")
    with agreed("making a folder", staging):
        if folder.is_mount():
            raise CheckpointError(
                f"{str(folder)!r} is a mount point, which cannot be replaced. Save to a folder in it."
            )
        if rank == 0:
            if staging.exists():
                shutil.rmtree(staging)  # left by an interrupted save
            staging.mkdir(parents=True)
    with agreed("opening a folder", staging):
        if not staging.is_dir():
            raise CheckpointError(
                f"{str(staging)!r} is not there on this rank. Save to a file system that all ranks share."
            )
    with agreed("saving (what was saved before is still there)", folder):
        yield staging
    with agreed("finishing the save", folder):
        if rank == 0:
            _take_place(staging, folder, former_of(folder))


def former_of(folder: Path) -> Path:
    """The path of an older state between the two renames that replace it."""
    return folder.with_name(f".{folder.name}.former")


def _take_place(staging: Path, folder: Path, former: Path) -> None:
    """Rename the old folder away and the new one into its place, so that a complete folder exists at any moment."""
    try:
        if folder.exists():
            if former.exists():
                shutil.rmtree(former)
            folder.rename(former)
        staging.rename(folder)
        if former.exists():
            for path in former.iterdir():
                if not (folder / path.name).exists() and not _ACCELERATE_FILES.match(path.name):
                    path.rename(folder / path.name)
            shutil.rmtree(former)
    except OSError as error:
        raise CheckpointError(
            f"Cannot finish {str(folder)!r}: {error}. The new state is there or in {staging.name!r} beside it, the "
            f"former one there or in {former.name!r}."
        ) from error


# ---- reading ----


def stored_format(folder: Path) -> str | None:
    """The state dict type in which Accelerate wrote `folder`; None if Accelerate wrote nothing there."""
    if any((folder / name).is_dir() for name in _SHARDED):
        return "SHARDED_STATE_DICT"
    return "FULL_STATE_DICT" if any((folder / name).is_file() for name in _FULL) else None


def refuse_code(folder: Path) -> None:
    """Refuse a training state that would run code when torch reads it, whoever wrote it (see `check_dcp`).

    Every rank must call, before anything of the state is read.

    Raises:
        CheckpointError: a DCP folder in `folder` is damaged or would run code; the same on every rank.
    """
    with agreed("checking the saved state", folder):
        for file in sorted(folder.glob(f"*/{METADATA}")):
            check_dcp(file.parent)


@contextmanager
def using_format(plugin: Any, state_dict_type: str | None) -> Iterator[None]:
    """Set the plugin's state dict type for a block; None leaves it as it is.

    Raises:
        CheckpointError: in place of torch's `CheckpointException`, which does not extend `Exception` and so passes
            through ordinary handlers.
    """
    names = ("state_dict_type", "state_dict_config", "optim_state_dict_config")
    asked = {name: getattr(plugin, name) for name in names}
    if state_dict_type is not None and state_dict_type not in str(plugin.state_dict_type):
        plugin.state_dict_config = plugin.optim_state_dict_config = None  # otherwise those of the other type stay
        plugin.set_state_dict_type(state_dict_type)
    try:
        yield
    except CheckpointException as error:  # the same on every rank: torch has exchanged the failures
        lines = [f"rank {rank}: {failure!r}" for rank, (failure, _) in sorted(error.failures.items())]
        raise CheckpointError(
            f"torch's distributed checkpoint failed on {len(lines)} rank(s).\n" + "\n".join(lines)
        ) from error
    finally:
        for name, value in asked.items():
            setattr(plugin, name, value)


@contextmanager
def awaiting_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, index: int = 0) -> Iterator[None]:
    """Give an optimizer empty state for a block in which Accelerate reads its state from `folder`.

    Accelerate and torch read into existing state. There is none with FSDP1 in a new process, and none with FSDP2 while
    gradients are pending, so Adam's moments were silently lost (measured with accelerate 1.15: 22 entries saved, 0
    loaded). A parameter that never had a gradient (of a tower that the data does not use) has no saved state, and torch
    would demand it.

    Args:
        model: of the optimizer.
        optimizer: torch's, or Accelerate's wrapper.
        folder: of the saved state. Enter the block before weights are read, too.
        index: which optimizer of the saved state.

    Raises:
        CheckpointError: the saved state is that of other parameters.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    # Without state, this steps once with zero gradients and no learning rate.
    get_optimizer_state_dict(model, optimizer)
    without = [] if FullyShardedDataParallel.fsdp_modules(model) else _without_state(model, optimizer, folder, index)
    for parameter in without:
        optimizer.state.pop(parameter, None)
        parameter.requires_grad_(False)  # torch demands no state of frozen parameters
    try:
        yield
    finally:
        for parameter in without:
            parameter.requires_grad_(True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _without_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, index: int
) -> list[torch.nn.Parameter]:
    """The trainable parameters for which a sharded checkpoint holds no optimizer state."""
    source = folder / f"{OPTIMIZER_NAME}_{index}"
    if not source.is_dir():
        return []
    begin = "optimizer.state."
    keys = check_dcp(source)
    stored = {key.removeprefix(begin).rpartition(".")[0] for key in keys if key.startswith(begin)}
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names = {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter in held}
    if unknown := sorted(stored - names.keys()):
        raise CheckpointError(
            f"{str(source)!r} holds optimizer state of {len(unknown)} parameters that this optimizer does not train, "
            f"as {unknown[0]!r}. Make model and optimizer as in the run that saved it."
        )
    return [parameter for name, parameter in names.items() if name not in stored and parameter.requires_grad]


def warn_of_other_world(folder: Path, pattern: str) -> int:
    """Warn on rank 0 of a checkpoint of another number of ranks; return the number of ranks that saved it.

    Args:
        folder: of the checkpoint.
        pattern: of the files that hold the random state of one rank each.
    """
    rank, now = rank_and_size()
    then = len(list(folder.glob(pattern)))
    if then not in (0, now) and rank == 0:
        warnings.warn(
            f"{str(folder)!r} was saved by {then} process(es) and is read by {now}. Weights, optimizer and scheduler "
            "go on exactly; random draws (dropout) go on otherwise. Keep rows per step as they were (batch size x "
            "processes x accumulation steps), or the position in the data and the schedule mean something else.",
            stacklevel=3,
        )
    return then


def complete_checkpoint(wanted: str | bool, output_dir: str) -> str | bool:
    """The Trainer's checkpoint to resume from, the same on every rank: `wanted`, or for True the last complete one.

    A checkpoint is complete with `trainer_state.json`, which the Trainer writes last. Returns True where there is no
    checkpoint at all; the Trainer then says so. Every rank must call; rank 0 decides.

    Raises:
        CheckpointError: `wanted` is incomplete, or all checkpoints are.
    """
    folders = [Path(path) for path in sort_checkpoints(output_dir)] if Path(output_dir).is_dir() else []
    complete = [folder for folder in folders if _is_complete(folder)]
    last = complete[-1] if complete else None
    problem, chosen = "", wanted
    if wanted is True and folders:
        chosen = str(last) if last else True
        newer = [folder.name for folder in folders[folders.index(last) + 1 if last else 0 :]]
        if newer and last and rank_and_size()[0] == 0:
            warnings.warn(f"Resuming from {last.name}: saving {', '.join(newer)} was interrupted.", stacklevel=3)
        problem = (
            "" if last else f"No checkpoint in {output_dir!r} is complete ({', '.join(newer)}): saving was interrupted"
        )
    elif wanted is not True and not _is_complete(Path(str(wanted))):
        problem = (
            f"{str(wanted)!r} has no readable {TRAINER_STATE_NAME}: it is no checkpoint, or saving it was interrupted"
        )
    chosen, problem = all_ranks((chosen, problem))[0]
    if problem:
        cure = (
            f"Resume from {str(last)!r}" if last else f"Start anew, or give a complete {PREFIX_CHECKPOINT_DIR} folder"
        )
        raise CheckpointError(f"{problem}. {cure}.")
    return chosen


def _is_complete(folder: Path) -> bool:
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
