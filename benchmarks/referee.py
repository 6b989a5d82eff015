"""Train tiny models of many types under this package and under others on 2 CPU ranks, and compare all with one process.

    python -m benchmarks.referee rows.jsonl                       # every contestant, every type that takes part
    python -m benchmarks.referee rows.jsonl --contestants "transformers tp" --only llama qwen3_moe

A row for each type and contestant is written as it comes, and what has a row is not run again; a page (.md) is written
beside the rows. Bounds are those of `hf_fsdp_tools/proof/compare.py`: 1e-4 of the largest value of a tensor, and 1e-3
for weights after steps of AdamW.

right      both losses, all gradients of the first step, the saved model (opened by transformers, and for adapters by
           PEFT) and a run resumed after its first step are those of one process
wrong      one of them is not
refuses    a ValueError, a NotImplementedError or an error of its own, before the first step
crashes    any other error; hangs: no end after two minutes
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from multiprocessing import set_forkserver_preload
from pathlib import Path

from benchmarks.measuring import Row, state_of_the_code, table_of
from hf_fsdp_tools.testing import PRELOAD, hide_gpus, run_cases, run_ranks

LIMIT_S = 120.0
BATCH = 20
PARTS = {"first": 0, "saved": 1, "resumed": 0}
"""Parts of a run, and their ranks; 0 means all."""
VERDICTS = ("right", "wrong", "refuses", "crashes", "hangs", "takes no part")
CHECKS = {"loss": "loss", "gradients": "gradients", "saved": "saved weights", "resumed": "resumed run"}
REFUSALS = {"ValueError", "NotImplementedError", "FSDPToolsError"}
LIBRARIES = ["transformers", "accelerate", "trl", "peft", "torch", "hf_fsdp_tools"]


def judged(seen: Sequence[Row]) -> Row:
    """Verdict, which checks are wrong, and why, of what each part of a run has seen."""
    found: dict[str, tuple[float, str]] = {}
    for name in CHECKS:
        values = [tuple(part[name]) for part in seen if name in part]
        if values:
            found[name] = max(values, key=lambda value: (bool(value[1]), value[0]))
    wrong = [name for name, (_, problem) in found.items() if problem]
    row: Row = {"differences": {name: value for name, (value, _) in found.items()}, "wrong": wrong}
    if wrong:
        return row | {"verdict": "wrong", "why": "; ".join(f"{CHECKS[name]}: {found[name][1]}" for name in wrong)}
    failed = [part for part in seen if "error" in part]
    # Where one rank fails, the others see a connection closed.
    failed.sort(key=lambda part: "gloo" in part["error"]["said"])
    if failed:
        error, stage = failed[0]["error"], failed[0]["stage"]
        place = error["place"].rpartition("site-packages/")[2].rpartition("hf_fsdp_tools/")[2]
        is_first = failed[0]["part"].startswith("first")
        why = f"{'' if is_first else 'resumed, '}{stage}: {error['kinds'][0]}: {error['said']} ({place})"
        is_refusal = is_first and stage == "load" and REFUSALS & set(error["kinds"])
        verdict = "takes no part" if "NotTakenError" in error["kinds"] else "refuses" if is_refusal else "crashes"
        return row | {"verdict": verdict, "why": why}
    if len(found) < len(CHECKS):  # a part was killed
        stages = [part["stage"] for part in seen if part["stage"] != "done"]
        return row | {"verdict": "hangs", "why": ", ".join(stages) or "before it begins"}
    return row | {"verdict": "right", "why": ""}


def seen_in(out: Path) -> list[Row]:
    """What each part of a run has seen, on each rank."""
    return [{"part": file.name, **json.loads(file.read_text())} for file in sorted(out.glob("*.json"))]


def run_alone(contestant: str, folder: Path, out: Path) -> list[Row]:
    """What a contestant's run shows, each part in processes of its own."""
    from benchmarks.refereeing.contestants import RANKS, contest

    for part, ranks in PARTS.items():
        with suppress(AssertionError):  # its error lies in `out`
            run_ranks(contest, ranks or RANKS, contestant, folder, out, [part], timeout_s=LIMIT_S)
        if any(each["stage"] != "done" for each in seen_in(out) if each["part"].startswith("first")):
            break
    return seen_in(out)


