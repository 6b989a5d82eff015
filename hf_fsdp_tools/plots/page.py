"""A page of pictures and tables that needs no network and no script, in light and dark as the reader's system is."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.plots.figure import COLORS, svg_text
from hf_fsdp_tools.text import show_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_CSS = """
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 3rem; background: var(--ground); color: var(--ink);
  font: 15px/1.45 system-ui, "Segoe UI", "DejaVu Sans", sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .2rem } h2 { font-size: 1.05rem; margin: 2.2rem 0 .4rem }
p { color: var(--muted); margin: 0 0 1rem }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem; margin: 1rem 0 }
dl div { border: 1px solid var(--grid); border-radius: 6px; padding: .5rem .7rem }
dt { color: var(--muted); font-size: .8rem } dd { margin: 0; font-size: 1.2rem; font-weight: 600 }
figure { margin: 1.6rem 0 } figure svg { width: 100%; min-width: 46rem; height: auto; display: block }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem } th { color: var(--muted); font-weight: normal; text-align: left }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--grid); white-space: nowrap }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.note { margin: 1rem 0 }
.bar { display: inline-block; height: .7rem; vertical-align: baseline }
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
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(setting)}</p>", _numbers(numbers)]
    parts += [_picture(caption, svg_text(figure), i) for i, (caption, figure) in enumerate(figures.items())]
    parts += [_breakdown(breakdown)] if breakdown else []
    parts += [_units(plan)] if plan is not None else []
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    head += f"<style>{_colors()}{_CSS}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _colors() -> str:
    """The colours of both themes as variables."""
    light, dark = ("".join(f"--{_variable(role)}:{pair[i]};" for role, pair in COLORS.items()) for i in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _variable(role: str) -> str:
    return role.replace(" ", "-")


def _numbers(numbers: Mapping[str, str]) -> str:
    boxes = (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in numbers.items())
    return f"<dl>{''.join(boxes)}</dl>"


def _picture(caption: str, svg: str, number: int) -> str:
    """A picture with variables for colours, a name for screen readers, and ids of its own."""
    for role, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--{_variable(role)})")
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{number}-", svg)
    named = rf'<svg viewBox="\1" role="img" aria-label="{escape(caption)}">'
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', named, svg, count=1)
    return f'<figure class="wide">{svg}</figure>'


def _breakdown(breakdown: Mapping[str, int]) -> str:
    """A table of kinds, the largest first, each with a bar."""
    total = sum(breakdown.values())
    rows = []
    for kind, value in sorted(breakdown.items(), key=lambda item: -item[1]):
        color = _variable(kind if kind in COLORS else "other")
        bar = f'<span class="bar" style="width:{15 * value / total:.2f}rem;background:var(--{color})"></span>'
        share = f"{100 * value / total:.1f} %"
        cells = f'<td class="n">{show_bytes(value)}</td><td class="n">{share}</td><td>{bar}</td>'
        rows.append(f"<tr><td>{escape(kind)}</td>{cells}</tr>")
    rows.append(f'<tr><td>total</td><td class="n">{show_bytes(total)}</td><td class="n">100 %</td><td></td></tr>')
    return f'<h2>Memory of one rank at the peak</h2><div class="wide"><table>{"".join(rows)}</table></div>'


def _units(plan: WrapPlan) -> str:
    titles, *rows = plan.table()

    def cells(tag: str, row: Sequence[str]) -> str:
        texts = (f"<{tag}{' class=n' * (i in (1, 2, 3))}>{escape(cell)}</{tag}>" for i, cell in enumerate(row))
        return f"<tr>{''.join(texts)}</tr>"

    body = "".join([cells("th", titles), *(cells("td", row) for row in rows)])
    return (
        f'<h2>{len(plan.units)} units of {escape(plan.model_class)}</h2><div class="wide"><table>{body}</table></div>'
    )
