"""The data of a recipe: files, folders and hub names as a training and an evaluation split."""

import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.distributed.mesh import ranks_per_row
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.scripting.formats import (
    as_turn,
    from_alpaca,
    open_image,
    with_names_of_recipe,
    with_places_of_images,
    with_prompt_turns,
    with_turns,
)
from hf_fsdp_tools.scripting.tokenizer import Chats
from hf_fsdp_tools.text import did_you_mean, first_line, kind_of_bytes, listed, quoted

_JSON_LINES = (".jsonl", ".ndjson")

_BUILDERS = {ending: "json" for ending in (*_JSON_LINES, ".json")}
_BUILDERS |= {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".txt": "text"}
"""The builder of datasets for a file's ending."""

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
"""Endings behind another; datasets reads what is inside."""

_CONVERT = "Convert it: iconv -f {0} -t utf-8 {1} > utf8-{1}"

_HELD_OUT_SHARE, _HELD_OUT_MOST = 0.05, 2_000
"""Rows that are held out for evaluation where the dataset has one split. (assumed)"""

_TEST_SPLITS = ("validation", "eval", "dev")
"""Names of the evaluation split where the one of `--dataset_test_split` is absent."""

_ALPACA = ({"instruction", "output"}, {"question", "answer"})
"""Columns of a question and its answer; alpaca has `input` too, which belongs to the question."""

_IMAGES = {"image", "images"}

_TURNS, _TEXT_OR_TURNS = {"messages", "conversations"}, {"prompt", "chosen", "rejected", "completion"}

_LISTS = {"tokens", "tags", "ner_tags"}
"""Columns of words and their classes, which the recipe that takes them looks at."""

_WORDS = _TURNS | _TEXT_OR_TURNS
"""Columns other than that of the text of which a row needs one with something in it."""

_OF_TRL = _WORDS | {"input_ids", "labels", "completion_mask", "assistant_masks", "seq_lengths"}
"""Columns that TRL's trainers take for theirs in addition to those which a recipe trains on; source: trl 1.16."""

_READ_TOO = {"tools", "chat_template_kwargs"}
"""Columns that TRL reads in rows of chats, next to those above."""


