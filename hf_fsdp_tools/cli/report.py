"""`hf-fsdp report`: 20 steps of a recipe, and what came of them as one file, which its user may send."""

import argparse
import json
import os
import platform
import re
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from hf_fsdp_tools import __version__
from hf_fsdp_tools.cli.launch import launched, recipes
from hf_fsdp_tools.cli.options import SHOWN, examples, filled, write
from hf_fsdp_tools.errors import ConfigError, storage_errors
from hf_fsdp_tools.scripting.recipes import DEFAULT_RECIPE, recipe_of
from hf_fsdp_tools.text import did_you_mean, printable, table

_SHORT = ("--max_steps", "20", "--eval_strategy", "no", "--save_strategy", "no")
"""Options that stand before a user's own, which may say otherwise."""

_HELP = """\
usage: hf-fsdp report [RECIPE] [OPTION OF `hf-fsdp RECIPE` ...]

Train 20 steps of a recipe (default: finetune; without a model its demo), and write one file of JSON: versions, GPUs, \
what `hf-fsdp doctor` finds, what was estimated and what was measured, or the error with which the recipe ended. \
Values of options are in it where they are numbers or public names; paths, host names and tokens are not. What was \
trained is deleted. Nothing is sent: look at the file, and open an issue of the kind "A first report" with it.
"""

_NAMES = {
    "preset", "config_file", "model_name_or_path", "dataset_name", "teacher_model_name_or_path", "dtype", "optim",
    "attn_implementation", "mixed_precision", "lora_target_modules", "gradient_checkpointing_kwargs", "loss_type",
}  # fmt: skip
"""Options whose values are public names, unless they name a file or a folder of this machine."""

_TOLD = re.compile(
    r"(\[rank\d+\]: )?(step [\d,]+ of |estimated peak|no estimate|[\w-]+: (error|warning): |[\w.]*(Error|Exception)\b)|"
    "hf-fsdp: "
)
"""How lines of a recipe begin that say how it went, of which the last 20 are kept; others may have a user's texts."""

_PLACE = re.compile(r"(?<![\w.…-])[~.]{0,2}/[^\s'\",;:)]+|\b\d+\.\d+\.\d+\.\d+\b|\b(?:hf|sk|ghp)_\w{8,}")
"""A path, a network address, or a token."""


def add_report(commands: Any) -> None:
    """Add the command `report`."""
    about = "train 20 steps of a recipe, and write a report that you may send; nothing is sent by itself"
    commands.add_parser("report", help=about, add_help=False).set_defaults(run=_report, rest=[])


def _report(options: argparse.Namespace) -> int:
    words = list(options.rest)
    if {"-h", "--help"} & set(words):
        SHOWN.set()
        usual = ("report", "report finetune --preset qwen3-0.6b --dataset_name trl-lib/Capybara", "report dpo --cpu")
        print(f"{filled(_HELP)}\n{examples(*usual)}")
        return 0
    name = words.pop(0).replace("_", "-") if words and not words[0].startswith("-") else DEFAULT_RECIPE
    known = {stem.replace("_", "-"): path for stem, path in recipes().items() if not recipe_of(stem).options}
    if name not in known:
        raise ConfigError(f"report: {name!r} is no recipe with a Trainer{did_you_mean(name, known)}")
    heard: list[str] = []
    began = time.monotonic()
    with storage_errors("write to", Path.cwd()):  # which has room for a model
        made = tempfile.TemporaryDirectory(prefix="hf-fsdp-report-", dir=Path.cwd())
    with made as folder:
        file = Path(folder, "line.json")
        given = [*_SHORT, "--output_dir", f"{folder}/trained", *words, "--report_estimate", str(file)]
        code = launched(known[name], given, heard)
        seconds = round(time.monotonic() - began)
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    shown, hidden = _public(words)
    facts: dict[str, Any] = {
        "command": " ".join(["hf-fsdp report", name, *shown]),
        "exit_code": code,
        "seconds": seconds,
    }
    found = json.loads(lines[-1]) if lines else {}
    facts |= _machine() | {name: found.get(name) for name in ("gpu", "model", "trainer", "estimated", "measured")}
    facts["told"] = [*dict.fromkeys(line for line in heard if _TOLD.match(line))][-20:]  # each once: ranks say the same
    report = _without(hidden, facts)
    path = Path(f"hf-fsdp-report-{time.strftime('%Y%m%d-%H%M%S')}.json")
    write(path, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print("\n" + "\n".join([*_summary(report), "", _where(path)]))
    return code


def _machine() -> dict[str, Any]:
    """What `doctor` says of this machine."""
    from hf_fsdp_tools.diagnostics.environment import check_environment

    found = check_environment()
    own = {"hf-fsdp-tools": __version__, "python": platform.python_version()}
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "versions": own | {name: version for name, version in found.versions.items() if version},
        "devices": list(found.devices),
        "backends": list(found.backends),
        "findings": [asdict(finding) for finding in found.findings],
    }


def _public(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command as a stranger may see them, with "…" for each other value; and these values."""
    shown, hidden, name = [], [], ""
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        name = option.lstrip("-").replace("-", "_") or name
        if value:
            is_name = name in _NAMES and _PLACE.search(value) is None and not Path(value).exists()
            is_public = is_name or re.fullmatch(r"true|false|[+-]?\d*\.?\d*(e[+-]?\d+)?", value.lower()) is not None
            hidden += [] if is_public else [value]
            value = value if is_public else "…"
        shown.append(f"{option}{equals}{value}")
    return shown, hidden


def _without(hidden: Sequence[str], value: Any) -> Any:
    """A value of JSON whose texts name none of the hidden values, no path, host or address, and no token."""
    if isinstance(value, dict):
        return {name: _without(hidden, each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without(hidden, each) for each in value]
    if not isinstance(value, str):
        return value
    secret = re.compile("TOKEN|KEY|SECRET|PASSWORD")
    private = [*hidden, *(each for name, each in os.environ.items() if secret.search(name) and len(each) >= 8)]
    private += [str(Path.cwd()), str(Path.home())]
    text = printable(value)
    for each in sorted((each for each in private if len(each) > 1), key=len, reverse=True):
        text = text.replace(each, "…")
    return _PLACE.sub("…", re.sub(rf"\b{re.escape(socket.gethostname())}\b", "…", text))


def _summary(report: dict[str, Any]) -> list[str]:
    """What came of it, for the terminal."""
    rows = [("device", ", ".join(report["devices"]))]
    for name, title, end in (("peak_gb", "peak", " GB"), ("tokens_per_second_per_gpu", "tokens/s per rank", "")):
        values = [(report[side] or {}).get(name) for side in ("measured", "estimated")]
        texts = ["not " if value is None else f"{value:,.1f}{end} " for value in values]
        rows.append((title, f"{texts[0]}measured, {texts[1]}estimated"))
    if report["exit_code"]:
        errors = [line for line in report["told"] if re.search("Error|Exception|: error: ", line)]
        rows.append(("failed", [f"exit code {report['exit_code']}", *report["told"][-1:], *errors[-1:]][-1]))
    return table(rows)


def _where(path: Path) -> str:
    """Where the file is, and where to send it: the address of the package, once it has one."""
    urls = dict(each.split(", ", 1) for each in metadata("hf-fsdp-tools").get_all("Project-URL") or ())
    issues = urls.get("Issues", ".invalid")
    place = "" if ".invalid" in issues else f": {issues}/new?template=report.yml"
    return f'wrote {path}; nothing was sent. To send it: look at it, and open an issue "A first report" with it{place}'
