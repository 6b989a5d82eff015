"""The command `hf-fsdp estimate`: what a training will need and how fast it will run, before a GPU is touched."""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.cli.launch import recipes
from hf_fsdp_tools.cli.options import (
    FLOAT8,
    add_link_options,
    add_machine_options,
    add_model,
    add_sharding_options,
    add_training_options,
    amount,
    described,
    examples,
    explicit_fields,
    prepare_model,
    progress,
)
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.scripting.recipes import RECIPES
from hf_fsdp_tools.text import show_bytes, table, within

if TYPE_CHECKING:
    from hf_fsdp_tools.foresight.memory import MemoryEstimate
    from hf_fsdp_tools.foresight.setup import TrainingSetup
    from hf_fsdp_tools.foresight.throughput import ThroughputEstimate


_WRAPPINGS = {"plan": "the plan", "root": "root-only", "none": "no wrapping"}
"""The wrappings that `--compare` lays next to each other, and their titles."""


@dataclass(frozen=True)
class Estimate:
    """The memory and the speed of one setting."""

    memory: "MemoryEstimate"
    time: "ThroughputEstimate"


def add_estimate(commands: Any) -> None:
    """Add the command `estimate`."""
    about = "predict memory, step time, tokens/s and cost of a training, without weights and without a GPU"
    epilog = examples(
        "estimate Qwen/Qwen3-8B --num-processes 8 --activation-checkpointing",
        "estimate Qwen/Qwen3-8B --gpu rtx-4090 --load-in-4bit --lora-r 16 --max-length 2048",
        "estimate meta-llama/Llama-3.1-70B --num-processes 64 --compare --tokens 1e9 --price 2.5",
    )
    parser = commands.add_parser("estimate", help=about, description=about, epilog=epilog)
    add_model(parser)
    machines = parser.add_argument_group("machines").add_argument
    add_machine_options(machines, processes="1", gpu="h100-80gb")
    add_link_options(machines)
    add_training_options(parser.add_argument_group("training").add_argument, recipes())
    shard = parser.add_argument_group("sharding").add_argument
    add_sharding_options(shard)
    about = "units by the plan (default), one for the whole model, or no FSDP"
    shard("--wrapping", choices=tuple(_WRAPPINGS), help=about)
    show = parser.add_argument_group("what is shown").add_argument
    show("--tokens", type=amount, metavar="N", help="tokens to train on, such as 1e9: show hours and cost too")
    show("--price", type=amount, metavar="X", help="price of one GPU for one hour, for the cost of --tokens")
    show("--explain", action="store_true", help="show what takes most memory at the peak: module and operator of each")
    show("--compare", action="store_true", help="compare the plan with root-only wrapping and no wrapping")
    parser.set_defaults(run=_estimate)


def add_gpus(commands: Any) -> None:
    """Add the command `gpus`."""
    about = "list the GPUs that estimates know, with their memory, speed and links"
    epilog = examples("gpus", "gpus h100")
    parser = commands.add_parser("gpus", help=about, description=about, epilog=epilog)
    parser.add_argument("name", metavar="NAME", nargs="?", help="part of a name (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of text")
    parser.set_defaults(run=_gpus)


def _gpus(options: argparse.Namespace) -> None:
    from hf_fsdp_tools.foresight.timing.hardware import GPUS

    known = [gpu for gpu in GPUS.values() if (options.name or "").lower() in gpu.name]
    if not known:
        raise ConfigError(f"no GPU of the table has {options.name!r} in its name; `hf-fsdp gpus` lists all")
    if options.json:
        print(json.dumps([asdict(gpu) for gpu in known], indent=1))
        return
    rows: list[tuple[str, ...]] = [("--gpu", "memory", "bf16", "bandwidth", "link", "network per GPU")]
    for gpu in known:
        link = f"{gpu.link} {gpu.link_bandwidth / 1e9:,.0f} GB/s"
        speed, memory = f"{gpu.bf16 / 1e12:,.0f} Tflop/s", f"{gpu.memory_bandwidth / 1e9:,.0f} GB/s"
        rows.append(
            (gpu.name, f"{gpu.memory_bytes / 2**30:.1f} GiB", speed, memory, link, f"{gpu.network_gbit_s:g} Gbit/s")
        )
    print("\n".join(table(rows, right=(1, 2, 3, 4, 5))))


