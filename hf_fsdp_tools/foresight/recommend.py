"""Recommend the settings of a training: the fastest that fit, what is next best, what would break them."""

from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from textwrap import wrap
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.forecast import Report, Source, step_of
from hf_fsdp_tools.foresight.memory import MARGIN, WASTED, memory_of
from hf_fsdp_tools.foresight.search import AGAIN, GAIN, ON_HOST, SEARCHED, Cost, Evaluate, Priced, Search, rate
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.throughput import TRAINER, throughput_of
from hf_fsdp_tools.foresight.timing.hardware import GPUS, gpu_named
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.modeling.configs import max_positions
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.text import show_bytes

EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"  # The variable with which segments of the allocator grow

SHORTEST = 512  # Tokens per sequence below which none are proposed. (assumed)
MOST_GPUS = 4096  # GPUs up to which more are proposed. (assumed)
LONGEST = 131_072  # Tokens per sequence up to which the longest is looked for without the model's limit. (assumed)
MOST_TOKENS = 2_000_000  # In an optimizer step, above which the output warns. (few fine-tunings take a tenth of it)


@dataclass(frozen=True, kw_only=True)
class Recommendation(Report):
    """The fastest setting that fits, and what speaks for it.

    Example:
        >>> best = recommend_config("checkpoint", num_gpus=2, gpu="h100-80gb", seq_len=32, global_batch_size=4)
        >>> isinstance(best, Recommendation), best.global_batch_size
        (True, 4)
    """

    _derived: ClassVar = ("global_batch_size", "tokens_per_second_per_gpu")
    model: str
    setup: TrainingSetup
    cost: Cost
    gpu_bytes: int
    margin: float  # Part of `gpu_bytes` that stays free at least
    expandable_bytes: int = 0
    """`cost.peak_bytes` with PYTORCH_ALLOC_CONF=expandable_segments:True; 0 where that saves next to nothing."""
    reasons: Mapping[str, str]
    """Why each field that was searched has its value: the best of the settings with another, with its figures."""
    next_best: str  # The fastest that fits of those that do more than take another micro-batch, with its figures
    breaks: str  # What would not fit any more, or not be known
    proposals: tuple[str, ...] = ()
    """Faster settings that fit and are not chosen unasked, since they change how numbers are rounded or compiled."""

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
        setup, cost, rows = self.setup, self.cost, self.global_batch_size
        batch = f"{setup.row_words} x {setup.batch_size} x {setup.gradient_accumulation_steps} steps, "
        batch += f"{self.tokens_per_step:,} tokens" + ": one row per step trains badly" * (rows == 1)
        if self.tokens_per_step > MOST_TOKENS:
            batch += f": above {MOST_TOKENS:,}, more than most trainings gain from"
        values = [(field, _value(getattr(setup, field)), why) for field, why in self.reasons.items()]
        kinds = (f"{kind} {low:.0%} to {high:.0%} of it" for kind, (low, high, _) in TRAINER.items())
        loop = f" in a tuned loop; with a Trainer, {', '.join(kinds)}"
        speed = f"{cost.step_seconds:,.2f} s per step, {self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        free, reserve = _percent(1 - cost.peak_bytes / self.gpu_bytes), _percent(self.margin)
        memory = f"{show_bytes(cost.peak_bytes)} of {show_bytes(self.gpu_bytes)} per GPU, {free} free (at least "
        on_host = cost.host_bytes * min(setup.gpus_per_node, setup.num_gpus)
        lines = [
            ("memory", f"{memory}{reserve} for what estimates cannot know)"),
            *[("", f"with {EXPANDABLE} {show_bytes(self.expandable_bytes)}")] * (self.expandable_bytes > 0),
            *[("on host", f"{show_bytes(on_host)} of memory per machine")] * (on_host > 0),
            ("speed", speed + (loop if cost.is_estimated else ", to compare settings alone")),
            ("chosen", _words({"batch_size": setup.batch_size} | _changes(setup, TrainingSetup()))),
            ("next best", self.next_best),
            ("breaks", self.breaks),
            *(("" if at else "faster", each) for at, each in enumerate(self.proposals)),
            *(("note", note) for note in cost.notes),
        ]
        return "\n".join(
            [
                f"{self.model}, {_training_words(setup)}, on {setup.num_gpus} x {setup.gpu}",
                *wrap(setup.words, 99, initial_indent="assumed   ", subsequent_indent=" " * 10),
                "",
                *(
                    f"{title:<39} {value:>5}  {why}"
                    for title, value, why in [*values, ("global batch", f"{rows:,}", batch)]
                ),
                "",
                *(f"{title:<9} {text}" for title, text in lines),
            ]
        )


