"""The documents, and what is done with each fenced block in them before a reader sees it.

A block is of one class. By its language, code is `run` by a test, commands are `parsed` by the programs that they
start, and directives are `built` by Sphinx; what `docs/paste.py` writes below its comments is `printed`. A word after
the language says otherwise: `python parsed` needs what no test has, `text drawn` is a picture.
"""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "AGENTS.md")
DOCUMENTS = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCUMENTS}

RUNNERS = {
    ("docs/extending.md", "python"): "tests/unit/test_extending.py",
    ("docs/weight_streaming.md", "python"): "tests/ranks/test_consumers.py",
    ("docs/data.md", "json"): "tests/unit/test_scripting.py",
    ("README.md", "diff"): "tests/recipes/test_trl_script.py",
}
"""The tests that run blocks of a page; `PAGES` runs Python of all others."""
PAGES = "tests/ranks/test_pages.py"

_LANGUAGES = {"bash": "parsed", "{toctree}": "built", "{eval-rst}": "built"}
_FENCE = re.compile(
    r"(?P<pasted>^<!-- (?:prints|recorded|commands|file): .*-->\n)?"
    r"^```(?P<language>\S*)(?: (?P<word>\w+))?\n(?P<text>(?:.*\n)*?)```$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    page: str
    number: int  # on its page, from 1
    language: str
    word: str | None  # its class, where the language does not say it
    text: str

    @property
    def runner(self) -> str | None:
        """The test that runs it."""
        return RUNNERS.get((self.page, self.language), PAGES if self.language == "python" else None)

    @property
    def kind(self) -> str | None:
        """Its class; None where nothing is done with it."""
        return self.word or _LANGUAGES.get(self.language) or ("run" if self.runner else None)


def blocks(page: str | None = None, language: str | None = None) -> list[Block]:
    """The blocks of all documents, or of one page and language."""
    found = (
        Block(name, number, each["language"], "printed" if each["pasted"] else each["word"], each["text"])
        for name, text in TEXTS.items()
        for number, each in enumerate(_FENCE.finditer(text), 1)
    )
    return [each for each in found if page in (None, each.page) and language in (None, each.language)]


class Advice(UserWarning):
    """What a reviewer should look at; no test fails by it."""


def advise(problem: object) -> None:
    """Warn of a rule of the house that protects no user: a budget of lines, a word of the field."""
    if problem:
        warnings.warn(f"{problem}", Advice, stacklevel=2)
