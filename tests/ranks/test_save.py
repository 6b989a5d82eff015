"""Saving on real ranks: the files are what plain save_pretrained writes, and plain from_pretrained gets every bit
back."""

import errno
import json
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

from hf_fsdp_tools import CheckpointError, save_pretrained, wait_for_saves
from hf_fsdp_tools.saving import hidden_folder, save
from hf_fsdp_tools.steps import build_meta_model, load_weights, make_wrap_plan
from tests._checkpoints import (
    KINDS,
    assert_same_model,
    full_state,
    loaded,
    make_checkpoint,
    make_model,
    no_space,
    plain_model,
    randomize,
    sharded_meta_model,
    stored_tensors,
)
from tests._dist import run_cases, run_ranks
from tests._round_trip import differences, loads_as_stored
from tests.api import (
    CheckpointIndex,
    LoadReport,
    Rounds,
    SaveReport,
    TransferStats,
    patched,
    plain_view,
    wrap_fsdp1,
    write_transfers,
)
from tests.ranks.test_load import last_even_dim


def assert_same_checkpoint(kind: str, saved: Path, original: Path) -> None:
    """Same keys, dtypes, shapes and configs as plain save_pretrained wrote; the same model to plain from_pretrained."""
    assert differences(saved, original) == [], kind
    model, wrong = loads_as_stored(type(make_model(kind)), saved)
    assert_same_model(model, plain_model(kind, original))
    assert wrong == "", kind


def load_and_save(kinds: list[str], folders: dict[str, Path], root: Path) -> list[tuple[LoadReport, SaveReport]]:
    reports = []
    for kind in kinds:
        model = sharded_meta_model(kind, folders[kind])
        loaded = load_weights(model, folders[kind])
        assert_same_model(model, plain_model(kind, folders[kind]), kind)
        assert not loaded.missing_keys and not loaded.unexpected_keys and not loaded.converted_bytes, str(loaded)
        reports.append((loaded, save_pretrained(model, root / kind, max_shard_size="60KB")))
    return reports


@pytest.mark.parametrize("kinds", [["tied", "deepseek_v3"], pytest.param(list(KINDS), marks=pytest.mark.nightly)])
def test_every_kind_is_loaded_and_saved_as_it_was(kinds: list[str], folders: dict[str, Path], tmp_path: Path) -> None:
    """On 3 ranks, of which some hold nothing of a tensor; `test_round_trip.py` has more kinds, on 2."""
    per_rank = run_ranks(load_and_save, 3, kinds, folders, tmp_path)
    for kind, of_ranks in zip(kinds, zip(*per_rank, strict=True), strict=True):
        loads, reports = zip(*of_ranks, strict=True)
        stored = CheckpointIndex.open(folders[kind]).num_bytes
        assert all(load.read_ratio <= 1.01 for load in loads), kind
        assert stored <= sum(load.share_bytes for load in loads) <= 1.05 * stored, "each its share"
        assert_same_checkpoint(kind, tmp_path / kind, folders[kind])
        assert sum(r.bytes_written for r in reports) == reports[0].total_bytes
        assert all(0 < r.bytes_written < r.total_bytes for r in reports), kind  # no rank wrote it all
        assert not reports[0].gathered_bytes, kind
        assert {p.name for p in (tmp_path / kind).iterdir() if p.name.startswith(".")} == set()


