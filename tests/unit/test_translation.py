"""`hf-fsdp config --from`: what each key of an old file becomes, and that the new file says it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_fsdp_tools.cli.main import main
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.config import FSDPConfig
from tests._dist import imitate_gpus
from tests.ranks.test_old_launch_file import OLD

GPUS = OLD.replace("gpu_ids: ''\n", "").replace("use_cpu: true", "use_cpu: false").replace("'no'\nnum", "bf16\nnum")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_gpus(monkeypatch, 0)


def translate(tmp_path: Path, text: str | dict[str, Any], *words: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The new file, and what became of each key."""
    path = tmp_path / "old.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    assert main(["config", "--from", str(path), "--output", str(tmp_path / "new.yaml"), "--force", *words]) == 0
    new = yaml.safe_load((tmp_path / "new.yaml").read_text())
    problems = [each for each in FSDPConfig.check_file(tmp_path / "new.yaml") if each.severity == "error"]
    assert not problems
    return new, {key: became for key, _, became in FSDPConfig.translate_file(path).rows}


def says(**fields: Any) -> dict[str, Any]:
    return yaml.safe_load(FSDPConfig(**fields).to_accelerate_yaml())


def test_the_file_of_old_becomes_fsdp2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, became = translate(tmp_path, GPUS)
    wrapped = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ("LlamaDecoderLayer",)}
    assert new == says(num_processes=2, mixed_precision="bf16", **wrapped)
    assert became["fsdp_version"].startswith("2: fully_shard")
    assert became["fsdp_sharding_strategy"] == "fsdp_reshard_after_forward true"
    assert became["fsdp_use_orig_params"] == "left out: FSDP2 always does so"
    assert became["fsdp_forward_prefetch"] == "left out: FSDP2 has False"
    assert became["fsdp_cpu_ram_efficient_loading"].startswith("false: each rank reads its own shards")
    assert "tpu_env" not in became, "nothing is said about what was never used"
    out = capsys.readouterr().out
    assert "fsdp_sharding_strategy" in out and "launch  accelerate launch --config_file" in out
    assert translate(tmp_path, OLD)[0]["use_cpu"] is True


def test_every_value_that_has_a_meaning_is_kept(tmp_path: Path) -> None:
    config = FSDPConfig(
        num_processes=16,
        num_machines=2,
        machine_rank=1,
        main_process_ip="node0",
        main_process_port=4,
        dp_replicate_size=2,
        mixed_precision="fp16",
        offload_params=True,
        activation_checkpointing=True,
        reshard_after_forward=False,
        state_dict_type="FULL_STATE_DICT",
        ignored_modules="a.*",
        auto_wrap_policy="SIZE_BASED_WRAP",
        min_num_params=7,
    )
    new, became = translate(tmp_path, config.to_accelerate_yaml())
    assert new == yaml.safe_load(config.to_accelerate_yaml())
    assert {"kept"} >= {became[key] for key in ("num_processes", "fsdp_min_num_params", "fsdp_version")}
    assert translate(tmp_path, config.to_accelerate_yaml(), "--gpus", "32", "--offload")[0]["num_processes"] == 32


def test_unknown_keys_are_named_with_the_nearest(tmp_path: Path) -> None:
    file = {
        "distributed_type": "FSDP",
        "num_process": 2,
        "num_processes": 2,
        "fsdp_config": {
            "offload_param": True,
            "fsdp_version": 2,
            "fsdp_offload_params": True,
            "fsdp_backward_prefetch_policy": "BACKWARD_PRE",  # a name of 2023
        },
        "parallelism_config": {"parallelism_config_dp_replicate": 2, "parallelism_config_tp_size": 2},
    }
    new, became = translate(tmp_path, file)
    assert new["fsdp_config"]["fsdp_offload_params"] is True
    assert "did you mean num_processes" in became["num_process"]
    assert "did you mean fsdp_offload_params" in became["fsdp_offload_param"]
    assert became["fsdp_backward_prefetch_policy"] == "left out: FSDP2 always does so"
    assert "dp_replicate_size" in became["parallelism_config_dp_replicate"]
    assert became["parallelism_config_tp_size"] == "left out: this package shards and copies only"


