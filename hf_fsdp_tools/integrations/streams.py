"""Rows that go on where a training state ends: the order of an epoch, the position of each rank in a stream."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler, SkipBatchSampler, prepare_data_loader
from accelerate.utils.other import TORCH_SAFE_GLOBALS
from torch.utils.data import DataLoader, IterableDataset

from hf_fsdp_tools.axes import shared_rows
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.distributed.mesh import ranks_per_row
from hf_fsdp_tools.errors import CheckpointError, library_errors, storage_errors, warn
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.modeling.pickles import load_pickled, read_small
from hf_fsdp_tools.saving.durable import sync
from hf_fsdp_tools.text import first_line

POSITIONS = "dl_state_dict_*_of_rank_*.bin"
"""Files with the positions of the ranks."""

LOADERS = "loaders.json"
"""The file with the epoch and the seed of each loader without a state."""

_SINCE = (5, 1)
"""The first version of datasets in which a stream that goes on has a state again (datasets#8308)."""


def is_stream(dataset: Any) -> bool:
    """Whether rows are read one after another from something that can say where it is, as a stream of datasets."""
    return isinstance(dataset, IterableDataset) and all(hasattr(dataset, f"{act}state_dict") for act in ("", "load_"))


def why_read_again(dataset: Any) -> str:
    """Why a position in a stream would not be exact, so that a resumed run reads its rows again; "" where it is."""
    if not is_stream(dataset):
        return f"{type(dataset).__name__} has no state_dict and load_state_dict"
    try:
        version("torchdata")
    except PackageNotFoundError:
        return "torchdata, which keeps the positions of workers, is not installed (pip install torchdata)"
    if type(dataset).__module__.startswith("datasets."):
        installed = version("datasets")
        if tuple(map(int, installed.split(".")[:2])) < _SINCE:
            return f"datasets {installed} starts over after a second resume (pip install 'datasets>=5.1')"
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return "its state leaves out the rows in the buffer of shuffle()"
        parts += [inner for inner in (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())) if inner]
    return ""


def keep_exact(loader: Any) -> Any:
    """Let the state of a dispatching loader of Accelerate be that of the batch that was given last.

    Accelerate (1.15) fetches batches of all ranks ahead, and takes them off the counts of samplers; a stream has none.
    """
    if isinstance(loader, DataLoaderDispatcher) and loader.use_stateful_dataloader:
        fetch = loader._fetch_batches

        def fetch_next(iterator: Any) -> Any:
            before = loader.base_dataloader.state_dict()
            fetched = fetch(iterator)
            loader.dl_state_dict = before
            return fetched

        loader._fetch_batches, loader._update_state_dict = fetch_next, lambda: None
    return loader


def share_seed(loader: Any) -> Any:
    """Let all ranks draw the order of a loader's rows from rank 0's seed, where Accelerate (1.15) takes each rank's:
    after `set_seed(seed, device_specific=True)` some rows would come twice, some never. Every rank must call."""
    if (sampler := _seeded(loader)) is not None:
        sampler.initial_seed = all_ranks(sampler.initial_seed, "sharing the seed of a loader")[0]
    return loader


def _seeded(loader: Any) -> SeedableRandomSampler | None:
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return sampler if isinstance(sampler, SeedableRandomSampler) else None


def skip_once(rest: Any, loader: Any) -> Any:
    """Let `rest`, which skips the first batches of a loader, be its running epoch, whose start draws no random number.

    Then `rest` gives all batches, and the loader the next epoch: Accelerate (1.15) skips in each, and counts apart.
    """
    base = getattr(rest, "base_dataloader", rest)
    draws, end = base.generator is None, getattr(rest, "end", None)
    if draws:
        base.generator = torch.Generator()  # torch draws a seed for workers from it, used or not
    if end is None:  # no loader of Accelerate's
        return rest

    def end_epoch() -> None:
        end()
        rest.rest_of.iteration, rest.skip_batches = rest.iteration, 0
        for sampler in (rest.batch_sampler, rest.sampler):
            if isinstance(sampler, SkipBatchSampler):
                sampler.skip_batches = 0
        if draws:
            base.generator = None

    rest.rest_of, rest.end = getattr(loader, "rest_of", loader), end_epoch
    return rest


