"""Recommend the settings of a training: the fastest that fit, what is next best, what would break them."""

import json
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from os import PathLike, fspath
from textwrap import wrap
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.forecast import Source, step_of
from hf_fsdp_tools.foresight.memory import MARGIN, WASTED, memory_of
from hf_fsdp_tools.foresight.search import EVERY, GAIN, ON_HOST, SEARCHED, Cost, Evaluate, Priced, Search, rate
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.throughput import TRAINER, throughput_of
from hf_fsdp_tools.foresight.timing.hardware import GPUS, gpu_named
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.modeling.configs import max_positions
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.text import show_bytes

EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
"""The variable with which segments of the allocator grow."""

SHORTEST = 512  # Tokens per sequence below which none are proposed. (assumed)
MOST_GPUS = 4096  # GPUs up to which more are proposed. (assumed)
LONGEST = 131_072  # Tokens per sequence up to which the longest is looked for without the model's limit. (assumed)
MOST_TOKENS = 2_000_000  # In an optimizer step, above which the output warns. (few fine-tunings take a tenth of it)


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
    """Why each field that was searched has its value: a line per value that was rejected, with its figures."""
    next_best: str  # The fastest that fits of those that do more than take another micro-batch, with its figures
    breaks: str  # What would not fit any more, or not be known
    proposals: tuple[str, ...] = ()
    """Faster settings that fit and are not chosen unasked, since they change how numbers are rounded or compiled."""
    estimated: int

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
        width = max(map(len, _TITLES.values()))
        for field, reasons in self.reasons.items():
            head = f"{_TITLES[field]:<{width}}  {_value_words(getattr(setup, field)):>5}  "
            lines += [(" " * len(head) if at else head) + reason for at, reason in enumerate(reasons)]
        free, reserve = _percent(1 - cost.peak_bytes / self.gpu_bytes), _percent(self.margin)
        lines.append(
            f"{'global batch':<{width}}  {self.global_batch_size:>5,}  {setup.row_words} x {setup.batch_size} x "
            f"{setup.gradient_accumulation_steps} steps, {self.tokens_per_step:,} tokens{self._warning()}"
        )
        speed = f"{self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        if cost.is_estimated:
            kinds = (f"{kind} {low:.0%} to {high:.0%} of it" for kind, (low, high, _) in TRAINER.items())
            speed += f" in a tuned loop; with a Trainer, {', '.join(kinds)}"
        else:
            speed += ", to compare settings alone"
        lines += [
            "",
            f"memory    {show_bytes(cost.peak_bytes)} of {show_bytes(self.gpu_bytes)} per GPU, {free} free "
            f"(at least {reserve} for what estimates cannot know)",
        ]
        if cost.retries:
            lines.append(f"          full {cost.retries} times per step, for which the GPU stands still")
        if self.expandable_bytes:
            lines.append(f"          with {EXPANDABLE} {show_bytes(self.expandable_bytes)}")
        if whole := self.whole_logits_bytes:
            fits = "" if whole <= self.gpu_bytes * (1 - self.margin) else ", which does not fit"
            lines.append(f"loss      chunked, as the recipes make it; with whole logits {show_bytes(whole)}{fits}")
        if cost.host_bytes:
            processes = min(setup.gpus_per_node, setup.num_gpus)
            lines.append(f"on host   {show_bytes(cost.host_bytes * processes)} of memory per machine")
        lines += [
            f"speed     {cost.step_seconds:,.2f} s per step, {speed}",
            f"chosen    {_words({'batch_size': setup.batch_size} | _changes(setup, TrainingSetup()))}",
            f"next best {self.next_best}",
            f"breaks    {self.breaks}",
            *(f"{'' if at else 'faster':<10}{each}" for at, each in enumerate(self.proposals)),
            *(f"note      {note}" for note in cost.notes),
            f"searched  by {self.estimated} estimates",
        ]
        return "\n".join(lines)

    def _warning(self) -> str:
        if self.global_batch_size == 1:
            return ": one row per step trains badly"
        few = f": above {MOST_TOKENS:,}, more than most trainings gain from"
        return few if self.tokens_per_step > MOST_TOKENS else ""

    def to_json(self) -> str:
        """All of it as JSON: fields as here, sizes in bytes."""
        derived = {name: getattr(self, name) for name in ("global_batch_size", "tokens_per_second_per_gpu")}
        return json.dumps(asdict(self) | derived, indent=1, default=str)


