"""The pictures of `hf-fsdp estimate`: which ones, and what stands on the page."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.errors import ConfigError

if TYPE_CHECKING:
    from hf_fsdp_tools.cli.estimate import Estimate
    from hf_fsdp_tools.foresight.forecast import Forecast
    from hf_fsdp_tools.foresight.timeline import Timeline


PICTURES = (".png", ".svg", ".pdf")


def check_picture(path: Path | None, suffixes: Sequence[str] = (".html", *PICTURES)) -> None:
    """Refuse a file of which nothing can be drawn, before there is anything to draw."""
    if path is None:
        return
    if path.suffix not in suffixes:
        raise ConfigError(f"{path}: pictures end in {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")
    from hf_fsdp_tools.plots.figure import check_matplotlib

    check_matplotlib()


def draw_estimate(path: Path, estimates: dict[str, "Estimate"], scaled: dict[int, "Estimate"]) -> None:
    """Draw the memory of a step: as a page with all that belongs to it, or as one picture."""
    from hf_fsdp_tools.foresight.timeline import step_schedule
    from hf_fsdp_tools.plots.curves import ScalingCurve, draw_scaling
    from hf_fsdp_tools.plots.figure import page_text, save
    from hf_fsdp_tools.plots.memory import draw_comparison, draw_memory
    from hf_fsdp_tools.plots.schedule import draw_schedule
    from hf_fsdp_tools.text import show_bytes

    first = next(iter(estimates.values()))
    forecast, memory, time = first.memory.forecast, first.memory, first.time
    setting, limit = setting_of(forecast), memory.limit_bytes
    timelines: dict[str, Timeline] = {}
    for name in reversed(estimates):  # the last one gives the picture its phases, so it is that of the options
        own = estimates[name].memory
        timelines[name] = own.timeline.in_seconds(own.forecast.step.events, own.forecast.timing.spans)
    picture = draw_memory(list(timelines.values())[-1], model=setting, limit_bytes=limit)
    if path.suffix != ".html":
        save(draw_comparison(timelines, model=setting, limit_bytes=limit) if len(estimates) > 1 else picture, path)
        return
    schedule = step_schedule(forecast.step.events, forecast.timing.spans)
    figures: dict[str, Any] = {"memory of a step": picture}
    if len(estimates) > 1:
        figures["ways to wrap the model"] = draw_comparison(timelines, model=setting, limit_bytes=limit)
    if len(scaled) > 1:
        values = [each.time.tokens_per_second_per_gpu if each.memory.fits else None for each in scaled.values()]
        curve = ScalingCurve(name=str(memory.setup.gpu), num_gpus=tuple(scaled), values=tuple(values))
        figures["speed over the number of GPUs"] = draw_scaling([curve], setting=setting, quantity="tokens/s per GPU")
    figures["communication and computation of a step"] = draw_schedule(schedule, model=setting)
    page = page_text(
        title=f"{time.name}: {show_bytes(memory.total)} per GPU, {time.tokens_per_second_per_gpu:,.0f} tokens/s",
        setting=setting,
        numbers={
            "peak memory per GPU": show_bytes(memory.total),
            "memory of the GPU": show_bytes(limit),
            "step": f"{time.step_seconds:,.2f} s",
            "tokens/s per GPU": f"{time.tokens_per_second_per_gpu:,.0f}",
            "MFU": f"{100 * time.mfu:.1f} %",
            "exposed communication": f"{time.exposed_seconds:,.2f} s",
        },
        breakdown=memory.at_peak,
        figures=figures,
        plan=forecast.plan,
        notes=[*memory.notes, f"Efficiencies: {time.source}; software of 2024."],
    )
    path.write_text(page, encoding="utf-8")


def setting_of(forecast: "Forecast") -> str:
    """The model, the GPUs and the batch of a forecast, in a line."""
    setup = forecast.setup
    batch = f"{setup.batch_size} x {setup.seq_len:,} tokens per GPU"
    return f"{forecast.model_class}, {setup.num_gpus:,} x {setup.gpu}, {batch}"
