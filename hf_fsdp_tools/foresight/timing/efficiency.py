"""What training reaches of a GPU's peaks, by generation of GPU and era of software."""

from dataclasses import dataclass, replace

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.timing.hardware import Gpu

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


_SOURCE = "fitted on published trainings (benchmarks/results/foresight_throughput.md)"

_A100 = Efficiency(
    matmul=0.778,
    matmul_half=78,
    attention=0.331,
    memory=0.690,
    straggler=0.0207,
    compiled_memory=0.466,
    error=0.06,
    source=f"{_SOURCE}: 80 on A100",
)
_H100 = Efficiency(
    matmul=0.684,
    matmul_half=268,
    attention=0.200,
    memory=0.690,
    straggler=0.0414,
    compiled_memory=0.466,
    error=0.07,
    source=f"{_SOURCE}: 51 on H100",
)

_NEWER_ATTENTION = 1.648
"""How much faster attention is in the software of 2024 than in that of 2023; fitted like the others."""

_OTHER_ERROR = 0.25
"""Mean error assumed for GPUs that no published training was fitted on."""


def efficiency_of(gpu: Gpu, era: str = LATEST_ERA) -> Efficiency:
    """The efficiencies of a GPU's generation in an era of software.

    Generations without fitted rows get those of the A100, with a wider error; 2022 differs from 2023 in what runs (no
    fused attention), not in how well.

    Raises:
        ConfigError: there is no such era.
    """
    if era not in ERAS:
        raise ConfigError(f"Software era {era!r} is not known; choose one of {', '.join(ERAS)}.")
    found = {"a100": _A100, "h100": _H100}.get(gpu.family)
    if found is None:
        found = replace(_A100, error=_OTHER_ERROR, source=f"{_A100.source}; assumed for {gpu.title}")
    return replace(found, attention=found.attention * _NEWER_ATTENTION) if era == LATEST_ERA else found