@pytest.mark.parametrize(("kind", "extra"), [("MULTI_GPU", {"num_processes": 4}), ("NO", {}), ("MULTI_CPU", {})])
def test_plain_data_parallelism_becomes_fsdp(tmp_path: Path, kind: str, extra: dict[str, Any]) -> None:
    file = {"distributed_type": kind, "mixed_precision": False, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    new, became = translate(tmp_path, file | {"num_processes": 2} | extra, *["--gpus", "1"][: 2 * (kind == "NO")])
    count = {"MULTI_GPU": 4, "NO": 1, "MULTI_CPU": 2}[kind]
    assert new == says(num_processes=count, use_cpu=kind == "MULTI_CPU")
    assert became["distributed_type"].startswith("FSDP") and "--torch_compile" in became["dynamo_config"]


def test_copies_per_machine_stay(tmp_path: Path) -> None:
    file = {"distributed_type": "FSDP", "num_machines": 2, "num_processes": 16, "mixed_precision": "bf16"}
    new, became = translate(tmp_path, file | {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}})
    assert new["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    assert new["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert "in 2 copies, one per machine" in became["fsdp_sharding_strategy"]
    assert new["main_process_ip"] == "ADDRESS-OF-MACHINE-0", "which the launch command replaces"


ZERO3 = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
        "stag": 3,
    },
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
    "steps_per_print": 10,
    "train_batch_sise": 3,
}


def test_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    file = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 8,
        "deepspeed_config": {"deepspeed_config_file": "zero3.json", "zero3_init_flag": True, "zero_stages": 3},
    }
    new, became = translate(tmp_path, file)
    assert new == says(num_processes=8, mixed_precision="bf16", offload_params=True)
    launch = capsys.readouterr().out.splitlines()[-1]
    assert launch.endswith(
        "your_script.py --gradient_accumulation_steps 4 --max_grad_norm 1.0 --learning_rate 1e-05"
    ), launch
    assert became["zero_optimization.overlap_comm"] == "left out: FSDP2 always overlaps"
    assert "units of the plan" in became["zero_optimization.stage3_prefetch_bucket_size"]
    assert "--per_device_train_batch_size" in became["train_micro_batch_size_per_gpu"]
    assert "did you mean stage" in became["zero_optimization.stag"]
    assert "did you mean train_batch_size" in became["train_batch_sise"] and "zero_stage" in became["zero_stages"]
    keys = {"distributed_type", "num_processes", "deepspeed_config_file", "zero3_init_flag", "optimizer.params.betas"}
    assert keys <= became.keys() and len(became) == 20, "each key of both files has a row"


def test_deepspeeds_json_alone_and_stage_2(tmp_path: Path) -> None:
    new, _ = translate(tmp_path, json.dumps(ZERO3), "--gpus", "8")
    assert new == says(num_processes=8, mixed_precision="bf16", offload_params=True)
    file = {"distributed_type": "DEEPSPEED", "num_processes": 8, "mixed_precision": "fp16"}
    new, _ = translate(tmp_path, file | {"deepspeed_config": {"zero_stage": 2, "gradient_clipping": 0.5}})
    assert new == says(num_processes=8, mixed_precision="fp16", reshard_after_forward=False)


def test_offload_on_a_machine_without_gpus_names_what_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    (tmp_path / "old.yaml").write_text(json.dumps(old))
    assert main(["config", "--from", str(tmp_path / "old.yaml")]) == 1
    said = capsys.readouterr().err
    assert "the file keeps weights" in said and "--gpus" in said and "drop" not in said
    assert translate(tmp_path, old, "--gpus", "2")[0]["fsdp_config"]["fsdp_offload_params"] is True
    assert translate(tmp_path, old, "--no-offload")[0] == says(num_processes=2, use_cpu=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: XLA\n", "XLA.*has no meaning here"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}\n", "NO_SHARD.*MULTI_GPU"),
        ("a: [", "neither YAML nor JSON"),
        ("3", "is no config"),
        ("", "found nothing"),
        ("learning_rate: 1\nmax_length: 2\n", r"neither of Accelerate nor of DeepSpeed.*learning_rate, max_length"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: ds.json\n",
            "_config is 'ds.json'; write `key: value`",
        ),
        ("distributed_type: FSDP\nfsdp_config: [1]\n", r"fsdp_config is \[1\]; write `key: value` lines"),
        ("zero_optimization: 3\n", "zero_optimization is 3; write"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: no.json}\n", "no.json cannot be read"),
    ],
)
def test_what_has_no_meaning_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "old.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        FSDPConfig.translate_file(tmp_path / "old.yaml")
    assert main(["config", "--from", str(tmp_path / "old.yaml")]) == 1
