"""FSDPConfig: contradictions are named with their cure, and Accelerate and the Trainer take what it writes."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.config import FSDPConfig, suggest_config

REPOSITORY = Path(__file__).parents[2]
SHIPPED = sorted((REPOSITORY / "accelerate_configs").glob("fsdp*.yaml"))

FSDP2 = [
    FSDPConfig(num_processes=1, mixed_precision="bf16"),
    FSDPConfig(num_processes=2, use_cpu=True),
    FSDPConfig(num_processes=8, reshard_after_forward=False, offload_params=True, activation_checkpointing=True),
    FSDPConfig(num_processes=8, dp_replicate_size=2, mixed_precision="fp16", state_dict_type="FULL_STATE_DICT"),
    FSDPConfig(num_processes=4, num_machines=2, machine_rank=1, main_process_ip="node0", main_process_port=29501),
    FSDPConfig(num_processes=2, gpu_ids="0,3", cpu_ram_efficient_loading=True),
    FSDPConfig(
        num_processes=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls_to_wrap=("ALayer", "BLayer")
    ),
    FSDPConfig(num_processes=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=20_000_000),
    FSDPConfig(num_processes=2, ignored_modules=r".*\.q_norm"),
]
FSDP1 = [
    FSDPConfig(num_processes=2, fsdp_version=1),
    FSDPConfig(num_processes=2, fsdp_version=1, use_cpu=True, reshard_after_forward=False, use_orig_params=False),
    FSDPConfig(num_processes=2, fsdp_version=1, cpu_ram_efficient_loading=True, backward_prefetch="BACKWARD_POST"),
    FSDPConfig(
        num_processes=16, num_machines=2, dp_replicate_size=2, fsdp_version=1, main_process_ip="a", main_process_port=1
    ),
]

WRITTEN = {
    "written_2": FSDPConfig(num_processes=8, dp_replicate_size=2, mixed_precision="bf16", offload_params=True),
    "written_1": FSDPConfig(num_processes=2, fsdp_version=1, reshard_after_forward=False),
}

PROBE = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_FSDP", "FSDP_VERSION",
         "ACCELERATE_MIXED_PRECISION", "CUDA_VISIBLE_DEVICES")
with open(os.path.join(sys.argv[1], os.environ["RANK"] + ".json"), "w") as file:
    json.dump({name: os.environ.get(name) for name in names}, file)
"""

LAUNCHER_ENVIRONMENTS = """
import json, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
for path in sys.argv[1:]:
    args = launch_command_parser().parse_args(["--config_file", path, "script.py"])
    args, _, _ = _validate_launch_command(args)
    assert args.use_fsdp and not args.cpu, path
    print(json.dumps({"args": {name: getattr(args, name) for name in ("num_processes", "num_machines", "machine_rank")},
                      "environment": {name: value for name, value in prepare_multi_gpu_env(args).items()
                                      if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_", "CUDA_"))}}))
"""

PLUGINS = """
import json, os, sys
from accelerate import FullyShardedDataParallelPlugin
for environment in map(json.loads, sys.argv[1:]):
    os.environ.update(environment)
    plugin = FullyShardedDataParallelPlugin()
    print(plugin.fsdp_version, plugin.reshard_after_forward, plugin.state_dict_type.name, plugin.auto_wrap_policy)
    for name in environment:
        del os.environ[name]
"""

TRAINER = """
import json, sys, transformers
keywords = json.loads(sys.argv[1])
arguments = transformers.TrainingArguments(output_dir=sys.argv[2], **keywords)
plugin = arguments.fsdp_plugin_args
print(json.dumps({name: str(value) for name, value in plugin.items()}))
"""


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> dict[str, dict[str, str]]:
    """What accelerate's own launcher makes of each YAML, up to the point where it would start processes; by file name."""
    folder = tmp_path_factory.mktemp("configs")
    for name, config in WRITTEN.items():
        (folder / f"{name}.yaml").write_text(config.to_accelerate_yaml())
    paths = [*SHIPPED, *sorted(folder.iterdir())]
    done = run_python(LAUNCHER_ENVIRONMENTS, *map(str, paths))
    assert done.stderr == ""
    environments = {}
    for path, found in zip(paths, map(json.loads, done.stdout.splitlines()), strict=True):
        config = FSDPConfig.from_accelerate_yaml(path)
        expected = {name: getattr(config, name) for name in ("num_processes", "num_machines", "machine_rank")}
        assert found["args"] == expected, path
        environments[path.stem] = found["environment"]
    return environments


@pytest.mark.parametrize("config", FSDP2, ids=range(len(FSDP2)))
def test_yaml_and_back(config):
    assert FSDPConfig.from_accelerate_yaml(config.to_accelerate_yaml(command="hf-fsdp config")) == config


