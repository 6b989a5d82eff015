"""Tests that count calls on a stand-in for the CUDA runtime, and are skipped where it is not set up."""

import pytest

from tests._dist import num_gpus

try:
    import fakegpu
except ImportError:
    fakegpu = None


def counts_on(gpus: int) -> list[pytest.MarkDecorator]:
    """The marks of tests that need so many GPUs of the stand-in."""
    is_there = fakegpu is not None and fakegpu.is_fake() and num_gpus() >= gpus
    reason = f"counts calls on {gpus} GPU(s) of a stand-in for the CUDA runtime, which is not set up here"
    return [pytest.mark.gpu, pytest.mark.skipif(not is_there, reason=reason)]
