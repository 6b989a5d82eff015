"""The files of a save become visible together: made in a hidden folder, synced, and switched to by one rename.

While a save runs, its files lie in a hidden folder within the folder to save to, so that whatever fails or is killed
leaves the checkpoint that is there as it is. Then, on rank 0:

    1. shards get names that no save before had: nothing that opens the folder looks at them yet
    2. the files beside the weights replace those that differ, `config.json` last
    3. one call switches: the index (or `model.safetensors`) gets its name, or, where shards follow a single file, which
       is opened first, that file goes
    4. the former weight files are removed

Weights come last, so that whoever sees them sees all that belongs to them. A config that differs from the former one
would for a moment stand beside the former weights. It therefore first names its weights (`transformers_weights`, which
transformers 5 and this package follow), so that its rename switches both; when the weights have their usual names,
it is replaced by one that names none.

Every file is synced before it is renamed, and the folder before and after the switch, so that a machine that goes down
leaves the former or the new checkpoint.
"""

import filecmp
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Self

from hf_fsdp_tools.checkpoint.draft import Draft
from hf_fsdp_tools.checkpoint.durable import storage_errors, sync
from hf_fsdp_tools.checkpoint.index import WEIGHTS, WEIGHTS_INDEX
from hf_fsdp_tools.checkpoint.unfinished import CONFIG
from hf_fsdp_tools.errors import frames_of_package
from hf_fsdp_tools.text import listed

