"""What only the tests of this package need of ranks; `hf_fsdp_tools.testing` launches them."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from hf_fsdp_tools import testing
from hf_fsdp_tools.testing import LIMIT_S, num_gpus, refusal_of_gpus, run_cases

__all__ = [
    "LIMIT_S", "fake_ranks", "free_port", "hide_gpus", "imitate_gpus", "named", "needs_gpus", "num_gpus", "run_alone",
    "run_cases", "run_ranks",
]  # fmt: skip

run_ranks = partial(testing.run_ranks, device=os.environ.get("RANKS_ON", "cpu"))
"""On CPUs, where a test asks for nothing else; all of a selection on GPUs: `RANKS_ON=cuda pytest tests/behaviour`."""

# The fork server imports these once; the Trainer alone, which imports pandas and datasets, takes 0.6 s. Where GPUs are,
# the second list is left to each rank: PEFT imports bitsandbytes, which looks for GPUs, and CUDA that found none finds
# none after a fork.
_PRELOAD = [
    *testing.PRELOAD,
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "mixtral", "gpt2", "bert", "t5")),
    "pytest",
]
_PRELOAD_WITHOUT_GPUS = ["peft", "tests._checkpoints", "tests._round_trip", "tests._training"]
_PRELOAD_WITHOUT_GPUS += ["trl.trainer.sft_trainer", "trl.trainer.dpo_trainer"]


def hide_gpus() -> None:
    """Let this process and its children see no GPU: what most tests expect is what happens on CPUs."""
    testing.hide_gpus()
    start_ranks_warm(True)


def start_ranks_warm(is_warm: bool) -> None:
    """Whether ranks are forked from a server that has trained already (`tests._warm`); before any is forked."""
    others = [] if num_gpus() else [*_PRELOAD_WITHOUT_GPUS, *(["tests._warm"] if is_warm else [])]
    multiprocessing.set_forkserver_preload(_PRELOAD + others)


def needs_gpus(ranks: int) -> list[pytest.MarkDecorator]:
    """The marks of a test of so many ranks on GPUs, which may share one."""
    refusal = refusal_of_gpus(ranks)
    return [pytest.mark.gpu, pytest.mark.skipif(bool(refusal), reason=refusal)]


def free_port(address: str) -> int:
    """A port for launchers that must be told one, below those that systems give unasked (from 32768)."""
    for port in range(20000 + os.getpid() * 7 % 12000, 32768):
        with socket.socket() as free, suppress(OSError):  # it is in use
            free.bind((address, port))
            return port
    raise OSError(f"no free port for {address}")


def fake_ranks(world_size: int = 8, rank: int = 0) -> None:
    """Let this process be one of so many ranks, of which the others only seem to be there, until the test ends."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def imitate_gpus(monkeypatch: Any, count: int, *, bf16: bool = True, memory: int | None = None) -> None:
    """Let the package see so many GPUs in this process, of which none can be used."""
    import torch

    from hf_fsdp_tools import accelerator

    monkeypatch.setattr(accelerator, "find_accelerator", lambda: torch.device("cuda") if count else None)
    monkeypatch.setattr(accelerator, "computes_bfloat16", lambda device: bf16)
    monkeypatch.setattr(accelerator, "device_bytes", lambda device: memory)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def named(*cases: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Cases for `run_cases`, under the names of their functions."""
    return {case.__name__: case for case in cases}


def run_alone(fn: Callable[..., Any], items: Sequence[Any], *args: Any, timeout_s: float = LIMIT_S) -> list[Any]:
    """`fn(item, *args)` of each item, in order: in processes that are alone in their world, two of them at a time."""
    halves = [items[0::2], items[1::2]]
    with ThreadPoolExecutor(2) as threads:
        run = partial(run_ranks, _each, 1, timeout_s=timeout_s)
        (even,), (odd,) = threads.map(lambda half: run(fn, half, args), halves)
    return [(odd if i % 2 else even)[i // 2] for i in range(len(items))]


def _each(fn: Callable[..., Any], items: Sequence[Any], args: tuple[Any, ...]) -> list[Any]:
    return [fn(item, *args) for item in items]
