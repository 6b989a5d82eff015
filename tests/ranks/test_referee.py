"""`benchmarks/referee.py`: what becomes of what ranks have seen. `test_benchmarks.py` runs its contestants."""

import pytest

from benchmarks.referee import judged

FINE = [
    {"part": "first.0.json", "stage": "done", "loss": (1e-7, ""), "gradients": (1e-6, "")},
    {"part": "saved.0.json", "stage": "done", "saved": (0.0, "")},
    {"part": "resumed.0.json", "stage": "done", "loss": (0.0, ""), "resumed": (1e-5, "")},
]


def failed(kind: str, stage: str, part: str = "first.0.json", said: str = "no"):
    return {"part": part, "stage": stage, "error": {"kinds": [kind, "Exception"], "said": said, "place": "a.py:1"}}


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (FINE, "right"),
        ([*FINE[:2], {**FINE[2], "resumed": (0.5, "lm_head.weight: 5.0e-01")}], "wrong"),
        ([{**FINE[0], "loss": (0.5, "loss: 5.0e-01")}, failed("ValueError", "save")], "wrong"),  # before it crashes
        ([failed("ValueError", "load")], "refuses"),
        ([failed("ValueError", "train")], "crashes"),
        ([*FINE[:2], failed("ValueError", "load", "resumed.0.json")], "crashes"),  # after it was trained
        ([failed("AttributeError", "load")], "crashes"),
        # Of two ranks, the one that does not speak of the other's end.
        (
            [failed("RuntimeError", "load", said="gloo: closed"), failed("ValueError", "load", "first.1.json")],
            "refuses",
        ),
        ([{"part": "first.0.json", "stage": "train"}], "hangs"),
        (FINE[:2], "hangs"),
        ([], "hangs"),
    ],
)
def test_a_verdict_follows_from_what_was_seen(seen, verdict):
    assert judged(seen)["verdict"] == verdict
