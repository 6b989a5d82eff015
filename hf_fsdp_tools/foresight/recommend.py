"""Recommend the settings of a training: the fastest that fit, why, and what was rejected by how much."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.forecast import Source, step_of
from hf_fsdp_tools.foresight.memory import memory_of
from hf_fsdp_tools.foresight.recommendation import (
    Alternative,
    Choice,
    Recommendation,
    percent,
    setting_words,
    training_words,
)
from hf_fsdp_tools.foresight.search import GAIN, SEARCHED, Cost, Evaluate, Job, Point, Search, Space
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.throughput import throughput_of
from hf_fsdp_tools.foresight.timing.hardware import GPUS, gpu_named
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.modeling.configs import max_positions
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.text import show_bytes

MARGIN = 0.1
"""Part of a GPU's memory that a recommended setting leaves free: of 66 published peaks on real GPUs 62 stood within it
above what is foreseen (`docs/foresight.md`)."""

_NOT_FORESEEN = "tokens/s are not foreseen: of this GPU no published training is known. They compare settings."

LONGEST = 131_072
"""Tokens per sequence up to which the longest is looked for where a model has no limit. (assumed)"""


def recommend_config(
    name_or_model: Source,
    setup: TrainingSetup | None = None,
    *,
    global_batch_size: int | None = None,
    margin: float = MARGIN,
    model_kwargs: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
    **fixed: Any,
) -> Recommendation:
    """The fastest setting of a training that fits on its GPUs, with the reason for each choice; no weights, no GPU.

        print(recommend_config("meta-llama/Llama-3.1-8B", num_gpus=8, gpu="h100-80gb", global_batch_size=64))

    Searched are, unless they are fixed: micro-batch and accumulation (these together only with a global batch;
    otherwise one micro-step), activation checkpointing, `reshard_after_forward`, copies of the model over whole
    machines or parts of one (HSDP), `sync_each_batch` where micro-steps are accumulated, and, where nothing fits
    without, CPU offload. LoRA or all parameters, precision, optimizer and sequence length (unless it is None) are never
    searched. Faster settings that change how numbers are rounded are named (`Recommendation.proposals`).

    Args:
        name_or_model: hub name, folder, `config.json`, configuration, or a model on any device.
        setup: values of what is not searched; without it those of `TrainingSetup()`.
        global_batch_size: sequences per optimizer step over all GPUs; None leaves it open.
        margin: part of the GPU's memory that stays free (`MARGIN` says why).
        model_kwargs: as in `build_meta_model` (`auto_class`, `revision`, …).
        say: is told, before each estimate, what is estimated.
        fixed: fields of `TrainingSetup` that stay as they are given here. `seq_len=None` looks for the longest sequence
            that fits at any setting, up to the model's positions.

    Any rank may call; nothing is communicated, and no accelerator is used.

    Raises:
        ConfigError: nothing fits (the message names the nearest that does), or a value cannot be.
        CheckpointError, WrapPlanError: the model cannot be built or planned.

    Example:
        >>> print(recommend_config("checkpoint", num_gpus=2, gpu="h100-80gb", seq_len=32, global_batch_size=4))
        checkpoint, ...
    """
    kwargs = dict(model_kwargs or {})
    longest = None
    if fixed.get("seq_len", 0) is None:
        del fixed["seq_len"]
        longest = _most_tokens(name_or_model, kwargs)

    return choose(
        _model_name(name_or_model),
        TrainingSetup.of(setup, **fixed),
        _pricing(name_or_model, kwargs, margin),
        fixed=set(fixed) & set(SEARCHED),
        global_batch_size=global_batch_size,
        longest=longest,
        margin=margin,
        say=say,
    )


def _pricing(name_or_model: Source, model_kwargs: Mapping[str, Any], margin: float) -> Evaluate:
    """A function that prices a setting, in an allocator that has what the margin leaves of a GPU."""

    def priced(setup: TrainingSetup) -> Cost:
        usable = int(gpu_named(setup.gpu).memory_bytes * (1 - margin))
        memory = memory_of(step_of(name_or_model, setup, **model_kwargs), limit_bytes=usable)
        time = throughput_of(memory)
        waiting = time.parts["communication"] + time.parts["offload"]
        return Cost(
            num_bytes=memory.total,
            seconds=time.step_seconds,
            floor_seconds=time.step_seconds - waiting,
            host_bytes=memory.host_bytes,
            retries=len(memory.retried),
            loss=memory.setup.loss,
            notes=memory.notes + (() if time.is_foreseen else (_NOT_FORESEEN,)),
        )

    return priced


def what_fits(
    name_or_model: Source, setup: TrainingSetup, *, model_kwargs: Mapping[str, Any] | None = None
) -> list[str]:
    """Changes, each of which makes a training fit that does not, in words; [] where none is known."""
    priced = _pricing(name_or_model, model_kwargs or {}, 0.0)
    return list(_nearest(Job(_model_name(name_or_model), setup, frozenset(SEARCHED), None, 0.0, priced)))


def _model_name(name_or_model: Source) -> str:
    """A hub name as it is, of a folder or `config.json` the folder's name, else the class."""
    if not isinstance(name_or_model, str | PathLike):
        return type(name_or_model).__name__
    path = local_path(name := fspath(name_or_model))
    if path is None:
        return name
    path = path.resolve()
    return path.parent.name if path.is_file() else path.name


