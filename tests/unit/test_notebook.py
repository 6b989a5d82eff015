"""The notebooks: what is stored in each is what its cells printed, and each runs through in an empty folder."""

import json
import re
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "docs").glob("*.ipynb"))}


@pytest.fixture
def running(monkeypatch):
    """The program that runs and stores them."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.delitem(sys.modules, "run_notebooks", raising=False)
    import run_notebooks

    return run_notebooks


def printed(notebook) -> str:
    return "\n".join(output["text"] for cell in notebook.cells for output in cell.get("outputs", []))


def check_first_hour(text: str) -> None:
    assert re.search(r"blocks +model.layers +32 × LlamaDecoderLayer", text), text
    assert "fits: True" in text and "tokens/s per GPU" in text and "step 8 of 8" in text, text
    assert "model.safetensors\n" in text and "no findings" in text and "the same, to the bit: True" in text
    losses = json.loads(re.search(r"^(\[[\d., ]+\])$", text, re.MULTILINE)[1])
    assert len(losses) == 5 and losses[-1] < losses[0]


def check_t4(count: int, text: str) -> None:
    assert f"on {count} × t4-16gb" in text and "mixed_precision fp16" in text and "\nfits: " in text, text
    before, after = map(float, re.search(r"evaluation loss +([\d.]+) before, ([\d.]+) after", text).groups())
    assert after < before, text
    first, second = re.findall(r"^['\"]The list type has a method that.*$", text, re.MULTILINE)
    assert first != second, "sampled before and after"
    assert "adapter_model.safetensors" in text and "wrote   merged" in text and "nothing was sent" in text, text


CHECKS = {
    "first_hour": check_first_hour,
    "one_t4": lambda text: check_t4(1, text),
    "two_t4": lambda text: check_t4(2, text),
}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_what_its_cells_printed(name, running):
    nbformat.validate(notebook := nbformat.read(NOTEBOOKS[name], as_version=4))
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    others = [cell.source for cell in codes if cell.metadata.get("ran") != running.digest(cell.source)]
    assert not others, f"python docs/run_notebooks.py {name}"
    assert [cell.execution_count for cell in codes] == [*range(1, len(codes) + 1)]
    CHECKS[name](text := printed(notebook))
    assert not re.search(r"(?<![\w.])/(tmp|root|home|work|usr)/|Traceback|\x1b", text)
    for cell in notebook.cells:
        for link in re.findall(r"\]\((\w+\.md)\)", cell.source):
            assert (ROOT / "docs" / link).exists(), link
        for test in re.findall(r"`(tests/\S+\.py)`", cell.source):
            assert (ROOT / test).exists(), test


@pytest.mark.nightly
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, running, tmp_path):
    CHECKS[name](printed(running.executed(NOTEBOOKS[name], tmp_path)))
