"""The report of a load: short text, JSON, and what transformers returns."""

import json

from hf_fsdp_tools.loading.report import LoadReport

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
    converted_bytes=0,
    read_calls=100,
    staging_bytes=0,
    peak_host_bytes=5,
    seconds={"plan": 0.5, "read": 1.0},
)


def test_bytes_and_memory_stand_in_one_line() -> None:
    text = str(REPORT)
    assert "rank 0 read  2.0 GB in 1.00 s, 2.00 GB/s, 1.000 of its share, with 5 B of host memory above" in text
    assert "score.weight" in text and "lm_head.weight" in text and len(text.splitlines()) <= 9
    stored = json.loads(REPORT.to_json())
    assert stored["missing_keys"] == ["score.weight"] and stored["seconds"]["read"] == 1.0


def test_loading_info_is_what_transformers_returns() -> None:
    assert REPORT.loading_info() == {
        "missing_keys": {"score.weight"},
        "unexpected_keys": set(),
        "mismatched_keys": {("lm_head.weight", (131, 48), (77, 48))},
        "error_msgs": [],
    }
