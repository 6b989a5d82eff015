"""What is asked of a search, and the settings that it has to choose from."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.search import Evaluate, Point, Space
from hf_fsdp_tools.foresight.setup import TrainingSetup

SEARCHED = ("batch_size", "gradient_accumulation_steps", *Point._fields[1:])
"""Fields of `TrainingSetup` that are chosen where they are not given."""

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Micro-batches that are tried where no global batch is given. (assumed)"""


@dataclass(frozen=True)
class Job:
    """What is asked of a search."""

    model: str
    """Its name, for messages."""
    setup: TrainingSetup
    """Values of all that is given, and of what is not searched."""
    given: frozenset[str]
    """Those of `SEARCHED` that stay as in `setup`."""
    global_batch_size: int | None
    """Sequences per optimizer step over all GPUs; None leaves it open."""
    gpu_bytes: int
    """Memory of a GPU."""
    margin: float
    """Part of it that stays free."""
    priced: Evaluate
    """Prices a setting."""

    @property
    def usable_bytes(self) -> int:
        """Memory of a GPU that a setting may use."""
        return int(self.gpu_bytes * (1 - self.margin))

    def least_bytes(self, *, given: Collection[str] | None = None, **changes: Any) -> int:
        """Memory of the leanest setting, with other values of what is not searched."""
        space = space_of(replace(self.setup, **changes), self.given if given is None else given, None)
        leanest = space.setup(space.leanest(max(space.offload)))
        return self.priced(leanest).num_bytes

    def fits(self, **changes: Any) -> bool:
        """Whether the leanest setting does."""
        return self.least_bytes(**changes) <= self.usable_bytes


def space_of(setup: TrainingSetup, given: Collection[str], global_batch_size: int | None) -> Space:
    """The settings to choose from."""

    def free(field: str, *values: Any) -> tuple[Any, ...]:
        return (getattr(setup, field),) if field in given else values

    sharded = setup.num_gpus > 1 and setup.wrapping != "none"
    # A copy takes few whole machines, one, or part of one, so that gathers stay on fast links.
    node = min(setup.gpus_per_node, setup.num_gpus)
    sizes = [4 * node, 2 * node, node, node // 2] if setup.num_gpus > node else [node // 2, node // 4]
    copies = [setup.num_gpus // size for size in sizes if 1 < size < setup.num_gpus and setup.num_gpus % size == 0]
    accumulation = _batches(setup, given, global_batch_size)
    is_accumulated = sharded and max(accumulation.values()) > 1
    return Space(
        base=setup,
        accumulation=accumulation,
        activation_checkpointing=free("activation_checkpointing", False, True),
        offload=free("offload", *((False, True) if setup.wrapping != "none" else (False,))),
        reshard_after_forward=free("reshard_after_forward", *((True, False) if sharded else (True,))),
        sync_each_batch=free("sync_each_batch", *((True, False) if is_accumulated else (setup.sync_each_batch,))),
        replicas=free("dp_replicate_size", 1, *(copies if sharded else ())),
    )


def _batches(setup: TrainingSetup, given: Collection[str], global_batch_size: int | None) -> dict[int, int]:
    """Micro-batches, and the accumulation steps that go with each."""
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
