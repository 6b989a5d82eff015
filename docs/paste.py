"""Paste what commands print into the documents, so that no printed output is typed or shortened by hand.

    python docs/paste.py              # README.md and docs/*.md
    python docs/paste.py --check      # change nothing; exit code 1 if a document is out of date
    python docs/paste.py --record     # run the commands of minutes too, and keep what they print in docs/records/

Where a document says `<!-- prints: hf-fsdp plan NAME … -->`, the block after it becomes the command and its output.
Names of the hub stand for configurations in `models.py` of the same last part: no network is needed. Below
`<!-- commands: recipes -->` stand the commands of all recipes; below `<!-- file: train.py -->` a script of
`docs/examples/`; below `<!-- settings -->` a table, whose rows get all names of their settings, by one that they have,
and keep their last cell.

Where it says `<!-- recorded: hf-fsdp finetune -->`, the output is the one that was recorded, and the losses of the run
are kept beside it, for `make_pictures.py`. Commands of a page are recorded one after the other, in one folder that has
the scripts of `docs/examples/`. `| head -n 5` or `| tail -n 5` after a command leaves its first or last lines.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from models import CONFIGS

from hf_fsdp_tools.cli.launch import recipes
from hf_fsdp_tools.cli.main import main as hf_fsdp
from hf_fsdp_tools.integrations.settings import SETTINGS
from hf_fsdp_tools.scripting.recipes import commands_of

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "records"
EXAMPLES = ROOT / "docs" / "examples"
PROGRAMS = f"""hf-fsdp() {{ {sys.executable} -m hf_fsdp_tools "$@"; }}
accelerate() {{ {sys.executable} -m accelerate.commands.accelerate_cli "$@"; }}"""
"""Programs of this environment, as functions of the shell that runs what is recorded."""
_BLOCK = re.compile(
    r"(<!-- (?P<kind>prints|recorded|commands|file): (?P<command>.+?) -->\n)```\w+\n.*?```\n", re.DOTALL
)
_TABLE = re.compile(r"(<!-- settings -->\n\|.*\n\|.*\n)((?:\|.*\n)+)")
_PART = re.compile(r" \| (head|tail) -n (\d+)$")
KEPT = ("step", "loss", "eval_loss", "learning_rate", "tokens_per_second")
"""What is kept of the log of a recorded run."""


def main() -> int:
    """Paste into every document; return the exit code."""
    os.environ["COLUMNS"] = "110"  # for the help of commands
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say which documents are out of date")
    about = "run the recorded commands of this page, or with this word in them (default: all), which takes minutes"
    parser.add_argument("--record", nargs="?", const="", metavar="WORD", help=about)
    arguments, old = parser.parse_args(), []
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for path in documents if arguments.record is not None else ():
        found = [each for each in _BLOCK.finditer(path.read_text()) if each["kind"] == "recorded"]
        commands = dict.fromkeys(_PART.sub("", each["command"]) for each in found)
        is_all = arguments.record in ("", path.stem)
        record([command for command in commands if is_all or arguments.record in command])
    for path in documents:
        text = path.read_text()
        pasted = _BLOCK.sub(lambda each: each[1] + block(each["kind"], each["command"]), text)
        pasted = _TABLE.sub(lambda each: each[1] + settings(each[2]), pasted)
        if pasted != text:
            old.append(path)
            print(f"{path.relative_to(ROOT)} {'is out of date' if arguments.check else 'written'}")
            if not arguments.check:
                path.write_text(pasted)
    return int(arguments.check and bool(old))


def settings(rows: str) -> str:
    """The rows of the table of settings, with the names that the package has for them."""
    lines, left = [], [*SETTINGS]
    for row in rows.splitlines():
        *cells, meaning = (cell.strip() for cell in row.strip("|").split("|"))
        names = set(re.findall("`([^`]+)`", " ".join(cells)))
        own = [each for each in left if names & {each.key, each.variable, each.argument, *each.training}]
        left = [each for each in left if each not in own]
        columns = zip(*(((each.key,), (each.variable,), each.training, (each.argument,)) for each in own), strict=True)
        found = [[name for names in column for name in names if name] for column in columns]
        cells = [", ".join(f"`{name}`" for name in column) for column in found] or cells
        lines.append(f"| {' | '.join([*cells, meaning])} |\n".replace("|  |", "| |").replace("|  |", "| |"))
    if left:
        raise SystemExit(f"docs/settings.md does not say what becomes of {left}")
    return "".join(lines)


def block(kind: str, command: str) -> str:
    """The block for one command, as it is typed, and what it prints or printed; or the commands of all recipes."""
    if kind == "commands":
        return "\n".join(["```bash", *map(commands_of, recipes()), "```", ""])
    if kind == "file":
        return f"```python\n{(EXAMPLES / command).read_text()}```\n"
    part = _PART.search(command)
    lines = (printed if kind == "prints" else recorded)(_PART.sub("", command))
    if part is not None:
        lines = lines[: int(part[2])] if part[1] == "head" else lines[-int(part[2]) :]
    return "\n".join(["```text", f"$ {command}", *(line.rstrip() for line in lines), "```", ""])


def printed(command: str) -> list[str]:
    """What a command of `hf-fsdp` prints, run in this process."""
    program, *words = shlex.split(command)
    if program != "hf-fsdp":
        raise SystemExit(f"{command!r}: only hf-fsdp is run here")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as text:
        for index, word in enumerate(words):
            if (config := CONFIGS.get(word.rpartition("/")[2])) is not None:
                words[index] = str(Path(folder, word))
                config.save_pretrained(words[index])
        try:
            code = hf_fsdp(words)
        except SystemExit as ended:  # of --help
            code = int(ended.code or 0)
    if code:
        raise SystemExit(f"{command!r} ended with {code}")
    return text.getvalue().replace(f"{folder}/", "").splitlines()


def recorded(command: str) -> list[str]:
    """What a command printed when it was recorded."""
    path = record_of(command, ".txt")
    if not path.exists():
        raise SystemExit(f"{command!r} was not recorded: python docs/paste.py --record")
    return path.read_text().splitlines()


def record_of(command: str, suffix: str) -> Path:
    """The file that keeps what a command printed (.txt) or logged (.json)."""
    return RECORDS / f"{re.sub('[^a-z0-9]+', '-', command.removeprefix('hf-fsdp ').lower()).strip('-')}{suffix}"


def record(commands: Iterable[str]) -> None:
    """Run commands in a folder, and keep what each prints and the losses that its trainer wrote."""
    environment = os.environ | {"COLUMNS": "120", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        for script in EXAMPLES.glob("*.py"):
            shutil.copy(script, folder)
        for command in commands:
            for word in shlex.split(command):
                if (config := CONFIGS.get(word.rpartition("/")[2])) is not None:
                    config.save_pretrained(Path(folder, word))
            before = {*Path(folder).rglob("trainer_state.json")}
            run = subprocess.run(
                ["bash", "-c", f"{PROGRAMS}\n{command}"],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if run.returncode:
                raise SystemExit(f"{command!r} ended with {run.returncode}:\n{run.stdout}")
            text = run.stdout
            for place in (ROOT, folder, Path(sys.prefix).parent):
                text = text.replace(f"{place}/", "")
            RECORDS.mkdir(exist_ok=True)
            record_of(command, ".txt").write_text(re.sub(rf"{tempfile.gettempdir()}/[\w-]+/", "", text))
            states = {*Path(folder).rglob("trainer_state.json")} - before
            for state in sorted(states, key=lambda path: len(path.parts))[:1]:
                history = json.loads(state.read_text())["log_history"]
                kept = [json.dumps({key: entry[key] for key in KEPT if key in entry}) for entry in history]
                record_of(command, ".json").write_text("[\n" + ",\n".join(kept) + "\n]\n")


if __name__ == "__main__":
    sys.exit(main())
