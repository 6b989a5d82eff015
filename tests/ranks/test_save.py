"""What a save writes, at once and in the background: the bytes of plain save_pretrained, of the moment of the call, in
bounded memory, and what plain from_pretrained gets back; `test_saves.py` has what fails."""

import gc
import itertools
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

from hf_fsdp_tools import CheckpointError, WrapPolicy, from_pretrained, save_pretrained, wait_for_saves
from hf_fsdp_tools.saving import target as places
from hf_fsdp_tools.steps import load_weights, make_wrap_plan
from tests import api
from tests._checkpoints import (
    KINDS,
    assert_same_model,
    assert_same_tensors,
    loaded,
    make_checkpoint,
    make_model,
    no_space,
    plain_model,
    randomize,
    refusal,
    sharded_meta_model,
    stored_tensors,
    word_tokenizer,
)
from tests._dist import run_cases, run_ranks
from tests._round_trip import differences, loads_as_stored
from tests.ranks.test_load import last_even_dim


def assert_same_checkpoint(kind: str, saved: Path, original: Path) -> None:
    """Same keys, dtypes, shapes and configs as plain save_pretrained wrote; the same model to plain from_pretrained."""
    assert differences(saved, original) == [], kind
    model, wrong = loads_as_stored(type(make_model(kind)), saved)
    assert_same_model(model, plain_model(kind, original))
    assert wrong == "", kind


def load_and_save(
    kinds: list[str], folders: dict[str, Path], root: Path
) -> list[tuple[api.LoadReport, api.SaveReport]]:
    reports = []
    for kind in kinds:
        model = sharded_meta_model(kind, folders[kind])
        loaded = load_weights(model, folders[kind])
        assert_same_model(model, plain_model(kind, folders[kind]), kind)
        assert not loaded.missing_keys and not loaded.unexpected_keys and not loaded.converted_bytes, str(loaded)
        saved = save_pretrained(model, root / kind, max_shard_size="60KB", processing_class=word_tokenizer())
        reports.append((loaded, saved))
    return reports


@pytest.mark.parametrize("kinds", [["tied", "deepseek_v3"], pytest.param(list(KINDS), marks=pytest.mark.nightly)])
def test_every_kind_is_loaded_and_saved_as_it_was(kinds: list[str], folders: dict[str, Path], tmp_path: Path) -> None:
    """On 3 ranks, of which some hold nothing of a tensor."""
    per_rank = run_ranks(load_and_save, 3, kinds, folders, tmp_path)
    for kind, of_ranks in zip(kinds, zip(*per_rank, strict=True), strict=True):
        loads, reports = zip(*of_ranks, strict=True)
        stored = api.CheckpointIndex.open(folders[kind]).num_bytes
        assert all(load.read_ratio <= 1.01 for load in loads), kind
        assert stored <= sum(load.share_bytes for load in loads) <= 1.05 * stored, "each its share"
        assert_same_checkpoint(kind, tmp_path / kind, folders[kind])
        assert (tmp_path / kind / "tokenizer.json").exists()
        assert sum(r.bytes_written for r in reports) == json.loads(reports[0].to_json())["total_bytes"]
        assert all(0 < r.bytes_written < r.total_bytes for r in reports), kind  # no rank wrote it all
        assert not reports[0].gathered_bytes, kind


