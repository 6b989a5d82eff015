"""Run the trainings of a plan on one GPU, each beside a plain loop in the same process, and print what was foreseen.

    python -m benchmarks.gpu.run --plan ten --records gpu.jsonl      # ten minutes; `three` takes three
    python -m benchmarks.gpu.run --forecast                          # writes forecast.json, before a machine is there
    python -m benchmarks.gpu.run --tiny --device cpu                 # tiny models, to try the script

A child trains, case after case; each case has a limit. Where the child dies or is late, another goes on with the next.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
FORECAST = Path(__file__).with_name("forecast.json")
GPUS = ("h100-80gb", "h200-141gb")
_SECONDS = {"ten": 570, "three": 170}
_BEGIN_S = 60
"""Seconds for imports and for what no alarm reaches."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plan", choices=[*_SECONDS], default="ten")
    parser.add_argument("--gpu", choices=GPUS, default=GPUS[0], help="whose forecast stands beside the figures")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--records", type=Path, default=Path("gpu.jsonl"), help="a line for each case is added to it")
    parser.add_argument(
        "--folder", type=Path, help="for checkpoints of 16 GB (default: /dev/shm, else a temporary one)"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--forecast", type=Path, nargs="?", const=FORECAST, help="only estimate, into this file")
    parser.add_argument("--train", nargs="*", help=argparse.SUPPRESS)  # the child
    return parser.parse_args()


def foresee(output: Path, *, tiny: bool) -> None:
    """Write what the package's estimates say of all cases."""
    from benchmarks.gpu.cases import CASES, LENGTH, config_of
    from hf_fsdp_tools import estimate_memory
    from hf_fsdp_tools.foresight.throughput import throughput_of

    found: dict[str, dict[str, Any]] = {}
    for gpu in GPUS:
        for name, case in CASES.items():
            setup: dict[str, Any] = {"max_length": LENGTH, "num_processes": 1, "gpu": gpu, "loss": "full"}
            memory = estimate_memory(config_of(case, tiny=tiny), **setup | case.setup | {"max_grad_norm": None})
            peaks = {"alloc_gb": memory.peak_allocated / 1e9, "reserved_gb": memory.peak_reserved / 1e9}
            values = {"tokens_s": round(throughput_of(memory).tokens_per_second_per_gpu)}
            found.setdefault(gpu, {})[name] = values | {key: round(value, 3) for key, value in peaks.items()}
    output.write_text(json.dumps(found, indent=1) + "\n")


def train(options: argparse.Namespace) -> None:
    """The child: train the named cases, and add a line for each."""
    import torch

    from benchmarks.gpu.cases import CASES, forget, ours, plain, trained

    def is_late(signum: int, frame: Any) -> None:
        raise TimeoutError("not done in time")

    signal.signal(signal.SIGALRM, is_late)
    device = torch.device(options.device)
    for name in options.train:
        case = CASES[name]
        row: dict[str, Any] = {"case": name}
        for who, make in (("ours", ours), ("plain", plain)):
            signal.alarm(case.limit_s)
            try:
                row[who] = trained(make, options.folder, case, device, tiny=options.tiny)
            except Exception as error:  # the next case may train; the line says what was wrong
                row[who] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            signal.alarm(0)
            forget()
        with options.records.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


def done(records: Path) -> dict[str, dict[str, Any]]:
    lines = records.read_text().splitlines() if records.exists() else []
    return {row["case"]: row for row in map(json.loads, lines)}


def run(options: argparse.Namespace, cases: list[str]) -> None:
    """Train all cases in children, as long as there is time."""
    from benchmarks.gpu.cases import CASES

    end = time.monotonic() + _SECONDS[options.plan]
    while left := [name for name in cases if name not in done(options.records)]:
        words = [sys.executable, "-m", "benchmarks.gpu.run", "--device", options.device, *["--tiny"] * options.tiny]
        words += ["--records", str(options.records), "--folder", str(options.folder), "--train", *left]
        child, running, since = subprocess.Popen(words), left, time.monotonic()
        while (code := child.poll()) is None:
            time.sleep(0.5)
            if (now := [name for name in left if name not in done(options.records)]) != running:
                running, since = now, time.monotonic()
            if now and time.monotonic() > min(end, since + 2 * CASES[now[0]].limit_s + _BEGIN_S):
                child.kill()
                code = child.wait()
                break
        if (rest := [name for name in left if name not in done(options.records)]) and (rest == left or code):
            failed = {"failed": f"the process ended in it: {code}"}
            with options.records.open("a") as stream:
                stream.write(json.dumps({"case": rest[0], "ours": failed, "plain": failed}) + "\n")


def table(rows: dict[str, dict[str, Any]], foreseen: dict[str, Any]) -> list[str]:
    """One line for each case: tokens/s and GB of ours, of the plain loop, as foreseen, as published."""
    from benchmarks.gpu.cases import CASES

    def cell(found: dict[str, Any]) -> str:
        if "failed" in found:
            return str(found["failed"]).replace("|", "/")[:80]
        return f"{found['tokens_s']:,} tokens/s" + (f", {found['alloc_gb']:.2f} GB" if "alloc_gb" in found else "")

    lines = ["| training | hf_fsdp_tools | foreseen | plain loop | published |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        guess = cell(foreseen[name]) if name in foreseen else ""
        lines.append(f"| {name} | {cell(row['ours'])} | {guess} | {cell(row['plain'])} | {CASES[name].published} |")
    return lines


def main() -> None:
    options = parsed()
    if options.forecast:
        foresee(options.forecast, tiny=options.tiny)
        return
    if options.train is not None:
        train(options)
        return
    from benchmarks.gpu.cases import PLANS

    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() and not options.tiny else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        options.folder = options.folder or Path(folder)
        run(options, list(PLANS[options.plan]))
    foreseen = json.loads(FORECAST.read_text())[options.gpu] if FORECAST.exists() else {}
    print("\n".join(table(done(options.records), foreseen)))


if __name__ == "__main__":
    main()
