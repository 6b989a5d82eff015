"""The notebook of the first hour runs from top to bottom, in an empty folder, and prints what its text says."""

import json
import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "first_hour.ipynb"


@pytest.mark.nightly
def test_the_notebook_runs(tmp_path, monkeypatch):
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for name, value in {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(  # what a cell prints may come in pieces
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stdout"
    )
    assert re.search(r"blocks +model.layers +32 × LlamaDecoderLayer", printed), printed
    assert "fits: True" in printed and "tokens/s per GPU" in printed and "step 8 of 8" in printed, printed
    assert "model.safetensors\n" in printed and "no findings" in printed and "the same, to the bit: True" in printed
    losses = json.loads(re.search(r"^(\[[\d., ]+\])$", printed, re.MULTILINE)[1])
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_the_notebook_is_clean_and_its_links_lead_somewhere():
    nbformat.validate(notebook := nbformat.read(NOTEBOOK, as_version=4))
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell for cell in codes if cell.outputs or cell.execution_count is not None]
    for cell in notebook.cells:
        for link in re.findall(r"\]\((\w+\.md)\)", cell.source):
            assert (NOTEBOOK.parent / link).exists(), link
