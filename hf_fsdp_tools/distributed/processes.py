"""Run one function on several processes of this machine, of which this one is rank 0; or on the ranks of a launcher."""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

from hf_fsdp_tools.distributed.memory import available_bytes
from hf_fsdp_tools.errors import FSDPToolsError, RanksError

T = TypeVar("T")

_MOST = 8
"""Processes that are started unasked: more share the same disk. (assumed)"""

_BYTES_EACH = 4 * 10**9
"""Bytes for which one more process is worth the seconds that it takes to start. (assumed)"""

_MEMORY_EACH = 2 * 2**30
"""Bytes of memory that must be free for each process: torch, transformers and PEFT take 0.6 GB. (assumed)"""

_KILLED = signal.SIGUSR1
"""The signal that interrupts rank 0 when a process was killed: SIGINT is ignored in background jobs of a shell."""

_POLL_S = 0.01
"""Between two looks for processes that start."""

_END_S = 10.0
"""How long processes may take to end after their work. (assumed)"""


def num_processes_for(num_bytes: int) -> int:
    """How many processes of this machine to use for so many bytes: at most 8, one for each core, for each 4 GB, and for
    each 2 GiB of free memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = available_bytes()
    room = _MOST if memory is None else memory // _MEMORY_EACH
    return max(1, min(_MOST, cores, 1 + num_bytes // _BYTES_EACH, room))


@contextmanager
def launched_ranks() -> Iterator[tuple[int, int] | None]:
    """Have the process group of the ranks that a launcher has started: (this rank, their number); None, and no group,
    where there is no launcher.
    """
    import torch.distributed as dist

    from hf_fsdp_tools.distributed.launcher import check_started
    from hf_fsdp_tools.distributed.mesh import ensure_process_group

    if not check_started(os.environ):
        yield None
        return
    ensure_process_group("cpu")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def run_on_processes(function: Callable[[], T], size: int) -> T:
    """This process's result of a function that runs on `size` processes, which have a process group (gloo).

    This process is rank 0. An interrupt (Ctrl-C) reaches it alone, and it ends the others.
    """
    if size == 1:
        return function()
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported

    from hf_fsdp_tools.distributed.cpu_backend import one_gloo_thread

    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = [
        context.Process(target=_work, args=(function, rank, size, store.port), daemon=True) for rank in range(1, size)
    ]
    killed: list[str] = []
    over, interrupting = threading.Event(), threading.Lock()
    at_once = False
    before = signal.signal(_KILLED, signal.default_int_handler)
    with _as_rank(0, size):
        try:
            for process in processes:
                process.start()
            threading.Thread(target=_watch, args=(processes, killed, over, interrupting), daemon=True).start()
            while not store.check([f"started/{rank}" for rank in range(1, size)]):
                time.sleep(_POLL_S)  # here, and not within the start of a group, which no signal interrupts
            with one_gloo_thread():
                dist.init_process_group("gloo", store=store, rank=0, world_size=size)
            try:
                return function()
            finally:
                with interrupting:  # an interrupt that is under way comes first, and none afterwards
                    over.set()
                dist.destroy_process_group()
        except (KeyboardInterrupt, RanksError):
            at_once = True  # all other errors end the processes, too
            if killed:
                raise RanksError(killed[0]) from None
            raise
        finally:
            over.set()
            _end(processes, at_once=at_once)
            signal.signal(_KILLED, before)


def _work(function: Callable[[], object], rank: int, size: int, port: int) -> None:
    """The life of a process that was started: it says nothing of errors that rank 0 shows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it gives its semaphores back
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported

    from hf_fsdp_tools.distributed.cpu_backend import one_gloo_thread

    with _as_rank(rank, size):
        store = TCPStore("127.0.0.1", port, size, is_master=False)
        store.set(f"started/{rank}", "")
        with one_gloo_thread():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        try:
            with suppress(FSDPToolsError):
                function()
        except Exception:
            traceback.print_exc()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself, and would say that it was interrupted
        dist.destroy_process_group()


@contextmanager
def _as_rank(rank: int, size: int) -> Iterator[None]:
    """Tell this process what a launcher would, and let it use its share of the cores."""
    import torch

    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    told: Mapping[str, str] = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
    }
    before = {name: os.environ.get(name) for name in told}
    threads = torch.get_num_threads()
    os.environ.update(told)
    torch.set_num_threads(max(1, threads // size))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _watch(
    processes: list[BaseProcess], killed: list[str], over: threading.Event, interrupting: threading.Lock
) -> None:
    """Interrupt the main thread when a process is killed, for rank 0 may be at work for long."""
    while not over.is_set():
        wait([process.sentinel for process in processes if process.is_alive()] or [], timeout=0.5)
        any_lives = any(process.is_alive() for process in processes)  # asked first: one may be killed meanwhile
        for rank, process in enumerate(processes, 1):
            if process.exitcode not in (None, 0) and not over.is_set():
                killed.append(
                    f"Process {rank} of {len(processes) + 1} was ended ({_how(process.exitcode)}). Nothing was "
                    "changed. If the system ended it for want of memory, use fewer processes."
                )
                with interrupting:
                    if not over.is_set():
                        # A signal: an error raised here would wait until the main thread has slept or read enough.
                        signal.pthread_kill(threading.main_thread().ident or 0, _KILLED)
                return
        if not any_lives:
            return


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _end(processes: list[BaseProcess], *, at_once: bool) -> None:
    """Wait for processes to end, unless they are to end at once, and end those that do not."""
    started = [process for process in processes if process.pid is not None]
    for wait_s, end in ((0.0 if at_once else _END_S, BaseProcess.terminate), (_END_S, BaseProcess.kill)):
        end_s = time.monotonic() + wait_s
        for process in started:
            process.join(max(0.0, end_s - time.monotonic()))
        for process in started:
            if process.is_alive():
                end(process)
    for process in started:
        process.join()


def _end_with_parent() -> None:
    """End this process when the one that started it has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
