"""Saving in the background on real ranks: files with the values of the moment of the call, one save after the other,
one error on all ranks before the same step, and nothing lost when a process ends, dies or has no room."""

import itertools
import os
import re
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import (
    CheckpointError,
    RanksError,
    WrapPolicy,
    from_pretrained,
    save_pretrained,
    wait_for_saves,
)
from hf_fsdp_tools.saving import copies, publish
from hf_fsdp_tools.steps import make_wrap_plan
from tests._checkpoints import (
    full_state,
    loaded,
    make_checkpoint,
    make_model,
    no_space,
    randomize,
    refusal,
    stored_tensors,
)
from tests._dist import run_cases, run_ranks
from tests.api import all_ranks, available_bytes, patched, plain_view, wait_for_all_ranks, wrap_fsdp1
from tests.ranks.test_save import Doubled, with_conversion


class Gate:
    def __init__(self) -> None:
        self.opened = threading.Event()
        self.before: Callable[[], object] = lambda: None
        """Called in place of each write that is let through, before it."""
        self._write = os.pwritev

    def __call__(self, *args: Any) -> int:
        if threading.current_thread().name == "save":
            assert self.opened.wait(100), "nobody has opened the gate"
            self.before()
        return self._write(*args)


@contextmanager
def gated() -> Iterator[Gate]:
    gate = Gate()
    with patch.object(os, "pwritev", gate):
        try:
            yield gate
        finally:
            gate.opened.set()


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(1)


