"""From what the programs of a part left to its figures: one function for each kind of part."""

import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import Check, Done, Outcome, Ratio

__all__ = ["contexts", "doctor", "loading", "peers", "prediction", "recipe", "repeated", "saving", "short_pair"]
__all__ += ["tests", "trained_pair", "two_gpus"]

GB, MIB = 1e9, 2**20
_OWN_PACKAGES = ("hf_fsdp_tools", "tests", "benchmarks")
_OURS, _PLAIN = "hf_fsdp_tools", "transformers from_pretrained(device_map)"


def doctor(done: dict[str, Done]) -> Outcome:
    """What it found; an error that it finds is its exit code."""
    return Outcome(text=done["doctor"].output)


def tests(done: dict[str, Done]) -> Outcome:
    """Numbers of tests, and the names of those that failed. A test file whose package is missing is no failure."""
    report = Path(done["tests"].files, "tests.xml")
    if not report.exists():
        return _unfinished_tests(done["tests"].output)
    count: Counter[str] = Counter()
    bad, absent, skipped = [], [], Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name')}".removeprefix("::")
        found = next((part for part in case if part.tag in ("error", "failure", "skipped")), None)
        said = "" if found is None else found.text or found.get("message", "")
        missing = re.search(r"ModuleNotFoundError: (?:No module named '|import of )(\w+)", said)
        if found is None:
            count["passed"] += 1
        elif found.get("message") == "collection skipped":
            why = said.strip().rsplit("Skipped: ")[-1].removesuffix("')")
            absent.append(f"{name}: {why}")
        elif found.get("message") == "collection failure" and missing and missing[1] not in _OWN_PACKAGES:
            absent.append(f"{name}: {missing[1]} is not installed")
        elif found.tag == "skipped":
            count["skipped"] += 1
            skipped[found.get("message", "")] += 1
        else:
            count["failed"] += 1
            errors = [line.removeprefix("E").strip() for line in said.splitlines() if line.startswith("E ")]
            bad.append(f"{name}: {[found.get('message', ''), *errors][-1][:200]}")
    figures: dict[str, Any] = {key: count[key] for key in ("passed", "failed", "skipped")}
    figures |= {f"skipped: {why}": number for why, number in skipped.items()}
    figures |= {"not collected": "; ".join(absent)} if absent else {}
    claim = f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"
    check = Check(claim=claim, held=count["passed"] > 0 and not bad)
    return Outcome(figures=figures, checks=[check], text="\n".join(bad))


def _unfinished_tests(output: str) -> Outcome:
    """What was printed of tests until they were ended."""
    found = re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", output, re.MULTILINE)
    count = Counter(how for _, how in found)
    bad = [name for name, how in found if how in ("FAILED", "ERROR")]
    figures = {how.lower(): number for how, number in count.items()}
    claim = f"all tests ended: {count['PASSED']} passed and {len(bad)} failed before"
    return Outcome(figures=figures, checks=[Check(claim=claim, held=False)], text="\n".join(bad))


def contexts(done: dict[str, Done]) -> Outcome:
    """No rank may have a context on another GPU than its own."""
    ranks: list[dict[str, list[int]]] = done["contexts"].result["ranks"]
    checks = []
    for stage in ranks[0]:
        strays = {rank: found[stage] for rank, found in enumerate(ranks) if found[stage] != [rank]}
        shown = "; ".join(f"rank {rank} on GPUs {', '.join(map(str, gpus))}" for rank, gpus in strays.items())
        checks.append(Check(claim=f"after {stage}: {shown or 'each rank on its own GPU alone'}", held=not strays))
    return Outcome(checks=checks, figures={"ranks": len(ranks)})


def loading(done: dict[str, Done]) -> Outcome:
    """Speeds of every cell, beside the limit and transformers."""
    outcome = Outcome()
    for line in Path(done["load"].files, "load.jsonl").read_text().splitlines():
        _read_cell(json.loads(line), outcome)
    return outcome


def _read_cell(record: dict[str, Any], outcome: Outcome) -> None:
    cell, rows = record["cell"], record["rows"]
    into = {"stored": "bf16", "fp32": "into fp32"}[cell["dtype"]]
    ranks = f"{cell['ranks']} GPUs" if cell["ranks"] > 1 else "1 GPU"
    where = f"{cell['model']}, {into}, {cell['cache']}, {ranks}"
    for name, row in rows.items():
        title = f"{where}: {name}"
        if "failed" in row:
            outcome.checks.append(Check(claim=f"{title} fails: {row['failed']}", held=False))
            continue
        if "threads" in row:
            read, copy = (row[key] * cell["ranks"] / GB for key in ("read_bytes_s", "copy_bytes_s"))
            said = f"read {read:.1f}, pinned copy {copy:.1f} GB/s, {row['threads']} threads"
            outcome.figures[title] = said
        if name.startswith(_OURS):
            outcome.ratios += _ratios_of(where, name, cell["bytes"], rows)
            outcome.figures[f"{title}: memory before any garbage is collected"] = _memory_of(row)
            said = {"–": "not compared"}.get(row["wrong"], row["wrong"])
            outcome.checks.append(Check(claim=f"{title}: values {said}", held=row["wrong"] in ("equal", "–")))


