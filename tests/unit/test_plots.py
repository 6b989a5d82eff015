"""Pictures say their finding, and are the same each time. `test_measured.py` compares the figures that they show."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from hf_fsdp_tools.plots import draw_losses, save
from hf_fsdp_tools.steps import WrapPlan
from tests.api import WrapUnit

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "docs" / "drawing.py")))
UNIT = WrapUnit(modules=("layers.0",), reshard_after_forward=True, num_params=10, num_bytes=40, reason="block X")
PLAN = WrapPlan(units=(UNIT,), replicated=(), model_class="ModelForX", num_params=10)
VERDICTS = {"right": 90, "silently wrong": 1, "refused": 0, "crashed": 9}
PICTURES = {
    "measured": lambda: drawing.draw_measured(
        {"us": VERDICTS, "them": VERDICTS}, {"us": (5, "time 1"), "it": (9, "2")}
    ),
    "plan": lambda: drawing.draw_units(PLAN),
    "loss": lambda: draw_losses({"one": [(0, 8.0), (9, 2.0)], "two": [(0, 8.1), (9, 2.01)]}, setting="s"),
}


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("measured", "us: 90 of 100 model types train right; loading takes 5.0 MB above the shards"),
        ("plan", "1 units; the largest gathers 40 B of 40 B"),
        ("loss", "Loss of one: 8 at step 0, 2 at 9"),
    ],
)
def test_a_picture_has_its_finding_as_title_and_is_the_same_each_time(name, finding, tmp_path):
    assert finding in PICTURES[name]().get_suptitle()
    for file in ("a.svg", "b.svg"):
        save(PICTURES[name](), tmp_path / file)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
