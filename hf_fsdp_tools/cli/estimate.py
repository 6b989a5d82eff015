"""The command `hf-fsdp estimate`: what a training will need and how fast it will run, before a GPU is touched."""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.common import add_model
from hf_fsdp_tools.cli.pictures import check_picture, draw_estimate
from hf_fsdp_tools.cli.training import (
    add_sharding_options,
    add_training_options,
    model_of,
    progress,
    setup_of,
)
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import show_bytes, table, within

if TYPE_CHECKING:
    from hf_fsdp_tools.foresight.memory import MemoryEstimate
    from hf_fsdp_tools.foresight.setup import TrainingSetup
    from hf_fsdp_tools.foresight.throughput import ThroughputEstimate


_WRAPPINGS = {"hybrid": "hybrid", "root": "root-only", "none": "no wrapping"}
"""What `--compare` lays beside each other, and how it is called."""


@dataclass(frozen=True)
class Estimate:
    """What one setting needs, and how fast it runs."""

    memory: "MemoryEstimate"
    time: "ThroughputEstimate"


def add_estimate(commands: Any) -> None:
    """Add the command `estimate`."""
    about = "predict memory, step time, tokens/s and cost of a training, without weights and without a GPU"
    parser = commands.add_parser("estimate", help=about, description=about)
    add_model(parser)
    add_training_options(parser)
    add_sharding_options(parser)
    show = parser.add_argument_group("what is shown").add_argument
    show("--tokens", type=float, metavar="N", help="also the hours and the cost of so many tokens, such as 1e9")
    show("--price", type=float, metavar="X", help="of one GPU for one hour, for the cost of --tokens")
    show(
        "--era", metavar="YEAR", help="of the software whose efficiencies are taken (default: the latest that is known)"
    )
    show("--explain", action="store_true", help="also what takes most memory at the peak: module and operator of each")
    show("--compare", action="store_true", help="lay the plan, root-only wrapping and no wrapping beside each other")
    show("--plot", type=Path, metavar="FILE", help="also draw it: .html (a page), .png, .svg or .pdf (the memory)")
    show("--json", action="store_true", help="print one JSON value instead of text")
    parser.set_defaults(run=_estimate)


def _estimate(options: argparse.Namespace) -> None:
    for name in ("tokens", "price"):
        if (number := getattr(options, name)) is not None and not 0 < number < math.inf:
            raise ConfigError(f"--{name} {number:g}: give a number above 0")
    if (options.price is not None) != (options.tokens is not None):
        raise ConfigError("--tokens and --price belong together: the tokens to be trained on, and a GPU's hour")
    check_picture(options.plot)
    setup, kwargs = setup_of(options), model_of(options)
    from hf_fsdp_tools.foresight.recommend import what_fits

    wrappings: list[str] = [setup.wrapping]
    if options.compare or (options.plot and options.plot.suffix == ".html"):
        wrappings += [name for name in _WRAPPINGS if name != setup.wrapping and (options.compare or name == "root")]
    found: dict[str, Estimate] = {}
    with progress() as say:
        for wrapping in wrappings:
            say(f"a step of {options.model} without memory, {_WRAPPINGS[wrapping]} ...")
            found[wrapping] = _estimated(options, _wrapped(setup, wrapping), kwargs)
        first = found[setup.wrapping].memory
        whole = more = None
        if setup.loss is None and first.setup.loss == "chunked":
            say("the same with whole logits ...")
            whole = _estimated(options, replace(setup, loss="full"), kwargs).memory
        if not (first.fits or options.json):
            say("looking for what fits ...")
            more = what_fits(options.model, first.setup, model_kwargs=kwargs)
        if options.plot:
            say("drawing ...")
            counts = _counts(setup) if options.plot.suffix == ".html" else ()
            scaled = {count: _estimated(options, replace(setup, num_gpus=count), kwargs) for count in counts}
            draw_estimate(options.plot, {_WRAPPINGS[name]: each for name, each in found.items()}, scaled)
    shown = dict(list(found.items())[: None if options.compare else 1])
    if options.json:
        print(json.dumps(_value(options, shown), indent=1))
        return
    print(within("\n".join([str(first), *_beside(first, whole, more)]), 100))
    if options.explain:
        print("", *_explained(first), sep="\n")
    if options.compare:
        print("", *_table(shown, options), sep="\n")
    else:
        time = shown[setup.wrapping].time
        print(f"\n{within(time, 100)}")
        if options.tokens:
            print(f"  {_cost_words(time, options)}")
    if options.plot:
        print(f"wrote {options.plot}")


def _estimated(options: argparse.Namespace, setup: "TrainingSetup", model_kwargs: dict[str, Any]) -> Estimate:
    from hf_fsdp_tools.foresight.forecast import step_of
    from hf_fsdp_tools.foresight.memory import memory_of
    from hf_fsdp_tools.foresight.throughput import throughput_of
    from hf_fsdp_tools.foresight.timing.efficiency import LATEST_ERA

    memory = memory_of(step_of(options.model, setup, **model_kwargs))
    return Estimate(memory, throughput_of(memory, era=options.era or LATEST_ERA))


