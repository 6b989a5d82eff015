"""Arguments of a recipe: TRL's and the Trainer's own, from the command line over a YAML file."""

import argparse
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from inspect import get_annotations
from pathlib import Path
from typing import Any, NoReturn

import yaml
from huggingface_hub import get_token
from trl import ModelConfig, TrlParser

from hf_fsdp_tools.accelerator import find_accelerator
from hf_fsdp_tools.distributed.mesh import gpus_are_hidden, rank_on_node
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.extensions.muon.muon import MUON
from hf_fsdp_tools.modeling.pickles import load_yaml
from hf_fsdp_tools.scripting.columns import chosen_columns, column_options
from hf_fsdp_tools.text import did_you_mean, first_line, first_lines


@dataclass
class ModelArguments(ModelConfig):  # type: ignore[misc]  # trl is not typed
    """What is trained, and how long: TRL's own options and five more.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class MyArguments(ModelArguments):
        ...     freeze_embeddings: bool = False
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, MyArguments)
        >>> model_args.model_name_or_path, model_args.freeze_embeddings
        ('checkpoint', False)
    """

    merge_adapters: bool = field(
        default=False, metadata={"help": "Write a checkpoint with the adapter merged in, beside the adapter (merged/)."}
    )
    dequantize: bool = field(
        default=True,
        metadata={"help": "A base that is stored quantised becomes floats; false: it stays so, under an adapter."},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "End when the evaluation loss has not fallen in so many evaluations in a row, and keep the best "
            "checkpoint. Evaluates 20 times in the run, unless --eval_strategy says otherwise, and saves the best."
        },
    )
    ema_decay: float | None = field(
        default=None,
        metadata={"help": "Average the trained weights after each step (0.999, say), and save that, too (ema/)."},
    )
    ema_device: str | None = field(
        default=None, metadata={"help": "cpu keeps the averages of --ema_decay in host memory."}
    )
    default_max_length: int | None = field(default=None, init=False)
    """What `--max_length` is where nobody gives it; `parse_arguments` sets it, and it is no option."""
    others: tuple[Any, ...] = field(default=(), init=False, repr=False)
    """What `parse_arguments` has returned beside this one, likewise."""

    def __post_init__(self) -> None:
        """As TRL's; but an adapter's base keeps the checkpoint's dtype, commas may stand between names, and a plain
        name stays a name, which TRL makes a pattern.
        """
        super().__post_init__()
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

_OF_ADAPTERS = [each.name for each in fields(ModelConfig) if each.name.startswith(("lora_", "use_dora", "use_rslora"))]

_EARLY_STOP = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_strategy": "best"}
_EARLY_STOP |= {"eval_strategy": "steps", "eval_steps": 0.05}
"""What early stopping needs of the Trainer."""