def _percent(part: float) -> str:
    """0.123 as "12 %", 0.004 as "0.4 %"."""
    return f"{100 * part:.{1 if abs(part) < 0.0095 else 0}f} %"


def _training_words(setup: TrainingSetup) -> str:
    """What is trained how, without what is searched: "LoRA (r 16), sequences of 4,096 tokens"."""
    kind = "full fine-tuning" if setup.lora_r is None else f"{'Q' * setup.load_in_4bit}LoRA (r {setup.lora_r})"
    return f"{kind}, sequences of {setup.seq_len:,} tokens"


def _value(value: Any) -> str:
    return str({True: "yes", False: "no"}[value] if isinstance(value, bool) else value)


def _words(changes: Mapping[str, Any]) -> str:
    """Fields with their values: "without activation_checkpointing, batch_size 2"."""
    ways = {True: "with {}", False: "without {}"}
    texts = [(ways[value] if isinstance(value, bool) else f"{{}} {value}", name) for name, value in changes.items()]
    return ", ".join(text.format(name) for text, name in texts)


def _changes(setup: TrainingSetup, other: TrainingSetup) -> dict[str, Any]:
    """The searched fields in which a setup is another one, but how often a micro-batch of its size is run."""
    own = {name: getattr(setup, name) for name in SEARCHED if name != "gradient_accumulation_steps"}
    return {name: value for name, value in own.items() if value != getattr(other, name)}


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
    kwargs, longest = dict(model_kwargs or {}), None
    evaluate = _pricing(name_or_model, kwargs, margin)
    if fixed.get("seq_len", 0) is None:
        del fixed["seq_len"]
        longest = _most_tokens(name_or_model, kwargs)

    def priced(one: TrainingSetup) -> Cost:
        say(f"estimating micro-batch {one.batch_size} of {one.seq_len:,} tokens")
        return evaluate(one)

    setup = TrainingSetup.of(setup, **fixed)
    gpu = gpu_named(setup.gpu)
    search = Search(
        setup=setup,
        fixed=frozenset(fixed) & frozenset(SEARCHED),
        evaluate=priced,
        margin=margin,
        global_batch_size=global_batch_size,
    )
    if longest is not None:  # of powers of two and the longest, where the leanest setting fits
        lengths = [length for power in range(30) if SHORTEST <= (length := 1 << power) < longest] + [longest]
        at = bisect(lengths[1:], False, key=lambda length: not search.fits(seq_len=length))
        search = replace(search, setup=replace(setup, seq_len=lengths[at]), prices={})
    found, model = search.run(), _model_name(name_or_model)
    if found is None:
        raise ConfigError(_nothing_fits(model, search))
    best, cost = found
    reasons, grown = _reasons(search, best, cost), 0
    if not (gpu.family.startswith("mi") or best.expandable_segments):  # AMD's have none
        grown = search.evaluate(replace(best, expandable_segments=True)).peak_bytes
    return Recommendation(
        model=model,
        setup=replace(best, loss=cost.loss or best.loss),
        cost=cost,
        gpu_bytes=gpu.memory_bytes,
        margin=margin,
        expandable_bytes=grown if grown and cost.peak_bytes - grown > WASTED * gpu.memory_bytes else 0,
        reasons=reasons,
        next_best=_next_best(search, best, cost),
        breaks=_breaks(search, best),
        proposals=tuple(_proposals(search, best, cost)),
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


def _reasons(search: Search, best: TrainingSetup, cost: Cost) -> dict[str, str]:
    """What another value of each field would have meant: the fastest priced setting with one that fits, or, where none
    does, the one that takes least."""
    reasons: dict[str, str] = {}
    for field in SEARCHED:
        own = getattr(best, field)
        if field in search.fixed or field == "gradient_accumulation_steps":
            is_said = field in search.fixed and own != getattr(TrainingSetup, field)
            reasons |= {field: "as given"} if is_said else {}
            continue
        if field in ("reshard_after_forward", "offload") and search.setup.wrapping != "none" and best.num_gpus > 1:
            other: dict[str, Any] = {field: not own}
            search.cost(replace(best, **other))
        alone = field == "batch_size"  # which goes with all else
        others = [(one, price) for one, price in search.known if getattr(one, field) != own]
        if others := [each for each in others if not alone or _changes(each[0], best).keys() == {field}]:
            changes, figures = _compared(search, best, cost, others)
            value = _value(changes.pop(field))
            reasons[field] = f"{value}: {figures}" + (f" ({_words(changes)})" if changes else "")
    return reasons


def _compared(search: Search, best: TrainingSetup, cost: Cost, some: list[Priced]) -> tuple[dict[str, Any], str]:
    """The fastest that fits of some settings, or the one that takes least: what it changes, and its figures."""
    fitting = [each for each in some if search.has_room(*each)]
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
    for field in ("seq_len", "batch_size"):
        changes = {field: 2 * getattr(best, field)}
        price = None if field in search.fixed else search.cost(one := replace(best, **changes))
        if price is not None and not search.has_room(one, price):  # none where the model has no more positions
            parts.append(f"{_words(changes)} ({show_bytes(price.peak_bytes)})")
    return " or ".join(parts) or "no rows twice as long, nor twice the batch size"


def _proposals(search: Search, best: TrainingSetup, cost: Cost) -> Iterator[str]:
    """Yield settings that are faster than the best of a search and fit, which a person has to ask for."""
    # What a compiler makes of the rules that dequantise weights is not known.
    changes: dict[str, Any] = {"compile": best.dequantize or best.compile, "reduce_dtype": best.precision}
    for field, value in changes.items():
        if value == getattr(best, field):
            continue
        price = search.cost(one := replace(best, **{field: value}))
        if (
            price is not None
            and search.has_room(one, price)
            and (gain := rate(one, price) / rate(best, cost) - 1) > GAIN
        ):
            yield f"{_words({field: value})}: {_percent(gain)} faster, takes {show_bytes(price.peak_bytes)}"


# ---- where nothing fits ----


def _nothing_fits(model: str, search: Search) -> str:
    """Why nothing fits, and what does."""
    setup, least = search.setup, min(cost.peak_bytes for _, cost in search.known)
    fitting = "; ".join(_cures(search))
    return (
        f"{model}, {_training_words(setup)}, fits on {setup.num_gpus} x {setup.gpu} at no setting: it takes "
        f"{show_bytes(least)} per GPU at least, and {show_bytes(search.limit(setup))} may be used "
        f"({_percent(search.margin)} stays free). " + (f"What fits: {fitting}." if fitting else "Take a smaller model.")
    )


def what_fits(
    name_or_model: Source, setup: TrainingSetup, *, model_kwargs: Mapping[str, Any] | None = None
) -> list[str]:
    """Changes, each of which makes a training fit that does not, in words; [] where none is known."""
    evaluate = _pricing(name_or_model, model_kwargs or {}, 0.0)
    search = Search(setup=setup, fixed=frozenset(SEARCHED), evaluate=evaluate, margin=0.0)
    search.cost(setup)
    return list(_cures(search))


def _cures(search: Search) -> Iterator[str]:
    """Yield changes in words that each make the training fit, the smallest of each kind."""
    setup = search.setup
    lean: dict[str, Any] = {AGAIN: True, "reshard_after_forward": True, "sync_each_batch": True}
    lean |= {"dp_replicate_size": 1, "batch_size": 1, ON_HOST: True, "offload": setup.wrapping != "none"}
    lean = {name: value for name, value in lean.items() if name in search.fixed}
    adapted: dict[str, Any] = {"lora_r": setup.lora_r or 16, "master_dtype": "fp32"}
    kinds: list[list[dict[str, Any]]] = [
        [*({name: value} | ({AGAIN: True} if name == ON_HOST else {}) for name, value in lean.items()), lean],
        [{"loss": "chunked"}],
        [{"reduce_dtype": setup.precision}],
        [{"optimizer": "adamw_8bit"}],
        [{"num_gpus": count} for power in range(1, 13) if (count := setup.num_gpus * 2**power) <= MOST_GPUS],
        [{"seq_len": length} for power in range(1, 20) if (length := setup.seq_len // 2**power) >= SHORTEST],
        [adapted, adapted | {"dequantize": False}, adapted | {"load_in_4bit": True}],
        [{"gpu": name} for _, name in sorted((gpu.memory_bytes, gpu.name) for gpu in GPUS.values())],
    ]
    for kind in kinds:
        for changes in kind:
            changes = {name: value for name, value in changes.items() if getattr(setup, name) != value}
            if changes and search.fits(**changes):
                yield _words(changes)
                if kind is kinds[0]:  # what was asked for is all that is in the way
                    return
                break
