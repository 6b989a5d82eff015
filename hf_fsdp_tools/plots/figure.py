"""What all pictures share: colours in light and dark, a title that says the finding, texts that never meet, files.

Colours are told apart by people with any kind of colour vision: families differ in hue (blue, green, orange of Okabe
and Ito's palette, jfly.uni-koeln.de/color), members of a family in lightness, and every colour is labelled in place.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ThemeName = Literal["light", "dark"]
Size = tuple[float, float]
"""Width and height in inches."""

COLORS: dict[str, tuple[str, str]] = {
    "ground": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "grid": ("#e1e5ea", "#2b323b"),
    "optimizer": ("#1f5f99", "#2a6db0"),
    "parameters": ("#4f94cd", "#5a9ed8"),
    "gradients": ("#9cc7ea", "#a5cff2"),
    "inputs": ("#c3c9cf", "#545d68"),
    "activations": ("#0a8f6c", "#12a07b"),
    "logits and loss": ("#6cc6a9", "#7fd6bb"),
    "gathered parameters": ("#e08a00", "#eda01c"),
    "gather buffers": ("#f6c667", "#f8d283"),
    "whole gradients": ("#b8480a", "#d8612a"),
    "reduce buffers": ("#ee9c74", "#f3b193"),
    "temporaries": ("#8a929b", "#7b848e"),
    "other": ("#aeb5bc", "#656e78"),
    "root-only": ("#d5382b", "#ff6a5a"),
    "hybrid": ("#1268b3", "#58a6ff"),
    "third": ("#7a5195", "#9468b3"),
    "exposed": ("#d43a2d", "#ff6b5c"),
}
"""Colour of each role, in light and in dark."""

LINE_ROLES = ("hybrid", "root-only", "activations", "third", "gathered parameters", "other")
"""Colours of lines, in their order."""

_FONT_POINTS = {"title": 12.5, "text": 9.0, "small": 8.0}
_MARGIN = 0.18  # inches around everything


def check_matplotlib() -> None:
    """Refuse to draw without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(
            "Pictures are drawn by matplotlib, which is not installed. Run: pip install 'hf-fsdp-tools[plots]'"
        ) from None


@dataclass(frozen=True)
class Palette:
    """The colours of one theme."""

    theme: ThemeName

    def __getitem__(self, role: str) -> str:
        """The colour of a role, "other" for one that has none."""
        return COLORS.get(role, COLORS["other"])[self.theme == "dark"]


def new_figure(title: str, subtitle: str, *, size: Size, theme: ThemeName) -> "tuple[Figure, Palette, float]":
    """An empty figure below its title, its colours, and the height in inches that is left for panels."""
    check_matplotlib()
    if theme not in ("light", "dark"):
        raise ConfigError(f"theme is {theme!r}; there are 'light' and 'dark'.")
    from matplotlib.figure import Figure

    palette, (width, height) = Palette(theme), size
    figure = Figure(figsize=size, facecolor=palette["ground"], dpi=100)
    top = _MARGIN
    for kind, text, color, weight in (("title", title, "ink", "bold"), ("text", subtitle, "muted", "normal")):
        for line in _wrapped(text, width - 2 * _MARGIN, _FONT_POINTS[kind], weight):
            figure.text(
                _MARGIN / width,
                1 - top / height,
                line,
                fontsize=_FONT_POINTS[kind],
                fontweight=weight,
                color=palette[color],
                va="top",
            )
            top += _FONT_POINTS[kind] * 1.35 / 72
        top += 0.03
    return figure, palette, height - top - 0.08


def inches() -> float:
    """Height in inches of a line of text."""
    return _FONT_POINTS["text"] * 1.35 / 72


