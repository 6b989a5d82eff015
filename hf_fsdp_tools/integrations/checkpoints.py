"""A Trainer's `checkpoint-N` folders: which are complete, what each must hold, and which are deleted."""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer import SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, warn
from hf_fsdp_tools.integrations.resume import AVERAGES, check_parts, damage_of
from hf_fsdp_tools.integrations.states import remove_checkpoint, remove_leftovers
from hf_fsdp_tools.integrations.streams import POSITIONS
from hf_fsdp_tools.loading.formats.dcp import METADATA
from hf_fsdp_tools.loading.weight_files import WEIGHTS, WEIGHTS_INDEX
from hf_fsdp_tools.modeling.pickles import read_json_object
from hf_fsdp_tools.text import first_line, listed, quoted

STATE_FILES = (
    "optimizer_0", "optimizer.bin", "optimizer_0/*", SCHEDULER_NAME, SCALER_NAME, "rng_state*.pth", f"{AVERAGES}/*",
    POSITIONS,
)  # fmt: skip
"""What a Trainer's checkpoint holds beside the model, of this mixin and of the plain Trainer under FSDP; the optimizer
first."""

_WEIGHTS = (
    "*.safetensors", "*/adapter_model.safetensors", "pytorch_model*.bin", "adapter_model.bin", "*/adapter_model.bin",
    "pytorch_model_fsdp_0/*",
)  # fmt: skip
"""Weights in any form in which a Trainer resumes."""

TRAINER_GLOBS = (*_WEIGHTS, *STATE_FILES, "*.safetensors.index.json", "config.json", "adapter_config.json")
"""Files of a checkpoint for its manifest. Others, as a tokenizer's, may come, go and change."""


# ---- what is complete ----


def complete_checkpoint(requested: str | bool, output_dir: str, *, allowed: Collection[str] = ()) -> str | bool:
    """The Trainer's checkpoint to resume from, the same on every rank: `wanted`, or for True the last complete one.

    A checkpoint is complete with all that its manifest lists, which is written last; one without a manifest (of the
    plain Trainer) with `trainer_state.json`. Returns True where there is no checkpoint at all; the Trainer then says
    so. Every rank must call; rank 0 decides.
    """
    with agreed("choosing the checkpoint", output_dir):
        found = _choose(requested, output_dir, allowed) if rank_and_size()[0] == 0 else (requested, "")
    chosen, problem = all_ranks(found, "choosing the checkpoint")[0]
    if problem:
        raise CheckpointError(problem)
    return chosen


def _choose(requested: str | bool, output_dir: str, allowed: Collection[str]) -> tuple[str | bool, str]:
    """The checkpoint to resume from; or what is wrong with it, and the cure."""
    folders = [str(requested)] if requested is not True else []
    if requested is True and Path(output_dir).is_dir():
        folders = sort_checkpoints(output_dir)[::-1]
    problems: list[str] = []
    for folder in folders:
        if not (fact := problem_of(Path(folder), allowed)):
            if problems:
                warn(f"Resuming from {Path(folder).name}: {listed(problems, separator='; ')}.")
            return folder, ""
        problems.append(f"{folder!r} {fact}")
    cure = "Give a complete folder" if requested is True else "With True, training goes on from the last complete one"
    return requested, f"{listed(problems, separator='; ')}. {cure}; or start anew." if problems else ""


def problem_of(folder: Path, allowed: Collection[str] = ()) -> str:
    """Why a folder is no complete checkpoint of a Trainer, for messages; "" where it is one."""
    try:
        return _problem_of_state(folder) or damage_of(folder, allowed)
    except CheckpointError as error:
        return f"is damaged: {error}".rstrip(".")


_KINDS_IN_STATE: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("global_step", "max_steps", "num_train_epochs"), (int,)),
    **dict.fromkeys(("epoch", "eval_steps", "logging_steps", "save_steps", "total_flos"), (int, float)),
    **dict.fromkeys(("best_global_step", "num_input_tokens_seen", "train_batch_size"), (int, type(None))),
    "best_metric": (int, float, type(None)),
    "best_model_checkpoint": (str, type(None)),
    "log_history": (list,),
    "stateful_callbacks": (dict, type(None)),
}
"""The kinds of values in `trainer_state.json`; source: transformers 5.23, trainer_callback.py, `TrainerState`."""


