"""The command `hf-fsdp schedule`: one step as FSDP runs it, unit by unit, with what communication is hidden."""

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.common import add_model, check_writable, write
from hf_fsdp_tools.cli.pictures import check_picture, draw_step
from hf_fsdp_tools.cli.training import (
    add_sharding_options,
    add_training_options,
    model_of,
    progress,
    setup_of,
)
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import merge_names, reason_of, table

if TYPE_CHECKING:
    from hf_fsdp_tools.foresight.streams import Bar, Schedule


def add_schedule(commands: Any) -> None:
    """Add the command `schedule`."""
    about = "show one step as FSDP runs it: per unit gathers, computation and reductions, hidden or exposed"
    parser = commands.add_parser("schedule", help=about, description=about)
    add_model(parser)
    add_training_options(parser)
    add_sharding_options(parser)
    show = parser.add_argument_group("what is shown").add_argument
    show("--output", type=Path, metavar="FILE", help="draw it: .png, .svg, .pdf or .html")
    about = "a real step to draw below it: what export_chrome_trace of torch.profiler wrote; needs --output"
    show("--measured", type=Path, metavar="TRACE", help=about)
    show("--trace", type=Path, metavar="FILE", help="write it as JSON for ui.perfetto.dev or chrome://tracing")
    show("--json", action="store_true", help="print the schedule as one JSON value instead of text")
    parser.set_defaults(run=_schedule)


def _schedule(options: argparse.Namespace) -> None:
    from hf_fsdp_tools.foresight.forecast import step_of
    from hf_fsdp_tools.foresight.streams import step_schedule
    from hf_fsdp_tools.foresight.throughput import straggling
    from hf_fsdp_tools.foresight.timing.efficiency import LATEST_ERA, efficiency_of
    from hf_fsdp_tools.foresight.timing.hardware import gpu_named
    from hf_fsdp_tools.foresight.timing.time import chrome_trace, simulate

    check_picture(options.output)
    check_writable(options.trace)
    measured = _measured(options.measured)
    if measured and not options.output:
        raise ConfigError("--measured draws a real step below the foreseen one: name the picture with --output.")
    setup, kwargs = setup_of(options), model_of(options)
    with progress() as say:
        say(f"a step of {options.model} without memory ...")
        forecast = step_of(options.model, setup, **kwargs)
        timing = simulate(forecast.step.events, setup)
        schedule = step_schedule(forecast.step.events, timing.spans)
        if options.output:
            say("drawing ...")
            draw_step(options.output, schedule, forecast, measured=measured)
    if options.trace:
        write(options.trace, json.dumps(chrome_trace(forecast.step.events, timing)))
    if options.json:
        print(schedule.to_json())
        return
    total, exposed = schedule.communication_seconds, schedule.exposed_seconds
    print(
        f"{forecast.model_class} on {setup.num_gpus} x {setup.gpu}, micro-batch {setup.batch_size} of "
        f"{setup.seq_len:,} tokens: {_ms(schedule.seconds)} ms\n"
        f"{_ms(exposed)} of {_ms(total)} ms of communication are exposed; times of one unit in ms"
    )
    if late := straggling(setup, efficiency_of(gpu_named(setup.gpu), LATEST_ERA)) * schedule.seconds:
        print(f"{_ms(late)} ms of waiting for the slowest GPU come on top in `hf-fsdp estimate`")
    print()
    print("\n".join(_table(schedule)))
    for written in filter(None, (options.output, options.trace)):
        print(f"wrote {written}")


def _measured(path: Path | None) -> "Schedule | None":
    """The schedule of a recorded step."""
    from hf_fsdp_tools.foresight.measured import read_schedule

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
    ("forward", "gather"),
    ("forward", "compute"),
    ("forward", "exposed"),
    ("backward", "gather"),
    ("backward", "compute"),
    ("backward", "reduce"),
    ("backward", "exposed"),
)
"""Pass and what happens in it, of each unit."""

_OVER = tuple(place if title == "gather" else "" for place, title in _COLUMNS)
"""The line above the titles."""


def _table(schedule: "Schedule") -> list[str]:
    """A line per kind of unit, with mean times of one of them in one micro-step, and a line per other phase."""
    spent: dict[str, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    others: dict[str, float] = defaultdict(float)
    computing = [bar for bar in schedule.bars if bar.operation == "compute"]
    for bar in schedule.bars:
        if (place := _PASSES.get(bar.phase)) and bar.track in _WORK:
            spent[bar.unit][place, _WORK[bar.track](bar)] += bar.end_s - bar.start_s
        elif bar.operation == "compute":
            others[bar.phase] += bar.end_s - bar.start_s
    for (start, end), bar in _followed(schedule.exposed, computing):
        if place := _PASSES.get(bar.phase):
            spent[bar.unit][place, "exposed"] += end - start
    groups: dict[str, list[str]] = defaultdict(list)
    for unit in spent:
        groups[re.sub(r"\d+", "#", unit)].append(unit)
    rows: list[tuple[str, ...]] = [("", *_OVER), ("unit", *(title for _, title in _COLUMNS))]
    for units in groups.values():
        means = (sum(spent[unit][column] for unit in units) / len(units) for column in _COLUMNS)
        rows.append((merge_names(units), *(_ms(mean) if mean else "" for mean in means)))
    rows += [(phase, "", _ms(seconds)) for phase, seconds in others.items()]
    return table(rows, right=range(1, 1 + len(_COLUMNS)))


_PASSES = {"forward": "forward", "loss": "forward", "backward": "backward"}
_WORK: dict[str, Callable[["Bar"], str]] = {
    "communication": lambda bar: "gather" if bar.operation == "all_gather" else "reduce",
    "compute": lambda bar: "compute",
}


def _followed(
    spans: Sequence[tuple[float, float]], bars: Sequence["Bar"]
) -> Iterator[tuple[tuple[float, float], "Bar"]]:
    """Each span with the bar that begins at its end: what waited."""
    at = 0
    for span in spans:
        while at < len(bars) - 1 and bars[at].start_s < span[1] - 1e-9:
            at += 1
        if bars:
            yield span, bars[at]


def _ms(seconds: float) -> str:
    """Milliseconds with as many digits as tell something."""
    return f"{1e3 * seconds:,.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"
