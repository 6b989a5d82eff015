"""The pictures of the README and the documentation: what the package does, its memory over a step, measurements."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_fsdp_tools.plots import INK, LINES, new_figure, styled
from hf_fsdp_tools.text import show_bytes

BLUE, RED, GREEN, VIOLET, ORANGE, GRAY = LINES
LAYERS = ("embedding", *(f"block {number}" for number in range(5)), "head")
RUNNING = "block 2"
"""The layers of the model in the picture of the idea, and the one that is computed."""
RANKS = 4
COLUMNS = 100
"""Stretches of a step of which a panel shows the least and the most memory."""
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
def draw_idea() -> Any:
    """What each rank reads, keeps and writes of each layer of a model."""
    figure = new_figure("Each rank reads, keeps and writes its own slices; one block at a time is whole", 3.4)
    axes = figure.add_subplot()
    places = {"checkpoint files": 0.0, **{f"rank {rank}": 1.75 + 1.2 * rank for rank in range(RANKS)}}
    places["saved files"] = 1.75 + 1.2 * RANKS + 0.55
    for holder, left in places.items():
        axes.text(left + 0.5, -0.6, holder, ha="center", weight="bold")
        for row, layer in enumerate(LAYERS):
            for rank in range(RANKS):
                holds = not holder.startswith("rank") or holder == f"rank {rank}" or layer == RUNNING
                color = LINES[rank] if holds else "none"
                axes.barh(
                    row, 1 / RANKS, left=left + rank / RANKS, height=0.7, color=color, edgecolor=INK, linewidth=0.4
                )
    for start, word in ((1.05, "read"), (places["saved files"] - 0.6, "write")):
        axes.annotate(
            "", (start + 0.55, 3), (start, 3), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.5}
        )
        axes.text(start + 0.27, 2.7, word, ha="center")
    axes.text(1.75, len(LAYERS) - 0.1, f"while {RUNNING} is computed: gathered before, freed after", va="center")
    axes.set(xlim=(-0.05, places["saved files"] + 1.05), ylim=(len(LAYERS) + 0.2, -1), xticks=[])
    axes.set_yticks(range(len(LAYERS)), LAYERS)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    return figure


@styled
def draw_wrappings(steps: Mapping[str, tuple[Sequence[float], Sequence[int]]], setting: str) -> Any:
    """The memory of one training step (bytes over seconds) under several ways to wrap a model, beside each other."""
    peaks = ", ".join(f"{name} {show_bytes(max(allocated))}" for name, (_, allocated) in steps.items())
    figure = new_figure(f"Peak memory: {peaks}", 3.2)
    panels = figure.subplots(1, len(steps), sharey=True)
    for axes, (name, (seconds, allocated)), color in zip(panels, steps.items(), (RED, GREEN, BLUE), strict=True):
        size = -(-len(allocated) // COLUMNS)
        kept = [
            each
            for start in range(0, len(allocated), size)
            for each in sorted(
                {
                    pick(range(start, min(start + size, len(allocated))), key=allocated.__getitem__)
                    for pick in (min, max)
                }
            )
        ]
        x, y = [seconds[each] for each in kept], [allocated[each] / 1e9 for each in kept]
        axes.fill_between(x, y, step="post", color=color, alpha=0.2, linewidth=0)
        axes.step(x, y, where="post", color=color, linewidth=1.0)
        axes.set(title=name, xlabel="seconds of a step", ylim=(0, None), xlim=(0, None))
    panels[0].set_ylabel("GB of one GPU")
    figure.supxlabel(setting, fontsize=9)
    return figure
