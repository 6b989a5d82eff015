"""The settings of a run as one value, their names in Accelerate and transformers, and what contradicts what.

The fields of Settings are the table of all settings: those behind the degrees are `fsdp_*` keys, which are written,
checked, translated, and known as a variable and as a key of `TrainingArguments.fsdp_config`. The names are those of
accelerate 1.15 (`utils.launch`, `utils.dataclasses`) and transformers 5.23 (`TrainingArguments._process_fsdp_args`);
`tests/unit/test_settings.py` reads both libraries and fails when their names differ. docs/settings.md says what becomes
of each.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hf_fsdp_tools.axes import OfAxes, product, size_names, spread_problem
from hf_fsdp_tools.errors import ConfigError, warn

AutoWrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
BackwardPrefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]
MixedPrecision = Literal["no", "bf16", "fp16", "fp8"]
StateDictType = Literal["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
"""Values of settings, in Accelerate's order: files and variables may also give their number, from 1."""


@dataclass(frozen=True, kw_only=True)
class Settings(OfAxes):
    """The settings of a run. Immutable, and checked when they are made."""

    num_processes: int
    """Processes over all machines: one per GPU, or any number on CPU."""
    num_machines: int = 1
    """Machines, with the same number of processes on each."""
    machine_rank: int = 0
    """Which of the machines this file is for, from 0."""
    main_process_ip: str | None = None
    """Address of machine 0 as the others see it; None is right for one machine only."""
    main_process_port: int | None = None
    """Port on machine 0; None lets one machine look for a free port at each launch."""
    gpu_ids: str | None = None
    """GPUs to use on this machine, such as "0,1"; None is all of them."""
    use_cpu: bool = False
    """Run on CPU with gloo, also where there are GPUs (they are hidden from the processes)."""
    mixed_precision: MixedPrecision = "no"
    """Compute dtype while the trained weights stay float32; "no" computes in the dtype of the weights."""
    dp_replicate_size: int = 1
    """Copies of the sharded model (HSDP): each copy is sharded over `num_processes / dp_replicate_size` processes."""
    cp_size: int = 1
    """Processes with the same rows, each with a part of every sequence (context parallelism)."""
    tp_size: int = 1
    """Processes that share each layer and the rows (tensor parallelism): neighbours, best on one machine."""
    ep_size: int = 1
    """Neighbouring processes that share the experts (expert parallelism)."""
    sequence_parallel: bool = False
    """Between layers that processes share (`tp_size`), each holds its own tokens alone."""
    fsdp_version: Literal[2] = 2
    """2 is `fully_shard`; a run of version 1, deprecated upstream, is made by `FSDPPlugin(fsdp_version=1)`."""
    reshard_after_forward: bool = True
    """Free a unit's weights after its forward (less memory); False keeps them for its backward (less traffic)."""
    offload_params: bool = False
    """Keep shards, gradients and optimizer state in host memory, and move a unit to the GPU for its compute."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass instead of keeping them."""
    activation_checkpointing_offload: bool = False
    """Keep what checkpointed blocks keep, their inputs, in host memory until their backward pass."""
    activation_checkpointing_every_n_layers: int = 1
    """Checkpoint the first of every n blocks; the others keep their activations."""
    activation_checkpointing_save_ops: tuple[str, ...] = ()
    """Operators whose results checkpointed blocks keep: matmul, attention, or torch's names (aten::mm)."""
    state_dict_type: StateDictType = "SHARDED_STATE_DICT"
    """How training checkpoints are written: every rank writes its shards, or rank 0 gathers and writes all."""
    cpu_ram_efficient_loading: bool = False
    """Rank 0 reads the whole checkpoint and broadcasts it. False: this package lets each rank read its own shards."""
    auto_wrap_policy: AutoWrapPolicy = "NO_WRAP"
    """The modules that Accelerate wraps by itself. NO_WRAP, because this package shards the model before Accelerate
    sees it; Accelerate would look for block classes by names that sharding has changed."""
    transformer_layer_cls_to_wrap: tuple[str, ...] = ()
    """Class names of blocks, for TRANSFORMER_BASED_WRAP; empty uses the model's own `_no_split_modules`."""
    min_num_params: int | None = None
    """Parameters that make a unit, for SIZE_BASED_WRAP only."""
    ignored_modules: str | None = None
    """Regular expression of whole module names that stay whole on every rank."""

    def __post_init__(self) -> None:
        problems = [f"{fact}; {cure}" for fact, cure in contradictions(self)]
        if len(problems) == 1:
            raise ConfigError(f"the configuration cannot be used: {problems[0]}")
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            raise ConfigError(f"the configuration cannot be used, in {len(problems)} places:{lines}")

    @property
    def dp_shard_size(self) -> int:
        """Processes that share one replica, in addition to those of context parallelism."""
        return self.num_processes // (self.num_copies * self.ranks_per_row)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, under each name that Accelerate and transformers have for it; None where they have none."""

    argument: str | None = None
    """Argument of Accelerate's `FullyShardedDataParallelPlugin`; None for settings of TPUs."""
    key: str | None = None
    """Key in section `fsdp_config` of Accelerate's YAML; all but ignored_modules are options of the launcher too."""
    variable: str | None = None
    """Environment variable, set by `accelerate launch` for its processes, or by hand under `torchrun`."""
    training: tuple[str, ...] = ()
    """Keys in `TrainingArguments.fsdp_config`, also those that transformers drops although Accelerate knows them."""
    field: str = ""
    """Field of Settings, from which the YAML is written; "" where it has none."""
    kind: Any = str
    """Allowed values in a file, as `read_value` takes them."""
    is_old: bool = False
    """Whether only version 1 of FSDP has the setting."""
    fsdp2: object = None
    """The value that FSDP2 always has for such a setting."""


