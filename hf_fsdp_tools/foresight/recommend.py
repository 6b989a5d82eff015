"""Recommend the settings of a training: the fastest that fit, why, and what was rejected by how much."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
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
from hf_fsdp_tools.foresight.search import GAIN, Cost, Evaluate, Point, Search, Space
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.throughput import throughput_of
from hf_fsdp_tools.foresight.timing.hardware import GPUS, gpu_named
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.modeling.configs import max_positions
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.text import show_bytes

__all__ = ["MARGIN", "SEARCHED", "choose", "model_name", "recommend_config"]

MARGIN = 0.1
"""Part of a GPU's memory that a recommended setting leaves free: estimates of memory may be 8 % off at worst, and
fragments, other processes and longer batches than the usual take some. (assumed)"""

SEARCHED = ("batch_size", "gradient_accumulation_steps", *Point._fields[1:])
"""Fields of `TrainingSetup` that are chosen where they are not given."""

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Micro-batches that are tried where no global batch is given. (assumed)"""

SHORTEST = 512
"""Tokens per sequence below which none are proposed. (assumed)"""

LONGEST = 131_072
"""Tokens per sequence up to which the longest is looked for where a model has no limit. (assumed)"""

MOST_GPUS = 4096
"""GPUs up to which more are proposed. (assumed)"""


def recommend_config(
    name_or_model: Source,
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
    machines (HSDP), and, where nothing fits without, CPU offload. What the model learns from is as told and never
    searched: LoRA or all parameters, precision, optimizer, sequence length (unless it is None).

    Args:
        name_or_model: hub name, folder, `config.json`, configuration, or a model on any device.
        global_batch_size: sequences per optimizer step over all GPUs; None leaves it open.
        margin: part of the GPU's memory that stays free (`MARGIN` says why).
        model_kwargs: as in `build_meta_model` (`auto_class`, `revision`, …).
        say: is told, before each estimate, what is estimated.
        fixed: fields of `TrainingSetup`. `seq_len=None` looks for the longest sequence that fits at any setting, up to
            the model's positions.

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

    def priced(setup: TrainingSetup) -> Cost:
        memory = memory_of(step_of(name_or_model, setup, **kwargs))
        time = throughput_of(memory)
        waiting = time.parts["communication"] + time.parts["offload"]
        return Cost(memory.total, time.step_seconds, time.step_seconds - waiting, memory.host_bytes)

    return choose(
        model_name(name_or_model),
        TrainingSetup.of(**fixed),
        priced,
        given=set(fixed) & set(SEARCHED),
        global_batch_size=global_batch_size,
        longest=longest,
        margin=margin,
        say=say,
    )


def model_name(name_or_model: Source) -> str:
    """A hub name as it is, of a folder or `config.json` the folder's name, else the class."""
    if not isinstance(name_or_model, str | PathLike):
        return type(name_or_model).__name__
    path = local_path(name := fspath(name_or_model))
    if path is None:
        return name
    path = path.resolve()
    return path.parent.name if path.is_file() else path.name


def _most_tokens(name_or_model: Source, model_kwargs: Mapping[str, Any]) -> int:
    """The longest sequence that is looked for."""
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
    given: Collection[str] = (),
    global_batch_size: int | None = None,
    longest: int | None = None,
    margin: float = MARGIN,
    say: Callable[[str], None] = lambda text: None,
) -> Recommendation:
    """The fastest setting that fits, by any function that prices settings.

    Args:
        model: its name, for messages.
        setup: values of all that is given, and of what is not searched.
        evaluate: prices a setting.
        given: those of `SEARCHED` that stay as in `setup`.
        global_batch_size: sequences per optimizer step over all GPUs; None leaves it open.
        longest: tokens up to which the longest sequence that fits is looked for; None takes `setup.seq_len`.
        margin: part of the GPU's memory that stays free.
        say: is told, before each estimate, what is estimated.

    Raises:
        ConfigError: nothing fits (the message names the nearest that does), or the numbers contradict each other.
    """
    if not 0 <= margin < 1:
        raise ConfigError(f"margin is {margin}: it is the part of the memory that stays free; use 0.1 for 10 %")
    prices: list[Cost] = []

    def priced(one: TrainingSetup) -> Cost:
        say(f"estimating micro-batch {one.batch_size} of {one.seq_len:,} tokens")
        prices.append(evaluate(one))
        return prices[-1]

    job = _Job(model, setup, frozenset(given), global_batch_size, gpu_named(setup.gpu).memory_bytes, margin, priced)
    if longest is not None:
        job = replace(job, setup=replace(setup, seq_len=_longest_that_fits(job, longest)))
    search = Search(_space(job.setup, job.given, global_batch_size), priced, job.usable_bytes)
    best = search.best()
    if best is None:
        raise ConfigError(_nothing_fits(job))
    choices = tuple(_choices(search, best, job))
    # What was priced to be compared may turn out to be better.
    while (better := search.best()) not in (best, None):
        best = better
        choices = tuple(_choices(search, best, job))
    cost = search.cost(best)
    return Recommendation(
        model=model,
        setup=search.space.setup(best),
        peak_bytes=cost.num_bytes,
        gpu_bytes=job.gpu_bytes,
        margin=margin,
        host_bytes=cost.host_bytes,
        step_seconds=cost.seconds,
        choices=choices,
        estimated=len(prices),
        possible=len(search.space),
    )


