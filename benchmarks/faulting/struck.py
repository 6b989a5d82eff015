"""Saves that are struck: killed or without power after a call, out of space, the folder gone."""

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests._dist import run_ranks

from .replay import crash_states
from .saves import ENDS, SAVES, Save, look_at, save_first, save_struck

Row = dict[str, Any]


def kills(models: Path, work: Path, tries: int, draw: random.Random, kinds: list[str]) -> Iterator[Row]:
    """One row per kind of save."""
    for kind in SAVES:
        if any(word in kind.name for word in kinds):
            folder = work / "kills"
            shutil.rmtree(folder, ignore_errors=True)
            older, old, now, new, _ = saved_twice(kind, models, folder)
            counts, outs = crash_states(older, now, folder / "notes", folder, tries)
            yield {"what": kind.name, **counts, "opened": len(outs), **looked(kind, models, outs, old, new)}


def in_background(models: Path, work: Path, tries: int, draw: random.Random, kinds: list[str]) -> Iterator[Row]:
    """One row per kind of save in the background and fault, and one for a script that ends."""
    for kind in [*(kind for kind in SAVES if "blocking" in kind.name), ENDS]:
        if any(word in kind.name for word in kinds):
            for fault in ("disk full", "removed folder") if kind is not ENDS else ("none",):
                folder = work / "background"
                shutil.rmtree(folder, ignore_errors=True)
                row = strike(kind, fault, models, folder, max(tries // 2, 1), draw)
                yield {"what": kind.name, "fault": fault, **row}


def saved_twice(kind: Save, models: Path, folder: Path) -> tuple[Path, str, Path, str, list[int]]:
    """A folder with the older save, its digest, one in which it was replaced, that digest, and each rank's calls."""
    older = folder / "older"
    older.mkdir(parents=True)
    old = run_ranks(save_first, 2, kind, models, older)[0]
    now = shutil.copytree(older, folder / "now").resolve()
    ended = run_ranks(save_struck, 2, kind, models, now, folder / "notes")
    return older, old, now, ended[0][0], [calls for _, calls in ended]


def strike(kind: Save, fault: str, models: Path, folder: Path, tries: int, draw: random.Random) -> Row:
    """Strike a save so many times; what was found. Without a fault, let it be as often."""
    older, old, _, new, calls = saved_twice(kind, models, folder)
    outs, ends, texts = [], Counter[str](), {}
    for i in range(tries):
        rank = draw.choice([rank for rank in (0, 0, 1) if calls[rank]])  # rank 0 does more
        at = 1 + (i * calls[rank] // tries + draw.randrange(max(calls[rank] // tries, 1))) % calls[rank]
        out = shutil.copytree(older, folder / f"try-{i}").resolve()
        struck = None if fault == "none" else (rank, {"disk full": "f", "removed folder": "r"}[fault], at)
        try:
            run_ranks(save_struck, 2, kind, models, out, folder / f"notes-{i}", struck)
            ends["the save was over"] += 1
        except AssertionError as error:
            ends[" and ".join(dict.fromkeys(ended_with(str(error), one) for one in (0, 1)))] += 1
            texts[out.name] = [struck, str(error)[-6000:]]
        outs.append(out)
    found = looked(kind, models, outs, old, new, removed=fault == "removed folder")
    return {"tries": tries, **found, "ended with": dict(ends), "texts": texts | found["texts"]}


def looked(kind: Save, models: Path, outs: list[Path], old: str, new: str, *, removed: bool = False) -> Row:
    """How often each folder was which save, and the hidden bytes that a further save leaves.

    Old or new, where every way to open the folder gives the same; "gone" where all of a removed folder give nothing;
    "lost" otherwise.
    """
    found, texts = Counter({"old": 0, "new": 0, "lost": 0}), {}
    looks = run_ranks(look_at, 2, kind, models, outs, timeout_s=60 + 30 * len(outs))[0]
    for out, (digests, _) in zip(outs, looks, strict=True):
        names = {{old: "old", new: "new"}.get(digest, "lost") for digest in digests}
        is_gone = removed and all(digest.startswith("error: ") for digest in digests)
        found["gone" if is_gone else names.pop() if len(names) == 1 else "lost"] += 1
        texts |= {} if is_gone or set(digests) <= {old, new} else {f"lost {out.name}": digests}
    return {"found": dict(found), "hidden bytes left": sum(left for _, left in looks), "texts": texts}


def ended_with(failure: str, rank: int) -> str:
    """The kind of error with which that rank ended, of the text about failed ranks."""
    text = failure.partition(f"--- rank {rank} ")[2].partition("--- rank ")[0]
    if not text or "was killed" in text.splitlines()[0]:
        return "waited until the end" if text else "ended well"
    last = [line for line in text.splitlines() if line and not line.startswith((" ", "Traceback"))]
    named = [line for line in last if line.split(":")[0].rpartition(".")[2].endswith(("Error", "Stop", "Elsewhere"))]
    return (named or last)[-1].split(":")[0].rpartition(".")[2]