def _setting(name: str, **other: Any) -> Setting:
    """A setting that launcher, plugin and `TrainingArguments` know under one name; `other` has the exceptions."""
    same = {"key": f"fsdp_{name}", "variable": f"FSDP_{name.upper()}", "argument": name, "training": (name,)}
    return Setting(**same | other)


def _kind(hint: Any) -> Any:
    """What `read_value` makes of a file's value for a field of this type."""
    if get_origin(hint) in (Literal, tuple):
        return get_args(hint) if get_origin(hint) is Literal else tuple
    return next(kind for kind in (bool, int, str) if kind in (hint, *get_args(hint)))


DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(Settings)}
KINDS = {name: _kind(hint) for name, hint in get_type_hints(Settings).items()}
GENERAL = [*takewhile(lambda name: name not in size_names(), DEFAULTS)]
"""Fields that a file has outside of its sections."""
DEGREES = [*(name for name in size_names() if name in DEFAULTS and name != "ep_size"), "dp_shard_size"]
"""What a file has in its section `parallelism_config`."""
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "reshard_after_forward": {"kind": str},  # a strategy of FSDP1 too
    "fsdp_version": {"key": "fsdp_version", "variable": "FSDP_VERSION", "training": ("version",)},
    "offload_params": {"argument": "cpu_offload", "training": ("offload_params", "cpu_offload")},
    "transformer_layer_cls_to_wrap": {
        "argument": "transformer_cls_names_to_wrap",
        "variable": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    },
}
SETTINGS = (
    *(
        _setting(name, **{"field": name, "kind": KINDS[name]} | _EXCEPTIONS.get(name, {}))
        for name in DEFAULTS
        if name not in GENERAL + DEGREES
    ),
    _setting("sharding_strategy"),
    _setting("backward_prefetch", kind=get_args(BackwardPrefetch), is_old=True, fsdp2="BACKWARD_PRE"),
    _setting("forward_prefetch", kind=bool, is_old=True, fsdp2=False),
    _setting("sync_module_states", kind=bool, is_old=True, fsdp2=True),
    _setting("use_orig_params", kind=bool, is_old=True, fsdp2=True),
    Setting(argument="mixed_precision_policy", training=("mixed_precision_policy",)),
    Setting(argument="limit_all_gathers", training=("limit_all_gathers",), kind=bool, is_old=True, fsdp2=True),
    *(Setting(argument=n, is_old=True) for n in ("param_init_fn", "state_dict_config", "optim_state_dict_config")),
    *(Setting(training=(name,)) for name in ("xla", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "xla_fsdp_v2")),
)
"""Fields of Settings, and what it has no field for: a check of the file, the plugin or one line answers these."""

OWN_KEYS = (
    "fsdp_ep_size", "fsdp_sequence_parallel", "fsdp_activation_checkpointing_every_n_layers",
    "fsdp_activation_checkpointing_save_ops",
)  # fmt: skip
"""Keys of this package, which `accelerate launch` drops: their variables are set for it, as `hf-fsdp RECIPE` does."""

ARGUMENTS = {row.argument: row for row in SETTINGS if row.argument}
NEEDED_POLICY = {"transformer_layer_cls_to_wrap": "TRANSFORMER_BASED_WRAP", "min_num_params": "SIZE_BASED_WRAP"}
"""Settings that one `auto_wrap_policy` alone uses."""

