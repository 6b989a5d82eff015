"""Saves and ranks that are struck: killed or without power after a call, out of space, killed or stopped meanwhile."""

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import from_pretrained, save_pretrained
from tests._dist import free_port, run_ranks
from tests._training import arguments, new_accelerator

from .replay import crash_states
from .saves import ENDS, SAVES, Save, look_at, quiet_trainer, save_first, save_struck

LIMIT_S = 150.0
"""How long ranks may go on: a stopped process is to be given up after a minute."""

Row = dict[str, Any]
Again = Callable[[], object]


# ---- saves ----


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


# ---- ranks, which do the same again and again ----


def loading(models: Path, out: Path) -> Again:
    return lambda: from_pretrained(models / "a", accelerator=new_accelerator())


def preparing(models: Path, out: Path) -> Again:
    def prepare() -> None:
        model = AutoModelForCausalLM.from_pretrained(models / "a")
        new_accelerator().prepare(model, torch.optim.AdamW(model.parameters()))

    return prepare


def saving_a_model(models: Path, out: Path) -> Again:
    model = from_pretrained(models / "a", accelerator=new_accelerator())
    return lambda: save_pretrained(model, out, max_shard_size="60KB")


def saving_a_state(models: Path, out: Path) -> Again:
    accelerator = new_accelerator()
    model = from_pretrained(models / "a", accelerator=accelerator)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return lambda: accelerator.save_state(out)


def training_and_saving(models: Path, out: Path) -> Again:
    args = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 3}
    return lambda: quiet_trainer(models, arguments(out, **args)).train()


JOBS = (loading, preparing, saving_a_model, saving_a_state, training_and_saving)


def go_on_until(job: Any, models: Path, out: Path, port: int, struck: int, sent: int, seconds: float) -> None:
    """Do a job again and again; the struck rank is struck meanwhile, and the other notes how it ended.

    The store is kept by rank 0, as where `srun` starts a script.
    """
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(os.environ["RANK"]), world_size=2)
    again = job(models, out / "out")
    again()
    dist.barrier()

    def strike() -> None:
        note(out / "struck", "")
        os.kill(os.getpid(), sent)

    if dist.get_rank() == struck:
        threading.Timer(seconds, strike).start()
    try:
        while True:
            again()
    except BaseException as error:
        note(out / "ended", f"{type(error).__name__}: {str(error)[:300]}")
        raise


def note(file: Path, text: str) -> None:
    file.write_text(json.dumps([time.time(), text]))


def stopped(models: Path, work: Path, tries: int, draw: random.Random, kinds: list[str]) -> Iterator[Row]:
    """One row for each job and signal: what the other rank ended with, and how long it went on at most."""
    for job in JOBS:
        name = job.__name__.replace("_", " ")
        if not any(word in name for word in kinds):
            continue
        for sent in (signal.SIGKILL, signal.SIGSTOP):
            ends, texts, longest_s = Counter[str](), Counter[str](), 0.0
            for _ in range(tries // 4):
                out = work / "stopped"
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
                struck, port = draw.randrange(2), free_port("127.0.0.1")
                run = partial(run_ranks, go_on_until, 2, job, models, out, port, struck, sent, draw.uniform(0, 1.5))
                try:
                    run(timeout_s=LIMIT_S)
                except AssertionError as error:
                    ended_s, text = LIMIT_S, f"waited until it was killed: {error}"
                    since_s, _ = json.loads((out / "struck").read_text())
                    if (out / "ended").exists():
                        ended_s, text = json.loads((out / "ended").read_text())
                        longest_s = max(longest_s, ended_s - since_s)
                    ends[text.partition(":")[0]] += 1
                    texts[text] += 1
            row = {"what": name, "signal": sent.name, "tries": tries // 4, "longest_s": round(longest_s, 1)}
            yield row | {"ended with": dict(ends), "texts": dict(texts)}