def _beside(memory: "MemoryEstimate", whole: "MemoryEstimate | None", more: list[str] | None) -> Iterator[str]:
    """Lines below an estimate of memory: how far it may be off, the other kind of loss, and what fits."""
    from hf_fsdp_tools.foresight.recommend import MARGIN

    most = show_bytes(round(memory.total * (1 + MARGIN)))
    yield f"up to {most} on a real GPU: `hf-fsdp config` leaves {100 * MARGIN:.0f} % free for that"
    if whole is not None:
        fits = "" if whole.fits else ", which does not fit"
        yield (
            f"loss in pieces, as `hf-fsdp finetune` makes it; with whole logits (--loss full) {show_bytes(whole.total)}"
            f" in all{fits}"
        )
    if more is not None:
        found = "; ".join(more) or "nothing near; take a smaller model"
        yield f"what fits: {found}. `hf-fsdp config NAME` searches for the fastest setting"


def _explained(memory: "MemoryEstimate") -> list[str]:
    """What takes most memory at the peak, one row for tensors of equal size and origin."""
    rows: list[tuple[str, ...]] = [("largest at the peak", "of the GPU", "tensors", "unit", "made by")]
    for num_bytes, count, unit, source in memory.largest():
        share = f"{num_bytes / memory.limit_bytes:.1%}"
        each = f"{count} × {show_bytes(num_bytes // count)}"
        rows.append((show_bytes(num_bytes), share, each, unit or "(root)", source))
    return table(rows, right=(0, 1, 2))


def _counts(setup: "TrainingSetup") -> Iterator[int]:
    """Numbers of GPUs for the curve of scaling: doubled from one machine to 1,024 GPUs."""
    count = setup.gpus_per_node * setup.dp_replicate_size
    while count <= 1024:
        yield count
        count *= 2


def _wrapped(setup: "TrainingSetup", wrapping: str) -> "TrainingSetup":
    """The setup under another wrapping; without FSDP there are neither copies of shards nor offload."""
    if wrapping == "none" and setup.wrapping != "none":
        return replace(setup, wrapping="none", dp_replicate_size=1, offload=False)
    return replace(setup, wrapping=wrapping)  # type: ignore[arg-type]  # it is one of three


def _value(options: argparse.Namespace, found: Mapping[str, Estimate]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for wrapping, each in found.items():
        value[wrapping] = {"memory": json.loads(each.memory.to_json()), "throughput": json.loads(each.time.to_json())}
        if options.tokens:
            cost = {"hours": each.time.hours(options.tokens), "cost": each.time.cost(options.tokens, options.price)}
            value[wrapping] |= {"tokens": options.tokens, **cost}
    return value if options.compare else next(iter(value.values()))


def _cost_words(time: "ThroughputEstimate", options: argparse.Namespace) -> str:
    cost, hours = time.cost(options.tokens, options.price), time.hours(options.tokens)
    return (
        f"{options.tokens:,.0f} tokens take {hours:,.1f} hours and cost {cost:,.0f} at {options.price:g} per GPU hour"
    )


def _table(found: Mapping[str, Estimate], options: argparse.Namespace) -> list[str]:
    """One row per figure, one column per wrapping."""
    every = list(found.values())
    kinds = dict.fromkeys(kind for each in every for kind in each.memory.at_peak)
    rows = [("", *(_WRAPPINGS[wrapping] for wrapping in found))]

    def row(title: str, shown: Callable[[Estimate], str], *, only_fitting: bool = False) -> None:
        rows.append((title, *("-" if only_fitting and not each.memory.fits else shown(each) for each in every)))

    row("memory per GPU", lambda each: show_bytes(each.memory.total))
    row(f"fits in {show_bytes(every[0].memory.limit_bytes)}", lambda each: "yes" if each.memory.fits else "no")
    row("peak stands in", lambda each: each.memory.peak_phase)
    most = {kind: max(each.memory.at_peak.get(kind, 0) for each in every) for kind in kinds}
    shown = [kind for kind in kinds if most[kind] >= 0.001 * every[0].memory.limit_bytes]
    for kind in sorted(shown, key=lambda kind: -most[kind]):
        row(f"  {kind}", lambda each, kind=kind: show_bytes(each.memory.at_peak.get(kind, 0)))  # type: ignore[misc]
    row("step", lambda each: f"{each.time.step_seconds:,.2f} s", only_fitting=True)
    row("exposed communication", lambda each: f"{each.time.exposed_seconds:,.2f} s", only_fitting=True)
    row("tokens/s per GPU", lambda each: f"{each.time.tokens_per_second_per_gpu:,.0f}", only_fitting=True)
    row("MFU", lambda each: f"{100 * each.time.mfu:.1f} %", only_fitting=True)
    if options.tokens:
        row("cost", lambda each: f"{each.time.cost(options.tokens, options.price):,.0f}", only_fitting=True)
    return table(rows, right=range(1, len(rows[0])))
