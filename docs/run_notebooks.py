"""Run the notebooks on this machine's CPU and keep what they print: python docs/run_notebooks.py [NAME ...]

Each runs offline, from top to bottom, in an empty folder. Each cell keeps the digest of the text that ran, by which a
test sees whether its outputs are its own. Lines in which libraries say what this machine lacks are left out, and paths.
"""

import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).parents[1]
_NOISE = re.compile(
    r"W\d{4} |# \d{4}-|Failed to load |hf-fsdp: loading|.*(site-packages|Warning: |warnings\.warn|\d%\|)"
)


def main() -> int:
    """Run the notebooks of these names, or all; return the exit code."""
    for path in sorted((ROOT / "docs").glob("*.ipynb")):
        if path.stem in (sys.argv[1:] or [path.stem]):
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(executed(path, Path(folder)), path)
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


def executed(path: Path, folder: Path) -> Any:
    """A notebook as it was run in a folder, offline, by this Python and with this clone's package."""
    given = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "COLUMNS": "100"}
    given["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    before = dict(os.environ)
    os.environ.update(given)
    try:
        notebook = nbformat.read(path, as_version=4)
        options = {"resources": {"metadata": {"path": str(folder)}}, "record_timing": False}
        nbclient.NotebookClient(notebook, timeout=900, **options).execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in (each for each in notebook.cells if each.cell_type == "code"):
        outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
        shown = readable("".join(each["data"]["text/plain"] if "data" in each else each["text"] for each in outputs))
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=shown)] if shown else []
        cell.metadata["ran"] = digest(cell.source)
    return notebook


def readable(text: str) -> str:
    """What a terminal showed, without bars, noise and the paths of this machine."""
    for place in (str(ROOT), tempfile.gettempdir()):
        text = re.sub(rf"{re.escape(place)}/" + (r"[\w-]+/" if place != str(ROOT) else ""), "", text)
    shown = []
    for line in text.replace("\r\n", "\n").splitlines():
        last = re.sub(r"^ {40,}", "", re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", line.rpartition("\r")[2])).rstrip()
        if not _NOISE.match(last) and (last or not line):  # a line of bars alone leaves none
            shown.append(last)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(shown))


def digest(source: str) -> str:
    """What tells one text of a cell from another."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
