"""Texts for messages: sizes, names, dtypes, errors, and the first few of many items."""

import difflib
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Sequence
from itertools import islice, zip_longest
from reprlib import Repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


_NARROWEST = 12
"""Characters to which a column of a table is narrowed at most."""


def cut(text: str, most: int) -> str:
    """A text of at most `most` characters: the beginning and the end of a longer one."""
    if len(text) <= most:
        return text
    note = f" … ({len(text):,} characters in all) … "
    kept = most - len(note)
    return text[: kept - kept // 3] + note + text[-(kept // 3) :]


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """The end of a sentence about an unknown name: ": did you mean X or Y?"; where nothing is near, `otherwise`, or all
    known names."""
    names = sorted(known)
    if near := difflib.get_close_matches(name, names, n=2, cutoff=0.7):
        return f": did you mean {' or '.join(near)}?"
    return f"; known are {', '.join(names)}." if otherwise is None else otherwise


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to 300 characters, without a full stop; its type if it says nothing."""
    return first_lines(error, 1)


def first_lines(error: BaseException, most: int = 2) -> str:
    """The first lines of an error's message as one, cut to 300 characters, without a full stop; its type if it says
    nothing."""
    lines = filter(None, (line.strip() for line in str(error)[:10_000].splitlines()))
    return cut(" ".join(islice(lines, most)) or type(error).__name__, 300).rstrip(".")


def why(error: BaseException) -> str:
    """What an error of the system says, without the file that it repeats; else the first line of the error."""
    return (isinstance(error, OSError) and error.strerror) or first_line(error)


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


def terminal_width() -> int | None:
    """Characters in a line of the terminal, or what the variable COLUMNS says; None where the output is no terminal."""
    return shutil.get_terminal_size(fallback=(0, 0)).columns or None


def within(text: object, most: int | None = None) -> str:
    """A text whose lines fit the terminal; what is left of a longer line follows below, indented by 4 more."""
    widths = [width for width in (most, terminal_width()) if width]
    return "\n".join(part for line in str(text).splitlines() for part in _folded(line, min(widths, default=None)))


def table(rows: Iterable[Sequence[object]], *, right: Collection[int] = (), indent: str = "") -> list[str]:
    """The lines of a table with aligned columns that fits the terminal; cells of its widest columns go on below."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*texts, fillvalue="")]
    most, gaps = terminal_width(), len(indent) + 2 * (len(widths) - 1)
    free = [column for column in range(len(widths)) if column not in right]
    while most and sum(widths) + gaps > most and any(widths[column] > _NARROWEST for column in free):
        widths[max(free, key=widths.__getitem__)] -= 1
    lines = []
    for row in texts:
        cells = [_cell_lines(cell, width) for cell, width in zip(row, widths, strict=False)]
        for parts in zip_longest(*cells, fillvalue=""):
            aligned = (
                part.rjust(width) if column in right else part.ljust(width)
                for column, (part, width) in enumerate(zip(parts, widths, strict=False))
            )
            lines.append((indent + "  ".join(aligned)).rstrip())
    return lines


def _folded(line: str, most: int | None) -> list[str]:
    if most is None or len(line) <= most:
        return [line]
    margin = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, max(most, len(margin) + _NARROWEST), subsequent_indent=margin) or [""]


_WORDS = re.compile(r"\s+|(?:\{[^}]*\}|[^\s.,/])+[.,/]*|[.,/]+")
"""Parts of a cell between which a line may end: words, and the parts of names; `{0..31}` stays whole."""


def _cell_lines(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for word in _WORDS.findall(cell):
        if len(lines[-1] + word.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += word if lines[-1] else word.lstrip()
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]
