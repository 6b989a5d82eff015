"""Run one part: its models, its programs with a time limit, and what they left; nothing that fails ends the run."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

import psutil

from benchmarks.gpu.record import Done, Outcome, Record
from benchmarks.gpu.steps import MODEL_GB, Part, Settings

__all__ = ["NOT_RUN", "run_part", "run_program", "why_not"]

NOT_RUN = "the time of this run was over; run it again with --resume, or name the step"

_GRACE_S = 15.0
"""How long a program may take to end after it was told to (assumed: launchers end their ranks within it)."""

_MODEL_LIMIT_S = 240.0
_KEPT_LINES = 25
_NOISE = re.compile(r"^\*+$|OMP_NUM_THREADS|FutureWarning|warnings\.warn|^\s*\^+\s*$|\d+%\|")
_ERROR = re.compile(r"^(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception|error): .+)$")
_LAUNCHER = "ChildFailedError"
_KEPT_CHARACTERS = 200_000
_ROOT = Path(__file__).parents[2]


def why_not(part: Part, settings: Settings) -> str:
    """Why a part cannot run here, in one line; empty where it can."""
    if part.gpus and not settings.gpus:
        return "there is no GPU on this machine"
    if part.gpus > settings.gpus:
        return f"it needs {part.gpus} GPUs; there is {settings.gpus}"
    if part.gpu_gb > settings.gpu_gb and not settings.small:
        return f"it needs about {part.gpu_gb:.0f} GB of GPU memory; there are {settings.gpu_gb:.0f}"
    if absent := [name for name in part.packages if find_spec(name) is None]:
        return f"not installed: {', '.join(absent)}"
    sizes = [0.01 if settings.small else MODEL_GB[name] for name in part.models if not _is_made(name, settings)]
    needed, free = sum(sizes) * 1.1 + 0.5, shutil.disk_usage(settings.scratch).free / 1e9
    if sizes and free < needed:
        return (
            f"it needs {needed:.0f} GB in {settings.scratch.parent}, where {free:.0f} are free; SCRATCH=FOLDER names "
            "another place"
        )
    return ""


def _is_made(model: str, settings: Settings) -> bool:
    return Path(settings.model(model)).exists()


def run_part(part: Part, settings: Settings, limit_s: float) -> Record:
    """The record of a part that can run here; its programs get `limit_s` at most, together."""
    began = time.monotonic()
    record: Record = {"step": part.step, "name": part.name, "commands": {}, "tails": {}}
    if reason := _made_models(part, settings, limit_s):
        return {**record, "status": "failed", "why": reason, "seconds": time.monotonic() - began}
    done: dict[str, Done] = {}
    deadline = min(time.monotonic() + part.limit_s, began + limit_s)
    with tempfile.TemporaryDirectory(dir=settings.scratch, prefix="part-") as files:
        for index, (name, command) in enumerate(part.programs.items()):
            result = Path(files, f"{index}.json")
            filled = [word.replace("{result}", str(result)).replace("{files}", files) for word in command]
            done[name] = run_program(filled, settings, deadline - time.monotonic(), part.variables)
            done[name].files = files
            if result.exists():
                done[name].result = json.loads(result.read_text())
            record["commands"][name] = shown(command, settings, part.variables)
        outcome, problems = _read(part, done)
    record |= outcome.as_record()
    record["tails"] = {name: tail(program.output) for name, program in done.items() if program.code not in part.codes}
    record["seconds"] = time.monotonic() - began
    if time.monotonic() - began >= limit_s and any(program.code is None for program in done.values()):
        return {**record, "status": "not run", "why": f"it was ended: {NOT_RUN}", "checks": []}
    return {**record, **_verdict(part, outcome, done, problems)}


def _read(part: Part, done: dict[str, Done]) -> tuple[Outcome, str]:
    """The figures, and why there are none: after a program that failed, what is left may be unreadable."""
    try:
        return part.read(done), ""
    except Exception:
        if any(program.code not in part.codes for program in done.values()):
            return Outcome(), ""
        return Outcome(), f"its output could not be read: {traceback.format_exc().splitlines()[-1]}"


def _verdict(part: Part, outcome: Outcome, done: dict[str, Done], problems: str) -> Record:
    over = [name for name, program in done.items() if program.code is None]
    failed = [name for name, program in done.items() if program.code not in (None, *part.codes)]
    broken = [check.claim for check in outcome.checks if not check.held]
    said = [f"its time was over: {', '.join(over)}"] if over else []
    said += [f"{name} ended with code {done[name].code}: {last_error(done[name].output)}" for name in failed]
    why = "; ".join([*said, *broken, *filter(None, [problems])])
    if outcome.skipped:
        return {"status": "skipped", "why": outcome.skipped}
    return {"status": "timed out" if over else "failed" if why else "passed", "why": why}


def _made_models(part: Part, settings: Settings, limit_s: float) -> str:
    """Make the checkpoints that are not there yet; why that failed, if it did."""
    for name in part.models:
        folder = Path(settings.model(name))
        if _is_made(name, settings):
            continue
        small = ["--small"] if settings.small else []
        command = [sys.executable, "-m", "benchmarks.gpu.models", name, str(folder), *small]
        made = run_program(command, settings, min(_MODEL_LIMIT_S, limit_s), {})
        if made.failed or not folder.exists():
            return f"the model {name} could not be made: {last_error(made.output)}"
    return ""


def run_program(command: list[str], settings: Settings, limit_s: float, variables: dict[str, str]) -> Done:
    """Run a program from the repository's root; at its limit it is ended, with all that it started."""
    home = settings.scratch / "home"
    home.mkdir(parents=True, exist_ok=True)
    own = {"HF_HOME": str(home), "TMPDIR": str(home), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    own |= {"NCCL_DEBUG": "WARN", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if limit_s <= 0:
        return Done(code=None, output="not begun: no time was left")
    with tempfile.TemporaryFile() as stream:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env={**own, **os.environ, "TMPDIR": str(home), **variables},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        stream.seek(max(0, stream.tell() - _KEPT_CHARACTERS))
        return Done(code=code, output=stream.read().decode(errors="replace"))


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a program and everything that it started; nothing happens where all have ended."""
    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for child in started:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue


def tail(output: str) -> list[str]:
    """The last lines that say something: up to the last error that a program itself names, or to the end."""
    lines = [line.rsplit("\r", 1)[-1].rstrip()[:300] for line in output.splitlines()]
    lines = [line for line in lines if line and not _NOISE.search(line)]
    errors = [index for index, line in enumerate(lines) if _ERROR.match(line) and _LAUNCHER not in line]
    return lines[: errors[-1] + 1 if errors else len(lines)][-_KEPT_LINES:]


def last_error(output: str) -> str:
    """The last exception that a program names, but not its launcher's; else its last line."""
    last = (tail(output) or ["it printed nothing"])[-1]
    named = _ERROR.match(last)
    return named[1] if named else last


def shown(command: list[str], settings: Settings, variables: dict[str, str]) -> str:
    """A command line as one would type it."""
    words = ["python" if word == sys.executable else word for word in command]
    said = re.sub(r"'([^' ]*)\{files\}([^' ]*)'", r"\1$FILES\2", shlex.join(words).replace("'{result}'", "$RESULT"))
    said = said.replace(str(settings.scratch), "$SCRATCH")
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), said])
