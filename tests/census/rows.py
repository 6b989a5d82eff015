"""Rows of a census: each type in processes of its own, with a time limit, written as they come; and their summary."""

import hashlib
import inspect
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers

from hf_fsdp_tools.testing import run_ranks
from tests.census.defaults import CONFIG_MAPPING, class_names, classes_of

Row = dict[str, Any]
TIMEOUT_S = 300.0
MOST_CLASSES = 3


@dataclass(frozen=True, kw_only=True)
class Census:
    """What is done with each type."""

    about: str
    """What the summary begins with."""
    takes_part: Callable[[str], bool]
    prepare: Callable[[str, Path], Row]
    """Facts and verdict of a type, in one process; where the verdict is `ready`, `compare` goes on with the folder. One
    that raises has built nothing."""
    compare: Callable[[Path], Row] | None = None
    """What each rank finds."""
    judge: Callable[[list[Row]], Row] = lambda ranks: ranks[0]
    """Verdict and why, of what all ranks found."""
    ranks: int = 2
    refusals: tuple[str, ...] = ("ConfigError",)
    """What an error says that refuses a type on purpose."""

    def row_of(self, model_type: str) -> Row:
        """The row of a type; a crash or a hang of its processes is in it as their error."""
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="census-", ignore_cleanup_errors=True) as folder:
            row: Row = {"type": model_type, "verdict": "not built", "why": ""}
            try:
                row |= run_ranks(self.prepare, 1, model_type, Path(folder), timeout_s=TIMEOUT_S)[0]
                if row["verdict"] == "ready" and self.compare is not None:
                    row["verdict"] = "failed"
                    row |= self.judge(run_ranks(self.compare, self.ranks, Path(folder), timeout_s=TIMEOUT_S))
            except AssertionError as error:  # with the traceback of a rank
                row["why"] = str(error).strip().splitlines()[-1].replace(folder, "")[:400]
                if any(each in row["why"] for each in self.refusals) and "NotBuiltError" not in row["why"]:
                    row["verdict"] = "refused"
        return row | {"seconds": round(time.monotonic() - start, 1), "code": code_of(model_type)}

    def write(self, output: Path, only: list[str], jobs: int) -> int:
        """Add the row of each type that has none of today's code (or is asked for) to a file; write the summary beside
        it; return the exit status."""
        done = {name for name, row in written_rows(output).items() if row.get("code") == code_of(name)}
        types = [
            name for name in only or sorted(CONFIG_MAPPING) if name not in done - {*only} and self.takes_part(name)
        ]
        with output.open("a") as file, ThreadPoolExecutor(jobs) as pool:  # each job takes as many processes as ranks
            for count, future in enumerate(as_completed([pool.submit(self.row_of, name) for name in types]), 1):
                row = future.result()
                print(json.dumps(row), file=file, flush=True)  # a run takes hours: what is done is kept
                print(f"{count} of {len(types)}: {row['type']} {row['verdict']} {row['why']}", file=sys.stderr)
        rows = written_rows(output)
        output.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))
        output.with_suffix(".md").write_text(self.summary(rows.values()))
        return int(any(rows[name]["verdict"] == "failed" for name in types))

    def summary(self, rows: Iterable[Row]) -> str:
        """All rows in Markdown: how many there are of each verdict, figures of those that agree, the others by name."""
        rows = sorted(rows, key=lambda row: row["type"].lower())
        agrees = [row for row in rows if row["verdict"] == "agrees"]
        figures = []
        for key in sorted({key for row in agrees for key, value in row.items() if type(value) in (int, float)}):
            values = [row[key] for row in agrees if key in row]
            figures.append((key, str(len(values)), f"{sum(values):.4g}", f"{max(values):.2g}", str(values.count(0))))
        others = [(row["type"], row.get("class", ""), row["verdict"], row["why"]) for row in rows if row not in agrees]
        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        tables = (
            (("", "types"), [(name, str(n)) for name, n in Counter(row["verdict"] for row in rows).items()]),
            (("of types that agree", "types", "sum", "largest", "types with 0"), figures),
            (("does not agree, or takes no part", "class", "", "why"), others),
        )
        shown = ("\n".join(markdown(heads, cells)) for heads, cells in tables)
        return "\n\n".join((f"# Census\n\n{self.about}\nMade with {versions}.", *shown)) + "\n"


@cache
def code_of(model_type: str) -> str:
    """A sum over the code of a type in transformers, and of the types that it takes code of. What all types share is
    left out: it changes with each release."""
    known, wanted = set[Path](), {Path(inspect.getfile(CONFIG_MAPPING[model_type])).parent}
    while wanted:
        known |= wanted
        text = "".join(path.read_text() for folder in wanted for path in sorted(folder.glob("*_*.py")))
        others = re.findall(r"^from \.\.(\w+)", text, re.MULTILINE)
        wanted = {folder.parent / name for folder in wanted for name in others if name != "auto"} - known
    files = sorted(
        path for folder in known for kind in ("modeling", "configuration") for path in folder.glob(f"{kind}_*")
    )
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def written_rows(path: Path) -> dict[str, Row]:
    """The rows of a file by type, the last of each; none where there is no file yet."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table."""
    cells = [[cell[:200].replace("|", "\\|").replace("\n", " ") for cell in row] for row in (heads, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]


def is_causal(model_type: str) -> bool:
    """Whether a type has a model of next tokens, or of images and text."""
    return any(class_names(name, model_type) for name in ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT"))


def model_classes(model_type: str, config: Any) -> list[Any]:
    """The classes that a small model of a type is tried with."""
    classes = classes_of(model_type, config)
    names = dict.fromkeys([*classes.get("main", [])[:MOST_CLASSES], *classes.get("base", [])])
    return [getattr(transformers, name) for name in names]
