"""The report of a load: every rank's figures, their sums, short text, JSON."""

import json

from hf_fsdp_tools import LoadReport

REPORT = LoadReport(
    checkpoint="org/model",
    rank=0,
    dtypes=("bfloat16",),
    missing_keys=("score.weight",),
    unexpected_keys=(),
    mismatched_keys=(("lm_head.weight", (131, 48), (77, 48)),),
    resized_keys=(),
    initialized_keys=("score.weight", "lm_head.weight"),
    bytes_read=2_000_000_000,
    share_bytes=2_000_000_000,
    replicated_bytes=0,
    converted_bytes=0,
    header_bytes=1000,
    read_calls=100,
    staging_bytes=0,
    peak_host_bytes=5,
    seconds={"plan": 0.5, "read": 1.0},
)


def test_figures_of_all_ranks_are_summed_and_compared() -> None:
    other = REPORT.figures() | {"bytes_read": 1_000_000_000, "peak_host_bytes": 7, "seconds.read": 2.0}
    report = REPORT.with_ranks([REPORT.figures(), other])
    assert report.bytes_read_per_rank == (2_000_000_000, 1_000_000_000)
    assert report.total["bytes_read"] == 3_000_000_000 and report.total["read_calls"] == 200
    assert report.largest["peak_host_bytes"] == 7 and report.largest["seconds.read"] == 2.0
    assert set(report.per_rank) >= {"bytes_read", "read_calls", "peak_host_bytes", "seconds.plan", "seconds.read"}
    assert "rank" not in report.per_rank

    text = str(report)
    assert "2.0 GB, 1.0 GB; 3.0 GB in 2.00 s, 1.50 GB/s" in text and "2.0 GB in 1.00 s, 2.00 GB/s" in text
    assert "score.weight" in text and "lm_head.weight" in text and len(text.splitlines()) <= 9
    many = REPORT.with_ranks([REPORT.figures()] * 15 + [other])
    assert "1.0 GB to 2.0 GB on 16 ranks; 31.0 GB in 2.00 s" in str(many)

    stored = json.loads(report.to_json())
    assert stored["per_rank"]["seconds.read"] == [1.0, 2.0] and stored["total"]["bytes_read"] == 3_000_000_000
    assert stored["missing_keys"] == ["score.weight"] and stored["largest"]["peak_host_bytes"] == 7


def test_loading_info_is_what_transformers_returns() -> None:
    assert REPORT.loading_info() == {
        "missing_keys": {"score.weight"},
        "unexpected_keys": set(),
        "mismatched_keys": {("lm_head.weight", (131, 48), (77, 48))},
        "error_msgs": [],
    }
