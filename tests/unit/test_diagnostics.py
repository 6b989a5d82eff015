"""Findings as data, models rehearsed on pretended ranks, and what the doctor says about a machine."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_fsdp_tools import ConfigError, ParallelDims, WrapPolicy, diagnose, estimate_memory
from hf_fsdp_tools.diagnostics import environment
from hf_fsdp_tools.errors import BlockDetectionError
from hf_fsdp_tools.steps import build_meta_model, make_wrap_plan, shard_model
from tests._checkpoints import make_model
from tests._dist import fake_ranks
from tests.api import Diagnosis, Finding, Held, check_environment, rehearse

ROOT = Path(__file__).parents[2]

FINDING = Finding(code="some-code", severity="warning", problem="2 of 3 are wrong.", fix="Do the other thing.")


def test_a_diagnosis_is_data_and_an_unsharded_model_is_no_error_without_a_process_group():
    diagnosis = Diagnosis(findings=(FINDING, replace(FINDING, code="other")), units="Model: 3 parameters")
    value = json.loads(diagnosis.to_json())
    assert value["findings"][0] == json.loads(FINDING.to_json())
    assert not diagnosis.has_errors
    assert Diagnosis(findings=(replace(FINDING, severity="error"),), units="").has_errors
    assert str(Diagnosis(findings=(), units="Model")).endswith("\nno findings")
    model = make_model("llama")
    diagnosis = diagnose(model)
    (finding,) = diagnosis.findings
    assert (finding.code, finding.severity) == ("not-sharded", "info")
    assert "this process holds all 183.7 kB" in finding.problem and "shard_model" in finding.fix
    assert str(diagnosis.units) == "LlamaForCausalLM: 45.9 K parameters, not sharded"
    with pytest.raises(ConfigError, match="give one of the two"):
        diagnose(model, plan=make_wrap_plan(model), policy=WrapPolicy())
    with pytest.raises(BlockDetectionError, match="no parameters"):
        diagnose(nn.Identity())
    config = hf.DiffLlamaConfig(hidden_size=48, intermediate_size=67, num_hidden_layers=2, num_attention_heads=4)
    model = build_meta_model(config)
    assert {parameter.is_meta for parameter in model.parameters()} == {True, False}
    assert rehearse(model).findings == ()


@pytest.mark.parametrize("ranks", [3, 64])
def test_foresight_expects_the_bytes_that_fsdp2_stores(ranks):
    """Experts of few rows are split along another dimension, and shorter shards are padded to the longest."""
    wide = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 131}
    config = hf.MixtralConfig(**wide, num_local_experts=6, num_attention_heads=4, num_key_value_heads=2)
    model = build_meta_model(config)
    plan = make_wrap_plan(model)
    memory = estimate_memory(
        config, num_processes=ranks, max_length=16, optimizer="adamw_foreach", reshard_after_forward=True
    )
    fake_ranks(ranks)
    shard_model(model, plan, mesh=ParallelDims().build_mesh("cpu"))
    dims = {name: parameter.placements[-1].dim for name, parameter in model.named_parameters()}
    stored = sum(Held.of(parameter).memory.nbytes for parameter in model.parameters())
    # 6 experts on 3 ranks are even.
    assert {name for name, dim in dims.items() if dim} == {n for n in dims if ".experts." in n and ranks > 8}
    assert memory.at_peak["parameters"] == pytest.approx(stored, rel=0.01)


def test_what_our_plan_replicates_is_averaged_and_by_hand_it_is_not():
    fake_ranks()
    with pytest.raises(ConfigError, match=r"process of its own\. Use diagnose"):
        rehearse(make_model("llama"))
    config = hf.CLIPConfig(text_config={"num_hidden_layers": 2}, vision_config={"num_hidden_layers": 2})
    mesh = ParallelDims(dp_replicate_size=2).build_mesh("cpu")
    model = build_meta_model(config, auto_class=hf.AutoModel)
    plan = make_wrap_plan(model)
    assert plan.replicated == ("logit_scale",)
    diagnosis = diagnose(shard_model(model, plan, mesh=mesh))
    assert not diagnosis.has_errors and "in no unit: 1 tensors, 1 parameters, 4 B" in str(diagnosis.units)
    by_hand = build_meta_model(config, auto_class=hf.AutoModel)
    for tower in (by_hand.text_model, by_hand.vision_model):
        for block in tower.encoder.layers:
            fully_shard(block, mesh=mesh)
    fully_shard(by_hand, mesh=mesh, ignored_params={by_hand.logit_scale})
    (finding,) = [finding for finding in diagnose(by_hand).findings if finding.severity == "error"]
    assert finding.code == "unmanaged-parameters" and "logit_scale" in finding.problem and "replicate" in finding.fix


def _findings(environment):
    return {finding.code: finding for finding in environment.findings}


def test_the_environment_of_the_tests_is_fit_and_the_doctor_needs_what_the_package_needs():
    found = check_environment()
    assert not found.has_errors, found
    # As packaged: "+cu130" may be left out.
    assert found.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert "gloo" in found.backends
    assert json.loads(found.to_json())["versions"] == found.versions
    assert re.search(r"^torch +2\.\S+ +tried 2\.11 to 2\.\d+$", str(found), re.MULTILINE)
    assert found.tried["torch"][0] == "2.11"
    # A torch for GPUs on a machine without one, and releases after those that were tried, fail no test.
    assert set(_findings(found)) <= {"no-device", "version-untried"}, found
    assert str(found).endswith("\nno findings") is not bool(found.findings)
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name, (least, last) in found.tried.items():
        if last is not None:
            assert Version(least) <= Version(pinned[name]) < Version(f"{last}.99"), "CI runs with these"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = dict(each.split(">=") for each in (*project["dependencies"], *extras["recipes"], *extras["qlora"]))
    assert {name: least for name, (least, _) in found.tried.items()}.items() <= declared.items()


BOUNDS = environment._bounds()


@pytest.mark.parametrize(
    ("attribute", "value", "code", "cure"),
    [
        ("_bounds", lambda: BOUNDS | {"torch": ("99.1", True)}, "version-too-old", 'pip install "torch>=99.1"'),
        ("_bounds", lambda: BOUNDS | {"peft": ("99.1", False)}, "version-too-old", 'pip install "peft>=99.1"'),
        ("_version", {"torch": "2.13.0"}.get, "package-missing", 'pip install "huggingface_hub>=1.31"'),
        ("dist.is_available", lambda: False, "no-backend", "Install a torch with them"),
    ],
)
def test_an_unfit_environment_is_an_error_with_its_cure(monkeypatch, attribute, value, code, cure):
    monkeypatch.setattr(f"hf_fsdp_tools.diagnostics.environment.{attribute}", value)
    found = check_environment()
    assert found.has_errors
    finding = _findings(found)[code]
    assert finding.severity == "error" and cure in finding.fix