def load_splits(
    script: Any, training: Any, *, columns: Sequence[AbstractSet[str]], tokenizer: Any = None
) -> tuple[Any, Any]:
    """The training and the evaluation split, in the format that the recipe needs; prints how many rows each has.

    docs/data.md has what `--dataset_name` may be, the formats of rows and what becomes of them. Where there is no
    evaluation split, a twentieth of the rows is held out, 2,000 at most; nothing is with `--eval_strategy no`. With
    `--dataset_streaming` rows are read as they are needed, each rank its share without end.

    The recipe needs all `columns` of one of these sets, as TRL names them; those that `script.column_names` names (of
    `parse_arguments`) are renamed; columns that nothing reads are named. With a `tokenizer` conversations are shown to
    its chat template, and with `--assistant_only_loss` turns marked as not to be trained on (`weight: 0`, `train` or
    `loss` false) are masked. Every rank must call. The ranks exchange errors alone.

    Raises:
        ConfigError: a dataset is absent, empty or malformed (with file and line), has other columns, or fewer rows than
            there are ranks, or the chat template does not take or show its turns; on all ranks alike.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> data, held_out = load_splits(script, training, columns=[{"text"}, {"messages"}])
        rows.jsonl: 19 rows to train on, 1 to evaluate
    """
    from datasets import Dataset

    text = getattr(training, "dataset_text_field", "text")
    chosen: Mapping[str, str | None] = getattr(script, "column_names", {})
    options = [f"--{name}_column" for name in chosen] or ["--dataset_columns"] * hasattr(script, "dataset_columns")
    chats = Chats(tokenizer, training, is_stream=script.dataset_streaming)
    # columns of which nothing is to be said: all where rewards take whatever is next to the prompt
    known = None if hasattr(script, "reward_funcs") else {str(column).split(".")[0] for column in chosen.values()}

    def converted(parts: Mapping[str, Any]) -> Any:
        ready = {}
        for name, part in parts.items():
            named = with_names_of_recipe(part, name, chosen, _columns(part), text=text, is_mixed=len(parts) > 1)
            ready[name] = _converted(named, name, columns, text, options, chats, known=known)
        return _mixed(ready, streaming=script.dataset_streaming)

    rank, ranks = rank_and_size()
    with agreed("loading the dataset"):
        if script.dataset_streaming and training.max_steps <= 0:
            raise ConfigError("--dataset_streaming: a stream has no length. Give the number of steps with --max_steps.")
        names = [script.dataset_name]
        if not Path(names[0]).exists():
            names = [name.strip() for name in names[0].split(",") if name.strip()]
        splits = {name: _splits_of(name, script) for name in names}
        tests = [script.dataset_test_split, *_TEST_SPLITS] if training.eval_strategy != "no" else []
        if tests[:1] == [script.dataset_train_split]:
            raise ConfigError("--dataset_test_split is what is trained on. Name another, or none.")
        there = sorted({split for part in splits.values() for split in part})
        if tests and tests[0] not in ("test", *there):
            has = f"no split {tests[0]!r}, only {listed(there)}"
            raise _refused(script.dataset_name, f"{has}. Name one with --dataset_test_split, or leave that out")
        found = {name: next((part[test] for test in tests if test in part), None) for name, part in splits.items()}
        tested = {name: part for name, part in found.items() if part is not None}
        try:
            whole = converted({name: _train_part(splits[name], name, script) for name in names})
            train, evaluation = whole, converted(tested) if tested else None
        except UnicodeDecodeError as error:
            raise _refused(script.dataset_name, next(_bad_lines(names), f"{error}")) from error
        if tests and evaluation is None:
            train, evaluation = _held_out(whole, script, training)
        if script.dataset_streaming:
            if evaluation is not None:
                evaluation = Dataset.from_list(list(evaluation.take(_HELD_OUT_MOST)), features=evaluation.features)
        elif len(train) < ranks:
            few = f"{len(train)} row(s) for training on {ranks} processes, and each needs one"
            raise _refused(script.dataset_name, f"{few}. Give more rows, or use fewer processes")
        elif evaluation is not None and not len(evaluation):
            raise _refused(script.dataset_name, "no row for evaluation. Give more rows, or --eval_strategy no")
    if chats.has_marks:
        train, evaluation = (part and chats.with_labels(part) for part in (train, evaluation))
    if script.dataset_streaming:
        held_out = None if train is whole else evaluation  # not those of a split of their own
        seed = training.seed if getattr(training, "shuffle_dataset", False) else None
        train = share_of_stream(train, held_out=held_out, columns=set().union(*columns), seed=seed)
        if seed is not None:
            training.shuffle_dataset = False  # TRL would keep rows in a buffer, which a resumed run loses
    if rank == 0:
        rows = "streamed" if script.dataset_streaming else f"{len(train):,} rows to train on"
        rest = "" if evaluation is None else f", {len(evaluation):,} to evaluate"
        if chats.unanswered:
            print(f"{script.dataset_name}: in some rows the assistant says nothing, only {listed(chats.unanswered)}")
        print(f"{script.dataset_name}: {rows}{rest}")
    return train, evaluation


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"--dataset_name {name}: {reason}{'.' * (reason[-1] != '?')}")


