"""Texts for messages: sizes, names, dtypes, errors, and the first few of many items."""

import re
from collections.abc import Iterable
from itertools import islice
from reprlib import Repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "cut",
    "dtype_name",
    "first_line",
    "first_lines",
    "listed",
    "listed_lines",
    "merge_alike",
    "merge_names",
    "quoted",
    "show_bytes",
    "show_count",
]


def cut(text: str, most: int) -> str:
    """A text of at most `most` characters: the beginning and the end of a longer one."""
    if len(text) <= most:
        return text
    note = f" … ({len(text):,} characters in all) … "
    kept = most - len(note)
    return text[: kept - kept // 3] + note + text[-(kept // 3) :]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to 300 characters, without a full stop; its type if it says nothing."""
    return first_lines(error, 1)


def first_lines(error: BaseException, most: int = 2) -> str:
    """The first lines of an error's message as one, cut to 300 characters, without a full stop; its type if it says
    nothing."""
    lines = filter(None, (line.strip() for line in str(error)[:10_000].splitlines()))
    return cut(" ".join(islice(lines, most)) or type(error).__name__, 300).rstrip(".")


def quoted(value: Any) -> str:
    """The `repr` of a value from a file in at most 160 characters, in bounded time, however long or nested it is.

    Of an object that is neither a plain value nor a list or dict of these, the type alone.
    """
    return cut(_REPR.repr(value), 160)


class _BoundedRepr(Repr):
    """Numbers, texts, lists and dicts as Python writes them, each cut."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write out thousands of digits."""
        return str(x) if x.bit_length() < 400 else f"<an integer of {x.bit_length()} bits>"

    def repr_instance(self, x: Any, level: int) -> str:
        """An object may hold anything, so only plain values are written out."""
        if isinstance(x, type):
            return f"the class {x.__name__}"
        if isinstance(x, tuple):
            return self.repr_list(list(x), level)
        if isinstance(x, bytes):
            return repr(x[: self.maxother])
        return repr(x) if x is None or isinstance(x, (bool, float)) else f"<{type(x).__name__}>"


_REPR = _BoundedRepr()


def show_bytes(num_bytes: int) -> str:
    """1234567 as "1.2 MB"."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} B"


def show_count(count: int) -> str:
    """1234567 parameters as "1.2 M"."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:,.1f} {letter}"
    return str(count)


def dtype_name(dtype: "torch.dtype") -> str:
    """`torch.bfloat16` as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def listed(items: Iterable[object], most: int = 4, *, separator: str = ", ") -> str:
    """The first items and how many more there are: "a, b, c, d and 12 more"; "" for none."""
    shown = [str(item) for item in items]
    return separator.join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def listed_lines(items: Iterable[object], most: int = 10, *, head: str = "- ") -> str:
    """The first items, each on a line of its own behind `head`, and a last line that says how many more there are."""
    shown = [str(item) for item in items]
    rest = [f"… and {len(shown) - most} more"] if len(shown) > most else []
    return "\n".join(f"{head}{item}" for item in shown[:most] + rest)


def merge_alike(names: Iterable[str]) -> list[str]:
    """`merge_names` of the names that differ in their numbers only, in the order of the first."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return [merge_names(group) for group in alike.values()]


def merge_names(names: Iterable[str]) -> str:
    """`layers.0, layers.1, layers.2` as `layers.{0..2}`; "(root)" for the root."""
    split = [re.split(r"(\d+)", name) for name in names]
    text = "".join(parts[0] if len(set(parts)) == 1 else _numbers(parts) for parts in zip(*split, strict=True))
    return text or "(root)"


def _numbers(parts: Iterable[str]) -> str:
    numbers = sorted({int(part) for part in parts})
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    shown = ",".join(map(str, numbers[:4]))
    return f"{{{shown}{',…' if len(numbers) > 4 else ''}}}"
