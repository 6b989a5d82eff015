"""What training reaches of a GPU's peaks, by generation of GPU and era of software."""

from dataclasses import dataclass

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.hardware import Gpu

__all__ = ["ERAS", "LATEST_ERA", "Efficiency", "efficiency_of"]

ERAS = ("2022", "2023", "2024")
"""Years of software whose rows were published: FSDP without fused attention (PyTorch 1.12), FSDP with the first flash
attention (PyTorch 2.0), FSDP2 with FlashAttention 2 and `torch.compile` (PyTorch 2.3 and later)."""

LATEST_ERA = ERAS[-1]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that kernels reach, and the source of these numbers."""

    matmul: float
    """Share of the peak flop/s that a large matmul reaches."""
    matmul_half: float = 0.0
    """The smallest dimension at which a matmul reaches half of that: share x size / (size + this)."""
    attention: float
    """Share of the peak flop/s that attention kernels reach."""
    memory: float
    """Share of the peak bandwidth that kernels reach which are bound by the GPU's memory."""
    network: float = 0.8
    """Share of the network's rate that collectives between machines reach."""
    straggler: float = 0.0
    """How much the time of a step differs between GPUs: the slowest of n is later than the mean by this times
    sqrt(2 ln n), the expected maximum of n normal deviates."""
    compiled_memory: float = 0.35
    """Share of the traffic of elementwise kernels that is left under `torch.compile`."""
    error: float
    """Mean relative error of tokens per second where this was not fitted (a model size or publisher left out)."""
    source: str
    """What it was fitted on."""


_FITTED: dict[tuple[str, str], Efficiency] = {
    ("a100", "2023"): Efficiency(
        matmul=0.85,
        attention=0.34,
        memory=0.49,
        straggler=0.03,
        error=0.06,
        source="fitted on 76 rows of llm-foundry (A100 40 and 80 GB)",
    ),
    ("h100", "2023"): Efficiency(
        matmul=0.91,
        matmul_half=830,
        attention=0.204,
        memory=0.65,
        straggler=0.06,
        error=0.06,
        source="fitted on 43 rows of llm-foundry (H100 80 GB)",
    ),
}


def efficiency_of(gpu: Gpu, era: str = LATEST_ERA) -> Efficiency:
    """The efficiencies of a GPU's generation in an era of software.

    Raises:
        ConfigError: there is no such era.
    """
    if era not in ERAS:
        raise ConfigError(f"Software era {era!r} is not known; choose one of {', '.join(ERAS)}.")
    return _FITTED.get((gpu.family, era)) or _FITTED["h100" if gpu.family == "h100" else "a100", "2023"]