_TITLES = {
    "batch_size": "micro-batch",
    "activation_checkpointing": "activation checkpointing",
    EVERY: "of every n-th block",
    ON_HOST: "blocks' inputs on the host",
    "reshard_after_forward": "reshard after forward",
    "sync_each_batch": "reduction in every micro-step",
    "dp_replicate_size": "copies of the model",
    "cp_size": "GPUs that share a row",
    "tp_size": "GPUs that share a layer",
    "ep_size": "GPUs that share experts",
    "load_in_4bit": "4-bit base",
    "dequantize": "dequantised base",
    "master_dtype": "weights in",
    "optimizer": "optimizer",
    "offload": "offload",
}
_OTHER_TITLES = {"compile": "torch.compile", "reduce_dtype": "reduction in"}


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
    titles = _TITLES | _OTHER_TITLES
    return ", ".join(
        f"{'with' if value else 'without'} {titles[field]}" if isinstance(value, bool) else f"{titles[field]} {value}"
        for field, value in changes.items()
    )


def _changes(setup: TrainingSetup, other: TrainingSetup) -> dict[str, Any]:
    """The searched fields in which a setup is another one."""
    return {name: value for name in _TITLES if (value := getattr(setup, name)) != getattr(other, name)}


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

    Searched are, unless they are fixed, `SEARCHED`: micro-batch and accumulation, activation checkpointing (of all
    blocks or every n-th), `reshard_after_forward`, copies of the model (HSDP), `sync_each_batch`, GPUs that share rows
    where these are long, or experts where GPUs wait for each other. Where nothing fits, one after the other: blocks'
    inputs on the host, GPUs that share experts, rows or layers; a 4-bit base for LoRA, weights in bf16 with an AdamW of
    8 bits for all parameters; CPU offload. LoRA or all parameters, precision and sequence length (unless it is None)
    are never searched.

    Args:
        name_or_model: hub name, folder, `config.json`, configuration, or a model on any device.
        setup: values of what is not searched; without it those of `TrainingSetup()`.
        global_batch_size: sequences per optimizer step over all GPUs; None takes as many as have about 2**18 tokens.
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
    kwargs, longest, count = dict(model_kwargs or {}), None, 0
    evaluate = _pricing(name_or_model, kwargs, margin)
    if fixed.get("seq_len", 0) is None:
        del fixed["seq_len"]
        longest = _most_tokens(name_or_model, kwargs)

    def priced(one: TrainingSetup) -> Cost:
        nonlocal count
        count += 1
        say(f"estimating micro-batch {one.batch_size} of {one.seq_len:,} tokens")
        return evaluate(one)

    setup = TrainingSetup.of(setup, **fixed)
    gpu = gpu_named(setup.gpu)
    search = Search(
        setup=setup,
        fixed=frozenset(fixed) & frozenset(SEARCHED),
        evaluate=priced,
        limit_bytes=int(gpu.memory_bytes * (1 - margin)),
        global_batch_size=global_batch_size,
    )
    if longest is not None:  # of powers of two and the longest, where the leanest setting fits
        lengths = [length for power in range(30) if SHORTEST <= (length := 1 << power) < longest] + [longest]
        at = bisect(lengths[1:], False, key=lambda length: not search.fits(seq_len=length))
        search = replace(search, setup=replace(setup, seq_len=lengths[at]), prices={})
    found, model = search.run(), _model_name(name_or_model)
    if found is None:
        raise ConfigError(_nothing_fits(model, search, margin))
    best, cost = found
    reasons, grown = _reasons(search, best, cost), 0
    whole = search.cost(replace(best, loss="full")) if cost.loss == "chunked" and best.loss is None else None
    if not (gpu.family.startswith("mi") or best.expandable_segments):  # AMD's have none
        grown = search.evaluate(replace(best, expandable_segments=True)).peak_bytes
    return Recommendation(
        model=model,
        setup=replace(best, loss=cost.loss or best.loss),
        cost=cost,
        gpu_bytes=gpu.memory_bytes,
        margin=margin,
        whole_logits_bytes=whole.peak_bytes if whole else 0,
        expandable_bytes=grown if grown and cost.peak_bytes - grown > WASTED * gpu.memory_bytes else 0,
        reasons=reasons,
        next_best=_next_best(search, best, cost),
        breaks=_breaks(search, best),
        proposals=tuple(_proposals(search, best, cost)),
        estimated=count,
    )


