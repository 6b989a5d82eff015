"""Recommend the settings of a training: the fastest that fit, what is next best, what would break them.

Few estimates are needed, since memory grows with the micro-batch, with replicas of the model and where gathered
parameters or whole gradients are kept, and no way of sharding makes a step shorter than what the GPU computes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil
from operator import ge
from os import PathLike, fspath
from textwrap import wrap
from typing import Any, ClassVar, Literal, get_args

from hf_fsdp_tools.axes import AXES, Axis, Tried
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError
from hf_fsdp_tools.foresight.forecast import Report, Source, step_of
from hf_fsdp_tools.foresight.memory import EXPANDABLE, MARGIN, WASTED, memory_of
from hf_fsdp_tools.foresight.setup import TrainingSetup, setting_words
from hf_fsdp_tools.foresight.throughput import throughput_of, trainer_kinds
from hf_fsdp_tools.foresight.timing.hardware import GPUS, gpu_named
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.text import show_bytes

SHORTEST = 512  # Tokens per sequence below which none are proposed. (assumed)
MOST_GPUS = 4096  # GPUs up to which more are proposed. (assumed)
MOST_TOKENS = 2_000_000  # In an optimizer step, above which the output warns. (few fine-tunings take a tenth of it)
GAIN = 0.04
"""Relative gain in speed below which settings count as equally fast: what takes less memory wins, then what changes
less. (11 pairs of published trainings that differ in settings alone: the estimated ratio of speeds is off by 3.4 %
on average, by 7.3 % at most, benchmarks/results/foresight_throughput.md)"""
TOKENS = 2**18
"""Tokens of an optimizer step where none are asked for. (assumed; published fine-tunings take 65 K (Alpaca: 128 × 512)
to 524 K (Tülu 3: 128 × 4,096))"""
AGAIN, EVERY, ON_HOST, KEPT = (
    f"activation_checkpointing{end}" for end in ("", "_every_n_layers", "_offload", "_save_ops")
)
_TRIED = [axis for when in get_args(Tried) for axis in AXES if axis.tried == when]
_SHARDING = ("reshard_after_forward", "sync_each_batch", "dp_replicate_size")
_BATCH = "per_device_train_batch_size"
SEARCHED = (
    _BATCH, "gradient_accumulation_steps", AGAIN, EVERY, ON_HOST, KEPT, *_SHARDING, *(axis.size for axis in _TRIED),
    "sequence_parallel", "load_in_4bit", "dequantize", "master_dtype", "optimizer", "offload_params", "compile",
)  # fmt: skip
"""Fields of `TrainingSetup` that are chosen where they are not fixed."""
LONG = 32_768  # Tokens per sequence from which rows are shared where that is faster. (assumed: attention takes most)
_WAITING = 0.1  # Part of a step that GPUs wait, from which it is tried to share experts. (assumed)
_MOST_LAYERS = 4  # One block of up to so many is checkpointed. (assumed)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one setting needs on each GPU."""

    peak_bytes: int  # Memory of the GPU, with what CUDA and NCCL take
    step_seconds: float
    floor_seconds: float = 0.0  # What the GPU computes in it: no other sharding of the micro-batch takes less
    expandable_bytes: int = 0  # `peak_bytes` with `EXPANDABLE`, where that may decide; else 0
    host_bytes: int = 0  # Host memory of each process under offload
    newest: float = 1.0  # How many times as fast with the kernels of 2026
    loss: Literal["full", "chunked", None] = None
    is_estimated: bool = True  # Whether tokens per second are known, and not only of use to compare settings
    notes: tuple[str, ...] = ()


Evaluate = Callable[[TrainingSetup], Cost]  # Price a setting; called once per setting
Priced = tuple[TrainingSetup, Cost]