def write_position(loader: Any, folder: Path, index: int) -> list[str]:
    """Write this rank's position in the rows of a loader; return the names of the files of all ranks."""
    rank, ranks = rank_and_size()
    content = {"position": loader.state_dict(), "iteration": loader.iteration, "made": _made(loader)}
    files = [f"dl_state_dict_{index}_of_rank_{other}.bin" for other in range(ranks)]
    torch.save(content, folder / files[rank])
    sync(folder / files[rank])
    return files


def _made(loader: Any) -> dict[str, Any]:
    """What must be the same for a position to mean the same rows."""
    made = {"processes": rank_and_size()[1], shared_rows(" x "): ranks_per_row(), "workers": loader.num_workers}
    return made | {"loader": type(loader).__name__, "stream": _structure(loader.base_dataloader.dataset)}


def _structure(dataset: Any) -> str:
    """How a stream of datasets is made of others, as its state shows at any moment; "" for other rows."""

    def described(state: Any) -> Any:
        if isinstance(state, Mapping):
            parts = {key: part for key, part in state.items() if not key.startswith("previous")}
            return {key: part if key == "type" else described(part) for key, part in parts.items()}
        return [described(part) for part in state] if isinstance(state, list) else None

    is_known = is_stream(dataset) and type(dataset).__module__.startswith("datasets.")
    return repr(described(dataset.state_dict())) if is_known else ""


def restore_position(loader: Any, folder: Path, index: int) -> str:
    """Let a loader begin where this rank was; return why it cannot, for a message: "" where it does.

    Every rank must call. The ranks exchange whether all can.
    """
    rank, ranks = rank_and_size()
    file, reason = folder / f"dl_state_dict_{index}_of_rank_{rank}.bin", ""
    with agreed("reading the position in the stream", folder), storage_errors("read", folder):
        if not file.is_file() or (folder / f"dl_state_dict_{index}_of_rank_{ranks}.bin").is_file():
            reason = f"it has no positions of {ranks} processes"
        else:
            content = load_pickled(file, device="cpu", safe=TORCH_SAFE_GLOBALS).content
            now = _made(loader)
            try:
                position, iteration, made = (content[key] for key in ("position", "iteration", "made"))
                others = {key: f"{key} {made[key]}, now {now[key]}" for key in now if made[key] != now[key]}
            except (KeyError, TypeError) as error:
                raise CheckpointError(f"{file}: holds no position ({first_line(error)}). Use another one.") from None
            if "stream" in others:
                raise CheckpointError(
                    f"{file}: is the position in another stream. Make the stream as in the run that saved it, or start "
                    "anew."
                )
            reason = "; ".join(others.values())
    reason = next(filter(None, all_ranks(reason, "comparing positions in the stream")), "")
    if not reason:
        with agreed("going to the position", folder), library_errors(f"{file}: holds no position", "Use another one."):
            loader.load_state_dict(position)
        loader.iteration = iteration
    return reason


# ---- Accelerate's loop ----


def write_positions(accelerator: Any, folder: Path) -> list[str]:
    """Write the positions of the loaders with state; return the names of the files, which a state needs.

    Of other loaders rank 0 writes the epoch and the seed, which earlier states lack.
    """
    loaders, running = accelerator._dataloaders, accelerator.gradient_state.active_dataloader
    epochs: list[Any] = []  # of the batch that follows, after the last of an epoch the next one
    for loader in loaders:
        is_last = getattr(running, "rest_of", running) is loader and running.end_of_dataloader
        entry = {"epoch": loader.iteration + is_last, "seed": getattr(_seeded(loader), "initial_seed", None)}
        epochs.append(None if _has_state(loader) else entry)
    if rank_and_size()[0] == 0:
        (folder / LOADERS).write_text(json.dumps(epochs))
    return [name for i, each in enumerate(loaders) if _has_state(each) for name in write_position(each, folder, i)]


def restore_positions(accelerator: Any, folder: Path) -> None:
    """Restore the positions of loaders with state, or say once that rows are to be skipped; of others the epoch, and
    the seed of its order. Every rank must call."""
    _restore_epochs(accelerator._dataloaders, folder)
    for i, loader in enumerate(accelerator._dataloaders):
        if not _has_state(loader) or (folder / f"dl_state_dict{f'_{i}' * bool(i)}.bin").is_file():  # Accelerate's own
            continue
        if (reason := restore_position(loader, folder, i)) and rank_and_size()[0] == 0:
            warn(
                f"{str(folder)!r}: the loader {i} begins at its first row, for {reason}. Read again up to the step of "
                "the state, with accelerator.skip_first_batches(loader, steps)."
            )