def save_otherwise(folders: dict[str, Path], root: Path) -> list[SaveReport]:
    """HSDP, other shard dimensions, and fp32 master weights saved in the dtype they came from."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = loaded("mixtral", folders["mixtral"], mesh=mesh)
    reports = [save_pretrained(model, root / "hsdp", max_shard_size="60KB")]
    with patched(_MIN_PART_BYTES=64):  # else all are so small that one replica writes them alone
        reports.append(save_pretrained(model, root / "hsdp, cut", max_shard_size="60KB"))
        save_pretrained(model, root / "hsdp, later", max_shard_size="60KB", blocking=False)
        later = wait_for_saves()
        assert later is not None and later.bytes_written == reports[-1].bytes_written
    broken = patch.object(os, "pwritev", no_space) if dist.get_rank() == 3 else nullcontext()
    with broken, pytest.raises(CheckpointError, match=r"rank 3: .*Cannot write .*No space left"):
        save_pretrained(model, root / "hsdp", max_shard_size="60KB")
    for kind in ("mixtral", "gpt2"):
        model = loaded(kind, folders[kind], shard_placement_fn=last_even_dim)
        reports.append(save_pretrained(model, root / f"columns {kind}", max_shard_size="60KB"))
    model = sharded_meta_model("mixtral", folders["bf16"])
    load_weights(model, folders["bf16"], dtype=torch.float32)
    staged = []

    def counted(*args: Any, **kwargs: Any) -> TransferStats:
        stats = write_transfers(*args, **kwargs)
        staged.append(stats.staging_bytes)
        return stats

    with patch.object(save, "write_transfers", counted):
        bound = {"staging_bytes": 2**15, "max_shard_size": "60KB"}
        reports.append(save_pretrained(model, root / "bf16", dtype=torch.bfloat16, **bound))
    assert 0 < max(staged) <= 2**15, "a cast takes no more memory than it was given"
    return reports


def test_other_placements_and_dtypes(folders: dict[str, Path], tmp_path: Path) -> None:
    folders = folders | {"bf16": make_checkpoint("mixtral", tmp_path / "original", dtype=torch.bfloat16)}
    per_rank = run_ranks(save_otherwise, 4, folders, tmp_path)
    for name in ("hsdp", "hsdp, cut", "hsdp, later"):
        assert_same_checkpoint("mixtral", tmp_path / name, folders["mixtral"])
        files = {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors")}
        alone = {path.name: path.read_bytes() for path in (tmp_path / "columns mixtral").glob("*.safetensors")}
        assert files == alone, "to the bit the files that ranks without replicas write"
    for kind in ("mixtral", "gpt2"):
        assert_same_checkpoint(kind, tmp_path / f"columns {kind}", folders[kind])
    assert_same_checkpoint("mixtral", tmp_path / "bf16", folders["bf16"])
    for i in range(2):
        assert all(rank[i].bytes_written > 0 for rank in per_rank), "both replicas write"
        assert sum(rank[i].bytes_written for rank in per_rank) == per_rank[0][i].total_bytes, "each byte once"
    first, second = (sum(rank[1].bytes_written for rank in part) for part in (per_rank[:2], per_rank[2:]))
    assert abs(first - second) < 0.1 * (first + second), "about as much each"
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


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


def save_what_cannot_be_written_in_place(folder: Path, tmp: Path) -> list[tuple[int, int, int]]:
    """A conversion that computes, and one whose runs in the file are two bytes long; FSDP2, then FSDP1."""
    found = []
    for name, operation in (("doubled", Doubled()), ("transposed", Transpose(0, 1))):
        plain = with_conversion(folder, operation)
        if dist.get_rank() == 0:
            plain.save_pretrained(tmp / f"{name} theirs")
        model = sharded_meta_model("llama", folder)
        model._weight_conversions = plain._weight_conversions
        load = load_weights(model, folder)
        with (
            patch.object(DTensor, "full_tensor", None),  # no rank but the first may hold a whole tensor
            patch.object(Rounds, "exchange", autospec=True, side_effect=Rounds.exchange) as exchange,
        ):
            report = save_pretrained(model, tmp / f"{name} ours", staging_bytes=2**12)
        assert exchange.call_count <= 5, "whatever is gathered"
        found.append((load.converted_bytes, report.gathered_bytes, report.bytes_written))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            flat = wrap_fsdp1(plain, make_wrap_plan(plain))
        save_pretrained(plain_view(flat), tmp / f"{name} flat", staging_bytes=2**12)
    return found


def save_twice(folder: Path, target: Path) -> None:
    """Many files, then one, then many again: what is there afterwards is the last save and nothing else."""
    model = loaded("llama", folder)
    for size, expected in (("60KB", 4), ("5GB", 1), ("100KB", 2)):
        with patch.object(Rounds, "exchange", autospec=True, side_effect=Rounds.exchange) as exchange:
            report = save_pretrained(model, os.path.relpath(target), max_shard_size=size)
        assert exchange.call_count <= 5, "rounds of agreement"
        assert len(report.files) == expected
        weights = {p.name for p in target.iterdir() if "safetensors" in p.name and not p.name.endswith(".json")}
        assert weights == set(report.files)
        assert (target / "model.safetensors.index.json").exists() == (expected > 1)
        assert (target / "notes.txt").read_text() == "mine"


def save_after_a_step(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Training leaves the root unit gathered; what is saved are the shards, with the update in them."""
    model = loaded("tied", folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(24).reshape(2, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    with torch.no_grad():
        model(input_ids=tokens)  # gathered again, and not trained on
    save_pretrained(model, target)
    return full_state(model)


def on_two_ranks(folders: dict[str, Path], root: Path) -> dict[str, Any]:
    return run_cases(
        {
            "twice": lambda: save_twice(folders["llama"], root / "twice"),
            "after a step": lambda: save_after_a_step(folders["tied"], root / "after a step"),
            "gathered": lambda: save_what_cannot_be_written_in_place(root / "stored", root),  # every llama has it then
        }
    )


def test_saves_are_replaced_whole_hold_updates_and_gather_what_cannot_be_written_in_place(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "notes.txt").write_text("mine")
    sizes = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=2)
    randomize(LlamaForCausalLM(config)).save_pretrained(tmp_path / "stored")
    per_rank = run_ranks(on_two_ranks, 2, folders, tmp_path)
    assert_same_checkpoint("llama", tmp_path / "twice", folders["llama"])
    trained = per_rank[0]["after a step"]
    saved, before = (plain_model("tied", f).state_dict() for f in (tmp_path / "after a step", folders["tied"]))
    assert all(torch.equal(saved[key], tensor) for key, tensor in trained.items())
    assert not torch.equal(saved["lm_head.weight"], before["lm_head.weight"])
    down = 2 * 96 * 96 * 4
    gathered = zip(*(results["gathered"] for results in per_rank), strict=True)
    for name, rows in zip(("doubled", "transposed"), gathered, strict=True):
        assert [row[1] for row in rows] == [down, down]
        assert rows[0][0] == (down if name == "doubled" else 0)
        theirs = stored_tensors(tmp_path / f"{name} theirs")
        for way in ("ours", "flat"):
            ours = stored_tensors(tmp_path / f"{name} {way}")
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], t) for k, t in theirs.items()), name


