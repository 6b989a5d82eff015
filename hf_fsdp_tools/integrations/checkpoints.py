"""The `checkpoint-N` folders of a Trainer: saved in the place of a hidden one, resumed from, and deleted."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import Trainer, TrainerCallback
from transformers.trainer import SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, sort_checkpoints

from hf_fsdp_tools.background import wait_for_saves
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, ConfigError, storage_errors, warn
from hf_fsdp_tools.extensions.averages import ParameterEMA
from hf_fsdp_tools.integrations.accelerator_state import load_optimizer, write_part
from hf_fsdp_tools.integrations.pushing import Uploads
from hf_fsdp_tools.integrations.resume import (
    AVERAGES,
    check_listed,
    check_parts,
    damage_of,
    refuse_damage,
    using_format,
)
from hf_fsdp_tools.integrations.states import StateSave, remove_checkpoint, saving_state
from hf_fsdp_tools.integrations.streams import POSITIONS
from hf_fsdp_tools.integrations.version1 import load_into, saveable
from hf_fsdp_tools.loading.formats.dcp import METADATA
from hf_fsdp_tools.loading.weight_files import WEIGHTS, WEIGHTS_INDEX
from hf_fsdp_tools.modeling.module_tree import original_classes, replaced
from hf_fsdp_tools.modeling.pickles import read_json_object
from hf_fsdp_tools.saving.durable import sync
from hf_fsdp_tools.saving.hidden_folder import Folder, check_shared
from hf_fsdp_tools.saving.manifest import MANIFEST
from hf_fsdp_tools.saving.publish import SaveReport
from hf_fsdp_tools.saving.save import BegunSave, begin_save, save_pretrained
from hf_fsdp_tools.saving.save_by_library import is_of_library
from hf_fsdp_tools.saving.states import remove_leftovers
from hf_fsdp_tools.sharding.adapters import ADAPTER_WEIGHTS
from hf_fsdp_tools.sharding.fsdp2_internals import reshard_units
from hf_fsdp_tools.stores import local_folder
from hf_fsdp_tools.text import first_line, listed, quoted

STATE_FILES = (
    "optimizer_0", "optimizer.bin", "optimizer_0/*", SCHEDULER_NAME, SCALER_NAME, "rng_state*.pth", f"{AVERAGES}/*",
    POSITIONS,
)  # fmt: skip
"""What a Trainer's checkpoint has in addition to the model, of this mixin and of the plain Trainer under FSDP; the
optimizer first."""

_WEIGHTS = (
    "*.safetensors", "*/adapter_model.safetensors", "pytorch_model*.bin", "adapter_model.bin", "*/adapter_model.bin",
    "pytorch_model_fsdp_0/*",
)  # fmt: skip
"""Weights in any form in which a Trainer resumes."""

TRAINER_GLOBS = (*_WEIGHTS, *STATE_FILES, "*.safetensors.index.json", "config.json", "adapter_config.json")
"""Files of a checkpoint for its manifest. Others, as a tokenizer's, may come, go and change."""


_TO_FOLDERS = "The Trainer writes to folders and resumes from them,"