def batches(setup: TrainingSetup, fixed: Collection[str], global_batch_size: int | None) -> dict[int, int]:
    """Micro-batches in ascending order, and the accumulation steps that go with each."""
    batch = setup.per_device_train_batch_size if _BATCH in fixed else None
    steps = setup.gradient_accumulation_steps if "gradient_accumulation_steps" in fixed else None
    if global_batch_size is None:
        rows = max(1, TOKENS // (setup.max_length * setup.rows_per_example)) / setup.rows_at_once
        powers = [2**power for power in range(9) if steps or 2**power < 2 * rows] or [1]
        return {each: steps or ceil(rows / each) for each in ([batch] if batch else powers)}
    divisor = setup.rows_at_once * (batch or 1) * (steps or 1)
    rest, over = divmod(global_batch_size, divisor)
    if over or rest < 1 or (batch and steps and rest > 1):
        factors = [setup.row_words, *[f"micro-batch {batch}"] * bool(batch), *[f"{steps} steps"] * bool(steps)]
        near = [divisor] if batch and steps else sorted({max(rest, 1) * divisor, (rest + 1) * divisor})
        fact = f"a global batch of {global_batch_size} sequences cannot be made by {' x '.join(factors)}"
        raise ConfigError(f"{fact}; use {' or '.join(map(str, near))}")
    if batch:
        return {batch: steps or rest}
    return {rest: steps} if steps else {size: rest // size for size in range(1, rest + 1) if rest % size == 0}


@dataclass
class Search:
    """The prices of settings that are known so far, and the conclusions from them."""

    setup: TrainingSetup  # Values of all that is fixed, and of what is not searched
    fixed: frozenset[str]  # Those of `SEARCHED` that stay as in `setup`
    evaluate: Evaluate
    margin: float  # Part of the GPU's memory that stays free
    global_batch_size: int | None = None
    prices: dict[str, tuple[TrainingSetup, Cost | None]] = field(default_factory=dict)

    def cost(self, setup: TrainingSetup) -> Cost | None:
        """The price of a setting; None for one that the model cannot have."""
        if (key := repr(setup)) not in self.prices:
            try:
                self.prices[key] = setup, self.evaluate(setup)
            except ConfigError:
                if not self.prices:
                    raise
                self.prices[key] = setup, None
        return self.prices[key][1]

    @property
    def known(self) -> list[Priced]:
        return [(setup, cost) for setup, cost in self.prices.values() if cost is not None]

    @property
    def fitting(self) -> list[Priced]:
        return [each for each in self.known if self.has_room(*each)]

    def limit(self, setup: TrainingSetup) -> int:
        """Bytes of a GPU that may be used."""
        return int(gpu_named(setup.gpu).memory_bytes * (1 - self.margin))

    def taken(self, setup: TrainingSetup, cost: Cost) -> str:
        """The memory of a setting that fits, with `EXPANDABLE` where it fits with that alone."""
        grows = cost.peak_bytes > self.limit(setup)
        return f"{show_bytes(cost.expandable_bytes)} with {EXPANDABLE}" if grows else show_bytes(cost.peak_bytes)

    def has_room(self, setup: TrainingSetup, cost: Cost | None) -> bool:
        return cost is not None and (cost.expandable_bytes or cost.peak_bytes) <= self.limit(setup)

    def best(self) -> Priced | None:
        """The setting that takes least memory of those that fit and are as fast as the fastest, as far as estimates can
        tell (`GAIN`); None if none fits."""
        fitting, plain = self.fitting, TrainingSetup()
        most = max((rate(*each) for each in fitting), default=0.0)
        near = [each for each in fitting if rate(*each) * (1 + GAIN) >= most]
        return min(near, key=lambda one: (one[1].peak_bytes, len(_changes(one[0], plain)), -rate(*one)), default=None)

    def run(self) -> Priced | None:
        """Look at one way to make it fit after the other, from that which changes least, until one does."""
        kinds = list(self._kinds())
        for kind in kinds:
            self.explore(kind)
            if self.best() is None:
                self.explore(kind, on_host=True)
            for axis in _TRIED:
                self._share(axis, kind)
            if (best := self.best()) is not None:
                self._explore_kept(*best)
                for value in self._values(kind, "reshard_after_forward"):  # saves copies, which no bound knows
                    self.cost(replace((self.best() or best)[0], reshard_after_forward=value))
                if "compile" not in self.fixed:
                    self.cost(replace((self.best() or best)[0], compile=False))
                return self.best()
        may_offload = "offload_params" not in self.fixed and self.setup.wrapping != "none"
        for kind, on_host in product(kinds if may_offload else (), (False, True)):
            if self.best() is None:
                self.explore(replace(kind, offload_params=True), on_host=on_host)
        return self.best()

    def _kinds(self) -> Iterator[TrainingSetup]:
        """Yield the training as it is asked for, compiled; then with weights, or optimizer, that take less."""
        setup, is_bf16 = self._with_rows(), self.setup.mixed_precision == "bf16"
        setup = self._spread(setup if "compile" in self.fixed else replace(setup, compile=True))
        yield setup
        if setup.lora_r is not None:
            if setup.dequantize and not setup.load_in_4bit and "load_in_4bit" not in self.fixed:
                yield replace(setup, load_in_4bit=True)
        elif setup.optimizer == "adamw" and is_bf16 and not self.fixed & {"master_dtype", "optimizer"}:
            yield replace(setup, master_dtype="bf16", optimizer="adamw_8bit")

    def _with_rows(self) -> TrainingSetup:
        """The training asked for; where the global batch has fewer rows than GPUs would read, these share them."""
        setup, rows = self.setup, self.global_batch_size
        may_share = "cp_size" not in self.fixed and setup.wrapping != "none"
        most = min(setup.gpus_per_node, setup.num_processes) if may_share and rows and rows < setup.rows_at_once else 1
        for size in (2**power for power in range(1, most.bit_length())):
            try:
                shared = replace(setup, cp_size=size)
                batches(shared, self.fixed, rows)
            except FSDPToolsError:
                continue
            return shared
        return setup

    def _spread(self, setup: TrainingSetup) -> TrainingSetup:
        """The setting in which GPUs that share layers hold their own tokens between these, if the model can have it."""
        if setup.tp_size == 1 or "sequence_parallel" in self.fixed or self.cost(setup) is None:
            return setup
        spread = replace(setup, sequence_parallel=True)
        return setup if self.cost(spread) is None else spread

    def explore(self, base: TrainingSetup, *, on_host: bool = False, again: tuple[bool, ...] = ()) -> bool:
        """Price what may be fastest, but for what cannot fit or be faster; return whether the model can have such."""
        steps_of = batches(base, self.fixed, self.global_batch_size)
        ways = [self._values(base, name) for name in _SHARDING]
        for stored, recomputes in product(self._values(base, "dequantize"), again or self._values(base, AGAIN)):
            if on_host and (not recomputes or ON_HOST in self.fixed):
                continue
            more: dict[str, Any] = {"dequantize": stored, AGAIN: recomputes, EVERY: getattr(base, EVERY) ** recomputes}
            # What a compiler makes of the rules that dequantise weights is not known.
            more["compile"] = base.compile and (stored or "compile" in self.fixed)
            more[ON_HOST] = (on_host or base.activation_checkpointing_offload) and recomputes
            floors: dict[int, float] = {}  # Rates of computation alone by micro-batch
            full: list[list[int]] = []  # Places of settings that do not fit: nor does what takes as much in every way
            for *values, (batch, steps) in product(*ways, steps_of.items()):
                chosen, place = dict(zip(_SHARDING, values, strict=True)), [*map(tuple.index, ways, values), batch]
                is_late = not chosen["sync_each_batch"] and "sync_each_batch" not in self.fixed
                if (is_late and steps == 1) or any(all(map(ge, place, each)) for each in full):
                    continue
                bounds = [floors[each] for each in sorted(floors) if each <= batch][-2:]
                is_bound = batch in floors or (
                    len(bounds) == 2 and bounds[1] < bounds[0] * (1 + GAIN)
                )  # or grows no more
                if is_bound and (best := self.best()) and bounds[-1] <= rate(*best) * (1 + GAIN):
                    continue
                try:
                    chosen |= {_BATCH: batch, "gradient_accumulation_steps": steps}
                    one = replace(base, **more, **chosen)
                except FSDPToolsError:  # values that do not go together, such as copies and degrees
                    continue
                if (cost := self.cost(one)) is None:
                    return bool(stored != base.dequantize)
                if self.has_room(one, cost):
                    floors[batch] = rate(one, replace(cost, step_seconds=cost.floor_seconds or 1e-9))
                else:
                    full.append(place)
        return True

    def _values(self, base: TrainingSetup, name: str) -> tuple[Any, ...]:
        """The values of a field to choose from, that with the least memory first where it is one of `_SHARDING`."""
        own = getattr(base, name)
        if name in self.fixed:
            return (own,)
        if name == AGAIN:
            return (False, True)
        if name == "dequantize":
            return (True, False) if own and base.lora_r is not None else (own,)
        if name == "dp_replicate_size":
            # A copy takes few whole machines, one, or part of one, so that gathers stay on fast links.
            node = min(base.gpus_per_node, base.num_processes)
            sizes = [4 * node, 2 * node, node, node // 2] if base.num_processes > node else [node // 2, node // 4]
            fit = (size for size in sizes if size > 1 and base.num_processes > size and base.num_processes % size == 0)
            return (1, *(base.num_processes // size for size in fit))
        return (True, False) if base.num_processes > 1 and base.wrapping != "none" else (own,)

    def _explore_kept(self, best: TrainingSetup, cost: Cost) -> None:
        """Where all blocks recompute, try every n-th, n as large as memory seems to allow; then to keep results."""
        if not best.activation_checkpointing:
            return
        plain: dict[str, Any] = {AGAIN: False, EVERY: 1, ON_HOST: False}
        none = None if AGAIN in self.fixed else self.cost(replace(best, **plain))
        for every in range(_MOST_LAYERS, 1, -1) if EVERY not in self.fixed else ():
            if none and none.peak_bytes + (cost.peak_bytes - none.peak_bytes) / every > self.limit(best):
                continue
            one = replace(best, activation_checkpointing_every_n_layers=every)
            if self.has_room(one, self.cost(one)):
                break
        may_keep = KEPT not in self.fixed and not best.compile  # compiled code has no results of single operators
        for ops in (("matmul", "attention"), ("attention",)) if may_keep else ():
            self.cost(replace(best, activation_checkpointing_save_ops=ops))

    def _share(self, axis: Axis, kind: TrainingSetup) -> None:
        """Divide rows, layers or experts where nothing fits, rows are long, or GPUs wait: sizes are doubled until one
        is not faster; of ranks with other rows beyond a machine at least, inside of which no traffic between machines
        is saved."""
        name = axis.size
        if name in self.fixed or kind.wrapping == "none":
            return
        best, base = self.best(), kind
        again: tuple[bool, ...] = ()
        if best is not None:
            base, again = best[0], (best[0].activation_checkpointing,)
            is_waiting = best[1].floor_seconds < best[1].step_seconds * (1 - _WAITING)
            if not {"GPUs wait": is_waiting, "rows are long": kind.max_length >= LONG}.get(axis.tried or "", False):
                return
        base = base if "dp_replicate_size" in self.fixed else replace(base, dp_replicate_size=1)
        crosses = not axis.has_same_rows
        most = base.num_processes // base.num_copies if crosses else min(base.gpus_per_node, base.num_processes)
        for size in (2**power for power in range(getattr(kind, name).bit_length(), most.bit_length())):
            before, degree = self.best(), {name: size}
            try:
                one = self._spread(replace(base, **degree))
                is_possible = self.explore(one, again=again)
                if is_possible and self.best() is None:
                    self.explore(one, on_host=True)
            except FSDPToolsError:  # degrees that do not divide the GPUs, or the batch
                return
            after, is_last = self.best(), not crosses or size > base.gpus_per_node
            if not is_possible or (after is not None and (before is None or (after == before and is_last))):
                return

    def fits(self, **changes: Any) -> bool:
        """Whether the setting that takes the least memory fits, with other values of what is not searched."""
        try:
            setup = replace(self.setup, **changes)
            values: dict[str, Any] = {_BATCH: min(batches(setup, self.fixed, None))}
            values |= {name: self._values(setup, name)[0] for name in _SHARDING}
            values[AGAIN] = recompute = self._values(setup, AGAIN)[-1]
            on_host = {ON_HOST: recompute, "offload_params": setup.wrapping != "none"}
            values |= {name: value for name, value in on_host.items() if name not in self.fixed}
            one = replace(setup, **values)
        except FSDPToolsError:  # values that contradict each other
            return False
        return self.has_room(one, self.cost(one))


def rate(setup: TrainingSetup, cost: Cost) -> float:
    """Sequences per second and GPU."""
    sequences = setup.per_device_train_batch_size * setup.gradient_accumulation_steps / setup.dims.ranks_per_row
    return sequences / cost.step_seconds


@dataclass(frozen=True, kw_only=True)
class Recommendation(Report):
    """The fastest setting that fits, and what speaks for it.

    Example:
        >>> best = recommend_config("checkpoint", num_processes=2, gpu="h100-80gb", max_length=32, global_batch_size=4)
        >>> isinstance(best, Recommendation), best.global_batch_size
        (True, 4)
    """

    _derived: ClassVar = ("global_batch_size", "tokens_per_second_per_gpu")
    model: str
    setup: TrainingSetup
    cost: Cost
    gpu_bytes: int
    margin: float  # Part of `gpu_bytes` that stays free at least
    expandable_bytes: int = 0  # `cost.peak_bytes` with `EXPANDABLE`; 0 where that is not needed and saves little
    next_best: str  # The fastest that fits of those that do more than take another micro-batch, with its figures
    breaks: str  # What would not fit any more, or not be known
    proposals: tuple[str, ...] = ()  # Faster settings that fit, which change how numbers are rounded or compiled

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, over all GPUs."""
        return self.setup.per_device_train_batch_size * self.setup.gradient_accumulation_steps * self.setup.rows_at_once

    @property
    def tokens_per_step(self) -> int:
        """Tokens of these sequences, two of each pair."""
        return self.global_batch_size * self.setup.rows_per_example * self.setup.max_length

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.cost.step_seconds / self.setup.num_processes

    def __str__(self) -> str:
        setup, cost, rows = self.setup, self.cost, self.global_batch_size
        each, steps = setup.per_device_train_batch_size, setup.gradient_accumulation_steps
        batch = f"{rows:,} = {setup.row_words} x {each} x {steps} accumulation steps, "
        batch += f"{self.tokens_per_step:,} tokens" + ": one row per step trains badly" * (rows == 1)
        batch += f": above {MOST_TOKENS:,}, more than most trainings gain from" * (self.tokens_per_step > MOST_TOKENS)
        own = trainer_kinds(setup).items()
        kinds = (f"{kind} {low:.0%} to {high:.0%} of it" for kind, (low, high, _) in own)
        loop = f" in an optimised loop; with a Trainer, {', '.join(kinds)}"
        speed = f"{cost.step_seconds:,.2f} s per step, {self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        speed += f" ({cost.step_seconds / cost.newest:,.2f} s with kernels of 2026)" * (cost.newest > 1)
        limit = (1 - self.margin) * self.gpu_bytes
        taken, other, word = cost.peak_bytes, self.expandable_bytes, "with"
        if other and taken > limit:
            taken, other, word = other, taken, "without"
        free, reserve = _percent(1 - taken / self.gpu_bytes), _percent(self.margin)
        memory = f"{show_bytes(taken)} of {show_bytes(self.gpu_bytes)} per GPU, {free} free "
        on_host = cost.host_bytes * min(setup.gpus_per_node, setup.num_processes)
        lines = [
            ("chosen", setting_words({_BATCH: setup.per_device_train_batch_size} | _changes(setup, TrainingSetup()))),
            ("next best", self.next_best),
            ("too large", self.breaks),
            ("batch", batch),
            ("memory", f"{memory}(at least {reserve} for what estimates cannot know)"),
            *[("", f"{word} {EXPANDABLE} {show_bytes(other)}")] * (other > 0),
            *[("on host", f"{show_bytes(on_host)} of memory per machine")] * (on_host > 0),
            ("speed", speed + (loop if cost.is_estimated else ", to compare settings alone")),
            *(("" if at else "faster", each) for at, each in enumerate(self.proposals)),
            *(("note", note) for note in cost.notes),
        ]
        head = f"{self.model}, sequences of {setup.max_length:,} tokens, on {setup.num_processes} x {setup.gpu}"
        assumed = wrap(setup.words, 99, initial_indent="assumed   ", subsequent_indent=" " * 10)
        return "\n".join([head, *assumed, "", *(f"{title:<9} {text}" for title, text in lines)])


def _percent(part: float) -> str:
    """0.123 as "12 %", 0.004 as "0.4 %"."""
    return f"{100 * part:.{1 if abs(part) < 0.0095 else 0}f} %"


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
    """The fastest setting of a training that fits on its GPUs, and what is next best; no weights, no GPU.

        print(recommend_config("meta-llama/Llama-3.1-8B", num_processes=8, gpu="h100-80gb", global_batch_size=64))

    Searched are, unless they are fixed, the fields in `SEARCHED`; docs/estimating.md says in which order. LoRA or all
    parameters, precision and sequence length are never searched. Arguments and errors are as of `estimate_memory`, and:

    Args:
        setup: values of what is not searched; without it those of `TrainingSetup()`.
        global_batch_size: sequences per optimizer step over all GPUs; None takes as many as have about 2**18 tokens.
        margin: part of the GPU's memory that stays free (`MARGIN` says why).
        say: is given, before each estimate, what is estimated.
        fixed: fields of `TrainingSetup` that stay as they are given here.

    Raises:
        ConfigError: nothing fits (the message names the nearest that does), or a value cannot be.

    Example:
        >>> print(recommend_config("checkpoint", num_processes=2, gpu="h100-80gb", max_length=32, global_batch_size=4))
        checkpoint, ...
    """
    if not 0 <= margin < 1:
        raise ConfigError(f"margin is {margin}: it is the part of the memory that stays free; use 0.1 for 10 %")
    setup = TrainingSetup.of(setup, **fixed)
    gpu, model = gpu_named(setup.gpu), _model_name(name_or_model)
    evaluate, searched = _pricing(name_or_model, model_kwargs or {}, say), frozenset(fixed) & frozenset(SEARCHED)
    search = Search(setup, searched, evaluate, margin, global_batch_size)
    if (found := search.run()) is None:
        least, cures = min(cost.peak_bytes for _, cost in search.known), "; ".join(_cures(search))
        raise ConfigError(
            f"{model}, sequences of {setup.max_length:,} tokens, fits on {setup.num_processes} x {setup.gpu} "
            f"at no setting: it takes {show_bytes(least)} per GPU at least, and {show_bytes(search.limit(setup))} may "
            f"be used ({_percent(margin)} stays free). "
            + (f"What fits: {cures}." if cures else "Take a smaller model.")
        )
    (best, cost), grown = found, found[1].expandable_bytes
    if not (grown or gpu.family.startswith("mi") or best.expandable_segments):  # AMD's have none
        grown = evaluate(replace(best, expandable_segments=True)).peak_bytes
    helps = cost.peak_bytes > search.limit(best) or cost.peak_bytes - grown > WASTED * gpu.memory_bytes
    return Recommendation(
        model=model,
        setup=replace(best, loss=cost.loss or best.loss),
        cost=cost,
        gpu_bytes=gpu.memory_bytes,
        margin=margin,
        expandable_bytes=grown if helps else 0,
        next_best=_next_best(search, best, cost),
        breaks=_breaks(search, best),
        proposals=tuple(_proposals(search, best, cost)),
    )


def _pricing(name_or_model: Source, model_kwargs: Mapping[str, Any], say: Callable[[str], object] = str) -> Evaluate:
    """A function that prices a setting."""

    def priced(setup: TrainingSetup) -> Cost:
        say(f"estimating micro-batch {setup.per_device_train_batch_size} of {setup.max_length:,} tokens")
        memory = memory_of(step_of(name_or_model, setup, **model_kwargs))
        time, limit = throughput_of(memory), memory.limit_bytes
        is_near = memory.peak_allocated < limit and memory.total > (1 - MARGIN) * limit > memory.total_expandable
        return Cost(
            peak_bytes=memory.total,
            expandable_bytes=memory.total_expandable if is_near else 0,
            step_seconds=time.step_seconds,
            floor_seconds=time.step_seconds - time.parts["communication"] - time.parts["offload"],
            host_bytes=memory.host_bytes,
            newest=time.newest,
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


def _next_best(search: Search, best: TrainingSetup, cost: Cost) -> str:
    """The fastest that fits of the settings that do more than take another micro-batch."""
    others = [each for each in search.fitting if _changes(each[0], best).keys() - {_BATCH}]
    if not others:
        return "nothing but other micro-batches" if len(search.fitting) > 1 else "nothing else fits"
    one, price = max(others, key=lambda each: rate(*each))
    loss = 1 - rate(one, price) / rate(best, cost)
    near = f"as fast (within {_percent(GAIN)}, the error of a comparison)"
    speed = f"{_percent(loss)} slower" if loss > GAIN else near
    return f"{setting_words(_changes(one, best))}: fits, {speed}, takes {search.taken(one, price)}"


def _breaks(search: Search, best: TrainingSetup) -> str:
    """What would not fit any more: rows twice as long, the next micro-batch."""
    parts = []
    for name in ("max_length", *[_BATCH] * (_BATCH not in search.fixed)):
        changes = {name: 2 * getattr(best, name)}
        price = search.cost(one := replace(best, **changes))
        if price is not None and not search.has_room(one, price):  # none where the model has no more positions
            parts.append(f"{setting_words(changes)} ({show_bytes(price.peak_bytes)})")
    return " or ".join(parts) or "nothing up to twice the length or twice the micro-batch"


def _proposals(search: Search, best: TrainingSetup, cost: Cost) -> Iterator[str]:
    """Yield settings that are faster than the best of a search and fit, which a person has to ask for."""
    changes: dict[str, Any] = {"compile": best.dequantize or best.compile, "reduce_dtype": best.mixed_precision}
    for name, value in changes.items():
        price = search.cost(one := replace(best, **{name: value}))
        gain = 0.0 if price is None else rate(one, price) / rate(best, cost) - 1
        if price is not None and gain > GAIN and search.has_room(one, price):
            yield f"{setting_words({name: value})}: {_percent(gain)} faster, takes {search.taken(one, price)}"


def what_fits(name_or_model: Source, setup: TrainingSetup, model_kwargs: Mapping[str, Any]) -> list[str]:
    """Changes, each of which makes a training fit that does not, in words; [] where none is known."""
    search = Search(setup, frozenset(SEARCHED), _pricing(name_or_model, model_kwargs), margin=0.0)
    search.cost(setup)
    return list(_cures(search))


def _cures(search: Search) -> Iterator[str]:
    """Yield changes in words that each make the training fit, the smallest of each kind."""
    setup = search.setup
    lean: dict[str, Any] = {AGAIN: True, "reshard_after_forward": True, "sync_each_batch": True}
    lean |= {"dp_replicate_size": 1, _BATCH: 1, ON_HOST: True, "offload_params": setup.wrapping != "none"}
    lean = {name: value for name, value in lean.items() if name in search.fixed}
    adapted: dict[str, Any] = {"lora_r": setup.lora_r or 16, "master_dtype": "fp32"}
    kinds: list[list[dict[str, Any]]] = [
        [*({name: value} | ({AGAIN: True} if name == ON_HOST else {}) for name, value in lean.items()), lean],
        [{"loss": "chunked"}],
        [{"reduce_dtype": setup.mixed_precision}],
        [{"optimizer": "adamw_8bit"}],
        [{"num_processes": count} for power in range(1, 13) if (count := setup.num_processes * 2**power) <= MOST_GPUS],
        [{"max_length": length} for power in range(1, 20) if (length := setup.max_length // 2**power) >= SHORTEST],
        [adapted, adapted | {"dequantize": False}, adapted | {"load_in_4bit": True}],
        [{"gpu": name} for _, name in sorted((gpu.memory_bytes, gpu.name) for gpu in GPUS.values())],
    ]
    for kind in kinds:
        ways = ({name: value for name, value in each.items() if getattr(setup, name) != value} for each in kind)
        if found := next((changes for changes in ways if changes and search.fits(**changes)), None):
            yield setting_words(found)
            if kind is kinds[0]:  # what was asked for is all that is in the way
                return
