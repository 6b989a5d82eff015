"""`docs/extending.md`: the code of each section runs as it stands, and does what the section says."""

import pickle
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import hf_fsdp_tools
from hf_fsdp_tools import (
    CheckpointError,
    FSDPToolsError,
    LaunchConfig,
    ParallelDims,
    estimate_memory,
    from_pretrained,
    recommend_config,
    save_pretrained,
    wait_for_saves,
)
from tests._checkpoints import make_checkpoint, make_model, refusal
from tests._dist import fake_ranks, run_ranks
from tests._documents import ROOT, TEXTS, blocks
from tests._training import make_rows, new_accelerator, train
from tests.api import ALWAYS, AXES, CODECS, Held, Installed, Phase, all_ranks, axes_of, check_wrap_plan, sharding_of
from tests.unit.test_cli import run

TEXT = TEXTS["docs/extending.md"]
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))


def run_section(title: str, **given: Any) -> dict[str, Any]:
    """Run all code blocks of a section, one after the other, with these names given; return all names after it."""
    code = "\n".join(each.text for each in blocks("docs/extending.md", "python") if each.text in SECTIONS[title])
    assert code, f"no code in section {title!r}"
    names: dict[str, Any] = given
    exec(compile(code, f"docs/extending.md: {title}", "exec"), names)
    return names


def units(plan: Any) -> list[tuple[str, ...]]:
    return [unit.modules for unit in plan.units]


