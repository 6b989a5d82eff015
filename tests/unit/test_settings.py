"""Every FSDP setting that Accelerate and TrainingArguments know is known here too, and does what docs/settings.md says.

The lists come from the sources: a setting that a later version adds fails here until it is decided what becomes of it.
"""

import dataclasses
import functools
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin, constants
from accelerate.utils import launch as launcher
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardedStateDictConfig, StateDictType, wrap
from transformers import TrainingArguments
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from hf_fsdp_tools import ConfigError, Float8Policy, FSDPPlugin, WrapPolicy
from hf_fsdp_tools.integrations import interpret, settings, state
from hf_fsdp_tools.integrations.plugin import _read_version
from hf_fsdp_tools.steps import make_wrap_plan
from tests._checkpoints import make_model
from tests.api import (
    OWN_KEYS,
    SETTINGS,
    TRAINING_KEYS,
    VARIABLES,
    YAML_KEYS,
    Recompute,
    plugin_arguments,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP8 = Float8Policy()
MIXED = {"param_dtype": "bf16", "reduce_dtype": torch.float32}


# ---- the lists, from the sources ----


def launcher_variables() -> set[str]:
    read = re.findall(r'env_prefix \+ "([A-Z_]+)"', inspect.getsource(FullyShardedDataParallelPlugin))
    return set(re.findall(r'"(FSDP_[A-Z_]+)"', inspect.getsource(launcher))) | {f"FSDP_{name}" for name in read}


def launcher_options() -> set[str]:
    options = {option for action in launch_command_parser()._actions for option in action.option_strings}
    yaml_only = set(re.findall(r"args\.(fsdp_\w+)|\"(fsdp_\w+)\"", inspect.getsource(launcher)))
    own = {option.lstrip("-") for option in options if option.startswith("--fsdp_")}
    return own | {name for pair in yaml_only for name in pair if name}


def training_keys() -> set[str]:
    source = inspect.getsource(TrainingArguments._process_fsdp_args)
    source += inspect.getsource(TrainingArguments._apply_legacy_fsdp_to_config)
    read = re.findall(r'(?<!xla_)fsdp_config(?:\.get\(|\.setdefault\(|\[)"(\w+)"|"(\w+)" in self\.fsdp_config', source)
    return {name for pair in read for name in pair if name}


def plugin_fields() -> set[str]:
    return {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}


def test_the_tables_are_those_of_the_sources_and_of_the_document():
    assert len(launcher_variables()) >= 16 and len(launcher_options()) >= 15, "the sources are still read as they were"
    assert len(training_keys()) >= 18 and len(plugin_fields()) >= 21
    assert set(VARIABLES) - {key.upper() for key in OWN_KEYS} == launcher_variables()
    assert set(YAML_KEYS) - {*OWN_KEYS} == launcher_options(), "Accelerate has no word for what is in OWN_KEYS"
    assert training_keys() <= set(TRAINING_KEYS)
    own = {key.removeprefix("fsdp_") for key in OWN_KEYS}
    assert {row.argument for row in SETTINGS if row.argument} - own == plugin_fields()
    for source in (launcher_variables, launcher_options, training_keys, plugin_fields):
        absent = {name for name in source() if f"`{name}`" not in DOCUMENT}
        assert not absent, f"docs/settings.md does not say what becomes of {sorted(absent)}"
    for rows, names in ((YAML_KEYS, "key"), (VARIABLES, "variable")):
        assert len(rows) == len([row for row in SETTINGS if getattr(row, names)]), f"one row for each {names}"
    for mine, theirs in [
        (settings.AutoWrapPolicy, constants.FSDP_AUTO_WRAP_POLICY),
        (settings.BackwardPrefetch, constants.FSDP_BACKWARD_PREFETCH),
        (settings.StateDictType, constants.FSDP_STATE_DICT_TYPE),
        (settings.Strategy, constants.FSDP_SHARDING_STRATEGY),
    ]:
        assert list(get_args(mine)) == theirs, "in this order: files may number them"
    assert launch_command_parser().get_default("fsdp_min_num_params") == interpret._MIN_NUM_PARAMS
    assert {case.name for case in CASES} == plugin_fields()


# ---- what becomes of each ----


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that what the plugin writes is undone after the test
        monkeypatch.delenv(name)


class Case(NamedTuple):
    name: str
    said: dict[str, Any]
    expected: Callable[[FSDPPlugin], Any] | str


def has(name: str, value: Any) -> Callable[[FSDPPlugin], bool]:
    return lambda plugin: getattr(plugin, name) == value


def policy(**settings: Any) -> Callable[[FSDPPlugin], bool]:
    return lambda plugin: plugin.policy == WrapPolicy(**settings)


def units(*wanted: str) -> Callable[[FSDPPlugin], bool]:
    return lambda plugin: set(wanted) <= {name for unit in plan_of(plugin).units for name in unit.modules}


def plan_of(plugin: FSDPPlugin) -> Any:
    return make_wrap_plan(LLAMA, policy=plugin.policy_for(LLAMA))


def is_mlp(module):
    return isinstance(module, LlamaMLP)


def mlp_of_first(name, module):
    return name.endswith("layers.0.mlp")


def in_three(module, recurse, nonwrapped_numel):
    return recurse or (isinstance(module, LlamaMLP) and nonwrapped_numel > 0)


LLAMA = make_model("llama")
replicated = lambda plugin: plugin.policy_for(LLAMA).replicate  # noqa: E731
MLPS = units("model.layers.0.mlp", "model.layers.1.mlp")
PEFTS = functools.partial(
    wrap._or_policy,
    policies=[
        functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=is_mlp),
        functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={LlamaAttention}),
    ],
)
OF_SEVEN = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=7)
ONLY_FSDP1 = {
    "backward_prefetch": "BACKWARD_POST",
    "forward_prefetch": True,
    "use_orig_params": False,
    "sync_module_states": False,
    "limit_all_gathers": False,
    "param_init_fn": is_mlp,
    "state_dict_config": ShardedStateDictConfig(),
    "optim_state_dict_config": 1,
}
CASES = [
    Case("fsdp_version", {}, has("fsdp_version", 2)),
    Case("reshard_after_forward", {"FSDP_RESHARD_AFTER_FORWARD": "false"}, policy(reshard_after_forward={"*": False})),
    Case("sharding_strategy", {"sharding_strategy": "SHARD_GRAD_OP"}, policy(reshard_after_forward={"*": False})),
    Case("sharding_strategy", {"FSDP_SHARDING_STRATEGY": "2"}, policy(reshard_after_forward={"*": False})),
    Case("sharding_strategy", {"sharding_strategy": "HYBRID_SHARD"}, "ConfigError: .*HYBRID_SHARD.*dp_replicate_size"),
    Case("sharding_strategy", {"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "ConfigError: .*NO_SHARD.*MULTI_GPU"),
    Case("cpu_offload", {"FSDP_OFFLOAD_PARAMS": "true"}, lambda p: isinstance(p.cpu_offload, CPUOffloadPolicy)),
    Case("mixed_precision_policy", {"mixed_precision_policy": "bf16"}, has("mixed_precision_policy", BF16)),
    Case("mixed_precision_policy", {"mixed_precision_policy": MIXED}, has("mixed_precision_policy", BF16)),
    Case("mixed_precision_policy", {"mixed_precision_policy": "fp8"}, has("mixed_precision_policy", FP8)),
    Case("mixed_precision_policy", {"mixed_precision_policy": "fp4"}, "ConfigError: .*fp4.*Use float32, bfloat16"),
    Case("mixed_precision_policy", {"mixed_precision_policy": {"dtype": "bf16"}}, "ConfigError: no dtype; FSDP2 takes"),
    Case("auto_wrap_policy", {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, policy()),
    Case("auto_wrap_policy", {"auto_wrap_policy": wrap.ModuleWrapPolicy({LlamaMLP})}, policy(block_types=(LlamaMLP,))),
    Case("auto_wrap_policy", {"auto_wrap_policy": is_mlp}, MLPS),
    Case("auto_wrap_policy", {"auto_wrap_policy": in_three}, MLPS),
    Case("auto_wrap_policy", {"auto_wrap_policy": mlp_of_first}, units("model.layers.0.mlp", "model.layers.1")),
    Case("auto_wrap_policy", {"auto_wrap_policy": PEFTS}, units("model.layers.0.mlp", "model.layers.0.self_attn")),
    Case("auto_wrap_policy", {"auto_wrap_policy": OF_SEVEN}, policy(min_unit_params=7)),
    Case("auto_wrap_policy", {"auto_wrap_policy": 7}, "ConfigError: auto_wrap_policy is 7; expected"),
    Case(
        "transformer_cls_names_to_wrap",
        {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaMLP, LlamaAttention"},
        units("model.layers.0.mlp", "model.layers.0.self_attn"),
    ),
    Case(
        "transformer_cls_names_to_wrap",
        {"transformer_cls_names_to_wrap": ["LlamaMLP"]},
        r"warning: transformer_cls_names_to_wrap.*only with TRANSFORMER_BASED_WRAP",
    ),
    Case(
        "min_num_params",
        {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "2"},
        policy(min_unit_params=2),
    ),
    Case("min_num_params", {"min_num_params": 2000}, r"warning: min_num_params=2000.*only with SIZE_BASED_WRAP"),
    Case(
        "ignored_modules", {"FSDP_IGNORED_MODULES": r".*\.1\.mlp"}, lambda p: replicated(p) == ("model.layers.1.mlp",)
    ),
    Case(
        "ignored_modules", {"ignored_modules": [LLAMA.lm_head]}, lambda p: plan_of(p).replicated == ("lm_head.weight",)
    ),
    Case("state_dict_type", {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, lambda p: "FULL" in p.state_dict_type.name),
    Case("cpu_ram_efficient_loading", {"cpu_ram_efficient_loading": True}, has("cpu_ram_efficient_loading", True)),
    Case("activation_checkpointing", {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, has("activation_checkpointing", True)),
    Case(
        "activation_checkpointing_offload",
        {"FSDP_ACTIVATION_CHECKPOINTING": "true", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
        lambda p: p.recompute == Recompute(offload=True),
    ),
    Case(
        "activation_checkpointing_offload",
        {"FSDP_ACTIVATION_CHECKPOINTING": "1", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "yes"},
        lambda p: p.recompute == Recompute(offload=True),
    ),
    Case("use_orig_params", {"FSDP_USE_ORIG_PARAMS": "1"}, has("use_orig_params", None)),
    Case(
        "activation_checkpointing_offload",
        {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
        "ConfigError: activation_checkpointing_offload says how .* activation_checkpointing is off. Turn it on",
    ),
    *(Case(name, {name: value}, f"warning: Only FSDP1 has {name}=.*left out") for name, value in ONLY_FSDP1.items()),
]


def said(case):
    return re.sub(r" at 0x\w+", "", repr(list(case.said.values())[:1]))


@pytest.mark.filterwarnings("error")  # what is honoured or translated is so without a word
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{said(case)}")
def test_what_becomes_of_each_setting(case, monkeypatch):
    for name, value in case.said.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
    arguments = {name: value for name, value in case.said.items() if not name.isupper()}
    if not isinstance(case.expected, str):
        assert case.expected(FSDPPlugin(**arguments))
        return
    kind, _, match = case.expected.partition(": ")
    stops = kind == "ConfigError"
    with pytest.raises(ConfigError, match=match) if stops else pytest.warns(UserWarning, match=match) as seen:
        FSDPPlugin(**arguments)
    assert stops or len(seen) == 1, "one line"


EVERY, SAVED = "activation_checkpointing_every_n_layers", "activation_checkpointing_save_ops"


def test_keys_of_this_package_say_how_activations_are_recomputed(monkeypatch):
    on = {"activation_checkpointing": True}
    both = Recompute(every_n_layers=2, save_ops=("matmul", "aten::bmm"))
    assert FSDPPlugin(**on).recompute == Recompute() and FSDPPlugin().recompute is None
    assert FSDPPlugin(**on, **{EVERY: 2, SAVED: ["matmul", "aten::bmm"]}).recompute == both
    for name, wrong in ((EVERY, "two"), (SAVED, "matmull")):
        with pytest.raises(ConfigError, match=wrong):
            FSDPPlugin(**on, **{name: wrong})
        with pytest.raises(ConfigError, match=f"{name} says how .* is off"):
            FSDPPlugin(**{name: {EVERY: 2, SAVED: "mm"}[name]})
    with pytest.raises(ConfigError, match="offload needs FSDP2"):
        FSDPPlugin(fsdp_version=1, **on, activation_checkpointing_offload=True)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv(f"FSDP_{EVERY.upper()}", "2")
    monkeypatch.setenv(f"FSDP_{SAVED.upper()}", "matmul, aten::bmm")
    assert FSDPPlugin().recompute == both
    monkeypatch.setenv("FSDP_OFLOAD_PARAMS", "true")
    with pytest.warns(UserWarning, match=r"FSDP_OFLOAD_PARAMS has no effect: did you mean FSDP_OFFLOAD_PARAMS"):
        FSDPPlugin()


# ---- TrainingArguments ----


def arguments_of(tmp_path: Path, config: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    args = TrainingArguments(output_dir=str(tmp_path), fsdp=True, fsdp_config=config, use_cpu=True, **settings)
    return plugin_arguments(args)


def test_training_arguments_are_read_or_refused(tmp_path):
    plugin = FSDPPlugin(**arguments_of(tmp_path, {"version": 2}))
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT, "not transformers' FULL, which nobody asked for"
    full = FSDPPlugin(**arguments_of(tmp_path, {"state_dict_type": "FULL_STATE_DICT"}))
    assert full.state_dict_type == StateDictType.FULL_STATE_DICT
    texts = arguments_of(tmp_path, {"offload_params": "False", "activation_checkpointing_offload": "yes"})
    assert texts["cpu_offload"] is False and texts["activation_checkpointing_offload"] is True, "as the launcher has it"
    with pytest.raises(ConfigError, match=r"ofload_params: did you mean offload_params\? xla: FSDP on TPUs"):
        arguments_of(tmp_path, {"ofload_params": True, "xla": True})
    args = TrainingArguments(output_dir=str(tmp_path), fsdp_config={"version": 2}, use_cpu=True)
    with pytest.warns(UserWarning, match=r"no effect without fsdp: add fsdp=True"):
        assert plugin_arguments(args) == {}


# ---- what accelerate launch left in the environment ----

LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
"""Variables of `accelerate launch` for a file without fsdp_version."""


@pytest.fixture
def launch(monkeypatch):
    for name in [*LAUNCHED, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)

    def make(**variables):
        for name, value in (LAUNCHED | variables).items():
            monkeypatch.setenv(name, value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plugin = FSDPPlugin()
        return plugin, [str(each.message) for each in caught]

    return make


def test_a_file_without_a_version_is_read_as_fsdp2_and_who_asks_for_fsdp1_gets_it(launch, monkeypatch):
    old = {"FSDP_FORWARD_PREFETCH": "true", "FSDP_STATE_DICT_TYPE": "LOCAL_STATE_DICT"}
    plugin, (line,) = launch(FSDP_SHARDING_STRATEGY="2", **old)
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is False
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert "SHARD_GRAD_OP means reshard_after_forward=False; left out: forward_prefetch=True" in line
    assert "hf-fsdp convert FILE" in line and "\n" not in line
    assert launch(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")[1] == [], "one rank says it"
    explicit = {"FSDP_RESHARD_AFTER_FORWARD": "full_shard", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    plugin, said = launch(**explicit)
    assert plugin.fsdp_version == 1 and not any("read as FSDP2" in line for line in said)
    launch()  # as for a file without a version again
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert FSDPPlugin(fsdp_version=1).fsdp_version == 1
    monkeypatch.delenv("ACCELERATE_DYNAMO_USE_FULLGRAPH")
    assert _read_version(None) == (1, False), "set by hand, without the launcher"


@pytest.mark.parametrize(("strategy", "reshard"), [("HYBRID_SHARD", True), ("HYBRID_SHARD_ZERO2", False)])
def test_a_hybrid_strategy_is_a_copy_per_machine(launch, strategy, reshard):
    ranks = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    plugin, (line,) = launch(**ranks, LOCAL_WORLD_SIZE="4", FSDP_SHARDING_STRATEGY=strategy)
    assert (plugin.copies.dp_replicate_size, plugin.copies.dp_shard_size) == (2, 4)
    assert plugin.reshard_after_forward is reshard and "in 2 copies, one per machine" in line
    assert launch(**ranks, LOCAL_WORLD_SIZE="8", FSDP_SHARDING_STRATEGY=strategy)[0].copies is None


def test_another_version_and_a_config_for_gpus_on_a_machine_without_are_refused(monkeypatch):
    for version in (3, "two"):
        with pytest.raises(ConfigError, match=f"fsdp_version is {version}: use 2"):
            FSDPPlugin(fsdp_version=version)
        monkeypatch.setenv("FSDP_VERSION", str(version))
        with pytest.raises(ConfigError, match=f"fsdp_version is {version}: use 2"):
            FSDPPlugin()
    monkeypatch.setattr(state, "local_device", lambda: torch.device("cpu"))
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"is for GPUs.*finds none.*\(CUDA_VISIBLE_DEVICES is not set\)"):
        state._check_gpus(cpu=False)