def _pricing(name_or_model: Source, model_kwargs: Mapping[str, Any], margin: float) -> Evaluate:
    """A function that prices a setting, in an allocator that has what the margin leaves of a GPU."""

    def priced(setup: TrainingSetup) -> Cost:
        usable = int(gpu_named(setup.gpu).memory_bytes * (1 - margin))
        memory = memory_of(step_of(name_or_model, setup, **model_kwargs), limit_bytes=usable)
        time = throughput_of(memory)
        return Cost(
            peak_bytes=memory.total,
            step_seconds=time.step_seconds,
            floor_seconds=time.step_seconds - time.parts["communication"] - time.parts["offload"],
            host_bytes=memory.host_bytes,
            retries=len(memory.retried),
            loss=memory.setup.loss,
            is_estimated=time.is_estimated,
            notes=tuple(dict.fromkeys((*memory.notes, *time.notes, *([] if time.is_estimated else [time.source])))),
        )

    return priced


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


def _reasons(search: Search, best: TrainingSetup, cost: Cost) -> dict[str, tuple[str, ...]]:
    """What other values of each field would have meant: the fastest priced setting with each that fits, or, where none
    does, the one that takes least."""
    reasons: dict[str, tuple[str, ...]] = {}
    for field in _TITLES:
        own = getattr(best, field)
        if field in search.fixed:
            reasons |= {field: ("as given",)} if own != getattr(TrainingSetup, field) else {}
            continue
        if field in ("reshard_after_forward", "offload") and search.setup.wrapping != "none" and best.num_gpus > 1:
            other: dict[str, Any] = {field: not own}
            search.cost(replace(best, **other))
        others: dict[Any, list[Priced]] = {}
        for one, price in search.known:
            if field != "batch_size" or _changes(one, best).keys() == {field}:
                others.setdefault(getattr(one, field), []).append((one, price))
        others.pop(own, None)
        values = sorted(others)
        if field == "batch_size":  # its neighbours
            values = [*[n for n in values if n < own][-1:], *[n for n in values if n > own][:1]]
        lines = []
        for value in values:
            changes, figures = _compared(search, best, cost, others[value])
            changes.pop(field)
            lines.append(f"{_value_words(value)}: {figures}" + (f" ({_words(changes)})" if changes else ""))
        reasons |= {field: tuple(lines)} if lines else {}
    return reasons


def _compared(search: Search, best: TrainingSetup, cost: Cost, some: list[Priced]) -> tuple[dict[str, Any], str]:
    """The fastest that fits of some settings, or the one that takes least: what it changes, and its figures."""
    fitting = [each for each in some if search.has_room(each[1])]
    one, price = max(fitting, key=lambda each: rate(*each)) if fitting else min(some, key=lambda e: e[1].peak_bytes)
    size = show_bytes(price.peak_bytes)
    if not fitting:
        over = price.peak_bytes / gpu_named(best.gpu).memory_bytes - 1
        return _changes(one, best), f"{size}, " + (f"+{_percent(over)}" if over > 0 else "less free than the margin")
    gain = rate(one, price) / rate(best, cost) - 1
    speed = "as fast" if abs(gain) <= 0.0005 else f"{_percent(abs(gain))} {'faster' if gain > 0 else 'slower'}"
    return _changes(one, best), f"fits, {'but ' * (gain < -GAIN)}{speed}, takes {size}"


def _next_best(search: Search, best: TrainingSetup, cost: Cost) -> str:
    """The fastest that fits of the settings that do more than take another micro-batch."""
    others = [each for each in search.fitting if _changes(each[0], best).keys() - {"batch_size"}]
    if not others:
        return "only other micro-batches fit" if len(search.fitting) > 1 else "nothing else fits"
    changes, figures = _compared(search, best, cost, others)
    return f"{_words(changes)}: {figures}"


def _breaks(search: Search, best: TrainingSetup) -> str:
    """What would not fit any more: rows twice as long, the next micro-batch."""
    parts = []
    tries: dict[str, dict[str, Any]] = {f"rows of {2 * best.seq_len:,} tokens": {"seq_len": 2 * best.seq_len}}
    if "batch_size" not in search.fixed:
        tries[f"micro-batch {2 * best.batch_size}"] = {"batch_size": 2 * best.batch_size}
    for words, changes in tries.items():
        try:
            price = search.evaluate(replace(best, **changes))
        except ConfigError:  # the model has no more positions
            continue
        if price.peak_bytes > search.limit_bytes:
            parts.append(f"{words} ({show_bytes(price.peak_bytes)})")
    return " or ".join(parts) or "no rows twice as long, nor twice the micro-batch"


