"""What DeepSpeed's settings mean under FSDP2: Accelerate's section `deepspeed_config` and DeepSpeed's own JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import did_you_mean, reason_of


class _Translation(Protocol):
    fields: dict[str, Any]
    arguments: dict[str, str]

    def say(self, key: str, value: Any, became: str) -> None:
        """Add what became of a key."""


_STAGES = {
    "3": (True, "fsdp_reshard_after_forward true: everything is sharded, and units are freed after their forward"),
    "2": (False, "fsdp_reshard_after_forward false: weights are sharded too, and gathered from forward to backward"),
    "1": (False, "fsdp_reshard_after_forward false: gradients and weights are sharded too"),
    "0": (False, "fsdp_reshard_after_forward false: FSDP shards where stage 0 copies"),
}
"""`reshard_after_forward` by ZeRO's stage, and how it differs."""

_ARGUMENTS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
}
"""Arguments of TrainingArguments by DeepSpeed's key."""

_ZERO = {
    "overlap_comm": "left out: FSDP2 always overlaps",
    "contiguous_gradients": "left out: FSDP2 reduces each unit as one buffer",
    "reduce_scatter": "left out: FSDP2 always reduces so",
    "sub_group_size": "left out: the optimizer steps shards at once",
    "stage3_gather_16bit_weights_on_model_save": "left out: a save is always a whole Hugging Face checkpoint",
    "round_robin_gradients": "left out: gradients are sharded evenly",
    "zero_hpz_partition_size": "left out: hf-fsdp config --hsdp N makes N copies, each sharded over fast links",
    "zero_quantized_weights": "left out: FSDP2 gathers in the compute dtype",
    "zero_quantized_gradients": "left out: gradients are reduced in float32",
    "ignore_unused_parameters": "left out: FSDP2 takes unused parameters",
}
_BUCKETS = "left out: units of the plan take the place of buckets and prefetch sizes (hf-fsdp plan NAME)"
_LARGE = ("_bucket_size", "_param_persistence_threshold", "_max_live_parameters", "_max_reuse_distance", "_partitions")

_SECTION = {
    "zero3_init_flag": "left out: from_pretrained never has a whole model on any rank",
    "zero3_save_16bit_model": "left out: a save is always a whole Hugging Face checkpoint",
    "deepspeed_multinode_launcher": "left out: start `accelerate launch` on each machine (hf-fsdp config --slurm)",
    "deepspeed_hostfile": "left out: start `accelerate launch` on each machine (hf-fsdp config --slurm)",
    "deepspeed_inclusion_filter": "left out: start `accelerate launch` on the machines that are meant",
    "deepspeed_exclusion_filter": "left out: start `accelerate launch` on the machines that are meant",
    "deepspeed_moe_layer_cls_names": "left out: hf_fsdp_tools finds the blocks in the model's structure",
    "offload_optimizer_nvme_path": "left out: offload is to host memory",
    "offload_param_nvme_path": "left out: offload is to host memory",
}
_OWN = ("zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file", *_ARGUMENTS)

_JSON = {
    "steps_per_print": "left out: --logging_steps says how often",
    "wall_clock_breakdown": "left out: hf-fsdp schedule NAME shows where a step's time goes",
    "train_batch_size": "left out: it follows from processes, micro-batch and accumulation",
    "zero_allow_untested_optimizer": "left out: any optimizer that steps shards may be used",
    "activation_checkpointing": "left out: fsdp_activation_checkpointing, or hf-fsdp config --activation-checkpointing",
    "communication_data_type": "left out: gradients are reduced in float32",
    "prescale_gradients": "left out: gradients are averaged in float32",
    "gradient_predivide_factor": "left out: gradients are averaged in float32",
    "tensorboard": "left out: --report_to tensorboard",
    "wandb": "left out: --report_to wandb",
    "comms_logger": "left out: hf-fsdp schedule NAME shows what is sent",
    "flops_profiler": "left out: hf-fsdp estimate NAME says which part of the peak is reached",
    "data_types": "left out: gradients are accumulated in the dtype of the weights that are trained",
    "zero_force_ds_cpu_optimizer": "left out: under offload, PyTorch's AdamW steps the shards on the host",
    "aio": "left out: offload is to host memory",
}
KEYS = frozenset({"zero_optimization", "bf16", "fp16", "optimizer", "scheduler", *_ARGUMENTS, *_JSON})
"""Top-level keys of DeepSpeed's JSON."""


