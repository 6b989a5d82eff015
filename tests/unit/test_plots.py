"""Pictures say the finding, keep their texts apart, follow the theme, and a page needs neither network nor script."""

import builtins
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from docs.plan_picture import draw_units
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.streams import step_schedule
from hf_fsdp_tools.foresight.timeline import memory_timeline
from hf_fsdp_tools.planning.plan import WrapPlan, WrapUnit
from hf_fsdp_tools.plots.comparison import draw_comparison
from hf_fsdp_tools.plots.figure import COLORS, _shortened, save, spread
from hf_fsdp_tools.plots.losses import draw_losses
from hf_fsdp_tools.plots.memory import draw_memory
from hf_fsdp_tools.plots.page import page_text
from hf_fsdp_tools.plots.scaling import ScalingCurve, draw_scaling
from hf_fsdp_tools.plots.schedule import draw_schedule
from tests.unit.test_timeline import GB, a_step

EVENTS, RESIDENT, SPANS = a_step(units=12)
STEP = memory_timeline(EVENTS, RESIDENT, reserved=[70 * GB] * len(EVENTS)).in_seconds(EVENTS, SPANS)
OTHER = memory_timeline(*a_step(units=12, held=30 * GB)[:2])
SCHEDULE = step_schedule(EVENTS, SPANS)
PLAN = WrapPlan(
    units=(
        *(
            WrapUnit(
                modules=(f"layers.{i}",), reshard_after_forward=True, num_params=10, num_bytes=40, reason="block X"
            )
            for i in range(9)
        ),
        WrapUnit(modules=("norm", "head"), reshard_after_forward=False, num_params=100, num_bytes=400, reason="head"),
        WrapUnit(modules=("",), reshard_after_forward=None, num_params=0, num_bytes=0, reason="rest"),
    ),
    replicated=(),
    model_class="ModelForX",
    num_params=190,
)
CURVES = [
    ScalingCurve(name="A, gpu one", num_gpus=(8, 64, 512), values=(None, 100.0, 99.0), published=((64, 104.0),)),
    ScalingCurve(name="B, gpu two", num_gpus=(8, 64, 512), values=(200.0, 101.0, 98.0)),
    ScalingCurve(name="C, on nothing", num_gpus=(8, 64, 512), values=(None, None, None)),
]
PICTURES = {
    "memory": lambda **k: draw_memory(STEP, model="a model", limit_bytes=80 * GB, **k),
    "memory with a measured step": lambda **k: draw_memory(
        OTHER, model="a model", measured=STEP, limit_bytes=900 * GB, **k
    ),
    "comparison": lambda **k: draw_comparison(
        {"root-only": OTHER, "hybrid": STEP}, model="m", limit_bytes=80 * GB, **k
    ),
    "schedule": lambda **k: draw_schedule(SCHEDULE, model="a model", measured=SCHEDULE, **k),
    "scaling": lambda **k: draw_scaling(CURVES, setting="fp16", **k),
    "losses": lambda **k: draw_losses({"one": [(0, 8.0), (9, 2.0)], "two": [(0, 8.1), (9, 2.01)]}, setting="s", **k),
    "units": lambda **k: draw_units(PLAN, **k),
}


def texts(figure):
    """All texts that are drawn: matplotlib keeps labels of ticks beyond the ends of an axis, and does not draw them."""
    beyond = set()
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
            beyond |= {label for place, label in ticks if not low <= place <= high}
            beyond |= {label for label in axis.get_ticklabels(minor=True)}
    found = figure.findobj(Text)
    return [text for text in found if text not in beyond and text.get_visible() and text.get_text().strip()]


def collisions(figure):
    """Pairs of texts that overlap, and texts that leave the figure."""
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [(text.get_text(), Text.get_window_extent(text, renderer)) for text in texts(figure)]
    outside = [name for name, box in boxes if not (figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1))]
    met = [
        (a, b)
        for (a, one), (b, two) in combinations(boxes, 2)
        if min(one.x1, two.x1) - max(one.x0, two.x0) > 1 and min(one.y1, two.y1) - max(one.y0, two.y0) > 2
    ]
    return met + outside


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_covers_another_or_leaves_the_picture(name):
    assert collisions(PICTURES[name](theme="dark")) == []


