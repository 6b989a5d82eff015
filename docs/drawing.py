"""The pictures of the README and the documentation: what was measured next to others, units of a plan."""

from collections.abc import Mapping
from typing import Any

from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.plots import INK, LINES, new_figure, styled
from hf_fsdp_tools.text import cut, show_bytes, show_count

BLUE, RED, GREEN, VIOLET, ORANGE, GRAY = LINES
VERDICTS = {"right": BLUE, "silently wrong": RED, "refused": GRAY, "crashed": ORANGE}


@styled
def draw_measured(trained: Mapping[str, Mapping[str, int]], loaded: Mapping[str, tuple[float, str]]) -> Any:
    """What became of all model types under each library, and the host memory of each loader (MB, and a note)."""
    (own, counts), (least, _) = next(iter(trained.items())), next(iter(loaded.values()))
    total = sum(counts.values())
    figure = new_figure(
        f"{own}: {counts['right']} of {total} model types train right; "
        f"loading takes {show_bytes(int(least * 1e6))} above the shards",
        4.4,
    )
    above, below = figure.subplots(2, 1, height_ratios=(len(trained) + 1, len(loaded)))
    above.set_title(f"{total} model types, tiny, on 2 CPU ranks: trained, saved and resumed as in one process?")
    for row, verdicts in enumerate(trained.values()):
        start = 0
        for verdict, color in VERDICTS.items():
            count = verdicts[verdict]
            above.barh(row, count, left=start, height=0.6, color=color, label="" if row else verdict)
            if count > 0.02 * total:
                above.text(start + count / 2, row, f"{count}", color="white", ha="center", va="center", weight="bold")
            start += count
        small = [f"{verdicts[each]} {each}" for each in VERDICTS if 0 < verdicts[each] <= 0.02 * total]
        above.text(total + 3, row, ", ".join(small), va="center")
    above.set_xlim(right=1.3 * total)
    above.legend(ncols=len(VERDICTS), loc="upper left", bbox_to_anchor=(0, 0), handlelength=1.0)
    below.set_title(
        "Loading 3 GB of bf16 into shards on 2 ranks: most host memory of a rank above its shards, and time"
    )
    below.barh(range(len(loaded)), [megabytes for megabytes, _ in loaded.values()], height=0.6, color=VIOLET)
    for row, (megabytes, note) in enumerate(loaded.values()):
        below.text(megabytes + 30, row, f"{show_bytes(int(megabytes * 1e6))}; {note}", va="center", color=INK)
    below.set_xlim(right=1.55 * max(megabytes for megabytes, _ in loaded.values()))
    for axes, names in ((above, trained), (below, loaded)):
        axes.grid(False)
        axes.set(xticks=[], yticks=range(len(names)), yticklabels=list(names))
        axes.invert_yaxis()
        axes.spines["bottom"].set_visible(False)
    return figure


@styled
def draw_units(plan: WrapPlan) -> Any:
    """The units of a plan as bars, equal ones in one row."""
    _, *rows = plan.table()
    largest, total = plan.largest_unit, sum(unit.num_bytes for unit in plan.units)
    title = f"{len(plan.units)} units; the largest gathers {show_bytes(largest.num_bytes)} of {show_bytes(total)}"
    figure = new_figure(title, 0.8 + 0.3 * len(rows))
    axes = figure.add_subplot(title=f"{plan.model_class}, {show_count(plan.num_params)} parameters", xticks=[])
    axes.grid(False)
    sizes = [units[0].num_bytes for units in plan.alike]
    bars = axes.barh(range(len(rows)), sizes, height=0.5, color=ORANGE)
    axes.bar_label(bars, [f"{count} {size}, {why}" for _, count, _, size, _, why in rows], padding=4)
    axes.set_yticks(range(len(rows)), [cut(name, 60) for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlim(right=2.2 * max(sizes))
    axes.spines["bottom"].set_visible(False)
    return figure
