"""Search the settings of a training for the fastest that fits, with few estimates.

A function prices a setting in bytes and seconds. The search relies on what holds for every training: memory grows with
the micro-batch, with copies of the model and where gathered parameters or whole gradients are kept; recomputing
activations and offloading save memory and never make the same micro-batch faster; a larger micro-batch is not slower
per token. Memory and time of every n-th block lie between those of all blocks and of none: which n are worth a price
is read off the two.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from operator import le
from typing import Any, Literal, NamedTuple

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.hardware import gpu_named

GAIN = 0.01  # Relative gain in speed below which settings count as equally fast: less memory wins. (assumed)
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Micro-batches that are tried where no global batch is set. (assumed)"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one setting needs on each GPU."""

    peak_bytes: int
    """Of the GPU's memory, with what CUDA and NCCL take; more than may be used where the step does not run in it."""
    step_seconds: float
    floor_seconds: float = 0.0
    """Of `step_seconds`, what the GPU computes: no other way of sharding the same micro-batch takes less."""
    host_bytes: int = 0  # Host memory of one process under offload
    retries: int = 0
    """How often in a step the allocator is full and gives cached memory back, for which the GPU stands still."""
    loss: Literal["full", "chunked", None] = None
    notes: tuple[str, ...] = ()


Evaluate = Callable[[TrainingSetup], Cost]  # Price a setting; called once per setting


class Point(NamedTuple):
    """The searched fields of a `TrainingSetup`."""

    batch_size: int
    activation_checkpointing: bool
    activation_checkpointing_every_n_layers: int
    activation_checkpointing_offload: bool
    offload: bool
    reshard_after_forward: bool
    sync_each_batch: bool
    dp_replicate_size: int


EVERY, ON_HOST = Point._fields[2:4]
"""How activations are recomputed, where they are."""

MOST_LAYERS = 4
"""Of up to so many blocks one is checkpointed. (assumed: a quarter of the blocks saves a quarter of the activations)"""

DEGREES = ("ep_size", "cp_size", "tp_size")
"""Degrees that are searched around all else, in the order in which they are tried."""

SEARCHED = ("batch_size", "gradient_accumulation_steps", *Point._fields[1:], *DEGREES, "dequantize")
"""Fields of `TrainingSetup` that are chosen where they are not fixed."""


