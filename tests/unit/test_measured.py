"""Figures of the README and of the documents are those of committed results and of the estimator, losses too, and say
with which state of the code they were made."""

import re
import runpy
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.foreseeing.published import BLOCKS_ALONE
from hf_fsdp_tools import TrainingSetup, estimate_memory

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(RESULTS.rglob("*.md"))
README, PERFORMANCE, FORESIGHT = (
    " ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/performance.md", "docs/foresight.md")
)
COMMIT = r"commits? [0-9a-f]{8}\b"
DAY = r"\b2026-\d\d-\d\d\b"


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `docs/make_pictures.py` draws from."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    return runpy.run_path(str(ROOT / "docs" / "make_pictures.py"))


def rows_below(page: Path, title: str) -> Iterator[list[str]]:
    """The cells of the rows of the first table below a title of a page, without its head."""
    lines = page.read_text().partition(title)[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(RESULTS)))
def test_a_page_of_results_says_of_which_code_and_day_it_is(page: Path) -> None:
    head = page.read_text()[:1500]
    assert re.search(rf"{COMMIT}, {DAY}", head), head[:300]


def test_every_table_of_measurements_says_of_which_code_or_day_it_is() -> None:
    sections = re.split(r"^##+ ", (ROOT / "docs" / "performance.md").read_text(), flags=re.MULTILINE)[1:]
    without = {text.splitlines()[0] for text in sections if "|---|" in text and not re.search(DAY, text)}
    assert without == {"What to change first"}, "advice and estimates alone"


# ---- what was measured next to others ----


def test_the_picture_and_the_table_of_the_readme_are_those_of_the_results(pictures: dict[str, Any]) -> None:
    trained, loaded = pictures["trained"](), pictures["loaded"]()
    assert [sum(verdicts.values()) for verdicts in trained.values()] == [297] * 3
    for word in ("right", "silently wrong"):
        counts = " | ".join(str(verdicts[word]) for verdicts in trained.values())
        assert re.search(rf"\| [^|]*{word}[^|]*(\]\([^)]*\))?[^|]*\| {counts} \|", README), counts
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
    assert f"| 1, 1 | {cells} | {', '.join(native)} |" in README


def test_the_table_of_one_gpu_has_every_comparison_of_both_runs() -> None:
    """Those that the package loses too, in bold; and it says that the path is gone."""
    first, second = (RESULTS / "gpu" / name / "README.md" for name in ("2026-11-27", "2026-11-27-2"))
    _, _, section = PERFORMANCE.partition("### On one H200")
    section = section.partition("## Quantised")[0]
    for training, *cells in rows_below(first, "## Beside loops by hand"):
        rates = [re.match(r"[\d,]*", cell)[0] for cell in cells]  # type: ignore[index]
        is_lost = any(rate and int(rate.replace(",", "")) > int(rates[0].replace(",", "")) for rate in rates[1:])
        assert (f"**{rates[0]}**" in section) == is_lost, training
        assert all(rate in section for rate in rates), training
    for training, own, *others in rows_below(second, "## What one GPU pays"):
        assert f"**{own}** | " in section and all(other in section for other in others), training
    rates = re.search(
        r"Liger's kernels in call 2: ([\d,]+) tokens/s, plain ([\d,]+)", " ".join(second.read_text().split())
    )
    assert rates and f"**{rates[1]}**" in section and rates[2] in section
    assert "**The path is gone**" in section and all(commit in section for commit in ("f11779f8", "33f361e5"))


def test_the_readme_says_of_one_gpu_what_was_won_and_lost() -> None:
    first, second = (RESULTS / "gpu" / name / "README.md" for name in ("2026-11-27", "2026-11-27-2"))
    number = lambda cell: float(re.match(r"[\d,.]+", cell)[0].replace(",", ""))  # type: ignore[index]  # noqa: E731
    rates = {name: number(own) / number(plain) for name, own, _, plain in rows_below(first, "## Beside loops") if plain}
    slower = [number(own) / number(plain) for _, own, _, plain in rows_below(second, "## What one GPU pays")]
    lora, checkpointed, whole = (
        f"{100 * rates[name] - 100:+.0f} %" for name in ("8B LoRA", "8B LoRA, activation checkpointing", "1B full")
    )
    assert f"LoRA of an 8B {lora}, checkpointed {checkpointed}, a 1B {whole}; " in README
    assert f"rows of 128 tokens {min(slower) - 0.05:.1f} to {max(slower):.1f} times as slow" in README


# ---- estimates ----


