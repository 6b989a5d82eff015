"""Strike saves, and count what was lost.

    python benchmarks/faults.py                                       # everything, about half an hour on 2 cores
    python benchmarks/faults.py --only kills --tries 3                # a part of it, three kills per kind of save

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
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faulting.replay import preload
from faulting.struck import in_background, kills

from benchmarks.measuring.comparison import about
from tests._checkpoints import make_checkpoint
from tests._dist import hide_gpus

SCRIPT = "benchmarks/faults.py"
PARTS = {"kills": kills, "background": in_background}


def table(part: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of a table: a column for each figure, and for each outcome in any row."""
    flat = [
        {name: value for name, value in row.items() if isinstance(value, (str, int, float))}
        | row.get("found", {})
        | row.get("ended with", {})
        for row in rows
    ]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    yield from (f"| {part}: {' | '.join(columns)} |", f"|{'---|' * len(columns)}")
    yield from (f"| {' | '.join(str(row.get(name, 0)) for name in columns)} |" for row in flat)
    yield ""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kinds", nargs="+", default=[""], help="of saves: words of their names")
    parser.add_argument("--tries", type=int, default=16, help="states of each kind; half as many in the background")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, help="JSON lines to which rows are added")
    args = parser.parse_args()
    hide_gpus()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        work = Path(folder)
        preload(work)  # before the first ranks
        models = work / "models"
        for seed, name in enumerate("ab"):
            make_checkpoint("llama", models / name, seed=seed)
        for part in args.only:
            rows = []
            for row in PARTS[part](models, work, args.tries, random.Random(args.seed), args.kinds):
                print(json.dumps(row), flush=True)
                # Texts are printed in full; of records, anybody should be able to read the figures.
                rows.append({key: value for key, value in row.items() if key != "texts"})
                if args.records:
                    with open(args.records, "a") as stream:
                        stream.write(json.dumps({"part": part, **rows[-1], "about": about(SCRIPT, "cpu")}) + "\n")
            print("\n".join(table(part, rows)))


if __name__ == "__main__":
    main()
