"""Damaged and malicious files of checkpoints and of training states, and what opening them does."""

import io
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

LONGEST, TOGETHER = 2000, 12
"""Characters of a message that a person reads; damaged folders that one pair of ranks opens."""


class Runs:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


# ---- damage ----


def flip(file: Path, draw: random.Random, among: int | None = None) -> None:
    content = bytearray(file.read_bytes())
    if content:
        content[draw.randrange(min(len(content), among or len(content)))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def cut(file: Path, draw: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: draw.randrange(max(len(content), 1))])


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "removed": lambda file, draw: file.unlink(),
    "emptied": lambda file, draw: file.write_bytes(b""),
    "cut": cut,
    "random bytes": lambda file, draw: file.write_bytes(draw.randbytes(file.stat().st_size)),
    "null": lambda file, draw: file.write_bytes(b"null"),
    "a list": lambda file, draw: file.write_bytes(b"[[]]"),
    "an object": lambda file, draw: file.write_bytes(b"{}"),
    "one bit of the first 1,000 bytes": lambda file, draw: flip(file, draw, 1000),
    "one bit": flip,
    "a folder": lambda file, draw: (file.unlink(), file.mkdir()),
    "a dangling link": lambda file, draw: (file.unlink(), file.symlink_to("nowhere")),
}


# ---- opened by ranks ----


def open_weights(models: Path, folder: Path) -> str:
    model = from_pretrained(folder, accelerator=new_accelerator(), allow_pickle=True)
    return digest_of_values(model.named_parameters())


def resume_state(models: Path, folder: Path) -> str:
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


def attack_files(models: Path, work: Path, tries: int, draw: random.Random, kinds: list[str]) -> Iterator[Any]:
    """One row for each kind of folder: each of its files, damaged in every way."""
    return attack(models, work, kinds, {name: partial(damage, draw=draw) for name, damage in DAMAGES.items()})


def attack_code(models: Path, work: Path, tries: int, draw: random.Random, kinds: list[str]) -> Iterator[Any]:
    """One row for each kind of folder: each of its files a pickle that runs code."""
    marker, by_torch = work / "code ran", io.BytesIO()
    torch.save(Runs(marker), by_torch)
    contents = {"a pickle": pickle.dumps(Runs(marker)), "of torch.save": by_torch.getvalue()}
    for row in attack(models, work, kinds, {name: partial(Path.write_bytes, data=c) for name, c in contents.items()}):
        yield row | {"code ran": int(marker.exists())}
        marker.unlink(missing_ok=True)


def attack(models: Path, work: Path, kinds: list[str], ways: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each kind of folder, with each of its files changed in each way."""
    for kind, (good, open_it) in targets(models, work).items():
        if not any(word in kind for word in kinds):
            continue
        bad = {}
        for file in sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file()):
            for name, change in ways.items():
                copy = work / "damaged" / f"{len(bad)}" / good.name
                shutil.copytree(good, copy)
                change(copy / file)
                bad[copy] = f"{file}: {name}"
        ((first, expected),), _ = run_ranks(look, 2, open_it, models, [good])
        assert first == "opened", expected
        found, texts, folders = Counter[str](), {}, list(bad)
        for i in range(0, len(folders), TOGETHER):
            for folder, outcome, text in opened(open_it, models, folders[i : i + TOGETHER], expected):
                found[outcome] += 1
                if outcome not in ("refused", "as before"):
                    texts[bad[folder]] = [outcome, text]
        yield {"what": kind, "tries": len(bad), "found": dict(found), "texts": texts}
        shutil.rmtree(work / "damaged")


def targets(models: Path, work: Path) -> dict[str, tuple[Path, Callable[[Path, Path], str]]]:
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


def opened(open_it: Any, models: Path, folders: Sequence[Path], expected: str) -> Iterator[tuple[Path, str, str]]:
    """Each folder's outcome and text; together, and one by one where some folder ends or stops the ranks."""
    try:
        by_rank = run_ranks(look, 2, open_it, models, folders, timeout_s=30 + 15 * len(folders))
    except AssertionError as error:
        if len(folders) == 1:
            yield folders[0], "no end or an abort", str(error)[-600:]
            return
        for folder in folders:
            yield from opened(open_it, models, [folder], expected)
        return
    for folder, ((first, text), (second, other)) in zip(folders, zip(*by_rank, strict=True), strict=True):
        both = f"{text[:300]} / {other[:300]}"
        if "another error" in (first, second) or (first == "refused" and len(text) > LONGEST):
            yield folder, "another error", both
        elif first != second or (first == "refused" and text != other):
            yield folder, "ranks differ", both
        elif first == "refused":
            yield folder, "refused", text
        else:
            yield folder, "as before" if text == expected else "other values", text