def test_a_rule_for_units(capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_section("A rule for units")["plan"]
    (chosen,) = (unit for unit in plan.units if unit.reason == "backward begins here")
    assert chosen.modules == ("model.layers.3.mlp",) and chosen.reshard_after_forward is False
    assert "backward begins here" in capsys.readouterr().out


def test_a_step_of_the_plan() -> None:
    names = run_section("A step of the plan")
    pairs = [(f"model.layers.{index}", f"model.layers.{index + 1}") for index in (0, 2)]
    assert units(names["plan"]) == [("model.embed_tokens",), *pairs, ("model.norm", "lm_head"), ("",)]
    assert check_wrap_plan(names["model"], names["plan"]) == ()


def test_what_runs_around_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    fake_ranks(2)
    former = [*ALWAYS]
    try:
        names = run_section("What runs around blocks")
    finally:
        ALWAYS[:] = former
    rows = capsys.readouterr().out.partition("model.layers.{0..3}\n")[2].partition("\nmodel.norm")[0]
    phases = [row.split()[0] for row in rows.split("\n")]
    assert phases == ["meet", "memory", "gather", "cast", "copy", "reshard", "keep", "keep", "output"]
    block = names["model"].model.layers[0]
    (hook,) = (
        hook for hook in Installed.of(names["model"]).hooks if hook.module is block and hook.phase is Phase.OUTPUT
    )
    assert hook.call(block, (), torch.tensor(1e9)) == 65504


def test_a_checkpoint_format(tmp_path: Path) -> None:
    plain = make_model("llama")
    for key, tensor in plain.state_dict().items():
        np.save(tmp_path / f"{key}.npy", tensor.numpy())
    names = run_section("A checkpoint format", folder=tmp_path, config=plain.config)
    assert names["report"].missing_keys == names["report"].unexpected_keys == ()
    assert names["report"].bytes_read == sum(tensor.nbytes for tensor in plain.state_dict().values())
    torch.testing.assert_close(names["model"].state_dict(), plain.state_dict(), rtol=0, atol=0)

    damaged = tmp_path / "model.norm.weight.npy"
    for content in (damaged.read_bytes()[:-1], b"nothing of the kind"):
        damaged.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight\.npy.*Save it"):
            names["open_npy"](tmp_path)


def test_a_stored_weight_format(tmp_path: Path) -> None:
    plain = make_model("llama")
    stored, expected = {}, {}
    for key, tensor in plain.state_dict().items():
        stored[key] = expected[key] = tensor
        if key.endswith("_proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            del stored[key]
            stored |= {f"{key}_q8": (tensor / scale).round().to(torch.int8), f"{key}_q8_scale": scale}
            expected[key] = stored[f"{key}_q8"] * scale
    plain.config.save_pretrained(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    former = [*CODECS]
    try:
        names = run_section("A stored weight format", folder=tmp_path)
    finally:
        CODECS[:] = former
    assert names["report"].missing_keys == names["report"].unexpected_keys == ()
    torch.testing.assert_close(names["model"].state_dict(), expected, rtol=0, atol=0)


def test_a_place_to_save_to(tmp_path: Path) -> None:
    run_ranks(_save_to_ram, 1, make_checkpoint("llama", tmp_path / "in"), tmp_path)
    run_ranks(_refused_by_ram, 2)


class _FailsOnce(dict[str, bytes]):
    """A place that refuses the n-th file."""

    left = 0

    def __setitem__(self, name: str, content: bytes) -> None:
        self.left -= 1
        if self.left == 0:
            raise CheckpointError("no memory")
        super().__setitem__(name, content)


def _save_to_ram(source: Path, out: Path) -> None:
    places = run_section("A place to save to")["Ram"].PLACES

    def written(name: str, content: dict[str, bytes]) -> Path:
        for file, data in content.items():
            (out / name / file).parent.mkdir(exist_ok=True, parents=True)
            (out / name / file).write_bytes(data)
        return out / name

    def assert_opens_as(model: torch.nn.Module, folder: Path) -> None:
        found = LlamaForCausalLM.from_pretrained(folder).state_dict()
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=0)

    first, second = make_model("llama", seed=1), make_model("llama", seed=2)
    second.config.rms_norm_eps = 1e-3  # so that a file next to the weights is another, too
    save_pretrained(first, "ram:run", max_shard_size="60KB")
    assert_opens_as(first, written("first", places["run"]))
    former = dict(places["run"])
    for blocking in (True, False):
        for at in count(1):
            places["run"] = place = _FailsOnce(former)
            place.left = at
            try:
                save_pretrained(second, "ram:run", max_shard_size="100KB", blocking=blocking)
                wait_for_saves()
            except CheckpointError as error:
                assert "no memory" in str(error) and place == former, at
            else:
                break
        assert at > 4 and place.left > 0
        assert_opens_as(second, written(f"second {blocking}", place))
        assert not [name for name in place if name in former and name.endswith(".safetensors")]

    adapted: Any = get_peft_model(second, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    save_pretrained(adapted, "ram:adapter")
    opened: Any = PeftModel.from_pretrained(make_model("llama", seed=2), written("adapter", places["adapter"]))
    torch.testing.assert_close(dict(opened.state_dict()), dict(adapted.state_dict()), rtol=0, atol=0)

    accelerator: Any = new_accelerator()
    model: Any = from_pretrained(source, accelerator=accelerator, load_kwargs={"progress": False})
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.randint(3, 60, (1, 9))
    for blocking in (True, False):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        accelerator.save_state(f"ram:{blocking}", blocking=blocking)
        wait_for_saves()
        optimizer.step()
        accelerator.load_state(written(f"state {blocking}", places[str(blocking)]))
        torch.testing.assert_close(dict(model.state_dict()), saved, rtol=0, atol=0)


def _refused_by_ram() -> None:
    run_section("A place to save to")
    assert "is in the memory of one process" in refusal(lambda: save_pretrained(make_model("llama"), "ram:run"))


def test_a_parallel_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks are two pods; estimates, settings and the command line know the axis in this process."""
    run_ranks(_in_pods, 4, make_checkpoint("llama", tmp_path / "in"), tmp_path / "out")
    former = [*AXES]
    try:
        with patch.object(hf_fsdp_tools, "from_pretrained"):
            dims = run_section("A parallel axis", folder=tmp_path / "in")["dims"]
        assert dims == pickle.loads(pickle.dumps(dims)) and dims.resolve(8).dp_shard_size == 4
        with pytest.raises(FSDPToolsError, match="x dp_shard_size auto x pod_size 3 does not make the 8 processes"):
            ParallelDims(pod_size=3).resolve(8)
        assert ParallelDims(pod_size=2, dp_replicate_size=2).resolve(8).dp_shard_size == 2
        in_pods, in_copies = (
            estimate_memory(tmp_path / "in", num_processes=8, max_length=32, **{name: 2})
            for name in ("pod_size", "dp_replicate_size")
        )
        assert in_pods.total == in_copies.total and "pod_size 2" in in_pods.setup.words
        best = recommend_config(tmp_path / "in", num_processes=8, max_length=32, pod_size=2)
        assert best.setup.dims.num_copies % 2 == 0
        for command in ("init", "search", "estimate", "verify"):
            with pytest.raises(SystemExit, match="0"):
                run(capsys, command, "--help")
            assert "--pod-size" in capsys.readouterr().out
        said = run(capsys, "estimate", tmp_path / "in", "--num-processes", "8", "--max-length", "32", "--pod-size", "2")
        assert said[0] == 0 and "pod_size 2" in said[1]
        config = LaunchConfig(num_processes=8, gpu_ids=",".join("01234567"))
        assert "pod" not in config.to_accelerate_yaml()
        (tmp_path / "launch.yaml").write_text(config.to_accelerate_yaml())
        assert not [each for each in LaunchConfig.check_file(tmp_path / "launch.yaml") if "pod" in str(each)]
        with pytest.raises(FSDPToolsError, match="pod_size 3 does not divide num_processes 8"):
            replace(config, pod_size=3)
        with pytest.raises(FSDPToolsError, match="pod_size=2 cannot stand in a launch file"):
            replace(config, pod_size=2).to_accelerate_yaml()
    finally:
        AXES[:] = former


def _in_pods(folder: Path, out: Path) -> None:
    names = run_section("A parallel axis", folder=folder)
    model, dims, pod = names["model"].train(), names["dims"], dist.get_rank() // 2
    mesh = sharding_of(model).mesh
    assert mesh.mesh_dim_names == ("pod", "dp_shard") and mesh.get_local_rank("pod") == pod
    assert sharding_of(model).axes.dims == dims.resolve(4)
    both = axes_of(ParallelDims(pod_size=2, dp_replicate_size=2).build_mesh("cpu"))
    assert both.dims == ParallelDims(pod_size=2, dp_replicate_size=2, dp_shard_size=1)
    assert both.shards.shape == (4, 1)
    accelerator: Any = new_accelerator()
    rows = make_rows(8)
    model, loader = accelerator.prepare(model, DataLoader(rows, batch_size=1))  # type: ignore[arg-type]
    plain = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    steps = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (model, plain)]
    seen = []
    for mine, everyone in zip(loader, DataLoader(rows, batch_size=4), strict=True):  # type: ignore[arg-type]
        seen += all_ranks(mine["input_ids"][0].tolist())
        for each, optimizer, batch in zip((model, plain), steps, (mine, everyone), strict=True):
            each(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [row["input_ids"].tolist() for row in rows], "each rank has rows of its own"
    for name, parameter in model.named_parameters():
        assert Held.of(parameter).memory.numel() < parameter.numel() or parameter.shape[0] == 1, "sharded in a pod"
        torch.testing.assert_close(parameter.full_tensor(), plain.get_parameter(name), rtol=0, atol=2e-5)
    save_pretrained(model, out)
    saved = LlamaForCausalLM.from_pretrained(out).state_dict()
    torch.testing.assert_close(saved, dict(plain.state_dict()), rtol=0, atol=2e-5)


def test_another_trainer(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "in")
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 131, (3, 2, 9))]
    run_ranks(_train, 1, folder, tmp_path / "out", batches)
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()

    plain = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    begun = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    train(plain.train(), torch.optim.AdamW(plain.parameters(), lr=1e-3), batches, clip=1.0)
    torch.testing.assert_close(trained, dict(plain.state_dict()))
    assert not torch.equal(trained["lm_head.weight"], begun["lm_head.weight"])


def _train(folder: Path, out: Path, batches: list[dict[str, torch.Tensor]]) -> None:
    run_section("Another trainer", folder=folder, out=out, batches=batches)


def test_every_section_is_run_and_every_name_is_there() -> None:
    titles = [f"def test_{title.lower().replace(' ', '_')}(" for title in SECTIONS]
    assert len(titles) == 8 and all(title in Path(__file__).read_text() for title in titles)
    assert all("**Called**" in text and "**Keep**" in text and "**Copy**" in text for text in SECTIONS.values())
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT):
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file} has no test {test}"
    for file in re.findall(r"`((?:planning|loading|integrations)/\w[\w/]*\.py)`", TEXT):
        assert (ROOT / "hf_fsdp_tools" / file).is_file(), f"there is no {file}"