@cache
def text_inches(text: str, points: float = _FONT_POINTS["text"], weight: str = "normal") -> float:
    """Width in inches of a text in the font of all pictures."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    path = TextPath((0, 0), text, prop=FontProperties(family="DejaVu Sans", size=points, weight=weight))
    return float(path.get_extents().x1) / 72 if text.strip() else 0.0


def _wrapped(text: str, width: float, points: float, weight: str) -> list[str]:
    """A text as lines that are at most `width` inches wide, broken at spaces."""
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_inches(longer, points, weight) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def panel(figure: "Figure", left: float, bottom: float, width: float, height: float, palette: Palette) -> "Axes":
    """Axes at a place given in inches from the lower left corner, with thin lines and without a frame."""
    total = figure.get_size_inches()
    axes = figure.add_axes((left / total[0], bottom / total[1], width / total[0], height / total[1]))
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(palette["muted"])
    axes.tick_params(colors=palette["muted"], labelsize=_FONT_POINTS["small"], length=3, width=0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=palette["grid"], linewidth=0.7)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(palette["muted"])
        axis.label.set_fontsize(_FONT_POINTS["small"])
    return axes


def readable_on(color: str) -> str:
    """Black or white, whichever is easier to read on a colour; the same for both of a role's colours."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#fefefe" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else "#101214"


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions at least `gap` apart between `low` and `high`, in the order of the wanted ones and near to them."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    placed: list[float] = []
    for i in order:
        placed.append(max(wanted[i], low if not placed else placed[-1] + gap))
    limit = high
    for i in range(len(placed) - 1, -1, -1):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - gap
    result = [0.0] * len(wanted)
    for position, i in zip(placed, order, strict=True):
        result[i] = position
    return result


def name_lines(
    axes: "Axes",
    lines: Sequence[tuple[str, float, str]],
    *,
    rows: float = 1.1,
    distance: float = 6,
    points: float = 9.0,
) -> list[float]:
    """Write the name of each line right of the axes, as near to the height of its end as the others allow."""
    low, high = axes.get_ylim()
    gap = (high - low) * inches() * rows * axes.figure.dpi / axes.bbox.height
    places = spread([end for _, end, _ in lines], gap, low + gap / 2, high - gap / 2)
    for (name, _, color), place in zip(lines, places, strict=True):
        axes.annotate(
            name,
            (1, place),
            xycoords=axes.get_yaxis_transform(),
            xytext=(distance, 0),
            textcoords="offset points",
            va="center",
            fontsize=points,
            fontweight="bold",
            color=color,
            annotation_clip=False,
        )
    return places


def short_unit(fqn: str) -> str:
    """The end of a unit's name: "31" for model.layers.31, "embed_tokens" for model.embed_tokens, "root" for ""."""
    return fqn.rpartition(".")[2] or "root"


def save(figure: "Figure", path: str | Path) -> None:
    """Write a picture; the same one gives the same bytes."""
    path = Path(path)
    metadata: dict[str, dict[str, Any]] = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {}}
    if path.suffix not in metadata:
        raise ConfigError(f"{path.name} is no picture that can be written: name it .png, .svg or .pdf.")
    if path.suffix == ".svg":
        path.write_text(svg_text(figure, ground=True) + "\n", encoding="utf-8")
    else:
        figure.savefig(path, dpi=160, facecolor=figure.get_facecolor(), metadata=metadata[path.suffix])


def svg_text(figure: "Figure", *, ground: bool = False) -> str:
    """A picture as an `svg` element, texts as shapes, coordinates to a tenth of a point."""
    from matplotlib import rc_context

    written = StringIO()
    with rc_context({"svg.hashsalt": "hf_fsdp_tools", "svg.fonttype": "path"}):
        color = figure.get_facecolor() if ground else "none"
        figure.savefig(written, format="svg", facecolor=color, metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'(?<= d=")[MLz\d\s.-]*(?=")', lambda path: _shortened(path[0]), text).rstrip()


def _shortened(path: str) -> str:
    """A path of straight lines with one decimal per coordinate; lines along an axis have one coordinate."""
    written: list[str] = []
    before: tuple[str, ...] = ("", "")
    for command, *numbers in (re.findall(r"[MLz]|[\d.-]+", step) for step in re.findall(r"[MLz][^MLz]*", path)):
        x, y = place = tuple(f"{float(number):.1f}".removesuffix(".0") for number in numbers) or ("", "")
        along = f"V{y}" if x == before[0] else f"H{x}" if y == before[1] else f"L{x} {y}"
        written.append({"M": f"M{x} {y}", "L": along, "z": "z"}[command])
        before = place
    return "".join(written)
