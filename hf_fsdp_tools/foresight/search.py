"""Search the settings of a training for the fastest that fits, with few estimates.

A function prices a setting in bytes and seconds. The search relies on what holds for every training: memory grows with
the micro-batch, with copies of the model and where gathered parameters or whole gradients are kept; no way of sharding
makes a step shorter than what the GPU computes in it.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil
from typing import Any, Literal

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.hardware import gpu_named

GAIN = 0.01  # Relative gain in speed below which settings count as equally fast: less memory wins. (assumed)

TOKENS = 2**18
"""Tokens of an optimizer step where none are asked for: 64 rows of 4,096. (assumed; published fine-tunings take 65 K
(Alpaca: 128 × 512) to 524 K (Tülu 3: 128 × 4,096))"""

AGAIN, EVERY, ON_HOST = (f"activation_checkpointing{end}" for end in ("", "_every_n_layers", "_offload"))
DEGREES = ("ep_size", "cp_size", "tp_size")
_SHARDING = ("reshard_after_forward", "sync_each_batch", "dp_replicate_size")
SEARCHED = (
    "batch_size", "gradient_accumulation_steps", AGAIN, EVERY, ON_HOST, *_SHARDING, *DEGREES, "load_in_4bit",
    "dequantize", "master_dtype", "optimizer", "offload",
)  # fmt: skip
"""Fields of `TrainingSetup` that are chosen where they are not fixed."""

LONG = 32_768
"""Tokens per sequence from which rows are shared where that is faster, and not only where nothing else fits. (assumed:
attention takes most of a step from there on)"""
_WAITING = 0.1  # Part of a step that GPUs wait, from which it is tried to share experts. (assumed)
_MOST_LAYERS = 4
"""One block of up to so many is checkpointed. (assumed: a quarter of the blocks saves a quarter of the activations)"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one setting needs on each GPU."""

    peak_bytes: int
    """Memory of the GPU, with what CUDA and NCCL take; more than may be used where the step does not run in it."""
    step_seconds: float
    floor_seconds: float = 0.0
    """Of `step_seconds`, what the GPU computes: no other way of sharding the same micro-batch takes less."""
    host_bytes: int = 0  # Host memory of one process under offload
    loss: Literal["full", "chunked", None] = None
    is_estimated: bool = True  # Whether tokens per second are known, and not only of use to compare settings
    notes: tuple[str, ...] = ()


Evaluate = Callable[[TrainingSetup], Cost]  # Price a setting; called once per setting
Priced = tuple[TrainingSetup, Cost]


