"""Arguments of a recipe: TRL's and the Trainer's own, from the command line over a YAML file."""

import argparse
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from inspect import get_annotations
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NoReturn, get_args, get_type_hints

import yaml
from huggingface_hub import get_token
from huggingface_hub.utils.tqdm import disable_progress_bars
from transformers.utils.logging import disable_progress_bar
from trl import ModelConfig, ScriptArguments, TrlParser

from hf_fsdp_tools import TrainerSettings
from hf_fsdp_tools.accelerator import find_accelerator
from hf_fsdp_tools.distributed.mesh import gpus_are_hidden, rank_on_node
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.extensions.muon.muon import MUON
from hf_fsdp_tools.modeling.pickles import load_yaml
from hf_fsdp_tools.scripting.formats import column_options
from hf_fsdp_tools.scripting.recipes import recipe_of
from hf_fsdp_tools.text import ELSEWHERE, did_you_mean, first_line, first_lines, no_option, recipe_commands


@dataclass
class DataArguments(ScriptArguments):  # type: ignore[misc]  # trl is not typed
    """TRL's options for data, and two of TRL's trainers that those of transformers lack.

    Example:
        >>> DataArguments(dataset_name="rows.jsonl").max_length
        512
    """

    max_length: int = field(default=512, metadata={"help": "Tokens at which a row is cut."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run model code that comes with the checkpoint."})


@dataclass
class ModelArguments(ModelConfig, TrainerSettings):  # type: ignore[misc]  # trl is not typed
    """What is trained, and how long: TRL's own options, those of the mixin, and four more.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> model_args.model_name_or_path, model_args.merge_adapters
        ('checkpoint', False)
    """

    merge_adapters: bool = field(
        default=False,
        metadata={"help": "Write a checkpoint with the adapter merged in, too (merged/)."},
    )
    dequantize: bool = field(
        default=True,
        metadata={"help": "A base that is stored quantised becomes floats; false: it stays so, under an adapter."},
    )
    lora_experts: bool = field(
        default=False,
        metadata={"help": "LoRA on all linear layers and stacked experts (target_parameters), without dropout."},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "End when the evaluation loss has not fallen in so many evaluations in a row, and keep the best "
            "checkpoint. Evaluates 20 times in the run, unless --eval_strategy says otherwise, and saves the best."
        },
    )
    streams_are_shares: bool = field(default=True, init=False)  # those of `load_splits`; no option
    default_max_length: int | None = field(default=None, init=False)
    """What `--max_length` is where nobody gives it; `parse_arguments` sets it, and it is no option."""
    rows: int | None = field(default=None, init=False)
    """Rows to train on, once `check_before_loading` has seen them; None for a stream."""
    others: tuple[Any, ...] = field(default=(), init=False, repr=False)
    """What `parse_arguments` has returned next to this one, likewise."""
    is_demo: bool = field(default=False, init=False)
    """Whether `start` has made model and data, as nobody gave a model."""

    def __post_init__(self) -> None:
        """As TRL's; but an adapter's base keeps the checkpoint's dtype, commas may stand between names, and a plain
        name stays a name, which TRL makes a pattern.
        """
        ModelConfig.__post_init__(self)
        TrainerSettings.__post_init__(self)
        # Small updates of a bfloat16 checkpoint would vanish if it were trained as it is stored.
        if self.dtype is None and not self.use_peft:  # type: ignore[has-type]
            self.dtype = "float32"
        for option in ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save"):
            value = getattr(self, option)
            words = [value] if isinstance(value, str) else value or []
            names = [name for word in words for name in word.split(",") if name]
            plain = r"[\w.]+" if len(names) > 1 else r"\w+"  # of one name, a dot makes it a pattern
            if names and all(re.fullmatch(plain, name) for name in names):
                setattr(self, option, names)


_DEMO = {"per_device_train_batch_size": 2, "lr_scheduler_type": "cosine", "warmup_steps": 10}
"""Settings of all demos, before those of the recipe: they fit into 3 minutes on 2 CPU cores."""

_OF_ADAPTERS = [each.name for each in fields(ModelArguments) if each.name.startswith(("lora_", "use_dora", "use_rs"))]

_OF_EXPERTS = {"lora_target_modules": ["all-linear"], "lora_dropout": 0.0}
"""What `--lora_experts` takes where nobody says otherwise: PEFT (0.21) has no dropout for stacked experts."""

_EARLY_STOP = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_strategy": "best"}
_EARLY_STOP |= {"eval_strategy": "steps", "eval_steps": 0.05, "restore_callback_states_from_checkpoint": True}
"""What early stopping needs of the Trainer; a resumed run goes on counting."""


def parse_arguments(
    *dataclasses: type,
    recipe: str = "",
    defaults: Mapping[str, Any] | None = None,
    demo: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
    adapter_learning_rate: float | None = None,
) -> tuple[Any, ...]:
    """One object of each dataclass, from the command line, else from the YAML file of `--config`, else from defaults.

    A dataclass with `model_name_or_path` (`ModelArguments`) must be among them, one with `dataset_name` (TRL's
    `ScriptArguments`) and one that extends `TrainingArguments` usually are. Without a model and a dataset the recipe is
    a demo. Where the output folder is the recipe's default and holds a run already, the next free number is used
    ("outputs/finetune-2"); `--resume_from_checkpoint true` takes the last. Where standard error is no terminal, and
    with `--disable_tqdm`, libraries show no bars. `--help` begins with docstring and `COMMANDS` of the running script.

    `defaults` of this recipe go before those of the dataclasses; `demo` has those where neither the command line nor
    the file names a model. With `--use_peft`, `adapter_learning_rate` (2e-4) holds where nobody gives a learning rate,
    for adapters want about ten times that of all parameters. Each name of `columns` ("text", "prompt", …) makes an
    option (`--prompt_column question`), and `load_splits` gives the user's column the recipe's name. With `recipe`, the
    name of one of the package ("dpo"), these and the commands are its own, unless they are given. Each process calls it
    for itself, and the result is the same on all. `TrainingArguments` start the process group.

    Raises:
        ConfigError: an option or key is unknown (with the nearest name), a value has the wrong type, options
            contradict each other, or a package that an option needs is absent.

    Example:
        >>> script, training, model_args = parse_arguments(
        ...     ScriptArguments, SFTConfig, ModelArguments, defaults={"learning_rate": 1e-4}
        ... )
        >>> script.dataset_name, training.max_steps, training.learning_rate
        ('rows.jsonl', 2, 0.0001)
    """
    own = recipe_of(recipe)
    folder = {"output_dir": f"outputs/{recipe.replace('-', '_')}"} if recipe else {}
    defaults = folder | dict(own.defaults) | dict(defaults or {})
    columns, rate = columns or own.columns, adapter_learning_rate or own.rates[1]
    kinds = (*dataclasses, *((column_options(columns),) if columns else ()))
    parser = _Parser(kinds, allow_abbrev=True, formatter_class=_Help)
    on_cpu = find_accelerator() is None
    # where GPUs are absent but not hidden, `make_accelerator` says whether they were meant
    machine: dict[str, Any] = {"dataloader_pin_memory": not on_cpu, "use_cpu": on_cpu and gpus_are_hidden()}
    if not on_cpu:
        machine["accelerator_config"] = {"non_blocking": True}  # the host does not wait for a batch that is copied
    usual = _RECIPE_DEFAULTS | machine | defaults
    parser.set_defaults_with_config(**usual)
    parser.commands = own.commands
    default_length = parser.get_default("max_length")  # before the file's values become defaults
    for action in parser._actions:
        if action.dest == "use_peft":
            action.help = f"{action.help} The learning rate is then {rate:g}, unless one is given."
    adapts = {"learning_rate": rate}
    tries = _DEMO | adapts | dict(own.tried_options) if own.tried_options else {}
    parsed = parser.parse(_DEMO | dict(demo or own.demo_options), adapts, tries)
    chosen = {name: getattr(parsed[-1], f"{name}_column") for name in columns}
    parsed = parsed[: len(dataclasses)]
    for one in parsed:
        if hasattr(one, "dataset_name"):
            one.column_names = chosen
        if isinstance(one, ModelArguments):
            one.default_max_length = default_length
            one.others = tuple(other for other in parsed if other is not one)
        if hasattr(one, "resume_from_checkpoint"):
            _complete(one, str(usual.get("output_dir")))
    task_type = str(usual.get("lora_task_type", "CAUSAL_LM"))
    _check(parsed, [name for name in _OF_ADAPTERS if name in parser.given], task_type, is_tried=parser.is_tried)
    if not sys.stderr.isatty() or _value(parsed, "disable_tqdm"):  # bars fill a log file with a line for each moment
        import datasets

        datasets.disable_progress_bars()
        disable_progress_bar()
        disable_progress_bars()
    # PEFT 0.21 and TRL 1.16 ask transformers by an older name, and PEFT sets the other value itself.
    warnings.filterwarnings("ignore", message=".*`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="fan_in_fan_out is set to ")
    return parsed


_RECIPE_DEFAULTS: dict[str, Any] = {
    # The launch config decides precision, device and activation checkpointing.
    "bf16": False,
    "dtype": None,
    "gradient_checkpointing": False,
    "logging_steps": 5,
    "logging_nan_inf_filter": False,  # it reads the loss of each micro-batch, and the device waits
    "report_to": "none",
    # Ten checkpoints in a run of any length, of which two are kept.
    "save_strategy": "steps",
    "save_steps": 0.1,
    "save_total_limit": 2,
    "eval_strategy": "epoch",
    "eval_on_start": True,
}
"""Defaults of all recipes where they differ from TRL's."""


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """One short line for each option: TRL's parser knows each by two names, and some have forty choices."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = "" if action.nargs == 0 else self._format_args(action, action.dest.upper())
        return f"{action.option_strings[0]} {value if len(value) < 40 else '…'}".rstrip()


class _Parser(TrlParser):  # type: ignore[misc]  # trl is not typed
    """TRL's parser with one-line errors and a help text that begins with the recipe's own options."""

    commands: Mapping[str, str] = MappingProxyType({})
    """Those of the recipe's row."""
    is_tried = False
    """Whether a model is given on the command line, and no data: the demo's are taken."""

    def parse(self, demo: dict[str, Any], adapter: dict[str, Any], tries: dict[str, Any]) -> tuple[Any, ...]:
        """The dataclasses of `sys.argv` and the file of `--config`; unknown options and keys are errors.

        Without a model the demo's values are defaults, without data those of a model that is tried, with an adapter its
        own, with early stopping what that needs.
        """
        start = _Parser((), allow_abbrev=False, add_help=False)
        start.add_argument("--config", type=Path)
        options, words = start.parse_known_args(sys.argv[1:])
        names = [name for action in self._actions for name in action.option_strings if "-" not in name.lstrip("-")]
        file = {} if options.config is None else _read_file(options.config)
        os.environ.update({key: str(value) for key, value in file.pop("env", {}).items()})
        known = {name.lstrip("-") for name in names}
        given = [word.partition("=")[0] for word in words if word[:1] == "-"]
        if (key := next((key for key in file if key not in known), None)) is not None:
            raise ConfigError(f"--config {options.config}: {no_option(str(key), known)}")
        self.given = {word.lstrip("-").replace("-", "_") for word in given} | {*file}
        if other := next((word for word in given if word.lstrip("-").replace("-", "_") in ELSEWHERE), None):
            raise ConfigError(no_option(other, names))
        self.set_defaults_with_config(**file)
        for action in self._actions:
            if action.dest == "optim" and action.choices is not None:
                action.choices = list(dict.fromkeys([*action.choices, MUON]))
        values, unknown = self.parse_known_args(words)
        if unknown:
            wrong = next((word for word in unknown if word.startswith("-")), unknown[0]).split("=")[0]
            if not wrong.startswith("-"):
                raise ConfigError(f"{wrong} stands behind no option. Put commas between the values of one option.")
            raise ConfigError(no_option(wrong, names))
        chosen = adapter if getattr(values, "use_peft", False) else {}
        lacks_data = getattr(values, "dataset_name", None) is None and "model_name_or_path" not in file
        self.is_tried = bool(tries) and lacks_data
        chosen = tries if self.is_tried else chosen
        chosen = demo if getattr(values, "model_name_or_path", None) is None else chosen
        if getattr(values, "lora_experts", False):
            chosen = chosen | _OF_EXPERTS
        if getattr(values, "early_stopping_patience", None) is not None:
            chosen = chosen | _EARLY_STOP
        self.set_defaults_with_config(**(chosen | file))
        # TrainingArguments refuse a name that transformers does not know
        is_muon = str(getattr(values, "optim", None)) == MUON
        if is_muon:
            words = [*words, "--optim", "adamw_torch"]
        try:
            with warnings.catch_warnings():  # of TRL's own default, by its older name
                warnings.filterwarnings("ignore", message=".*gradient_checkpointing` is deprecated")
                parsed = tuple(self.parse_args_into_dataclasses(words))
        except ConfigError:
            raise
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"The options cannot be used: {first_lines(error, 4)}.") from error
        for one in parsed if is_muon else ():
            if hasattr(one, "optim"):
                one.optim = MUON
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print after 150 lines of usage."""
        option, _, rest = message.removeprefix("argument ").partition(": ")
        if found := re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", rest):
            choices = re.findall("'(.*?)'", found[2])
            rest = f"there is no {found[1]}{did_you_mean(found[1], choices)}".removesuffix(".")
        rest = rest.replace("expected one argument", "give a value; a switch takes true or false")
        raise ConfigError(f"{option.split('/')[0]}: {rest}{'.' * (rest[-1] != '?')}" if rest else f"{message}.")

    def print_help(self, file: Any = None) -> None:
        """Print the help once for each machine."""
        if rank_on_node()[0] == 0:
            super().print_help(file)

    def format_help(self) -> str:
        """The script's docstring and its `COMMANDS`, its own options, then those of TRL and transformers."""
        formatter = self._get_formatter()
        libraries = ("trl.", "transformers.", "sentence_transformers.")
        parts = (part for kind in self.dataclass_types for part in kind.__mro__)
        foreign = {name for part in parts if part.__module__.startswith(libraries) for name in get_annotations(part)}
        sections: dict[str, list[Any]] = {"options of this recipe": [], "options of TRL and transformers": []}
        for action in self._actions:
            sections[list(sections)[action.dest in foreign]].append(action)
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        script = sys.modules["__main__"]
        commands = recipe_commands(Path(self.prog).stem.replace("_", "-"), getattr(script, "COMMANDS", self.commands))
        usage = f"usage: {self.prog} [--config FILE.yaml] [--OPTION VALUE …]"
        return "\n\n".join([usage, (script.__doc__ or "").strip(), commands, formatter.format_help()])


def _read_file(path: Path) -> dict[str, Any]:
    """The values of the file of `--config`."""
    try:
        content = load_yaml(path)
    except CheckpointError as error:
        raise ConfigError(f"--config: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"--config {path}{where}: no YAML: {first_line(error)}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("env", {}), dict):
        raise ConfigError(f"--config {path}: holds no `name: value` lines.")
    return content


def _value(parsed: Iterable[Any], name: str) -> Any:
    """The value of an option in whichever object has it; None where none has."""
    return next((getattr(one, name) for one in parsed if hasattr(one, name)), None)


def _complete(training: Any, default_folder: str) -> None:
    """Change values that the Trainer wants otherwise than people write them, and take a folder of the run's own."""
    resume = str(training.resume_from_checkpoint).lower()
    if resume in ("true", "false", "none"):
        training.resume_from_checkpoint = True if resume == "true" else None
    if training.eval_strategy == "no":
        training.eval_on_start = False
    if isinstance(getattr(training, "report_to", None), list):
        training.report_to = [name for names in training.report_to for name in names.split(",") if name]
    if 0 < training.max_steps < training.logging_steps:
        training.logging_steps = training.max_steps  # a run of two steps shows its loss too
    if training.output_dir == default_folder:  # the next free number, or to resume the last that is there
        folders = [default_folder]
        while any(Path(folders[-1]).glob("checkpoint-*")):
            folders.append(f"{default_folder}-{len(folders) + 1}")
        training.output_dir = folders[-2:][0] if training.resume_from_checkpoint is True else folders[-1]


_BELOW_1 = ("lora_dropout", "adam_beta1", "adam_beta2", "label_smoothing", "label_smoothing_factor")
_LEAST: dict[str, float] = {"max_length": 2, "temperature": 0.01, "adam_epsilon": 1e-16}
_LEAST |= dict.fromkeys((*_BELOW_1, "max_grad_norm", "weight_decay", "beta", "warmup_steps", "learning_rate"), 0)
_LEAST |= dict.fromkeys(("neftune_noise_alpha", "dataloader_num_workers", "seed", "data_seed", "eval_steps"), 0)
_LEAST |= dict.fromkeys(("logging_steps", "save_steps"), 0) | dict.fromkeys(("lora_r", "lora_alpha", "ddp_timeout"), 1)
_LEAST |= dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "save_total_limit"), 1)
_LEAST |= dict.fromkeys(("gradient_accumulation_steps", "max_completion_length", "early_stopping_patience"), 1)
"""Numbers below which nothing is trained, or a library stops with an error of its own."""