def test_texts_keep_apart_in_small_pictures():
    many = replace(STEP, kinds={f"kind of memory {i}": STEP.allocated for i in range(14)})
    assert collisions(draw_memory(many, model="a model", size=(6.5, 3.2))) == []
    for name in ("memory", "comparison", "scaling", "losses"):
        assert collisions(PICTURES[name](size=(6.5, 3.6))) == [], name
    assert collisions(draw_schedule(SCHEDULE, model="a model", width=6.5)) == []


def test_a_title_says_the_finding():
    def title(name):
        return PICTURES[name]().texts[0].get_text()

    peak = f"{STEP.peak_bytes / 1e9:,.1f} GB"
    assert title("memory") == f"Peaks at {peak} in the loss; the allocator takes 70.0 GB of the device's 80.0 GB"
    assert title("comparison") == f"Hybrid wrapping peaks at {peak}, root-only at {OTHER.peak_bytes / 1e9:,.1f} GB"
    off = 100 * (OTHER.peak_bytes / STEP.peak_bytes - 1)
    measured = " ".join(text.get_text() for text in PICTURES["memory with a measured step"]().texts[:2])
    assert f"measured {peak} ({off:+.1f}" in measured.replace("\N{NO-BREAK SPACE}", " ")
    assert title("units") == "11 units; the largest gathers 400 B of 760 B"
    assert "A, gpu one: 99 TFLOP/s per GPU at 512 GPUs, 99" in title("scaling").replace("\n", " ")
    many = draw_scaling([*CURVES[:2], replace(CURVES[0], name="D")], setting="")
    title_of_many = " ".join(text.get_text() for text in many.texts[:2]).replace("\N{NO-BREAK SPACE}", " ")
    assert "At 512 GPUs each keeps 49 to 99 % of its throughput" in title_of_many
    assert "; published figures differ by +4 %" in title_of_many
    without_allocator = draw_memory(OTHER, model="m", limit_bytes=90 * GB)
    assert without_allocator.texts[0].get_text().endswith(", of the device's 90.0 GB")


def test_a_limit_that_is_far_away_is_told_and_not_drawn():
    near, far = PICTURES["memory"](), PICTURES["memory with a measured step"]()
    assert any(text.get_text() == "the device has 80.0 GB" for text in texts(near))
    assert any(text.get_text() == "↑ the device has 900.0 GB" for text in texts(far))
    assert near.axes[0].get_ylim()[1] > 80 and far.axes[0].get_ylim()[1] < 120


def test_areas_end_at_the_memory_of_the_step():
    axes = PICTURES["memory"]().axes[0]
    tops = [max(y for _, y in patch.get_xy()) for patch in axes.patches]
    assert max(tops) == pytest.approx(STEP.peak_bytes / 1e9) and tops == sorted(tops, reverse=True)
    for patch in axes.patches:
        assert {(0.0, 0.0), (1.0, 0.0)} <= set(map(tuple, patch.get_xy())), "each area stands on the foot"


def test_a_measured_step_is_laid_over_the_prediction_unit_by_unit():
    """The same step at another speed, which changes in the middle, falls on itself."""
    middle = SPANS[len(SPANS) // 2][0]
    slow = [(3 * min(s, middle) + max(s - middle, 0), 3 * min(e, middle) + max(e - middle, 0)) for s, e in SPANS]
    measured = memory_timeline(EVENTS, RESIDENT).in_seconds(EVENTS, slow)
    figure = draw_memory(STEP, model="m", measured=measured)
    line = next(line for line in figure.axes[0].lines if line.get_linestyle() == "-" and len(line.get_xdata()) > 10)
    edge = max(figure.axes[0].patches, key=lambda patch: max(y for _, y in patch.get_xy())).get_xy()
    top = max(edge, key=lambda corner: corner[1])
    at = max(zip(line.get_xdata(), line.get_ydata(), strict=True), key=lambda point: point[1])
    assert at == pytest.approx(tuple(top), abs=0.02)
    last = next(x for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True) if x > 0.5 and y == 10.0)
    assert last == pytest.approx(next(x for x, y in edge if y == 10.0 and x > 0.5), abs=0.02), "the end of the backward"


