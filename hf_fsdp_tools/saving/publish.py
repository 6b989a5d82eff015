"""The files of a save become visible together: made in a hidden folder, synced, and switched to by one rename.

While a save runs, its files lie in a hidden folder within the folder to save to, so that whatever fails or is killed
leaves the checkpoint that is there as it is. Then, on rank 0:

    1. shards get names that no save before had: nothing that opens the folder looks at them yet
    2. one rename switches all else (`switch`): the index or `model.safetensors`, config, tokenizer; and what would be
       opened in place of them goes
    3. the former weight files are removed

Every file is synced before it is renamed, and the folder before and after the switch, so that a machine that goes down
leaves the former or the new checkpoint.
"""

import filecmp
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hf_fsdp_tools.errors import storage_errors, warn
from hf_fsdp_tools.loading.weight_files import CONFIG, WEIGHTS, WEIGHTS_INDEX
from hf_fsdp_tools.saving.durable import sync
from hf_fsdp_tools.saving.hidden_folder import HiddenFolder, keep, switch
from hf_fsdp_tools.saving.layout import Layout
from hf_fsdp_tools.sharding.adapters import ADAPTER_CONFIG
from hf_fsdp_tools.text import listed, show_bytes, table

ADAPTER_WEIGHTS = "adapter_model.safetensors"

