"""`hf-fsdp estimate --units`: one step as FSDP runs it, unit by unit, with what communication is hidden."""

import argparse
import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp_tools.cli.options import check_writable, prepare_model, progress, setup_of
from hf_fsdp_tools.cli.pictures import PICTURES, check_picture, setting_of
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import merge_names, reason_of, table

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