def parse_arguments(
    *dataclasses: type,
    defaults: Mapping[str, Any] | None = None,
    demo: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
) -> tuple[Any, ...]:
    """One object of each dataclass, from the command line, else from the YAML file of `--config`, else from defaults.

    A dataclass with `model_name_or_path` (`ModelArguments`) must be among them, one with `dataset_name` (TRL's
    `ScriptArguments`) and one that extends `TrainingArguments` (`SFTConfig`) usually are. Without a model and a dataset
    the recipe is a demo.

    Where the output folder is the recipe's default and holds a run already, the next free number is used
    ("outputs/finetune-2"); `--resume_from_checkpoint true` takes the last. Where standard error is no terminal, and
    with `--disable_tqdm`, the bars of datasets, transformers and huggingface_hub are switched off. `--help` prints the
    docstring of the running script and its options, those that TRL and transformers do not have first.

    Args:
        dataclasses: of TRL's parser.
        defaults: of this recipe, before those of the dataclasses.
        demo: defaults where neither the command line nor the file names a model; never with a model of the user's.
        columns: names under which the recipe takes columns ("text", "prompt", "completion", …). Each makes an option
            (`--prompt_column question`), and `load_splits` gives the user's column the recipe's name. They stand in
            `column_names` of the object with `dataset_name`.

    Each process calls it for itself, and the result is the same on all. `TrainingArguments` start the process group,
    over an interface that leads to the other machines.

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
    kinds = (*dataclasses, *((column_options(columns),) if columns else ()))
    parser = _Parser(kinds, allow_abbrev=True, formatter_class=_Help)
    on_cpu = find_accelerator() is None
    # where GPUs are absent but not hidden, `make_accelerator` says whether they were meant
    machine: dict[str, Any] = {"dataloader_pin_memory": not on_cpu, "use_cpu": on_cpu and gpus_are_hidden()}
    if not on_cpu:
        machine["accelerator_config"] = {"non_blocking": True}  # the host does not wait for a batch that is copied
    recipe = _RECIPE_DEFAULTS | machine | dict(defaults or {})
    parser.set_defaults_with_config(**recipe)
    default_length = parser.get_default("max_length")  # before the file's values become defaults
    parsed = parser.parse(_DEMO | dict(demo or {}))
    chosen = chosen_columns(parsed[-1]) if columns else {}
    parsed = parsed[: len(dataclasses)]
    for one in parsed:
        if hasattr(one, "dataset_name"):
            one.column_names = chosen
        if isinstance(one, ModelArguments):
            one.default_max_length = default_length
            one.others = tuple(other for other in parsed if other is not one)
        if hasattr(one, "resume_from_checkpoint"):
            _complete(one, str(recipe.get("output_dir")))
    _check(parsed, [name for name in _OF_ADAPTERS if name in parser.given])
    if not sys.stderr.isatty() or _value(parsed, "disable_tqdm"):
        _show_no_bars()
    # PEFT 0.21 and TRL 1.16 ask transformers by an older name, and PEFT sets the other value itself.
    warnings.filterwarnings("ignore", message=".*`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="fan_in_fan_out is set to ")
    # Heads with a bias and T5's blocks return views, which nothing in the recipes changes in place (torch 2.13).
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
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

    def parse(self, demo: dict[str, Any]) -> tuple[Any, ...]:
        """The dataclasses of `sys.argv` and the file of `--config`; unknown options and keys are errors.

        Without a model the values of the demo are defaults, and with early stopping what it needs of the Trainer.
        """
        start = _Parser((), allow_abbrev=False, add_help=False)
        start.add_argument("--config", type=Path)
        options, words = start.parse_known_args(sys.argv[1:])
        names = [name for action in self._actions for name in action.option_strings if "-" not in name.lstrip("-")]
        if any(word.partition("=")[0].replace("-", "_") == "__mixed_precision" for word in words):
            raise ConfigError(
                "--mixed_precision is an option of the launcher: give it before the script, or the script --bf16 true."
            )
        if any(word.partition("=")[0] == "--deepspeed" for word in words):
            raise ConfigError(
                "--deepspeed: FSDP2 shards here. Leave it out; `hf-fsdp config --from FILE` translates its JSON."
            )
        file = {} if options.config is None else _read_file(options.config, names)
        os.environ.update({key: str(value) for key, value in file.pop("env", {}).items()})
        self.given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words} | {*file}
        if other := next((name for name in self.given if name in _OF_OTHERS), None):
            raise ConfigError(f"--{other} is no option of this recipe: did you mean --{_OF_OTHERS[other]}?")
        self.set_defaults_with_config(**file)
        for action in self._actions:
            if action.dest == "optim" and action.choices is not None:
                action.choices = list(dict.fromkeys([*action.choices, MUON]))
        values, unknown = self.parse_known_args(words)
        if unknown:
            wrong = next((word for word in unknown if word.startswith("-")), unknown[0]).split("=")[0]
            if not wrong.startswith("-"):
                raise ConfigError(f"{wrong} stands behind no option. Put commas between the values of one option.")
            raise _unknown(wrong, names)
        chosen = demo if getattr(values, "model_name_or_path", None) is None else {}
        if getattr(values, "early_stopping_patience", None) is not None:
            chosen = chosen | _EARLY_STOP
        self.set_defaults_with_config(**(chosen | file))
        # TrainingArguments refuse a name that transformers does not know
        is_muon = str(getattr(values, "optim", None)) == MUON
        if is_muon:
            words = [*words, "--optim", "adamw_torch"]
        try:
            with warnings.catch_warnings():
                # TRL's own default, by its older name.
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
        raise ConfigError(f"{option.split('/')[0]}: {rest}." if rest else f"{message}.")

    def print_help(self, file: Any = None) -> None:
        """Print the help once for each machine."""
        if rank_on_node()[0] == 0:
            super().print_help(file)

    def format_help(self) -> str:
        """The script's docstring, its own options, then those of TRL and transformers."""
        formatter = self._get_formatter()
        foreign = {
            name
            for kind in self.dataclass_types
            for part in kind.__mro__
            if part.__module__.startswith(("trl.", "transformers.", "sentence_transformers."))
            for name in get_annotations(part)
        }
        sections: dict[str, list[Any]] = {"options of this recipe": [], "options of TRL and transformers": []}
        for action in self._actions:
            sections[list(sections)[action.dest in foreign]].append(action)
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        text = (getattr(sys.modules["__main__"], "__doc__", None) or "").strip()
        usage = f"usage: {self.prog} [--config FILE.yaml] [--OPTION VALUE …]"
        return f"{usage}\n\n{text}\n\n{formatter.format_help()}"


