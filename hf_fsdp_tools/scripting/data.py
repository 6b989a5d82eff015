"""The data of a recipe: files, folders and hub names as a training and an evaluation split; and the tokenizer."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.scripting.formats import from_alpaca, from_sharegpt, with_places_of_images, with_turns_for_prompt
from hf_fsdp_tools.scripting.streams import share_of_stream
from hf_fsdp_tools.text import first_line, listed

__all__ = ["load_processor", "load_splits", "load_tokenizer"]

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""The builder of datasets for a file's suffix."""

_HELD_OUT_SHARE, _HELD_OUT_MOST = 0.05, 2_000
"""Rows that are held out for evaluation where the dataset has one split. (assumed)"""

_TEST_SPLITS = ("validation", "eval", "dev")
"""Names of the evaluation split where the one of `--dataset_test_split` is absent."""

_ALPACA = ({"instruction", "output"}, {"question", "answer"})
"""Columns of a question and its answer; alpaca has `input` besides, which belongs to the question."""

_NOT_LOADED = "Check the name; one of the hub needs the network, and `hf auth login` where it is private or gated."

_TURNS, _TEXT_OR_TURNS = {"messages", "conversations"}, {"prompt", "chosen", "rejected", "completion"}


def load_splits(script: Any, training: Any, *, columns: Sequence[AbstractSet[str]]) -> tuple[Any, Any]:
    """The training and the evaluation split, in the format that the recipe needs; prints how many rows each has.

    `--dataset_name` is a hub name, a folder, a .jsonl/.json/.csv/.parquet/.txt file, or several of these with commas
    between them. Rows of alpaca (`instruction`, `input`, `output`) become `prompt` and `completion`, those of ShareGPT
    (`conversations` with `from` and `value`) become `messages`. Where there is no evaluation split, a twentieth of the
    rows is held out, 2,000 at most; nothing is with `--eval_strategy no`. With `--dataset_streaming` rows are read as
    they are needed, each rank its share without end (`share_of_stream`), for a trainer with `StreamMixin`; 2,000 rows
    are evaluated at most.

    Args:
        script: TRL's `ScriptArguments`.
        training: the Trainer's arguments.
        columns: the recipe needs all columns of one of these sets, as TRL names them.

    Every rank must call. The ranks exchange errors alone.

    Raises:
        ConfigError: a dataset is absent, empty, malformed (with file and line) or has other columns, or no text in
            them; there are fewer rows than ranks; on all ranks alike.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> data, held_out = load_splits(script, training, columns=[{"text"}, {"messages"}])
        rows.jsonl: 19 rows to train on, 1 to evaluate
    """
    from datasets import Dataset

    with agreed("loading the dataset"):
        names = [script.dataset_name]
        if not Path(names[0]).exists():
            names = [name.strip() for name in names[0].split(",") if name.strip()]
        loaded = [_splits_of(name, script) for name in names]
        parts = [_part(splits, script.dataset_train_split, name) for name, splits in zip(names, loaded, strict=True)]
        parts = [_converted(part, name, columns) for name, part in zip(names, parts, strict=True)]
        train = parts[0] if len(parts) == 1 else _mixed(parts, names, streaming=script.dataset_streaming)
        whole, evaluation = train, None
        if training.eval_strategy != "no":
            train, evaluation = _held_out(train, script, training, names, loaded, columns)
        _check_sizes(script, training, train, evaluation)
        if script.dataset_streaming and evaluation is not None:
            evaluation = Dataset.from_list(list(evaluation.take(_HELD_OUT_MOST)), features=evaluation.features)
    if script.dataset_streaming:
        held_out = None if train is whole else evaluation  # not those of a split of their own
        train = share_of_stream(train, held_out=held_out, columns=set().union(*columns))
    if rank_and_size()[0] == 0:
        rows = "streamed" if script.dataset_streaming else f"{len(train):,} rows to train on"
        rest = "" if evaluation is None else f", {len(evaluation):,} to evaluate"
        print(f"{script.dataset_name}: {rows}{rest}")
    return train, evaluation


