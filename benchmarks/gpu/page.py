"""The kept records as one Markdown page: what passed, what failed, every ratio with its two figures, and the rest."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.record import Ratio, Record
from benchmarks.gpu.steps import STEPS

__all__ = ["latest", "render"]


def latest(records: Sequence[Record]) -> list[Record]:
    """The last record of every part, in the order of the steps."""
    found = {(record["part"]["step"], record["part"]["name"]): record for record in records if "part" in record}
    order = list(dict.fromkeys(found))
    return [found[key] for key in sorted(order, key=lambda key: (key[0], order.index(key)))]


def render(records: Sequence[Record]) -> str:
    """The page of one or several runs; of a part that ran twice, the last."""
    runs = [record["run"] for record in records if "run" in record and "part" not in record]
    parts = [record["part"] for record in latest(records)]
    lines = [f"# GPU run: {_devices(runs)}, {runs[-1]['began'][:10]}", "", *_verdict(runs, parts), ""]
    lines += ["| step | part | result | seconds | why |", "|---|---|---|---|---|"]
    lines += [_row(part) for part in parts]
    lines += _ratios(parts)
    lines += _failures(parts)
    for step, title in STEPS.items():
        own = [part for part in parts if part["step"] == step and part.get("commands")]
        if own:
            lines += ["", f"## Step {step}: {title}", *[line for part in own for line in _details(part)]]
    for run in runs:
        lines += _where(run)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _devices(runs: Sequence[dict[str, Any]]) -> str:
    names = [gpu["name"] for gpu in runs[-1]["machine"]["gpus"]]
    return " and ".join(f"{number} × {name}" for name, number in Counter(names).items()) or "no GPU"


def _verdict(runs: Sequence[dict[str, Any]], parts: Sequence[dict[str, Any]]) -> list[str]:
    count = Counter(part["status"] for part in parts)
    bad = count["failed"] + count["timed out"]
    said = f"**{bad} of {len(parts)} parts failed**" if bad else f"**None of {len(parts)} parts failed**"
    rest = [f"{count[key]} {key}" for key in ("passed", "skipped", "not run") if count[key]]
    lines = [", ".join([said, *rest]) + "."]
    if not runs[-1]["machine"]["gpus"]:
        lines += ["", "**There is no GPU on this machine: steps 2 to 8 measured nothing.**"]
    if any(run["small"] for run in runs):
        lines += ["", "**Tiny sizes (SMALL=1), to try the programs: no speed and no ratio here means anything.**"]
    return lines


def _row(part: dict[str, Any]) -> str:
    bad = part["status"] in ("failed", "timed out")
    status = f"**{part['status']}**" if bad else part["status"]
    seconds = f"{part['seconds']:.0f}" if part.get("seconds") else ""
    return f"| {part['step']} | {part['name']} | {status} | {seconds} | {_cell(part['why'])[:300]} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _ratios(parts: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "## Ratios",
        "",
        "| step | what | ours | beside | ours ÷ that | better is |",
        "|---|---|---|---|---|---|",
    ]
    none = len(lines)
    for part in parts:
        for given in part.get("ratios", []):
            ratio = Ratio(**given)
            what = ratio.what if part["step"] == 4 else f"{part['name']}: {ratio.what}"
            ours, other = _figure(ratio.ours, ratio.unit), _figure(ratio.other, ratio.unit)
            better = "more" if ratio.more_is_better else "less"
            lines.append(
                f"| {part['step']} | {what} | {ours} | {other}, {ratio.of} | **{ratio.value:.2f}** | {better} |"
            )
    return lines if len(lines) > none else ["", "## Ratios", "", "None was measured."]


def _figure(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"


def _failures(parts: Sequence[dict[str, Any]]) -> list[str]:
    bad = [part for part in parts if part["status"] in ("failed", "timed out")]
    lines = ["", "## What failed"] if bad else []
    for part in bad:
        lines += ["", f"### Step {part['step']}, {part['name']}", "", _cell(part["why"])]
        for name, said in part.get("tails", {}).items():
            lines += ["", f"The last lines of `{name}`:", "", "```text", *said, "```"]
        if part.get("text") and part["step"] == 2:
            lines += ["", "```text", *part["text"].splitlines(), "```"]
    return lines


def _details(part: dict[str, Any]) -> list[str]:
    lines = ["", f"### {part['name']}: {part['status']}", ""]
    lines += [
        f"- {'holds' if check['held'] else '**does not hold**'}: {check['claim']}" for check in part.get("checks", [])
    ]
    lines += [f"- {name}: {value}" for name, value in part.get("figures", {}).items()]
    lines += ["", "```text", *part["text"].splitlines(), "```"] if part.get("text") and part["step"] == 1 else []
    commands = part.get("commands", {})
    lines += ["", "```bash", *(f"{command}  # {name}" for name, command in commands.items()), "```"] if commands else []
    return lines


def _where(run: dict[str, Any]) -> list[str]:
    machine = run["machine"]
    gpus = ", ".join(f"{gpu['name']} ({gpu['bytes'] / 2**30:.0f} GiB, {gpu['kind']})" for gpu in machine["gpus"])
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = ["", f"## Run of {run['began']}", "", f"`{run['command']}`", ""]
    lines += [f"- hf_fsdp_tools {machine['package']}; Python {machine['python']}, {versions}"]
    lines += [f"- GPUs: {gpus or 'none'}; CUDA {machine['cuda']}, NCCL {machine['nccl']}"]
    lines += [f"- {machine['cores']} cores ({machine['processor']}), {machine['memory'] / 2**30:.0f} GiB of memory, "]
    lines[-1] += f"{machine['system']}; scratch: {run['scratch_free_gb']:.0f} GB free"
    for said in (machine["nvidia_smi"], machine["topology"]):
        lines += ["", "```text", *said.splitlines(), "```"] if said else []
    return lines if machine["nvidia_smi"] else [*lines, "- nvidia-smi: not there"]