def _splits_of(name: str, script: Any) -> Any:
    """The splits of one file, folder or hub name."""
    from datasets import load_dataset, load_from_disk
    from datasets.table import CastError

    path, files = Path(name), _files_of(name)
    if script.dataset_config is not None and files and not (path / "README.md").is_file():
        raise _refused(name, f"files have no config {script.dataset_config!r}. Leave --dataset_config out")
    if not path.exists() and (_ending(path) or name.startswith((".", "/", "~"))):
        raise _refused(name, "no such file. Give a file, a folder, or a hub name")
    if path.is_file() and not _ending(path):
        known = f"{listed(_BUILDERS, 9)}; also compressed ({', '.join(_COMPRESSED)})"
        kind = path.suffix or "a file without an ending"
        raise _refused(name, f"{kind} is not known. Give it the ending of what it holds: {known}")
    for file in files:
        with file.open("rb") as stream:
            start = stream.read(4096)
        if not start:
            raise _refused(name, f"{file.name} is empty")
        if _is_text(file) and (nature := kind_of_bytes(start)) is not None:
            raise _refused(name, f"{file.name} is {nature}. Write its text into a .txt or .jsonl file")
        if _is_text(file) and b"\0" in start:  # of blanks and line ends, in any script
            bare = "utf-16be" if start[::2].count(0) > start[1::2].count(0) else "utf-16le"
            encoding = "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else bare
            raise _refused(name, f"{file.name} is UTF-16. {_CONVERT.format(encoding, file.name)}")
        is_alike = file.suffix in {*_BUILDERS, *_COMPRESSED} - {".pq"} and _ending(file) == _ending(files[0])
        if not (is_alike or path.is_file() or (path / "README.md").is_file()):
            left = f"{file.name}: files of one kind are read from a folder, with endings in small letters (no .pq)"
            raise _refused(name, f"{left}, and others left out. Name files with commas between them")
    try:
        if path.is_file():
            splits = _load(path, streaming=script.dataset_streaming)
        elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            stored = load_from_disk(name)
            splits = stored if hasattr(stored, "items") else {"train": stored}
        else:
            splits = load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)
            is_listed = script.dataset_streaming and not (path / "README.md").is_file()
            if other := is_listed and _other_columns(files):  # which a stream says when it comes to that file
                raise _refused(name, other)
    except ConfigError:
        raise
    except Exception as error:  # which a damaged archive of any kind raises
        cause = error.__cause__ or error
        fact = "no rows" if "corresponds to no data" in str(cause) else first_line(cause)
        cure = "Check the name; one of the hub needs the network, and `hf auth login` where it is private or gated"
        reason = f"{fact}. {'Correct it, or store its rows in .jsonl' if path.exists() else cure}"
        if isinstance(cause, CastError) or "Schema at index" in str(cause):
            reason = _other_columns(files) or f"some rows have other columns: {first_line(cause)}. Give all the same"
        raise _refused(name, next(_bad_lines([name]), reason)) from error
    return splits


def _other_columns(files: list[Path]) -> str:
    """Which of the first 100 files of a folder has other columns than the first; "" for none."""
    columns = {file.name: ", ".join(sorted(_columns(_load(file, streaming=True)["train"]))) for file in files[:100]}
    found = [f"{name} {has}" for name, has in columns.items() if has != columns[files[0].name]]
    found = [f"{files[0].name} has the columns {columns[files[0].name]}, and {each}" for each in found]
    return f"{found[0]}. Give all the same, or name them with commas between them" if found else ""


def _load(file: Path, *, streaming: bool) -> Any:
    from datasets import load_dataset

    options: dict[str, Any] = {"sep": "\t"} if _ending(file) == ".tsv" else {}
    if _BUILDERS[_ending(file)] == "csv":
        options |= {"keep_default_na": False, "na_values": [""]}  # "NA" and "None" are words
    return load_dataset(_BUILDERS[_ending(file)], data_files=str(file), streaming=streaming, **options)


def _ending(file: Path) -> str:
    """The ending of a file in small letters, that before the one of compression; "" where it is not known."""
    endings = [ending.lower() for ending in file.suffixes if ending.lower() not in _COMPRESSED]
    return endings[-1] if endings and endings[-1] in _BUILDERS else ""


def _files_of(name: str) -> list[Path]:
    path = Path(name)
    return [path] if path.is_file() else sorted(file for file in path.glob("*") if _ending(file))


def _bad_lines(names: Iterable[str]) -> Iterator[str]:
    """What is wrong with each line of these files of text that is not UTF-8, or in .jsonl not one JSON object."""
    for file in filter(_is_text, (file for name in names for file in _files_of(name))):
        for number, line in enumerate(file.open("rb"), 1):
            place = f"{file.name}, line {number} is"
            try:
                text = line.decode().lstrip("\ufeff").strip()
                if text and file.suffix.lower() in _JSON_LINES and not isinstance(json.loads(text), dict):
                    yield f"{place} no JSON object. Mend or delete that row"
            except UnicodeDecodeError as error:
                yield f"{place} not UTF-8 (byte 0x{line[error.start]:02x}). {_CONVERT.format('latin1', file.name)}"
            except ValueError as error:
                yield f"{place} no JSON: {first_line(error)}. Mend or delete that row"


def _is_text(file: Path) -> bool:
    return file.suffix.lower() not in _COMPRESSED and _BUILDERS[_ending(file)] not in ("parquet", "arrow")


