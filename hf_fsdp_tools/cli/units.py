"""`hf-fsdp estimate --units`, one step unit by unit, and the pictures of an estimate."""

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.options import check_writable, prepare_model, progress, setup_of
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import merge_names, reason_of, table

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


if TYPE_CHECKING:
    from hf_fsdp_tools.foresight.timeline import Schedule


def show_units(options: argparse.Namespace) -> None:
    """Print the units of a step with their times, and write it as `--output` says."""
    from hf_fsdp_tools.foresight.forecast import step_of
    from hf_fsdp_tools.foresight.throughput import straggling
    from hf_fsdp_tools.foresight.timeline import step_schedule
    from hf_fsdp_tools.foresight.timing.efficiency import efficiency_of
    from hf_fsdp_tools.foresight.timing.hardware import gpu_named

    path = options.output
    check_writable(path)
    check_picture(path, PICTURES)
    measured = _measured(options.measured)
    if measured and path is None:
        raise ConfigError("--measured draws a real step below the foreseen one: name the picture with --output.")
    setup, kwargs = setup_of(options), prepare_model(options)
    with progress() as say:
        say(f"a step of {options.model} without memory ...")
        forecast = step_of(options.model, setup, **kwargs)
        schedule = step_schedule(forecast.step.events, forecast.timing.spans)
        if path is not None:
            say("drawing ...")
            from hf_fsdp_tools.plots.figure import save
            from hf_fsdp_tools.plots.schedule import draw_schedule

            save(draw_schedule(schedule, model=setting_of(forecast), measured=measured), path)
    if options.json:
        print(schedule.to_json())
        return
    total, exposed = schedule.communication_seconds, schedule.exposed_seconds
    print(
        f"{forecast.model_class} on {setup.num_gpus} x {setup.gpu}, micro-batch {setup.batch_size} of "
        f"{setup.seq_len:,} tokens: {_ms(schedule.seconds)} ms\n"
        f"{_ms(exposed)} of {_ms(total)} ms of communication are exposed; times of one unit in ms"
    )
    if late := straggling(setup, efficiency_of(gpu_named(setup.gpu))) * schedule.seconds:
        print(f"{_ms(late)} ms of waiting for the slowest GPU come on top in an estimate of the whole step")
    print("", *_table(schedule), sep="\n")
    if path is not None:
        print(f"wrote {path}")


def _measured(path: Path | None) -> "Schedule | None":
    """The schedule of a recorded step."""
    from hf_fsdp_tools.foresight.timeline import read_schedule

    if path is None:
        return None
    try:
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        trace = json.loads(text)
        return read_schedule(trace if isinstance(trace, dict) else {})
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(
            f"{path} cannot be read as a trace: {reason_of(error)}. Give a file that torch.profiler.profile(...)'s "
            "export_chrome_trace wrote."
        ) from None


_COLUMNS = (
    *(("forward", title) for title in ("gather", "compute", "exposed")),
    *(("backward", title) for title in ("gather", "compute", "reduce", "exposed")),
)
"""Pass and what happens in it, of each unit."""


def _table(schedule: "Schedule") -> list[str]:
    """A line per kind of unit, with mean times of one of them in one micro-step, and a line per other phase."""
    spent: dict[str, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    rest: dict[str, float] = defaultdict(float)
    computing = [bar for bar in schedule.bars if bar.operation == "compute"]
    for bar in schedule.bars:
        if (place := _PASSES.get(bar.phase)) and bar.track in ("communication", "compute"):
            kind = "gather" if bar.operation == "all_gather" else "reduce"
            kind = "compute" if bar.track == "compute" else kind
            spent[bar.unit][place, kind] += bar.end_s - bar.start_s
        elif bar.operation == "compute":
            rest[bar.phase] += bar.end_s - bar.start_s
    for start, end in schedule.exposed if computing else ():
        waiting = next((bar for bar in computing if bar.start_s >= end - 1e-9), computing[-1])
        if place := _PASSES.get(waiting.phase):
            spent[waiting.unit][place, "exposed"] += end - start
    groups: dict[str, list[str]] = defaultdict(list)
    for unit in spent:
        groups[re.sub(r"\d+", "#", unit)].append(unit)
    passes = (place if title == "gather" else "" for place, title in _COLUMNS)
    rows: list[tuple[str, ...]] = [("", *passes), ("unit", *(title for _, title in _COLUMNS))]
    for units in groups.values():
        means = (sum(spent[unit][column] for unit in units) / len(units) for column in _COLUMNS)
        rows.append((merge_names(units), *(_ms(mean) if mean else "" for mean in means)))
    rows += [(phase, "", _ms(seconds)) for phase, seconds in rest.items()]
    return table(rows, right=range(1, 1 + len(_COLUMNS)))


_PASSES = {"forward": "forward", "loss": "forward", "backward": "backward"}


def _ms(seconds: float) -> str:
    """Milliseconds with as many digits as tell something."""
    return f"{1e3 * seconds:,.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"