def rows_of(types: Sequence[str], contestants: Sequence[str], is_done: Callable[[str, str], bool]) -> Iterator[Row]:
    """The cells of some types. Each contestant takes them one after the other in the same processes; whatever is not
    right there is run again alone, but for a crash after which the same processes go on to be right."""
    from benchmarks.refereeing.contestants import CONTESTANTS, RANKS, contest, prepare

    with tempfile.TemporaryDirectory(prefix="referee-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        with suppress(AssertionError):
            wanted = {CONTESTANTS[name].rows for name in contestants}
            run_ranks(run_cases, 1, {each: partial(prepare, each, home / each, wanted) for each in types})
        built = [each for each in types if (home / each / "plain.pt").exists()]
        for each in set(types) - set(built):
            error = home / each / "error.txt"
            why = error.read_text() if error.exists() else "its process ended"
            yield {"type": each, "contestant": "", "verdict": "not built", "why": why}
        for contestant in contestants:
            todo = {each: home / each / contestant for each in built if not is_done(each, contestant)}
            cases = {}
            for each, out in todo.items():
                out.mkdir()
                cases[each] = partial(contest, contestant, home / each, out, list(PARTS))
            with suppress(AssertionError):
                run_ranks(run_cases, RANKS, cases, timeout_s=LIMIT_S + 10 * len(todo))
            rows = [judged(seen_in(out)) for out in todo.values()]
            for row, after, (each, out) in zip(rows, [*rows[1:], None], todo.items(), strict=True):
                is_alone = row["verdict"] == "crashes" and after is not None and after["verdict"] == "right"
                if row["verdict"] not in ("right", "refuses", "takes no part") and not is_alone:
                    again = out.with_name(f"{out.name} again")
                    again.mkdir()
                    row = judged(run_alone(contestant, home / each, again))
                facts = json.loads((home / each / "facts.json").read_text())
                yield {"type": each, "class": facts["class"], "contestant": contestant, **row}


def written(output: Path) -> dict[tuple[str, str], Row]:
    """The rows of a file by type and contestant, the last of each."""
    lines = output.read_text().splitlines() if output.exists() else []
    return {(row["type"], row["contestant"]): row for row in map(json.loads, lines)}


NOTES = """2 ranks (gloo) and fp32, models made tiny from default configurations. Contestants take the types one after
the other in the same processes; what is wrong there, or breaks the processes, was run again in its own. An
Accelerator drops FSDP on CPUs, so its state is told that it has it (`benchmarks/refereeing/contestants.py`); the
operators of torch's context parallelism, which Accelerate uses, have none for CPUs, so it is not here. `accelerate
fsdp2`, TRL and PEFT on it load on rank 0 (`cpu_ram_efficient_loading`), as `accelerate config` proposes.

What is not right of this package, over all types: ShieldGemma 2, which transformers reopens with other weights;
SqueezeBERT calls `layer.forward` past all hooks; in Switch Transformers an expert that gets no token in a step has a
gradient of zeros here and none in one process, so that AdamW's momentum steps it.

Confirmed by hand, with a script that needs nothing of this package (`benchmarks/reports/`):

- `transformers_fsdp_tied_head.py`: transformers' FSDP trains a stale part of an embedding that is tied to the head,
  where the vocabulary does not divide by the ranks (gpt2, bart, deberta): the loss is 4.32 and not 3.91 after one step;
- `transformers_fsdp_chunked_files.py`: transformers' FSDP and its tp load wrong weights where files hold them fused
  (hrm_text, kimi_linear, bailing_hybrid, [all types](native_loading.md)): 24 of 35;
- `transformers_exaone_names.py`: transformers 5.24 saves EXAONE, opened by its own class, with Llama's configuration
  and other names, and opens it with random weights;
- `transformers_fsdp_buffers.py`: transformers' FSDP leaves a buffer that no file holds unfilled (falcon_h1): the loss
  is nan;
- `transformers_fsdp_resume.py`: an optimizer's state is not read again where a parameter had no gradient (gemma3 and
  llava without images; with images too, for the last layer of vision is not used);
- `accelerate_fsdp2_prepare.py`: Accelerate stops at saved buffers with `cpu_ram_efficient_loading` (deepseek_v3,
  glm4_moe, kimi_linear, bart), at tables inside of units (bert, modernbert), and at tables that several stacks share
  (t5, bart);
- `trl_fused_head.py`: TRL's SFTTrainer trains each part of a head by the gradient of one rank's rows, where FSDP2
  gathers the head apart from the final norm, as Accelerate does where it finds no such norm (hrm_text)."""


def page(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Totals, then every type, then why each cell is not right."""
    cells = {(row["type"], row["contestant"]): row for row in rows}
    contestants = [name for name in names if any(row["contestant"] == name for row in rows)]
    types = sorted({row["type"] for row in rows if row["contestant"]})
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *LIBRARIES[:4]))
    totals = []
    for name in contestants:
        own = [row for row in rows if row["contestant"] == name]
        count = Counter(row["verdict"] for row in own)
        of = Counter(CHECKS[check] for row in own if row["verdict"] == "wrong" for check in row["wrong"])
        said = ", ".join(f"{check} {number}" for check, number in of.items())
        totals.append([name, *(str(count[verdict] or "") for verdict in VERDICTS), said])
    lines = [
        "# The referee",
        "",
        state_of_the_code(),
        "",
        "What the words mean stands at the top of `benchmarks/referee.py`.",
        "",
    ]
    lines += [f"{versions}; {len(types)} types. {NOTES}", ""]
    lines += table_of(["", *VERDICTS, "wrong in"], totals)
    letters = {"right": "·", "wrong": "**W**", "refuses": "r", "crashes": "C", "hangs": "H", "takes no part": ""}
    marks = [
        [name] + [letters.get(cells.get((name, c), {}).get("verdict", ""), "") for c in contestants] for name in types
    ]
    lines += ["", "## By type", "", "· right, **W** wrong, r refuses, C crashes, H hangs", ""]
    lines += table_of(["", *contestants], marks)
    for verdict in ("wrong", "crashes", "hangs", "refuses"):
        whys: dict[tuple[str, str], list[str]] = {}
        for row in sorted((row for row in rows if row["verdict"] == verdict), key=lambda row: row["type"]):
            why = (
                re.sub(r"\b[A-Z]\w+(For|LM|Model)\w*", "MODEL", row["why"])[:240]
                .replace("loss: loss", "loss")
                .replace("|", "/")
                .replace("<", "&lt;")
            )
            whys.setdefault((row["contestant"], why), []).append(row["type"])
        found = [[contestant, ", ".join(of), why] for (contestant, why), of in sorted(whys.items())]
        if found:
            lines += ["", f"## {verdict}", "", *table_of(["", "types", "why"], found)]
    absent = {row["type"] for row in rows if row["verdict"] == "not built"}
    if absent:
        lines += ["", f"No tiny model is made of the default configuration of: {', '.join(sorted(absent))}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="rows are added here (.jsonl)")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="default: all types")
    args = parser.parse_args()
    hide_gpus()
    set_forkserver_preload([*PRELOAD, "benchmarks.refereeing.contestants"])
    from transformers import CONFIG_MAPPING

    from benchmarks.refereeing.contestants import CONTESTANTS, model_classes

    names, done = args.contestants or list(CONTESTANTS), written(args.output)
    types = args.only or [name for name in sorted(CONFIG_MAPPING) if model_classes(name)]
    types = [each for each in types if (each, "") not in done and any((each, name) not in done for name in names)]
    for first in range(0, len(types), BATCH):
        for row in rows_of(types[first : first + BATCH], names, lambda *cell: cell in done):
            with args.output.open("a") as file:
                print(json.dumps(row), file=file)
            print(*(row[key] for key in ("type", "contestant", "verdict", "why")), file=sys.stderr, flush=True)
    args.output.with_suffix(".md").write_text(page(list(written(args.output).values()), list(CONTESTANTS)))


if __name__ == "__main__":
    main()
