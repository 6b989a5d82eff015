"""FSDPConfig: contradictions are named with their cure, Accelerate takes what it writes, files of users are checked."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils.constants import FSDP2_STATE_DICT_TYPE, FSDP_AUTO_WRAP_POLICY

from hf_fsdp_tools.diagnostics.findings import Finding
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.config import FSDPConfig
from hf_fsdp_tools.integrations.settings import YAML_KEYS
from tests._dist import LIMIT_S, imitate_gpus

REPOSITORY = Path(__file__).parents[2]
SHIPPED = sorted(path for path in (REPOSITORY / "accelerate_configs").glob("*.yaml") if path.stem != "here")

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

WRITTEN = {f"fsdp{config.fsdp_version}_{n}": config for n, config in enumerate([*FSDP2, *FSDP1])}

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
from tests._dist import imitate_gpus
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
    return environments


@pytest.mark.parametrize("name", WRITTEN)
def test_every_setting_reaches_the_processes(launched, name):
    """By Accelerate's own launcher, under the variables of the table."""
    config, environment = WRITTEN[name], launched[name]
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["ACCELERATE_MIXED_PRECISION"] == config.mixed_precision
    for row in YAML_KEYS.values():
        value = getattr(config, row.field, None)
        if value not in (None, ()) and (config.fsdp_version, row.field) != (1, "reshard_after_forward"):
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            found = environment[row.variable]
            assert found == (text.lower() if isinstance(value, bool) else text), row.variable
    sizes = [environment.get(f"PARALLELISM_CONFIG_DP_{name}_SIZE") for name in ("REPLICATE", "SHARD")]
    copied = config.dp_replicate_size > 1 and config.fsdp_version == 2
    assert sizes == ([str(config.dp_replicate_size), str(config.dp_shard_size)] if copied else [None, None])


def test_what_fsdp1_is_not_told_is_as_fsdp2_does_it(launched):
    environment = launched["fsdp1_9"]
    assert WRITTEN["fsdp1_9"] == FSDPConfig(num_processes=2, fsdp_version=1)
    assert environment["FSDP_SHARDING_STRATEGY"] == "FULL_SHARD"
    assert environment["FSDP_BACKWARD_PREFETCH"] == "BACKWARD_PRE"
    assert (environment["FSDP_FORWARD_PREFETCH"], environment["FSDP_USE_ORIG_PARAMS"]) == ("false", "true")
    assert environment["FSDP_SYNC_MODULE_STATES"] == "false", "follows cpu_ram_efficient_loading"
    assert launched["fsdp1_11"]["FSDP_SYNC_MODULE_STATES"] == "true"
    assert launched["fsdp1_10"]["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP"
    assert launched["fsdp1_12"]["FSDP_SHARDING_STRATEGY"] == "HYBRID_SHARD"


def test_yaml_names_its_command():
    text = FSDPConfig(num_processes=2).to_accelerate_yaml(command="hf-fsdp config --gpu")
    assert text.splitlines()[0] == "# Generated by: hf-fsdp config --gpu"
    assert not FSDPConfig(num_processes=2).to_accelerate_yaml().startswith("# Generated")


def test_what_is_launched_gets_the_plugin_that_was_meant(launched):
    variables = [{n: v for n, v in launched[name].items() if n.startswith("FSDP_")} for name in ("fsdp2_0", "fsdp1_9")]
    done = run_python(PLUGINS, *map(json.dumps, variables))
    fsdp2, fsdp1 = map(str.split, done.stdout.splitlines())
    assert fsdp2 == ["2", "True", "SHARDED_STATE_DICT", "None"]
    assert fsdp1 == ["1", "None", "SHARDED_STATE_DICT", "None"]
    assert done.stderr == ""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_accelerate_launch_takes_what_is_shipped(launched, path):
    assert launched[path.stem]["FSDP_AUTO_WRAP_POLICY"] == "NO_WRAP"


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
    ({"main_process_port": -5}, "use a number from 1 to 65535"),
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


# ---- files that users wrote ----


@pytest.fixture
def on_eight_gpus(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)


def text_of(*, fsdp: dict | None = None, **top: object) -> str:
    """A file with nothing wrong in it on eight GPUs, with some keys changed."""
    data = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2, **(fsdp or {})}, **top}
    return yaml.safe_dump(data)


def check(tmp_path: Path, text: str) -> tuple[Finding, ...]:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return FSDPConfig.check_file(path)


