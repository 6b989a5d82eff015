"""Attack what the package promises of saves, states, checkpoints and ranks, and count what was lost.

    python benchmarks/faults.py                                       # everything, about an hour on 2 cores
    python benchmarks/faults.py --only kills --tries 3                # a part of it, three kills per kind of save
    python benchmarks/faults.py --records FILE --report docs/reliability.md    # put its table into a document

kills      The system calls of both ranks are noted while each kind of save replaces an older one (`calls.c`, needs a C
           compiler). From the notes the folder is made again as it is when all processes are killed after each call,
           and when power is lost there, data that was not synced being gone. Of the states that differ, so many as
           --tries says are opened, spread over all: by plain transformers (PEFT for adapters), by a reader that follows
           the index, and by this package. All values are compared with the older and the newer save by a hash; of a
           Trainer, the end of the resumed training with the end of an uninterrupted one, optimizer included. Then it is
           saved once more, and what is left in hidden files is counted.
background saves with blocking=False and a disk that is full on one rank, or a folder that is gone, from one of the
           rank's system calls on; and a script that ends right after the call. What is found afterwards is compared as
           for kills, and what every rank ended with is counted.
stopped    SIGKILL or SIGSTOP of one of 2 ranks at a random moment of loading, preparing and saving. How long the other
           rank goes on, and what it says.
files      each file of a checkpoint and of a training state removed, cut, overwritten and changed in single bytes.
code       each pickled file of a checkpoint and of a training state replaced by one that writes a file when unpickled.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faulting.files import attack_code, attack_files
from faulting.replay import crash_states, preload
from faulting.saves import ENDS, SAVES, Save, look_at, save_first, save_struck
from faulting.stopped import ROADS, stop

from benchmarks.measuring.rounds import command
from tests._checkpoints import make_checkpoint
from tests._dist import hide_gpus, run_ranks

Row = dict[str, Any]
PARTS = ["kills", "background", "stopped", "files", "code"]
BEGIN, END = "<!-- made by benchmarks/faults.py -->", "<!-- end -->"


# ---- kills ----


def kills(models: Path, work: Path, tries: int, draw: random.Random, is_asked: Callable[[str], bool]) -> Iterator[Row]:
    """One row per kind of save."""
    for kind in SAVES.values():
        if not is_asked(kind.name):
            continue
        folder = work / "kills"
        shutil.rmtree(folder, ignore_errors=True)
        older, old, now, new, _ = saved_twice(kind, models, folder)
        counts, outs = crash_states(older, now, folder / "notes", folder, tries)
        found, left, lost = looked(kind, models, outs, old, new)
        yield {"part": "kills", "what": kind.name, **counts, "found": found, "left over": left, "lost": lost}


def saved_twice(kind: Save, models: Path, folder: Path) -> tuple[Path, str, Path, str, list[int]]:
    """A folder with the older save, its digest, one in which it was replaced, that digest, and each rank's calls."""
    older = folder / "older"
    older.mkdir(parents=True)
    old = run_ranks(save_first, 2, kind, models, older)[0]
    now = shutil.copytree(older, folder / "now").resolve()
    ended = run_ranks(save_struck, 2, kind, models, now, folder / "notes")
    return older, old, now, ended[0][0], [calls for _, calls in ended]


def looked(
    kind: Save, models: Path, outs: list[Path], old: str, new: str, *, removed: bool = False
) -> tuple[dict[str, int], int, list[Any]]:
    """How often each verdict was, hidden bytes that a further save leaves, and what was found in lost folders."""
    looks = run_ranks(look_at, 2, kind, models, outs, timeout_s=60 + 30 * len(outs))[0]
    verdicts = [verdict(found, old, new, removed) for found, _ in looks]
    lost = [[out.name, found] for out, (found, _), one in zip(outs, looks, verdicts, strict=True) if one == "lost"]
    return dict(Counter(verdicts)), sum(left for _, left in looks), lost


