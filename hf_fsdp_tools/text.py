"""Texts for messages: sizes, names, dtypes, errors, the first few of many items, and groups."""

import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Key = TypeVar("Key")
Value = TypeVar("Value")


def cut(text: str, most: int) -> str:
    """A text of at most `most` characters: the beginning and the end of a longer one."""
    if len(text) <= most:
        return text
    note = f" … ({len(text):,} characters in all) … "
    kept = most - len(note)
    return text[: kept - kept // 3] + note + text[-(kept // 3) :]


_URL = re.compile(
    r"://(?:[^\s/'\"@:]*:(?:(?!://)[^\s'\"])*@|[^\s/'\"@]*@)?((?:(?!://)[^\s?#;'\"])*)(?:[?#;](?:(?!://)[^\s'\"])*)?"
)
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text as it may leave the program: URLs without user, password and query, and what controls terminals, orders
    characters or ends lines, but for "\\n", as escapes."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], _URL.sub(r"://\1", text))


def comment(text: str) -> str:
    """A comment of one line in a YAML file or a shell script."""
    return f"# {cut(printable(text).replace(chr(10), ' '), 2000)}".rstrip()


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """The end of a sentence about an unknown name: ": did you mean X or Y?"; where nothing is near, `otherwise`, or all
    known names."""
    plain, every = name.lstrip("-"), sorted(known)
    names = difflib.get_close_matches(name, every, n=len(every) or 1, cutoff=0)  # the nearest first
    inside = [each for each in names if len(plain) > 3 and plain in each]
    if near := (inside or difflib.get_close_matches(name, names, n=2, cutoff=0.7))[:2]:
        return f": did you mean {' or '.join(near)}?"
    return f"; known are {', '.join(names)}." if otherwise is None else otherwise


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to 300 characters, without a full stop; its type if it is empty."""
    return first_lines(error, 1)


def first_lines(error: BaseException, most: int = 2) -> str:
    """The first lines of an error's message as one, as `first_line` gives it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return cut(" ".join(lines[:most]) or type(error).__name__, 300).rstrip(".")


_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 120


def quoted(value: Any) -> str:
    """The `repr` of a value from a file in at most 160 characters, however long or nested it is."""
    return cut(_REPR.repr(value), 160)


def show_bytes(num_bytes: int) -> str:
    """1234567 as "1.2 MB"."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} B"


def space_at(path: Path) -> str:
    """How much of the disk is free on which a path lies or would lie, as the end of a clause."""
    disk = shutil.disk_usage(next(each for each in (path, *path.absolute().parents) if each.exists()))
    return f", where {show_bytes(disk.free)} of {show_bytes(disk.total)} are free"


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


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """The values of each key, in the order in which they come."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def merge_alike(names: Iterable[str]) -> list[str]:
    """`merge_names` of the names that differ in their numbers only, in the order of the first."""
    return [merge_names(group) for group in grouped((re.sub(r"\d+", "#", name), name) for name in names).values()]


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
    """Characters in a line of the terminal, or the value of the variable COLUMNS; None where there is no terminal."""
    return shutil.get_terminal_size(fallback=(0, 0)).columns or None


def within(text: object, most: int | None = None) -> str:
    """A text whose lines fit the terminal; the rest of a longer line follows below, indented by 4 more."""
    width = min(most or sys.maxsize, terminal_width() or sys.maxsize)
    lines: list[str] = []
    for line in str(text).splitlines():
        margin = " " * (len(line) - len(line.lstrip()) + 4)
        lines += textwrap.wrap(line, width, subsequent_indent=margin) or [""]
    return "\n".join(lines)


def table(rows: Iterable[Sequence[object]], *, right: Collection[int] = (), indent: str = "") -> list[str]:
    """The lines of a table with aligned columns that fits the terminal; cells of its widest columns go on below."""
    from rich.console import Console
    from rich.table import Table

    texts = [[str(cell) for cell in row] for row in rows]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in range(max(map(len, texts))):
        grid.add_column(justify="right" if column in right else "left", overflow="fold")
    for row in texts:
        grid.add_row(*row)
    width = (terminal_width() or 10_000) - len(indent)
    console = Console(file=StringIO(), width=width, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(grid)
    return [(indent + line).rstrip() for line in captured.get().splitlines()]


def recipe_commands(recipe: str, table: Mapping[str, str]) -> str:
    """A recipe's `COMMANDS`, options by launch config, as they are typed: a comment names the GPUs of each."""
    lines = []
    for config, options in table.items():
        gpus = f"{'one GPU' if config[0] == '1' else 'eight GPUs'} of {config[2:4]} GB"
        lines.append(f"# {gpus}, {'LoRA' if '--use_peft' in options else 'all weights'}")
        words = re.sub(" (?!--)", "\0", f"hf-fsdp {recipe} --config_file {config} {options}")  # an option stays whole
        broken = textwrap.wrap(words, 78, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        lines.append(" \\\n".join(broken).replace("\0", " "))
    return "\n".join(lines)


_FILE = "goes into the launch file: `hf-fsdp init --output FILE` writes one, and --config_file of hf-fsdp and of "
_OF_LAUNCHER = "cp_size tp_size ep_size dp_replicate_size num_processes num_machines machine_rank compute_environment "
ELSEWHERE = dict.fromkeys(f"{_OF_LAUNCHER}distributed_type".split(), f"{_FILE}`accelerate launch` takes it.")
ELSEWHERE["mixed_precision"] = "is for the launcher: give it before the script, or the script --bf16 true."
ELSEWHERE["deepspeed"] = "is not used: FSDP2 shards here. `hf-fsdp convert FILE` translates its JSON."
ELSEWHERE["preset"] = "is for `hf-fsdp RECIPE`, which starts the launcher by it."
OURS = {"batch_size": "per_device_train_batch_size", "epochs": "num_train_epochs", "lr": "learning_rate"}
OURS |= {"max_seq_length": "max_length", "model": "model_name_or_path", "dataset": "dataset_name"}
OURS |= {"seq_len": "max_length", "gpus": "num_processes"}
ELSEWHERE |= {name: f"is no option of this recipe: did you mean --{ours}?" for name, ours in OURS.items()}
"""Names of the launcher's options, of other programs', and where each belongs."""


def no_option(name: str, known: Iterable[str]) -> str:
    """What is wrong with a name that no option of a recipe has, "--" before it or not."""
    near = f"is no option of this recipe{did_you_mean(name, known, otherwise='; --help lists all.')}"
    if name == "--max_length" and "--max_completion_length" in known:
        near = "is no option of this recipe: did you mean --max_completion_length?"
    return f"{name} {ELSEWHERE.get(name.lstrip('-').replace('-', '_'), near)}"


_KINDS = {b"GGUF": "a GGUF file", b"%PDF": "a PDF", b"{\\rtf": "an RTF document", b"PAR1": "a dataset of Parquet"}
_KINDS |= {b"\x89PNG": "a picture", b"\xff\xd8\xff": "a picture", b"\x80": "a file of weights"}
_KINDS[b"PK\3\4"] = "an archive (weights of torch, or an Office document)"
"""What files are by their first bytes."""


def kind_of_bytes(beginning: bytes) -> str | None:
    """What a file is by its first bytes, as a noun; None for text."""
    if beginning[8:9] == b"{" and b"\0" in beginning[:8]:
        return "a file of weights"
    return next((kind for start, kind in _KINDS.items() if beginning.startswith(start)), None)


def kind_of_file(path: Path) -> str | None:
    """What a file is by its beginning, as a noun, where it can hold no settings; None for any other."""
    with path.open("rb") as opened:
        beginning = opened.read(1 << 16)
    if (kind := kind_of_bytes(beginning)) is not None:
        return kind
    first, *rest = beginning.decode("utf-8", "replace").strip().split("\n", 1)
    if first.startswith("[") or (first.startswith("{") and first.rstrip().endswith("}") and rest):
        return "a dataset"
    is_model = first.startswith("{") and re.search(rb'"(model_type|architectures)"\s*:', beginning)
    return "a model's config.json" if is_model else None
