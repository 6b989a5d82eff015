"""Pictures show the memory of a step where it is, and are the same each time."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.events import Alloc, Free, Work
from hf_fsdp_tools.planning.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.plots import draw_losses, save

drawing = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "docs" / "drawing.py")))
GB = 10**9


def a_step(units=3, held=10 * GB, compute_s=2.0):
    """Events of a step whose blocks are gathered one ahead, and memory that is there before; a work's bytes are its
    seconds here."""
    events, gathered, kept = [], {}, {}

    def work(operation, unit, phase, seconds, stream="compute"):
        events.append(Work(operation, 0.0, seconds, unit, phase, stream))

    def gather(unit, phase):
        gathered[unit] = len(events) + 1000
        events.append(Alloc(gathered[unit], GB, "gathered parameters", unit, "all_gather"))
        work("all_gather", unit, phase, 1.0, "all_gather")

    def one_pass(order, phase):
        gather(order[0], phase)
        for unit, following in zip(order, [*order[1:], None], strict=True):
            if following is not None:
                gather(following, phase)
            if phase == "forward":
                kept[unit] = len(events) + 1000
                events.append(Alloc(kept[unit], 2 * GB, "activations", unit))
            work("matmul", unit, phase, compute_s)
            events.append(Free(gathered.pop(unit)))
            if phase == "backward":
                events.append(Free(kept[unit]))

    names = [f"model.layers.{i}" for i in range(units)]
    one_pass(names, "forward")
    events.append(Alloc(1, 26 * GB, "logits and loss", ""))
    work("memory", "", "loss", 0.5)
    events.append(Free(1))
    one_pass(names[::-1], "backward")
    work("memory", "", "optimizer", 0.5)
    return events, [Alloc(-1, held, "parameters", "")], lambda work: work.num_bytes


TWELVE = a_step(units=12)
STEP = drawing.memory_timeline(*TWELVE)
HELD = a_step(units=12, held=30 * GB)
OTHER = drawing.memory_timeline(*HELD)
UNIT = WrapUnit(modules=("layers.0",), reshard_after_forward=True, num_params=10, num_bytes=40, reason="block X")
PLAN = WrapPlan(units=(UNIT,), replicated=(), model_class="ModelForX", num_params=10)
PICTURES = {
    "wrapping": lambda: drawing.draw_comparison({"root-only": OTHER, "hybrid": STEP}, model="m", limit_bytes=80 * GB),
    "plan": lambda: drawing.draw_units(PLAN),
    "loss": lambda: draw_losses({"one": [(0, 8.0), (9, 2.0)], "two": [(0, 8.1), (9, 2.01)]}, setting="s"),
}


def test_memory_of_a_step_over_time_in_few_points():
    line = drawing.memory_timeline(*a_step())
    assert line.peak_bytes == 42 * GB and line.phases[line.peak] == "loss"
    assert line.allocated[-1] == 10 * GB and list(line.seconds) == sorted(line.seconds)
    assert set(line.phases) == {"forward", "loss", "backward", "optimizer"}
    assert line.seconds[line.peak] == 3 * 2.0, "logits are made when the forward pass has computed"
    # what was there before may be freed
    freed = drawing.memory_timeline([Alloc(1, 5, "temporaries", ""), Free(7)], [Alloc(7, 100, "gradients", "")], len)
    assert freed.allocated == (105, 5)
    step = a_step(units=400)
    line, full = (drawing.memory_timeline(*step, most_points=most) for most in (100, 10**6))
    assert len(line.seconds) < 150 < len(full.seconds) == len(step[0]) and line.peak_bytes == full.peak_bytes
    both = [[*zip(one.allocated, one.phases, strict=True)] for one in (line, full)]
    for phase in ("forward", "backward", "optimizer"):
        few, every = ([held for held, at in each if at == phase] for each in both)
        assert (max(few), min(few)) == (max(every), min(every)), phase
    assert list(dict.fromkeys(line.phases)) == ["forward", "loss", "backward", "optimizer"]
    assert drawing.extremes([1, 9, 1, 0, 1, 1, 1, 1], ["a"] * 8, 4) == [0, 1, 3, 4, 7]
    # Phases begin at equal places in a comparison.
    lines = {"root-only": drawing.memory_timeline(*TWELVE[:2], lambda work: 3 * work.num_bytes), "hybrid": STEP}
    drawn = drawing.draw_comparison(lines, model="m").axes[0].lines
    one, two = (line for line in drawn if len(line.get_xdata()) == len(TWELVE[0]))
    assert list(one.get_xdata()) == pytest.approx(list(two.get_xdata()))


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("wrapping", f"root-only at {OTHER.peak_bytes / 1e9:,.1f} GB"),
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


def test_nothing_to_draw_and_nothing_to_draw_with_are_refused(tmp_path, monkeypatch):
    for draw in (lambda: draw_losses({"a": []}, setting=""), lambda: save(PICTURES["loss"](), tmp_path / "c.gif")):
        with pytest.raises(ConfigError):
            draw()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'hf-fsdp-tools\[plots\]'"):
        PICTURES["loss"]()
