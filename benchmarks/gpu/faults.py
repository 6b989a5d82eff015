"""A rank that is killed, stopped or out of memory, over this device's collectives: who says what, and after how long.

The last rank has the fault, in the middle of a call. What each other rank raises, or where it hangs, is kept, with what
NCCL's watchdog wrote to its stderr. Whether TRL's asynchronous trainers wait forever is tried too.
"""

import argparse
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.foreseeing.cases import SIZES
from benchmarks.gpu import ranks
from benchmarks.gpu.memory import case_of
from hf_fsdp_tools import from_pretrained, save_pretrained, wait_for_saves
from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.distributed.cpu_backend import set_timeout
from hf_fsdp_tools.distributed.mesh import local_device
from hf_fsdp_tools.testing import run_ranks

_COLLECTIVE_S = 15
"""Time limit of a collective, where torch's is 600 s."""
ROADS = ("load", "step", "save", "save in the background")
FAULTS = {"killed": 60, "out of memory": 75, "stopped": 120}
"""And how long ranks may take: a stopped rank is given up after a minute."""
_ASYNC = "ranks/test_online.py::test_async_trainers_"
TRL = {
    "AsyncGRPO and others on shards, 2 ranks": f"{_ASYNC}send_what_is_saved[2]",
    "AsyncGRPO and others on shards, 4 ranks": f"{_ASYNC}send_what_is_saved[4] -mnightly",
    "the same beside TRL alone, 2 ranks": f"{_ASYNC}train_as_trl_alone[2]",
}
"""TRL alone waits forever on the stand-in for the CUDA runtime."""
STEPS = {
    f"{road}, {fault}, {count} ranks": limit_s
    for count, faults in ((2, FAULTS), (4, {"killed": 60}))
    for fault, limit_s in faults.items()
    for road in ROADS
}
STEPS = {**{name: STEPS[name] for name in [*STEPS][:8]}, **dict.fromkeys(TRL, 100), **STEPS}
HEADS = ("rank 0 says", "after s", "others", "stderr")


def fail(fault: str) -> None:
    if fault == "out of memory":
        torch.empty(2**50, dtype=torch.uint8, device=local_device())
    os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)


def do(road: str, source: Path, out: Path, begin: Callable[[], None]) -> None:
    """The call of a user, in which the last rank begins to fail."""
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        left = [begin] if is_last else []

        def instead(*args: Any, **kwargs: Any) -> Any:
            if left:
                left.pop()()
            return function(*args, **kwargs)

        return instead

    with ExitStack() as stack:
        if road == "load":
            stack.enter_context(patch("os.preadv", once(os.preadv)))
        model: Any = from_pretrained(source, load_kwargs={"progress": False})
        if road == "step":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            layer = next(module for name, module in model.named_modules() if name.endswith("layers.1"))
            for step in range(4):
                if step == 2:
                    layer.register_forward_pre_hook(once(lambda *_: None))
                ids = torch.arange(3, 35, device=local_device())[None]
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            model.get_parameter("model.norm.weight").full_tensor().cpu()  # collectives return before they are done
        if road.startswith("save"):
            stack.enter_context(patch("os.pwritev", once(os.pwritev)))
            save_pretrained(model, out, blocking=road == "save")
            wait_for_saves()


def rank_of(road: str, fault: str, folder: Path, source: Path) -> None:
    """What this rank raises goes to a file, with the seconds since the fault; a function for `run_ranks`."""
    rank, begun = dist.get_rank(), folder / "begun"
    errors = os.open(folder / f"{rank}.stderr", os.O_CREAT | os.O_WRONLY)
    os.dup2(errors, 2)
    dist.barrier()  # NCCL connects
    pids = all_ranks(os.getpid())
    set_timeout(timedelta(seconds=_COLLECTIVE_S))

    def begin() -> None:
        time.sleep(1)  # so that it is known to be there
        begun.write_text(str(time.time()))
        fail(fault)

    said = "no error"
    try:
        do(road, source, folder / "out", begin)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    after_s = time.time() - float(begun.read_text()) if begun.exists() else 0.0
    (folder / f"{rank}.said").write_text(f"{after_s:.1f} {said}")
    time.sleep(5)  # for those that learn of it from this rank
    with suppress(ProcessLookupError):
        os.kill(pids[-1], signal.SIGKILL)
    os._exit(0)  # without a farewell to a group that is broken


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    if name in TRL:
        return ranks.tested(TRL[name], STEPS[name], options.device)
    road, fault, count = name.removesuffix(" ranks").rsplit(", ", 2)
    with tempfile.TemporaryDirectory() as place:
        folder, source = Path(place), Path(place, "model")
        with torch.device("cpu"):
            config = case_of("1B, 2 ranks", tiny=True).config(SIZES["tiny"])
            AutoModelForCausalLM.from_config(config).save_pretrained(source)
        ends = ""
        try:
            do_fail = partial(rank_of, road, fault, folder, source)
            run_ranks(do_fail, int(count), device=options.device, timeout_s=STEPS[name] - 10)
        except AssertionError as error:  # no rank returns
            ends = str(error)
        said = {rank: file.read_text() for rank in range(int(count)) if (file := folder / f"{rank}.said").exists()}
        heard = {rank: (folder / f"{rank}.stderr").read_text(errors="replace") for rank in range(int(count))}
    others = {rank: said.get(rank) or f"hung: {_where(ends, rank)}" for rank in range(int(count) - 1)}
    lines = [line[:300] for text in heard.values() for line in text.splitlines() if re.search("atchdog|NCCL", line)]
    return {"said": others, "ends": ends[-3000:], "stderr": lines[:20]}


def _where(ends: str, rank: int) -> str:
    """The innermost lines of a rank's main thread, which was killed, or how it ended."""
    text = ends.partition(f"--- rank {rank} ")[2].partition("--- rank")[0]
    of_main = next((part for part in text.split("\n\n") if "in rank_of" in part), "")
    frames = re.findall(r'File "[^"]*?([\w.]+)", line (\d+) in (\w+)', of_main)
    return " < ".join(f"{function} ({file}:{line})" for file, line, function in frames[:4]) or text[:100]


def foresee(name: str, *, tiny: bool) -> dict[str, Any]:
    return {}


def cells(row: dict[str, Any], foreseen: dict[str, Any]) -> list[str]:
    if "result" in row:
        return [row["result"], "", "; ".join(row["failures"])]
    first, *others = row["said"].values()
    seconds, _, words = first.partition(" ")
    unlike = [text[:80] for text in others if text.partition(" ")[2] != words]
    return [words[:200], seconds, "; ".join(unlike) or "alike" * bool(others), "; ".join(row["stderr"])[:200]]