def _ratios_of(where: str, name: str, size: int, rows: dict[str, Any]) -> list[Ratio]:
    """Of one of our rows: the whole call and its reading beside the limit, and the call beside transformers."""
    speed = {key: size / statistics.median(row["seconds"]) / GB for key, row in rows.items() if row.get("seconds")}
    reading = size / statistics.median(rows[name]["read_s"]) / GB
    where += name.removeprefix(_OURS)
    limit = name.replace(_OURS, "limit")
    found = []
    for what, ours, other, of in (
        ("from_pretrained", speed[name], limit, "the limit: read, or pinned copy"),
        ("its reading alone", reading, limit, "the limit: read, or pinned copy"),
        ("from_pretrained", speed[name], _PLAIN, "transformers' from_pretrained(device_map)"),
    ):
        if other in speed:
            found.append(Ratio(what=f"{where}: {what}", ours=ours, other=speed[other], of=of, unit="GB/s"))
    return found


def _memory_of(row: dict[str, Any]) -> str:
    worst = {key: max(rank[key] for rank in row["ranks"]) / MIB for key in row["ranks"][0]}
    return (
        f"pinned {worst['pinned']:.0f} MiB at most, {worst['pinned_left']:.0f} left; on the GPU above the shards "
        f"{worst['above_device']:.0f} MiB at most, {worst['reserved_left']:.0f} still reserved; on the host "
        f"{worst['above']:.0f} MiB"
    )


def saving(done: dict[str, Done]) -> Outcome:
    """Speeds of saving, beside the limit and transformers; what was saved must open with every value as it was."""
    outcome = Outcome()
    for line in Path(done["save"].files, "save.jsonl").read_text().splitlines():
        cell, rows = (json.loads(line)[key] for key in ("cell", "rows"))
        speed = {
            key: cell["bytes"] / statistics.median(row["on_disk"]) / GB for key, row in rows.items() if len(row) > 1
        }
        for name, row in rows.items():
            title = f"{cell['model']}, {cell['ranks']} GPU: {name}"
            said = row.get("failed") or row["wrong"]
            outcome.checks.append(Check(claim=f"{title}: {said}", held=said in ("equal", "–")))
            if "pause" in row:
                outcome.figures[f"{title}: pause"] = f"{statistics.median(row['pause']):.2f} s"
        for other in ("limit", "transformers save_pretrained"):
            if _OURS in speed and other in speed:
                what = f"{cell['model']}, {cell['ranks']} GPU: save_pretrained, until all is on disk"
                pair = {"ours": speed[_OURS], "other": speed[other]}
                outcome.ratios.append(Ratio(what=what, of=other, unit="GB/s", **pair))
    return outcome


def repeated(done: dict[str, Done]) -> Outcome:
    """Nothing may grow after the second load."""
    found = done["loads"].result
    checks = []
    for key, what in (("pinned", "pinned bytes in use"), ("reserved", "bytes reserved on the GPU")):
        shown = ", ".join(f"{value / MIB:.0f}" for value in found[key])
        checks.append(Check(claim=f"{what} after each load, MiB: {shown}", held=found[key][-1] <= found[key][1]))
    return Outcome(checks=checks, figures={"shards, MiB": f"{found['shards'] / MIB:.0f}"})


def recipe(done: dict[str, Done]) -> Outcome:
    """The evaluation loss must fall."""
    found = re.search(r"evaluation loss +([\d.]+) before, ([\d.]+) after", done["recipe"].output)
    if found is None:
        return Outcome(checks=[Check(claim="it prints no evaluation loss", held=False)])
    before, after = map(float, found.groups())
    return Outcome(checks=[Check(claim=f"evaluation loss {before} before, {after} after", held=after < before)])


def short_pair(done: dict[str, Done]) -> Outcome:
    """A run of ours beside a plain one: the same losses, falling; memory. Tiny steps say nothing of speed."""
    outcome = _pair(done, compared=len((done["plain"].result or {}).get("losses", [])))
    if ours := done["ours"].result:
        first, last = ours["losses"][0], ours["after"]
        outcome.checks.append(Check(claim=f"loss {first:.4f} first, {last:.4f} last", held=last < first))
    outcome.ratios = [ratio for ratio in outcome.ratios if not ratio.more_is_better]
    return outcome


def trained_pair(done: dict[str, Done]) -> Outcome:
    """Tokens per second and memory of ours beside a plain run; the first losses must agree."""
    return _pair(done, compared=4)


def _pair(done: dict[str, Done], *, compared: int) -> Outcome:
    outcome = Outcome()
    ours, plain = done["ours"].result, done["plain"].result
    for name, found in (("ours", ours), ("plain", plain)):
        if found:
            outcome.figures |= {f"{name}: {what}": said for what, said in _said_of(found).items()}
    if ours and plain:
        outcome.ratios += [
            _beside_plain("training", ours, plain, "tokens_s", "tokens/s"),
            _beside_plain("peak memory in training", ours, plain, "peak", "GB"),
            _beside_plain("peak memory while loading", ours, plain, "load_peak", "GB"),
        ]
        outcome.checks.append(_same("losses of ours and plain", ours["losses"][:compared], plain["losses"], 2e-2))
    return outcome