@pytest.mark.parametrize("config", FSDP1, ids=range(len(FSDP1)))
def test_yaml_and_back_fsdp1(config):
    """FSDP1's None fields come back as the values that they stand for."""
    text = config.to_accelerate_yaml()
    again = FSDPConfig.from_accelerate_yaml(text)
    assert again.to_accelerate_yaml() == text
    filled = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states")
    kept = [field.name for field in dataclasses.fields(config) if field.name not in filled]
    assert [getattr(again, name) for name in kept] == [getattr(config, name) for name in kept]


def test_yaml_names_its_command():
    text = FSDPConfig(num_processes=2).to_accelerate_yaml(command="hf-fsdp config --gpu")
    assert text.splitlines()[0] == "# Generated by: hf-fsdp config --gpu"
    assert not FSDPConfig(num_processes=2).to_accelerate_yaml().startswith("# Generated")


def test_accelerate_launch_takes_fsdp2(launched):
    environment = launched["written_2"]
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "NO_WRAP"
    assert environment["FSDP_RESHARD_AFTER_FORWARD"] == "true"
    assert environment["FSDP_OFFLOAD_PARAMS"] == "true"
    assert environment["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    assert environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "4"


def test_accelerate_launch_takes_fsdp1(launched):
    environment = launched["written_1"]
    assert environment["FSDP_VERSION"] == "1"
    assert environment["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP"
    assert environment["FSDP_BACKWARD_PREFETCH"] == "BACKWARD_PRE"
    assert environment["FSDP_SYNC_MODULE_STATES"] == "false"


def test_what_is_launched_gets_the_plugin_that_was_meant(launched):
    variables = [{n: v for n, v in launched[name].items() if n.startswith("FSDP_")} for name in WRITTEN]
    done = run_python(PLUGINS, *map(json.dumps, variables))
    fsdp2, fsdp1 = map(str.split, done.stdout.splitlines())
    assert fsdp2 == ["2", "True", "SHARDED_STATE_DICT", "None"]
    assert fsdp1 == ["1", "None", "SHARDED_STATE_DICT", "None"]
    assert done.stderr == ""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_accelerate_launch_takes_what_is_shipped(launched, path):
    assert launched[path.stem]["FSDP_AUTO_WRAP_POLICY"] == "NO_WRAP"


def test_shipped_configs_cover_the_common_machines():
    configs = [FSDPConfig.from_accelerate_yaml(path) for path in SHIPPED]
    assert any(config.use_cpu for config in configs)
    assert {1, 8} <= {config.num_processes for config in configs if not config.use_cpu}
    assert any(config.dp_replicate_size > 1 for config in configs)


def test_two_processes_start_on_cpu(tmp_path):
    """Also where there are GPUs: they are hidden, because use_cpu itself does not reach the processes."""
    path = tmp_path / "cpu.yaml"
    path.write_text(FSDPConfig(num_processes=2, use_cpu=True).to_accelerate_yaml())
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    launch = "from accelerate.commands.launch import main; main()"
    done = run_python(launch, "--config_file", str(path), str(script), str(tmp_path))
    assert done.stderr == "" and done.stdout == ""
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, environment in enumerate(found):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] and int(environment["MASTER_PORT"]) > 0
        assert environment["ACCELERATE_USE_FSDP"] == "true"
        assert environment["FSDP_VERSION"] == "2"
        assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]


def test_training_arguments_take_it(tmp_path):
    config = FSDPConfig(num_processes=2, use_cpu=True, reshard_after_forward=False, activation_checkpointing=True)
    keywords = config.to_training_arguments()
    assert keywords["fsdp"] is True and keywords["use_cpu"] is True
    plugin = json.loads(run_python(TRAINER, json.dumps(keywords), str(tmp_path)).stdout)
    assert plugin["fsdp_version"] == "2"
    assert plugin["auto_wrap_policy"] == "NO_WRAP"
    assert plugin["reshard_after_forward"] == "False"
    assert plugin["activation_checkpointing"] == "True"
    assert plugin["cpu_ram_efficient_loading"] == "False"
    assert plugin["state_dict_type"] == "SHARDED_STATE_DICT"
    assert "cpu_offload" not in plugin


def test_training_arguments_keys():
    keywords = FSDPConfig(num_processes=2, mixed_precision="bf16", offload_params=True).to_training_arguments()
    assert (keywords["bf16"], keywords["fp16"], keywords["use_cpu"]) == (True, False, False)
    assert keywords["fsdp_config"]["cpu_offload"] is True
    wrapped = FSDPConfig(
        num_processes=2,
        fsdp_version=1,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_layer_cls_to_wrap=("A", "B"),
    ).to_training_arguments()["fsdp_config"]
    assert wrapped["transformer_layer_cls_to_wrap"] == ["A", "B"]
    assert wrapped["reshard_after_forward"] == "full_shard"
    assert not any(key.startswith("fsdp_") for key in wrapped)