def _splits_of(name: str, script: Any) -> Any:
    """The splits of one file, folder or hub name."""
    from datasets import load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    path = Path(name)
    if not path.exists() and (path.suffix in _BUILDERS or name.startswith((".", "/", "~"))):
        raise ConfigError(f"--dataset_name {name}: no such file. Give a file, a folder, or a hub name.")
    files = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.suffix in _BUILDERS)
    for file in files:
        if not file.stat().st_size:
            raise ConfigError(f"--dataset_name {name}: {file.name} is empty.")
    try:
        if path.is_file():
            builder = _BUILDERS.get(path.suffix, "text")
            splits = load_dataset(builder, data_files=str(path), streaming=script.dataset_streaming)
        elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            stored = load_from_disk(name)
            splits = stored if hasattr(stored, "items") else {"train": stored}
        else:
            splits = load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)
    except DatasetGenerationError as error:
        where = next(filter(None, map(_first_bad_line, files)), None)
        raise ConfigError(
            f"--dataset_name {name}: {where or first_line(error.__cause__ or error)}. Mend or delete that row."
        ) from error
    except (OSError, ValueError, RuntimeError, StopIteration) as error:
        raise ConfigError(f"--dataset_name {name} cannot be loaded: {first_line(error)}. {_NOT_LOADED}") from error
    return splits


def _first_bad_line(file: Path) -> str | None:
    """What is wrong with the first line of a .jsonl file that is not one JSON object; None where nothing is."""
    if file.suffix != ".jsonl":
        return None
    with open(file, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                return f"{file.name}, line {number} is no JSON: {first_line(error)}"
            if not isinstance(row, dict):
                return f"{file.name}, line {number} is no JSON object"
    return None


def _part(splits: Any, wanted: str, name: str) -> Any:
    if wanted not in splits:
        raise ConfigError(
            f"--dataset_name {name} has no split {wanted!r}, only {listed(splits)}. Name one with "
            "--dataset_train_split."
        )
    part = splits[wanted]
    if hasattr(part, "__len__") and not len(part):
        raise ConfigError(f"--dataset_name {name} has no rows.")
    return part


def _converted(dataset: Any, name: str, columns: Sequence[AbstractSet[str]]) -> Any:
    """The dataset in a format that the recipe needs; rows of alpaca and ShareGPT are converted.

    Raises:
        ConfigError: it has other columns.
    """
    found = _columns(dataset)
    if (used := next((wanted for wanted in columns if wanted <= found), None)) is not None:
        _check_types(dataset, name, used if len(used) == 1 else used & (_TURNS | _TEXT_OR_TURNS))
        dataset = with_turns_for_prompt(dataset)
        return with_places_of_images(dataset) if used & {"image", "images"} else dataset
    if "conversations" in found and any(wanted <= found - {"conversations"} | {"messages"} for wanted in columns):
        _check_types(dataset, name, {"conversations"})
        return _converted(dataset.map(from_sharegpt, remove_columns=["conversations"]), name, columns)
    turns, pairs = ({*wanted} in map(set, columns) for wanted in (["messages"], ["prompt", "completion"]))
    question = next((pair for pair in _ALPACA if pair <= found), None)
    if question is not None and (pairs or turns):
        ask, answer = ("instruction", "output") if "output" in question else ("question", "answer")
        _check_types(dataset, name, {ask, answer, "input", "system"})
        keep = {"ask": ask, "answer": answer, "pairs": pairs}
        return dataset.map(from_alpaca, fn_kwargs=keep, remove_columns=sorted(found))
    needed = listed([" and ".join(f"`{one}`" for one in sorted(wanted)) for wanted in columns], 8, separator="; or ")
    raise ConfigError(
        f"--dataset_name {name} has the columns {', '.join(sorted(found))}; none can be trained on. Needed: {needed}. "
        "Rename one"
        + (", or name a text column with --dataset_text_field." if any(len(one) == 1 for one in columns) else ".")
    )


def _check_types(dataset: Any, name: str, columns: AbstractSet[str]) -> None:
    """Refuse a dataset whose first row has something else than text, or turns of a chat, in these columns."""
    row: Mapping[str, Any] = next(iter(dataset), {})
    for column in sorted(columns & set(row)):
        value, wanted = row[column], "turns, each with `role` and `content`" if column in _TURNS else "text"
        turns = value if isinstance(value, list) and column in _TURNS | _TEXT_OR_TURNS else [None]
        is_text = value is None or (isinstance(value, str) and column not in _TURNS)
        if not is_text and not all(isinstance(turn, Mapping) and turn.get("role", turn.get("from")) for turn in turns):
            raise ConfigError(
                f"--dataset_name {name}: the column `{column}` must hold {wanted}, and its first row is "
                f"{repr(value)[:60]}. Mend it, or rename it and name another one."
            )


def _columns(dataset: Any) -> set[str]:
    """The columns of a dataset; of a stream without features, those of its first row."""
    if dataset.column_names is not None:
        return set(dataset.column_names)
    return set(next(iter(dataset), {}))


def _mixed(parts: list[Any], names: list[str], *, streaming: bool) -> Any:
    """Several datasets as one, of the columns that all have; a stream takes a row of each in turn."""
    from datasets import concatenate_datasets, interleave_datasets

    common = set.intersection(*map(_columns, parts))
    if not common:
        told = "; ".join(
            f"{name}: {', '.join(sorted(_columns(part)))}" for name, part in zip(names, parts, strict=True)
        )
        raise ConfigError(f"--dataset_name: the datasets have no column in common ({told}). Mix those of one format.")
    parts = [part.select_columns(sorted(common)) for part in parts]
    try:
        if streaming:
            return interleave_datasets(parts, stopping_strategy="all_exhausted")
        return concatenate_datasets(parts)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"--dataset_name: {' and '.join(names)} cannot be mixed: {first_line(error)}. Their columns must have the "
            "same types."
        ) from error