def _estimate(options: argparse.Namespace) -> None:
    if options.price is not None and options.tokens is None:
        raise ConfigError("--price is for the cost of --tokens: say how many tokens are trained on")
    setup = described(options, explicit_fields(options), options.recipe)
    kwargs = prepare_model(options)
    from hf_fsdp_tools.foresight.recommend import what_fits

    estimates: dict[str, Estimate] = {}
    with progress() as say:
        for wrapping in dict.fromkeys([setup.wrapping, *(_WRAPPINGS if options.compare else ())]):
            say(f"a step of {options.model} without memory, {_WRAPPINGS[wrapping]} ...")
            estimates[wrapping] = _estimated(options, _wrapped(setup, wrapping), kwargs)
        first = estimates[setup.wrapping].memory
        whole_loss = more = None
        if options.recipe is None and setup.loss is None and first.setup.loss == "chunked":
            say("the same with full logits ...")
            whole_loss = _estimated(options, replace(setup, loss="full"), kwargs).memory
        if not (first.fits or options.json):
            say("looking for what fits ...")
            more = what_fits(options.model, first.setup, model_kwargs=kwargs)
    if options.json:
        print(json.dumps(_value(options, estimates), indent=1))
        return
    of_float8 = f"fp8: {FLOAT8}" if options.mixed_precision == "fp8" else ""
    of_recipe = RECIPES[options.recipe].note if options.recipe else ""
    notes = [*_notes(options.model, first, whole_loss, more), *filter(None, [of_float8, of_recipe])]
    print(within("\n".join([str(first), *notes]), 100))
    if options.explain:
        print("", *_explained(first), sep="\n")
    if options.compare:
        print("", *_table(estimates, options), sep="\n")
    else:
        time = estimates[setup.wrapping].time
        print(f"\n{within(time, 100)}")
        if options.tokens and not time.is_estimated:
            print("  nor hours and cost")
        elif options.tokens:
            hours = time.hours(options.tokens)
            cost = ""
            if options.price:
                cost = f" and cost {time.cost(options.tokens, options.price):,.0f} at {options.price:g} per GPU hour"
            print(f"  {options.tokens:,.0f} tokens take {hours:,.1f} hours{cost}")


def _estimated(options: argparse.Namespace, setup: "TrainingSetup", model_kwargs: dict[str, Any]) -> Estimate:
    from hf_fsdp_tools.foresight.forecast import step_of
    from hf_fsdp_tools.foresight.memory import memory_of
    from hf_fsdp_tools.foresight.throughput import throughput_of

    memory = memory_of(step_of(options.model, setup, **model_kwargs))
    return Estimate(memory, throughput_of(memory))


def _notes(
    name: str, memory: "MemoryEstimate", whole_loss: "MemoryEstimate | None", more: list[str] | None
) -> Iterator[str]:
    """Lines below an estimate of memory: how far it may be off, the other kind of loss, and what fits."""
    from hf_fsdp_tools.foresight.memory import MARGIN

    most = show_bytes(round(memory.total * (1 + MARGIN)))
    yield f"up to {most} on a real GPU: `hf-fsdp search` leaves {100 * MARGIN:.0f} % free for that"
    if whole_loss is not None:
        fits = "" if whole_loss.fits else ", which does not fit"
        total = show_bytes(whole_loss.total)
        yield f"chunked loss, as the recipes compute it; with full logits (--loss full) {total} in all{fits}"
    if more is not None:
        near = "; ".join(more) or "nothing near; take a smaller model"
        yield f"what fits: {near}. `hf-fsdp search {name}` finds the fastest setting"