def test_training_arguments_cannot_say_hsdp():
    with pytest.raises(ConfigError, match=r"ParallelismConfig\(dp_replicate_size=2, dp_shard_size=4\)"):
        FSDPConfig(num_processes=8, dp_replicate_size=2).to_training_arguments()


CONTRADICTIONS = [
    ({"num_processes": 3, "num_machines": 2}, "not a multiple of num_machines 2"),
    ({"num_processes": 4, "num_machines": 2}, "need main_process_ip and main_process_port"),
    ({"machine_rank": 1}, "counts from 0 and must be below num_machines 1"),
    ({"num_processes": 4, "gpu_ids": "0,1"}, "each process needs its own"),
    ({"use_cpu": True, "gpu_ids": "0,1"}, "drop one of the two"),
    ({"use_cpu": True, "mixed_precision": "fp16"}, 'use "bf16" or "no"'),
    ({"use_cpu": True, "offload_params": True}, "drop offload_params"),
    ({"dp_replicate_size": 3}, "does not divide num_processes 2"),
    ({"dp_replicate_size": 2}, "nothing is sharded"),
    ({"mixed_precision": "bf61"}, "use one of no, bf16, fp16"),
    ({"fsdp_version": 3}, "use one of 1, 2"),
    ({"num_processes": 0}, "use a whole number from 1"),
    ({"num_processes": "2"}, "use a whole number from 1"),
    ({"state_dict_type": "LOCAL_STATE_DICT"}, "use SHARDED_STATE_DICT or FULL_STATE_DICT"),
    ({"transformer_layer_cls_to_wrap": ("A",)}, "use TRANSFORMER_BASED_WRAP or drop it"),
    ({"min_num_params": 5}, "SIZE_BASED_WRAP needs it"),
    ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "SIZE_BASED_WRAP needs it"),
    ({"use_orig_params": True, "backward_prefetch": "BACKWARD_PRE"}, "use fsdp_version 1"),
    ({"fsdp_version": 1, "num_processes": 8, "dp_replicate_size": 4}, "use fsdp_version 2"),
    ({"fsdp_version": 1, "cpu_ram_efficient_loading": True, "sync_module_states": False}, "leave it unset"),
    ({"fsdp_version": 1, "use_cpu": True, "sync_module_states": True}, "set both to false"),
]


@pytest.mark.parametrize(("fields", "cure"), CONTRADICTIONS, ids=[" ".join(fields) for fields, _ in CONTRADICTIONS])
def test_contradictions_name_their_cure(fields, cure):
    with pytest.raises(ConfigError) as caught:
        FSDPConfig(**{"num_processes": 2, **fields})
    assert cure in str(caught.value)


def test_all_contradictions_at_once():
    with pytest.raises(ConfigError) as caught:
        FSDPConfig(num_processes=3, dp_replicate_size=2, use_cpu=True, offload_params=True, use_orig_params=True)
    for name in ("dp_replicate_size 2", "offload_params", "use_orig_params"):
        assert name in str(caught.value)
    assert "in 3 places" in str(caught.value)


def yaml_of(*, fsdp: dict | None = None, **top: object) -> str:
    """A valid Accelerate file with some keys changed."""
    data = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2, **(fsdp or {})}, **top}
    return yaml.safe_dump(data)


UNREADABLE = [
    (yaml_of(fsdp={"fsdp_reshard_after_foward": True}), "did you mean fsdp_reshard_after_forward"),
    (yaml_of(fsdp={"offload_param": True}), "did you mean fsdp_offload_params"),
    (yaml_of(num_process=2), "did you mean num_processes"),
    (yaml_of(zzz=2), "unknown key zzz; remove it"),
    (
        yaml_of(fsdp={"fsdp_sharding_strategy": "FULL_SHARD"}),
        "fsdp_reshard_after_forward replaces the sharding strategy",
    ),
    (yaml_of(fsdp={"fsdp_use_orig_params": True}), "only FSDP1 has fsdp_use_orig_params; remove it"),
    (yaml_of(fsdp={"fsdp_reshard_after_forward": "FULL_SHARD"}), "FSDP2 takes true or false"),
    (yaml_of(fsdp={"fsdp_version": 1, "fsdp_sharding_strategy": "NO_SHARD"}), "FSDP1 takes one of FULL_SHARD"),
    (yaml_of(fsdp={"fsdp_offload_params": "perhaps"}), "expected true or false"),
    (yaml_of(fsdp={"fsdp_activation_checkpointing_offload": True}), "use False, or launch with this file as it is"),
    (yaml_of(dynamo_config={"dynamo_backend": "INDUCTOR"}), "use {}, or launch with this file as it is"),
    (yaml_of(parallelism_config={"parallelism_config_tp_size": 2}), "parallelism_config_tp_size is 2"),
    (yaml_of(parallelism_config={"dp_replicate_size": 2, "dp_shard_size": 2}), "is not num_processes 2"),
    (yaml_of(distributed_type="MULTI_GPU"), "make a file with `hf-fsdp config`"),
    (yaml_of(num_processes=None), "say how many processes there are"),
    (yaml_of(fsdp_config="FULL_SHARD"), "expected `key: value` lines"),
    (yaml_of(mixed_precision="fp8"), "use one of no, bf16, fp16"),
    ("just text: [", "is not YAML"),
    ("- a\n- b\n", "is not an Accelerate config"),
]


