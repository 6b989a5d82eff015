"""A page of pictures and tables that needs no network and no script, light or dark as the reader's system is."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.plots.figure import COLORS, INK, save
from hf_fsdp_tools.text import show_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """One HTML page: the numbers, where the memory of the peak goes, the pictures, the units of the plan."""
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