def translate_section(section: Mapping[str, Any], made: _Translation, *, folder: Path, is_used: bool) -> None:
    """Translate Accelerate's section `deepspeed_config`, and the JSON that it points to."""
    if not is_used:
        if section:
            made.say("deepspeed_config", dict(section), "left out: distributed_type is not DEEPSPEED")
        return
    if "zero_stage" not in section and "deepspeed_config_file" not in section:
        _stage("zero_stage", 2, made, said="absent, Accelerate's 2")
    for key, value in section.items():
        if key == "deepspeed_config_file":
            made.say(key, value, "read, see below")
            translate_json(_json(folder, str(value)), made)
        elif key == "zero_stage":
            _stage(key, value, made)
        elif key in ("offload_optimizer_device", "offload_param_device"):
            _offload(key, value, made)
        elif key in _ARGUMENTS:
            _argument(key, value, made)
        else:
            known = [*_SECTION, *_OWN]
            made.say(key, value, _SECTION.get(key) or f"left out, not known{did_you_mean(str(key), known)}")


def translate_json(data: Mapping[str, Any], made: _Translation) -> None:
    """Translate DeepSpeed's own settings."""
    for key, value in data.items():
        if key == "zero_optimization":
            _zero(value or {}, made)
        elif key in ("bf16", "fp16"):
            is_on = value.get("enabled") if isinstance(value, Mapping) else value
            if is_on is True:
                made.fields["mixed_precision"] = key
            became = f"mixed_precision {key}" if is_on is True else "left out: off"
            made.say(f"{key}.enabled", is_on, became if is_on != "auto" else f"as TrainingArguments say (--{key})")
        elif key in _ARGUMENTS:
            _argument(key, value, made)
        elif key == "optimizer":
            _optimizer(value or {}, made)
        elif key == "scheduler":
            made.say(key, (value or {}).get("type"), "left out: --lr_scheduler_type and --warmup_steps")
        else:
            made.say(key, value, _JSON.get(key) or f"left out, not known{did_you_mean(str(key), KEYS)}")


def _zero(section: Mapping[str, Any], made: _Translation) -> None:
    for key, value in section.items():
        name = f"zero_optimization.{key}"
        if key == "stage":
            _stage(name, value, made)
        elif key in ("offload_optimizer", "offload_param"):
            device = value.get("device", "none") if isinstance(value, Mapping) else value
            _offload(f"{name}.device", device, made)
        elif key in _ZERO:
            made.say(name, value, _ZERO[key])
        elif str(key).endswith(_LARGE):
            made.say(name, value, _BUCKETS)
        else:
            made.say(name, value, f"left out, not known{did_you_mean(str(key), [*_ZERO, 'stage', 'offload_param'])}")


def _stage(key: str, value: Any, made: _Translation, *, said: Any = None) -> None:
    meant = _STAGES.get(str(value))
    if meant is None:
        made.say(key, value, "left out, no such stage: fsdp_reshard_after_forward true, as stage 3")
        return
    made.fields["reshard_after_forward"] = meant[0]
    made.say(key, said or value, meant[1])


def _offload(key: str, device: Any, made: _Translation) -> None:
    if device in ("cpu", "nvme"):
        made.fields["offload_params"] = True
        also = "" if device == "cpu" else ", not to NVMe"
        made.say(key, device, f"fsdp_offload_params true: shards, gradients and optimizer state, to host memory{also}")
    else:
        made.say(key, device, "nothing is offloaded")


def _argument(key: str, value: Any, made: _Translation) -> None:
    if value == "auto":
        made.say(key, value, f"as TrainingArguments say (--{_ARGUMENTS[key]})")
        return
    made.arguments[_ARGUMENTS[key]] = str(value)
    made.say(key, value, f"--{_ARGUMENTS[key]} {value} of the script: no launch file holds it")


def _optimizer(section: Mapping[str, Any], made: _Translation) -> None:
    made.say("optimizer.type", section.get("type"), "--optim of the script (default: AdamW)")
    for key, value in (section.get("params") or {}).items():
        name = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}.get(key)
        if name is not None and value != "auto":
            made.arguments[name] = str(value)
        made.say(f"optimizer.params.{key}", value, f"--{name} of the script" if name else "an argument of the script")


def _json(folder: Path, name: str) -> Mapping[str, Any]:
    path = folder / name if (folder / name).is_file() else Path(name)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"deepspeed_config_file {name} cannot be read: {reason_of(error)}; put it beside the file"
        ) from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"deepspeed_config_file {name} holds no `key: value` pairs; name DeepSpeed's own JSON")
    return data