@pytest.mark.parametrize(("text", "cure"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_nothing_is_dropped_in_silence(text, cure):
    with pytest.raises(ConfigError) as caught:
        FSDPConfig.from_accelerate_yaml(text)
    assert cure in str(caught.value)


def test_absent_file(tmp_path):
    with pytest.raises(ConfigError, match="make one with `hf-fsdp config`"):
        FSDPConfig.from_accelerate_yaml(tmp_path / "absent.yaml")


def test_fsdp1_keys_in_an_fsdp2_file_give_one_line():
    text = yaml_of(fsdp={"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True})
    with pytest.raises(ConfigError) as caught:
        FSDPConfig.from_accelerate_yaml(text)
    assert "\n" not in str(caught.value)
    assert "fsdp_sharding_strategy, fsdp_use_orig_params" in str(caught.value)


def test_a_file_from_accelerate_config(tmp_path):
    """What `accelerate config` 1.15 writes for FSDP1, with its TPU and bare `no` lines."""
    path = tmp_path / "default_config.yaml"
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndowncast_bf16: 'no'\n"
        "enable_cpu_affinity: false\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_cpu_ram_efficient_loading: true\n"
        "  fsdp_forward_prefetch: false\n  fsdp_offload_params: 'false'\n  fsdp_sharding_strategy: 2\n"
        "  fsdp_state_dict_type: full_state_dict\n"
        "  fsdp_sync_module_states: true\n  fsdp_transformer_layer_cls_to_wrap: ALayer, BLayer\n"
        "  fsdp_use_orig_params: true\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: no\n"
        "num_machines: 1\nnum_processes: 8\nrdzv_backend: static\nsame_network: true\ntpu_env: []\n"
        "tpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\ngpu_ids: all\n"
    )
    assert FSDPConfig.from_accelerate_yaml(str(path)) == FSDPConfig(
        num_processes=8,
        fsdp_version=1,
        reshard_after_forward=False,
        state_dict_type="FULL_STATE_DICT",
        cpu_ram_efficient_loading=True,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_layer_cls_to_wrap=("ALayer", "BLayer"),
        backward_prefetch="BACKWARD_PRE",
        forward_prefetch=False,
        use_orig_params=True,
        sync_module_states=True,
    )


def test_absent_keys_mean_what_the_launcher_takes_them_for():
    config = FSDPConfig.from_accelerate_yaml("distributed_type: FSDP\nnum_processes: 2\n")
    assert config.fsdp_version == 1
    assert config.cpu_ram_efficient_loading and config.sync_module_states
    assert config.state_dict_type == "FULL_STATE_DICT"
    assert config.backward_prefetch == "NO_PREFETCH"


def test_a_suggestion_fits_the_machine():
    config, reasons = suggest_config(gpu_count=0, bf16=False)
    assert config == FSDPConfig(num_processes=2, use_cpu=True)
    config, _ = suggest_config(gpu_count=4, bf16=True)
    assert config == FSDPConfig(num_processes=4, mixed_precision="bf16")
    config, _ = suggest_config(gpu_count=1, bf16=False)
    assert config == FSDPConfig(num_processes=1)
    assert set(reasons) <= {field.name for field in dataclasses.fields(FSDPConfig)}


def test_shipped_configs_are_what_their_command_makes(tmp_path, monkeypatch):
    from hf_fsdp_tools.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert SHIPPED
    for path in SHIPPED:
        command = shlex.split(path.read_text().splitlines()[0].removeprefix("# Generated by:"))
        assert command[0] == "hf-fsdp"
        assert main(command[1:]) == 0
        assert (tmp_path / path.relative_to(REPOSITORY)).read_text() == path.read_text()
