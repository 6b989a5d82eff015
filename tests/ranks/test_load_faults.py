"""A load that fails ends on every rank with the same error, and what it leaves cannot be used by mistake."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_fsdp_tools import CheckpointError, save_pretrained
from hf_fsdp_tools.distributed import storage
from hf_fsdp_tools.steps import build_meta_model, load_weights, make_wrap_plan
from tests._checkpoints import full_state, refusal, sharded_meta_model
from tests._dist import run_cases, run_ranks
from tests.api import all_ranks, load_weights_fsdp1, wrap_fsdp1


@pytest.fixture
def llama(folders: dict[str, Path]) -> Path:
    return folders["llama"]


def sharded(folder: Path) -> PreTrainedModel:
    return sharded_meta_model("llama", folder)


def copy(folder: Path, name: str, change: Callable[[Path], object]) -> Path:
    target = folder.parent / name
    if dist.get_rank() == 0:
        change(Path(shutil.copytree(folder, target)))
    dist.barrier()
    return target


@contextmanager
def preadv(replacement: Callable[..., int], rank: int) -> Iterator[None]:
    with patch("os.preadv", replacement if dist.get_rank() == rank else os.preadv):
        yield


def is_untouched(model: nn.Module) -> bool:
    return all(p.is_meta for p in model.parameters())


def broken(*_: Any) -> int:
    raise OSError(5, "Input/output error")


def file_that_shrinks_under_the_reader(folder: Path) -> None:
    model = sharded(folder)
    shrinking = copy(folder, "shrinking", lambda f: None)
    calls: list[int] = []
    real = os.preadv

    def shrink(descriptor: int, buffers: list[memoryview], position: int) -> int:
        calls.append(position)
        if len(calls) == 1:  # a part of what is asked for, and then nothing is left
            os.truncate(os.readlink(f"/proc/self/fd/{descriptor}"), position + 8)
        return real(descriptor, buffers, position)

    with preadv(shrink, rank=1):
        message = refusal(lambda: load_weights(model, shrinking))
    assert "shrank since its header was read" in message and "rank 1" in message
    assert dist.get_rank() == 0 or len(calls) > 1
    assert is_untouched(model)


def memory_that_is_exhausted_on_one_rank(folder: Path) -> None:
    """A failure that is no CheckpointError stays what it is on its rank; the others are told."""
    model = sharded(folder)

    def exhausted(*_: Any) -> int:
        raise MemoryError("no memory")

    with preadv(exhausted, rank=1), pytest.raises((MemoryError, CheckpointError)) as caught:
        load_weights(model, folder)
    kinds = all_ranks((type(caught.value).__name__, str(caught.value)))
    assert kinds[1][0] == "MemoryError" and kinds[0][0] == "CheckpointError" and "rank 1: MemoryError" in kinds[0][1]
    assert is_untouched(model)
    with pytest.raises(RuntimeError, match="materialized from meta device"):
        model(torch.ones(1, 3, dtype=torch.long))  # FSDP2 does not recover from a pass that it refused


def another_try(folder: Path) -> None:
    """After a load that failed, loading works; over weights that were there, a failed load leaves NaN, not a
    mixture."""
    model = sharded(folder)
    with preadv(broken, rank=1):
        message = refusal(lambda: load_weights(model, folder))
    assert "Reading the checkpoint (the model is on meta again, as it was) failed on 1 of 2 ranks" in message
    assert "rank 1: " in message and "Input/output error" in message
    assert is_untouched(model)
    assert "on meta" in refusal(lambda: save_pretrained(model, folder.parent / "saved"))
    assert not list(folder.parent.glob("saved/*.safetensors"))
    load_weights(model, folder)
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(t, expected[key]) for key, t in full_state(model).items())
    model(torch.ones(1, 3, dtype=torch.long))
    with preadv(broken, rank=1):
        message = refusal(lambda: load_weights(model, folder))
    assert "weights that had storage are partly overwritten, so they were filled with NaN" in message
    assert all(p.to_local().isnan().all() for p in model.parameters())
    load_weights(model, folder)
    assert all(torch.equal(t, expected[key]) for key, t in full_state(model).items())


def wait_for_storage(folder: Path) -> None:
    """Rank 1's storage does not answer in the middle of reading until it is named there; then loading goes on."""
    real_preadv, named = os.preadv, threading.Event()
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    last = sorted(folder.glob("*.safetensors"))[-1]

    def stuck(descriptor: int, *rest: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(last):
            assert named.wait(60)
        return real_preadv(descriptor, *rest)

    def warn(text: str, **_: Any) -> None:
        if f"{last}: no answer at byte" in text:  # other files may be slow, too
            named.set()

    model = sharded(folder)
    while storage._watcher.is_alive():  # that of an earlier load warns as late as it did there
        time.sleep(0.01)
    soon = {"_WARN_S": 0.2, "_POLL_S": 0.02} if dist.get_rank() == 1 else {"_POLL_S": 0.02}
    with preadv(stuck, rank=1), patch.multiple(storage, **soon), patch.object(storage, "warn", warn):
        load_weights(model, folder)
    assert named.is_set() == (dist.get_rank() == 1)
    assert all(torch.equal(t, expected[key]) for key, t in full_state(model).items())


def fail_under_fsdp1(folder: Path) -> None:
    """Flat parameters have storage before they are loaded, and other tensors refer to it: it becomes NaN."""
    model = build_meta_model(folder)
    wrapped = wrap_fsdp1(model, make_wrap_plan(model), initialize=False)
    with preadv(broken, rank=1):
        message = refusal(lambda: load_weights_fsdp1(wrapped, folder))
    assert "filled with NaN" in message and "rank 1: " in message
    assert all(p.isnan().all() for p in wrapped.parameters())
    load_weights_fsdp1(wrapped, folder)
    assert all(p.isfinite().all() for p in wrapped.parameters())


FAILURES = (
    file_that_shrinks_under_the_reader,
    memory_that_is_exhausted_on_one_rank,
    another_try,
    wait_for_storage,
    fail_under_fsdp1,
)


def test_every_failure_is_the_same_on_all_ranks_and_leaves_no_half_model(llama: Path, tmp_path: Path) -> None:
    run_ranks(run_cases, 2, FAILURES, Path(shutil.copytree(llama, tmp_path / "llama")))