def in_background(
    models: Path, work: Path, tries: int, draw: random.Random, is_asked: Callable[[str], bool]
) -> Iterator[Row]:
    """One row per kind of save in the background and fault, and one for a script that ends."""
    folder = work / "background"
    for kind in [*(kind for kind in SAVES.values() if "blocking" in kind.name), ENDS]:
        for fault in ("disk full", "removed folder") if kind is not ENDS else ("none",):
            if is_asked(kind.name):
                shutil.rmtree(folder, ignore_errors=True)
                row = strike(kind, fault, models, folder, tries, draw)
                yield {"part": "background", "what": kind.name, "fault": fault, **row}


def strike(kind: Save, fault: str, models: Path, folder: Path, tries: int, draw: random.Random) -> Row:
    """Strike a save so many times; what was found. Without a fault, let it be as often."""
    older, old, _, new, calls = saved_twice(kind, models, folder)
    outs, others, texts = [], Counter[str](), {}
    for i in range(tries):
        rank = draw.choice([rank for rank in (0, 0, 1) if calls[rank]])  # rank 0 does more
        at = 1 + (i * calls[rank] // tries + draw.randrange(max(calls[rank] // tries, 1))) % calls[rank]
        out = shutil.copytree(older, folder / f"try-{i}").resolve()
        struck = None if fault == "none" else (rank, {"disk full": "f", "removed folder": "r"}[fault], at)
        try:
            run_ranks(save_struck, 2, kind, models, out, folder / f"notes-{i}", struck)
            others["the save was over"] += 1
        except AssertionError as error:
            others[" and ".join(dict.fromkeys(said(str(error), one) for one in (0, 1)))] += 1
            texts[out.name] = [struck, str(error)[-6000:]]
        outs.append(out)
    found, left, lost = looked(kind, models, outs, old, new, removed=fault == "removed folder")
    return {"tries": tries, "found": found, "left over": left, "other rank": dict(others), "texts": texts, "lost": lost}


def verdict(found: list[str], old: str, new: str, removed: bool) -> str:
    """Old or new, where every way to open the folder says the same; "gone" where all of a removed folder say that it
    holds nothing; "lost" otherwise."""
    if removed and all(one.startswith("error: ") for one in found):
        return "gone"
    names = {old: "old", new: "new"}
    one = {names.get(digest, "lost") for digest in found}
    return one.pop() if len(one) == 1 else "lost"


def said(failure: str, rank: int) -> str:
    """The kind of error with which that rank ended, of the text about failed ranks."""
    text = failure.partition(f"--- rank {rank} ")[2].partition("--- rank ")[0]
    if not text or "was killed" in text.splitlines()[0]:
        return "waited until the end" if text else "ended well"
    last = [line for line in text.splitlines() if line and not line.startswith((" ", "Traceback"))]
    named = [line for line in last if line.split(":")[0].rpartition(".")[2].endswith(("Error", "Stop", "Elsewhere"))]
    return (named or last)[-1].split(":")[0].rpartition(".")[2]


# ---- the document ----


def report(rows: list[Row], about: str) -> str:
    """The tables of all parts."""
    lines = [about, ""]
    if kills := [row for row in rows if row["part"] == "kills"]:
        lines += [
            "| Save | states: killed | power lost | that differ | opened | old | new | lost | hidden bytes left |"
        ]
        lines += ["|---" * 9 + "|"]
        for row in kills:
            found = [row["found"].get(name, 0) for name in ("old", "new", "lost")]
            cells = [row["kills"], row["power"], row["differ"], sum(found), *found, row["left over"]]
            lines += [f"| {' | '.join([row['what'], *map(str, cells)])} |"]
        lines += [""]
    if saves := [row for row in rows if row["part"] == "background"]:
        lines += ["| Save in the background | meanwhile | times | old | new | gone | lost | the ranks ended with |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for row in saves:
            found = [str(row["found"].get(name, 0)) for name in ("old", "new", "gone", "lost")]
            ends = ", ".join(f"{name}: {count}" for name, count in row["other rank"].items())
            lines += [f"| {' | '.join([row['what'], row['fault'], str(row['tries']), *found, ends])} |"]
        lines += [""]
    if stops := [row for row in rows if row["part"] == "stopped"]:
        lines += [
            "| One rank struck while | signal | times | the other ended with | after at most |",
            "|---|---|---|---|---|",
        ]
        for row in stops:
            ends = ", ".join(f"{name}: {count}" for name, count in row["other rank"].items())
            longest = f"{row['longest_s']:.0f} s" if row["longest_s"] else "the group's timeout"
            lines += [f"| {row['what']} | {row['signal']} | {row['tries']} | {ends} | {longest} |"]
        lines += [""]
    if files := [row for row in rows if row["part"] in ("files", "code")]:
        outcomes = sorted({outcome for row in files for outcome in row["outcomes"]})
        lines += [f"| Damaged | files | {' | '.join(outcomes)} |", "|---" * (len(outcomes) + 2) + "|"]
        for row in files:
            counts = [str(row["outcomes"].get(outcome, 0)) for outcome in outcomes]
            lines += [f"| {row['what']} | {row['tries']} | {' | '.join(counts)} |"]
        lines += [""]
    return "\n".join(lines)


def put_into(document: Path, text: str) -> None:
    """Replace what stands between the two marks of a document."""
    whole = document.read_text(encoding="utf-8")
    before, _, rest = whole.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{document} has no lines {BEGIN!r} and {END!r} between which the table belongs.")
    document.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def about() -> str:
    """Where and with what the attacks were made."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "peft"))
    ran = command("benchmarks/faults.py")
    return f"{date.today()}; {versions}; 2 ranks over gloo on {len(os.sched_getaffinity(0))} cores. `{ran}`"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[])
    parser.add_argument(
        "--kinds", nargs="+", default=[], help="of saves, of what is stopped, of folders: words of their names"
    )
    parser.add_argument("--tries", type=int, default=16, help="states of each kind of save; other parts in proportion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, help="JSON lines to which rows are added; with --report they are read")
    parser.add_argument("--report", type=Path, help="attack nothing; put the table of the records into this document")
    args = parser.parse_args()
    if args.report:
        rows = [json.loads(line) for line in args.records.read_text().splitlines()]
        put_into(args.report, report(rows, rows[-1]["about"]))
        return
    hide_gpus()
    draw = random.Random(args.seed)

    def is_asked(name: str) -> bool:
        return not args.kinds or any(word in name for word in args.kinds)

    parts = args.only or PARTS
    rows = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        work = Path(folder)
        if not preload(work):  # before the first ranks
            parts = [part for part in parts if part not in ("kills", "background")]
            print("There is no C compiler (cc): kills and background are left out.")
        models = work / "models"
        for seed, name in enumerate("ab"):
            make_checkpoint("llama", models / name, seed=seed)
        for part in parts:
            attacks = {
                "kills": lambda: kills(models, work, args.tries, draw, is_asked),
                "background": lambda: in_background(models, work, max(args.tries // 2, 1), draw, is_asked),
                "stopped": lambda: (
                    row for road in ROADS if is_asked(road) for row in stop(road, models, work, args.tries // 4, draw)
                ),
                "files": lambda: attack_files(models, work, draw, is_asked),
                "code": lambda: attack_code(models, work, is_asked),
            }[part]()
            for row in attacks:
                # What was said in full is printed; of records, anybody should be able to read the figures.
                looked = {name: outcome for name, (outcome, _) in row.get("look at", {}).items()}
                kept = {key: value for key, value in row.items() if key not in ("texts", "look at")}
                rows.append(kept | ({"look at": looked} if looked else {}) | {"about": about()})
                print(json.dumps(row), flush=True)
                if args.records:
                    with open(args.records, "a") as stream:
                        stream.write(json.dumps(rows[-1]) + "\n")
    print(report(rows, about()))


if __name__ == "__main__":
    main()
