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
import warnings
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

from hf_fsdp_tools.errors import frames_of_package, storage_errors
from hf_fsdp_tools.loading.io.durable import sync
from hf_fsdp_tools.loading.weight_files import CONFIG, WEIGHTS, WEIGHTS_INDEX
from hf_fsdp_tools.saving.draft import Draft
from hf_fsdp_tools.saving.switch import keep, switch
from hf_fsdp_tools.text import listed

ADAPTER_WEIGHTS = "adapter_model.safetensors"

ADAPTER_CONFIG = "adapter_config.json"

WEIGHTS_OF_A_SAVE = re.compile(r"model(\.[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Weight files and index of this package's saves and of transformers'."""


def _changed(draft: Draft) -> list[Path]:
    """The files beside the weights that are new or differ, relative to the folder; all are synced.

    safetensors makes files that their owner alone can read, whatever the umask says.
    """
    staged = sorted(path for path in draft.beside.rglob("*") if path.is_file())
    readable = draft.path.stat().st_mode & 0o666
    for file in staged:
        file.chmod(file.stat().st_mode & 0o7777 | readable)
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
    """
    folder, files = draft.folder, list(files)
    is_sharded = len(files) > 1
    last = WEIGHTS_INDEX if is_sharded else WEIGHTS
    with storage_errors("finish", folder):
        former = {path.name for path in folder.iterdir() if WEIGHTS_OF_A_SAVE.fullmatch(path.name)}
        marked = f"model.{draft.mark}" if former else "model"
        names = {file: file.replace("model", marked, 1) if is_sharded else file for file in files}
        changed = _changed(draft)
        if is_sharded:
            index = {"metadata": dict(metadata), "weight_map": {key: names[file] for key, file in weight_map.items()}}
            (draft.beside / last).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
            sync(draft.beside / last)
        else:
            os.replace(draft.path / last, draft.beside / last)
        aside = _set_aside(draft, (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin"))
        gone = [Path(name) for name in {WEIGHTS, WEIGHTS_INDEX} & former - {last}]
        try:
            for file, name in names.items() if is_sharded else ():
                os.replace(draft.path / file, folder / name)
            sync(folder)
            switch(folder, draft.path, [*changed, *aside, *gone, Path(last)])
        except BaseException:
            for name in set(names.values()) - former - {last}:
                with suppress(OSError):  # the error that led here is the one to show
                    (folder / name).unlink(missing_ok=True)
            raise
    _warn_of(folder, aside)
    _remove_former(folder, sorted(former - {*names.values(), last}), threads)
    return tuple(names.values())


def _set_aside(draft: Draft, names: Iterable[str]) -> list[Path]:
    """Stage files that would be opened in place of what is saved, or with it, under names that nothing opens; these
    names, and their own, which then mean nothing."""
    found = [name for name in names if (draft.folder / name).is_file()]
    for name in found:
        keep(draft.folder / name, draft.beside / f"{name}.former")
    return [Path(each) for name in found for each in (f"{name}.former", name)]


def _warn_of(folder: Path, aside: Collection[Path]) -> None:
    if found := [str(path) for path in aside if path.suffix != ".former"]:
        warnings.warn(
            f"{str(folder)!r} held another kind of model, whose {listed(found)} would be opened with what is saved "
            "there now. Renamed to *.former.",
            stacklevel=frames_of_package(),
        )


def _remove_former(folder: Path, names: Collection[str], threads: bool) -> None:
    """Remove weight files to which nothing leads any more; warn if that fails, for the save has succeeded.

    Side by side if it may be: freeing the pages and blocks of a large file takes the system a while.
    """

    def remove(name: str) -> None:
        (folder / name).unlink(missing_ok=True)

    try:
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

    Full weights in the folder stay, for they may be a base; unless they are this adapter's base, `config.json` beside
    them, for which they would be taken as its base, is renamed.
    """
    folder = draft.folder
    with storage_errors("finish", folder):
        changed = _changed(draft)
        aside = [] if _is_own_base(draft) else _set_aside(draft, (CONFIG,))
        switch(folder, draft.path, [*changed, *aside])
    _warn_of(folder, aside)


def _is_own_base(draft: Draft) -> bool:
    """Whether the base of the staged adapter is the model in the folder itself."""
    configs = sorted(draft.beside.rglob(ADAPTER_CONFIG), key=lambda path: len(path.parts))
    base = str(json.loads(configs[0].read_text("utf-8")).get("base_model_name_or_path") or "") if configs else ""
    return base != "" and Path(base).is_dir() and Path(base).samefile(draft.folder)