@dataclass(frozen=True)
class _Job:
    """What is asked for."""

    model: str
    setup: TrainingSetup
    given: frozenset[str]
    global_batch_size: int | None
    gpu_bytes: int
    margin: float
    priced: Evaluate

    @property
    def usable_bytes(self) -> int:
        return int(self.gpu_bytes * (1 - self.margin))

    def least_bytes(self, *, given: Collection[str] | None = None, **changes: Any) -> int:
        """Memory of the leanest setting, with other values of what is not searched."""
        space = _space(replace(self.setup, **changes), self.given if given is None else given, None)
        leanest = space.setup(space.leanest(max(space.offload)))
        return self.priced(leanest).num_bytes

    def fits(self, **changes: Any) -> bool:
        """Whether the leanest setting does."""
        return self.least_bytes(**changes) <= self.usable_bytes


def _space(setup: TrainingSetup, given: Collection[str], global_batch_size: int | None) -> Space:
    """The settings to choose from."""

    def free(field: str, *values: Any) -> tuple[Any, ...]:
        return (getattr(setup, field),) if field in given else values

    sharded = setup.num_gpus > 1 and setup.wrapping != "none"
    nodes = setup.num_gpus // setup.gpus_per_node if setup.num_gpus % setup.gpus_per_node == 0 else 0
    # A copy takes whole machines, one or few of them, so that gathers stay on fast links.
    copies = [nodes // size for size in (4, 2, 1) if nodes > size and nodes % size == 0]
    return Space(
        base=setup,
        accumulation=_batches(setup, given, global_batch_size),
        activation_checkpointing=free("activation_checkpointing", False, True),
        offload=free("offload", *((False, True) if setup.wrapping != "none" else (False,))),
        reshard_after_forward=free("reshard_after_forward", *((True, False) if sharded else (True,))),
        replicas=free("dp_replicate_size", 1, *(copies if sharded else ())),
    )


def _batches(setup: TrainingSetup, given: Collection[str], global_batch_size: int | None) -> dict[int, int]:
    """Micro-batches, and the accumulation steps that go with each.

    Raises:
        ConfigError: the global batch cannot be divided so.
    """
    batch = setup.batch_size if "batch_size" in given else None
    steps = setup.gradient_accumulation_steps if "gradient_accumulation_steps" in given else None
    if global_batch_size is None:
        return dict.fromkeys(BATCHES if batch is None else (batch,), steps or 1)
    divisor = setup.num_gpus * (batch or 1) * (steps or 1)
    rest, over = divmod(global_batch_size, divisor)
    if over or rest < 1 or (batch and steps and rest > 1):
        factors = [f"{setup.num_gpus} GPUs", *[f"micro-batch {batch}"] * bool(batch), *[f"{steps} steps"] * bool(steps)]
        near = {max(rest, 1) * divisor, max(rest + 1, 1) * divisor} if not (batch and steps) else {divisor}
        raise ConfigError(
            f"a global batch of {global_batch_size} sequences cannot be made by {' x '.join(factors)}; use "
            f"{' or '.join(map(str, sorted(near)))}"
        )
    if batch:
        return {batch: steps or rest}
    return {rest: steps} if steps else {size: rest // size for size in range(1, rest + 1) if rest % size == 0}


def _longest_that_fits(job: _Job, most: int) -> int:
    """The longest sequence that fits at some setting, of powers of two and `most`; the shortest of these if none."""
    lengths = [length for power in range(30) if SHORTEST <= (length := 1 << power) < most] + [most]
    low, high = 0, len(lengths)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if job.fits(seq_len=lengths[middle]) else (low, middle)
    return lengths[low]


def _choices(search: Search, best: Point, job: _Job) -> Iterator[Choice]:
    """Each field, its value, and what other values of it would have meant."""
    space = search.space
    batches = list(space.accumulation)
    place = batches.index(best.batch_size)
    others = {
        "batch_size": batches[max(place - 1, 0) : place + 2],
        "activation_checkpointing": space.activation_checkpointing,
        "reshard_after_forward": space.reshard_after_forward,
        "dp_replicate_size": space.replicas,
        "offload": space.offload,
    }
    for field, values in others.items():
        value = getattr(best, field)
        rejected = [_alternative(search, best, field, other, job) for other in values if other != value]
        yield Choice(field=field, value=value, given=field in job.given, rejected=tuple(rejected))


def _alternative(search: Search, best: Point, field: str, value: Any, job: _Job) -> Alternative:
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


def _verdict(num_bytes: int, slower: float, job: _Job) -> str:
    of = f"{show_bytes(num_bytes)} of {show_bytes(job.gpu_bytes)}"
    if num_bytes > job.gpu_bytes:
        return f"{of}, +{percent(num_bytes / job.gpu_bytes - 1)}"
    if num_bytes > job.usable_bytes:
        return f"{of}, less than {percent(job.margin)} free"
    speed = f"{percent(abs(slower))} {'slower' if slower > 0 else 'faster'}"
    if slower > GAIN:
        return f"fits, but {speed}"
    return f"fits, {speed if abs(slower) > 0.0005 else 'as fast'}, takes {show_bytes(num_bytes)}"


def _nothing_fits(job: _Job) -> str:
    """Why nothing fits, and the nearest that does."""
    setup, most = job.setup, show_bytes(job.usable_bytes)
    found = "; ".join(_nearest(job))
    return (
        f"{job.model}, {training_words(setup)}, fits on {setup.num_gpus} x {setup.gpu} at no setting: it takes "
        f"{show_bytes(job.least_bytes())} per GPU at least, and {most} may be used ({percent(job.margin)} stays free). "
        + (f"What fits: {found}." if found else "Take a smaller model.")
    )


def _nearest(job: _Job) -> Iterator[str]:
    """Changes, each of which makes it fit."""
    setup = job.setup
    fixed = _space(setup, job.given, None)
    free = _space(setup, (), None)
    before, after = fixed.leanest(max(fixed.offload)), free.leanest(max(free.offload))
    if before != after and job.fits(given=()):
        changes = [name for name in Point._fields if getattr(before, name) != getattr(after, name)]
        yield ", ".join(setting_words(name, getattr(after, name)) for name in changes)
        return
    if setup.loss == "full" and job.fits(loss="chunked"):
        yield "a chunked loss"
    if setup.wrapping != "none":
        copies = 1 if "dp_replicate_size" not in job.given else setup.dp_replicate_size
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
