"""Columns of the user's own names under the names that recipes take: `--prompt_column question` and its like."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, make_dataclass
from typing import Any

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import did_you_mean, listed


def column_options(names: Sequence[str]) -> type:
    """A dataclass with the option `--NAME_column` for each of these names."""
    text = "The dataset's column for `{}` (docs/data.md); a.b is the field b of the column a."
    options = [
        (f"{name}_column", str | None, field(default=None, metadata={"help": text.format(name)})) for name in names
    ]
    return make_dataclass("ColumnArguments", options)


def chosen_columns(options: Any) -> dict[str, str | None]:
    """The user's column for each name, None where no option gives one."""
    return {option.removesuffix("_column"): column for option, column in vars(options).items()}


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
