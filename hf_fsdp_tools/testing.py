"""For whoever launches ranks in own tests: one function on several real ranks, which are processes over a file store,
with no ports and no launcher.

On the CPU (gloo) or, where a test asks for it, on GPUs (NCCL, with gloo next to it), rank r on GPU r mod n of n:

    from hf_fsdp_tools.testing import run_ranks

    def test_ranks_agree():
        assert run_ranks(torch.distributed.get_world_size, 2) == [2, 2]

Ranks are forked from one server that has imported torch and transformers, so that each further rank starts in about
0.1 s instead of 5: whoever needs more imports there calls `multiprocessing.set_forkserver_preload` before the first
launch.
"""

import faulthandler
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from hf_fsdp_tools.errors import ConfigError

__all__ = ["hide_gpus", "num_gpus", "refusal_of_gpus", "run_cases", "run_ranks"]

LIMIT_S = 500.0
"""How long ranks may take: less than pytest waits for a test, and several times what one busy core needs."""

_GRACE_S = 100.0  # how long the other ranks may go on after one has failed (assumed: enough to report their own error)

PRELOAD = ("hf_fsdp_tools.distributed.cpu_backend", "torch.distributed.fsdp", "transformers.modeling_utils")
"""What the server that forks ranks imports once."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(PRELOAD))

_deadline = float("inf")  # of this rank, on the clock of `time.monotonic`
_meetings = itertools.count()  # of this rank: as many on every rank

_HIDDEN = "GPUS_HIDDEN_FROM_TESTS"
"""A variable, so that workers of pytest-xdist know it too."""


def _gpus() -> tuple[int, str | None]:
    """How many this machine has, and CUDA_VISIBLE_DEVICES, as they were before `hide_gpus`."""
    import torch

    if _HIDDEN in os.environ:
        count, visible = json.loads(os.environ[_HIDDEN])
        return count, visible
    return torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")


def hide_gpus() -> None:
    """Let this process and its children see no GPU, but ranks with `device="cuda"`: as it is on any machine."""
    os.environ[_HIDDEN] = json.dumps(_gpus())
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Libraries that ask for GPUs while they are imported ask NVML: CUDA that found none finds none after a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def num_gpus() -> int:
    """How many GPUs this machine has for ranks with `device="cuda"`."""
    return _gpus()[0]


def refusal_of_gpus(ranks: int) -> str:
    """Why there cannot be so many ranks with `device="cuda"`; "" where there can: as many as GPUs, or any number where
    NCCL lets ranks share a GPU (2.30 or newer, NCCL_MULTI_RANK_GPU_ENABLE=1), for which they take few of its blocks."""
    from hf_fsdp_tools.distributed.mesh import sharing_problem

    if ranks <= (count := num_gpus()) or (count and not sharing_problem()):
        return ""
    return f"{ranks} rank(s) need GPUs; this machine shows {count}" + (f": {sharing_problem()}" if count else "")


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = LIMIT_S,
    fresh: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
) -> list[Any]:
    """Each rank's return value of `fn(*args)`, in rank order.

    `fn` is a module-level function, its arguments and result picklable, tensors on the CPU. Its default process group
    is up (gloo; with `device="cuda"` also NCCL, and the rank's GPU is the current device), RANK, LOCAL_RANK, WORLD_SIZE
    and LOCAL_WORLD_SIZE are set, and torch runs one thread. `fresh` ranks import everything anew (5 s), for what
    libraries read from the environment at import.

    Raises:
        AssertionError: A rank failed, died or took longer than `timeout_s`; it holds the traceback of every such rank.
        ConfigError: There are fewer GPUs than ranks with `device="cuda"`, and they cannot share one.
    """
    if device == "cuda" and (refusal := refusal_of_gpus(world_size)):
        raise ConfigError(refusal)
    visible = _gpus()[1] if device == "cuda" else ""
    # The rank unpickles it itself, once it sees its GPUs: importing the test's module may import bitsandbytes, which
    # looks for GPUs, and PyTorch counts them once.
    call = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        deadline = time.monotonic() + timeout_s
        context = multiprocessing.get_context("spawn") if fresh else _CONTEXT
        ranks: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(call, folder, rank, world_size, timeout_s, visible), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        _wait(ranks, deadline, Path(folder))
        failures = [_failure(Path(folder), rank, process, timeout_s) for rank, process in enumerate(ranks)]
        if any(failures):
            raise AssertionError("\n".join(filter(None, failures)))
        import torch

        files = [Path(folder, f"{rank}.result") for rank in range(world_size)]
        return [torch.load(file, "cpu", weights_only=False) for file in files]


def run_cases(cases: Iterable[Callable[..., Any]] | Mapping[str, Callable[..., Any]], *args: Any) -> dict[str, Any]:
    """What each case returned, by name; every case is run on every rank. Itself a function for `run_ranks`.

    A case that fails does not stop the others: all that failed are reported, by name. All ranks meet after each case,
    and those after a case from which a rank does not come back are not begun. What a case sets in the environment, and
    Accelerate's state, end with it.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    named = cases if isinstance(cases, Mapping) else {case.__name__.replace("_", " "): case for case in cases}
    store, rank, world_size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, case in named.items():
        try:
            with patch.dict(os.environ):
                results[name] = case(*args)
        except BaseException:  # `pytest.raises` that sees nothing raised fails with one that is no Exception
            failed[name] = traceback.format_exc()
        forget_accelerate()
        meeting = f"after case {next(_meetings)}"
        store.set(f"{meeting} {rank}", "here")
        try:
            others = [f"{meeting} {other}" for other in range(world_size)]
            store.wait(others, timedelta(seconds=min(200.0, max(_deadline - time.monotonic() - _GRACE_S, 1.0))))
        except RuntimeError:  # a FileStore raises no DistStoreError when the time is over
            failed[name] = failed.get(name, "") + "Another rank has not come back from it; no further case was begun.\n"
            break
    if failed:
        said = "".join(f"--- case {name!r}:\n{what}\n" for name, what in failed.items())
        raise AssertionError(f"{len(failed)} of {len(named)} cases failed\n{said}")
    return results


def forget_accelerate() -> None:
    """The next Accelerator is made as in a new process; it would share its state with the last one."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def _wait(ranks: list[BaseProcess], deadline: float, folder: Path) -> None:
    """Return when all have ended; kill what is left at the deadline, or a little after the first failure."""
    alive = ranks
    while alive and (left_s := deadline - time.monotonic()) > 0:
        connection.wait([process.sentinel for process in alive], left_s)
        alive = [process for process in alive if process.is_alive()]
        if any(process.exitcode not in (None, 0) for process in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    stuck = {folder / f"{rank}.stack": process for rank, process in enumerate(ranks) if process.is_alive()}
    for process in stuck.values():
        os.kill(process.pid or 0, signal.SIGUSR1)  # it writes down where it is
    before, written = None, [0 for _ in stuck]
    end_s = time.monotonic() + 10
    while (before != written or 0 in written) and time.monotonic() < end_s and stuck:
        time.sleep(0.5)
        before, written = written, [file.stat().st_size if file.exists() else 0 for file in stuck]
    for process in stuck.values():
        process.kill()
    for process in ranks:
        process.join()


def _failure(folder: Path, rank: int, process: BaseProcess, timeout_s: float) -> str:
    """What to say about a rank that did not return; empty for one that did."""
    if (folder / f"{rank}.result").exists() and process.exitcode == 0:
        return ""
    error = folder / f"{rank}.error"
    if error.exists():
        return f"--- rank {rank} raised:\n{error.read_text()}"
    stack = folder / f"{rank}.stack"
    where = stack.read_text() if stack.exists() else ""
    if process.exitcode in (-signal.SIGKILL, -signal.SIGUSR1):
        return f"--- rank {rank} was killed: still running at {timeout_s} s, or after another rank failed\n{where}"
    return f"--- rank {rank} died with exit code {process.exitcode}\n{where}"


def _rank_main(call: bytes, folder: str, rank: int, world_size: int, timeout_s: float, visible: str | None) -> None:
    """The life of one rank: group up, call (a pickled function and its arguments), result or traceback to a file, group
    down."""
    global _deadline
    _deadline = time.monotonic() + timeout_s
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    os.environ["CUDA_VISIBLE_DEVICES"] = visible or ""  # before the first call to CUDA, which reads it
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    import torch
    import torch.distributed as dist

    from hf_fsdp_tools.distributed.cpu_backend import add_cpu_backend

    torch.set_num_threads(1)
    with open(Path(folder, f"{rank}.stack"), "w") as stack:
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR1, stack)  # where a stuck rank is stuck
        try:
            store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]  # not in torch's list
            patience = timedelta(seconds=timeout_s + 30)  # the parent's timeout comes first and says more
            if visible != "":
                if world_size > (count := torch.cuda.device_count()):
                    os.environ |= {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
                torch.cuda.set_device(rank % count)
            fn, args = pickle.loads(call)
            gc.freeze()  # `gc.collect()`, which a Trainer calls often, need not look through imports: 0.2 s each time
            backend = "cpu:gloo,cuda:nccl" if visible != "" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
            add_cpu_backend()
            result = fn(*args)
            dist.barrier()  # nobody leaves while another still talks to it
            torch.save(result, Path(folder, f"{rank}.result"))
            dist.destroy_process_group()
        except BaseException:
            Path(folder, f"{rank}.error").write_text(traceback.format_exc())
            os._exit(1)  # not sys.exit: threads of a half-finished collective would keep the process alive