def _held_out(
    train: Any,
    script: Any,
    training: Any,
    names: list[str],
    loaded: list[Any],
    columns: Sequence[AbstractSet[str]],
) -> tuple[Any, Any]:
    """The training rows, and those to evaluate: the evaluation splits of the datasets, or rows held out."""
    wanted = [script.dataset_test_split, *_TEST_SPLITS]
    found = [next((splits[name] for name in wanted if name in splits), None) for splits in loaded]
    tests = [_converted(part, name, columns) for part, name in zip(found, names, strict=True) if part is not None]
    if tests:
        return train, tests[0] if len(tests) == 1 else _mixed(tests, names, streaming=script.dataset_streaming)
    if script.dataset_streaming:
        count = min(_HELD_OUT_MOST, 20 * training.per_device_eval_batch_size * rank_and_size()[1])
        return train.skip(count), train.take(count)
    count = min(_HELD_OUT_MOST, max(1, round(_HELD_OUT_SHARE * len(train))))
    if len(train) < 2:
        raise ConfigError(
            f"--dataset_name {script.dataset_name} has 1 row, and evaluation needs one of its own. Give more rows, or "
            "--eval_strategy no."
        )
    halves = train.train_test_split(test_size=count, seed=training.seed)
    return halves["train"], halves["test"]


def _check_sizes(script: Any, training: Any, train: Any, evaluation: Any) -> None:
    ranks = rank_and_size()[1]
    if script.dataset_streaming:
        if training.max_steps <= 0:
            raise ConfigError("--dataset_streaming: a stream has no length. Give the number of steps with --max_steps.")
        return
    for rows, what, cure in (
        (train, "training", "Give more rows, or use fewer processes"),
        (evaluation, "evaluation", "Give more rows, or --eval_strategy no"),
    ):
        if rows is not None and len(rows) < (ranks if what == "training" else 1):
            raise ConfigError(
                f"--dataset_name {script.dataset_name}: {len(rows)} row(s) for {what} on {ranks} processes, and each "
                f"needs one. {cure}."
            )