_OF_LAUNCHER = {"cp_size", "tp_size", "ep_size", "dp_replicate_size", "num_processes", "num_machines", "machine_rank"}
_OF_LAUNCHER |= {"compute_environment", "distributed_type", "fsdp_config", "parallelism_config", "mixed_precision"}
"""Keys of the launcher's file, or of its sections, that recipes do not have."""

_OF_OTHERS = {
    "batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "max_seq_length": "max_length",
}
"""Names that other programs have for options of TRL."""


def _read_file(path: Path, names: list[str]) -> dict[str, Any]:
    """The values of the file of `--config`, which must be a mapping of known options in YAML."""
    if not path.exists():
        raise ConfigError(f"--config {path}: No such file or directory. Give the path of a YAML file.")
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
    known = {name.lstrip("-") for name in names} | {"env"}
    if (key := next((key for key in content if key not in known), None)) is not None:
        raise _unknown(str(key), known, f"--config {path}: ")
    return content


def _unknown(name: str, known: Iterable[str], where: str = "") -> ConfigError:
    """The error of a name that no option has."""
    if name.lstrip("-").replace("-", "_") in _OF_LAUNCHER:
        return ConfigError(
            f"{where}{name} goes into the launch file: `hf-fsdp config --output FILE` writes one, and --config_file of "
            "hf-fsdp and of `accelerate launch` takes it."
        )
    end = did_you_mean(name, known, otherwise="; --help lists all.")
    return ConfigError(f"{where}{name} is no option of this recipe{end}")


def _value(parsed: Iterable[Any], name: str) -> Any:
    """The value of an option in whichever object has it; None where none has."""
    return next((getattr(one, name) for one in parsed if hasattr(one, name)), None)


def _complete(training: Any, default_folder: str) -> None:
    """Change values that the Trainer wants otherwise than people write them, and take a folder of the run's own.

    Where the folder is the recipe's default, it is the next free number: a run must not mix with the one before. A run
    that is resumed takes the last.
    """
    resume = str(training.resume_from_checkpoint).lower()
    if resume in ("true", "false", "none"):
        training.resume_from_checkpoint = True if resume == "true" else None
    if training.eval_strategy == "no":
        training.eval_on_start = False
    if isinstance(getattr(training, "report_to", None), list):
        training.report_to = [name for names in training.report_to for name in names.split(",") if name]
    if 0 < training.max_steps < training.logging_steps:
        training.logging_steps = training.max_steps  # a run of two steps shows its loss too
    if training.output_dir != default_folder:
        return
    last = folder = Path(default_folder)
    for number in itertools.count(2):
        if not any(folder.glob("checkpoint-*")):
            break
        last, folder = folder, Path(f"{default_folder}-{number}")
    training.output_dir = str(last if training.resume_from_checkpoint is True else folder)


def _show_no_bars() -> None:
    """Switch off the bars of loading, mapping and saving, which fill a log file with a line for each moment."""
    import datasets
    import huggingface_hub
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()  # type: ignore[attr-defined]  # public, but not re-exported


_LEAST = {"max_length": 2, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "lora_r": 1}
_LEAST |= {"gradient_accumulation_steps": 1, "dataloader_num_workers": 0, "learning_rate": 0}
"""Numbers below which nothing is trained, or a library stops with an error of its own."""


