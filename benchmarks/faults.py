"""Kill saves and cut their power at each of their system calls, and count what was lost.

    python benchmarks/faults.py                                       # every kind of save, some minutes on 2 cores
    python benchmarks/faults.py --kinds adapter --tries 3             # some kinds, three kills each

The system calls of both ranks are noted while each kind of save replaces an older one (`calls.c`, needs a C compiler).
From the notes the folder is made again as it is when all processes are killed after each call, and when power is lost
there, data that was not synced being gone. Of the states that differ, so many as --tries says are opened, spread over
all: by plain transformers (PEFT for adapters), by a reader that follows the index, and by this package. All values are
compared with the older and the newer save by a hash. Then it is saved once more, and what is left in hidden files is
counted.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.faulting.replay import crash_states, preload
from benchmarks.faulting.saves import SAVES, Save, look_at, save_first, save_noted
from benchmarks.measuring import about, table_of
from hf_fsdp_tools.testing import hide_gpus, run_ranks
from tests._checkpoints import make_checkpoint

Row = dict[str, Any]


def kill(kind: Save, models: Path, folder: Path, tries: int) -> Row:
    """Replace an older save by a newer one; what is found in the states that a kill leaves.

    Old or new, where every way to open the folder gives the same; "lost" otherwise. And the hidden bytes that a
    further save leaves.
    """
    older = folder / "older"
    older.mkdir(parents=True)
    old = run_ranks(save_first, 2, kind, models, older)[0]
    now = shutil.copytree(older, folder / "now").resolve()
    new = run_ranks(save_noted, 2, kind, models, now, folder / "notes")[0]
    counts, outs = crash_states(older, now, folder / "notes", folder, tries)
    found, texts = {"old": 0, "new": 0, "lost": 0}, {}
    looks = run_ranks(look_at, 2, kind, models, outs, timeout_s=60 + 30 * len(outs))[0]
    for out, (digests, _) in zip(outs, looks, strict=True):
        names = {{old: "old", new: "new"}.get(digest, "lost") for digest in digests}
        outcome = names.pop() if len(names) == 1 else "lost"
        found[outcome] += 1
        if outcome == "lost":
            texts[out.name] = digests
    hidden = sum(left for _, left in looks)
    return {"save": kind.name, **counts, "opened": len(outs), **found, "hidden bytes left": hidden, "texts": texts}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=[""], help="of saves: words of their names")
    parser.add_argument("--tries", type=int, default=16, help="states of each kind")
    parser.add_argument("--records", type=Path, help="JSON lines to which rows are added")
    args = parser.parse_args()
    hide_gpus()
    rows = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        work = Path(folder)
        preload(work)  # before the first ranks
        for seed, name in enumerate("ab"):
            make_checkpoint("llama", work / "models" / name, seed=seed)
        for kind in SAVES:
            if any(word in kind.name for word in args.kinds):
                row = kill(kind, work / "models", work / "kills", args.tries)
                shutil.rmtree(work / "kills")
                print(json.dumps(row), flush=True)  # in full; of records, anybody should be able to read the figures
                del row["texts"]
                rows.append([str(value) for value in row.values()])
                if args.records:
                    with args.records.open("a") as stream:
                        stream.write(json.dumps({**row, "about": about("benchmarks/faults.py", "cpu")}) + "\n")
    print("\n".join(table_of(list(row), rows)))


if __name__ == "__main__":
    main()