def _explained(memory: "MemoryEstimate") -> list[str]:
    """What takes most memory at the peak, one row for tensors of equal size and origin."""
    rows: list[tuple[str, ...]] = [("largest at the peak", "of the GPU", "tensors", "unit", "made by")]
    for num_bytes, count, unit, source in memory.largest():
        share = f"{num_bytes / memory.limit_bytes:.1%}"
        each = f"{count} × {show_bytes(num_bytes // count)}"
        rows.append((show_bytes(num_bytes), share, each, unit or "(root)", source))
    return table(rows, right=(0, 1, 2))


def _wrapped(setup: "TrainingSetup", wrapping: str) -> "TrainingSetup":
    """The setup under another wrapping; without FSDP there are neither copies of shards nor offload."""
    if wrapping == "none" and setup.wrapping != "none":
        return replace(setup, wrapping="none", dp_replicate_size=1, offload_params=False)
    return replace(setup, wrapping=wrapping)  # type: ignore[arg-type]  # it is one of three


def _value(options: argparse.Namespace, estimates: Mapping[Any, Estimate]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for wrapping, each in estimates.items():
        value[wrapping] = {"memory": json.loads(each.memory.to_json()), "throughput": json.loads(each.time.to_json())}
        if options.explain:
            value[wrapping]["largest"] = each.memory.largest()
        if options.tokens:
            value[wrapping] |= {"tokens": options.tokens, "hours": each.time.hours(options.tokens)}
            if options.price:
                value[wrapping]["cost"] = each.time.cost(options.tokens, options.price)
    value = value if options.compare else next(iter(value.values()))
    digest = hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()
    return {"version": version("hf-fsdp-tools"), "model": options.model, "digest": digest, **value}


def _fits(each: Estimate) -> str:
    if not each.memory.fits:
        return "no"
    return "yes" if each.memory.spare_bytes >= 0 else "if expandable"


def _table(estimates: Mapping[Any, Estimate], options: argparse.Namespace) -> list[str]:
    """One row per figure, one column per wrapping."""
    every = list(estimates.values())
    kinds = dict.fromkeys(kind for each in every for kind in each.memory.at_peak)
    rows = [("", *(_WRAPPINGS[wrapping] for wrapping in estimates))]

    def row(title: str, shown: Callable[[Estimate], str], *, only_fitting: bool = False) -> None:
        rows.append((title, *("-" if only_fitting and not each.memory.fits else shown(each) for each in every)))

    row("memory per GPU", lambda each: show_bytes(each.memory.total))
    row(f"fits in {show_bytes(every[0].memory.limit_bytes)}", _fits)
    row("peak in", lambda each: each.memory.peak_phase)
    most = {kind: max(each.memory.at_peak.get(kind, 0) for each in every) for kind in kinds}
    shown = [kind for kind in kinds if most[kind] >= 0.001 * every[0].memory.limit_bytes]
    for kind in sorted(shown, key=lambda kind: -most[kind]):
        row(f"  {kind}", lambda each, kind=kind: show_bytes(each.memory.at_peak.get(kind, 0)))  # type: ignore[misc]
    row("step", lambda each: f"{each.time.step_seconds:,.2f} s", only_fitting=True)
    row("exposed communication", lambda each: f"{each.time.exposed_seconds:,.2f} s", only_fitting=True)
    row("tokens/s per GPU", lambda each: f"{each.time.tokens_per_second_per_gpu:,.0f}", only_fitting=True)
    row("MFU", lambda each: f"{100 * each.time.mfu:.1f} %", only_fitting=True)
    if options.tokens:
        row("hours", lambda each: f"{each.time.hours(options.tokens):,.1f}", only_fitting=True)
    if options.price:
        row("cost", lambda each: f"{each.time.cost(options.tokens, options.price):,.0f}", only_fitting=True)
    return table(rows, right=range(1, len(rows[0])))
