"""LaunchConfig: contradictions are named with cures, Accelerate takes what it writes, files of users are checked."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_fsdp_tools import ConfigError, LaunchConfig
from tests._dist import LIMIT_S, imitate_gpus
from tests.api import OWN_KEYS, YAML_KEYS

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