def _train_part(splits: Any, name: str, script: Any) -> Any:
    split = script.dataset_train_split
    if split not in splits:
        raise _refused(name, f"no split {split!r}, only {listed(splits)}. Name one with --dataset_train_split")
    if hasattr(splits[split], "__len__") and not len(splits[split]):
        raise _refused(name, "no rows")
    return splits[split]


def _converted(
    dataset: Any,
    name: str,
    needed: Sequence[AbstractSet[str]],
    text: str,
    options: list[str],
    chats: Chats,
    *,
    known: AbstractSet[str] | None,
) -> Any:
    """The dataset with one set of the needed columns, without empty rows; alpaca and ShareGPT are converted."""
    columns = _columns(dataset)
    if (used := next((one for one in needed if one <= columns), None)) is not None:
        if used & (_WORDS | {text}) and (images := columns & _IMAGES) and not any(one & _IMAGES for one in needed):
            has = f"its rows have `{min(images)}`, and this recipe trains on text alone"
            raise _refused(name, f"{has}. Use vision_language, or remove that column")
        dataset = _checked(dataset, name, used, used & (_WORDS | {text}) or used - _LISTS, text, chats)
        kept = used | ({"prompt", "margin"} if "chosen" in used else set()) | (_READ_TOO if used & _WORDS else set())
        rest = sorted(_columns(dataset) - kept - known) if known is not None else []
        if rest and rank_and_size()[0] == 0:
            print(f"{name}: not used: {listed(rest)}")
        if surplus := sorted({*rest} & _OF_TRL):
            dataset = dataset.remove_columns(surplus)
        dataset = with_prompt_turns(dataset)
        return with_places_of_images(dataset, name) if used & _IMAGES else dataset
    again: dict[str, Any] = {"name": name, "needed": needed, "text": text, "options": options, "chats": chats}
    if "conversations" in columns and any(one <= columns - {"conversations"} | {"messages"} for one in needed):
        used = {"conversations"} | columns & _IMAGES
        turned = partial(with_turns, columns=["conversations"], keeps_parts=bool(columns & _IMAGES))
        dataset = _checked(dataset, name, used, {"conversations"}, text, chats, turned)
        dataset = dataset.rename_column("conversations", "messages")
        return _converted(dataset.remove_columns(sorted(columns & {"system"})), **again, known=known)
    pairs = {"prompt", "completion"} in map(set, needed)
    question = next((pair for pair in _ALPACA if pair <= columns), None)
    if question is not None and (pairs or {"messages"} in map(set, needed)):
        ask, answer = ("instruction", "output") if "output" in question else ("question", "answer")
        keywords: dict[str, Any] = {"ask": ask, "answer": answer, "pairs": pairs}
        worded = {ask, answer, "input", "system"} & columns
        dataset = _checked(dataset, name, question, worded, text, chats, partial(from_alpaca, **keywords))
        dataset = dataset.map(from_alpaca, fn_kwargs=keywords)
        dataset = dataset.remove_columns(sorted(columns & {ask, answer, "input", "system", "history"}))
        return _converted(dataset, **again, known=known)
    has = f"it has the columns {', '.join(sorted(columns))}; none can be trained on"
    raise _refused(name, f"{has}. {_cure(dataset, needed, options)}")


