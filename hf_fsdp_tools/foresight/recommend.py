"""Recommend the settings of a training: the fastest that fit, why, and what was rejected by how much."""

import json
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike, fspath
from textwrap import wrap
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.forecast import Source, step_of
from hf_fsdp_tools.foresight.memory import MARGIN, WASTED, memory_of
from hf_fsdp_tools.foresight.search import (
    DEGREES,
    EVERY,
    GAIN,
    ON_HOST,
    SEARCHED,
    Cost,
    Evaluate,
    Job,
    Point,
    Search,
    Space,
    normal,
)
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.throughput import TRAINER, throughput_of
from hf_fsdp_tools.foresight.timing.hardware import GPUS, gpu_named
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.modeling.configs import max_positions
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.text import show_bytes

EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
"""The variable with which segments of the allocator grow."""

_NOT_FORESEEN = "tokens/s are not foreseen: of this GPU no published training is known. They compare settings."

SHORTEST = 512  # Tokens per sequence below which none are proposed. (assumed)
MOST_GPUS = 4096  # GPUs up to which more are proposed. (assumed)
LONG = 32_768
"""Tokens per sequence from which rows are shared where that is faster, and not only where nothing else fits. (assumed:
attention takes most of a step from there on)"""
LONGEST = 131_072  # Tokens per sequence up to which the longest is looked for without the model's limit. (assumed)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The fastest setting that fits, and what speaks for it.

    Example:
        >>> best = recommend_config("checkpoint", num_gpus=2, gpu="h100-80gb", seq_len=32, global_batch_size=4)
        >>> isinstance(best, Recommendation), best.global_batch_size
        (True, 4)
    """

    model: str
    setup: TrainingSetup
    cost: Cost
    gpu_bytes: int
    margin: float  # Part of `gpu_bytes` that stays free at least
    whole_logits_bytes: int = 0
    """`cost.peak_bytes` of the same with whole logits; 0 where the loss was named, or is never made in pieces."""
    expandable_bytes: int = 0
    """`cost.peak_bytes` with PYTORCH_ALLOC_CONF=expandable_segments:True; 0 where that saves next to nothing."""
    reasons: Mapping[str, tuple[str, ...]]
    """Of each field that was searched or could have been, why it has its value: a line per value that was rejected,
    with the figures of the setting that has it."""
    proposals: tuple[str, ...] = ()
    """Faster settings that fit and are not chosen unasked, since they change how numbers are rounded or how the model
    is started."""
    estimated: int
    possible: int  # Settings among which was searched; the others follow from the estimated ones

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, over all GPUs."""
        return self.setup.batch_size * self.setup.gradient_accumulation_steps * self.setup.rows_at_once

    @property
    def tokens_per_step(self) -> int:
        """Tokens of these sequences, two of each pair."""
        return self.global_batch_size * self.setup.rows_per_example * self.setup.seq_len

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens_per_step / self.cost.step_seconds / self.setup.num_gpus

    def __str__(self) -> str:
        setup, cost = self.setup, self.cost
        lines = [
            f"{self.model}, {_training_words(setup)}, on {setup.num_gpus} x {setup.gpu}",
            *wrap(setup.words, 99, initial_indent="assumed   ", subsequent_indent=" " * 10),
            "",
        ]
        width = max(len(_TITLES[field]) for field in self.reasons)
        for field, reasons in self.reasons.items():
            head = f"{_TITLES[field]:<{width}}  {_value_words(getattr(setup, field)):>5}  "
            lines += [(" " * len(head) if at else head) + reason for at, reason in enumerate(reasons)]
        free, reserve = _percent(1 - cost.peak_bytes / self.gpu_bytes), _percent(self.margin)
        lines += [
            f"{'global batch':<{width}}  {self.global_batch_size:>5,}  {setup.row_words} x {setup.batch_size} x "
            f"{setup.gradient_accumulation_steps} steps, {self.tokens_per_step:,} tokens",
            "",
            f"memory    {show_bytes(cost.peak_bytes)} of {show_bytes(self.gpu_bytes)} per GPU, {free} free "
            f"(at least {reserve} for what estimates cannot know)",
        ]
        if cost.retries:
            lines.append(
                f"          full {cost.retries} times per step, for which the GPU stands still (in the speed below)"
            )
        if self.expandable_bytes:
            lines.append(f"          with {EXPANDABLE} {show_bytes(self.expandable_bytes)}")
        if whole := self.whole_logits_bytes:
            fits = "" if whole <= self.gpu_bytes * (1 - self.margin) else ", which does not fit"
            words = f"with whole logits {show_bytes(whole)}{fits}"
            lines.append(f"loss      chunked, as the recipes make it; {words}")
        if cost.host_bytes:
            processes = min(setup.gpus_per_node, setup.num_gpus)
            lines.append(f"on host   {show_bytes(cost.host_bytes * processes)} of memory per machine")
        rate = f"{self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        least, most = (f"{share * self.tokens_per_second_per_gpu:,.0f}" for share in TRAINER)
        of_trainer = "" if _NOT_FORESEEN in cost.notes else f"; with a Trainer {least} to {most}"
        return "\n".join(
            [
                *lines,
                f"speed     {cost.step_seconds:,.2f} s per step, {rate}, with full rows{of_trainer}",
                *(f"{'' if at else 'faster':<10}{each}" for at, each in enumerate(self.proposals)),
                *(f"note      {note}" for note in cost.notes),
                *([f"searched  {self.possible:,} settings by {self.estimated} estimates"] if self.possible > 1 else []),
            ]
        )

    def to_json(self) -> str:
        """All of it as JSON: fields as here, sizes in bytes."""
        derived = {name: getattr(self, name) for name in ("global_batch_size", "tokens_per_second_per_gpu")}
        return json.dumps(asdict(self) | derived, indent=1, default=str)