def files_in(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {re.sub(r"\.[0-9a-f]{8}-", "-", str(path.relative_to(folder))): path.read_bytes() for path in found}


def save_both_ways(model: Any, folder: Path, *, live: Any = None, **options: Any) -> None:
    """What is changed while it is being written is written as it was at the time of the call."""
    save_pretrained(model, folder / "at once", max_shard_size="60KB", **options)
    with gated() as gate:
        known = save_pretrained(model, folder / "later", max_shard_size="60KB", blocking=False, **options)
        change(live or model)
        assert not list((folder / "later").glob("*.safetensors")), "nobody sees what is not complete"
        gate.opened.set()
        report = wait_for_saves()
    assert report is not None and report.files and not known.files
    assert 0 < report.pause_seconds < report.seconds and report.copied_bytes >= report.bytes_written
    wait_for_all_ranks()
    assert files_in(folder / "later") == files_in(folder / "at once"), folder.name
    assert wait_for_saves() is None, "a report is given once"


def values_of_the_moment(source: Path, target: Path) -> None:
    save_both_ways(loaded("mixtral", source / "mixtral"), target / "experts one by one, cast", dtype=torch.bfloat16)
    whole = WrapPolicy(replicate=("model.norm.weight", "model.embed_tokens"))
    save_both_ways(from_pretrained(source / "llama", policy=whole), target / "whole parameters")
    offload = CPUOffloadPolicy(pin_memory=False)
    save_both_ways(from_pretrained(source / "llama", offload_policy=offload), target / "shards on the host")
    plain = randomize(LlamaForCausalLM(LlamaConfig.from_pretrained(source / "llama")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        live = wrap_fsdp1(plain, make_wrap_plan(plain))
        save_both_ways(plain_view(live), target / "FSDP1", live=live)


def values_that_are_gathered(source: Path, target: Path) -> None:
    plain = with_conversion(source / "llama", Doubled())
    model = loaded("llama", source / "llama")
    model._weight_conversions = plain._weight_conversions
    save_both_ways(model, target / "gathered")


def the_next_save_waits_and_so_does_a_load(source: Path, target: Path) -> None:
    """Three saves in the background, the last into the folder of the first, and a load from it."""
    model = loaded("llama", source / "llama")
    for name in ("first", "second", "first"):
        with gated() as gate:
            threading.Timer(0.2, gate.opened.set).start()
            save_pretrained(model, target / name, max_shard_size="60KB", blocking=False)
            change(model)
            if name == "second":
                assert (target / "first" / "config.json").exists(), "complete before the next one began"
            opened = from_pretrained(target / "first")
            change(opened)
            assert all(map(torch.equal, full_state(opened).values(), full_state(model).values())) == (name == "first")
    assert not list(target.rglob(".*"))


class WithAnother(torch.optim.SGD):
    """Its step has another optimizer's in it, as that of `Muon` has AdamW's."""

    def __init__(self, own: nn.Parameter, others: nn.Parameter) -> None:
        super().__init__([own], lr=1.0)
        self._other = torch.optim.SGD([others], lr=1.0)

    def step(self, closure: Any = None) -> None:
        super().step()
        self._other.step()


def fails_before_one_step(save: Callable[[], object], gate: Gate, match: str) -> None:
    """Ranks that are at very different steps when a save fails raise its error before the same one."""
    weight, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = WithAnother(weight, other)
    weight.grad, other.grad = torch.ones(1), torch.ones(1)
    save()
    with pytest.raises(CheckpointError, match=match) as caught:
        for step in itertools.count():
            if step == 4:
                gate.opened.set()
            optimizer.step()
            time.sleep(0.001 if dist.get_rank() == 0 else 0.02)
    steps = -weight.item()
    assert -other.item() == steps > 3, "the step that was to come has not begun"
    assert len(set(all_ranks((steps, str(caught.value))))) == 1
    assert wait_for_saves() is None, "an error is raised once"


def disk_full_on_one_rank(source: Path, target: Path) -> None:
    model = loaded("llama", source / "llama")
    save_pretrained(model, target, max_shard_size="60KB")
    before = files_in(target)
    with gated() as gate:
        gate.before = no_space if dist.get_rank() == 1 else lambda: None

        def save() -> None:
            save_pretrained(model, target, max_shard_size="60KB", blocking=False)
            change(model)

        fails_before_one_step(save, gate, r"failed on 1 of 2 ranks.*\n?.*rank 1: .*Cannot write .*No space left")
        assert files_in(target) == before, "the older checkpoint is there, and nothing else"
        for stop in (wait_for_saves, lambda: save_pretrained(model, target), lambda: from_pretrained(target)):
            save_pretrained(model, target, max_shard_size="60KB", blocking=False)
            with pytest.raises(CheckpointError, match="No space left"):
                stop()
    assert files_in(target) == before
    save_pretrained(model, target, max_shard_size="60KB", blocking=False)
    wait_for_saves()
    assert files_in(target).keys() == before.keys() and files_in(target) != before


def nobody_reads_what_rank_0_says(source: Path, target: Path) -> None:
    """It fails alone, after the save; the others do not wait for it, nor it for them."""
    model = loaded("llama", source / "llama")
    save_pretrained(model, target, blocking=False)
    wait_for_saves()
    closed = patched(_print=Mock(side_effect=BrokenPipeError("nobody reads")))
    with closed, pytest.raises((BrokenPipeError, CheckpointError), match="nobody reads"):
        save_pretrained(model, target, blocking=False)
        wait_for_saves()
    save_pretrained(model, target, blocking=False)
    assert wait_for_saves() is not None


def no_memory_for_the_copy(source: Path, target: Path) -> None:
    """One machine, so that the least that a rank sees is what all have together."""
    model = loaded("llama", source / "llama")
    save_pretrained(model, target, max_shard_size="60KB")
    before = files_in(target)
    share = available_bytes() if dist.get_rank() == 0 else 10_000
    with patched(available_bytes=lambda: share):
        text = refusal(lambda: save_pretrained(model, target, max_shard_size="60KB", blocking=False), CheckpointError)
    said = r"a copy: .* kB of host memory for the 2 ranks on .*, where 10.0 kB are available.* with blocking=True"
    assert re.search(said, text)
    wait_for_all_ranks()  # rank 0 removes what it has begun
    assert files_in(target) == before
    allocator = vars(torch) | {"empty": Mock(side_effect=RuntimeError("can't allocate memory"))}
    refused = patch.object(copies, "torch", SimpleNamespace(**allocator))
    with refused if dist.get_rank() == 1 else nullcontext(), pytest.raises(CheckpointError) as caught:
        save_pretrained(model, target, max_shard_size="60KB", blocking=False)
    wait_for_all_ranks()
    assert "can't allocate memory" in str(caught.value) and files_in(target) == before
    apart = patched(processes_in_sight=lambda: f"container {dist.get_rank()}")
    with apart, patched(available_bytes=lambda: 1.5 * sum(map(len, before.values())) / 2):
        save_pretrained(model, target, max_shard_size="60KB", blocking=False)  # of hosts of one name
    wait_for_saves()


def memory_of_the_copy_is_free_once_it_is_written(source: Path, target: Path) -> None:
    model, made = loaded("llama", source / "llama"), []
    host_copies = copies.host_copies

    def watched(*args: Any, **options: Any) -> list[torch.Tensor]:
        result = host_copies(*args, **options)
        made.extend(weakref.ref(copy.untyped_storage()) for copy in result)
        return result

    with patch.object(copies, "host_copies", watched):
        save_pretrained(model, target, blocking=False)
        wait_for_saves()
    assert made and all(alive() is None for alive in made)


CASES = (
    values_of_the_moment,
    the_next_save_waits_and_so_does_a_load,
    disk_full_on_one_rank,
    nobody_reads_what_rank_0_says,
    no_memory_for_the_copy,
    memory_of_the_copy_is_free_once_it_is_written,
    values_that_are_gathered,  # by a conversion that every llama has from then on
)


def each_in_its_folder(source: Path, root: Path) -> None:
    run_cases({case.__name__: lambda case=case: case(source, root / case.__name__) for case in CASES})  # type: ignore[misc]


def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    for kind in ("llama", "mixtral"):
        make_checkpoint(kind, tmp_path / "source" / kind)
    run_ranks(each_in_its_folder, 2, tmp_path / "source", tmp_path)


def wait_for_the_end_of_the_group() -> None:
    while dist.is_initialized():
        time.sleep(0.01)


def end_right_after(source: Path, target: Path) -> bool:
    gate = Gate()
    gate.opened.set()
    gate.before = wait_for_the_end_of_the_group
    os.pwritev = gate  # until the process ends
    publish.ThreadPoolExecutor = None  # the interpreter begins no thread while it ends
    save_pretrained(loaded("llama", source), target, max_shard_size="60KB", blocking=False)
    return any(target.glob("model.*-of-*"))


def test_a_script_that_ends_has_its_save_finished_without_its_process_group(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    make_model("llama", seed=5).save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert run_ranks(end_right_after, 2, source, tmp_path / "saved") == [False, False]
    saved = stored_tensors(tmp_path / "saved")
    assert all(torch.equal(saved[key], tensor) for key, tensor in stored_tensors(source).items())
    assert not list((tmp_path / "saved").glob(".*")), "nothing hidden is left"
    assert not list((tmp_path / "saved").glob("model-*")), "the earlier save is removed"


def die_while_it_is_written(source: Path, target: Path, out: Path) -> None:
    patched(_BEAT_S=0.2).__enter__()
    model = loaded("llama", source)
    save_pretrained(model, target)
    wait_for_all_ranks()
    with gated() as gate:
        if dist.get_rank() == 1:
            gate.before = lambda: os.kill(os.getpid(), signal.SIGKILL)
        change(model)
        save_pretrained(model, target, blocking=False)
        gate.opened.set()
        with pytest.raises(RanksError, match="rank 1 has ended"):
            wait_for_saves()
    out.write_text("told")


def test_a_rank_that_dies_ends_the_save_of_the_others(tmp_path: Path) -> None:
    source, target = make_checkpoint("llama", tmp_path / "source"), tmp_path / "saved"
    with pytest.raises(AssertionError, match=r"rank 1 (died with exit code -9|was killed)"):
        run_ranks(die_while_it_is_written, 2, source, target, tmp_path / "told")
    assert (tmp_path / "told").exists()
    saved = stored_tensors(target)
    assert all(torch.equal(saved[key], tensor) for key, tensor in stored_tensors(source).items())
    assert not list(target.glob(".*"))