VARIABLES = {row.variable: row for row in SETTINGS if row.variable}
YAML_KEYS = {row.key: row for row in SETTINGS if row.key}
TRAINING_KEYS = {name: row for row in SETTINGS for name in row.training}


# ---- values ----


def read_value(kind: Any, value: Any) -> Any:
    """A value of a file as `kind`: bool, int, str, a tuple of names with commas (`tuple`), or one of some words. Like
    the launcher, takes numbers and booleans as text, and words in any case."""
    text = str(value).strip()
    if kind is bool and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    if kind is int and text.lstrip("-").isdigit():
        return int(text)
    if kind is str and not isinstance(value, list | dict):
        return text
    if kind is tuple:
        return tuple(name.strip() for name in text.split(",") if name.strip())
    if isinstance(kind, tuple) and (word := _word(text, kind)) in kind:
        return word
    names = {bool: "true or false", int: "a whole number", str: "text"}
    raise ValueError(f"one of {', '.join(kind)}" if isinstance(kind, tuple) else names[kind])


def as_setting(row: Setting, value: Any) -> Any:
    """A value of a setting, from any source, as the table has it; what is of another kind stays as it is."""
    value = getattr(value, "name", value)  # of an enum
    with suppress(ValueError):
        return read_value(row.kind, value) if isinstance(value, str | int) else value
    return value


_TRUE, _FALSE = ("true", "yes", "y", "t", "on", "1"), ("false", "no", "n", "f", "off", "0")
"""Words for true and false (source: `str_to_bool` of accelerate 1.15)."""


def _word(text: str, words: tuple[str, ...]) -> str:
    numbered = text.isdigit() and 0 < int(text) <= len(words)
    return words[int(text) - 1] if numbered else text.upper()


