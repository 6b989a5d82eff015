"""Picture of the losses of runs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.plots.figure import LINE_ROLES, Size, ThemeName, name_lines, new_figure, panel, text_inches

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_losses(
    runs: Mapping[str, Sequence[tuple[int, float]]],
    *,
    title: str | None = None,
    setting: str,
    theme: ThemeName = "light",
    size: Size = (10.0, 4.2),
) -> "Figure":
    """The loss of each run over its steps, each named at its end."""
    if not runs or not all(runs.values()):
        raise ConfigError("There is a run without steps, or no run at all. Give (step, loss) of each logged step.")
    names = list(runs)
    one = runs[names[0]]
    title = title or f"Loss of {names[0]}: {one[0][1]:.3g} at step {one[0][0]:,}, {one[-1][1]:.3g} at {one[-1][0]:,}"
    figure, palette, top = new_figure(title, setting, size=size, theme=theme)
    right = 0.3 + max(text_inches(name, 9.0, "bold") for name in names)
    axes = panel(figure, 0.72, 0.5, size[0] - 0.72 - right, top - 0.5, palette)
    for name, role in zip(names, LINE_ROLES, strict=False):
        axes.plot(*zip(*runs[name], strict=True), color=palette[role], linewidth=1.5)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    name_lines(axes, [(name, runs[name][-1][1], palette[role]) for name, role in zip(names, LINE_ROLES, strict=False)])
    return figure
