"""Read training states: what is complete, what is damaged, states of another format or number of ranks."""

import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelerate.utils.other import TORCH_SAFE_GLOBALS
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.errors import CheckpointError, storage_errors, warn
from hf_fsdp_tools.integrations.version1 import is_version1
from hf_fsdp_tools.loading.dcp_reader import from_stores
from hf_fsdp_tools.loading.formats.dcp import METADATA, check_dcp
from hf_fsdp_tools.modeling.module_tree import plain_name, replaced
from hf_fsdp_tools.modeling.pickles import load_pickled
from hf_fsdp_tools.saving.manifest import MANIFEST, UNFINISHED, Manifest, check_sums, read_manifest
from hf_fsdp_tools.stores import told
from hf_fsdp_tools.text import first_line, listed, listed_lines, space_at

AVERAGES = "ema_state"
"""Folder with the moving averages, which this package writes."""

_SHARDED_FOLDER = re.compile(rf"({FSDP_MODEL_NAME}|{OPTIMIZER_NAME})_\d+|{AVERAGES}")

_PICKLED = re.compile(
    r"((optimizer|pytorch_model_fsdp|scheduler|dl_state_dict)(_\d+)?\.bin|(scheduler|scaler)\.pt"
    r"|custom_checkpoint_\d+\.pkl)"
)
"""Files that are read by `torch.load`; source: accelerate 1.15, checkpointing.py, and transformers 5.17, trainer.py."""

_RANDOM_STATES = (("random_state", "numpy_random_seed", "torch_manual_seed"), ("python", "numpy", "cpu"))
"""Keys of random states; source: accelerate 1.15, checkpointing.py, and transformers 5.17, trainer.py."""


def files_of(kind: str, index: int = 0) -> tuple[str, str]:
    """What Accelerate (1.15, utils/fsdp_utils.py) writes of a model or an optimizer: a DCP folder, or one file under
    FULL_STATE_DICT."""
    return f"{kind}_{index}", f"{kind}_{index}.bin" if index else f"{kind}.bin"


def refuse_damage(folder: Path) -> None:
    """Refuse a training state that is damaged, or would run code when torch or Accelerate reads it, whoever wrote it.

    One rank of each node reads the DCP folders' metadata (see `check_dcp`), each rank the files that it will give to
    `torch.load`. Every rank must call, before anything else is read.
    """
    rank, _ = rank_and_size()
    is_first = rank == 0 or rank_on_node()[0] == 0
    with agreed("checking the saved state", folder), storage_errors("read", folder):
        for below in sorted(path for path in folder.iterdir() if _SHARDED_FOLDER.fullmatch(path.name)):
            if not (below / METADATA).is_file():
                raise CheckpointError(
                    f"{str(below)!r} has no {METADATA}, without which nothing is found in it. Use another checkpoint."
                )
            if is_first:
                check_dcp(below, complete=rank == 0)  # which is the same for all ranks
        for file in sorted(path for path in folder.iterdir() if _PICKLED.fullmatch(path.name)):
            device = "meta" if file.name in (f"{FSDP_MODEL_NAME}.bin", f"{OPTIMIZER_NAME}.bin") else "cpu"
            content = load_pickled(file, device=device, safe=TORCH_SAFE_GLOBALS).content
            if not isinstance(content, dict) and not file.name.startswith("custom"):  # of which its object knows
                raise CheckpointError(f"{file}: holds a {type(content).__name__}, expected a dict. Use another one.")
        for name in (f"rng_state_{rank}.pth", "rng_state.pth", f"random_states_{rank}.pkl"):
            if (folder / name).is_file():
                _check_random_states(folder / name)


def _check_random_states(file: Path) -> None:
    """Refuse random states that cannot be restored: Accelerate would go on without them, and say nothing."""
    states = load_pickled(file, device="cpu", safe=TORCH_SAFE_GLOBALS).content
    try:
        python, numpy, torchs = next([states[key] for key in keys] for keys in _RANDOM_STATES if keys[0] in states)
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
        torch.Generator().set_state(torchs)
    except (StopIteration, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file}: holds no random states ({first_line(error)}). Use another one.") from error


