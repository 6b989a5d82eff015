"""`TrainingArguments` beside variables, an Accelerator, a plugin or shards: honoured, equal, or one error; no silence.

A process of one rank stands for all: nothing is communicated.
"""

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from transformers import HfArgumentParser, TrainingArguments

from hf_fsdp_tools import ConfigError, FSDPPlugin, TrainerSettings, make_accelerator
from hf_fsdp_tools.integrations import training_arguments
from hf_fsdp_tools.integrations.training_arguments import agree_with_arguments, plugin_of
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from hf_fsdp_tools.testing import forget_accelerate
from tests._checkpoints import make_model
from tests._training import ShardedTrainer
from tests.api import TRAINING_KEYS, VARIABLES, mesh_of, sharding_of, start_state

REFUSED, HONOURED, ALIKE, STOPS = "refused", "honoured", "alike", "stops"


class Key(NamedTuple):
    """A key of `fsdp_config` with another value than the defaults', and what becomes of it once a model is sharded."""

    value: Any
    late: str
    """REFUSED: by one error. HONOURED: in the shards. ALIKE: shards are the same either way. STOPS: in any order."""
    beside: tuple[tuple[str, Any], ...] = ()
    """Keys that it needs."""
    variable: str | None = None
    """What its variable says otherwise, where a launch file names it."""


RECOMPUTED = (("activation_checkpointing", True),)
KEYS = {
    "version": Key(1, REFUSED, variable="2"),
    "reshard_after_forward": Key(False, REFUSED, variable="true"),
    "sharding_strategy": Key("SHARD_GRAD_OP", REFUSED, variable="FULL_SHARD"),
    "offload_params": Key(True, REFUSED, variable="false"),
    "cpu_offload": Key(True, REFUSED, variable="false"),
    "auto_wrap_policy": Key("SIZE_BASED_WRAP", REFUSED, (("min_num_params", 1),), variable="NO_WRAP"),
    "transformer_layer_cls_to_wrap": Key(["LlamaMLP"], REFUSED, variable="LlamaAttention"),
    "min_num_params": Key(1, REFUSED, (("auto_wrap_policy", "SIZE_BASED_WRAP"),), variable="7"),
    "ignored_modules": Key("model.norm", REFUSED, variable="lm_head"),
    "activation_checkpointing": Key(True, HONOURED, variable="false"),
    "activation_checkpointing_offload": Key(True, HONOURED, RECOMPUTED, variable="false"),
    "activation_checkpointing_every_n_layers": Key(2, HONOURED, RECOMPUTED, variable="1"),
    "activation_checkpointing_save_ops": Key("matmul", HONOURED, RECOMPUTED, variable="mm"),
    "state_dict_type": Key("FULL_STATE_DICT", ALIKE, variable="SHARDED_STATE_DICT"),
    "cpu_ram_efficient_loading": Key(True, ALIKE, variable="false"),
    "ep_size": Key(2, STOPS, variable="1"),
    "sequence_parallel": Key(True, STOPS, variable="false"),
    "mixed_precision_policy": Key({"param_dtype": "bf16"}, REFUSED),
    **{key: Key(False, ALIKE) for key in ("use_orig_params", "sync_module_states", "limit_all_gathers")},
    "backward_prefetch": Key("BACKWARD_POST", ALIKE),
    "forward_prefetch": Key(True, ALIKE),
    **{key: Key(True, STOPS) for key in TRAINING_KEYS if key.startswith("xla") and "settings" not in key},
    "xla_fsdp_settings": Key({"a": 1}, STOPS),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *VARIABLES):
        monkeypatch.setenv(name, "")  # so that what the plugin writes is undone after the test
        monkeypatch.delenv(name)