def batches(setup: TrainingSetup, fixed: Collection[str], global_batch_size: int | None) -> dict[int, int]:
    """Micro-batches in ascending order, and the accumulation steps that go with each."""
    batch = setup.batch_size if "batch_size" in fixed else None
    steps = setup.gradient_accumulation_steps if "gradient_accumulation_steps" in fixed else None
    if global_batch_size is None:
        rows = max(1, TOKENS // (setup.seq_len * setup.rows_per_example)) / setup.rows_at_once
        powers = [2**power for power in range(9) if steps or 2**power < 2 * rows] or [1]
        if batch or steps:
            return {each: steps or max(1, ceil(rows / each)) for each in ([batch] if batch else powers)}
        return {each: powers[-1] // each for each in powers}
    divisor = setup.rows_at_once * (batch or 1) * (steps or 1)
    rest, over = divmod(global_batch_size, divisor)
    if over or rest < 1 or (batch and steps and rest > 1):
        factors = [setup.row_words, *[f"micro-batch {batch}"] * bool(batch), *[f"{steps} steps"] * bool(steps)]
        near = {divisor} if batch and steps else {max(rest, 1) * divisor, max(rest + 1, 1) * divisor}
        raise ConfigError(
            f"a global batch of {global_batch_size} sequences cannot be made by {' x '.join(factors)}; use "
            f"{' or '.join(map(str, sorted(near)))}"
        )
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
        return [(setup, cost) for setup, cost in self.known if self.has_room(setup, cost)]

    def limit(self, setup: TrainingSetup) -> int:
        """Bytes of a GPU that may be used."""
        return int(gpu_named(setup.gpu).memory_bytes * (1 - self.margin))

    def has_room(self, setup: TrainingSetup, cost: Cost | None) -> bool:
        return cost is not None and cost.peak_bytes <= self.limit(setup)

    def best(self) -> Priced | None:
        """The fastest setting that fits, or one with less memory that is about as fast (`GAIN`); None if none fits."""
        fitting = self.fitting
        most = max((rate(*each) for each in fitting), default=0.0)
        near = [each for each in fitting if rate(*each) * (1 + GAIN) >= most]
        return min(near, key=lambda each: (each[1].peak_bytes, -rate(*each)), default=None)

    def run(self) -> Priced | None:
        """Look at one way to make it fit after the other, from that which changes least, until one does."""
        kinds = list(self._kinds())
        for kind in kinds:
            self.explore(kind)
            is_adapter = kind.lora_r is not None and kind.dequantize and not kind.load_in_4bit
            if is_adapter and "dequantize" not in self.fixed and max(kind.tp_size, kind.ep_size) == 1:
                self.explore(replace(kind, dequantize=False))
            if ON_HOST not in self.fixed and self.best() is None:
                self.explore(kind, on_host=True)
            for name in DEGREES:
                self._share(name, kind)
            if (best := self.best()) is not None:
                self._explore_every(*best)
                for value in self._values(kind, "reshard_after_forward"):  # saves copies, which no bound knows
                    self.cost(replace((self.best() or best)[0], reshard_after_forward=value))
                return self.best()
        may_offload = "offload" not in self.fixed and self.setup.wrapping != "none"
        for kind, on_host in product(kinds if may_offload else (), (False, True)):
            self.explore(replace(kind, offload=True), on_host=on_host)
            if (best := self.best()) is not None:
                return best
        return None

    def _kinds(self) -> Iterator[TrainingSetup]:
        """Yield the training as it is asked for; then with weights, or optimizer, that take less."""
        setup, is_bf16 = self.setup, self.setup.precision == "bf16"
        yield setup
        if setup.lora_r is not None:
            if setup.dequantize and not setup.load_in_4bit and "load_in_4bit" not in self.fixed:
                yield replace(setup, load_in_4bit=True)
        elif setup.optimizer == "adamw" and is_bf16 and not self.fixed & {"master_dtype", "optimizer"}:
            yield replace(setup, master_dtype="bf16", optimizer="adamw_8bit")

    def explore(self, base: TrainingSetup, *, on_host: bool = False, recompute: bool | None = None) -> bool:
        """Price what may be fastest: with and without activation checkpointing, resharding, copies of the model,
        reduction in every micro-step; micro-batches until memory is full. Return whether the model can have such."""
        accumulation = batches(base, self.fixed, self.global_batch_size)
        ways = [self._values(base, name) for name in _SHARDING]
        floors: dict[tuple[bool, int], float] = {}  # Rates of computation alone
        for again in [recompute] if recompute is not None else self._values(base, AGAIN):
            if on_host and not again:
                continue
            more: dict[str, Any] = {AGAIN: again, EVERY: getattr(base, EVERY) if again else 1}
            more |= {ON_HOST: (on_host or base.activation_checkpointing_offload) and again}
            most = max(accumulation)  # fits, as far as is known
            for values in product(*ways):
                chosen = dict(zip(_SHARDING, values, strict=True))
                is_late = not chosen["sync_each_batch"] and "sync_each_batch" not in self.fixed
                for batch, steps in accumulation.items():
                    if batch > most or (steps == 1 and is_late):
                        continue
                    bound = floors.get((again, batch))
                    below = [floors[again, n] for n in accumulation if n < batch and (again, n) in floors][-2:]
                    if bound is None and len(below) == 2 and below[1] < below[0] * (1 + GAIN):
                        bound = below[1]  # which grows no more with the micro-batch
                    if bound is not None and (best := self.best()) and bound <= rate(*best) * (1 + GAIN):
                        continue
                    try:
                        one = replace(base, **more, **chosen, batch_size=batch, gradient_accumulation_steps=steps)
                    except ConfigError:  # copies that do not go with the degrees
                        break
                    if (cost := self.cost(one)) is None:
                        return False
                    if not self.has_room(one, cost):
                        # the first family takes the least memory
                        most = batch - 1 if values == tuple(each[0] for each in ways) else most
                        break
                    floors[again, batch] = rate(one, replace(cost, step_seconds=cost.floor_seconds or 1e-9))
        return True

    def _values(self, base: TrainingSetup, name: str) -> tuple[Any, ...]:
        """The values of a field to choose from, that with the least memory first, but of activation checkpointing."""
        if name in self.fixed:
            return (getattr(base, name),)
        if name == AGAIN:
            return (False, True)
        if name == "dp_replicate_size":
            # A copy takes few whole machines, one, or part of one, so that gathers stay on fast links.
            node = min(base.gpus_per_node, base.num_gpus)
            sizes = [4 * node, 2 * node, node, node // 2] if base.num_gpus > node else [node // 2, node // 4]
            shared = (base.dims.ranks_per_row, base.ep_size)
            fit = [size for size in sizes if size > 1 and base.num_gpus > size and base.num_gpus % size == 0]
            return (1, *(base.num_gpus // size for size in fit if not any(size % each for each in shared)))
        is_sharded = base.num_gpus > 1 and base.wrapping != "none"
        return (True, False) if is_sharded else (getattr(base, name),)

    def _explore_every(self, best: TrainingSetup, cost: Cost) -> None:
        """Where all blocks recompute, try every n-th, n as large as memory seems to allow by the prices of all and of
        none."""
        if not best.activation_checkpointing or EVERY in self.fixed:
            return
        plain: dict[str, Any] = {AGAIN: False, EVERY: 1, ON_HOST: False}
        none = None if AGAIN in self.fixed else self.cost(replace(best, **plain))
        for every in range(_MOST_LAYERS, 1, -1):
            if none and none.peak_bytes + (cost.peak_bytes - none.peak_bytes) / every > self.limit(best):
                continue
            one = replace(best, activation_checkpointing_every_n_layers=every)
            if self.has_room(one, self.cost(one)):
                return

    def _share(self, name: str, kind: TrainingSetup) -> None:
        """Try to share rows, layers or experts where nothing fits, rows are long, or GPUs wait: sizes are doubled until
        one is not faster; of `ep_size` one beyond a machine at least, since inside it no traffic between machines is
        saved."""
        if name in self.fixed or getattr(self.setup, name) > 1 or self.setup.wrapping == "none":
            return
        base, recompute = kind, None
        if (best := self.best()) is not None:
            base, recompute = best[0], best[0].activation_checkpointing
            is_waiting = best[1].floor_seconds < best[1].step_seconds * (1 - _WAITING)
            if not {"ep_size": is_waiting, "cp_size": kind.seq_len >= LONG, "tp_size": False}[name]:
                return
        base = base if "dp_replicate_size" in self.fixed else replace(base, dp_replicate_size=1)
        most = base.num_gpus // base.dp_replicate_size if name == "ep_size" else min(base.gpus_per_node, base.num_gpus)
        for size in (2**power for power in range(1, most.bit_length())):
            before, degree = self.best(), {name: size}
            try:
                if not self.explore(replace(base, **degree), recompute=recompute):
                    return
            except ConfigError:  # degrees that do not divide the GPUs, or the batch
                return
            after, is_last = self.best(), name != "ep_size" or size > base.gpus_per_node
            if after is not None and (before is None or (after == before and is_last)):
                return

    def fits(self, **changes: Any) -> bool:
        """Whether the setting that takes the least memory fits, with other values of what is not searched."""
        try:
            setup = replace(self.setup, **changes)
            values: dict[str, Any] = {"batch_size": min(batches(setup, self.fixed, None))}
            values |= {name: self._values(setup, name)[0] for name in _SHARDING}
            values[AGAIN] = recompute = self._values(setup, AGAIN)[-1]
            on_host = {ON_HOST: recompute, "offload": setup.wrapping != "none"}
            values |= {name: value for name, value in on_host.items() if name not in self.fixed}
            one = replace(setup, **values)
        except ConfigError:  # values that contradict each other
            return False
        return self.has_room(one, self.cost(one))


def rate(setup: TrainingSetup, cost: Cost) -> float:
    """Sequences per second and GPU."""
    sequences = setup.batch_size * setup.gradient_accumulation_steps / setup.dims.ranks_per_row
    return sequences / cost.step_seconds