def _cure(dataset: Any, needed: Sequence[AbstractSet[str]], options: list[str]) -> str:
    """A cure for a dataset of other columns: where rows stand one level down, or the file has no such columns at all;
    else the nearest name, and the formats that the recipe takes."""
    columns, row = _columns(dataset), dict(next(iter(dataset), {}))
    if options == ["--dataset_columns"]:
        absent = min(needed[0] - columns)
        if near := did_you_mean(absent, columns, otherwise=""):
            return f"--dataset_columns {absent}{near}"
    inside = [(name, value[0] if isinstance(value, list) and value else value) for name, value in row.items()]
    for name, value in inside:
        if isinstance(value, Mapping) and any(one <= value.keys() for one in needed):
            found = next(one for one in needed if one <= value.keys())
            if isinstance(row[name], list):
                return f"The rows stand in `{name}`: write that list alone, or a row in each line of a .jsonl file"
            return f"Name them: {' '.join(f'--{each}_column {name}.{each}' for each in sorted(found))}"
        for key, part in value.items() if isinstance(value, Mapping) and {"messages"} in needed else ():
            if isinstance(part, list) and part and isinstance(part[0], Mapping) and {"role", "from"} & part[0].keys():
                return f"Name its turns: --messages_column {name}.{key}"
    if len(columns) == 1 and (mark := next((mark for mark in ";\t|" if mark in min(columns)), None)):
        return f"Columns are separated by {mark!r}, and a .csv has commas: write it so (.tsv has tabs)"
    if any(name.rstrip()[-1:] in (".", "?", "!") or name.count(" ") > 4 for name in columns):
        return "The first line is no heading: put the names of the columns above it"
    formats = [*needed]
    formats += [{"conversations"}] if {"messages"} in formats else []
    formats += _ALPACA if {"messages"} in formats or {"prompt", "completion"} in formats else []
    names = sorted(set().union(*formats))
    ends = {one: did_you_mean(one, names, otherwise="") for one in sorted(columns - {*names})}
    near = next((f"`{one}`{end} " for one, end in ends.items() if end), "")
    lists = listed([" and ".join(f"`{one}`" for one in sorted(names)) for names in formats], 9, separator="; or ")
    ours = f", or name yours: {listed(options)}" if options else ""
    return f"{near}Needed: {lists}. Rename one{ours}"