FOUND = [
    (text_of(fsdp={"fsdp_reshard_after_foward": True}), "error unknown-key", "did you mean fsdp_reshard_after_forward"),
    (text_of(fsdp={"offload_param": True}), "error unknown-key", "did you mean fsdp_offload_params"),
    (text_of(num_process=2), "error unknown-key", "did you mean num_processes"),
    (text_of(zzz=2), "error unknown-key", "This is no key; known are command_file, commands, compute_environment, "),
    (text_of(parallelism_config={"dp_shard_size": 2}), "error unknown-key", "parallelism_config_dp_shard_size"),
    (text_of(fsdp={"fsdp_offload_params": "perhaps"}), "error wrong-value", "Use true or false."),
    (text_of(fsdp={"fsdp_min_num_params": "many"}), "error wrong-value", "Use a whole number."),
    (text_of(fsdp={"fsdp_ignored_modules": ["a"]}), "error wrong-value", "Use text."),
    (text_of(fsdp={"fsdp_state_dict_type": "SHARDED"}), "error wrong-value", "Use one of FULL_STATE_DICT, LOCAL"),
    (text_of(num_processes="two"), "error wrong-value", "Use a whole number."),
    (text_of(mixed_precision=False), "error wrong-value", "Write 'no', in quotes."),
    (text_of(parallelism_config="HSDP"), "error wrong-value", "Write `key: value` lines."),
    (text_of(mixed_precision="fp8"), "error contradiction", "Use one of no, bf16, fp16."),
    (text_of(fsdp={"fsdp_state_dict_type": "LOCAL_STATE_DICT"}), "error contradiction", "FULL_STATE_DICT."),
    (text_of(fsdp={"fsdp_transformer_layer_cls_to_wrap": "A"}), "error contradiction", "Use TRANSFORMER_BASED_WRAP or"),
    (text_of(fsdp={"fsdp_version": 3}), "error contradiction", "Use one of 1, 2."),
    (text_of(num_machines=0), "error contradiction", "Use a whole number from 1."),
    (text_of(num_machines=2), "error contradiction", "Several machines need main_process_ip"),
    (text_of(gpu_ids="0"), "error contradiction", "Each process needs its own."),
    (text_of(use_cpu=True, gpu_ids="", mixed_precision="fp16"), "error contradiction", 'On CPU use "bf16" or "no".'),
    (
        text_of(
            num_processes=8,
            parallelism_config={"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2},
        ),
        "error contradiction",
        "Set dp_shard_size to num_processes / dp_replicate_size.",
    ),
    (text_of(parallelism_config={"parallelism_config_tp_size": 2}), "error refused", "Leave all but dp_replicate_size"),
    (text_of(fsdp={"fsdp_sharding_strategy": "HYBRID_SHARD"}), "error refused", "parallelism_config with dp_replicate"),
    (text_of(fsdp={"fsdp_reshard_after_forward": "NO_SHARD"}), "error refused", "Use Accelerate's MULTI_GPU"),
    (text_of(fsdp={"fsdp_activation_checkpointing_offload": "true"}), "error refused", "Remove the line."),
    (text_of(distributed_type="MULTI_GPU"), "error not-fsdp", "make a file with `hf-fsdp config`"),
    (text_of(fsdp={"fsdp_version": 1}), "warning fsdp1", "Write fsdp_version: 2."),
    (text_of(fsdp_config={"offload_params": True}), "warning fsdp1", "Write fsdp_version: 2."),
    (text_of(fsdp={"fsdp_backward_prefetch": "BACKWARD_POST"}), "warning only-fsdp1", "Remove the line."),
    (text_of(num_processes=None), "warning num-processes", "Write num_processes"),
    (text_of(use_cpu=True), "warning use-cpu", 'Add gpu_ids: ""'),
    (text_of(num_processes=16), "warning few-devices", "lower num_processes"),
    (text_of(fsdp={"fsdp_use_orig_params": True}), "info only-fsdp1", "Remove the line."),
    (text_of(fsdp={"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}), "info only-fsdp1", "Remove the line."),
    (text_of(fsdp={"fsdp_sharding_strategy": 2}), "info translated", "Write fsdp_reshard_after_forward: false."),
]


@pytest.mark.parametrize(("text", "kind", "cure"), FOUND, ids=[f"{n}-{kind}" for n, (_, kind, _) in enumerate(FOUND)])
def test_what_is_wrong_with_a_file_is_one_finding_with_its_cure(tmp_path, on_eight_gpus, text, kind, cure):
    (finding,) = check(tmp_path, text)
    assert f"{finding.severity} {finding.code}" == kind
    assert cure in finding.cure


def test_all_that_is_wrong_is_found_at_once_errors_first(tmp_path, on_eight_gpus):
    both = {"fsdp_forward_prefetch": True, "fsdp_use_orig_params": True, "fsdp_offload": 1}
    warning = text_of(fsdp=both, parallelism_config={"parallelism_config_cp_size": 2}, num_processes=16)
    found = check(tmp_path, warning)
    assert [f.code for f in found] == ["unknown-key", "refused", "only-fsdp1", "few-devices"]
    assert "fsdp_forward_prefetch, fsdp_use_orig_params" in found[2].fact and "16 processes" in found[3].fact


@pytest.mark.parametrize(
    ("text", "cure"),
    [("just text: [", "is not YAML"), ("- a\n- b\n", "is not an Accelerate config"), (None, "hf-fsdp config")],
)
def test_what_is_no_config_at_all_is_an_error(tmp_path, text, cure):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=cure):
        FSDPConfig.check_file(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_nothing_is_wrong_with_what_is_shipped(path, on_eight_gpus):
    assert FSDPConfig.check_file(path) == ()


@pytest.mark.parametrize("config", [*FSDP2, *FSDP1], ids=WRITTEN)
def test_nothing_but_fsdp1_is_wrong_with_what_is_written(config, tmp_path, on_eight_gpus):
    found = check(tmp_path, config.to_accelerate_yaml())
    assert [finding.code for finding in found] == ["fsdp1"] * (config.fsdp_version == 1)


def from_accelerate_config(folder: Path, **fsdp: object) -> Path:
    """What `accelerate config` writes for eight GPUs, by its own class, with the answers that are its defaults."""
    questions = {
        "fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False,
        "fsdp_auto_wrap_policy": FSDP_AUTO_WRAP_POLICY[0], "fsdp_state_dict_type": FSDP2_STATE_DICT_TYPE[0],
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_activation_checkpointing": False,
    }  # fmt: skip
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="FSDP", mixed_precision="no", use_cpu=False, debug=False,
        num_processes=8, main_training_function="main", gpu_ids="all", fsdp_config=questions | fsdp,
    )  # fmt: skip
    config.to_yaml_file(folder / "default_config.yaml")
    return folder / "default_config.yaml"


def test_nothing_is_wrong_with_what_accelerate_config_writes_for_fsdp2(tmp_path, on_eight_gpus):
    assert FSDPConfig.check_file(from_accelerate_config(tmp_path)) == ()
    assert FSDPConfig.check_file(from_accelerate_config(tmp_path, fsdp_transformer_layer_cls_to_wrap="A, B")) == ()
    size = {"fsdp_auto_wrap_policy": FSDP_AUTO_WRAP_POLICY[1], "fsdp_min_num_params": 100000000}
    assert FSDPConfig.check_file(from_accelerate_config(tmp_path, **size)) == ()


def test_the_one_thing_wrong_with_what_accelerate_config_writes_for_fsdp1_is_fsdp1(tmp_path, on_eight_gpus):
    path = from_accelerate_config(
        tmp_path, fsdp_version=1, fsdp_reshard_after_forward="FULL_SHARD", fsdp_backward_prefetch="BACKWARD_PRE",
        fsdp_forward_prefetch=False, fsdp_use_orig_params=True, fsdp_sync_module_states=True,
        fsdp_state_dict_type="full_state_dict", fsdp_offload_params="false",
    )  # fmt: skip
    assert [finding.code for finding in FSDPConfig.check_file(path)] == ["fsdp1"]


def test_a_suggestion_fits_the_machine(monkeypatch):
    for count, bf16, expected in [
        (0, False, FSDPConfig(num_processes=2, use_cpu=True)),
        (4, True, FSDPConfig(num_processes=4, mixed_precision="bf16")),
        (1, False, FSDPConfig(num_processes=1)),
    ]:
        imitate_gpus(monkeypatch, count, bf16=bf16)
        config, reasons = FSDPConfig.for_machine()
        assert config == expected
        assert set(reasons) <= {field.name for field in dataclasses.fields(FSDPConfig)}
        assert f"{count or 'no'} GPU" in reasons["use_cpu"]
    config, reasons = FSDPConfig.for_machine(gpu_count=2)
    assert config == FSDPConfig(num_processes=2, mixed_precision="bf16") and "assumed" in reasons["mixed_precision"]


def test_a_config_is_made_and_written_without_torch_and_accelerate():
    code = (
        "import sys; from hf_fsdp_tools import FSDPConfig; FSDPConfig(num_processes=2).to_accelerate_yaml(); "
        "print(sorted({'torch', 'accelerate', 'transformers'} & set(sys.modules)))"
    )
    assert run_python(code).stdout == "[]\n"