_PACKAGES = {"use_peft": "peft", "load_in_4bit": "bitsandbytes", "use_liger_kernel": "liger_kernel", "use_vllm": "vllm"}


def _check(parsed: tuple[Any, ...], of_adapters: Sequence[str], task_type: str, *, is_tried: bool) -> None:
    """Refuse options that contradict each other, all in one error, and those whose package is absent."""
    get = partial(_value, parsed)
    hints = {name: hint for one in parsed for name, hint in get_type_hints(type(one)).items()}
    for value, each in ((getattr(one, each.name), each) for one in parsed for each in fields(one)):
        may_lack = value is None and NoneType in get_args(hints[each.name])
        if isinstance(each.default, int | float) and not may_lack and not isinstance(value, int | float | str):
            raise ConfigError(f"--{each.name}: give a number; the file of --config has {value!r}.")
        if each.name.endswith("_kwargs") and isinstance(value, str):
            raise ConfigError(f'--{each.name}: write it as JSON, {{"name": value}}, and not as {value}.')
    model, data, adapts, merges = map(get, ("model_name_or_path", "dataset_name", "use_peft", "merge_adapters"))
    four_bits, stays = get("load_in_4bit"), get("dequantize") is False
    stops, evaluates = get("early_stopping_patience") is not None, get("eval_strategy") != "no"
    pushes = get("push_to_hub") and not get("hub_token") and get_token() is None
    named = [name for name, column in (get("column_names") or {}).items() if column is not None]
    is_folder = get("model_revision") not in (None, "main") and model is not None and Path(model).is_dir()
    no_epochs = (get("num_train_epochs") or 0) <= 0
    no_steps, no_saves = (get("max_steps") or 0) <= 0, get("save_steps") == 0 and get("save_strategy") == "steps"
    mistakes: list[tuple[Any, str]] = [
        (get(name) is not None and float(get(name)) < least, f"--{name}: give at least {least}.")
        for name, least in _LEAST.items()
    ]
    for name, package in _PACKAGES.items():
        install = f"--{name} needs {package}: pip install {package.replace('_', '-')}."
        mistakes.append((get(name) and find_spec(package) is None, install))
    mistakes += [(get(name) is not None and float(get(name)) >= 1, f"--{name}: give less than 1.") for name in _BELOW_1]
    rewards, weights = get("reward_funcs") or [], get("reward_weights")
    count = len(rewards) + (get("reward_model_name_or_path") is not None)
    numbers = {name: value for one in parsed for name, value in vars(one).items() if isinstance(value, float)}
    mistakes += [(not math.isfinite(value), f"--{name} {value}: give a number.") for name, value in numbers.items()]
    task = f"--lora_task_type {get('lora_task_type')} is written into the adapter and is not what this recipe trains"
    mistakes += [
        (weights and len(weights) != count, f"--reward_weights: give one for each reward, of which there are {count}."),
        ("lora_task_type" in of_adapters and get("lora_task_type") != task_type, f"{task}: leave it out."),
        (no_epochs and no_steps, "--num_train_epochs trains nothing: give 1, or --max_steps."),
        (is_folder, f"--model_revision is for a hub name, and {model} is a folder."),
        (get("output_dir") == "", "--output_dir is empty: name a folder."),
        (no_saves, "--save_steps 0 keeps no checkpoint on the way: say so by --save_strategy no, or give a number."),
        (get("load_in_8bit"), "--load_in_8bit: 8-bit layers cannot be sharded. Use --load_in_4bit, or neither."),
        (four_bits and not adapts, "--load_in_4bit freezes the base, so there is nothing to train: add --use_peft."),
        (stays and not adapts, "--dequantize false freezes the base, so there is nothing to train: add --use_peft."),
        (stays and four_bits, "--load_in_4bit quantises a plain base, --dequantize false keeps a quantised one."),
        (stays and merges, "--merge_adapters needs floats: merge later, by hf-fsdp export BASE OUT --adapter ADAPTER."),
        (four_bits and merges, "--merge_adapters would round merged weights to 4 bits: merge into the plain base."),
        (merges and not adapts, "--merge_adapters needs an adapter: add --use_peft."),
        (adapts and get("optim") == MUON, "--optim muon is for whole matrices, and --use_peft trains thin factors."),
        (of_adapters and not adapts, f"--{''.join(of_adapters[:1])} is for an adapter: add --use_peft."),
        (
            model and not (data or is_tried),
            "--model_name_or_path needs --dataset_name: a hub name, a folder, or a .jsonl file.",
        ),
        (data and not model, f"--dataset_name {data} would not be read by the demo: add --model_name_or_path."),
        (named and not data, f"--{''.join(named[:1])}_column is for a dataset of your own: add --dataset_name."),
        (stops and not evaluates, "--early_stopping_patience needs evaluations: leave --eval_strategy no out."),
        (pushes, "--push_to_hub needs a token of the hub: run `hf auth login`, or set HF_TOKEN."),
        (get("fp16") and find_accelerator() is None, "--fp16 needs a GPU. Use --bf16 true, or neither."),
    ]
    if made := [text for is_made, text in mistakes if is_made]:
        raise ConfigError(" ".join(made))
    _check_reports(get)


def _check_reports(get: Callable[[str], Any]) -> None:
    """Make each callback of `--report_to` or `--log_with` once: it says itself which package it lacks."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    trackers = [(name, "--report_to") for name in get("report_to") or ()]
    for name, option in [*trackers, *[(name, "--log_with") for name in [get("log_with")] if name]]:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(f"{option} {name}: unknown{did_you_mean(name, INTEGRATION_TO_CALLBACK)}")
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            raise ConfigError(f"{option} {name}: {first_line(error)}. Install it, or leave {option} out.") from error