def test_blocks_are_reserved_and_never_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the system call, the C library's stand-in would write 4 KiB by 4 KiB what is to be written anyway."""
    size = 2**20 + 1
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("posix_fallocate may write every block"))
    with open(tmp_path / "reserved", "wb") as stream:
        can = hidden_folder._fallocate(stream.fileno(), size) == 0
        hidden_folder._reserve(stream.fileno(), size)
    with (
        open(tmp_path / "bare", "wb") as stream,
        patch.object(hidden_folder, "_fallocate", lambda *_: errno.EOPNOTSUPP),
    ):
        hidden_folder._reserve(stream.fileno(), size)
    reserved, bare = ((tmp_path / name).stat() for name in ("reserved", "bare"))
    assert reserved.st_size == bare.st_size == size
    assert bare.st_blocks * 512 < size, "nothing was written"
    assert not can or reserved.st_blocks * 512 >= size
    with (
        open(tmp_path / "full", "wb") as stream,
        patch.object(hidden_folder, "_fallocate", lambda *_: errno.ENOSPC),
        pytest.raises(OSError, match="No space left"),
    ):
        hidden_folder._reserve(stream.fileno(), size)


def test_one_process_without_a_group_saves_too_with_its_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    model = build_meta_model(folders["llama"])
    load_weights(model, folders["llama"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")))
    report = save_pretrained(model, tmp_path, processing_class=tokenizer)
    assert_same_checkpoint("llama", tmp_path, folders["llama"])
    assert (tmp_path / "tokenizer.json").exists()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (
        json.loads(report.to_json())["total_bytes"] == report.bytes_written == CheckpointIndex.open(tmp_path).num_bytes
    )