def _check(parsed: tuple[Any, ...], of_adapters: Sequence[str]) -> None:
    """Refuse options that contradict each other, all in one error, and those whose package is absent."""

    def get(name: str) -> Any:
        return _value(parsed, name)

    adapts, four_bits, merges = get("use_peft"), get("load_in_4bit"), get("merge_adapters")
    stays = get("dequantize") is False
    named = [name for name, column in (get("column_names") or {}).items() if column is not None]
    small = [name for name, least in _LEAST.items() if get(name) is not None and float(get(name)) < least]
    mistakes = (
        *((True, f"--{name}: give at least {_LEAST[name]}.") for name in small),
        (
            get("num_train_epochs") == 0 and (get("max_steps") or 0) <= 0,
            "--num_train_epochs 0 trains nothing: give 1, for example, or --max_steps.",
        ),
        (
            get("save_steps") == 0 and get("save_strategy") == "steps",
            "--save_steps 0 keeps no checkpoint on the way: say so by --save_strategy no, or give a number of steps.",
        ),
        (get("load_in_8bit"), "--load_in_8bit: 8-bit layers cannot be sharded. Use --load_in_4bit, or neither."),
        (four_bits and not adapts, "--load_in_4bit freezes the base, so there is nothing to train: add --use_peft."),
        (stays and not adapts, "--dequantize false freezes the base, so there is nothing to train: add --use_peft."),
        (stays and four_bits, "--load_in_4bit quantises a plain base, --dequantize false keeps a quantised one."),
        (stays and merges, "--merge_adapters needs floats: merge later, by hf-fsdp export BASE OUT --adapter ADAPTER."),
        (four_bits and merges, "--merge_adapters would round merged weights to 4 bits: merge into the plain base."),
        (
            adapts and str(get("optim")) == MUON,
            "--optim muon is for the matrices of a model, and adapters are thin factors: leave --use_peft or it out.",
        ),
        (bool(of_adapters) and not adapts, f"--{''.join(of_adapters[:1])} is for an adapter: add --use_peft."),
        (merges and not adapts, "--merge_adapters needs an adapter: add --use_peft."),
        (
            get("model_name_or_path") is not None and get("dataset_name") is None,
            "--model_name_or_path needs --dataset_name: a hub name, a folder, or a .jsonl file.",
        ),
        (
            get("dataset_name") is not None and get("model_name_or_path") is None,
            f"--dataset_name {get('dataset_name')} would not be read: without --model_name_or_path the demo is trained "
            "on its own data. Give the name or folder of a model.",
        ),
        (
            bool(named) and get("dataset_name") is None,
            f"--{''.join(named[:1])}_column is for a dataset of your own: add --dataset_name.",
        ),
        (
            get("ema_decay") is not None and not 0 <= get("ema_decay") < 1,
            f"--ema_decay {get('ema_decay')}: give a number of at least 0 and below 1, usually 0.99 to 0.9999.",
        ),
        (get("ema_device") not in (None, "cpu"), f"--ema_device {get('ema_device')}: give cpu, or leave it out."),
        (get("ema_device") and get("ema_decay") is None, "--ema_device needs --ema_decay: give 0.999, for example."),
        (get("fp16") and find_accelerator() is None, "--fp16 needs a GPU. Use --bf16 true, or neither."),
        (
            get("early_stopping_patience") is not None and get("eval_strategy") == "no",
            "--early_stopping_patience needs evaluations: leave --eval_strategy no out.",
        ),
        (
            get("push_to_hub") and not get("hub_token") and get_token() is None,
            "--push_to_hub needs a token of the hub: run `hf auth login`, or set HF_TOKEN.",
        ),
    )
    if made := [text for is_made, text in mistakes if is_made]:
        raise ConfigError(" ".join(made))
    packages = {"use_peft": "peft", "load_in_4bit": "bitsandbytes", "use_liger_kernel": "liger_kernel"}
    packages["use_vllm"] = "vllm"
    for option, package in packages.items():
        if get(option) and find_spec(package) is None:
            raise ConfigError(f"--{option} needs {package}: pip install {package.replace('_', '-')}.")
    _check_reports(get)


def _check_reports(get: Callable[[str], Any]) -> None:
    """Make each callback of `--report_to` or `--log_with` once: it says itself which package it lacks."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    reports = [(name, "--report_to") for name in get("report_to") or ()]
    for name, option in [*reports, *([(get("log_with"), "--log_with")] if get("log_with") else [])]:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(f"{option} {name}: unknown{did_you_mean(name, INTEGRATION_TO_CALLBACK)}")
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            raise ConfigError(f"{option} {name}: {first_line(error)}. Install it, or leave {option} out.") from error
