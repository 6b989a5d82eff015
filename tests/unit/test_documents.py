"""What the documents say exists: messages, names, commands, files; and printed output is what was printed."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import hf_fsdp_tools

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_fsdp_tools"
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCUMENTS}


def text_of(node: ast.AST) -> str | None:
    """A text of the source, with `…` for each value in it; None for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        case ast.BinOp(op=ast.Add()):
            sides = text_of(node.left), text_of(node.right)
            return "".join(each or "…" for each in sides) if any(sides) else None
    return None


def squeezed(text: str) -> str:
    return " ".join(text.replace("`", "").replace("\\n", " ").split())


def said(text: str) -> re.Pattern[str]:
    """What matches a text of the source that says a message in which `…` stands for anything."""
    return re.compile(".*".join(re.escape(part.strip()) for part in squeezed(text).split("…")))


def test_every_message_of_troubleshooting_is_one_of_the_package():
    sources = {
        squeezed(text)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (text := text_of(node)) and len(text) > 10
    }
    own, _, _ = TEXTS["docs/troubleshooting.md"].partition("## Messages of other libraries")
    messages = re.findall(r"^\| `([^|]+?)` \|", own, re.MULTILINE)
    assert len(messages) > 50
    absent = [message for message in messages if not any(said(message).search(text) for text in sources)]
    assert not absent, f"no source says {absent}"
