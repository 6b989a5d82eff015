"""What all pictures share: their look, which suits white and black pages alike, their files, and pages that hold them.

Families of colours differ in hue (blue, green, orange of Okabe and Ito's palette, jfly.uni-koeln.de/color), members of
a family in lightness, so that people with any kind of colour vision tell them apart.
"""

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.text import show_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#6e7b88"  # Colour of texts and lines, with equal contrast to white and to black

COLORS = {
    "optimizer": "#2a6db0",
    "parameters": "#5a9ed8",
    "gradients": "#9cc7ea",
    "inputs": "#8b949e",
    "activations": "#12a07b",
    "logits and loss": "#6cc6a9",
    "gathered parameters": "#e8920a",
    "gather buffers": "#f6c667",
    "whole gradients": "#cc5a1e",
    "reduce buffers": "#ee9c74",
    "temporaries": "#7f8790",
    "other": "#a1a9b1",
    "root-only": "#e5533d",
    "hybrid": "#2f81d6",
    "third": "#8b63a8",
    "exposed": "#e0483a",
}
"""Colour of each role. Kinds of memory stand in the order in which they are stacked: what stays for the step, what the
model makes, what FSDP makes for a while."""

LINE_ROLES = ("hybrid", "root-only", "activations", "third", "gathered parameters", "other")
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


def short_unit(fqn: str) -> str:
    """The end of a unit's name: "31" for model.layers.31, "embed_tokens" for model.embed_tokens, "root" for ""."""
    return fqn.rpartition(".")[2] or "root"


@styled
def save(figure: "Figure", path: str | Path) -> None:
    """Write a picture on a transparent ground; the same one gives the same bytes."""
    path = Path(path)
    if path.suffix not in _METADATA:
        raise ConfigError(f"{path.name} is no picture that can be written: name it .png, .svg or .pdf.")
    figure.savefig(path, metadata=_METADATA[path.suffix])


# ---- pages ----

_CSS = f"""
:root {{ color-scheme: light dark }}
body {{ margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 3rem; font: 15px/1.45 system-ui, sans-serif }}
p, dt, th {{ color: {INK} }}
dl {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem }}
dd {{ margin: 0; font-size: 1.2rem; font-weight: 600 }}
img {{ width: 100%; min-width: 46rem }}
.wide {{ overflow-x: auto; margin: 1.6rem 0 }}
th, td {{ padding: .25rem .9rem .25rem 0; text-align: left; white-space: nowrap }}
.bar {{ display: inline-block; height: .7rem }}
"""


def page_text(
    *,
    title: str,
    setting: str,
    numbers: Mapping[str, str],
    breakdown: Mapping[str, int],
    figures: Mapping[str, "Figure"],
    plan: WrapPlan | None = None,
    notes: Sequence[str] = (),
) -> str:
    """One HTML page without network and script: numbers, where the memory of the peak goes, pictures, units."""
    boxes = (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in numbers.items())
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(setting)}</p>", f"<dl>{''.join(boxes)}</dl>"]
    body += [_picture(caption, figure) for caption, figure in figures.items()]
    if breakdown:
        body.append(_breakdown(breakdown))
    if plan is not None:
        titles, *rows = (map(escape, row) for row in plan.table())
        body.append(_table(f"{len(plan.units)} units of {escape(plan.model_class)}", titles, rows))
    body += [f"<p>{escape(note)}</p>" for note in notes]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    text = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_CSS}</style></head>\n<body>{text}</body></html>\n'


def _picture(caption: str, figure: "Figure") -> str:
    with TemporaryDirectory() as folder:
        save(figure, path := Path(folder, "picture.svg"))
        svg = b64encode(path.read_bytes()).decode()
    return f'<div class="wide"><img alt="{escape(caption)}" src="data:image/svg+xml;base64,{svg}"></div>'


def _breakdown(breakdown: Mapping[str, int]) -> str:
    """A table of kinds, the largest first, each with a bar."""
    total = sum(breakdown.values())
    rows = []
    for kind, value in sorted(breakdown.items(), key=lambda item: -item[1]):
        color = COLORS.get(kind, COLORS["other"])
        bar = f'<span class="bar" style="width:{15 * value / total:.2f}rem;background:{color}"></span>'
        rows.append((escape(kind), show_bytes(value), f"{value / total:.1%}", bar))
    rows.append(("total", show_bytes(total), "", ""))
    return _table("Memory of one rank at the peak", ("kind", "bytes", "share", ""), rows)


def _table(title: str, titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in titles)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<h2>{title}</h2><div class="wide"><table><tr>{head}</tr>{body}</table></div>'