def test_bars_of_a_schedule_lie_where_the_work_was():
    figure = draw_schedule(SCHEDULE, model="m")
    whole = figure.axes[0]
    drawn = [path.get_extents() for bars in whole.collections for path in bars.get_paths()]
    scale = 1.0 if SCHEDULE.seconds >= 1 else 1e3
    collectives = [bar for bar in SCHEDULE.bars if bar.track == "communication"]
    for bar in collectives:
        assert any(abs(box.x0 - bar.start_s * scale) < 1e-6 and box.y0 > 1 for box in drawn), bar
    assert len(figure.axes) == 3, "the whole step, and a few units of each pass from near"


def test_files_are_the_same_each_time_and_of_known_kinds(tmp_path):
    for name in ("a.svg", "b.png"):
        save(PICTURES["units"](), tmp_path / name)
        first = (tmp_path / name).read_bytes()
        save(PICTURES["units"](), tmp_path / name)
        assert (tmp_path / name).read_bytes() == first
    root = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    assert root.tag.endswith("svg") and COLORS["ground"][0] in (tmp_path / "a.svg").read_text()
    with pytest.raises(ConfigError, match=r"c\.gif .*name it \.png, \.svg or \.pdf"):
        save(PICTURES["units"](), tmp_path / "c.gif")


def test_paths_are_written_short_and_lead_along_the_same_places():
    assert _shortened("M 1.04 2 \nL 1.04 3.26 \nL 7.5 3.26 \nL 8 -9.96 \nz\n") == "M1 2V3.3H7.5L8 -10z"
    assert _shortened("M 1 1 L 2 2 z M 2 2 L 2 3") == "M1 1L2 2zM2 2V3"


def test_without_matplotlib_the_command_that_installs_it_is_said(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'hf-fsdp-tools\[plots\]'"):
        draw_units(PLAN)


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(ConfigError, match="'light' and 'dark'"):
        draw_units(PLAN, theme="blue")
    with pytest.raises(ConfigError, match="Allow more GPUs"):
        draw_scaling(CURVES[2:], setting="")
    with pytest.raises(ConfigError, match="empty"):
        draw_schedule(step_schedule([], []), model="")
    with pytest.raises(ConfigError, match="nothing to compare"):
        draw_comparison({}, model="")
    with pytest.raises(ConfigError, match="run without steps"):
        draw_losses({"a": []}, setting="")


def test_names_of_lines_are_spread_in_order():
    assert spread([1.0, 1.1, 5.0], 1.0, 0.0, 10.0) == pytest.approx([1.0, 2.0, 5.0])
    assert spread([9.9, 9.8, 0.0], 1.0, 0.5, 10.0) == pytest.approx([10.0, 9.0, 0.5])


class Page(HTMLParser):
    """Tags that are open, and whatever would reach for a network or run a script."""

    def __init__(self, text):
        super().__init__()
        self.open, self.foreign, self.ids, self.uses = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.foreign += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.foreign += [value for key, value in attributes if key in ("src", "href") and not value.startswith("#")]
        self.ids += [values["id"]] if "id" in values else []
        self.uses += [values[key][1:] for key in ("xlink:href",) if key in values]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_holds_all_and_needs_no_network():
    text = page_text(
        title="Fits & runs",
        setting="a <model>",
        numbers={"peak": "60.0 GB"},
        breakdown=STEP.at_peak,
        figures={"memory": PICTURES["memory"](), "schedule": PICTURES["schedule"]()},
        plan=PLAN,
        notes=["estimated"],
    )
    page = Page(text)
    assert page.open == [] and page.foreign == []
    assert len(page.ids) == len(set(page.ids)), "two pictures share an id"
    assert set(page.uses) <= set(page.ids)
    assert "Fits &amp; runs" in text and "a &lt;model&gt;" in text and "estimated" in text
    for word in ("60.0 GB", "activations", "layers.{0..8}", "norm + head", "block X"):
        assert word in text
    colors = {color for pair in COLORS.values() for color in pair}
    used = set(re.findall(r"#[0-9a-f]{6}\b", text[text.index("</style>") :]))
    assert not used & colors, "a colour of one theme alone"
    assert "prefers-color-scheme:dark" in text and f"--ink:{COLORS['ink'][1]}" in text