_MEANINGS = {
    "TRUE": (True, False),
    "FALSE": (False, False),
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
"""`reshard_after_forward` and strategies of version 1: are units freed after forward, has each machine a copy."""


def strategy_name(value: Any) -> str:
    """The name of a strategy that is given by its name in any case, its number or torch's enum."""
    return _word(str(getattr(value, "name", value)), get_args(Strategy))


def read_strategies(values: Iterable[Any], *, may_copy: bool) -> tuple[bool, bool]:
    """Whether units are freed after the forward pass, and whether each machine has a replica.

    The values are those of `reshard_after_forward` and of the sharding strategy; None says nothing. HYBRID_SHARD
    means something in settings that were made for version 1 (`may_copy`).
    """
    meanings = [_MEANINGS["TRUE"]]
    for value in values:
        word = strategy_name(value)
        meaning = _MEANINGS["TRUE"] if word == "NONE" else _MEANINGS.get(word)
        if meaning is None or (meaning[1] and not may_copy):
            cure = "Use true or false (FULL_SHARD, SHARD_GRAD_OP)"
            if word.startswith("HYBRID"):
                cure = "Use parallelism_config with dp_replicate_size, the number of copies, and dp_shard_size"
            elif word == "NO_SHARD":
                cure = "Use Accelerate's MULTI_GPU, which shards nothing"
            raise ConfigError(f"FSDP2 has no sharding strategy {value}. {cure}.")
        meanings.append(meaning)
    return all(freed for freed, _ in meanings), any(copies for _, copies in meanings)


def is_set(variable: str) -> bool:
    """Whether an environment variable of Accelerate is switched on."""
    return os.environ.get(variable, "").lower() in _TRUE


def is_by_launcher() -> bool:
    """Whether `accelerate launch` made the variables, not TrainingArguments or a user: it alone sets the second."""
    return is_set("ACCELERATE_USE_FSDP") and "ACCELERATE_DYNAMO_USE_FULLGRAPH" in os.environ


def warn_on_node(text: str) -> None:
    """Warn on the first rank of each machine: the text is the same on all ranks."""
    from hf_fsdp_tools.distributed.mesh import rank_on_node  # which imports torch

    if rank_on_node()[0] == 0:
        warn(text)


# ---- contradictions ----


def contradictions(config: Any) -> list[tuple[str, str]]:
    """The fact and the cure of every contradiction in a config, or in anything with its attributes."""
    if problems := [*_type_problems(config)]:  # the other checks compare numbers, and need right types
        return problems
    found = (next(((fact, cure) for is_so, fact, cure in group if is_so), None) for group in _conflicts(config))
    return [*filter(None, found)]


def _type_problems(config: Any) -> Iterator[tuple[str, str]]:
    for name, kind in (KINDS | dict.fromkeys(size_names(), int)).items():
        value, least = getattr(config, name), 0 if name == "machine_rank" else 1
        if isinstance(kind, tuple) and value not in kind:
            yield f"{name} is {value!r}", f"use one of {', '.join(map(str, kind))}"
        if kind is int and DEFAULTS.get(name, 1) is not None and (type(value) is not int or value < least):
            yield f"{name} is {value!r}", f"use a whole number from {least}"
    port = config.main_process_port
    if port is not None and (type(port) is not int or not 0 <= port < 2**16):
        yield f"main_process_port is {port!r}", "use a number from 1 to 65535, or 0 for a free port"


def _conflicts(config: Any) -> Iterator[list[tuple[Any, str, str]]]:
    """Whether it is so, a fact and its cure: the first that is so of each group."""
    processes, machines, ids, cpu = config.num_processes, config.num_machines, config.gpu_ids, config.use_cpu
    of_copies, of_rows, ep_size = size_names("copy"), size_names(of_rows=True), config.ep_size
    copies, per_row = product(config, of_copies), product(config, of_rows)
    per_machine, per_copy = processes // machines, processes // copies
    of_copy, divisor = f"does not divide the {per_copy} processes of a copy", "use a divisor"
    missing = [name for name in ("main_process_ip", "main_process_port") if not getattr(config, name)]
    policy, names, size = config.auto_wrap_policy, config.transformer_layer_cls_to_wrap, config.min_num_params

    def above_one(names: Iterable[str]) -> str:
        return " x ".join(f"{name} {size}" for name in names if (size := getattr(config, name)) > 1)

    # fmt: off
    yield [(processes % machines,
            f"num_processes {processes} counts all machines and is not a multiple of num_machines {machines}",
            "every machine runs the same number")]
    yield [(config.machine_rank >= machines, f"machine_rank is {config.machine_rank}",
            f"it counts from 0 and must be below num_machines {machines}")]
    yield [(machines > 1 and missing, f"num_machines is {machines}",
            f"several machines need {' and '.join(missing)} of machine 0")]
    yield [(cpu and ids is not None, f"gpu_ids {ids!r} picks GPUs and use_cpu hides them", "drop one of the two"),
           (ids is not None and len(ids.split(",")) < per_machine,
            f"gpu_ids {ids!r} has fewer GPUs than a machine has processes ({per_machine})",
            "each process needs its own")]
    yield [(cpu and config.mixed_precision == "fp16", 'mixed_precision "fp16" needs a GPU for its loss scaling',
            'on CPU use "bf16" or "no"')]
    yield [(cpu and config.offload_params, "offload_params moves weights to the CPU, where use_cpu already has them",
            "drop offload_params")]
    yield [(processes % copies, f"{above_one(of_copies)} does not divide num_processes {processes}", divisor),
           (per_copy % per_row, f"{above_one(of_rows)} {of_copy}", divisor),
           (ep_size % per_row and ep_size > 1, f"ep_size {ep_size} is no multiple of {' x '.join(of_rows)}",
            "ranks with the same rows share experts too"),
           (config.sequence_parallel and spread_problem(config), *spread_problem(config).partition("; ")[::2]),
           (per_copy % ep_size, f"ep_size {ep_size} {of_copy}", divisor),
           (copies == processes > 1, f"{above_one(of_copies)} leaves one process per copy, so nothing is sharded",
            f"use a smaller divisor of {processes}")]
    yield [(names and policy != "TRANSFORMER_BASED_WRAP",
            f"transformer_layer_cls_to_wrap {', '.join(names)} has no effect with auto_wrap_policy {policy}",
            "use TRANSFORMER_BASED_WRAP or drop it")]
    yield [((size is not None) != (policy == "SIZE_BASED_WRAP"),
            f"min_num_params is {size} with auto_wrap_policy {policy}",
            "SIZE_BASED_WRAP needs it and nothing else uses it")]
    for name in (f"activation_checkpointing_{more}" for more in ("offload", "every_n_layers", "save_ops")):
        value = getattr(config, name)
        shown = ", ".join(value) if isinstance(value, tuple) else value
        yield [(value != DEFAULTS[name] and not config.activation_checkpointing,
                f"{name} is {shown} without activation_checkpointing", "turn activation_checkpointing on or drop it")]
    yield [(config.state_dict_type == "LOCAL_STATE_DICT",
            "state_dict_type is LOCAL_STATE_DICT: only version 1 of FSDP has this",
            "use SHARDED_STATE_DICT or FULL_STATE_DICT")]
    # fmt: on