def check_parts(
    folder: Path, parts: Iterable[tuple[Sequence[str], str]], may_lack: Collection[str], *, allowed: bool, option: str
) -> set[str]:
    """Refuse a training state that is damaged, or from which a run cannot go on as it was.

    Every rank must call. The run needs one of the files of each part; the first ones of what is absent are returned.
    Those that match `may_lack` may be absent where that is allowed, by `option`.
    """
    manifest = check_listed(folder, allowed=may_lack if allowed else ())
    is_elsewhere = _warn_of_other_world(folder, manifest)
    with agreed("looking for the parts of the saved state", folder), storage_errors("read", folder):
        gone = [(files[0], part) for files, part in parts if not any((folder / name).exists() for name in files)]
        own_absent = {file: part for file, part in gone if not (is_elsewhere and part == "random states")}
    of_ranks = all_ranks(own_absent, "looking for what is absent")
    absent = {file: part for of_rank in of_ranks for file, part in of_rank.items()}
    lacks = listed(f"{part} ({file})" for file, part in absent.items())
    if absent and not allowed:
        raise CheckpointError(
            f"{str(folder)!r} lacks {lacks}: training would not go on as it was. Use another checkpoint; {option} "
            "starts anew what is absent."
        )
    if absent and rank_and_size()[0] == 0:
        warn(f"{told(str(folder))!r} lacks {lacks}, which start(s) anew.")
    refuse_damage(folder)
    return set(own_absent)


def check_listed(folder: Path, *, allowed: Collection[str] = ()) -> Manifest | None:
    """The manifest of a folder that holds all that its manifest lists; None, and a warning, for one without a manifest.

    Every rank must call; rank 0 looks. Where the manifest has checksums, all files are read.
    """
    manifest, problem = None, ""
    with agreed("looking at the checkpoint's files", folder):
        if rank_and_size()[0] == 0 and not (problem := damage_of(folder, allowed)):
            manifest = read_manifest(folder)
    manifest, problem = all_ranks((manifest, problem), "comparing the checkpoint with its manifest")[0]
    if problem:
        raise CheckpointError(f"{str(folder)!r} {problem}. Use another checkpoint, or copy it again.")
    if manifest is None:
        if rank_and_size()[0] == 0:
            warn(
                f"{told(str(folder))!r} has no {MANIFEST} (another program or an older version saved it): whether all "
                "of it is there is not known."
            )
    elif manifest.sums:
        check_sums(folder, manifest)
    return manifest


def damage_of(folder: Path, allowed: Collection[str] = ()) -> str:
    """What is wrong with a folder by its manifest, for messages; "" where nothing is, or where there is no manifest."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return f"is damaged: {error}".rstrip(".")
    if manifest is None and (folder / UNFINISHED).is_file():
        return "is not complete: the save to it was cut off"
    damage = {} if manifest is None else manifest.damage(folder)
    facts = [
        f"{name!r} {fact}"
        for name, fact in damage.items()
        if not (fact == "is absent" and any(fnmatch(name, pattern) for pattern in allowed))
    ]
    return f"is not as it was saved: {listed(facts)}" if facts else ""


@contextmanager
def using_format(plugin: Any, folder: Path, state_dict_type: str | None = None) -> Iterator[None]:
    """Set the plugin's state dict type for a block that reads or writes below `folder`; None takes that in which
    Accelerate wrote there, and leaves it as it is where it wrote nothing."""
    sharded, whole = zip(*(files_of(kind) for kind in (FSDP_MODEL_NAME, OPTIMIZER_NAME)), strict=True)
    kinds = {"SHARDED_STATE_DICT": sharded, "FULL_STATE_DICT": whole}
    found = (kind for kind, files in kinds.items() if any((folder / name).exists() for name in files))
    state_dict_type = state_dict_type or next(found, None)
    names = ("state_dict_type", "state_dict_config", "optim_state_dict_config")
    try:
        with replaced(plugin, **{name: getattr(plugin, name) for name in names}), from_stores():
            if state_dict_type is not None and state_dict_type not in str(plugin.state_dict_type):
                plugin.state_dict_config = plugin.optim_state_dict_config = None  # or those of the other type stay
                plugin.set_state_dict_type(state_dict_type)
            yield
    except CheckpointException as error:  # the same on every rank: torch has exchanged the failures
        lines = [f"rank {rank}: {failure!r}" for rank, (failure, _) in sorted(error.failures.items())]
        raise CheckpointError(
            f"torch's distributed checkpoint failed on {len(lines)} rank(s) in {str(folder)!r}{space_at(folder)}. "
            f"Check space and permissions there (TMPDIR, where it goes to a store).\n{listed_lines(lines, 4, head='')}"
        ) from error


@contextmanager
def awaiting_state(model: nn.Module, optimizer: Any, folder: Path, index: int = 0) -> Iterator[None]:
    """Give an optimizer empty state for a block in which Accelerate reads its state from `folder`.

    Accelerate and torch read into existing state. There is none with version 1 in a new process, nor with FSDP2 while
    gradients are pending, so Adam's moments would be silently lost. A parameter that never had a gradient has no saved
    state, and torch would demand it.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    _make_state(model, optimizer)
    without = []
    if not is_version1(model):
        with agreed("reading what the saved optimizer holds", folder):
            without = _without_state(model, optimizer, folder, index)
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


