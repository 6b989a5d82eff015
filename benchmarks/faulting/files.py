"""Damaged and malicious files of checkpoints and of training states, and what opening them does."""

import io
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from hf_fsdp_tools import CheckpointError, ConfigError, from_pretrained
from tests._checkpoints import pickled_copy, stored_tensors
from tests._dist import run_ranks
from tests._training import arguments, new_accelerator

from .saves import digest_of_training, digest_of_values, quiet_trainer, train_and_save

__all__ = ["attack_code", "attack_files"]

Row = dict[str, Any]
Asked = Callable[[str], bool]
"""Whether a kind of folder is to be attacked."""

_LONGEST = 2000
"""Characters of a message that a person reads."""

_TOGETHER = 12
"""Damaged folders that one pair of ranks opens."""


class Runs:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


# ---- damage ----


def _flip(file: Path, draw: random.Random, among: int | None = None) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[draw.randrange(min(len(content), among or len(content)))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def _cut(file: Path, draw: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(max(len(content), 1))])


def _as_folder(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _link_to_nothing(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.symlink_to("nowhere")


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "removed": lambda file, draw: file.unlink(),
    "emptied": lambda file, draw: file.write_bytes(b""),
    "cut": _cut,
    "random bytes": lambda file, draw: file.write_bytes(draw.randbytes(file.stat().st_size)),
    "null": lambda file, draw: file.write_bytes(b"null"),
    "a list": lambda file, draw: file.write_bytes(b"[[]]"),
    "an object": lambda file, draw: file.write_bytes(b"{}"),
    "one bit of the first 1,000 bytes": lambda file, draw: _flip(file, draw, 1000),
    "one bit": _flip,
    "a folder": _as_folder,
    "a dangling link": _link_to_nothing,
}


# ---- opened by ranks ----


def open_weights(models: Path, folder: Path) -> str:
    """Load a checkpoint of any format."""
    model = from_pretrained(folder, accelerator=new_accelerator(), allow_pickle=True)
    return digest_of_values(model.named_parameters())


def resume_state(models: Path, folder: Path) -> str:
    """`load_state`."""
    accelerator = new_accelerator()
    model = from_pretrained(models / "a", accelerator=accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.load_state(folder)
    return f"{digest_of_training(model, optimizer)} {torch.rand(1).item()}"


def resume_trainer(models: Path, folder: Path) -> str:
    """`train(resume_from_checkpoint=…)` of a copy, for one more step."""
    trainer = quiet_trainer(models, arguments(folder.parent / "elsewhere", max_steps=3))
    trainer.train(resume_from_checkpoint=str(folder))
    return f"{digest_of_training(trainer.model, trainer.optimizer)} {torch.rand(1).item()}"


def look(open_it: Callable[[Path, Path], str], models: Path, folders: Sequence[Path]) -> list[tuple[str, str]]:
    """The kind of outcome and its text, for each folder."""
    seen = []
    for folder in folders:
        try:
            seen.append(("opened", open_it(models, folder)))
        except (CheckpointError, ConfigError) as error:
            seen.append(("refused", str(error)))
        except Exception as error:
            seen.append(("another error", f"{type(error).__name__}: {error}"))
        dist.barrier()
    return seen


# ---- the parent ----


def attack_files(models: Path, work: Path, draw: random.Random, is_asked: Asked) -> Iterator[Row]:
    """One row for each kind of folder: each of its files, damaged in every way."""
    for what, (good, open_it) in _targets(models, work).items():
        if not is_asked(what):
            continue
        files = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file())
        bad = {}
        for file in files:
            for name, damage in DAMAGES.items():
                copy = work / "damaged" / f"{len(bad)}" / good.name
                shutil.copytree(good, copy)
                damage(copy / file, draw)
                bad[copy] = f"{file}: {name}"
        yield _row("files", f"{what}, each file", good, bad, open_it, models)
        shutil.rmtree(work / "damaged")


def attack_code(models: Path, work: Path, is_asked: Asked) -> Iterator[Row]:
    """One row for each kind of folder: each of its files a pickle that runs code."""
    marker = work / "code ran"
    whole = io.BytesIO()
    torch.save(Runs(marker), whole)
    for what, (good, open_it) in _targets(models, work).items():
        if not is_asked(what):
            continue
        bad = {}
        for file in sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file()):
            for name, content in {"a pickle": pickle.dumps(Runs(marker)), "of torch.save": whole.getvalue()}.items():
                copy = work / "damaged" / f"{len(bad)}" / good.name
                shutil.copytree(good, copy)
                (copy / file).write_bytes(content)
                bad[copy] = f"{file}: {name}"
        row = _row("code", f"{what}, each file malicious", good, bad, open_it, models)
        row["outcomes"]["code ran"] = int(marker.exists())
        marker.unlink(missing_ok=True)
        yield row
        shutil.rmtree(work / "damaged")


def _targets(models: Path, work: Path) -> dict[str, tuple[Path, Callable[[Path, Path], str]]]:
    """The kinds of folders, undamaged, and how each is opened."""
    made = work / "targets"
    if not made.exists():
        run_ranks(train_and_save, 2, models, made)
        pickled_copy(models / "a", made / "bin", files=2)
        dcp.save(stored_tensors(models / "a"), checkpoint_id=made / "dcp", no_dist=True)
        shutil.copy(models / "a" / "config.json", made / "dcp")
    return {
        "safetensors": (models / "a", open_weights),
        "pytorch_model.bin": (made / "bin", open_weights),
        "DCP": (made / "dcp", open_weights),
        "state of Accelerate": (made / "state", resume_state),
        "checkpoint of the Trainer": (made / "out" / "checkpoint-2", resume_trainer),
    }


def _row(part: str, what: str, good: Path, bad: dict[Path, str], open_it: Any, models: Path) -> Row:
    """What both ranks made of each folder."""
    expected = run_ranks(look, 2, open_it, models, [good])[0][0]
    assert expected[0] == "opened", expected
    outcomes, worth_a_look = Counter[str](), {}
    folders = list(bad)
    for i in range(0, len(folders), _TOGETHER):
        for folder, outcome, text in _seen(open_it, models, folders[i : i + _TOGETHER], expected[1]):
            outcomes[outcome] += 1
            if outcome not in ("refused", "as before"):
                worth_a_look[bad[folder]] = [outcome, text]
    return {"part": part, "what": what, "tries": len(bad), "outcomes": dict(outcomes), "look at": worth_a_look}


def _seen(open_it: Any, models: Path, folders: Sequence[Path], expected: str) -> Iterator[tuple[Path, str, str]]:
    """Each folder's outcome and text; together, and one by one where some folder ends or stops the ranks."""
    try:
        by_rank = run_ranks(look, 2, open_it, models, folders, timeout_s=30 + 15 * len(folders))
    except AssertionError as error:
        if len(folders) == 1:
            yield folders[0], "no end or an abort", str(error)[-600:]
            return
        for folder in folders:
            yield from _seen(open_it, models, [folder], expected)
        return
    for folder, ((first, text), (second, other)) in zip(folders, zip(*by_rank, strict=True), strict=True):
        if "another error" in (first, second):
            yield folder, "another error", f"{text[:300]} / {other[:300]}"
        elif first != second or (first == "refused" and text != other):
            yield folder, "ranks differ", f"{text[:300]} / {other[:300]}"
        elif first == "refused" and len(text) > _LONGEST:
            yield folder, "another error", f"{len(text)} characters"
        else:
            yield folder, "refused" if first == "refused" else "as before" if text == expected else "other values", text
