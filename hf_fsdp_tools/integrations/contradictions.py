"""Find contradictions in the settings of a run: all at once, each with its cure."""

from collections.abc import Iterator
from typing import Any, get_args

from hf_fsdp_tools.integrations.settings import SETTINGS, MixedPrecision

Problem = tuple[str, str]
"""A fact and its cure."""


def contradictions(config: Any) -> list[Problem]:
    """The fact and the cure of every contradiction in a config, or in anything with the attributes of `FSDPConfig`."""
    problems = [*_type_problems(config)]  # the other checks compare numbers, and need right types
    return problems or [*_process_problems(config), *_sharding_problems(config), *_version_problems(config)]


def _type_problems(config: Any) -> Iterator[Problem]:
    choices: dict[str, tuple[object, ...]] = {row.field: row.kind for row in SETTINGS if isinstance(row.kind, tuple)}
    choices |= {"mixed_precision": get_args(MixedPrecision), "fsdp_version": (1, 2)}
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed and (value, name) != (None, "backward_prefetch"):
            yield f"{name} is {value!r}", f"use one of {', '.join(map(str, allowed))}"
    lowest = {"num_processes": 1, "num_machines": 1, "machine_rank": 0, "dp_replicate_size": 1}
    for name, least in lowest.items():
        value = getattr(config, name)
        if type(value) is not int or value < least:
            yield f"{name} is {value!r}", f"use a whole number from {least}"
    port = config.main_process_port
    if port is not None and (type(port) is not int or not 0 <= port < 2**16):
        yield f"main_process_port is {port!r}", "use a number from 1 to 65535, or 0 for a free port"


def _process_problems(config: Any) -> Iterator[Problem]:
    processes, machines, ids = config.num_processes, config.num_machines, config.gpu_ids
    if processes % machines:
        yield (
            f"num_processes {processes} counts all machines and is not a multiple of num_machines {machines}",
            "every machine runs the same number",
        )
    if config.machine_rank >= machines:
        yield f"machine_rank is {config.machine_rank}", f"it counts from 0 and must be below num_machines {machines}"
    missing = [name for name in ("main_process_ip", "main_process_port") if not getattr(config, name)]
    if machines > 1 and missing:
        yield f"num_machines is {machines}", f"several machines need {' and '.join(missing)} of machine 0"
    if config.use_cpu and ids is not None:
        yield f"gpu_ids {ids!r} picks GPUs and use_cpu hides them", "drop one of the two"
    elif ids is not None and len(ids.split(",")) < processes // machines:
        yield (
            f"gpu_ids {ids!r} has fewer GPUs than a machine has processes ({processes // machines})",
            "each process needs its own",
        )
    if config.use_cpu and config.mixed_precision == "fp16":
        yield 'mixed_precision "fp16" needs a GPU for its loss scaling', 'on CPU use "bf16" or "no"'
    if config.use_cpu and config.offload_params:
        yield "offload_params moves weights to the CPU, where use_cpu already has them", "drop offload_params"


def _sharding_problems(config: Any) -> Iterator[Problem]:
    processes, copies, policy = config.num_processes, config.dp_replicate_size, config.auto_wrap_policy
    if processes % copies:
        yield f"dp_replicate_size {copies} does not divide num_processes {processes}", "use a divisor"
    elif copies == processes > 1:
        yield (
            f"dp_replicate_size {copies} leaves one process per copy, so nothing is sharded",
            f"use a smaller divisor of {processes}",
        )
    if config.transformer_layer_cls_to_wrap and policy != "TRANSFORMER_BASED_WRAP":
        yield (
            f"transformer_layer_cls_to_wrap {', '.join(config.transformer_layer_cls_to_wrap)} has no effect with "
            f"auto_wrap_policy {policy}",
            "use TRANSFORMER_BASED_WRAP or drop it",
        )
    if (config.min_num_params is not None) != (policy == "SIZE_BASED_WRAP"):
        yield (
            f"min_num_params is {config.min_num_params} with auto_wrap_policy {policy}",
            "SIZE_BASED_WRAP needs it and nothing else uses it",
        )


def _version_problems(config: Any) -> Iterator[Problem]:
    if config.fsdp_version == 2:
        foreign = [row.field for row in SETTINGS if row.field and 2 not in row.versions]
        if said := [name for name in foreign if getattr(config, name) is not None]:
            yield f"{', '.join(said)}: only FSDP1 has this", "drop it, or use fsdp_version 1"
        if config.state_dict_type == "LOCAL_STATE_DICT":
            yield (
                "state_dict_type is LOCAL_STATE_DICT: only FSDP1 has this",
                "use SHARDED_STATE_DICT or FULL_STATE_DICT",
            )
        return
    if config.dp_replicate_size not in (1, config.num_machines):
        yield (
            f"dp_replicate_size {config.dp_replicate_size}: FSDP1 shards within a machine and copies between machines, "
            f"so it can only be 1 or num_machines ({config.num_machines})",
            "use fsdp_version 2",
        )
    if config.cpu_ram_efficient_loading and config.sync_module_states is False:
        yield "cpu_ram_efficient_loading under FSDP1 needs sync_module_states", "leave it unset"
    if config.use_cpu and (config.sync_module_states or config.cpu_ram_efficient_loading):
        yield (
            "use_cpu: Accelerate's FSDP1 stops at sync_module_states there, and cpu_ram_efficient_loading needs it",
            "set both to false",
        )
