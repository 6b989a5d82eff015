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
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faulting.damaged import attack_code, attack_files
from faulting.replay import preload
from faulting.struck import in_background, kills, stopped

from benchmarks.measuring.rounds import command
from tests._checkpoints import make_checkpoint
from tests._dist import hide_gpus

PARTS = {
    "kills": kills,
    "background": in_background,
    "stopped": stopped,
    "files": attack_files,
    "code": attack_code,
}
BEGIN, END = "<!-- made by benchmarks/faults.py -->", "<!-- end -->"


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of a table for each part: a column for each figure, and for each outcome in any row."""
    for part in PARTS:
        of_part = [flat(row) for row in rows if row["part"] == part]
        columns = list(dict.fromkeys(name for row in of_part for name in row))
        if of_part:
            yield from (f"| {part}: {' | '.join(columns)} |", f"|{'---|' * len(columns)}")
            yield from (f"| {' | '.join(str(row.get(name, 0)) for name in columns)} |" for row in of_part)
            yield ""


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """The figures of a row, those of outcomes each under its own name; without texts."""
    counts = {name: count for outcomes in ("found", "ended with") for name, count in row.get(outcomes, {}).items()}
    return {name: value for name, value in row.items() if isinstance(value, (str, int, float))} | counts


def put_into(document: Path, rows: list[dict[str, Any]]) -> None:
    """Replace what stands between the two marks of a document."""
    before, _, rest = document.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{document} has no lines {BEGIN!r} and {END!r} between which the table belongs"
    about = rows[-1].pop("about")
    rows = [{name: value for name, value in row.items() if name != "about"} for row in rows]
    document.write_text(f"{before}{BEGIN}\n\n{about}\n\n" + "\n".join(table(rows)) + f"\n{END}{after}", "utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kinds", nargs="+", default=[""], help="of saves, stops and folders: words of their names")
    parser.add_argument("--tries", type=int, default=16, help="states of each kind of save; other parts in proportion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, help="JSON lines to which rows are added; with --report they are read")
    parser.add_argument("--report", type=Path, help="attack nothing; put the table of the records into this document")
    args = parser.parse_args()
    if args.report:
        put_into(args.report, [json.loads(line) for line in args.records.read_text().splitlines()])
        return
    hide_gpus()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "peft"))
    ran = command("benchmarks/faults.py")
    about = f"{date.today()}; {versions}; 2 ranks over gloo on {len(os.sched_getaffinity(0))} cores. `{ran}`"
    rows = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        work = Path(folder)
        preload(work)  # before the first ranks
        models = work / "models"
        for seed, name in enumerate("ab"):
            make_checkpoint("llama", models / name, seed=seed)
        for part in args.only:
            for row in PARTS[part](models, work, args.tries, random.Random(args.seed), args.kinds):
                # What was said in full is printed; of records, anybody should be able to read the figures.
                print(json.dumps(row), flush=True)
                kept = {key: value for key, value in row.items() if key != "texts"}
                rows.append({"part": part, **kept, "about": about})
                if args.records:
                    with open(args.records, "a") as stream:
                        stream.write(json.dumps(rows[-1]) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