WEIGHTS_OF_A_SAVE = re.compile(r"model(\.[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Weight files and index of this package's saves and of transformers'."""


@dataclass(frozen=True, kw_only=True)
class SavedNames:
    """The names of a checkpoint's files."""

    weights: dict[str, str]
    """Weight file in the hidden folder to its name in the folder."""
    others: tuple[str, ...]


def names_of(hidden: HiddenFolder, layout: Layout) -> SavedNames:
    """The names that transformers gives to weight files, and those of all files that lie next to them by now.

    Where the folder holds weights of an earlier save, the mark of this save is part of the names of shards
    (`model.1b0f5e9a-00001-of-00006.safetensors`), so that whoever has read an index never opens files of another save.
    """
    weights, others = {file: file for file in layout.sizes}, hidden.new_names()
    if len(weights) > 1:
        marked = f"model.{hidden.mark}" if _weights_in(hidden.folder) else "model"
        weights = {file: file.replace("model", marked, 1) for file in weights}
        others = (*others, WEIGHTS_INDEX)
    return SavedNames(weights=weights, others=others)


def publish_weights(hidden: HiddenFolder, names: SavedNames, layout: Layout, *, threads: bool) -> None:
    """Make complete weight files and all that lies next to them the checkpoint of the folder.

    Of an adapter that lies there, which transformers would put on the new weights, the files are renamed.
    """
    folder, is_sharded = hidden.folder, len(names.weights) > 1
    last = WEIGHTS_INDEX if is_sharded else WEIGHTS
    shards = names.weights if is_sharded else {}
    with storage_errors("finish", folder):
        former = _weights_in(folder)
        changed = _changed(hidden)
        if is_sharded:
            (hidden.new / last).write_text(index_text(names, layout), "utf-8")
            sync(hidden.new / last)
        else:
            os.replace(hidden.path / last, hidden.new / last)
        aside = _set_aside(hidden, (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin"))
        gone = [Path(name) for name in {WEIGHTS, WEIGHTS_INDEX} & former - {last}]
        try:
            for file, name in shards.items():
                os.replace(hidden.path / file, folder / name)
            sync(folder)
            switch(folder, hidden.path, [*changed, *aside, *gone, Path(last)])
        except BaseException:
            for name in set(shards.values()) - former:
                with suppress(OSError):  # the error that led here is the one to show
                    (folder / name).unlink(missing_ok=True)
            raise
    _warn_of(folder, aside)
    _remove_former(folder, sorted(former - {*names.weights.values(), last}), threads)


def index_text(names: SavedNames, layout: Layout) -> str:
    """The content of the index file."""
    sizes = {"total_parameters": layout.num_parameters, "total_size": layout.num_bytes}
    places = (*layout.places.items(), *layout.carried.items())
    weight_map = {key: names.weights[str(place.file)] for key, place in places}
    return json.dumps({"metadata": sizes, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def publish_adapter(hidden: HiddenFolder) -> None:
    """Make the files next to the (absent) weights, among them a complete adapter, the adapter of the folder.

    Full weights in the folder stay, for they may be a base; unless they are this adapter's base, `config.json` next to
    them, for which they would be taken as its base, is renamed.
    """
    with storage_errors("finish", hidden.folder):
        changed = _changed(hidden)
        aside = [] if _is_own_base(hidden) else _set_aside(hidden, (CONFIG,))
        switch(hidden.folder, hidden.path, [*changed, *aside])
    _warn_of(hidden.folder, aside)


def _weights_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if WEIGHTS_OF_A_SAVE.fullmatch(path.name)}


def _changed(hidden: HiddenFolder) -> list[Path]:
    """The files next to the weights that are new or differ, relative to the folder; all are synced.

    safetensors makes files that their owner alone can read, whatever the umask says.
    """
    readable = hidden.path.stat().st_mode & 0o666
    changed = []
    for name in map(Path, hidden.new_names()):
        file, other = hidden.new / name, hidden.folder / name
        file.chmod(file.stat().st_mode & 0o7777 | readable)
        sync(file)
        if not (other.is_file() and filecmp.cmp(file, other, shallow=False)):
            changed.append(name)
    return changed


def _set_aside(hidden: HiddenFolder, names: Iterable[str]) -> list[Path]:
    """Stage files that would be opened in place of what is saved, or with it, under names that nothing opens; these
    names, and their own, which then mean nothing."""
    present = [name for name in names if (hidden.folder / name).is_file()]
    for name in present:
        keep(hidden.folder / name, hidden.new / f"{name}.former")
    return [Path(each) for name in present for each in (f"{name}.former", name)]


def _warn_of(folder: Path, aside: Iterable[Path]) -> None:
    if renamed := [str(path) for path in aside if path.suffix != ".former"]:
        warn(
            f"{str(folder)!r} had another kind of model, whose {listed(renamed)} would be opened with what is saved "
            "there now. Renamed to *.former."
        )


def _remove_former(folder: Path, names: Iterable[str], threads: bool) -> None:
    """Remove weight files to which nothing leads any more; warn if that fails, for the save has succeeded.

    Side by side if it may be: freeing the pages and blocks of a large file takes the system a while.
    """

    def remove(name: str) -> None:
        (folder / name).unlink(missing_ok=True)

    try:
        with ThreadPoolExecutor() if threads else nullcontext() as pool:
            list(pool.map(remove, names) if pool else map(remove, names))
    except OSError as error:
        warn(
            f"{str(folder)!r} is saved, but weight files of an earlier save cannot be removed: {error}. They are not "
            "opened, but take space."
        )


def _is_own_base(hidden: HiddenFolder) -> bool:
    """Whether the base of the staged adapter is the model in the folder itself."""
    configs = sorted(hidden.new.rglob(ADAPTER_CONFIG), key=lambda path: len(path.parts))
    base = str(json.loads(configs[0].read_text("utf-8")).get("base_model_name_or_path") or "") if configs else ""
    return base != "" and Path(base).is_dir() and Path(base).samefile(hidden.folder)


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What one rank wrote, and the files of the checkpoint. `str()` gives a short table.

    Example:
        >>> report = save_pretrained(from_pretrained("checkpoint", load_kwargs={"progress": False}), "with-report")
        >>> isinstance(report, SaveReport), report.files
        (True, ('model.safetensors',))
    """

    folder: str
    """The folder of the checkpoint."""
    files: tuple[str, ...] = ()
    """Names of the weight files, in order; of a training state, of all files. Empty until a save in the background is
    done."""
    total_bytes: int = 0
    """Bytes of tensor data in all files; of a training state, of the files as they are."""
    bytes_written: int = 0
    """Bytes of tensor data that this rank wrote."""
    gathered_bytes: int = 0
    """The part of `total_bytes` that rank 0 gathered before writing, because it cannot be written shard by shard."""
    write_calls: int = 0
    """System calls of this rank that wrote data."""
    seconds: float = 0.0
    """Seconds from the call until the checkpoint was there for everyone, on this rank."""
    copied_bytes: int = 0
    """Bytes of host memory that the copy took from which this rank wrote in the background; 0 for a blocking save."""
    pause_seconds: float | None = None
    """Seconds from call to return of a save in the background; None for a blocking one, which returns at its end."""
    others: tuple[str, ...] = ()
    """Names of the other files of the checkpoint: config, index, tokenizer, model code."""
    commit_url: str = ""
    """Page of the commit on the hub; empty where nothing was uploaded."""
    requantized: Mapping[str, float] = field(default_factory=dict)
    """What `keep_stored_format` changed by quantising weights again, by the name of the plain weight: its norm over
    that of the merged weight. Weights that the adapter left as they were are not in it."""

    def to_json(self) -> str:
        """All fields as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def error_of_quantizing(self) -> str:
        """The errors of `requantized` in one line: mean and worst."""
        worst = max(self.requantized, key=self.requantized.__getitem__)
        mean = sum(self.requantized.values()) / len(self.requantized)
        return (
            f"{len(self.requantized)} weights, relative error {mean:.2%} on average, {self.requantized[worst]:.2%} in "
            f"{worst}"
        )

    def __str__(self) -> str:
        rows = [
            ("saved to", self.folder),
            ("files", f"{len(self.files) or 'being written'}, {show_bytes(self.total_bytes)}"),
        ]
        if self.files:
            rows.append(("this rank", f"{show_bytes(self.bytes_written)} in {self.seconds:.2f} s"))
        if self.pause_seconds is not None:
            rows.append(("pause", f"{self.pause_seconds:.2f} s, for a copy of {show_bytes(self.copied_bytes)}"))
        if self.requantized:
            rows.append(("quantised again", self.error_of_quantizing()))
        if self.commit_url:
            rows.append(("uploaded", self.commit_url))
        return "\n".join(table(rows))