def _problem_of_state(folder: Path, args: Any = None) -> str:
    """The same as far as `trainer_state.json` says it, and with `args` whether its steps can follow."""
    file = folder / TRAINER_STATE_NAME
    if not file.is_file() or not file.stat().st_size:
        return f"has no readable {TRAINER_STATE_NAME}: it is no checkpoint, or saving it was interrupted"
    try:
        values = read_json_object(file)
    except CheckpointError as error:
        return f"has a damaged {TRAINER_STATE_NAME} ({first_line(error)})"
    for key, kinds in _KINDS_IN_STATE.items():
        value = values.get(key, None if key == "global_step" else kinds[0]())
        is_needed = args is not None and getattr(args, key.replace("_steps", "_strategy"), None) == "steps"
        is_wrong = type(value) not in kinds or (is_needed and key in values and value <= 0)
        if is_wrong or (isinstance(value, list) and not all(isinstance(each, dict) for each in value)):
            return f"has a damaged {TRAINER_STATE_NAME} ({key} is {quoted(values.get(key))})"
    try:
        TrainerState.load_from_json(str(file))
    except (TypeError, AttributeError) as error:
        return f"has a damaged {TRAINER_STATE_NAME} ({first_line(error)})"
    return ""


def check_checkpoint(trainer: Any, folder: Path) -> None:
    """Refuse a checkpoint that is damaged or lacks what the trainer goes on with, before anything of it is read.

    Every rank must call.
    """
    args = trainer.args

    def parts() -> Iterator[tuple[Sequence[str], str]]:
        if problem := _problem_of_state(folder, args):  # each rank reads it
            raise CheckpointError(f"{str(folder)!r} {problem}. Save to a file system that all ranks share.")
        _check_weights(folder)
        others = [path.name for name in ("optimizer.pt", "global_step*") for path in folder.glob(name)]
        why = f" in shards ({others[0]} is that of a run without FSDP, which is not read)" if others else ""
        yield STATE_FILES[:2], f"the optimizer{why}"
        yield (SCHEDULER_NAME,), "the scheduler"
        yield from [((SCALER_NAME,), "the loss scale")] * (trainer.accelerator.scaler is not None)
        yield (f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth",), "random states"
        yield from [((f"{AVERAGES}/{METADATA}",), "the moving averages")] * (trainer.ema_decay is not None)

    option = "allow_incomplete = True in the trainer's class"
    check_parts(folder, parts(), STATE_FILES, allowed=trainer.allow_incomplete, option=option)


def weights_in(folder: Path) -> list[str]:
    """Files with weights, of the model or of adapters, by their paths in the folder."""
    return sorted(path.relative_to(folder).as_posix() for pattern in _WEIGHTS for path in folder.glob(pattern))


def _check_weights(folder: Path) -> None:
    """Refuse a folder without weights, and adapters that cannot be opened, which PEFT reads on each rank by itself."""
    files = weights_in(folder)
    if not files:
        raise CheckpointError(
            f"{str(folder)!r} holds no weights ({WEIGHTS}, {WEIGHTS_INDEX} and its shards, or an adapter's). Use "
            "another checkpoint."
        )
    for file in (folder / name for name in files if name.endswith("adapter_model.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{file}: is damaged ({first_line(error)}). Use another checkpoint.") from None


# ---- what is deleted ----


def rotate(latest: Path, limit: int | None, best: str | None, *, uploaded: Collection[Path] = ()) -> None:
    """Delete a Trainer's old checkpoints: keep `limit` in all, the one just saved and the best one among them.

    Which others are oldest is transformers' rule. A checkpoint whose saving was interrupted does not count, and is
    deleted if it is older than the latest. Folders without a number are not touched. For one rank.
    """
    remove_leftovers(latest.parent, f"{PREFIX_CHECKPOINT_DIR}-*")
    if limit is None or limit <= 0:
        return
    named = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")
    by_age = [Path(path) for path in sort_checkpoints(str(latest.parent), use_mtime=True)]
    folders = [path for path in by_age if named.fullmatch(path.name)]
    interrupted = [path for path in folders if not (path / TRAINER_STATE_NAME).is_file()]
    older_ones = [path for path in folders if path.name != latest.name and path not in interrupted]
    kept = {path for path in older_ones if best is not None and path.resolve() == Path(best).resolve()}
    too_many = max(0, len(older_ones) + 1 - max(limit, 1 + len(kept)))
    older = {path.name for path in folders[: [path.name for path in folders].index(latest.name)]}
    for path in interrupted:
        if path.name in older:
            remove_checkpoint(path)
    for path in [path for path in older_ones if path not in kept][:too_many]:
        if path.resolve() not in {each.resolve() for each in uploaded}:
            remove_checkpoint(path)
