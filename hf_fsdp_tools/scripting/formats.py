"""Rows of other formats, and columns of other names, as TRL's trainers take them."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, make_dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import did_you_mean, listed, quoted

_PLACE = "<image>"
"""What stands for an image in the texts of LLaVA's, ShareGPT's and LLaMA-Factory's rows."""

_LOOKED_AT = 100
"""Rows among which one with such a place is looked for. (assumed)"""

_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "bot", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
"""Roles of other programs as chat templates name them; "call" is a turn of the assistant whose text is a call."""

_CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")

_BESIDE_CONTENT = {"tool_calls", "reasoning_content", "thinking"}
"""What a turn of the assistant may have instead of a content."""

_MARKS = ("weight", "train", "loss", "training", "trainable")
"""Keys of a turn that say whether it is trained on: OpenAI's, axolotl's, ms-swift's, mlx's. `train` is ours."""


def as_turn(turn: Any, keeps_parts: bool) -> dict[str, Any]:
    """A turn as chat templates read it, also of `from` and `value`, and of other programs' roles and calls of tools.

    Texts in parts are put together unless a template of images reads them (`keeps_parts`). ValueError: why it is none.
    """
    # Arrow gives each turn the keys of all
    given = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, Mapping) else {}
    is_shared, there = "from" in given, f"has {listed(f'`{key}`' for key in given)}" if given else f"is {quoted(turn)}"
    name, content = given.pop("from", None), given.pop("value", None)
    name, content = given.pop("role", name), given.pop("content", content)
    role = _ROLES.get(str(name).lower(), str(name).lower())
    marks = [given.pop(mark) for mark in _MARKS if mark in given]
    rest = {} if is_shared else given
    if marks and role in ("assistant", "call") and not all(marks):
        rest["train"] = False
    if role == "call":
        role, content, rest["tool_calls"] = "assistant", "", _calls(content)
    elif call := rest.pop("function_call", None):
        rest["tool_calls"] = _calls(call)
    if name is None or (content is None and not rest.keys() & _BESIDE_CONTENT):
        raise ValueError(f"turns, each with `role` and `content`, and one {there}")
    for call in rest.get("tool_calls") or ():
        named = call.get("function", call) if isinstance(call, Mapping) else None
        if not (isinstance(named, Mapping) and isinstance(named.get("name"), str)):
            raise ValueError(f"`tool_calls`, each with a `function` that has a `name`, and one is {quoted(call)}")
        _calls(named)
    if role not in _CHAT_ROLES:
        raise ValueError(f"turns with the roles {', '.join(_CHAT_ROLES)}, and one is of {quoted(name)}")
    if isinstance(content, list) and not keeps_parts:
        content = "".join(map(_text_of_part, content))
    if not isinstance(content, str | list | None):
        raise ValueError(f"turns whose `content` is text, and one is {quoted(content)}")
    return {"role": role, **({} if content is None else {"content": content}), **rest}


def _text_of_part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise ValueError(f"turns of text, and a part of one is {quoted(part)}")
    return text


def _calls(value: Any) -> list[dict[str, Any]]:
    """Calls of tools, which other programs write as JSON, one or a list."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
        pairs = [(call["name"], call.get("arguments", {})) for call in (calls if isinstance(calls, list) else [calls])]
        read = [(name, json.loads(value) if isinstance(value, str) else value) for name, value in pairs]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        expected = 'calls of tools as JSON ({"name": …, "arguments": {…}})'
        raise ValueError(f"{expected}, and one is {quoted(value)}") from error
    return [{"type": "function", "function": {"name": name, "arguments": value}} for name, value in read]


def with_turns(row: dict[str, Any], columns: Sequence[str], keeps_parts: bool) -> dict[str, Any]:
    """The row with turns as chat templates read them; LLaMA-Factory has the system's next to those of ShareGPT."""
    lists = [name for name in columns if isinstance(row[name], list)]
    turns = {name: [as_turn(turn, keeps_parts) for turn in row[name]] for name in lists}
    if row.get("system") and (rest := turns.get("conversations")) and rest[0]["role"] != "system":
        turns["conversations"] = [{"role": "system", "content": row["system"]}, *rest]
    return turns


