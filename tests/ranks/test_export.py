"""Training states as checkpoints: the files that the training itself writes, from any state, by one or several ranks;
and the command."""

import json
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import StateDictType
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import (
    ConfigError,
    FSDPPlugin,
    export_checkpoint,
    from_pretrained,
    make_accelerator,
    save_pretrained,
)
from hf_fsdp_tools.saving import export
from tests._checkpoints import loaded, plain_model, stored_tensors
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, make_rows
from tests.api import MemoryWatch, main, plain_view

SIZE = "60KB"


def files_of(folder: Path) -> dict[str, Any]:
    return {
        path.name: json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()
        for path in folder.iterdir()
        if path.name.startswith(("model", "config", "generation"))
    }


def trained(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def accelerates_sharded_state(folders: dict[str, Path], root: Path) -> None:
    accelerator = make_accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(from_pretrained(folders["mixtral"], accelerator=accelerator))
    trained(model)
    accelerator.save_state(str(root / "state"))
    save_pretrained(model, root / "saved", max_shard_size=SIZE)
    copy_configs(folders["mixtral"], root)


def accelerates_state_of_fsdp1(folders: dict[str, Path], root: Path) -> None:
    plugin = FSDPPlugin(fsdp_version=1)
    plugin.set_state_dict_type(StateDictType.SHARDED_STATE_DICT)
    accelerator = make_accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(plain_model("tied", folders["tied"]))
    trained(model)
    accelerator.save_state(str(root / "state"))
    save_pretrained(plain_view(model), root / "saved", max_shard_size=SIZE)
    copy_configs(folders["tied"], root)


def accelerates_whole_state(folders: dict[str, Path], root: Path) -> None:
    accelerator = make_accelerator(cpu=True)
    accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    model = accelerator.prepare(from_pretrained(folders["llama"], accelerator=accelerator))
    trained(model)
    accelerator.save_state(str(root / "state"))
    save_pretrained(model, root / "saved", max_shard_size=SIZE)


def a_trainers_checkpoint(folders: dict[str, Path], root: Path) -> None:
    args = arguments(root, max_steps=1, save_strategy="steps", save_steps=1)
    model = from_pretrained(folders["llama"], accelerator=make_accelerator(cpu=True))
    trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(8))
    trainer.train()
    (root / "checkpoint-1").rename(root / "state") if dist.get_rank() == 0 else None
    save_pretrained(trainer.model, root / "saved", max_shard_size=SIZE)


def a_job_saved_by_torch(folders: dict[str, Path], root: Path) -> None:
    """Model and optimizer in one DCP folder, with a router's buffer in fp32 beside weights in bf16."""
    model = loaded("deepseek_v3", folders["deepseek_v3"], dtype=torch.bfloat16)
    optimizer = {f"state.{name}": {"exp_avg": parameter.detach() * 2} for name, parameter in model.named_parameters()}
    dcp.save({"app": {"model": model.state_dict(), "optim": optimizer}, "step": 3}, checkpoint_id=root / "state")
    save_pretrained(model, root / "saved", max_shard_size=SIZE)
    copy_configs(folders["deepseek_v3"], root)


def copy_configs(folder: Path, root: Path) -> None:
    if dist.get_rank() == 0:
        for file in folder.glob("*config.json"):
            shutil.copy(file, root)


STATES = (
    accelerates_sharded_state,
    accelerates_state_of_fsdp1,
    accelerates_whole_state,
    a_trainers_checkpoint,
    a_job_saved_by_torch,
)


OPTIONS: dict[str, Any] = {"accelerates_whole_state": {"allow_pickle": True}}


def save_states(folders: dict[str, Path], root: Path) -> None:
    run_cases({state.__name__: partial(state, folders, root / state.__name__) for state in STATES})


