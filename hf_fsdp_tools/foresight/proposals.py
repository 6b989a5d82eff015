"""What is worth knowing beside a recommended setting: faster ones that a person has to ask for, and the nearest that
fits.

The search chooses what changes neither the sums of a training nor what it learns from: how it is sharded, what is
computed again, kept on the host, reduced when. All else is only proposed here.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hf_fsdp_tools.foresight.recommendation import Alternative, percent, setting_words, training_words
from hf_fsdp_tools.foresight.search import GAIN, Cost, Job, Point, Search, Space
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.hardware import GPUS
from hf_fsdp_tools.text import show_bytes

SHORTEST = 512
"""Tokens per sequence below which none are proposed. (assumed)"""

MOST_GPUS = 4096
"""GPUs up to which more are proposed. (assumed)"""

_EXPOSED = 0.1
"""Part of a step that waits for communication, above which gradients might be reduced less often. (assumed)"""

_MICRO_STEPS = 8  # How many are then proposed. (assumed)


def proposals(job: Job, search: Search, best: Point) -> Iterator[Alternative]:
    """Yield settings that are faster than the best of a search and fit, which a person has to ask for."""
    setup, cost = search.space.setup(best), search.cost(best)
    together: list[dict[str, Any]] = []
    for changes in _unasked(job, search, best):
        if any(getattr(setup, name) != changes[name] for name in changes.keys() & job.fixed):
            continue
        if (faster := _faster(job, setup, cost, changes)) is not None:
            yield faster
            together += [] if changes.keys() & {"wrapping", "load_in_4bit"} else [changes]
    if len(together) > 1:
        faster = _faster(job, setup, cost, {name: value for each in together for name, value in each.items()})
        yield from [] if faster is None else [faster]


def _unasked(job: Job, search: Search, best: Point) -> Iterator[dict[str, Any]]:
    setup, cost = search.space.setup(best), search.cost(best)
    exposed = 1 - cost.floor_seconds / cost.seconds
    if not setup.compile:
        yield {"compile": True}
    if exposed > 2 * GAIN and setup.precision == "bf16" and setup.reduce_dtype == "fp32":
        yield {"reduce_dtype": "bf16"}
    is_open = job.global_batch_size is None and "gradient_accumulation_steps" not in job.fixed
    if exposed > _EXPOSED and is_open and "sync_each_batch" not in job.fixed:
        yield {"gradient_accumulation_steps": _MICRO_STEPS, "sync_each_batch": False}
    is_lean = setup.activation_checkpointing and "activation_checkpointing" not in job.fixed
    if setup.lora_r is not None and not setup.load_in_4bit and is_lean:
        yield {"load_in_4bit": True, "activation_checkpointing": False}
    # What fits in the smallest part of a machine may fit on one GPU.
    most = max(search.space.values["dp_replicate_size"])
    if most > 1 and any(point.dp_replicate_size == most for point in search.fitting()):
        yield {"wrapping": "none", "dp_replicate_size": 1, "offload": False}


def _faster(job: Job, setup: TrainingSetup, cost: Cost, changes: dict[str, Any]) -> Alternative | None:
    """A setting with changes, if it fits and is faster per sequence."""
    other = replace(setup, **changes)
    price = job.priced(other)
    steps = other.gradient_accumulation_steps / setup.gradient_accumulation_steps
    gain = steps * cost.seconds / price.seconds - 1
    if price.num_bytes > job.usable_bytes or gain <= GAIN:
        return None
    return Alternative(
        setup=other,
        changes={name: value for name, value in changes.items() if value != getattr(setup, name)},
        peak_bytes=price.num_bytes,
        step_seconds=price.seconds,
        verdict=f"{percent(gain)} faster, takes {show_bytes(price.num_bytes)}",
    )


def nothing_fits(job: Job) -> str:
    """Why nothing fits, and the nearest that does."""
    setup, most = job.setup, show_bytes(job.usable_bytes)
    fitting = "; ".join(nearest(job))
    return (
        f"{job.model}, {training_words(setup)}, fits on {setup.num_gpus} x {setup.gpu} at no setting: it takes "
        f"{show_bytes(job.least_bytes())} per GPU at least, and {most} may be used ({percent(job.margin)} stays free). "
        + (f"What fits: {fitting}. " if fitting else "Take a smaller model. ")
        + "Expert and context parallelism are not in this package."
    )


_BY_PRICE = (
    "activation_checkpointing",
    "reshard_after_forward",
    "sync_each_batch",
    "dp_replicate_size",
    "batch_size",
    "offload",
)
"""Searched fields, those first that cost least speed."""


def nearest(job: Job) -> Iterator[str]:
    """Yield changes, each of which makes it fit."""
    setup = job.setup
    before, after = (Space.of(setup, fixed, None).leanest() for fixed in (job.fixed, ()))
    changes = [name for name in _BY_PRICE if getattr(before, name) != getattr(after, name)]
    for name in changes if len(changes) > 1 else ():
        if job.fits(fixed=job.fixed - {name}):
            yield setting_words(name, getattr(after, name))
            return
    if changes and job.fits(fixed=()):
        yield ", ".join(setting_words(name, getattr(after, name)) for name in changes)
        return
    if setup.loss == "full" and job.fits(loss="chunked"):
        yield "a chunked loss"
    if setup.reduce_dtype == "fp32" and setup.precision == "bf16" and job.fits(reduce_dtype="bf16"):
        yield "reduction in bf16"
    if setup.optimizer.startswith("adamw") and setup.optimizer != "adamw_8bit" and job.fits(optimizer="adamw_8bit"):
        yield "optimizer adamw_8bit"
    if setup.wrapping != "none":
        copies = 1 if "dp_replicate_size" not in job.fixed else setup.dp_replicate_size
        counts = (setup.num_gpus * 2**power for power in range(1, 13))
        enough = (
            count for count in counts if count <= MOST_GPUS and job.fits(num_gpus=count, dp_replicate_size=copies)
        )
        if count := next(enough, None):
            yield f"{count} GPUs"
    lengths = (setup.seq_len // 2**power for power in range(1, 20))
    if shorter := next((n for n in lengths if n >= SHORTEST and job.fits(seq_len=n)), None):
        yield f"sequences of {shorter:,} tokens"
    if setup.lora_r is None:
        for four_bits in (False, True):
            if job.fits(lora_r=16, load_in_4bit=four_bits):
                yield f"{'QLoRA' if four_bits else 'LoRA'} (r 16)"
                break
    elif not setup.load_in_4bit and job.fits(load_in_4bit=True):
        yield "QLoRA"
    needed = job.least_bytes() / (1 - job.margin)
    larger = sorted((gpu.memory_bytes, gpu.name) for gpu in GPUS.values() if gpu.memory_bytes >= needed)
    if larger:
        yield larger[0][1]