def test_wrapping_is_compared_with_what_people_run_and_by_both_figures() -> None:
    fields: dict[str, Any] = {"num_processes": 8, "gpu": "h100-80gb", "max_length": 8192}
    fields |= {"activation_checkpointing": True}
    config = runpy.run_path(str(ROOT / "docs" / "models.py"))["CONFIGS"]["Llama-3.1-8B"]
    found = {}
    for name, own in (
        ("the root alone", {"wrapping": "root"}),
        ("blocks alone", {"policy": BLOCKS_ALONE}),
        ("plan", {}),
    ):
        memory = estimate_memory(config, TrainingSetup(**fields, **own))
        found[name] = [f"{size / 1e9:.1f} GB" for size in (memory.peak_allocated, memory.total)]
        cells = r" \| ".join(rf"(\*\*)?{size}(\*\*)?" for size in found[name])
        assert re.search(rf"\| [^|]*{name}[^|]* \| {cells} \|", PERFORMANCE), (name, found[name])
    assert found["blocks alone"][1] < found["plan"][1], "the plan takes more in all, as the text says"


def errors_on_the_h200() -> dict[str, list[float]]:
    """Estimated over measured, less 1, of the trainings that no estimate was made with, by kind."""
    found: dict[str, list[float]] = {}
    page = RESULTS / "gpu" / "2026-11-27-2" / "README.md"
    kind = "dense"
    for training, rates, allocated, reserved in rows_below(page, "## Estimates"):
        kind = "mixtures" if "mixture" in training else kind  # the rows after it are of the same
        for name, cell in ((kind, rates), ("allocated", allocated), ("reserved", reserved)):
            estimated, measured = (float(each.replace(",", "")) for each in re.findall(r"[\d,.]*\d", cell)[:2])
            found.setdefault(name, []).append(estimated / measured - 1)
    return found


def summary(page: str, figure: str) -> dict[str, str]:
    """A row of the first table of a page of published trainings, by its columns."""
    columns = ("figure", "number", "mean", "median", "bias", "below", "worst")
    (row,) = (row for row in rows_below(RESULTS / page, "> The code was") if row[0] == figure)
    return dict(zip(columns, row, strict=True))


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def test_the_sentences_on_estimates_are_those_of_the_results() -> None:
    """Mean and worst, dense models and mixtures apart, peaks and speeds, ours and published."""
    found = errors_on_the_h200()
    assert len(found["dense"]) == 11 and len(found["mixtures"]) == 2
    worst = {
        name: percent(max(map(abs, errors)), 0 if name in ("dense", "mixtures") else 1)
        for name, errors in found.items()
    }
    mean = percent(statistics.mean(map(abs, found["dense"])))
    low, high = (f"{100 * error:.0f}" for error in sorted(found["mixtures"]))
    peaks = summary("foresight_published.md", "peak memory")
    others = summary("foresight_published.md", "tokens per second")
    tuned = summary("foresight_throughput.md", "of these in no fit")
    said = {
        name: each["mean"].replace("%", " %") for name, each in (("peaks", peaks), ("others", others), ("tuned", tuned))
    }
    peak = peaks["worst"].strip("-").replace("%", " %")
    assert (peaks["number"], others["number"], tuned["number"]) == ("24", "25", "122")
    assert (
        f"peak memory (13 H200 runs: at most {worst['reserved']} off; 24 published: {said['peaks']} on average, "
        f"at worst {peak} too low) and tokens/s of dense models (122 published: {said['tuned']} on average; 25 others: "
        f"{said['others']}; H200: {mean}, at most {worst['dense']}; mixtures {low} and {high} %)" in README
    )
    times = 1 + float(others["worst"].strip("+%")) / 100
    assert all(
        sentence in FORESIGHT
        for sentence in (
            f"reserved ones {worst['reserved']}.",
            f"peaks were {said['peaks']} off on average, at worst {peak} higher than estimated, "
            f"{peaks['bias'].strip('-').replace('%', ' %')} higher on average.",
            f"{said['tuned']} off on average in 122 published tuned loops",
            f"({tuned['worst'].strip('+').replace('%', ' %')} at worst;",
            f"{said['others']} in 25 others (at worst {times:.1f} times the real rate), {mean} in 11 trainings on "
            f"the H200 ({worst['dense']} at worst).",
            f"two mixtures were {low} and {high} % too high",
        )
    )
    for row in (f"| {mean} | +{worst['dense']} |", f"| {said['peaks']} | -{peak} |", f"| +{high} % |"):
        assert row in PERFORMANCE, row
    for each in (tuned, others):
        assert f"| {each['mean']} | {each['worst']} |".replace("%", " %") in PERFORMANCE
