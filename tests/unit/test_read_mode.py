"""What is expected of both read modes, against what was measured (`benchmarks/load.py --slow-storage`)."""

import pytest

from hf_fsdp_tools.checkpoint.io.probe import Speed
from hf_fsdp_tools.checkpoint.io.read_mode import _Demand

SLOW = Speed(request_s=5e-3, stream_bytes_s=1e8)
GB = 10**9


def hsdp(*, requests: int = 100) -> _Demand:
    """1.02 GB for 4 ranks in two replicas, on 2 cores."""
    ranks = {"wanted": (510 * 10**6,) * 4, "requests": (requests,) * 4}
    return _Demand(**ranks, groups=((0, 1, 2, 3),), unions=(1020 * 10**6,), ranks_per_core=2.0)


@pytest.mark.parametrize(
    ("all_bytes_s", "alone_s", "together_s"), [(0.4, 5.2, 2.7), (0.8, 2.6, 1.6), (1.6, 1.4, 1.6), (6.4, 0.75, 1.6)]
)
def test_expected_times_are_those_measured_for_hsdp(all_bytes_s: float, alone_s: float, together_s: float) -> None:
    assert hsdp().seconds_alone(SLOW, all_bytes_s * GB) == pytest.approx(alone_s, rel=0.15)
    assert hsdp().seconds_together(SLOW, all_bytes_s * GB) == pytest.approx(together_s, rel=0.15)


def test_ranks_that_want_different_bytes_gain_nothing_by_reading_together() -> None:
    demand = _Demand(wanted=(GB, GB), requests=(99, 99), groups=((0, 1),), unions=(2 * GB,), ranks_per_core=1.0)
    for all_bytes_s in (0.1 * GB, 1 * GB, 10 * GB):
        assert demand.seconds_alone(SLOW, all_bytes_s) < demand.seconds_together(SLOW, all_bytes_s)


def test_many_small_requests_are_worth_reading_together() -> None:
    few, many = hsdp(requests=100), hsdp(requests=100_000)  # of 5 kB
    assert few.seconds_alone(SLOW, 6.4 * GB) < few.seconds_together(SLOW, 6.4 * GB)
    assert many.seconds_alone(SLOW, 6.4 * GB) > 10 * many.seconds_together(SLOW, 6.4 * GB)
