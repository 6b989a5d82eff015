"""The Trainer's uploads to the hub: of complete folders only, with one error for all ranks or a warning."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils.hub import hf_api

from hf_fsdp_tools.background import wait_for_saves
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks
from hf_fsdp_tools.errors import library_errors, warn
from hf_fsdp_tools.hub import CARD, hub_name_of, upload
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.saving.push import is_outdated
from hf_fsdp_tools.text import first_line

_KEPT_HERE = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*", ".*", "*/.*", "*.former")
"""Files of an output folder that are not uploaded: those that the Trainer leaves out, and what is hidden or former."""

_LAST = "last-checkpoint/"
"""Where `hub_strategy="checkpoint"` puts the checkpoint to resume from; source: transformers 5.23, trainer.py."""


class Uploads:
    """Uploads by a `Trainer` whose ranks save together: each is one commit of complete files, made by rank 0.

    Where an upload fails while training goes on, it goes on with a warning; elsewhere an error of the hub is the same
    `CheckpointError` on every rank, and what was saved stays.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.jobs: dict[Future[str], Path] = {}
        """The checkpoint of each upload that runs."""

    def open(self, plain: Callable[[], None]) -> None:
        """Make the repository by `plain()`, before training; where the hub refuses, all ranks stop. Every rank learns
        the full name."""
        trainer, doing = self.trainer, "making the repository on the hub"
        name = trainer.args.hub_model_id or Path(trainer.args.output_dir).absolute().name
        fact = f"{name!r} on the hub cannot be written to"
        with agreed(doing), library_errors(fact, "Check name, network and token."):
            plain()
        trainer.hub_model_id = all_ranks(trainer.hub_model_id, doing)[0]

    def push(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Save the model to `output_dir` and upload that folder, with the Trainer's card. Every rank must call."""
        trainer = self.trainer
        if trainer.hub_model_id is None:
            trainer.init_hf_repo(token=token, private=private)
        trainer.save_model(_internal_call=True)
        folder, page = Path(trainer.args.output_dir), None
        with agreed("uploading to the hub", folder):
            if trainer.is_world_process_zero():
                trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
                tags = card.get("tags") or []
                own_tags = getattr(trainer.model, "model_tags", None) or []
                card["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *own_tags])) or None
                trainer.create_model_card(**{"model_name": str(trainer.hub_model_id).split("/")[-1], **card})
                trainer._finish_current_push()
                files, message = _files_of(folder, _KEPT_HERE), commit_message or "End of training"
                send = self._sending(folder, files, message, token=token, revision=revision)
                page = send() if blocking else hf_api().run_as_future(send)
        return page

    def write_card(self, plain: Callable[[], None]) -> None:
        """Write the Trainer's model card, or TRL's, by `plain()`, of which some words are not true of every model."""
        trainer = self.trainer
        config, base = trainer.model.config, Path(trainer.model.config.name_or_path or "").name
        try:
            with replaced(config, _name_or_path=hub_name_of(trainer.model) or "."):  # a folder has no page
                plain()
        except Exception as error:  # no card is worth a model that is not saved
            warn(f"No model card: {type(error).__name__}: {first_line(error)}.")
        path = Path(trainer.args.output_dir, CARD)
        if trainer.is_world_process_zero() and path.is_file():
            made = f"a fine-tuned version of `{base}`" if base else "trained from scratch"
            text = path.read_text(encoding="utf-8").replace("licence: license\n", "")
            text = text.replace("a fine-tuned version of [None](https://huggingface.co/None)", made)
            text = text.replace("This model was trained from scratch on", f"This model is {made} on")
            text = text.replace('model="None"', f'model="{trainer.args.output_dir}"')
            if getattr(trainer.processing_class, "chat_template", None) is None:
                text = text.replace('generator([{"role": "user", "content": question}], ', "generator(question, ")
            path.write_text(text, encoding="utf-8")

    def begin(self, checkpoint: Path, parts_of_state: Sequence[str]) -> Collection[Path]:
        """Begin to upload a complete checkpoint in the background, as `hub_strategy` says, on rank 0; the checkpoints
        whose uploads are under way. The model goes without the files that match `parts_of_state`."""
        trainer, args = self.trainer, self.trainer.args
        if not args.push_to_hub or args.hub_strategy == HubStrategy.END or not trainer.is_world_process_zero():
            return ()
        if (earlier := self._under_way()) and not args.hub_always_push:
            return earlier
        trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
        card = Path(args.output_dir, CARD)
        files = {CARD: card} if card.is_file() else {}
        files |= _files_of(checkpoint, parts_of_state)
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            within = _LAST if args.hub_strategy == HubStrategy.CHECKPOINT else f"{checkpoint.name}/"
            files |= {f"{within}{name}": path for name, path in _files_of(checkpoint, (".save-*",)).items()}
        send = self._sending(checkpoint, files, f"Training in progress, step {checkpoint.name.rpartition('-')[2]}")
        self.jobs[hf_api().run_as_future(send)] = checkpoint
        return [*earlier, checkpoint]

    def finish(self) -> None:
        """Wait for all uploads, also of a checkpoint that is still written; a warning says which one failed."""
        if self.trainer.args.push_to_hub:
            wait_for_saves()
        wait(self.jobs)
        self._under_way()

    def _under_way(self) -> list[Path]:
        """The checkpoints whose uploads run; forgets those that have ended, with a warning of each that failed."""
        for job in [job for job in self.jobs if job.done()]:
            if (error := job.exception()) is not None:
                warn(f"Training went on while an upload failed: {error}")
            del self.jobs[job]
        return list(self.jobs.values())

    def _sending(self, folder: Path, files: dict[str, Path], message: str, **target: Any) -> Callable[[], str]:
        """A function that uploads files of a folder, and removes older weights and an older `last-checkpoint`."""
        replaces_last = any(name.startswith(_LAST) for name in files)

        def goes(name: str) -> bool:
            return (replaces_last and name.startswith(_LAST)) or is_outdated(name, files)

        args = self.trainer.args
        to = {"repo_id": self.trainer.hub_model_id, "token": args.hub_token, "revision": args.hub_revision}
        to |= {name: value for name, value in target.items() if value is not None}
        return partial(upload, folder, files, is_outdated=goes, commit_message=message, **to)


def _files_of(folder: Path, without: Sequence[str]) -> dict[str, Path]:
    """The files of a folder by their names in it, without those that match a pattern."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in files.items() if not any(fnmatchcase(name, p) for p in without)}
