"""Paste what commands print into the documents, so that no printed output is typed by hand.

    python docs/paste.py              # README.md and docs/*.md
    python docs/paste.py --check      # change nothing; exit code 1 if a document is out of date

Where a document says `<!-- prints: hf-fsdp plan NAME … -->`, the block of text after it becomes the command and its
output. Names of the hub stand for configurations in `models.py` of the same last part: no network is needed.
"""

import argparse
import contextlib
import io
import re
import shlex
import sys
import tempfile
from pathlib import Path

from models import CONFIGS

from hf_fsdp_tools.cli.main import main as hf_fsdp

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(<!-- prints: (?P<command>.+?) -->\n)```text\n.*?```\n", re.DOTALL)


def main() -> int:
    """Paste into every document; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say which documents are out of date")
    check, old = parser.parse_args().check, []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        pasted = _BLOCK.sub(lambda found: found[1] + block(found["command"]), text)
        if pasted != text:
            old.append(path)
            print(f"{path.relative_to(ROOT)} {'is out of date' if check else 'written'}")
            if not check:
                path.write_text(pasted)
    return int(check and bool(old))


def block(command: str) -> str:
    """The block of text for one command: as it is typed, and what it prints."""
    program, *words = shlex.split(command)
    if program != "hf-fsdp":
        raise SystemExit(f"{command!r}: only hf-fsdp is run here")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        for index, word in enumerate(words):
            if (config := CONFIGS.get(word.rpartition("/")[2])) is not None:
                words[index] = str(Path(folder, word))
                config.save_pretrained(words[index])
        code = hf_fsdp(words)
    if code:
        raise SystemExit(f"{command!r} ended with {code}")
    lines = printed.getvalue().replace(f"{folder}/", "").splitlines()
    return "\n".join(["```text", f"$ {command}", *(line.rstrip() for line in lines), "```", ""])


if __name__ == "__main__":
    sys.exit(main())
