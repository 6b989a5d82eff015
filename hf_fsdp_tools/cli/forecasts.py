"""Memory and time of one setting from one forecast, as the commands that look ahead show them together."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_fsdp_tools.foresight.memory import MemoryEstimate
    from hf_fsdp_tools.foresight.setup import TrainingSetup
    from hf_fsdp_tools.foresight.throughput import ThroughputEstimate

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True)
class Estimate:
    """What one setting needs, and how fast it runs."""

    memory: "MemoryEstimate"
    time: "ThroughputEstimate"


def estimate(name: str, setup: "TrainingSetup", model_kwargs: dict[str, Any]) -> Estimate:
    """Memory and time of a setting.

    Raises:
        ConfigError, CheckpointError, WrapPlanError: as `step_of`.
    """
    from hf_fsdp_tools.foresight.forecast import step_of
    from hf_fsdp_tools.foresight.memory import memory_of
    from hf_fsdp_tools.foresight.throughput import throughput_of

    forecast = step_of(name, setup, **model_kwargs)
    memory = memory_of(forecast)
    return Estimate(memory, throughput_of(forecast, memory=memory))