def save_otherwise(folders: dict[str, Path], root: Path) -> list[api.SaveReport]:
    """HSDP, other shard dimensions, and fp32 master weights saved in the dtype they came from."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = loaded("mixtral", folders["mixtral"], mesh=mesh)
    reports = [save_pretrained(model, root / "hsdp", max_shard_size="60KB")]
    with api.patched(_MIN_PART_BYTES=64):  # else all are so small that one replica writes them alone
        reports.append(save_pretrained(model, root / "hsdp, cut", max_shard_size="60KB"))
    for kind in ("mixtral", "gpt2"):
        model = loaded(kind, folders[kind], shard_placement_fn=last_even_dim)
        reports.append(save_pretrained(model, root / f"columns {kind}", max_shard_size="60KB"))
    model = sharded_meta_model("mixtral", folders["bf16"])
    load_weights(model, folders["bf16"], dtype=torch.float32)
    save_pretrained(model, root / "bf16", dtype=torch.bfloat16, staging_bytes=2**15, max_shard_size="60KB")
    return reports


def test_other_placements_and_dtypes(folders: dict[str, Path], tmp_path: Path) -> None:
    folders = folders | {"bf16": make_checkpoint("mixtral", tmp_path / "original", dtype=torch.bfloat16)}
    per_rank = run_ranks(save_otherwise, 4, folders, tmp_path)
    for name in ("hsdp", "hsdp, cut"):
        found, expected = (
            {path.name: path.read_bytes() for path in (tmp_path / each).glob("*.safetensors")}
            for each in (name, "columns mixtral")
        )
        assert found == expected, "to the bit the files that ranks without replicas write"
    for kind in ("mixtral", "gpt2"):
        assert_same_checkpoint(kind, tmp_path / f"columns {kind}", folders[kind])
    assert_same_checkpoint("mixtral", tmp_path / "bf16", folders["bf16"])
    for i in range(2):
        assert all(rank[i].bytes_written > 0 for rank in per_rank), "both replicas write"
        assert sum(rank[i].bytes_written for rank in per_rank) == per_rank[0][i].total_bytes, "each byte once"
    first, second = (sum(rank[1].bytes_written for rank in part) for part in (per_rank[:2], per_rank[2:]))
    assert abs(first - second) < 0.1 * (first + second), "about as much each"


class Doubled(ConversionOps):
    """A conversion that computes: what is stored is half of what the model has."""

    factor = 2.0

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, Any]:
        return {target_patterns[0]: next(iter(input_dict.values()))[0] * self.factor}

    @property
    def reverse_op(self) -> ConversionOps:
        reverse = Doubled()
        reverse.factor = 1 / self.factor
        return reverse


def with_conversion(folder: Path, operation: ConversionOps) -> LlamaForCausalLM:
    """Llama's down projections are stored by a conversion, of every llama of this process from now on."""
    converter = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", operations=[operation])
    register_checkpoint_conversion_mapping("llama", [converter], overwrite=True)
    return LlamaForCausalLM.from_pretrained(folder)


def save_what_cannot_be_written_in_place(folder: Path, tmp: Path) -> list[tuple[int, int]]:
    """A conversion that computes, and one whose runs in the file are two bytes long; FSDP2, then FSDP1."""
    found = []
    for name, operation in (("doubled", Doubled()), ("transposed", Transpose(0, 1))):
        plain = with_conversion(folder, operation)
        if dist.get_rank() == 0:
            plain.save_pretrained(tmp / f"{name} theirs")
        model = sharded_meta_model("llama", folder)
        model._weight_conversions = plain._weight_conversions
        load = load_weights(model, folder)
        with patch.object(DTensor, "full_tensor", None):  # no rank but the first may hold a whole tensor
            report = save_pretrained(model, tmp / f"{name} ours", staging_bytes=2**12)
        found.append((load.converted_bytes, report.gathered_bytes))
        save_both_ways(model, tmp / name)
        save_pretrained(api.plain_view(as_fsdp1(plain)), tmp / f"{name} flat", staging_bytes=2**12)
    return found


def as_fsdp1(plain: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return api.wrap_fsdp1(plain, make_wrap_plan(plain))


def test_what_cannot_be_written_in_place_is_gathered_by_one_rank(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 4}
    randomize(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))).save_pretrained(tmp_path / "stored")
    down = 2 * 96 * 96 * 4
    for found in run_ranks(save_what_cannot_be_written_in_place, 2, tmp_path / "stored", tmp_path):
        assert found[0] == (down, down) and found[1][1] == down
    for name in ("doubled", "transposed"):
        for way in ("ours", "flat"):
            assert_same_tensors(stored_tensors(tmp_path / f"{name} {way}"), stored_tensors(tmp_path / f"{name} theirs"))


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


def bytes_alive() -> int:
    """Of all tensors that Python knows."""
    gc.collect()
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor}
    return sum(storage.nbytes() for storage in storages.values())


def save_both_ways(model: Any, folder: Path, *, live: Any = None, **options: Any) -> None:
    """What is changed while it is being written is written as it was at the time of the call."""
    save_pretrained(model, folder / "at once", max_shard_size="60KB", **options)
    before = bytes_alive()
    with gated() as gate:
        known = save_pretrained(model, folder / "later", max_shard_size="60KB", blocking=False, **options)
        copied = bytes_alive() - before
        change(live or model)
        assert not list((folder / "later").glob("*.safetensors")), "nobody sees what is not complete"
        gate.opened.set()
        report = wait_for_saves()
    assert report is not None and report.files and not known.files
    assert 0 < report.pause_seconds < report.seconds and report.copied_bytes >= report.bytes_written
    assert bytes_alive() - before < copied / 2, "the memory of the copy is free once it is written"
    api.wait_for_all_ranks()
    assert files_in(folder / "later") == files_in(folder / "at once"), folder.name
    assert wait_for_saves() is None, "a report is given once"


