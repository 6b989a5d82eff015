"""A rank that is killed or stopped while the ranks load, prepare and save; what the other rank does then."""

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

from .saves import quiet_trainer

__all__ = ["ROADS", "stop"]

_LIMIT_S = 150.0
"""How long ranks may go on: a stopped process is to be given up after a minute."""

Again = Callable[[], object]


# ---- what the ranks do again and again ----


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
    def train() -> None:
        args = arguments(out, save_strategy="steps", save_steps=1, save_total_limit=2, max_steps=3)
        quiet_trainer(models, args).train()

    return train


ROADS = {
    road.__name__.replace("_", " "): road
    for road in (loading, preparing, saving_a_model, saving_a_state, training_and_saving)
}


# ---- run by ranks ----


def go_on_until(road: str, models: Path, out: Path, port: int, struck: int, sent: int, seconds: float) -> None:
    """Take a road again and again; the struck rank is struck meanwhile, and the other notes how it ended.

    The store is kept by rank 0, as where `srun` starts a script.
    """
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(os.environ["RANK"]), world_size=2)
    again = ROADS[road](models, out / "out")
    again()
    dist.barrier()
    if dist.get_rank() == struck:
        strike_after(seconds, sent, lambda: note(out / "struck", ""))
    try:
        while True:
            again()
    except BaseException as error:
        note(out / "ended", f"{type(error).__name__}: {str(error)[:300]}")
        raise


def strike_after(seconds: float, sent: int, before: Callable[[], None]) -> None:
    """Send this process a signal after a while, whatever it is doing then."""

    def strike() -> None:
        before()
        os.kill(os.getpid(), sent)

    timer = threading.Timer(seconds, strike)
    timer.daemon = True
    timer.start()


def note(file: Path, text: str) -> None:
    file.write_text(json.dumps([time.time(), text]))


# ---- the parent ----


def stop(road: str, models: Path, work: Path, tries: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    """One row for each signal: what the other rank ended with, and how long it went on at most."""
    for sent in (signal.SIGKILL, signal.SIGSTOP):
        ends, texts, longest_s = Counter[str](), Counter[str](), 0.0
        for _ in range(tries):
            out = work / "stopped"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            struck = draw.randrange(2)
            port = free_port("127.0.0.1")
            run = partial(run_ranks, go_on_until, 2, road, models, out, port, struck, sent, draw.uniform(0, 1.5))
            try:
                run(timeout_s=_LIMIT_S)
            except AssertionError as error:
                since_s, _ = json.loads((out / "struck").read_text())
                if not (out / "ended").exists():
                    ends["waited until it was killed"] += 1
                    texts[str(error)] += 1
                    continue
                ended_s, text = json.loads((out / "ended").read_text())
                ends[text.partition(":")[0]] += 1
                texts[text] += 1
                longest_s = max(longest_s, ended_s - since_s)
        yield {
            "part": "stopped", "what": road, "signal": sent.name, "tries": tries, "other rank": dict(ends),
            "longest_s": longest_s, "texts": dict(texts),
        }  # fmt: skip
