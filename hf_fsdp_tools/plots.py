"""The picture of a run's losses, and the look of all pictures, which suits white and black pages alike.

Lines differ in hue (blue, green, orange of Okabe and Ito's palette, jfly.uni-koeln.de/color) and in lightness, so that
people with any kind of colour vision tell them apart. `docs/drawing.py` draws the pictures of the documentation.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#6e7b88"  # Colour of texts and lines, with equal contrast to white and to black

LINES = ("#2f81d6", "#e5533d", "#12a07b", "#8b63a8", "#e8920a", "#a1a9b1")
"""Colours of lines, in their order."""

_STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "figure.titlesize": 12.5,
    "figure.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "hf_fsdp_tools",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "ytick.major.size": 0.0,
}
_METADATA: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None, "Creator": None},
}
"""Kinds of files, and what may not be in them, so that one picture always gives the same bytes."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def check_matplotlib() -> None:
    """Refuse to draw without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(
            "Pictures are drawn by matplotlib, which is not installed. Run: pip install 'hf-fsdp-tools[plots]'"
        ) from None


def styled(draw: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function draw in the look of all pictures."""

    @wraps(draw)
    def in_style(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        check_matplotlib()
        from matplotlib import rc_context

        with rc_context(_STYLE):  # type: ignore[arg-type]  # matplotlib lists all keys
            return draw(*args, **kwargs)

    return in_style


def new_figure(title: str, height: float) -> "Figure":
    """An empty figure of a height in inches below its title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, height))
    figure.suptitle(title, x=0.01, horizontalalignment="left", wrap=True)
    return figure


@styled
def save(figure: "Figure", path: str | Path) -> None:
    """Write a picture on a transparent ground; the same one gives the same bytes."""
    path = Path(path)
    if path.suffix not in _METADATA:
        raise ConfigError(f"{path.name} is no picture that can be written: name it .png, .svg or .pdf.")
    figure.savefig(path, metadata=_METADATA[path.suffix])


@styled
def draw_losses(
    runs: Mapping[str, Sequence[tuple[int, float]]], *, quantity: str = "loss", title: str | None = None, setting: str
) -> "Figure":
    """The loss, or another quantity, of each run over its steps."""
    if not runs or not all(runs.values()):
        raise ConfigError("There is a run without steps, or no run at all. Give (step, loss) of each logged step.")
    if title is None:
        name, points = next(iter(runs.items()))
        (first, before), (last, after) = points[0], points[-1]
        title = f"{quantity.capitalize()} of {name}: {before:.3g} at step {first:,}, {after:.3g} at {last:,}"
    figure = new_figure(title, 4.2)
    axes = figure.add_subplot(title=setting, xlabel="optimizer step", ylabel=quantity)
    for (name, points), color in zip(runs.items(), LINES, strict=False):
        axes.plot(*zip(*points, strict=True), "o-" if len(points) == 1 else "-", color=color, label=name)
    axes.legend()
    return figure