def _said_of(found: dict[str, Any]) -> dict[str, str]:
    """A training run in words."""
    mib = {key: f"{found[key] / MIB:,.0f}" for key in ("peak", "reserved", "load_peak", "used")}
    memory = (
        f"{mib['peak']} allocated and {mib['reserved']} reserved at most in training, {mib['load_peak']} allocated "
    )
    memory += f"at most while loading, {mib['used']} of the GPU taken"
    return {
        "losses": ", ".join(f"{loss:.4f}" for loss in found["losses"][:6]),
        "speed": f"{found['tokens_s']:,.0f} tokens/s, {found['step_s'] * 1e3:.1f} ms a step",
        "memory, MiB": memory,
        "loading": f"{found['load_s']:.1f} s",
    }


def _beside_plain(what: str, ours: dict[str, Any], plain: dict[str, Any], key: str, unit: str) -> Ratio:
    is_memory = unit == "GB"
    mine, other = (found[key] / (GB if is_memory else 1) for found in (ours, plain))
    of = "transformers + PyTorch"
    return Ratio(what=what, ours=mine, other=other, of=of, unit=unit, more_is_better=not is_memory)


def _same(what: str, found: list[float], expected: list[float], limit: float) -> Check:
    """Losses that are close: bf16 keeps 8 bits of a number (4e-3), and AdamW carries rounding on."""
    apart = max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(found, expected, strict=False))
    claim = f"{what}: {apart:.1e} apart, relative, in {len(found)} steps (at most {limit:.0e})"
    return Check(claim=claim, held=apart <= limit)


def two_gpus(done: dict[str, Done]) -> Outcome:
    """Sharded training against one GPU, a resumed run against the one that went on, the saved model against ours."""
    results = {name: program.result for name, program in done.items() if program.result}
    outcome = Outcome()
    for name, found in results.items():
        outcome.figures[f"{name}: losses"] = ", ".join(f"{loss:.5f}" for loss in found["losses"])
    one, two = results.get("one"), results.get("two")
    if one and two:
        outcome.checks.append(_same("two GPUs and one", two["losses"], one["losses"], 1e-3))
        memory = {"ours": two["peak"] / GB, "other": one["peak"] / GB, "unit": "GB", "more_is_better": False}
        outcome.ratios.append(Ratio(what="peak memory of a rank of two", of="one GPU", **memory))
    for name in ("resumed", "resumed on one"):
        if two and name in results:
            rest = two["losses"][len(two["losses"]) // 2 :]
            outcome.checks.append(_same(f"{name} and uninterrupted", results[name]["losses"], rest, 1e-3))
    if two and "opened" in results:
        found = results["opened"]["losses"][:1]
        outcome.checks.append(_same("loss of the saved model, opened by transformers", found, [two["after"]], 1e-3))
    return outcome


def prediction(done: dict[str, Done]) -> Outcome:
    """Memory as the allocator counts it beside what was foreseen, of one rank of 8 and of 64."""
    outcome = Outcome()
    for record in _lines(done["memory"], "memory.jsonl"):
        name = f"{record['case']}, {record['gpus']} GPUs"
        for kind, foreseen in record["foreseen"].items():
            measured = record["measured"][kind]
            outcome.figures[f"{name}: {kind}"] = f"{measured / MIB:,.0f} MiB, foreseen {foreseen / MIB:,.0f}"
        found, foreseen = record["measured"]["allocated"], record["foreseen"]["allocated"]
        claim = f"{name}: foreseen peak {foreseen / found - 1:+.2%} of what was allocated (at most 2 % off)"
        outcome.checks.append(Check(claim=claim, held=abs(foreseen / found - 1) <= 0.02))
    return outcome


def peers(done: dict[str, Done]) -> Outcome:
    """Tokens/s and peak memory of the recipe beside those of other programs."""
    outcome = Outcome()
    for record in _lines(done["training"], "training.jsonl"):
        rows = {name: row for name, row in record["rows"].items() if "failed" not in row}
        outcome.figures |= {name: row["failed"] for name, row in record["rows"].items() if name not in rows}
        name = next(iter(record["rows"]))  # ours; the others follow
        outcome.checks.append(Check(claim=f"{name} trains", held=name in rows))
        if name not in rows:
            continue
        speed = {name: row["tokens"] / statistics.median(row["seconds"]) for name, row in rows.items()}
        outcome.figures[name] = f"{speed[name]:,.0f} tokens/s, peak {rows[name]['peak'] / GB:.2f} GB"
        for other in rows.keys() - {name}:
            of = {"of": other, "what": "LoRA, 8B, training"}
            outcome.ratios.append(Ratio(ours=speed[name], other=speed[other], unit="tokens/s", **of))
            memory = {"ours": rows[name]["peak"] / GB, "other": rows[other]["peak"] / GB, "more_is_better": False}
            outcome.ratios.append(Ratio(unit="GB", **memory, **of))
    return outcome


def _lines(done: Done, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(done.files, name).read_text().splitlines()]
