"""Figures of the README and of the documents are those of committed results and of the estimator, losses too, and say
with which state of the code they were made."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(RESULTS.rglob("*.md"))
README, BENCHMARKS = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/benchmarks.md"))
COMMIT = r"commits? [0-9a-f]{8}\b"
DAY = r"\b2026-\d\d-\d\d\b"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `docs/make_pictures.py` draws from."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    return runpy.run_path(str(ROOT / "docs" / "make_pictures.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(RESULTS)))
def test_a_page_of_results_says_of_which_code_and_day_it_is(page: Path) -> None:
    head = page.read_text()[:1500]
    assert re.search(rf"{COMMIT}, {DAY}", head), head[:300]


# ---- what was measured next to others ----


def test_the_picture_and_the_tables_beside_others_are_those_of_the_results(pictures: dict[str, Any]) -> None:
    trained, loaded = pictures["trained"](), pictures["loaded"]()
    assert [sum(verdicts.values()) for verdicts in trained.values()] == [297] * 3
    for word in ("right", "silently wrong"):
        counts = " | ".join(str(verdicts[word]) for verdicts in trained.values())
        assert re.search(rf"\| [^|]*{word}[^|]*(\]\([^)]*\))?[^|]*\| {counts} \|", BENCHMARKS), counts
    ours, theirs = (f"{each['right']} ({each['silently wrong']})" for each in [*trained.values()][:2])
    assert (
        f"train correctly (silently wrong), of [297](benchmarks/results/referee_fsdp.md) | {theirs} | {ours} |"
        in README
    )
    shown = (ROOT / "docs" / "pictures" / "measured.svg").read_text()
    words = " ".join(re.findall(r">([^<>]+)</text>", shown))
    for verdicts in trained.values():
        assert all(f"{count}" in words for count in verdicts.values() if count), "draw it again: docs/make_pictures.py"
    assert all(note in words for _, note in loaded.values())
    (own, _), *others = loaded.values()
    assert f"loading takes {own:.1f} MB above the shards" in words and min(memory for memory, _ in others) > 50 * own
    times = {name: re.findall(r"\d+\.\d", note) for name, (_, note) in loaded.items()}
    native, efficient, every = (
        times[name] for name in ("transformers, native", "Accelerate, RAM-efficient", "Accelerate, all ranks load all")
    )
    cells = ", ".join(f"{least}–{most}" for least, most in zip(every, efficient, strict=True))
    assert f"| 1, 1 | {cells} | {', '.join(native)} |" in BENCHMARKS


def test_figures_of_the_gpu_in_the_readme_are_measured() -> None:
    _, _, table = README.partition("One H200")
    figures = re.findall(r"(?<![\d.,])\d[\d.,]*\d(?= tokens/s| GB|\*\*| s\b)", table.partition("```")[0])
    assert len(figures) >= 8
    pages = "\n".join(page.read_text() for page in (RESULTS / "gpu").rglob("README.md"))
    assert not [each for each in figures if each not in pages]