@pytest.fixture(scope="module")
def states(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("states")
    for state in STATES:
        (root / state.__name__).mkdir()
    run_ranks(save_states, 2, folders, root)
    OPTIONS["accelerates_whole_state"]["config"] = folders["llama"]
    return root


@pytest.mark.parametrize("name", [state.__name__ for state in STATES])
def test_a_state_becomes_the_files_that_its_training_writes(states: Path, tmp_path: Path, name: str) -> None:
    """To the bit, by one process, from what two ranks saved."""
    report = export_checkpoint(states / name / "state", tmp_path / "out", max_shard_size=SIZE, **OPTIONS.get(name, {}))
    expected = files_of(states / name / "saved")
    assert files_of(tmp_path / "out") == expected
    assert set(report.files) == {file for file in expected if file.endswith(".safetensors")}


def export_and_merge(state: Path, large: Path, adapter: Path, root: Path) -> list[tuple[int, int, int]]:
    """(bytes that this rank wrote, bytes in all, bytes by which its memory rose) of a model and an adapter."""
    found = []
    for road, source, name in (
        (export_checkpoint, state, "imports what any export needs"),
        (export_checkpoint, large, "cast"),  # before merging leaves freed memory, which would be used again
        (_merge, adapter, "imports what merging needs"),
        (_merge, adapter, "merged"),
    ):
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident size so far (proc(5))
        watch = MemoryWatch()
        with patch.object(export, "_PART_BYTES", 4 * 2**20), patch.object(export, "STAGING_BYTES", 8 * 2**20):
            report = road(source, root / name, max_shard_size="90MB", dtype=torch.float32 if name == "cast" else None)
        found.append((report.bytes_written, report.total_bytes, watch.above(0)))
    return found


def _merge(adapter: Path, folder: Path, **options: Any) -> Any:
    return export_checkpoint(None, folder, adapter=adapter, **options)


def test_the_state_of_a_peft_model_becomes_its_adapter_and_is_merged(folders: dict[str, Path], tmp_path: Path) -> None:
    config = LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    model: Any = get_peft_model(plain_model("llama", folders["llama"]), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 if parameter.requires_grad else 0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "state")
    model.peft_config["default"].save_pretrained(tmp_path / "state")
    model.save_pretrained(tmp_path / "saved")
    export_checkpoint(tmp_path / "state", tmp_path / "out")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "saved"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    with pytest.raises(ConfigError, match="the training state of a PeftModel"):
        export_checkpoint(None, tmp_path / "merged", adapter=tmp_path / "state")
    export_checkpoint(None, tmp_path / "merged", adapter=tmp_path / "out")
    model.merge_and_unload().save_pretrained(tmp_path / "expected")
    merged, expected = stored_tensors(tmp_path / "merged"), stored_tensors(tmp_path / "expected")
    assert merged.keys() == expected.keys() and all(torch.equal(merged[key], expected[key]) for key in expected)


def export_in_parts(state: Path, out: Path) -> tuple[int, int]:
    with patch.object(export, "_PART_BYTES", 2**14):
        report = export_checkpoint(state, out, max_shard_size=SIZE)
    return report.bytes_written, report.total_bytes


def test_ranks_share_the_work(states: Path, tmp_path: Path) -> None:
    state = states / "accelerates_sharded_state"
    (first, total), (second, _) = run_ranks(export_in_parts, 2, state / "state", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(state / "saved")
    assert first + second == total and abs(first - second) < 0.2 * total, "about as much each"


@pytest.mark.nightly
def test_ranks_share_the_work_in_bounded_memory(states: Path, tmp_path: Path) -> None:
    """136 MB in bf16, of which the embedding is 33 MB and the largest adapted module 6 MB, in parts of 4 MiB."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=16000, num_hidden_layers=3, dtype="bfloat16")
    large, adapter = tmp_path / "large", tmp_path / "adapter"
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(large, max_shard_size="90MB")
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(large), LoraConfig(target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(adapter)
    per_rank = run_ranks(export_and_merge, 2, states / "accelerates_sharded_state" / "state", large, adapter, tmp_path)
    before, after = stored_tensors(large), stored_tensors(tmp_path / "cast")
    assert all(torch.equal(after[key], tensor.float()) for key, tensor in before.items())
    merged, by_peft = stored_tensors(tmp_path / "merged"), adapted.merge_and_unload().state_dict()
    assert merged.keys() == by_peft.keys()
    assert all(torch.equal(merged[key], tensor) for key, tensor in by_peft.items())
    for results in zip(*(found[1:] for found in per_rank), strict=True):
        total = results[0][1]
        assert sum(written for written, _, _ in results) == total
        assert all(abs(written - total / 2) < 0.1 * total for written, _, _ in results), "about as much each"
    adapter_bytes = 2 * (adapter / "adapter_model.safetensors").stat().st_size  # the file's pages, and PEFT's copy
    for _, (_, _, large_rise), _, (_, total, merged_rise) in per_rank:
        # 4 MiB of a part, 8 of staging; 16 for what Python and torch allocate meanwhile.
        assert large_rise <= (4 + 8 + 16) * 2**20
        # Less than what a process writes: a module of 6 MB in bf16, with what PEFT computes for it in fp32, and memory
        # that the allocator has not given back.
        assert merged_rise <= total // 2 + adapter_bytes


WAITING = """
import sys, time
from unittest.mock import patch
from hf_fsdp_tools.cli.main import main
from hf_fsdp_tools.saving.export import _Loop

def wait(*arguments, **options):
    print("begun", flush=True)
    time.sleep(120)

with patch.object(_Loop, "write", wait):
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_an_interrupted_command_says_so_and_leaves_the_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    former = shutil.copytree(folders["llama"], tmp_path / "former")
    before = files_of(former)
    words = [sys.executable, "-c", WAITING, "export", str(folders["tied"]), str(former)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    assert len(list(former.glob(".save-*"))) == 1
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    said = [line for line in err.splitlines() if "torchao" not in line and "_pytree" not in line]  # of its kernels
    assert (out, said, process.returncode) == ("", ["hf-fsdp: interrupted"], 130), err
    assert files_of(former) == before and not list(former.glob(".save-*"))


def test_the_command(states: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state, expected = states / "a_trainers_checkpoint" / "state", states / "a_trainers_checkpoint" / "saved"
    assert main(["export", str(state), str(tmp_path / "out"), "--max-shard-size", SIZE]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert [line.split()[0] for line in out.splitlines()] == ["wrote", "also", "took"]
    assert "(4 weight files, 183.7 kB)" in out
    assert files_of(tmp_path / "out") == files_of(expected)