def values_of_the_moment(source: Path, target: Path) -> None:
    save_both_ways(loaded("mixtral", source / "mixtral"), target / "experts one by one, cast", dtype=torch.bfloat16)
    whole = WrapPolicy(replicate=("model.norm.weight", "model.embed_tokens"))
    save_both_ways(from_pretrained(source / "llama", policy=whole), target / "whole parameters")
    offload = CPUOffloadPolicy(pin_memory=False)
    save_both_ways(from_pretrained(source / "llama", offload_policy=offload), target / "shards on the host")
    live = as_fsdp1(randomize(LlamaForCausalLM(LlamaConfig.from_pretrained(source / "llama"))))
    save_both_ways(api.plain_view(live), target / "FSDP1", live=live)


class WithAnother(torch.optim.SGD):
    """Its step has another optimizer's in it, as that of `Muon` has AdamW's."""

    def __init__(self, own: nn.Parameter, others: nn.Parameter) -> None:
        super().__init__([own], lr=1.0)
        self._other = torch.optim.SGD([others], lr=1.0)

    def step(self, closure: Any = None) -> None:
        super().step()
        self._other.step()


def disk_full_on_one_rank(source: Path, target: Path) -> None:
    """Ranks that are at very different steps when a save fails raise its error before the same one."""
    model = loaded("llama", source / "llama")
    weight, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = WithAnother(weight, other)
    weight.grad, other.grad = torch.ones(1), torch.ones(1)
    with gated() as gate:
        gate.before = no_space if dist.get_rank() == 1 else lambda: None
        save = partial(save_pretrained, model, target, blocking=False)
        save()
        said = r"failed on 1 of 2 ranks.*\n?.*rank 1: .*Cannot write .*No space left"
        with pytest.raises(CheckpointError, match=said) as caught:
            for step in itertools.count():
                if step == 4:
                    gate.opened.set()
                optimizer.step()
                time.sleep(0.001 if dist.get_rank() == 0 else 0.02)
        steps = -weight.item()
        assert -other.item() == steps > 3, "the step that was to come has not begun"
        assert len(set(api.all_ranks((steps, str(caught.value))))) == 1
        assert wait_for_saves() is None, "an error is raised once"
        for stop in (wait_for_saves, partial(save_pretrained, model, target), partial(from_pretrained, target)):
            save()
            with pytest.raises(CheckpointError, match="No space left"):
                stop()


def nobody_reads_what_rank_0_says(source: Path, target: Path) -> None:
    """It fails alone, after the save; the others do not wait for it, nor it for them."""
    model = loaded("llama", source / "llama")
    closed = patch("tqdm.auto.tqdm.write", side_effect=BrokenPipeError("nobody reads"))
    with closed, pytest.raises((BrokenPipeError, CheckpointError), match="nobody reads"):
        save_pretrained(model, target, blocking=False)
        wait_for_saves()
    save_pretrained(model, target, blocking=False)
    assert wait_for_saves() is not None


def no_memory_for_the_copy(source: Path, target: Path) -> None:
    """One machine, so that the least that a rank sees is what all have together."""
    model = loaded("llama", source / "llama")
    share = 10**9 if dist.get_rank() == 0 else 10_000
    with api.patched(available_bytes=lambda: share):
        text = refusal(partial(save_pretrained, model, target, max_shard_size="60KB", blocking=False), CheckpointError)
        said = r"a copy: .* kB of host memory for the 2 ranks on .*, where 10.0 kB are available.* with blocking=True"
        assert re.search(said, text)
    api.wait_for_all_ranks()
    assert not target.exists()


CASES = (values_of_the_moment, disk_full_on_one_rank, nobody_reads_what_rank_0_says, no_memory_for_the_copy)


def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    for kind in ("llama", "mixtral"):
        make_checkpoint(kind, tmp_path / "source" / kind)
    run_ranks(
        run_cases, 2, {case.__name__: partial(case, tmp_path / "source", tmp_path / case.__name__) for case in CASES}
    )


def end_right_after(source: Path, target: Path) -> bool:
    def wait_for_the_end_of_the_group() -> None:
        while dist.is_initialized():
            time.sleep(0.01)

    gate = os.pwritev = Gate()  # until the process ends
    gate.opened.set()
    gate.before = wait_for_the_end_of_the_group
    places.ThreadPoolExecutor = None  # the interpreter begins no thread while it ends
    save_pretrained(loaded("llama", source), target, max_shard_size="60KB", blocking=False)
    return any(target.glob("model.*-of-*"))


def test_a_script_that_ends_has_its_save_finished_without_its_process_group(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "source")
    make_model("llama", seed=5).save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert run_ranks(end_right_after, 2, source, tmp_path / "saved") == [False, False]
    assert_same_tensors(stored_tensors(tmp_path / "saved"), stored_tensors(source))
    assert not list((tmp_path / "saved").glob(".*")), "nothing hidden is left"