def _most_tokens(name_or_model: Source, model_kwargs: Mapping[str, Any]) -> int:
    if isinstance(name_or_model, nn.Module):
        config = getattr(name_or_model, "config", None)
    else:
        config = load_config(name_or_model, **{key: model_kwargs[key] for key in model_kwargs if key != "auto_class"})
    return (max_positions(config) if isinstance(config, PreTrainedConfig) else None) or LONGEST


def choose(
    model: str,
    setup: TrainingSetup,
    evaluate: Evaluate,
    *,
    fixed: Collection[str] = (),
    global_batch_size: int | None = None,
    longest: int | None = None,
    margin: float = MARGIN,
    say: Callable[[str], None] = lambda text: None,
) -> Recommendation:
    """The fastest setting that fits, by any function that prices settings."""
    if not 0 <= margin < 1:
        raise ConfigError(f"margin is {margin}: it is the part of the memory that stays free; use 0.1 for 10 %")
    prices: list[Cost] = []

    def priced(one: TrainingSetup) -> Cost:
        say(f"estimating micro-batch {one.batch_size} of {one.seq_len:,} tokens")
        prices.append(evaluate(one))
        return prices[-1]

    job = Job(model, setup, frozenset(fixed), global_batch_size, margin, priced)
    if longest is not None:
        job = replace(job, setup=replace(setup, seq_len=_longest_that_fits(job, longest)))
    search = Search(Space.of(job.setup, job.fixed, global_batch_size), priced, job.usable_bytes)
    best = search.best()
    if best is None:
        raise ConfigError(_nothing_fits(job))
    choices = tuple(_choices(search, best, job))
    # What was priced to be compared may turn out to be better.
    while (better := search.best()) not in (best, None):
        best = better
        choices = tuple(_choices(search, best, job))
    cost, chosen = search.cost(best), search.space.setup(best)
    whole = priced(replace(chosen, loss="full")).num_bytes if cost.loss == "chunked" and chosen.loss is None else 0
    return Recommendation(
        model=model,
        setup=replace(chosen, loss=cost.loss or chosen.loss),
        peak_bytes=cost.num_bytes,
        gpu_bytes=job.gpu_bytes,
        margin=margin,
        host_bytes=cost.host_bytes,
        step_seconds=cost.seconds,
        retries=cost.retries,
        whole_logits_bytes=whole,
        choices=choices,
        proposals=tuple(_proposals(job, search, best)),
        notes=cost.notes,
        estimated=len(prices),
        possible=len(search.space),
    )


def _longest_that_fits(job: Job, most: int) -> int:
    """The longest sequence that fits at some setting, of powers of two and `most`; the shortest of these if none."""
    lengths = [length for power in range(30) if SHORTEST <= (length := 1 << power) < most] + [most]
    low, high = 0, len(lengths)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if job.fits(seq_len=lengths[middle]) else (low, middle)
    return lengths[low]


def _choices(search: Search, best: Point, job: Job) -> Iterator[Choice]:
    """Each field, its value, and what other values of it would have meant."""
    space = search.space
    batches = list(space.accumulation)
    place = batches.index(best.batch_size)
    alternatives = {"batch_size": batches[max(place - 1, 0) : place + 2], **space.values}
    if len(space.values["sync_each_batch"]) == 1 or space.accumulation[best.batch_size] == 1:
        del alternatives["sync_each_batch"]
    for field, values in alternatives.items():
        value = getattr(best, field)
        rejected = [_alternative(search, best, field, other, job) for other in values if other != value]
        yield Choice(field=field, value=value, fixed=field in job.fixed, rejected=tuple(rejected))


