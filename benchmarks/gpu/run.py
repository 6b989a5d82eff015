"""One call of ten minutes on a machine with one GPU: steps in turn, a line of JSON for each, a table in the end.

    python -m benchmarks.gpu.run ranks|one|memory|faults  # what they show: README.md
    python -m benchmarks.gpu.run one --forecast           # writes forecast.json, before a machine is there
    python -m benchmarks.gpu.run one --tiny --device cpu  # tiny models, over gloo, to try the script

A child does the steps, each of which has a limit. Where the child dies or is late, another goes on with the next step.
What has a line in the records is not done again, so that a second call goes on where time was over.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

FORECAST = Path(__file__).with_name("forecast.json")
_BEGIN_S = 60
"""Seconds for imports and for what no alarm reaches."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("script", choices=["ranks", "one", "memory", "faults"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--records", type=Path, help="lines are added to it (default: SCRIPT.jsonl, its log beside it)")
    parser.add_argument(
        "--folder", type=Path, help="for checkpoints of 16 GB (default: /dev/shm, else a temporary one)"
    )
    parser.add_argument("--only", default="", help="steps with this text in their names")
    parser.add_argument("--limit", type=int, default=570, help="seconds of all steps together")
    parser.add_argument("--patience", type=int, default=1, help="by which the limits of steps are multiplied")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--forecast", type=Path, nargs="?", const=FORECAST, help="only estimate, into this file")
    parser.add_argument("--steps", nargs="*", help=argparse.SUPPRESS)  # the child
    options = parser.parse_args()
    options.records = options.records or Path(f"{options.script}.jsonl")
    options.records.parent.mkdir(parents=True, exist_ok=True)
    return options


def foresee(options: argparse.Namespace, script: Any) -> None:
    """Write what the package's estimates say of all steps, beside those of other scripts."""
    found = json.loads(options.forecast.read_text()) if options.forecast.exists() else {}
    found[options.script] = {name: row for name in script.STEPS if (row := script.foresee(name, tiny=options.tiny))}
    options.forecast.write_text(json.dumps(found, indent=1) + "\n")


def take(options: argparse.Namespace, script: Any) -> None:
    """The child: do the named steps, and add a line for each."""
    from hf_fsdp_tools.testing import hide_gpus

    hide_gpus()  # from this process and from the server that forks ranks, not from ranks
    for name in options.steps:
        began = time.monotonic()
        try:
            found = script.measure(name, options)
        except Exception as error:  # the next step may go well; the line says what was wrong
            found = {"failed": f"{type(error).__name__}: {error}"[-3000:]}
        add(options.records, name, found | {"seconds": round(time.monotonic() - began, 1)})


def add(records: Path, name: str, found: dict[str, Any]) -> None:
    with records.open("a") as stream:
        stream.write(json.dumps({"step": name, **found}) + "\n")


def done(records: Path) -> dict[str, dict[str, Any]]:
    lines = records.read_text().splitlines() if records.exists() else []
    return {row.pop("step"): row for row in map(json.loads, lines)}


def run(options: argparse.Namespace, script: Any) -> None:
    """Do all steps in children, as long as there is time."""
    end = time.monotonic() + options.limit
    words = [sys.executable, "-m", "benchmarks.gpu.run", options.script, "--device", options.device]
    words += ["--records", str(options.records), "--folder", str(options.folder), *["--tiny"] * options.tiny]
    words += ["--patience", str(options.patience), "--steps"]
    while (left := [name for name in script.STEPS if name not in done(options.records)]) and time.monotonic() < end:
        with options.records.with_suffix(".log").open("ab") as log:
            child = subprocess.Popen([*words, *left], start_new_session=True, stdout=log, stderr=log)
        running, since = left, time.monotonic()
        while (code := child.poll()) is None and time.monotonic() < end:
            time.sleep(0.5)
            if (now := [name for name in left if name not in done(options.records)]) != running:
                running, since = now, time.monotonic()
            if now and time.monotonic() > since + script.STEPS[now[0]] + _BEGIN_S:
                break
        if code is None:
            os.killpg(child.pid, signal.SIGKILL)  # with its ranks, which hold memory of the GPU
            code = child.wait()
        rest = [name for name in left if name not in done(options.records)]
        if rest and time.monotonic() < end:
            add(options.records, rest[0], {"failed": f"the process ended in it: {code}"})


def last_line(text: str) -> str:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("---")][-1].strip()[:160]


def table(script: Any, rows: dict[str, dict[str, Any]], foreseen: dict[str, Any]) -> list[str]:
    """One line for each step."""
    lines: list[list[str]] = [["step", *script.HEADS, "s"], ["---"] * (len(script.HEADS) + 2)]
    for name, row in rows.items():
        cells = script.cells(row, foreseen.get(name, {})) if "failed" not in row else [last_line(row["failed"])]
        lines.append([name, *cells, *[""] * (len(script.HEADS) - len(cells)), str(row.get("seconds", ""))])
    if left := [name for name in script.STEPS if name not in rows]:
        lines.append(["not done", ", ".join(left), *[""] * len(script.HEADS)])
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    options = parsed()
    script: Any = import_module(f"benchmarks.gpu.{options.script}")
    script.STEPS = {name: s * options.patience for name, s in script.STEPS.items() if options.only in name}
    if options.forecast:
        foresee(options, script)
    elif options.steps is not None:
        take(options, script)
    else:
        memory = Path("/dev/shm") if Path("/dev/shm").is_dir() and not options.tiny else None
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            options.folder = options.folder or Path(folder)
            run(options, script)
        foreseen = {} if options.tiny else json.loads(FORECAST.read_text()).get(options.script, {})
        print("\n".join(table(script, done(options.records), foreseen)))


if __name__ == "__main__":
    main()