@dataclass(frozen=True)
class Space:
    """Settings to choose from: every combination of the values below, other fields as in `base`."""

    base: TrainingSetup
    accumulation: Mapping[int, int]  # Micro-batches in ascending order, and the accumulation steps that go with each
    values: Mapping[str, tuple[Any, ...]]  # Of the other fields of a point, in the order in which they are tried

    @classmethod
    def of(cls, setup: TrainingSetup, fixed: Collection[str], global_batch_size: int | None) -> "Space":
        """The settings to choose from, with the fixed fields as in `setup`."""
        is_sharded = setup.num_gpus > 1 and setup.wrapping != "none"
        # A copy takes few whole machines, one, or part of one, so that gathers stay on fast links.
        node = min(setup.gpus_per_node, setup.num_gpus)
        sizes = [4 * node, 2 * node, node, node // 2] if setup.num_gpus > node else [node // 2, node // 4]
        sizes = [
            size
            for size in sizes
            if 1 < size < setup.num_gpus and size % setup.dims.ranks_per_row == size % setup.ep_size == 0
        ]
        copies = [setup.num_gpus // size for size in sizes if setup.num_gpus % size == 0]
        accumulation = _batches(setup, fixed, global_batch_size)
        is_accumulated = is_sharded and max(accumulation.values()) > 1
        values: dict[str, tuple[Any, ...]] = {
            "activation_checkpointing": (False, True),
            EVERY: tuple(range(1, MOST_LAYERS + 1)),
            ON_HOST: (False, True),
            "reshard_after_forward": (True, False) if is_sharded else (True,),
            "sync_each_batch": (True, False) if is_accumulated else (setup.sync_each_batch,),
            "dp_replicate_size": (1, *copies) if is_sharded else (1,),
            "offload": (False, True) if setup.wrapping != "none" else (False,),
        }
        values |= {name: (getattr(setup, name),) for name in values.keys() & fixed}
        if True not in values["activation_checkpointing"]:
            values |= {EVERY: (1,), ON_HOST: (False,)}
        return cls(setup, accumulation, values)

    def __len__(self) -> int:
        recomputed = self.values["activation_checkpointing"]
        ways = (False in recomputed) + (True in recomputed) * len(self.values[EVERY]) * len(self.values[ON_HOST])
        families = [self.families(offload, False) for offload in self.values["offload"]]
        return sum(len(family) for each in families for family in each) * ways // len(recomputed)

    def setup(self, point: Point) -> TrainingSetup:
        point = normal(point)
        return replace(self.base, gradient_accumulation_steps=self.accumulation[point.batch_size], **point._asdict())

    def leanest(self, offload: bool | None = None) -> Point:
        """The point that needs the least memory, with or without offload."""
        least = ("dp_replicate_size", EVERY)
        lean = {name: (min if name in least else max)(values) for name, values in self.values.items()}
        lean |= {} if offload is None else {"offload": offload}
        return Point(batch_size=min(self.accumulation), **lean)

    def families(self, offload: bool, on_host: bool) -> list[list[Point]]:
        """The points that differ in the micro-batch alone, ascending; families that are likely to be fast first. Where
        activations are recomputed, all blocks do, or every n-th for the least n that is allowed."""
        families = []
        apart = {"offload": offload, EVERY: min(self.values[EVERY]), ON_HOST: on_host}
        searched = {name: values for name, values in self.values.items() if name not in apart}
        for chosen in product(*searched.values()):
            values = dict(zip(searched, chosen, strict=True)) | apart
            if not values["activation_checkpointing"]:
                if on_host and False in self.values[ON_HOST]:
                    continue  # as without
                values |= {EVERY: 1, ON_HOST: False}
            always = values["sync_each_batch"] or len(self.values["sync_each_batch"]) == 1
            batches = [batch for batch, steps in self.accumulation.items() if always or steps > 1]
            families.append([Point(batch_size=batch, **values) for batch in batches])
        return [family for family in families if family]


def _batches(setup: TrainingSetup, fixed: Collection[str], global_batch_size: int | None) -> dict[int, int]:
    """Micro-batches, and the accumulation steps that go with each."""
    batch = setup.batch_size if "batch_size" in fixed else None
    steps = setup.gradient_accumulation_steps if "gradient_accumulation_steps" in fixed else None
    if global_batch_size is None:
        return dict.fromkeys(BATCHES if batch is None else (batch,), steps or 1)
    divisor = setup.rows_at_once * (batch or 1) * (steps or 1)
    rest, over = divmod(global_batch_size, divisor)
    if over or rest < 1 or (batch and steps and rest > 1):
        factors = [setup.row_words, *[f"micro-batch {batch}"] * bool(batch), *[f"{steps} steps"] * bool(steps)]
        near = {max(rest, 1) * divisor, max(rest + 1, 1) * divisor} if not (batch and steps) else {divisor}
        raise ConfigError(
            f"a global batch of {global_batch_size} sequences cannot be made by {' x '.join(factors)}; use "
            f"{' or '.join(map(str, sorted(near)))}"
        )
    if batch:
        return {batch: steps or rest}
    return {rest: steps} if steps else {size: rest // size for size in range(1, rest + 1) if rest % size == 0}


@dataclass(frozen=True)
class Job:
    """A search for the settings of one model."""

    model: str
    setup: TrainingSetup  # Values of all that is fixed, and of what is not searched
    fixed: frozenset[str]  # Those of `SEARCHED` that stay as in `setup`
    margin: float
    priced: Evaluate

    @property
    def gpu_bytes(self) -> int:
        return gpu_named(self.setup.gpu).memory_bytes

    @property
    def usable_bytes(self) -> int:
        return int(self.gpu_bytes * (1 - self.margin))

    def least_bytes(self, *, fixed: Collection[str] | None = None, **changes: Any) -> int:
        """Memory of the leanest setting, with other values of what is not searched."""
        space = Space.of(replace(self.setup, **changes), self.fixed if fixed is None else fixed, None)
        return self.priced(space.setup(space.leanest())).peak_bytes

    def fits(self, **changes: Any) -> bool:
        return self.least_bytes(**changes) <= self.usable_bytes


class Search:
    """The prices of one space that are known so far, and the conclusions from them."""

    def __init__(
        self, space: Space, evaluate: Evaluate, limit_bytes: float, *, start: int = 1, to_beat: float = 0.0
    ) -> None:
        self.space, self.limit_bytes = space, limit_bytes
        self._start, self._to_beat = start, to_beat  # The micro-batch that is tried first, and a rate known elsewhere
        self.costs: dict[Point, Cost] = {}
        self._evaluate = evaluate

    def cost(self, point: Point) -> Cost:
        if point not in self.costs:
            self.costs[point] = self._evaluate(self.space.setup(point))
        return self.costs[point]

    def fits(self, point: Point) -> bool:
        """Whether a point stays below the limit, by its price or by that of another point."""
        full = [one for one, cost in self.costs.items() if cost.peak_bytes > self.limit_bytes]
        if point not in self.costs and any(_is_leaner(one, point) for one in full):
            return False
        return self.cost(point).peak_bytes <= self.limit_bytes

    def rate(self, point: Point) -> float:
        """Sequences per second and GPU."""
        return self._sequences(point) / self.cost(point).step_seconds

    def best(self) -> Point | None:
        """The fastest point that fits, or one with less memory that is about as fast (`GAIN`); None if nothing fits.

        Offloading, first of blocks' inputs, then of parameters, is tried where nothing fits without.
        """
        for offload, on_host in product(self.space.values["offload"], self.space.values[ON_HOST]):
            families = self.space.families(offload, on_host)
            self._climb(families[0])
            leanest = self.space.leanest(offload)._replace(activation_checkpointing_offload=on_host)
            if not self.fitting() and not self.fits(leanest):
                continue
            for family in families[1:]:
                self._climb(family)
            self._refine(self._fastest())
            return self._fastest()
        return None

    def _fastest(self) -> Point:
        fitting = self.fitting()
        most = max(map(self.rate, fitting))
        near = [point for point in fitting if self.rate(point) * (1 + GAIN) >= most]

        def order(point: Point) -> tuple[Any, ...]:
            on_host = point.activation_checkpointing_offload
            return point.offload, on_host, self.cost(point).peak_bytes, -self.rate(point)

        return min(near, key=order)

    def _refine(self, best: Point) -> None:
        """Price what may be faster than the best point where all blocks recompute: every n-th block, n as large as
        memory seems to allow, with its micro-batch and the next smaller one."""
        if not best.activation_checkpointing or len(self.space.values[EVERY]) == 1:
            return
        batches = list(self.space.accumulation)
        for batch in reversed(batches[max(batches.index(best.batch_size) - 1, 0) :][:2]):
            point = best._replace(batch_size=batch)
            tried = sorted(self.space.values[EVERY], reverse=True)[:-1]
            if False in self.space.values["activation_checkpointing"]:  # its price foretells those between
                tried = [every for every in tried if self._may_win(point, every)]
            for every in tried:
                if self.fits(point._replace(activation_checkpointing_every_n_layers=every)):
                    break

    def _may_win(self, point: Point, every: int) -> bool:
        """Whether to recompute every n-th block seems to fit and to be faster, by the prices of all blocks and none."""
        all_, none = (self.cost(one) for one in (point, normal(point._replace(activation_checkpointing=False))))
        peak = none.peak_bytes + (all_.peak_bytes - none.peak_bytes) / every
        seconds = none.step_seconds + (all_.step_seconds - none.step_seconds) / every
        is_faster = self._sequences(point) / seconds > max(map(self.rate, self.fitting())) * (1 + GAIN)
        return peak <= self.limit_bytes and is_faster

    def fitting(self) -> list[Point]:
        return [point for point, cost in self.costs.items() if cost.peak_bytes <= self.limit_bytes]

    def _sequences(self, point: Point) -> float:
        return point.batch_size * self.space.accumulation[point.batch_size] / self.space.base.dims.ranks_per_row

    def _climb(self, family: list[Point]) -> None:
        """Price micro-batches of one family, from that of the fastest point so far: doubled while that is faster and
        fits, then the largest below the limit by bisection. Those that cannot win are left out."""
        points = [point for point in family if not self._is_beaten(point)]
        fitting = self.fitting()
        fastest = max(fitting, key=self.rate).batch_size if fitting else self._start
        low, high = -1, len(points)
        step = max(sum(point.batch_size <= fastest for point in points) - 1, 0)
        while step < high:
            if not self.fits(points[step]):
                high = step
            elif low >= 0 and self.rate(points[step]) < self.rate(points[low]) * (1 + GAIN):
                return
            else:
                low = step
                doubled = (n for n in range(low + 1, high) if points[n].batch_size >= 2 * points[low].batch_size)
                step = next(doubled, max(low + 1, high - 1))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(points[middle]) else (low, middle)

    def _is_beaten(self, point: Point) -> bool:
        """Whether a point that is priced is at least as fast, as far as one can say without pricing this one."""
        fitting = self.fitting()
        if any(_is_as_fast(one, point) for one in fitting):
            return True
        most = max([self._to_beat, *map(self.rate, fitting)])
        return most > 0 and self._most_rate(point) <= most * (1 + GAIN)

    def _most_rate(self, point: Point) -> float:
        """A bound of the rate of a point: that of the computation alone, with at least this micro-batch; where this no
        longer grows with the micro-batch, that of the largest that was priced."""
        rates: dict[int, float] = {}
        for one, cost in self.costs.items():
            if cost.floor_seconds > 0 and _switches(one)[0] <= _switches(point)[0]:
                rate = self._sequences(one) / cost.floor_seconds
                rates[one.batch_size] = max(rate, rates.get(one.batch_size, 0.0))
        above = [rate for batch, rate in rates.items() if batch >= point.batch_size]
        if above:
            return min(above)
        last = [rates[batch] for batch in sorted(rates)[-2:]]
        return last[1] * (1 + GAIN) if len(last) == 2 and last[1] < last[0] * (1 + GAIN) else inf


def _is_leaner(one: Point, point: Point) -> bool:
    """Whether a point needs at most the memory of another one, whatever the model."""
    grows = point.batch_size >= one.batch_size and point.dp_replicate_size >= one.dp_replicate_size
    return grows and all(map(le, _switches(point), _switches(one)))


def _is_as_fast(one: Point, point: Point) -> bool:
    """Whether a point is at least as fast as another one, whatever the model."""
    alike = one.batch_size >= point.batch_size and one.dp_replicate_size == point.dp_replicate_size
    return alike and one != point and all(map(le, _switches(one), _switches(point)))


def normal(point: Point) -> Point:
    """The point without what means nothing where no activations are recomputed."""
    if point.activation_checkpointing:
        return point
    return point._replace(activation_checkpointing_every_n_layers=1, activation_checkpointing_offload=False)


def _switches(point: Point) -> tuple[Any, ...]:
    """What saves memory and costs time, each in ascending order: of activations none, every n-th block, all, on the
    host; offload, resharding, reduction in every micro-step."""
    recomputed = point.activation_checkpointing
    grade = (recomputed, -point.activation_checkpointing_every_n_layers * recomputed, recomputed and point[3])
    return grade, *point[4:7]