class Checkpoints:
    """The `checkpoint-N` folders of a Trainer, and where it resumes. Every rank must call each method."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.uploads = trainer, Uploads(trainer)
        self.saving: StateSave | None = None
        """The checkpoint that is being saved."""
        self.resumed: Path | None = None
        """The one from which the training goes on."""

    # ---- saving ----

    def save_model(self, output_dir: str | None) -> None:
        """Write model, tokenizer and training arguments as a Hugging Face folder, or in the background."""
        trainer, args, state = self.trainer, self.trainer.args, self.saving
        folder = local_folder(output_dir if output_dir is not None else args.output_dir, _TO_FOLDERS)
        tokenizer = trainer.processing_class
        tokenizer = getattr(trainer.data_collator, "tokenizer", None) if tokenizer is None else tokenizer
        model = saveable(trainer.model)
        if state is None or trainer.fsdp_settings.blocking:
            saved: BegunSave | SaveReport = save_pretrained(model, folder, processing_class=tokenizer)
        elif isinstance(saved := begin_save(model, Folder(folder), tokenizer=tokenizer, blocking=False), BegunSave):
            state.add_model(saved)
        with agreed("writing the training arguments", folder), storage_errors("save to", folder):
            if args.should_save:
                torch.save(args, folder / "training_args.bin")
                if state is not None and isinstance(saved, SaveReport):
                    state.needed += weights_in(folder)

    def output_dir(self, plain: Callable[[], str]) -> str:
        """The Trainer's own; while a checkpoint is saved, the hidden folder in which it is made."""
        if self.saving is not None:
            return str(self.saving.staging.parent)
        wait_for_saves()  # who looks for checkpoints finds them complete
        return plain()

    def save(self, plain: Callable[[], None], trial: Any) -> None:
        """Save by `plain()` in a hidden folder; once that is complete it gets its name, and old ones go."""
        trainer, args, state = self.trainer, self.trainer.args, self.trainer.state
        folder = Path(trainer._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        how = {name: getattr(trainer.fsdp_settings, name) for name in ("blocking", "checksums")}
        with saving_state(Folder(folder), TRAINER_GLOBS, **how) as saving:
            saving.needed.append(TRAINER_STATE_NAME)
            with replaced(self, saving=saving):
                plain()  # of the old ones it finds none next to the hidden one
            with agreed("saving the trainer's state", folder), storage_errors("save to", folder):
                best_one = folder.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
                if state.best_global_step and (best_one == folder or best_one.exists()):
                    state.best_model_checkpoint = str(best_one)  # the Trainer looked next to the hidden one
                if args.should_save:
                    state.save_to_json(str(saving.staging / TRAINER_STATE_NAME))
            best, limit, place = state.best_model_checkpoint, args.save_total_limit, Path(saving.place.where)

            def delete_old() -> None:
                uploaded = self.uploads.begin(folder, (*STATE_FILES, TRAINER_STATE_NAME, MANIFEST))
                rotate(place, limit, best, uploaded=uploaded)

            saving.after = delete_old if args.should_save else saving.after

    def save_optimizer(self, folder: Path) -> None:
        """Write the optimizer's shards, the averages and the scheduler; the weights are in the folder already."""
        trainer, state = self.trainer, self.saving
        assert state is not None
        with using_format(trainer.accelerator.state.fsdp_plugin, folder, "SHARDED_STATE_DICT"):
            write_part(trainer.accelerator, trainer.model, trainer.optimizer, state, 0)
            if trainer.ema is not None:
                state.write_dcp({"ema": trainer.ema.state_dict()}, state.staging / AVERAGES)
        with agreed("saving the scheduler", folder), storage_errors("save to", folder):
            if trainer.args.should_save:
                torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
        state.needed.append(SCHEDULER_NAME)

    def save_random_states(self, folder: Path, plain: Callable[[], None]) -> None:
        """Write this rank's random state by `plain()`, and its position in a stream, the last files of all ranks; a
        rank that fails stops all of them."""
        trainer, ranks = self.trainer, self.trainer.args.world_size
        assert self.saving is not None
        with agreed("saving the random states", folder), storage_errors("save to", folder):
            plain()
            files = [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state.pth"]
            sync(folder / files[trainer.args.process_index])
            self.saving.needed += files + trainer._stream.write(folder)

    # ---- resuming ----

    def choose(self, asked: str | bool | None) -> str | bool | None:
        """The checkpoint from which a training goes on: for True the last complete one, if there is one. Refuses what
        is damaged or lacks what is needed, before it is read, and an output folder that the ranks do not share."""
        args, settings = self.trainer.args, self.trainer.fsdp_settings
        if asked is True:
            asked = last_complete(args.output_dir, allowed=STATE_FILES if settings.allow_incomplete else ()) or True
        self.resumed = local_folder(asked, _TO_FOLDERS) if asked and asked is not True else None
        if self.resumed is not None:
            self._check(self.resumed)
        if args.save_strategy != SaveStrategy.NO:
            check_shared(local_folder(args.output_dir, _TO_FOLDERS))
        return asked if self.resumed is None else str(self.resumed)

    def _check(self, folder: Path) -> None:
        args, settings = self.trainer.args, self.trainer.fsdp_settings
        with agreed("looking at the trainer's state", folder), storage_errors("read", folder):
            if problem := _problem_of_state(folder, args):  # each rank reads it
                cure = "With True, training goes on from the last complete one; or start anew"
                raise CheckpointError(f"{str(folder)!r} {problem}. {cure}.")

        def parts() -> Iterator[tuple[Sequence[str], str]]:
            _check_weights(folder)
            others = [path.name for name in ("optimizer.pt", "global_step*") for path in folder.glob(name)]
            why = f" in shards ({others[0]} is that of a run without FSDP, which is not read)" if others else ""
            yield STATE_FILES[:2], f"the optimizer{why}"
            yield (SCHEDULER_NAME,), "the scheduler"
            yield from [((SCALER_NAME,), "the loss scale")] * (self.trainer.accelerator.scaler is not None)
            yield (f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth",), "random states"
            yield from [((f"{AVERAGES}/{METADATA}",), "the moving averages")] * (settings.ema_decay is not None)

        option = "TrainerSettings(allow_incomplete=True)"
        check_parts(folder, parts(), STATE_FILES, allowed=settings.allow_incomplete, option=option)

    def load_weights(self, folder: Path, model: Any, plain: Any) -> None:
        """Load weights into the shards, from a checkpoint of this mixin or of the plain Trainer.

        A library with a format and a method of its own reads the whole model on every rank, whose shards take a part.
        """
        if is_of_library(model) and plain.__func__ is not Trainer._load_from_checkpoint:
            reshard_units(model)
            with agreed("loading the weights", folder), original_classes(model):
                plain(str(folder))
        elif (folder / WEIGHTS).is_file() or (folder / WEIGHTS_INDEX).is_file():
            load_into(model, folder)
        else:
            refuse_damage(folder)
            with using_format(self.trainer.accelerator.state.fsdp_plugin, folder):
                plain(str(folder), model)

    def load_optimizer(self, folder: Path) -> None:
        """Load what the checkpoint holds of optimizer and scheduler; the Trainer's own loads both or neither."""
        trainer = self.trainer
        if any((folder / name).exists() for name in STATE_FILES[:2]):
            load_optimizer(trainer.accelerator, trainer.optimizer, trainer.model, folder)
        with agreed("reading the scheduler", folder), storage_errors("read", folder):
            if (folder / SCHEDULER_NAME).is_file():
                trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def load_best(self) -> None:
        """Load the weights of the best checkpoint into the shards; the Trainer's method needs Accelerate's format."""
        wait_for_saves()
        folder = Path(self.trainer.state.best_model_checkpoint)
        check_listed(folder, allowed=STATE_FILES)
        self.trainer._load_from_checkpoint(str(folder))
        self.load_averages(folder)

    def load_averages(self, folder: Path) -> None:
        """Fill the averages from those of a training state; where it has none, they stay."""
        trainer = self.trainer
        if trainer.ema is not None and (folder / AVERAGES).is_dir():
            with using_format(trainer.accelerator.state.fsdp_plugin, folder):
                load({"ema": trainer.ema.state_dict()}, checkpoint_id=folder / AVERAGES)


class Averaging(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Makes `trainer.ema` when training begins, from a training state if there is one with averages, and keeps it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the averages of weights that are loaded, and read those of the training state. Every rank calls."""
        trainer = self.trainer
        if not trainer.accelerator.is_fsdp2:
            raise ConfigError("ema_decay needs FSDP2: version 1 has parts of several parameters as one. Leave it out.")
        decay, device = trainer.fsdp_settings.ema_decay, trainer.fsdp_settings.ema_device
        trainer.ema = ParameterEMA(trainer.model, decay, device=device)
        if (resumed := trainer._checkpoints.resumed) is not None:
            trainer._checkpoints.load_averages(resumed)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the parameters as the optimizer has left them."""
        self.trainer.ema.step()


# ---- which folder is a complete checkpoint ----


def last_complete(output_dir: str, *, allowed: Collection[str] = ()) -> str | None:
    """The Trainer's last complete checkpoint, the same on every rank; None where there is none at all.

    A checkpoint is complete with all that its manifest lists, which is written last; one without a manifest (of the
    plain Trainer) with `trainer_state.json`. Every rank must call; rank 0 decides.
    """
    problems: list[str] = []
    chosen, said = None, ""
    with agreed("choosing the checkpoint", output_dir):
        if rank_and_size()[0] == 0 and Path(output_dir).is_dir():
            for folder in sort_checkpoints(output_dir)[::-1]:
                if not (fact := problem_of(Path(folder), allowed)):
                    chosen = folder
                    break
                problems.append(f"{folder!r} {fact}")
            said = listed(problems, separator="; ")
            if chosen is not None and said:
                warn(f"Resuming from {Path(chosen).name}: {said}.")
    chosen, said = all_ranks((chosen, said), "choosing the checkpoint")[0]
    if said and chosen is None:
        raise CheckpointError(f"{said}. Give a complete folder; or start anew.")
    return chosen


def problem_of(folder: Path, allowed: Collection[str] = ()) -> str:
    """Why a folder is no complete checkpoint of a Trainer, for messages; "" where it is one."""
    return _problem_of_state(folder) or damage_of(folder, allowed)


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
        for key, kinds in _KINDS_IN_STATE.items():
            value = values.get(key, None if key == "global_step" else kinds[0]())
            is_needed = args is not None and getattr(args, key.replace("_steps", "_strategy"), None) == "steps"
            is_wrong = type(value) not in kinds or (is_needed and key in values and value <= 0)
            if is_wrong or (isinstance(value, list) and not all(isinstance(each, dict) for each in value)):
                return f"has a damaged {TRAINER_STATE_NAME} ({key} is {quoted(values.get(key))})"
        TrainerState.load_from_json(str(file))
    except (CheckpointError, TypeError, AttributeError) as error:
        return f"has a damaged {TRAINER_STATE_NAME} ({first_line(error)})"
    return ""


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
    for file in (folder / name for name in files if name.endswith(ADAPTER_WEIGHTS)):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{file}: is damaged ({first_line(error)}). Use another checkpoint.") from None


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
    others = [path for path in folders if path.name != latest.name and path not in interrupted]
    kept = [path for path in others if best is not None and path.resolve() == Path(best).resolve()]
    surplus = [path for path in others if path not in kept][: max(0, len(others) + 1 - max(limit, 1 + len(kept)))]
    older = folders[: [path.name for path in folders].index(latest.name)]
    goes = [path for path in surplus if path.resolve() not in {each.resolve() for each in uploaded}]
    for path in [*(path for path in interrupted if path in older), *goes]:
        remove_checkpoint(path)