_TITLES = {
    "seq_len": "tokens per sequence",
    "batch_size": "micro-batch",
    "activation_checkpointing": "activation checkpointing",
    "activation_checkpointing_every_n_layers": "of every n-th block",
    "activation_checkpointing_offload": "blocks' inputs on the host",
    "reshard_after_forward": "reshard after forward",
    "sync_each_batch": "reduction in every micro-step",
    "dp_replicate_size": "copies of the model",
    "cp_size": "GPUs that share a row",
    "tp_size": "GPUs that share a layer",
    "ep_size": "GPUs that share experts",
    "offload": "offload",
    "compile": "torch.compile",
    "master_dtype": "weights in",
    "optimizer": "optimizer",
    "reduce_dtype": "reduction in",
    "wrapping": "wrapping",
    "dequantize": "dequantised base",
}


def _percent(part: float) -> str:
    """0.123 as "12 %", 0.004 as "0.4 %"."""
    return f"{100 * part:.{1 if abs(part) < 0.0095 else 0}f} %"


def _training_words(setup: TrainingSetup) -> str:
    """What is trained how, without what is searched: "LoRA (r 16), sequences of 4,096 tokens"."""
    kind = "full fine-tuning" if setup.lora_r is None else f"{'Q' * setup.load_in_4bit}LoRA (r {setup.lora_r})"
    return f"{kind}, sequences of {setup.seq_len:,} tokens"


