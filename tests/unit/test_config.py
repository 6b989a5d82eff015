"""LaunchConfig: contradictions are named with cures, Accelerate takes what it writes, files of users are checked."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hf_fsdp_tools import ConfigError, LaunchConfig
from tests._dist import LIMIT_S, imitate_gpus
from tests.api import OWN_KEYS, YAML_KEYS, Finding, main
from tests.unit.test_cli import says

REPOSITORY = Path(__file__).parents[2]
SHIPPED = sorted(path for path in (REPOSITORY / "accelerate_configs").glob("*.yaml") if path.stem != "here")

CONFIGS = [
    LaunchConfig(num_processes=1, mixed_precision="bf16"),
    LaunchConfig(num_processes=2, use_cpu=True),
    LaunchConfig(num_processes=8, reshard_after_forward=False, offload_params=True, activation_checkpointing=True),
    LaunchConfig(num_processes=8, dp_replicate_size=2, mixed_precision="fp16", state_dict_type="FULL_STATE_DICT"),
    LaunchConfig(num_processes=4, num_machines=2, machine_rank=1, main_process_ip="node0", main_process_port=29501),
    LaunchConfig(num_processes=2, gpu_ids="0,3", cpu_ram_efficient_loading=True),
    LaunchConfig(num_processes=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls_to_wrap=("A", "B")),
    LaunchConfig(num_processes=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=20_000_000),
    LaunchConfig(num_processes=2, ignored_modules=r".*\.q_norm"),
    LaunchConfig(num_processes=2, activation_checkpointing=True, activation_checkpointing_offload=True),
]
WRITTEN = {f"config_{n}": config for n, config in enumerate(CONFIGS)}

LAUNCHER_ENVIRONMENTS = """
import json, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from tests._dist import imitate_gpus
for path in sys.argv[1:]:
    args = launch_command_parser().parse_args(["--config_file", path, "script.py"])
    args, _, _ = _validate_launch_command(args)
    assert args.use_fsdp and not args.cpu, path
    print(json.dumps({"args": {name: getattr(args, name) for name in ("num_processes", "num_machines", "machine_rank")},
                      "environment": {name: value for name, value in prepare_multi_gpu_env(args).items()
                                      if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_", "CUDA_"))}}))
"""


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> dict[str, dict[str, str]]:
    """What Accelerate's own launcher makes of each file, up to the start of processes; by file name."""
    folder = tmp_path_factory.mktemp("configs")
    for name, config in WRITTEN.items():
        (folder / f"{name}.yaml").write_text(config.to_accelerate_yaml())
    paths = [*SHIPPED, *sorted(folder.iterdir())]
    done = run_python(LAUNCHER_ENVIRONMENTS, *map(str, paths))
    assert done.stderr == ""
    environments = {}
    for path, found in zip(paths, map(json.loads, done.stdout.splitlines()), strict=True):
        file = yaml.safe_load(path.read_text())
        assert found["args"] == {name: file[name] for name in found["args"]}, path
        environments[path.stem] = found["environment"]
    assert all(environments[path.stem]["FSDP_AUTO_WRAP_POLICY"] == "NO_WRAP" for path in SHIPPED)
    return environments


@pytest.mark.parametrize("name", WRITTEN)
def test_every_setting_reaches_the_processes(launched, name):
    """By Accelerate's own launcher, under the variables of the table."""
    config, environment = WRITTEN[name], launched[name]
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["ACCELERATE_MIXED_PRECISION"] == config.mixed_precision
    for row in YAML_KEYS.values():
        value = getattr(config, row.field, None)
        if row.key in OWN_KEYS or (row.field == "activation_checkpointing_offload" and not value):
            continue  # which no launcher passes on; and what is in no file
        if value not in (None, ()):
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            found = environment[row.variable]
            assert found == (text.lower() if isinstance(value, bool) else text), row.variable
    sizes = [environment.get(f"PARALLELISM_CONFIG_DP_{name}_SIZE") for name in ("REPLICATE", "SHARD")]
    copied = [str(config.dp_replicate_size), str(config.dp_shard_size)]
    assert sizes == (copied if config.dp_replicate_size > 1 else [None, None])


CONTRADICTIONS = [
    ({"num_processes": 3, "num_machines": 2}, "not a multiple of num_machines 2"),
    ({"num_processes": 4, "num_machines": 2}, "need main_process_ip and main_process_port"),
    ({"machine_rank": 1}, "counts from 0 and must be below num_machines 1"),
    ({"num_processes": 4, "gpu_ids": "0,1"}, "each process needs its own"),
    ({"use_cpu": True, "mixed_precision": "fp16"}, 'use "bf16" or "no"'),
    ({"dp_replicate_size": 3}, "does not divide num_processes 2"),
    ({"activation_checkpointing_offload": True}, "turn activation_checkpointing on or drop it"),
    ({"dp_replicate_size": 2}, "nothing is sharded"),
    ({"mixed_precision": "bf61"}, "use one of no, bf16, fp16"),
    ({"main_process_port": -5}, "use a number from 1 to 65535"),
    ({"state_dict_type": "LOCAL_STATE_DICT"}, "use SHARDED_STATE_DICT or FULL_STATE_DICT"),
    ({"transformer_layer_cls_to_wrap": ("A",)}, "use TRANSFORMER_BASED_WRAP or drop it"),
]


@pytest.mark.parametrize(("fields", "cure"), CONTRADICTIONS, ids=[" ".join(fields) for fields, _ in CONTRADICTIONS])
def test_contradictions_name_their_cure(fields, cure):
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(**{"num_processes": 2, **fields})
    assert cure in str(caught.value)


def test_contradictions_are_in_one_error_and_ranks_that_share_rows_are_written():
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(num_processes=3, dp_replicate_size=2, use_cpu=True, offload_params=True, min_num_params=1)
    for name in ("dp_replicate_size 2", "offload_params", "min_num_params"):
        assert name in str(caught.value)
    assert "in 3 places" in str(caught.value)
    config = LaunchConfig(num_processes=8, dp_replicate_size=2, cp_size=2)
    assert config.dp_shard_size == 2
    section = yaml.safe_load(config.to_accelerate_yaml())["parallelism_config"]
    assert {key.removeprefix("parallelism_config_"): value for key, value in section.items()} == {
        "dp_replicate_size": 2,
        "dp_shard_size": 2,
        "cp_size": 2,
        "tp_size": 1,
    }
    with pytest.raises(ConfigError, match="cp_size 3 does not divide the 4 processes of a copy"):
        LaunchConfig(num_processes=8, dp_replicate_size=2, cp_size=3)


def test_a_suggestion_fits_the_machine(monkeypatch):
    for count, bf16, expected in [
        (0, False, LaunchConfig(num_processes=2, use_cpu=True)),
        (4, True, LaunchConfig(num_processes=4, mixed_precision="bf16")),
        (1, False, LaunchConfig(num_processes=1)),
    ]:
        imitate_gpus(monkeypatch, count, bf16=bf16)
        config, reasons = LaunchConfig.for_machine()
        assert config == expected
        assert set(reasons) <= {field.name for field in dataclasses.fields(LaunchConfig)}
        assert f"{count or 'no'} GPU" in reasons["use_cpu"]
    config, reasons = LaunchConfig.for_machine(gpu_count=2)
    assert config == LaunchConfig(num_processes=2, mixed_precision="bf16") and "assumed" in reasons["mixed_precision"]


OLD = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
gpu_ids: ''
machine_rank: 0
main_process_port: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""

GPUS = OLD.replace("gpu_ids: ''\n", "").replace("use_cpu: true", "use_cpu: false").replace("'no'\nnum", "bf16\nnum")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_gpus(monkeypatch, 0)


def translate(tmp_path: Path, text: str | dict[str, Any], *words: str) -> tuple[dict[str, Any], dict[str, str]]:
    path = tmp_path / "old.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    assert main(["convert", str(path), "--output", str(tmp_path / "new.yaml"), "--force", *words]) == 0
    new = yaml.safe_load((tmp_path / "new.yaml").read_text())
    problems = [each for each in LaunchConfig.check_file(tmp_path / "new.yaml") if each.severity == "error"]
    assert not problems
    return new, {key: became for key, _, became in LaunchConfig.translate_file(path).rows}


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
    for config in CONFIGS:
        if config.cpu_ram_efficient_loading:
            continue  # each rank reads its own shards: it is left out
        new, became = translate(tmp_path, config.to_accelerate_yaml())
        assert new == yaml.safe_load(config.to_accelerate_yaml())
        assert became["num_processes"] == became["fsdp_version"] == "kept"
    file = {"distributed_type": "FSDP", "num_machines": 2, "num_processes": 16, "mixed_precision": "bf16"}
    new, became = translate(tmp_path, file | {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}})
    assert new["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    assert new["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert "in 2 copies, one per machine" in became["fsdp_sharding_strategy"]
    assert new["main_process_ip"] == "ADDRESS-OF-MACHINE-0", "which the launch command replaces"


@pytest.mark.parametrize(("kind", "extra"), [("MULTI_GPU", {"num_processes": 4}), ("NO", {}), ("MULTI_CPU", {})])
def test_plain_data_parallelism_becomes_fsdp(tmp_path: Path, kind: str, extra: dict[str, Any]) -> None:
    file = {"distributed_type": kind, "mixed_precision": False, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    words = ["--num-processes", "1"] if kind == "NO" else []
    new, became = translate(tmp_path, file | {"num_processes": 2} | extra, *words)
    count = {"MULTI_GPU": 4, "NO": 1, "MULTI_CPU": 2}[kind]
    assert new == says(num_processes=count, use_cpu=kind == "MULTI_CPU")
    assert became["distributed_type"].startswith("FSDP") and "--torch_compile" in became["dynamo_config"]


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
    assert launch.endswith("script.py --gradient_accumulation_steps 4 --max_grad_norm 1.0 --learning_rate 1e-05")
    assert became["zero_optimization.overlap_comm"] == "left out: means nothing here"
    assert "--per_device_train_batch_size" in became["train_micro_batch_size_per_gpu"]
    assert "did you mean stage" in became["zero_optimization.stag"]
    assert "zero_stage" in became["zero_stages"]
    keys = {"distributed_type", "num_processes", "deepspeed_config_file", "zero3_init_flag", "optimizer.params.betas"}
    assert keys <= became.keys() and len(became) == 21, "each key of both files has a row"

    two = {"zero_stage": 2, "gradient_clipping": 0.5, "offload_param_device": "none"}
    file = {"distributed_type": "DEEPSPEED", "num_processes": 8, "mixed_precision": "fp16"}
    new, became = translate(tmp_path, file | {"deepspeed_config": two})
    assert became["offload_param_device"] == "so without it too"
    assert new == says(num_processes=8, mixed_precision="fp16", reshard_after_forward=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("distributed_type: XLA\n", "XLA.*has no meaning here"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}\n", "NO_SHARD.*MULTI_GPU"),
        ("a: [", "neither YAML nor JSON"),
        ("a: &a [x, x]\nb: *a\n", r"the alias \*a is not read here: write the value out"),
        ("learning_rate: 1\nmax_length: 2\n", r"neither of Accelerate nor of DeepSpeed.*learning_rate, max_length"),
        ("stage: sft\ndeepspeed: ds.json\nbf16: true\n", "neither of Accelerate nor .* have no stage, deepspeed, bf16"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: no.json}\n", "no.json cannot be read"),
    ],
)
def test_what_has_no_meaning_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "old.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        LaunchConfig.translate_file(tmp_path / "old.yaml")


@pytest.fixture
def on_eight_gpus(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)


def text_of(*, fsdp: dict | None = None, **top: object) -> str:
    data = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2, **(fsdp or {})}, **top}
    return yaml.safe_dump(data)


def check(tmp_path: Path, text: str) -> tuple[Finding, ...]:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return LaunchConfig.check_file(path)


DP = "parallelism_config_dp"
FOUND = [
    (text_of(fsdp={"fsdp_reshard_after_foward": True}), "error unknown-key", "did you mean fsdp_reshard_after_forward"),
    (text_of(fsdp={"fsdp_cp_size": 2}), "error unknown-key", "parallelism_config: {parallelism_config_cp_size: 2}"),
    (text_of(zzz=2), "error unknown-key", "This is no key; known are "),
    (text_of(parallelism_config={"dp_shard_size": 2}), "error unknown-key", "parallelism_config_dp_shard_size"),
    (text_of(fsdp={"fsdp_offload_params": "perhaps"}), "error wrong-value", "Use true or false."),
    (text_of(mixed_precision=False), "error wrong-value", "Write 'no', in quotes."),
    (text_of(mixed_precision="fp8", fp8_config={"backend": "TE"}), "error refused", "Write backend: AO (torchao)."),
    (
        text_of(num_processes=8, parallelism_config={f"{DP}_replicate_size": 2, f"{DP}_shard_size": 2}),
        "error contradiction",
        "Set dp_shard_size to num_processes / dp_replicate_size.",
    ),
    (text_of(parallelism_config={"parallelism_config_sp_size": 2}), "error refused", "Leave it out."),
    (text_of(fsdp={"fsdp_sharding_strategy": "HYBRID_SHARD"}), "error refused", "parallelism_config with dp_replicate"),
    (
        text_of(fsdp={"fsdp_activation_checkpointing_offload": "true"}),
        "error contradiction",
        "Turn activation_checkpoint",
    ),
    (text_of(distributed_type="MULTI_GPU"), "error not-fsdp", "make a file with `hf-fsdp init`"),
    (text_of(fsdp={"fsdp_version": 1}), "warning fsdp1", "Write fsdp_version: 2."),
    (text_of(fsdp={"fsdp_backward_prefetch": "BACKWARD_POST"}), "warning only-fsdp1", "Remove the line."),
    (text_of(num_processes=16), "warning few-devices", "lower num_processes"),
    (text_of(fsdp={"fsdp_sharding_strategy": 2}), "info translated", "Write fsdp_reshard_after_forward: false."),
]


@pytest.mark.parametrize(("text", "kind", "cure"), FOUND, ids=[f"{n}-{kind}" for n, (_, kind, _) in enumerate(FOUND)])
def test_what_is_wrong_with_a_file_is_one_finding_with_its_cure(tmp_path, on_eight_gpus, text, kind, cure):
    (finding,) = check(tmp_path, text)
    assert f"{finding.severity} {finding.code}" == kind
    assert cure in finding.fix


def test_nothing_is_wrong_with_what_is_shipped_or_written_here(tmp_path, on_eight_gpus):
    for path in SHIPPED:
        assert LaunchConfig.check_file(path) == (), path
    for config in CONFIGS:
        assert check(tmp_path, config.to_accelerate_yaml()) == (), config