def chats_of(row: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The conversations of a row from their first turns: one, or one for each answer; none in a row of texts."""
    turns, prompt = row.get("messages") or row.get("conversations"), row.get("prompt") or []
    if isinstance(turns, list):
        return [turns]
    question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answers = [row[name] for name in ("completion", "chosen", "rejected") if isinstance(row.get(name), list)]
    if not answers and isinstance(prompt, list):
        return [prompt] if prompt else []
    return [turns if turns and turns[0]["role"] != "assistant" else [*question, *turns] for turns in answers]


def from_alpaca(row: dict[str, Any], ask: str, answer: str, pairs: bool) -> dict[str, Any]:
    """A question and its answer as turns of a chat; alpaca's `system` and `input` belong to the question."""
    question = "\n\n".join(part for part in (row[ask], row.get("input")) if part)
    turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    asked = [*(row.get("history") or ()), (question, None)]  # LLaMA-Factory's rounds before this one
    roles = ("user", "assistant")
    turns += [{"role": role, "content": text} for each in asked for role, text in zip(roles, each, strict=True)][:-1]
    reply = [{"role": "assistant", "content": row[answer]}]
    return {"prompt": turns, "completion": reply} if pairs else {"messages": turns + reply}


def with_prompt_turns(dataset: Any) -> Any:
    """A dataset whose `prompt` is no text where the answers are turns of a chat; TRL puts the two behind each other.

    ultrafeedback has such rows: its answers begin with the turn that the prompt is. Others begin with the assistant.
    """
    row: Mapping[str, Any] = next(iter(dataset), {})
    answers = [name for name in ("completion", "chosen", "rejected") if isinstance(row.get(name), list)]
    if not answers or not isinstance(row.get("prompt"), str):
        return dataset
    return dataset.map(_with_prompt, fn_kwargs={"answers": answers}, remove_columns=["prompt"])


def _with_prompt(row: dict[str, Any], answers: list[str]) -> dict[str, Any]:
    question = [{"role": "user", "content": row["prompt"]}]
    if answers == ["completion"]:
        return {"prompt": question, "completion": row["completion"]}
    turns = {name: row[name] for name in answers}
    return {name: one if one and one[0].get("role") != "assistant" else question + one for name, one in turns.items()}


def place_of_image(path: str, name: str) -> str:
    """The place of an image that a row of the dataset of this name names: a URL, or a file, which is looked for in the
    working folder and next to the dataset's own file."""
    if path.startswith(("http://", "https://", "data:")) or len(path) > 4_000:  # the last is base64
        return path
    folder = Path(name) if Path(name).is_dir() else Path(name).parent
    return next((str(file.absolute()) for file in (Path(path), folder / path) if file.is_file()), path)


def open_image(image: Any, name: str) -> None:
    """Read the beginning of a row's image; ValueError: what it must be."""
    from PIL import Image

    source = (image.get("bytes") or image.get("path")) if isinstance(image, Mapping) else image
    source = place_of_image(source, name) if isinstance(source, str) else source
    if isinstance(source, bytes) or (isinstance(source, str) and ":" not in source[:8] and len(source) <= 4_000):
        try:
            Image.open(BytesIO(source) if isinstance(source, bytes) else source).close()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            there = quoted(source) if isinstance(source, str) else "one"
            is_there = isinstance(source, bytes) or Path(source).is_file()
            why = "cannot be read as an image" if is_there else "is no file here or next to the dataset's"
            raise ValueError(f"images that can be opened, and {there} {why}") from error


def with_places_of_images(dataset: Any, name: str = "") -> Any:
    """A dataset whose turns have their images where `<image>` stood in the text, as parts of a turn.

    TRL leaves that word in the text and puts all images before the first question, as here where there is no word.
    Paths are those of files, wherever a row of the dataset of this name has them from.
    """
    first: Mapping[str, Any] = next(iter(dataset), {})
    if name and any(isinstance(image, str) for column in ("images", "image") for image in _as_list(first.get(column))):
        dataset = dataset.map(_with_paths, fn_kwargs={"name": name})
    rows = islice(iter(dataset), _LOOKED_AT)
    texts = (turn.get("content") for row in rows for turn in row.get("messages") or ())
    if not any(isinstance(text, str) and _PLACE in text for text in texts):
        return dataset
    return dataset.map(_in_parts)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _with_paths(row: dict[str, Any], name: str) -> dict[str, Any]:
    """The images of a row by whole paths."""
    places = {}
    for column in {"image", "images"} & row.keys():
        value = row[column]
        found = [place_of_image(each, name) if isinstance(each, str) else each for each in _as_list(value)]
        places[column] = found if isinstance(value, list) else found[0]
    return places


def _in_parts(row: dict[str, Any]) -> dict[str, Any]:
    count = len(row["images"] or ()) if "images" in row else int(row.get("image") is not None)
    turns = [dict(turn) for turn in row["messages"]]
    first = next((turn for turn in turns if turn["role"] == "user"), None)
    if first is not None and not any(_PLACE in (turn["content"] or "") for turn in turns):
        first["content"] = _PLACE * count + first["content"]
    return {"messages": [turn | {"content": list(_parts(turn["content"] or ""))} for turn in turns]}


def _parts(text: str) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(text.split(_PLACE)):
        if number:
            yield {"type": "image", "text": None}
        if words := part.strip() if _PLACE in text else part:
            yield {"type": "text", "text": words}


# ---- columns of other names: `--prompt_column question` and its like ----


def column_options(names: Sequence[str]) -> type:
    """A dataclass with the option `--NAME_column` for each of these names."""
    text = "The dataset's column for `{}` (docs/data.md); a.b is the field b of the column a."
    options = [
        (f"{name}_column", str | None, field(default=None, metadata={"help": text.format(name)})) for name in names
    ]
    return make_dataclass("ColumnArguments", options)


def with_names_of_recipe(
    dataset: Any, name: str, chosen: Mapping[str, str | None], columns: Collection[str], *, text: str, is_mixed: bool
) -> Any:
    """The dataset, or the stream, of this name with the chosen columns of the user under the names of the recipe.

    `text` is the recipe's name for "text"; a dataset that is mixed with others may have the recipe's names already.

    Raises:
        ConfigError: there is no such column, two options name the same, or another column has the recipe's name.
    """
    row: Mapping[str, Any] = next(iter(dataset), {})
    moved: dict[str, str] = {}  # the user's name by the recipe's
    for word, source in ((word, source) for word, source in chosen.items() if source is not None):
        target, option = text if word == "text" else word, f"--{word}_column {source}"
        if is_mixed and source not in columns and target in columns:
            continue
        if source not in columns and _field(row, source) is _ABSENT:
            head = source.split(".")[0]
            inside = row[head] if isinstance(row.get(head), Mapping) else {}
            there = sorted({*columns, *(f"{head}.{key}" for key in inside)})
            near = did_you_mean(source, there, otherwise=".")
            raise ConfigError(f"{option}: {name} has no such column{near} It has {listed(there, 20)}.")
        if source in moved.values():
            raise ConfigError(f"{option}: another option names this column too. Give each a column of its own.")
        if word == "image" and isinstance(_field(row, source), list):
            target = "images"
        if target in columns and target not in chosen.values():
            other = "give --dataset_text_field instead" if word == "text" else "remove that column"
            raise ConfigError(f"{option}: {name} has another column `{target}`. Rename or {other}.")
        moved[target] = source
    fields = {target: source for target, source in moved.items() if source not in columns}
    if fields:
        dataset = dataset.map(_with_fields, fn_kwargs={"fields": fields})
    names = {source: target for target, source in moved.items() if source in columns and target != source}
    if names.keys() & set(names.values()):  # they exchange their names, which datasets refuses for streams
        dataset = dataset.rename_columns({source: f"{target} of the recipe" for source, target in names.items()})
        names = {f"{target} of the recipe": target for target in names.values()}
    return dataset.rename_columns(names) if names else dataset


_ABSENT = object()


def _field(row: Mapping[str, Any], path: str) -> Any:
    """The value of a column, or of `a.b`, the field b of the column a."""
    value: Any = row
    for key in [path] if path in row else path.split("."):
        value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return value


def _with_fields(row: dict[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    return {target: _field(row, path) for target, path in fields.items()}