def arguments(key: str | None = None, **settings: Any) -> TrainingArguments:
    config = {"version": 2} if key is None else {key: KEYS[key].value, **dict(KEYS[key].beside)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers': version 1 is deprecated
        return TrainingArguments("run", use_cpu=True, report_to=[], fsdp=True, fsdp_config=config, **settings)


def sharded(accelerator: Any, **options: Any) -> Any:
    model, plugin = make_model("llama"), accelerator.state.fsdp_plugin
    plan = make_wrap_plan(model, policy=plugin.policy_for(model))
    return shard_model(model, plan, mesh=mesh_of(accelerator), **plugin.shard_arguments(accelerator), **options)


def test_the_table_has_every_key_and_what_is_no_training_arguments_is_refused():
    assert KEYS.keys() == TRAINING_KEYS.keys()
    with pytest.raises(ConfigError, match=r"args is 'bf16'; make_accelerator takes TrainingArguments"):
        make_accelerator("bf16")


@pytest.mark.filterwarnings("ignore:Only FSDP1 has")
@pytest.mark.parametrize("key", KEYS)
def test_the_accelerator_of_the_arguments_has_them_over_variables(key, monkeypatch):
    case, row = KEYS[key], TRAINING_KEYS[key]
    if case.variable is not None:
        monkeypatch.setenv(row.variable, case.variable)
    if case.late == STOPS:
        with pytest.raises(ConfigError, match=key.removesuffix("_settings")):
            make_accelerator(arguments(key))
        return
    args = arguments(key)
    accelerator = make_accelerator(args)
    plugin = accelerator.state.fsdp_plugin
    assert plugin.fsdp_version == (1 if key == "version" else 2)
    if case.late != ALIKE or row.fsdp2 is None:
        ours, plain = map(training_arguments._values, (plugin, _plain_plugin(monkeypatch)))
        assert ours[row.argument] != plain[row.argument]
    if plugin.fsdp_version == 2:
        agree_with_arguments(plugin_of(args), args, sharded(accelerator))  # what the Trainer does


def _plain_plugin(monkeypatch) -> FSDPPlugin:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return FSDPPlugin()


@pytest.mark.filterwarnings("ignore:Only FSDP1 has")
@pytest.mark.parametrize("first", ["accelerator", "arguments"])  # the arguments reset Accelerate's state
@pytest.mark.parametrize("key", [key for key, case in KEYS.items() if case.late != STOPS])
def test_what_comes_after_the_model_is_honoured_or_one_error(key, first):
    args = arguments(key)
    accelerator = make_accelerator(cpu=True)
    model = sharded(accelerator)
    if first == "accelerator":
        AcceleratorState._reset_state(reset_partial_state=True)
    asked, before = plugin_of(args), sharding_of(model)
    if KEYS[key].late == REFUSED:
        with pytest.raises(ConfigError, match=rf"fsdp_config {key}=.* \(the model: .*make_accelerator\(arguments\)"):
            agree_with_arguments(asked, args, model)
        assert sharding_of(model) == before
        return
    agree_with_arguments(asked, args, model)
    late = KEYS[key].late == HONOURED
    assert sharding_of(model) == (replace(before, activation_checkpointing=asked.recompute) if late else before)
    assert model.model.layers[0].gradient_checkpointing is late
    start_state(asked, mixed_precision=None, cpu=True, parallelism_config=None)
    assert AcceleratorState().fsdp_plugin is asked, "what is sharded from now on has the arguments' settings"


def test_all_differences_are_in_one_error_and_compiled_blocks_are_not_checkpointed_late():
    model = sharded(make_accelerator(cpu=True))
    args = TrainingArguments(
        "run", use_cpu=True, report_to=[], fsdp=True,
        fsdp_config={"fsdp_reshard_after_forward": False, "offload_params": True, "activation_checkpointing": True},
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=4),
    )  # fmt: skip
    with pytest.raises(ConfigError) as stopped:
        agree_with_arguments(plugin_of(args), args, model)
    assert (
        "fsdp_config offload_params=True (the model: False); "
        "fsdp_config reshard_after_forward=False (the model: True); "
        "parallelism_config of dp_replicate_size 2 x dp_shard_size 4 (the model: one process)" in str(stopped.value)
    )
    forget_accelerate()
    model = sharded(make_accelerator(cpu=True), compile={"backend": "eager"})
    args = arguments("activation_checkpointing")
    with pytest.raises(ConfigError, match=r"activation_checkpointing=True \(the model: False\)"):
        agree_with_arguments(plugin_of(args), args, model)


def test_a_second_accelerator_with_other_settings_is_one_error():
    make_accelerator(cpu=True)
    sizes = r"dp_replicate_size, dp_shard_size, cp_size, tp_size are \[2, 4, 1, 1\] and were \[1, 1, 1, 1\]"
    for asked, said in (
        ({"mixed_precision": "bf16"}, "mixed_precision is 'bf16' and was 'no'"),
        ({"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)}, sizes),
    ):
        with pytest.raises(ConfigError, match=rf"exists already .*{said}.*make_accelerator\(arguments\)"):
            make_accelerator(cpu=True, **asked)


def test_they_come_from_a_command_line_and_a_file(tmp_path, capsys):
    parser = HfArgumentParser((TrainingArguments, TrainerSettings))
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--blocking", "false", "--checksums", "--ema_decay", "0.9"]
    _, from_words = parser.parse_args_into_dataclasses([*words, "--report_estimate", "run.jsonl"])
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: run\nuse_cpu: true\nblocking: false\nchecksums: true\nema_decay: 0.9\n")
    _, from_file = parser.parse_yaml_file(str(file))
    assert from_words == TrainerSettings(blocking=False, checksums=True, ema_decay=0.9, report_estimate="run.jsonl")
    assert from_file == TrainerSettings(blocking=False, checksums=True, ema_decay=0.9)
    assert all(action.help for action in parser._actions if action.dest in vars(from_file))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ema_decay": 1.0}, "ema_decay is 1; give at least 0 and less than 1"),
        ({"ema_decay": 0.9, "ema_device": "disk"}, "ema_device is 'disk'; give cpu"),
        ({"ema_device": "cpu"}, "ema_device needs ema_decay"),
    ],
)
def test_what_cannot_be_is_refused_when_they_are_made(settings, said):
    with pytest.raises(ConfigError, match=said):
        TrainerSettings(**settings)


def test_a_trainer_has_those_of_its_class_or_its_own_and_changes_no_others(tmp_path):
    class Saving(ShardedTrainer):
        fsdp_settings = TrainerSettings(checksums=True)

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    first, second = (Saving(make_model("llama"), args) for _ in range(2))
    first.fsdp_settings.blocking = False
    assert first.fsdp_settings == TrainerSettings(checksums=True, blocking=False)
    assert second.fsdp_settings == Saving.fsdp_settings == TrainerSettings(checksums=True)
    own = Saving(make_model("llama"), args, fsdp_settings=TrainerSettings(allow_nan=True))
    assert own.fsdp_settings == TrainerSettings(allow_nan=True) and not ShardedTrainer.fsdp_settings.checksums