def _make_state(model: nn.Module, optimizer: Any) -> None:
    """Let an optimizer without state have one. torch steps once with zero gradients and no learning rate; optimizers of
    schedulefree in their mode of training alone, which they begin without."""
    has_modes = any(group.get("train_mode") is False for group in optimizer.param_groups)
    if has_modes:
        optimizer.train()
    if not any(optimizer.state.values()):  # where schedulefree's modes have looked, an empty one is for torch a state
        optimizer.state.clear()
    get_optimizer_state_dict(model, optimizer)
    if has_modes:
        optimizer.eval()


_COUNTS = {"step": 0, "mu_product": 1}
"""What torch's optimizers count in the state of a parameter, and where each count begins."""


@contextmanager
def beginning(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Let an optimizer that has not stepped have the state of its beginning for a block that saves it.

    torch makes one by a step that counts (`_init_optim_state`), and leaves it: the training would go on as after it.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_made = not any(optimizer.state.values()) and all(parameter.grad is None for parameter in parameters)
    if is_made:
        _make_state(model, optimizer)
    for state in optimizer.state.values() if is_made else ():
        state.update({name: state[name] * 0 + first for name, first in _COUNTS.items() if name in state})
    try:
        yield
    finally:
        if is_made:
            optimizer.state.clear()


def _without_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, index: int
) -> list[torch.nn.Parameter]:
    """The trainable parameters for which a sharded checkpoint holds no optimizer state. Rank 0 reads."""
    source, begin = folder / files_of(OPTIMIZER_NAME, index)[0], "optimizer.state."
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names = {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter in held}
    without: list[str] = []
    if rank_and_size()[0] == 0 and source.is_dir():
        stored = {key.removeprefix(begin).rpartition(".")[0] for key in check_dcp(source) if key.startswith(begin)}
        if unknown := sorted(stored - names.keys()):
            raise CheckpointError(
                f"{str(source)!r} holds optimizer state of {len(unknown)} parameters that this optimizer does not "
                f"train, as {unknown[0]!r}. Make model and optimizer as in the run that saved it."
            )
        without = [name for name, parameter in names.items() if name not in stored and parameter.requires_grad]
    return [names[name] for name in all_ranks(without, "reading what the saved optimizer holds")[0]]


def _warn_of_other_world(folder: Path, manifest: Manifest | None) -> bool:
    """Warn on rank 0 of a state of another number of ranks; return whether it is one."""
    rank, now = rank_and_size()
    files = [path for pattern in ("rng_state*.pth", "random_states_*.pkl") for path in folder.glob(pattern)]
    then = manifest.ranks if manifest is not None else len(files)
    if then in (0, now):
        return False
    if rank == 0:
        warn(
            f"{told(str(folder))!r} was saved by {then} process(es) and is read by {now}. Weights, optimizer and "
            "scheduler go on exactly; random draws (dropout) go on otherwise. Keep rows per step as they were (batch "
            "size x processes x accumulation steps), or the position in the data and the schedule mean something else."
        )
    return True
