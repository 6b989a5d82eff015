"""Findings as data, models rehearsed on pretended ranks, and what the doctor says about a machine."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_fsdp_tools import ConfigError, ParallelDims, WrapPolicy, diagnose, estimate_memory
from hf_fsdp_tools.diagnostics import environment
from hf_fsdp_tools.errors import BlockDetectionError
from hf_fsdp_tools.steps import build_meta_model, make_wrap_plan, shard_model
from tests._checkpoints import KINDS, make_model
from tests._dist import fake_ranks
from tests.api import Diagnosis, Finding, check_environment, local_tensor, rehearse

ROOT = Path(__file__).parents[2]

FINDING = Finding(code="some-code", severity="warning", fact="2 of 3 are wrong.", cure="Do the other thing.")


def test_a_diagnosis_is_data_and_an_unsharded_model_is_no_error_without_a_process_group():
    diagnosis = Diagnosis(findings=(FINDING, replace(FINDING, code="other")), units="Model: 3 parameters")
    assert str(diagnosis).splitlines() == [
        "Model: 3 parameters",
        "",
        "2 warnings",
        "warning: some-code",
        "    2 of 3 are wrong.",
        "    Do the other thing.",
        "warning: other",
        "    2 of 3 are wrong.",
        "    Do the other thing.",
    ]
    value = json.loads(diagnosis.to_json())
    assert value["findings"][0] == json.loads(FINDING.to_json())
    assert not diagnosis.has_errors
    assert Diagnosis(findings=(replace(FINDING, severity="error"),), units="").has_errors
    assert str(Diagnosis(findings=(), units="Model")).endswith("\nno findings")
    model = make_model("llama")
    diagnosis = diagnose(model)
    (finding,) = diagnosis.findings
    assert (finding.code, finding.severity) == ("not-sharded", "info")
    assert "this process holds all 183.7 kB" in finding.fact and "shard_model" in finding.cure
    assert str(diagnosis.units) == "LlamaForCausalLM: 45.9 K parameters, not sharded"
    with pytest.raises(ConfigError, match="give one of the two"):
        diagnose(model, plan=make_wrap_plan(model), policy=WrapPolicy())
    with pytest.raises(BlockDetectionError, match="no parameters"):
        diagnose(nn.Identity())
    config = hf.DiffLlamaConfig(hidden_size=48, intermediate_size=67, num_hidden_layers=2, num_attention_heads=4)
    model = build_meta_model(config)
    assert {parameter.is_meta for parameter in model.parameters()} == {True, False}
    assert rehearse(model).findings == ()


SHAPES = {
    "llama": (hf.AutoModelForCausalLM, {"num_hidden_layers": 5, "vocab_size": 500}),
    "deepseek_v3": (hf.AutoModelForCausalLM, {"num_hidden_layers": 4, "vocab_size": 500}),
    "t5": (hf.AutoModelForSeq2SeqLM, {"num_layers": 4}),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_healthy_architectures_rehearsed_on_eight_ranks(kind):
    auto_class, sizes = SHAPES[kind]
    config = KINDS[kind]().config
    for name, value in sizes.items():
        setattr(config, name, value)
    diagnosis = rehearse(build_meta_model(config, auto_class=auto_class))
    assert not diagnosis.findings, diagnosis
    blocks = [line for line in str(diagnosis.units).splitlines() if " × " in line]
    assert 1 <= len(blocks) <= 4, "equal units share a line"
    assert not dist.is_initialized()


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
    stored = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
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
    assert finding.code == "unmanaged-parameters" and "logit_scale" in finding.fact and "replicate" in finding.cure


def test_a_version_later_than_any_that_was_tried_and_a_torch_without_its_device_are_warned_of(monkeypatch):
    assert not list(environment.untried_versions(*environment._NEWEST)), "the tests run with tried versions"
    monkeypatch.setattr(environment, "_version", {"accelerate": "1.16.0", "transformers": "5.24.1"}.get)
    monkeypatch.setattr(environment, "_bounds", lambda: {"transformers": ("5.17", True), "accelerate": ("1.15", True)})
    monkeypatch.setattr(environment, "_NEWEST", {"transformers": "5.23", "accelerate": "1.15"})
    accelerate, transformers = environment.untried_versions("accelerate", "transformers")
    assert accelerate.severity == "warning"
    assert "accelerate 1.16.0" in accelerate.fact and "with 1.15." in accelerate.fact
    assert "with 5.17 to 5.23" in transformers.fact and 'pip install "transformers==5.23.*"' in transformers.cure
    monkeypatch.setattr(environment, "_version", lambda name: "5.23.9")
    assert not list(environment.untried_versions("transformers")), "a later patch is none"
    monkeypatch.undo()
    monkeypatch.setattr(environment, "find_accelerator", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    found = _findings(check_environment())["no-device"]
    fact = "This torch is built for cuda 13.0 and sees no device: it would run on the CPU."
    assert (found.severity, found.fact) == ("warning", fact)


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
    assert finding.severity == "error" and cure in finding.cure


@pytest.mark.parametrize(("kind", "backend", "emulates"), [("cuda", "nccl", True), ("xpu", "xccl", False)])
def test_devices_of_every_kind_are_named(monkeypatch, kind, backend, emulates):
    properties = SimpleNamespace(name="Model 7", total_memory=48e9)
    supported = (lambda including_emulation=True: including_emulation) if emulates else (lambda: False)
    module = SimpleNamespace(get_device_properties=lambda device: properties, is_bf16_supported=supported)
    monkeypatch.setattr(environment, "find_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    monkeypatch.setattr("torch.get_device_module", lambda device: module)
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: name == "gloo")
    found = check_environment()
    assert found.devices == (f"{kind}:0 Model 7, 48.0 GB", f"{kind}:1 Model 7, 48.0 GB")
    findings = _findings(found)
    assert findings[f"no-{backend}"].fact == f"2 {kind} device(s) and no {backend}; the backends are gloo."
    assert "Model 7" in findings["no-bfloat16"].fact and "fp16" in findings["no-bfloat16"].cure
    assert "one-connection" not in findings
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert _findings(check_environment())["one-connection"].cure == "unset CUDA_DEVICE_MAX_CONNECTIONS"
