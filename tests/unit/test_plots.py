"""Pictures show the memory and the schedule of a step where they are; a page needs neither network nor script."""

import re
import sys
from base64 import b64decode
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.timeline import memory_timeline, step_schedule
from hf_fsdp_tools.planning.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.plots.curves import ScalingCurve, draw_losses, draw_scaling
from hf_fsdp_tools.plots.figure import page_text, save
from hf_fsdp_tools.plots.memory import draw_comparison, draw_memory
from hf_fsdp_tools.plots.schedule import draw_schedule
from tests.unit.test_timeline import GB, a_step

EVENTS, RESIDENT, SPANS = a_step(units=12)
STEP = memory_timeline(EVENTS, RESIDENT, reserved=[70 * GB] * len(EVENTS)).in_seconds(EVENTS, SPANS)
OTHER = memory_timeline(*a_step(units=12, held=30 * GB)[:2])
SCHEDULE = step_schedule(EVENTS, SPANS)
UNIT = WrapUnit(modules=("layers.0",), reshard_after_forward=True, num_params=10, num_bytes=40, reason="block X")
PLAN = WrapPlan(units=(UNIT,), replicated=(), model_class="ModelForX", num_params=10)
CURVES = [
    ScalingCurve(name="A, gpu one", num_gpus=(8, 64, 512), values=(None, 100.0, 99.0), published=((64, 104.0),)),
    ScalingCurve(name="B, gpu two", num_gpus=(8, 64, 512), values=(200.0, 101.0, 98.0)),
    ScalingCurve(name="C, on nothing", num_gpus=(8, 64, 512), values=(None, None, None)),
]
PICTURES = {
    "memory": lambda: draw_memory(STEP, model="a model", limit_bytes=80 * GB),
    "measured": lambda: draw_memory(OTHER, model="a model", measured=STEP, limit_bytes=900 * GB),
    "comparison": lambda: draw_comparison({"root-only": OTHER, "hybrid": STEP}, model="m", limit_bytes=80 * GB),
    "schedule": lambda: draw_schedule(SCHEDULE, model="a model", measured=SCHEDULE),
    "scaling": lambda: draw_scaling(CURVES, setting="fp16"),
    "losses": lambda: draw_losses({"one": [(0, 8.0), (9, 2.0)], "two": [(0, 8.1), (9, 2.01)]}, setting="s"),
}


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("memory", f"Peaks at {STEP.peak_bytes / 1e9:,.1f} GB in the loss; the allocator takes 70.0 GB of 80.0 GB"),
        ("measured", f"({100 * (OTHER.peak_bytes / STEP.peak_bytes - 1):+.1f} %)"),
        ("comparison", f"root-only at {OTHER.peak_bytes / 1e9:,.1f} GB"),
        ("schedule", f"{SCHEDULE.exposed_seconds / SCHEDULE.seconds:.1%} of a step"),
        ("scaling", "A, gpu one: 99 at 512 GPUs; B, gpu two: 98 at 512 GPUs; published figures differ by +4"),
        ("losses", "Loss of one: 8 at step 0, 2 at 9"),
    ],
)
def test_a_picture_has_its_finding_as_title_and_is_the_same_each_time(name, finding, tmp_path):
    assert finding in PICTURES[name]().get_suptitle()
    for file in ("a.svg", "b.svg"):
        save(PICTURES[name](), tmp_path / file)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def highest(area):
    return max(area.get_paths()[0].vertices, key=lambda corner: corner[1])


def test_a_measured_step_is_laid_over_the_prediction_unit_by_unit():
    """The same step at another speed, which changes in the middle, falls on itself."""
    middle = SPANS[len(SPANS) // 2][0]
    slow = [(3 * min(s, middle) + max(s - middle, 0), 3 * min(e, middle) + max(e - middle, 0)) for s, e in SPANS]
    measured = memory_timeline(EVENTS, RESIDENT).in_seconds(EVENTS, slow)
    axes = draw_memory(STEP, model="m", measured=measured).axes[0]
    line = next(line for line in axes.lines if line.get_label().startswith("measured"))
    at = max(zip(line.get_xdata(), line.get_ydata(), strict=True), key=lambda point: point[1])
    assert at == pytest.approx(tuple(highest(axes.collections[-1])), rel=0.02)


def test_bars_of_a_schedule_lie_where_the_work_was():
    figure = draw_schedule(SCHEDULE, model="m")
    drawn = [path.get_extents() for bars in figure.axes[0].collections for path in bars.get_paths()]
    for bar in (bar for bar in SCHEDULE.bars if bar.track == "communication"):
        assert any(abs(box.x0 - bar.start_s) < 1e-9 and box.y0 > 1 for box in drawn), bar
    assert len(figure.axes) == 3, "the whole step, and a few units of each pass from near"


def test_without_matplotlib_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'hf-fsdp-tools\[plots\]'"):
        PICTURES["memory"]()


def test_nothing_to_draw_is_refused():
    for draw in (
        lambda: draw_scaling(CURVES[2:], setting=""),
        lambda: draw_schedule(step_schedule([], []), model=""),
        lambda: draw_comparison({}, model=""),
        lambda: draw_losses({"a": []}, setting=""),
        lambda: save(PICTURES["memory"](), "c.gif"),
    ):
        with pytest.raises(ConfigError):
            draw()


def test_a_page_holds_all_and_needs_no_network():
    text = page_text(
        title="Fits & runs",
        setting="a <model>",
        numbers={"peak": "60.0 GB"},
        breakdown={"activations": 3 * GB, "parameters": GB},
        figures={"memory": PICTURES["memory"](), "schedule": PICTURES["schedule"]()},
        plan=PLAN,
        notes=["estimated"],
    )
    assert not re.search(r"<(script|link|iframe)|href=", text)
    sources = re.findall(r'src="(.*?),(.*?)"', text)
    assert len(sources) == text.count("<img") == 2
    for kind, picture in sources:
        assert kind == "data:image/svg+xml;base64" and ElementTree.fromstring(b64decode(picture)).tag.endswith("svg")
    for word in ("60.0 GB", "activations", "layers.0", "block X", "Fits &amp; runs", "a &lt;model&gt;", "estimated"):
        assert word in text
