"""Picture of a wrap plan: its units as a table, each with a bar as long as it is large."""

from typing import TYPE_CHECKING

from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.plots.figure import ThemeName, check_matplotlib, new_figure, text_inches
from hf_fsdp_tools.text import cut, show_bytes, show_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_units"]

_ROW = 0.27  # inches
_GAP = 0.25
_BAR = 1.6
_MOST_ROWS = 30
_MOST_CHARACTERS = 60


def draw_units(plan: WrapPlan, *, theme: ThemeName = "light") -> "Figure":
    """The units of a plan as a table, equal ones in one row; the figure is as large as the table.

    Args:
        plan: of any model; of more than 30 different units the first 30 are shown.
        theme: light or dark.

    Raises:
        ConfigError: matplotlib is absent.
    """
    check_matplotlib()
    from matplotlib.patches import Rectangle

    titles, *rows = [tuple(cut(cell, _MOST_CHARACTERS) for cell in row) for row in plan.table()]
    left_out, rows = len(rows) - _MOST_ROWS, rows[:_MOST_ROWS]
    if left_out > 0:
        rows.append((f"… and {left_out} more", *[""] * (len(titles) - 1)))
    sizes = [units[0].num_bytes for units in plan.alike[:_MOST_ROWS]]
    widths = [max(text_inches(row[i], 9.0, "bold") for row in (titles, *rows)) + _GAP for i in range(len(titles))]
    largest = plan.largest_unit
    title = (
        f"{len(plan.units)} units; the largest gathers {show_bytes(largest.num_bytes)} of "
        f"{show_bytes(sum(unit.num_bytes for unit in plan.units))}"
    )
    subtitle = f"{plan.model_class}, {show_count(plan.num_params)} parameters"
    width = max(sum(widths) + _BAR + 0.4, text_inches(title, 12.5, "bold") + 0.4)
    height = 0.85 + _ROW * (len(rows) + 1)
    figure, palette, top = new_figure(title, subtitle, size=(width, height), theme=theme)
    y = top - _ROW / 2
    for number, row in enumerate((titles, *rows)):
        x = 0.18
        for i, (cell, room) in enumerate(zip(row, widths, strict=True)):
            right = i in (1, 2, 3)
            figure.text(
                (x + room - _GAP if right else x) / width,
                y / height,
                cell,
                ha="right" if right else "left",
                va="center",
                fontsize=9.0,
                color=palette["muted" if not number else "ink"],
            )
            x += room
            if i == 3:
                if 0 < number <= len(sizes) and sizes[number - 1]:
                    length = _BAR * sizes[number - 1] / max(sizes)
                    bar = Rectangle((x / width, (y - 0.06) / height), max(length, 0.01) / width, 0.12 / height)
                    bar.set(color=palette["gathered parameters"], linewidth=0)
                    figure.add_artist(bar)
                x += _BAR + _GAP
        y -= _ROW
    return figure