def load_tokenizer(model_args: Any, training: Any) -> Any:
    """The model's tokenizer, with the chat template of `--chat_template_path` where that is given.

    The path is a Jinja file, or the folder or hub name of a tokenizer, whose template is taken. Tokens that the
    template needs must be in the vocabulary.

    Args:
        model_args: `ModelArguments`.
        training: the Trainer's arguments; its `chat_template_path` becomes None, for the template is set.

    Every rank must call. The ranks exchange errors alone.

    Raises:
        CheckpointError: there is no such model, or it has no tokenizer; on every rank alike.
        ConfigError: the template cannot be had.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> tokenizer = load_tokenizer(model_args, training)
        >>> len(tokenizer), tokenizer.eos_token
        (400, '<|eos|>')
    """
    from transformers import AutoTokenizer

    name = model_args.model_name_or_path
    hub = {
        "revision": model_args.model_revision,
        "trust_remote_code": getattr(training, "trust_remote_code", False),
    }
    with agreed("loading the tokenizer"):
        load_config(name, **hub)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **hub)
        except (OSError, ValueError, ImportError) as error:
            raise CheckpointError(
                f"{name} has a config and no tokenizer that can be loaded: {first_line(error)}. Copy the tokenizer's "
                "files of the base model into it."
            ) from error
        if (path := getattr(training, "chat_template_path", None)) is not None:
            tokenizer.chat_template = _template(path, tokenizer)
            training.chat_template_path = None
    return tokenizer


def load_processor(model_args: Any, training: Any) -> Any:
    """A vision-language model's image processor and tokenizer, with the template of `--chat_template_path` if given.

    Args:
        model_args: `ModelArguments`.
        training: the Trainer's arguments; its `chat_template_path` becomes None, for the template is set.

    Every rank must call. The ranks exchange errors alone.

    Raises:
        CheckpointError: there is no such model, or it has no processor of images; on every rank alike.
        ConfigError: the template cannot be had, or a package that the processor needs is absent.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> model_args.model_name_or_path = "vision_checkpoint"
        >>> processor = load_processor(model_args, training)
        >>> processor.image_processor.size["shortest_edge"], processor.tokenizer.eos_token
        (32, '<|eos|>')
    """
    from transformers import AutoProcessor

    name, path = model_args.model_name_or_path, training.chat_template_path
    training.chat_template_path = None
    tokenizer = load_tokenizer(model_args, training)
    with agreed("loading the processor"):
        hub = {
            "revision": model_args.model_revision,
            "trust_remote_code": getattr(training, "trust_remote_code", False),
        }
        try:
            processor = AutoProcessor.from_pretrained(name, **hub)
        except ImportError as error:
            needed = re.search(r"(\w+) requires the (\w+) library", str(error))
            said = first_line(error)
            if needed:
                package = {"PIL": "pillow"}.get(needed[2], needed[2].lower())
                said = f"{needed[1]} requires {needed[2]}: pip install {package}"
            raise ConfigError(f"The processor of {name} needs a package that is absent. {said}.") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{name} has a tokenizer and no processor of images that can be loaded: {first_line(error)}. Copy "
                "processor_config.json and preprocessor_config.json of the base model into it."
            ) from error
        if getattr(processor, "image_processor", None) is None:
            raise CheckpointError(
                f"{name} has no processor of images, so it is a model of text alone, or processor_config.json and "
                "preprocessor_config.json are missing. Give a vision-language model, or use finetune."
            )
        if path is not None:
            processor.chat_template = _template(path, tokenizer)
    return processor


def _template(path: str, tokenizer: Any) -> str:
    from transformers import AutoTokenizer

    if Path(path).is_file():
        return Path(path).read_text(encoding="utf-8")
    if Path(path).suffix in (".jinja", ".j2", ".txt"):
        raise ConfigError(f"--chat_template_path {path}: no such file.")
    try:
        other = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"--chat_template_path {path}: no Jinja file and no tokenizer: {first_line(error)}."
        ) from error
    template = other.chat_template
    if not isinstance(template, str):
        raise ConfigError(f"--chat_template_path {path}: this tokenizer has no chat template.")
    unknown = [token for token in _special_tokens(other) if token in template and token not in tokenizer.get_vocab()]
    if unknown:
        raise ConfigError(
            f"--chat_template_path {path}: its template uses {listed(unknown)}, which the tokenizer of the model does "
            "not have. Use a template made of the model's own tokens, or add the tokens to a copy of the model first."
        )
    return template


def _special_tokens(tokenizer: Any) -> Iterator[str]:
    for token in tokenizer.added_tokens_decoder.values():
        yield str(token)