def _value_words(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _words(changes: Mapping[str, Any]) -> str:
    """Fields with their values: "without activation checkpointing, micro-batch 2"."""
    return ", ".join(
        f"{'with' if value else 'without'} {_TITLES[field]}" if isinstance(value, bool) else f"{_TITLES[field]} {value}"
        for field, value in changes.items()
    )


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
    otherwise one micro-step), activation checkpointing (of all blocks or every n-th; with their inputs on the host
    where nothing fits without), `reshard_after_forward`, copies of the model over whole
    machines or parts of one (HSDP), `sync_each_batch` where micro-steps are accumulated; where nothing fits without, or
    GPUs wait for each other, GPUs that share experts (`ep_size`), and those of a machine that share layers (`tp_size`);
    for long rows, or where nothing fits, those that share rows (`cp_size`); and then CPU offload; for LoRA on a
    quantised checkpoint, whether the base stays as it is stored. LoRA or all parameters, precision, optimizer and
    sequence length (unless it is None) are never searched. Faster settings that change how numbers are rounded are
    named (`Recommendation.proposals`).

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
    if not 0 <= margin < 1:
        raise ConfigError(f"margin is {margin}: it is the part of the memory that stays free; use 0.1 for 10 %")
    kwargs, prices = dict(model_kwargs or {}), list[Cost]()
    evaluate, longest = _pricing(name_or_model, kwargs, margin), None
    if fixed.get("seq_len", 0) is None:
        del fixed["seq_len"]
        longest = _most_tokens(name_or_model, kwargs)

    def priced(one: TrainingSetup) -> Cost:
        say(f"estimating micro-batch {one.batch_size} of {one.seq_len:,} tokens")
        prices.append(evaluate(one))
        return prices[-1]

    given = frozenset(fixed) & frozenset(SEARCHED)
    job = Job(_model_name(name_or_model), TrainingSetup.of(setup, **fixed), given, margin, priced)
    staying = None if "dequantize" in given else _with_stored_base(job)
    ways = [job] if staying is None else [job, staying]
    if longest is not None:  # of powers of two and the longest, where the leanest setting fits
        most = _most_per_row(job)
        lengths = [length for power in range(30) if SHORTEST <= (length := 1 << power) < longest] + [longest]
        places = (bisect(lengths[1:], False, key=lambda n: not way.fits(seq_len=n, cp_size=most)) for way in ways)
        length = lengths[max(places)]
        ways = [replace(way, setup=replace(way.setup, seq_len=length)) for way in ways]
    job, search, sharing = _fastest_way(ways, global_batch_size)
    best: Point | None = None
    while (found := search.best()) not in (best, None):  # what is priced to be compared may turn out to be better
        best = found
        reasons = _reasons(search, best, job) | sharing
    if best is None:
        raise ConfigError(_nothing_fits(job))
    cost, chosen = search.cost(best), search.space.setup(best)
    whole = priced(replace(chosen, loss="full")).peak_bytes if cost.loss == "chunked" and chosen.loss is None else 0
    return Recommendation(
        model=job.model,
        setup=replace(chosen, loss=cost.loss or chosen.loss),
        cost=cost,
        gpu_bytes=job.gpu_bytes,
        margin=margin,
        whole_logits_bytes=whole,
        expandable_bytes=_expandable_bytes(job, chosen, cost),
        reasons=reasons,
        proposals=tuple(_proposals(job, search, best)),
        estimated=len(prices),
        possible=len(search.space),
    )


def _expandable_bytes(job: Job, setup: TrainingSetup, cost: Cost) -> int:
    """Memory with segments that grow; 0 where they save next to nothing, or are not for this GPU (AMD's)."""
    gpu = gpu_named(setup.gpu)
    if gpu.family.startswith("mi") or setup.expandable_segments:
        return 0
    num_bytes = job.priced(replace(setup, expandable_segments=True)).peak_bytes
    return num_bytes if cost.peak_bytes - num_bytes > WASTED * gpu.memory_bytes else 0


def _with_stored_base(job: Job) -> Job | None:
    """The job with a base that stays quantised; None where there is none, or it cannot stay."""
    if job.setup.lora_r is None or job.setup.load_in_4bit or not job.setup.dequantize:
        return None
    try:
        job.least_bytes(dequantize=False)
        return replace(job, setup=replace(job.setup, dequantize=False))
    except ConfigError:
        return None


def _fastest_way(ways: Sequence[Job], global_batch_size: int | None) -> tuple[Job, Search, dict[str, tuple[str, ...]]]:
    """The job whose base, dequantised or stored, is faster, or alone fits without offload; where nothing fits the one
    that takes less memory; with its search, and why it has its degrees and its base."""
    found = [(way, *_over_degrees(way, global_batch_size)) for way in ways]
    if len(found) == 1:
        return found[0]
    bests = [search.best() for _, search, _ in found]
    rates = [0.0 if best is None else search.rate(best) for (_, search, _), best in zip(found, bests, strict=True)]
    ranks = [0 if best is None else 1 if best.offload else 2 for best in bests]
    at = int(ranks[1] > ranks[0] or (ranks[1] == ranks[0] and rates[1] > rates[0] * (1 + GAIN)))
    if not any(ranks):
        return found[min(range(2), key=lambda each: ways[each].least_bytes())]
    other, line = 1 - at, "fits at no setting"
    if ranks[other]:
        change = rates[other] / rates[at] - 1
        speed = f"{_percent(abs(change))} {'faster' if change > 0 else 'slower'}"
        line = f"fits{' with offload' * (ranks[other] == 1)}, {'but ' * (change < -GAIN)}{speed}"
    job, search, reasons = found[at]
    return job, search, reasons | {"dequantize": (f"{_value_words(ways[other].setup.dequantize)}: {line}",)}