def _restore_epochs(loaders: list[Any], folder: Path) -> None:
    epochs: list[Any] = []
    with agreed("reading the epochs of the loaders", folder), storage_errors("read", folder):
        if (file := folder / LOADERS).is_file():
            text = read_small(file)
            with library_errors(f"{file}: holds no epochs", "Use another state."):
                epochs = [entry and (int(entry["epoch"]), entry["seed"]) for entry in json.loads(text)]
    if epochs and len(epochs) != len(loaders) and rank_and_size()[0] == 0:
        warn(
            f"{str(folder)!r} has the epochs of {len(epochs)} loaders, and {len(loaders)} are prepared now, so that "
            "each begins with the order of its first epoch. Prepare what was prepared when it was saved, or call "
            "loader.set_epoch(epoch)."
        )
    if len(epochs) == len(loaders):
        for loader, entry in zip(loaders, epochs, strict=True):
            if entry and not _has_state(loader):
                loader.iteration, seed = entry
                if seed is not None and (sampler := _seeded(loader)) is not None:
                    sampler.initial_seed = seed


def _has_state(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


# ---- the Trainer's ----


class Stream:
    """The rows that a Trainer reads one after another: where they begin, and where each rank is in them."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.loader: Any = None  # whose position is saved
        self.goes_on = False  # whether it begins where a training state ends
        self.begins_at: Path | None = None

    @contextmanager
    def beginning_at(self, folder: Path | None) -> Iterator[None]:
        """A block that trains, on from a training state: transformers skips no batches of a loader that goes on."""
        skip: Callable[..., Any] = transformers.trainer.skip_first_batches
        self.loader, self.begins_at = None, folder

        def skip_others(loader: Any, num_batches: int = 0) -> Any:
            return loader if loader is self.loader and self.goes_on else skip(loader, num_batches)

        try:
            with replaced(transformers.trainer, skip_first_batches=skip_others):
                yield
        finally:
            self.begins_at = None

    def loader_of(self, plain: Callable[[], Any]) -> Any:
        """The loader of the Trainer's rows, `plain()`, or one of a stream with state, which goes on where the training
        state ends; one line says why its rows are read again. Every rank must call."""
        trainer, folder = self.trainer, self.begins_at
        if not isinstance(trainer.train_dataset, IterableDataset):
            return plain()
        reason = why_read_again(trainer.train_dataset)
        with nullcontext() if reason else replaced(trainer.accelerator.dataloader_config, use_stateful_dataloader=True):
            loader = self._of_share(not reason) if trainer.fsdp_settings.streams_are_shares else plain()
        self.loader, self.goes_on = None if reason else loader, False
        if folder is not None:
            reason = reason or restore_position(loader, folder, 0)
            if not reason:
                self.goes_on, begin = True, loader.set_epoch
                loader.set_epoch = lambda epoch: begin(max(epoch, loader.iteration))  # the Trainer counts this run's
            elif rank_and_size()[0] == 0:
                warn(f"The stream is read again from its first row up to the step of {folder.name!r}, for {reason}.")
        return loader

    def _of_share(self, has_state: bool) -> Any:
        """A loader of a stream that is this rank's share already, which Accelerate would divide once more."""
        args, workers = self.trainer.args, {"num_workers": self.trainer.args.dataloader_num_workers}
        workers |= {"collate_fn": self.trainer.data_collator, "pin_memory": args.dataloader_pin_memory}
        loader: Any = DataLoader(self.trainer.train_dataset, args.train_batch_size, **workers)
        alone = {"num_processes": 1, "process_index": 0, "dispatch_batches": False, "use_stateful_dataloader": True}
        return prepare_data_loader(loader, **alone) if has_state else loader

    def write(self, folder: Path) -> list[str]:
        """Write this rank's position, if it is exact; return the names of the files of all ranks."""
        return write_position(self.loader, folder, 0) if self.loader is not None else []