def _proposals(search: Search, best: TrainingSetup, cost: Cost) -> Iterator[str]:
    """Yield settings that are faster than the best of a search and fit, which a person has to ask for."""
    # What a compiler makes of the rules that dequantise weights is not known.
    changes_to_try: list[dict[str, Any]] = [] if best.compile or not best.dequantize else [{"compile": True}]
    is_exposed = 1 - cost.floor_seconds / cost.step_seconds > 2 * GAIN
    if is_exposed and best.precision == "bf16" and best.reduce_dtype == "fp32":
        changes_to_try.append({"reduce_dtype": "bf16"})
    for changes in changes_to_try:
        price = search.evaluate(replace(best, **changes))
        gain = cost.step_seconds / price.step_seconds - 1
        if price.peak_bytes <= search.limit_bytes and gain > GAIN:
            yield f"{_words(changes)}: {_percent(gain)} faster, takes {show_bytes(price.peak_bytes)}"


# ---- where nothing fits ----


def _nothing_fits(model: str, search: Search, margin: float) -> str:
    """Why nothing fits, and the nearest that does."""
    setup, least = search.setup, min(cost.peak_bytes for _, cost in search.known)
    fitting = "; ".join(_nearest(search))
    return (
        f"{model}, {_training_words(setup)}, fits on {setup.num_gpus} x {setup.gpu} at no setting: it takes "
        f"{show_bytes(least)} per GPU at least, and {show_bytes(search.limit_bytes)} may be used ({_percent(margin)} "
        f"stays free). " + (f"What fits: {fitting}." if fitting else "Take a smaller model.")
    )


def what_fits(
    name_or_model: Source, setup: TrainingSetup, *, model_kwargs: Mapping[str, Any] | None = None
) -> list[str]:
    """Changes, each of which makes a training fit that does not, in words; [] where none is known."""
    evaluate, limit = _pricing(name_or_model, model_kwargs or {}, 0.0), gpu_named(setup.gpu).memory_bytes
    return list(_nearest(Search(setup=setup, fixed=frozenset(SEARCHED), evaluate=evaluate, limit_bytes=limit)))


def _nearest(search: Search) -> Iterator[str]:
    """Yield changes, each of which makes it fit."""
    setup = search.setup
    lean: dict[str, Any] = {"activation_checkpointing": True, "reshard_after_forward": True, "sync_each_batch": True}
    lean |= {"dp_replicate_size": 1, "batch_size": 1, ON_HOST: True, "offload": setup.wrapping != "none"}
    changes = {name: lean[name] for name in lean if name in search.fixed and getattr(setup, name) != lean[name]}
    recomputes = setup.activation_checkpointing or "activation_checkpointing" not in search.fixed
    alone = [{name: value} for name, value in changes.items() if name != ON_HOST or recomputes]
    for some in [*alone, changes]:
        if some and search.fits(**({"activation_checkpointing": True} if some.get(ON_HOST) else {}) | some):
            yield _words(some)
            return
    is_adamw, is_bf16 = setup.optimizer in ("adamw", "adamw_foreach"), setup.precision == "bf16"
    ways: dict[str, tuple[bool, dict[str, Any]]] = {
        "a chunked loss": (setup.loss == "full", {"loss": "chunked"}),
        "reduction in bf16": (setup.reduce_dtype == "fp32" and is_bf16, {"reduce_dtype": "bf16"}),
        "optimizer adamw_8bit": (is_adamw, {"optimizer": "adamw_8bit"}),
    }
    yield from (words for words, (is_change, change) in ways.items() if is_change and search.fits(**change))
    if setup.wrapping != "none":
        counts = (setup.num_gpus * 2**power for power in range(1, 13))
        if count := next((n for n in counts if n <= MOST_GPUS and search.fits(num_gpus=n)), None):
            yield f"{count} GPUs"
    lengths = (setup.seq_len // 2**power for power in range(1, 20))
    if shorter := next((n for n in lengths if n >= SHORTEST and search.fits(seq_len=n)), None):
        yield f"sequences of {shorter:,} tokens"
    rank = " (r 16)" * (setup.lora_r is None)
    adapted: dict[str, Any] = {"lora_r": setup.lora_r or 16, "master_dtype": "fp32"}
    if setup.lora_r is None and search.fits(**adapted):
        yield f"LoRA{rank}"
    elif setup.dequantize and not setup.load_in_4bit:
        bases = {"LoRA{} of a base that stays quantised": {"dequantize": False}, "QLoRA{}": {"load_in_4bit": True}}
        if words := next((words for words, change in bases.items() if search.fits(**adapted, **change)), None):
            yield words.format(rank)
    cost = search.cost(search.lean())
    needed = (cost.peak_bytes if cost else 0) * gpu_named(setup.gpu).memory_bytes / search.limit_bytes
    larger = sorted((gpu.memory_bytes, gpu.name) for gpu in GPUS.values() if gpu.memory_bytes >= needed)
    if larger:
        yield larger[0][1]