def _sizes(job: Job, name: str, setup: TrainingSetup) -> list[int]:
    """How many GPUs may share rows, layers or experts: powers of two, of rows and layers inside a machine."""
    own: int = getattr(setup, name)
    if own > 1 or name in job.fixed or setup.wrapping == "none":
        return [own]
    copies = setup.dp_replicate_size if "dp_replicate_size" in job.fixed else 1
    group, others = setup.num_gpus // copies, setup.dims.ranks_per_row
    most = min(setup.gpus_per_node, group) // others if name != "ep_size" else group
    if name != "ep_size" and setup.ep_size > 1:
        most = min(most, setup.ep_size // others)
    taken = 1 if name == "ep_size" else others
    powers = (2**power for power in range(1, most.bit_length()))
    return [1, *(size for size in powers if size * taken >= others and group % (size * taken) == 0)]


def _most_per_row(job: Job) -> int:
    """How many GPUs may share rows at most; 1 for a model that cannot."""
    try:
        job.fits(cp_size=(most := _sizes(job, "cp_size", job.setup)[-1]))
    except ConfigError:
        return job.setup.cp_size
    return most


def _over_degrees(job: Job, global_batch_size: int | None) -> tuple[Search, dict[str, tuple[str, ...]]]:
    """The search with the fastest degrees, or where nothing fits with those that take least memory; and why."""

    def search_of(setup: TrainingSetup, fixed: Collection[str] = (), **known: Any) -> Search:
        return Search(Space.of(setup, job.fixed | {*fixed}, global_batch_size), job.priced, job.usable_bytes, **known)

    reasons: dict[str, tuple[str, ...]] = {}
    before = first = search_of(job.setup)
    for name in DEGREES:
        if name in job.fixed or getattr(job.setup, name) > 1:
            reasons |= {name: ("as given",)} if getattr(job.setup, name) > 1 else {}
        elif _is_wanted(job, name, before):
            before, lines = _along(job, name, before, search_of)
            reasons |= {name: lines} if lines else {}
    if before is first or (before.best() is None and first.best() is not None):
        return first, reasons
    found = search_of(before.space.base, ("offload",))
    found.costs |= before.costs
    return found, reasons


def _is_wanted(job: Job, name: str, search: Search) -> bool:
    """Whether a degree may help: nothing fits but with offload; rows are long, or GPUs wait for each other."""
    best = search.best()
    if best is None or (best.offload and "offload" not in job.fixed):
        return True
    cost = search.cost(best)
    is_waiting = cost.step_seconds > cost.floor_seconds * (1 + GAIN)
    return search.space.base.seq_len >= LONG if name == "cp_size" else is_waiting


def _along(job: Job, name: str, before: Search, search_of: Callable[..., Search]) -> tuple[Search, tuple[str, ...]]:
    """The search with the best size of one degree, and why.

    Sizes are tried in turn, with micro-batches and copies anew and all else as before, until one is not faster; of
    `ep_size` one beyond a machine at least, since inside it no traffic between machines is saved.
    """
    best, base = before.best(), before.space.base
    is_last_resort = best is not None and best.offload and "offload" not in job.fixed
    leanest = before.space.leanest(min(before.space.values["offload"]))
    kept = (leanest if best is None or is_last_resort else best)._asdict()
    batch = kept.pop("batch_size")
    del kept["dp_replicate_size"]
    kept["offload"] = min(before.space.values["offload"])
    chosen, rate = before, 0.0 if best is None or is_last_resort else before.rate(best)
    least = before.cost(leanest).peak_bytes if best is None else 0
    found: dict[int, tuple[Search, Point]] = {} if best is None else {1: (before, best)}
    tried = list[int]()
    for size in _sizes(job, name, base)[1:]:
        try:
            setup = replace(base, **{name: size, **kept})
            shared = setup.dims.ranks_per_row // base.dims.ranks_per_row
            search = search_of(setup, kept, start=batch * shared, to_beat=rate)
            point = search.best()
        except ConfigError:
            break  # the model cannot share so, or not among so many
        tried.append(size)
        if point is None:
            if not rate and (lean := search.cost(search.space.leanest()).peak_bytes) < least:
                chosen, least = search, lean
            continue
        found[size] = search, point
        if search.rate(point) > rate * (1 + GAIN):
            chosen, rate, batch = search, search.rate(point), max(1, point.batch_size // shared)
        elif name != "ep_size" or size > base.gpus_per_node:
            break
        if name == "cp_size" and base.seq_len < LONG:
            break
    if not tried:
        return chosen, ()
    lines = []
    for size, (search, point) in found.items():
        if search is not chosen:
            slower = 1 - search.rate(point) / rate if rate else 0.0
            speed = "as fast" if slower < GAIN else f"but {_percent(slower)} slower"
            lines.append(f"{size}: fits{' with offload' * point.offload}, {speed}")
    lines += [f"{size}: fits at no setting" for size in (1, *tried) if size not in found]
    return chosen, tuple(lines) or ("nothing else to choose from",)


def _pricing(name_or_model: Source, model_kwargs: Mapping[str, Any], margin: float) -> Evaluate:
    """A function that prices a setting, in an allocator that has what the margin leaves of a GPU."""

    def priced(setup: TrainingSetup) -> Cost:
        usable = int(gpu_named(setup.gpu).memory_bytes * (1 - margin))
        memory = memory_of(step_of(name_or_model, setup, **model_kwargs), limit_bytes=usable)
        time = throughput_of(memory)
        waiting = time.parts["communication"] + time.parts["offload"]
        return Cost(
            peak_bytes=memory.total,
            step_seconds=time.step_seconds,
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
    return list(_nearest(Job(_model_name(name_or_model), setup, frozenset(SEARCHED), 0.0, priced)))


def _model_name(name_or_model: Source) -> str:
    """A hub name as it is, of a folder or `config.json` the folder's name, else the class."""
    if not isinstance(name_or_model, str | PathLike):
        return type(name_or_model).__name__
    path = local_path(name := fspath(name_or_model))
    return name if path is None else (path.parent if path.is_file() else path).resolve().name


def _most_tokens(name_or_model: Source, model_kwargs: Mapping[str, Any]) -> int:
    if isinstance(name_or_model, nn.Module):
        config = getattr(name_or_model, "config", None)
    else:
        config = load_config(name_or_model, **{key: model_kwargs[key] for key in model_kwargs if key != "auto_class"})
    return (max_positions(config) if isinstance(config, PreTrainedConfig) else None) or LONGEST


def _reasons(search: Search, best: Point, job: Job) -> dict[str, tuple[str, ...]]:
    """By field, what other values of it would have meant."""
    space = search.space
    batches = list(space.accumulation)
    place = batches.index(best.batch_size)
    alternatives = {"batch_size": batches[max(place - 1, 0) : place + 2], **space.values}
    if len(space.values["sync_each_batch"]) == 1 or space.accumulation[best.batch_size] == 1:
        del alternatives["sync_each_batch"]
    if not best.activation_checkpointing:
        del alternatives[EVERY], alternatives[ON_HOST]
    elif EVERY not in job.fixed:
        every = best.activation_checkpointing_every_n_layers
        alternatives[EVERY] = [n for n in alternatives[EVERY] if abs(n - every) <= 1]
    reasons = {}
    for field, values in alternatives.items():
        others = [other for other in values if other != getattr(best, field)]
        lines = tuple(_rejected(search, best, field, other, job) for other in others)
        reasons[field] = ("as given",) if field in job.fixed else lines or ("nothing else to choose from",)
    return reasons


def _rejected(search: Search, best: Point, field: str, value: Any, job: Job) -> str:
    """The figures of the recommended setting with another value of a field: of the micro-batches that are priced with
    it the fastest that fits; where none does, the smallest, its own among them."""
    point = normal(best._replace(**{field: value}))
    if field != "batch_size":
        alike = [one for one in search.costs if one._replace(batch_size=point.batch_size) == point]
        fitting = [one for one in alike if search.fits(one)]
        smallest = min([*alike, point], key=lambda one: one.batch_size)
        point = max(fitting, key=search.rate) if fitting else smallest
    values, before, cost = search.space.setup(point), search.space.setup(best), search.cost(point)
    changes = {name: new for name in Point._fields if (new := getattr(values, name)) != getattr(before, name)}
    more = _words({name: new for name, new in changes.items() if name not in (field, EVERY, ON_HOST)})
    num_bytes, slower = cost.peak_bytes, 1 - search.rate(point) / search.rate(best)
    verdict = f"{show_bytes(num_bytes)} of {show_bytes(job.gpu_bytes)}"
    if num_bytes > job.gpu_bytes:
        verdict += f", +{_percent(num_bytes / job.gpu_bytes - 1)}"
    elif num_bytes > job.usable_bytes:
        verdict += f", less than {_percent(job.margin)} free"
    else:
        speed = f"{_percent(abs(slower))} {'slower' if slower > 0 else 'faster'}"
        speed = speed if abs(slower) > 0.0005 else "as fast"
        verdict = f"fits, but {speed}" if slower > GAIN else f"fits, {speed}, takes {show_bytes(num_bytes)}"
    return f"{_value_words(value)}{f' ({more})' if more else ''}: {verdict}"


def _proposals(job: Job, search: Search, best: Point) -> Iterator[str]:
    """Yield settings that are faster than the best of a search and fit, which a person has to ask for."""
    setup, cost = search.space.setup(best), search.cost(best)
    # What a compiler makes of the rules that dequantise weights is not known.
    changes_to_try: list[dict[str, Any]] = [] if setup.compile or not setup.dequantize else [{"compile": True}]
    is_exposed = 1 - cost.floor_seconds / cost.step_seconds > 2 * GAIN
    if is_exposed and setup.precision == "bf16" and setup.reduce_dtype == "fp32":
        changes_to_try.append({"reduce_dtype": "bf16"})
    # What fits in the smallest part of a machine may fit on one GPU.
    most = max(search.space.values["dp_replicate_size"])
    if setup.dims.ranks_per_row == setup.ep_size == 1 < most and any(
        point.dp_replicate_size == most for point in search.fitting()
    ):
        changes_to_try.append({"wrapping": "none", "dp_replicate_size": 1, "offload": False})
    for changes in changes_to_try:
        if any(getattr(setup, name) != changes[name] for name in changes.keys() & job.fixed):
            continue
        price = job.priced(replace(setup, **changes))
        gain = cost.step_seconds / price.step_seconds - 1
        if price.peak_bytes <= job.usable_bytes and gain > GAIN:
            changed = {name: value for name, value in changes.items() if value != getattr(setup, name)}
            yield f"{_words(changed)}: {_percent(gain)} faster, takes {show_bytes(price.peak_bytes)}"
    if setup.offload and setup.lora_r is None and setup.precision == "bf16" and "offload" not in job.fixed:
        lean: dict[str, Any] = {"master_dtype": "bf16", "optimizer": "adamw_8bit"}
        values = {**search.space.values, "offload": (False,)}
        space = replace(search.space, base=replace(search.space.base, **lean), values=values)
        other = Search(space, job.priced, job.usable_bytes)
        if (point := other.best()) is not None and (gain := other.rate(point) / search.rate(best) - 1) > GAIN:
            words = _words({**lean, "offload": False, "batch_size": point.batch_size})
            yield f"{words}: {_percent(gain)} faster, takes {show_bytes(other.cost(point).peak_bytes)}"


def _nothing_fits(job: Job) -> str:
    """Why nothing fits, and the nearest that does."""
    setup, most, free = job.setup, show_bytes(job.usable_bytes), _percent(job.margin)
    fitting = "; ".join(_nearest(job))
    return (
        f"{job.model}, {_training_words(setup)}, fits on {setup.num_gpus} x {setup.gpu} at no setting: it takes "
        f"{show_bytes(job.least_bytes())} per GPU at least, and {most} may be used ({free} stays free). "
        + (f"What fits: {fitting}." if fitting else "Take a smaller model.")
    )


def _nearest(job: Job) -> Iterator[str]:
    """Yield changes, each of which makes it fit."""
    setup = job.setup
    before, after = (Space.of(setup, fixed, None).leanest() for fixed in (job.fixed, ()))
    cheapest_first = ("activation_checkpointing", "reshard_after_forward", "sync_each_batch", "dp_replicate_size")
    fields = (*cheapest_first, ON_HOST, "batch_size", "offload")
    changes = [name for name in fields if getattr(before, name) != getattr(after, name)]
    for name in changes if len(changes) > 1 else ():
        if job.fits(fixed=job.fixed - {name}):
            yield _words({name: getattr(after, name)})
            return
    if changes and job.fits(fixed=()):
        yield _words({name: getattr(after, name) for name in changes})
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
    adapted = replace(job, setup=replace(setup, lora_r=setup.lora_r or 16))
    rank = " (r 16)" * (setup.lora_r is None)
    if setup.lora_r is None and adapted.fits():
        yield f"LoRA{rank}"
    elif (staying := _with_stored_base(adapted)) is not None and staying.fits():
        yield f"LoRA{rank} of a base that stays quantised"
    elif setup.dequantize and not setup.load_in_4bit and adapted.fits(load_in_4bit=True):
        yield f"QLoRA{rank}"
    needed = job.least_bytes() / (1 - job.margin)
    larger = sorted((gpu.memory_bytes, gpu.name) for gpu in GPUS.values() if gpu.memory_bytes >= needed)
    if larger:
        yield larger[0][1]