__all__ = ["ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "WEIGHTS_OF_A_SAVE", "publish_adapter", "publish_weights"]

ADAPTER_WEIGHTS = "adapter_model.safetensors"

ADAPTER_CONFIG = "adapter_config.json"

_TWIN = "twin"
"""Second name of the index (or of the single weight file) in the hidden folder."""

WEIGHTS_OF_A_SAVE = re.compile(r"model(\.[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Weight files and index of this package's saves and of transformers'."""


class _Renames:
    """Renames that are undone if one of them, or what else the block does, fails."""

    def __init__(self, draft: Draft) -> None:
        self._kept = draft.path / "former"
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        self._kept.mkdir()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for undo in reversed(self._undo if kind is not None else ()):
            with suppress(OSError):  # the error that led here is the one to show
                undo()

    def replace(self, source: Path, target: Path) -> None:
        """Give a file its name; the name never lacks a file."""
        if target.is_file():
            kept = self._kept / str(len(self._undo))
            try:
                os.link(target, kept, follow_symlinks=False)
            except OSError:  # not everywhere
                shutil.copy2(target, kept, follow_symlinks=False)
            os.replace(source, target)
            self._undo.append(partial(os.replace, kept, target))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)
            self._undo.append(target.unlink)

    def take_away(self, target: Path, to: Path | None = None) -> None:
        """Let a name have no file; the file goes `to` there, or into the hidden folder, which is removed."""
        kept = to or self._kept / str(len(self._undo))
        os.replace(target, kept)
        self._undo.append(partial(os.replace, kept, target))

    def set_aside(self, targets: Iterable[Path]) -> None:
        """Rename files that would be opened in place of what is saved, or with it, to names that nothing opens."""
        found = [target for target in targets if target.is_file()]
        for target in found:
            self.take_away(target, target.with_name(f"{target.name}.former"))
        if found:
            warnings.warn(
                f"{str(found[0].parent)!r} held another kind of model, whose {listed(path.name for path in found)} "
                "would be opened with what is saved there now. Renamed to *.former.",
                stacklevel=frames_of_package(),
            )


def _changed(draft: Draft) -> list[Path]:
    """The files beside the weights that are new or differ, relative to the folder; all are synced."""
    staged = sorted(path for path in draft.beside.rglob("*") if path.is_file())
    for file in staged:
        sync(file)
    names = [path.relative_to(draft.beside) for path in staged]
    return [name for name in names if not _is_same(draft.beside / name, draft.folder / name)]


def _is_same(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def publish_weights(
    draft: Draft,
    files: Iterable[str],
    weight_map: Mapping[str, str],
    metadata: Mapping[str, int],
    *,
    threads: bool,
) -> tuple[str, ...]:
    """Make complete weight files and all that lies beside them the checkpoint of the folder; their names there.

    Names of shards are those that transformers gives. Where the folder holds weights of an earlier save, the mark of
    this save is part of the names (`model.1b0f5e9a-00001-of-00006.safetensors`), so that whoever has read an index
    never opens files of another save. Of an adapter that lies there, which transformers would put on the new weights,
    the files are renamed.

    Args:
        draft: with complete files, which are synced.
        files: names of the weight files; one, or shards.
        weight_map: stored key to file.
        metadata: of the index.
        threads: whether threads may be begun, which the interpreter refuses while it ends; to free the files of an
            earlier save side by side.

    Raises:
        CheckpointError: the folder cannot be written, or is gone; what was saved there before is as it was.
    """
    folder, files = draft.folder, list(files)
    is_sharded = len(files) > 1
    last = WEIGHTS_INDEX if is_sharded else WEIGHTS
    with storage_errors("finish", folder), _Renames(draft) as renames:
        former = {path.name for path in folder.iterdir() if WEIGHTS_OF_A_SAVE.fullmatch(path.name)}
        marked = f"model.{draft.mark}" if former else "model"
        names = {file: file.replace("model", marked, 1) if is_sharded else file for file in files}
        if is_sharded:
            index = {"metadata": dict(metadata), "weight_map": {key: names[file] for key, file in weight_map.items()}}
            (draft.path / last).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
            sync(draft.path / last)
        beside = _changed(draft)
        unseen = dict(names) if is_sharded else {}
        is_shadowed = is_sharded and (folder / WEIGHTS).is_file()  # a single file is opened first
        if is_shadowed:
            unseen[last] = last
        names_weights = bool(former) and CONFIG in map(str, beside) and _stage_bridge(draft, last)
        if names_weights:
            unseen[_TWIN] = last.replace("model", marked, 1)
        for file, name in unseen.items():
            renames.replace(draft.path / file, folder / name)
        sync(folder)
        renames.set_aside(folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin"))
        for path in sorted(beside, key=lambda path: str(path) == CONFIG):
            is_bridge = names_weights and str(path) == CONFIG
            renames.replace((draft.path if is_bridge else draft.beside) / path, folder / path)
        if is_shadowed:
            renames.take_away(folder / WEIGHTS)
        elif names_weights:
            renames.replace(draft.path / last, folder / last)
        else:
            os.replace(draft.path / last, folder / last)
        if names_weights:
            os.replace(draft.beside / CONFIG, folder / CONFIG)
    kept = {*names.values(), last}
    _remove_former(folder, sorted({*former, *unseen.values()} - kept), threads)
    return tuple(names.values())


def _stage_bridge(draft: Draft, last: str) -> bool:
    """Stage the config once more, with the name of its weights in it, and these weights under that name.

    Whether it could be done, and is of use: there is a former config, and the file system has hard links.
    """
    config, twin = json.loads((draft.beside / CONFIG).read_text("utf-8")), draft.path / _TWIN
    try:
        os.link(draft.path / last, twin)
    except OSError:
        return False
    config["transformers_weights"] = last.replace("model", f"model.{draft.mark}", 1)
    (draft.path / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")
    sync(draft.path / CONFIG)
    return (draft.folder / CONFIG).is_file()


def _remove_former(folder: Path, names: Collection[str], threads: bool) -> None:
    """Remove weight files to which nothing leads any more; warn if that fails, for the save has succeeded.

    Side by side if it may be: freeing the pages and blocks of a large file takes the system a while.
    """

    def remove(name: str) -> None:
        (folder / name).unlink(missing_ok=True)

    try:
        sync(folder)
        if WEIGHTS_INDEX in names:
            remove(WEIGHTS_INDEX)
        with ThreadPoolExecutor() if threads else nullcontext() as pool:
            list(pool.map(remove, names) if pool else map(remove, names))
    except OSError as error:
        warnings.warn(
            f"{str(folder)!r} is saved, but weight files of an earlier save cannot be removed: {error}. They are not "
            "opened, but take space.",
            stacklevel=2,
        )


def publish_adapter(draft: Draft) -> None:
    """Make the files beside the (absent) weights, among them a complete adapter, the adapter of the folder.

    The weights' rename switches, where `adapter_config.json` stays the same. Where it changes, it is taken away before
    and comes last, so that for a moment the folder holds no adapter, and never one with the config of another. Full
    weights in the folder stay, for they may be a base; unless they are this adapter's base, `config.json` beside them,
    for which they would be taken as its base, is renamed.

    Raises:
        CheckpointError: the folder cannot be written, or is gone; what was saved there before is as it was.
    """
    folder = draft.folder
    with storage_errors("finish", folder), _Renames(draft) as renames:
        changed = _changed(draft)
        sync(folder)
        configs = [path for path in changed if path.name == ADAPTER_CONFIG]
        weights = [path for path in changed if path.name == ADAPTER_WEIGHTS]
        for path in changed:
            if path not in (*configs, *weights):
                renames.replace(draft.beside / path, folder / path)
        if not _is_own_base(draft):
            renames.set_aside([folder / CONFIG])
        for path in configs:
            if (folder / path).is_file():
                renames.take_away(folder / path)
        for path in (*weights, *configs):
            renames.replace(draft.beside / path, folder / path)
    sync(folder)


def _is_own_base(draft: Draft) -> bool:
    """Whether the base of the staged adapter is the model in the folder itself."""
    configs = sorted(draft.beside.rglob(ADAPTER_CONFIG), key=lambda path: len(path.parts))
    base = str(json.loads(configs[0].read_text("utf-8")).get("base_model_name_or_path") or "") if configs else ""
    return base != "" and Path(base).is_dir() and Path(base).samefile(draft.folder)