def _alternative(search: Search, best: Point, field: str, value: Any, job: Job) -> Alternative:
    """The recommended setting with another value of a field: of the micro-batches that are priced with it the fastest
    that fits; where none does, the smallest, its own among them."""
    point = best._replace(**{field: value})
    if field != "batch_size":
        alike = [one for one in search.costs if one._replace(batch_size=point.batch_size) == point]
        fitting = [one for one in alike if search.fits(one)]
        smallest = min([*alike, point], key=lambda one: one.batch_size)
        point = max(fitting, key=search.rate) if fitting else smallest
    values, before = search.space.setup(point), search.space.setup(best)
    names = dict.fromkeys((field, *Point._fields))
    cost = search.cost(point)
    return Alternative(
        setup=values,
        changes={name: new for name in names if (new := getattr(values, name)) != getattr(before, name)},
        peak_bytes=cost.num_bytes,
        step_seconds=cost.seconds,
        verdict=_verdict(cost.num_bytes, 1 - search.rate(point) / search.rate(best), job),
    )


def _verdict(num_bytes: int, slower: float, job: Job) -> str:
    of = f"{show_bytes(num_bytes)} of {show_bytes(job.gpu_bytes)}"
    if num_bytes > job.gpu_bytes:
        return f"{of}, +{percent(num_bytes / job.gpu_bytes - 1)}"
    if num_bytes > job.usable_bytes:
        return f"{of}, less than {percent(job.margin)} free"
    speed = f"{percent(abs(slower))} {'slower' if slower > 0 else 'faster'}"
    if slower > GAIN:
        return f"fits, but {speed}"
    return f"fits, {speed if abs(slower) > 0.0005 else 'as fast'}, takes {show_bytes(num_bytes)}"


SHORTEST = 512
"""Tokens per sequence below which none are proposed. (assumed)"""

MOST_GPUS = 4096
"""GPUs up to which more are proposed. (assumed)"""


def _proposals(job: Job, search: Search, best: Point) -> Iterator[Alternative]:
    """Yield settings that are faster than the best of a search and fit, which a person has to ask for."""
    setup, cost = search.space.setup(best), search.cost(best)
    changes_to_try: list[dict[str, Any]] = [] if setup.compile else [{"compile": True}]
    is_exposed = 1 - cost.floor_seconds / cost.seconds > 2 * GAIN
    if is_exposed and setup.precision == "bf16" and setup.reduce_dtype == "fp32":
        changes_to_try.append({"reduce_dtype": "bf16"})
    # What fits in the smallest part of a machine may fit on one GPU.
    most = max(search.space.values["dp_replicate_size"])
    if most > 1 and any(point.dp_replicate_size == most for point in search.fitting()):
        changes_to_try.append({"wrapping": "none", "dp_replicate_size": 1, "offload": False})
    for changes in changes_to_try:
        if any(getattr(setup, name) != changes[name] for name in changes.keys() & job.fixed):
            continue
        price = job.priced(other := replace(setup, **changes))
        gain = cost.seconds / price.seconds - 1
        if price.num_bytes <= job.usable_bytes and gain > GAIN:
            yield Alternative(
                setup=other,
                changes={name: value for name, value in changes.items() if value != getattr(setup, name)},
                peak_bytes=price.num_bytes,
                step_seconds=price.seconds,
                verdict=f"{percent(gain)} faster, takes {show_bytes(price.num_bytes)}",
            )


def _nothing_fits(job: Job) -> str:
    """Why nothing fits, and the nearest that does."""
    setup, most = job.setup, show_bytes(job.usable_bytes)
    fitting = "; ".join(_nearest(job))
    return (
        f"{job.model}, {training_words(setup)}, fits on {setup.num_gpus} x {setup.gpu} at no setting: it takes "
        f"{show_bytes(job.least_bytes())} per GPU at least, and {most} may be used ({percent(job.margin)} stays free). "
        + (f"What fits: {fitting}. " if fitting else "Take a smaller model. ")
        + "Expert and context parallelism are not in this package."
    )


def _nearest(job: Job) -> Iterator[str]:
    """Yield changes, each of which makes it fit."""
    setup = job.setup
    before, after = (Space.of(setup, fixed, None).leanest() for fixed in (job.fixed, ()))
    cheapest_first = ("activation_checkpointing", "reshard_after_forward", "sync_each_batch", "dp_replicate_size")
    fields = (*cheapest_first, "batch_size", "offload")
    changes = [name for name in fields if getattr(before, name) != getattr(after, name)]
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