def _checked(
    dataset: Any,
    name: str,
    used: AbstractSet[str],
    worded: AbstractSet[str],
    text: str,
    chats: Chats,
    as_chat: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Any:
    """The dataset without rows that have nothing in them, and with turns as chat templates read them.

    Every row is looked at, in a stream when it is read: the columns of `worded` must hold text, or turns of a chat
    that the template shows, once `as_chat` has made turns of the row.
    """
    import datasets

    needed = sorted(used & (_WORDS | {text, *_ALPACA[0], *_ALPACA[1]}) or used)
    there = _columns(dataset) & (_WORDS | _READ_TOO | {text, "system"} | used & _IMAGES)
    columns = sorted(there | worded | {*needed} | used & {"label"})
    shown = sorted({*columns} & (used | worded | _READ_TOO | {"system"} | ({"prompt"} if "chosen" in used else set())))
    is_stream, keeps_parts = not hasattr(dataset, "__len__"), bool(used & _IMAGES)
    turned = dict.fromkeys(columns if is_stream else (), False)  # columns of other turns, and whether tools are called
    kinds: dict[str, type] = {}
    empty = {*needed} - {"prompt"}  # columns without a word so far
    images = sorted(used & _IMAGES)
    dataset, of_images = _undecoded(dataset, images)

    def has_words(*cells: Any) -> bool:
        *values, index = cells
        row = dict(zip(columns, values, strict=True))
        column, read = "", dict(row)
        try:
            for column in sorted(worded):
                turns = _turns(row[column], column, keeps_parts)
                if turns is not None and turns != [_without_none(turn, deep=False) for turn in row[column]]:
                    turned[column] = turned.get(column, False) or any("tool_calls" in turn for turn in turns)
                read[column] = row[column] if turns is None else turns
                if row[column] is not None and kinds.setdefault(column, type(row[column])) is not type(row[column]):
                    raise ValueError("text in all rows, or turns of a chat in all")
            full = [column for column in (*_WORDS, text, *needed) if str(row.get(column) or "").strip()]
            if full:
                chats.check(as_chat({column: read[column] for column in shown}), has_images=keeps_parts)
            for column in images:
                for image in row[column] if isinstance(row[column], list) else [row[column]]:
                    open_image(image, name)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            cure = "Mend that row, or rename the column and name another one"
            place = f"{_place(name, row, index)}: the column `{column}`"
            raise _refused(name, f"{place} must hold {error}. {cure}") from error
        if full and (reason := _gap(row, needed)):
            raise _refused(name, f"{_place(name, row, index)} has {reason}")
        empty.difference_update(full)
        return bool(full)

    memory = {} if is_stream else {"keep_in_memory": True}
    kept = dataset.filter(has_words, with_indices=True, input_columns=columns, **memory)
    for column, feature in of_images.items():
        dataset, kept = (part.cast_column(column, feature) for part in (dataset, kept))
    if not is_stream:
        left_out = len(dataset) - len(kept)
        if not len(kept):
            raise _refused(name, f"all {len(dataset):,} rows are empty")
        if empty:
            raise _refused(name, f"`{min(empty)}` is empty in all rows. Name another column, or fill it")
        if left_out and rank_and_size()[0] == 0:
            print(f"{name}: {left_out:,} of {len(dataset):,} rows are empty and are left out")
        kept = kept if left_out else dataset
    if not (changed := sorted(turned.keys() & worded & _WORDS)):
        return kept
    features = None
    if any(turned.values()) and hasattr(datasets, "Json"):  # else each call gets the arguments of all, as None
        features = datasets.Features({**kept.features, **{column: [datasets.Json()] for column in changed}})
    return kept.map(with_turns, fn_kwargs={"columns": changed, "keeps_parts": keeps_parts}, features=features)


def _undecoded(dataset: Any, images: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The dataset with the bytes of its images, of which the beginning is looked at, and their columns as they were."""
    import datasets

    of_images = {column: dataset.features[column] for column in images if dataset.features}
    for column, feature in of_images.items():
        if isinstance(getattr(feature, "feature", feature), datasets.Image):
            one = datasets.Image(decode=False)
            dataset = dataset.cast_column(column, one if feature == datasets.Image() else datasets.List(one))
    return dataset, of_images


def _gap(row: Mapping[str, Any], needed: Sequence[str]) -> str:
    """What a row has otherwise than rows of its kind: a column that is empty, or other classes than words; or ""."""
    if (absent := next((column for column in needed if row[column] is None), None)) is not None:
        there = listed(f"`{column}`" for column, value in row.items() if value)
        return f"{there} and no `{absent}`, which other rows have. Keep rows of one kind in a file"
    if row.get("label", 0) is None:
        return "no `label`. Give it a class, or delete that row"
    lists = [row[column] for column in needed if column in _LISTS]
    if any(part is None or isinstance(part, list) for one in lists if isinstance(one, list) for part in one):
        return "a word without a class, or lists for words. Correct it"
    if lists and not (all(isinstance(one, list) for one in lists) and len({*map(len, lists)}) == 1):
        return "not one class for each word: both are lists of equal length. Correct it"
    return ""


def _turns(value: Any, column: str, keeps_parts: bool) -> list[dict[str, Any]] | None:
    """The turns of a cell as chat templates read them, None for text; ValueError: what it must hold."""
    if value is None or (isinstance(value, str) and column not in _TURNS):
        return None
    if not isinstance(value, list) or column not in _WORDS:
        expected = "turns, each with `role` and `content`" if column in _TURNS else "text"
        raise ValueError(f"{expected}, and is {quoted(value)}")
    return [as_turn(turn, keeps_parts) for turn in value]


def _place(name: str, row: Mapping[str, Any], index: int) -> str:
    """The file and line of a row as it was read; its number where no file is at hand that holds it."""
    values, first, before = [_without_none(value) for value in row.values() if value is not None], "", 0
    for file in _files_of(name):
        is_lines = file.suffix.lower() in _JSON_LINES
        lines = [number for number, line in enumerate(file.open("rb"), 1) if line.strip()] if is_lines else []
        number = -1
        for number, raw in enumerate(_load(file, streaming=True)["train"]):
            fields = [_without_none(value) for value in raw.values()]
            fields += [part for value in fields if isinstance(value, dict) for part in value.values()]
            if (not first or before + number == index) and all(value in fields for value in values):
                first = f"{file.name}, line {lines[number]}" if lines else f"{file.name}, row {number + 1}"
                if before + number == index:
                    return first
        before += number + 1
    return first or f"row {index + 1}"


def _columns(dataset: Any) -> set[str]:
    """The columns of a dataset; of a stream without features, those of its first row."""
    if dataset.column_names is not None:
        return set(dataset.column_names)
    return set(next(iter(dataset), {}))


def _mixed(parts: Mapping[str, Any], *, streaming: bool) -> Any:
    """Several datasets as one, of the columns that all have; a stream takes a row of each in turn."""
    from datasets import concatenate_datasets, interleave_datasets

    if len(parts) == 1:
        return next(iter(parts.values()))
    common = sorted(set.intersection(*map(_columns, parts.values())))
    if not common:
        lists = "; ".join(f"{name}: {', '.join(sorted(_columns(part)))}" for name, part in parts.items())
        raise ConfigError(f"--dataset_name: the datasets have no column in common ({lists}). Mix those of one format.")
    chosen = [part.select_columns(common) for part in parts.values()]
    try:
        if streaming:
            return interleave_datasets(chosen, stopping_strategy="all_exhausted")
        return concatenate_datasets(chosen)
    except (ValueError, TypeError) as error:
        columns = listed(f"`{name}`" for name in common)
        raise ConfigError(
            f"--dataset_name: {' and '.join(parts)} cannot be mixed: some of {columns} have other types in one than in "
            "another (text, or turns of a chat, which alpaca's rows become). Make all the same."
        ) from error


def _held_out(train: Any, script: Any, training: Any) -> tuple[Any, Any]:
    """The training rows without some, and these to evaluate."""
    if script.dataset_streaming:
        count = min(_HELD_OUT_MOST, 20 * training.per_device_eval_batch_size * rank_and_size()[1])
        return train.skip(count), train.take(count)
    if len(train) < 2:
        raise _refused(script.dataset_name, "1 row, and evaluation needs its own. Give more, or --eval_strategy no")
    count = min(_HELD_OUT_MOST, max(1, round(_HELD_OUT_SHARE * len(train))))
    halves = train.train_test_split(test_size=count, seed=training.seed)
    return halves["train"], halves["test"]


# ---- streams ----

_WINDOW = 1_000
"""Rows among which a stream is shuffled: as many as datasets keeps in a buffer, which a resumed run would lose."""


def share_of_stream(
    stream: Any, *, held_out: Any = None, columns: Collection[str] = ("text",), seed: int | None = None
) -> Any:
    """This rank's rows of a stream, again and again: no rank ends before others, or shares a row outside `cp_size`.

    Where the stream's files divide evenly among the ranks, a rank reads files of its own; otherwise it reads all of
    them and keeps every n-th row. (`split_dataset_by_node` of datasets divides what the trainer makes of the rows: each
    rank would tokenize all of them.) Rows whose values in `columns` are those of a held-out row are left out.
    With a seed, each thousand rows come in an order of their own, the same each time.

    Every rank must call. The ranks exchange errors alone.
    """
    # ranks with the same rows have neighbouring numbers
    rank, ranks = (number // ranks_per_row() for number in rank_and_size())
    kept_back = frozenset(_content(row, columns) for row in held_out or ())
    if stream.num_shards % ranks == 0:
        own = stream.shard(num_shards=ranks, index=rank)
    else:
        own = stream.filter(_is_of_rank, with_indices=True, fn_kwargs={"rank": rank, "ranks": ranks})
    if kept_back:
        own = own.filter(_is_new, fn_kwargs={"kept_back": kept_back, "columns": columns})
    with agreed("dividing the stream among the ranks"):
        if next(iter(own), None) is None:
            kept = f": {len(kept_back):,} different rows are held out to evaluate" if kept_back else ""
            raise ConfigError(
                f"--dataset_streaming: rank {rank} of {ranks} has no row to train on{kept}. Give more rows, or use "
                "fewer processes" + (", or --eval_strategy no." if kept else ".")
            )
    if seed is not None:
        options = {"batched": True, "batch_size": _WINDOW, "with_indices": True, "features": own.features}
        own = own.map(_shuffled, fn_kwargs={"seed": seed}, **options)
    return own.repeat(None)


def _shuffled(rows: Mapping[str, Any], indices: Any, seed: int) -> dict[str, Any]:
    order = random.Random(f"{seed} {indices[0]}").sample(range(len(indices)), len(indices))
    return {name: [values[i] for i in order] for name, values in rows.items()}


def _is_of_rank(row: Any, index: int, rank: int, ranks: int) -> bool:
    return index % ranks == rank


def _is_new(row: Any, kept_back: frozenset[str], columns: Collection[str]) -> bool:
    return _content(row, columns) not in kept_back


def _content(row: Mapping[str, Any], columns: Collection[str]) -> str:
    """The values of a row in these columns as one text, equal for equal values."""
    return json.dumps([_without_none(row.get(name)) for name in sorted(columns)], sort_keys=True, default=repr)


def _without_none(value: Any, deep: bool = True) -> Any:
    """The value without keys that Arrow added, for they stand in other rows."""
    if isinstance(value, Mapping):
        return {name: _without_none(part) if deep else part for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
