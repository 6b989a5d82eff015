"""The estimate of a run, made aside, in a process of its own: no rank waits for it."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from threading import Thread
from typing import TYPE_CHECKING, Any

from hf_fsdp_tools.text import first_line, show_bytes

if TYPE_CHECKING:
    from hf_fsdp_tools.foresight.setup import TrainingSetup

_CODE = "from hf_fsdp_tools.scripting.aside import main; main()"


def estimated(model: Any, setup: "TrainingSetup", model_kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The `MemoryEstimate` of a setup, and it and the speed as values for JSON."""
    from hf_fsdp_tools.foresight.memory import estimate_memory
    from hf_fsdp_tools.foresight.throughput import throughput_of

    memory = estimate_memory(model, setup, model_kwargs=dict(model_kwargs))
    speed = throughput_of(memory)
    rate = speed.tokens_per_second_per_gpu if speed.is_estimated else None
    return memory, {"setup": asdict(setup), "peak_gb": memory.peak_allocated / 1e9, "tokens_per_second_per_gpu": rate}


class Aside:
    """An estimate that is being made; `values` are those of `estimated` once it is known, and None before, where it
    cannot be made, and where nobody began one. A line is printed when it is known."""

    values: dict[str, Any] | None = None

    def begin(
        self, model: str, setup: "TrainingSetup", model_kwargs: Mapping[str, Any], *, less: str, cure: str
    ) -> None:
        """Start the process, which sees no GPU, and a thread that waits for it. One rank calls.

        `less` names options that take less than is estimated, and `cure` says how to go on where it does not fit.
        """
        pipe, words = subprocess.PIPE, [sys.executable, "-c", _CODE]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
        asked = pickle.dumps((model, setup, dict(model_kwargs), less, cure))
        Thread(target=self._hear, args=(process, asked), daemon=True).start()

    def _hear(self, process: "subprocess.Popen[bytes]", asked: bytes) -> None:
        lines = process.communicate(asked)[0].splitlines()
        line = f"no estimate of the peak: its process ended with exit code {process.returncode}"
        if lines and not process.returncode:
            line, self.values = json.loads(lines[-1])
        print(line, flush=True)


def main() -> None:
    """Answer what `Aside` asks: a line of JSON with the line to print, and the values."""
    from hf_fsdp_tools.foresight.memory import EXPANDABLE

    model, setup, model_kwargs, less, cure = pickle.load(sys.stdin.buffer)
    values = None
    try:
        memory, values = estimated(model, setup, model_kwargs)
        most, unit = show_bytes(memory.limit_bytes).split()
        line = f"estimated peak {show_bytes(memory.total).removesuffix(f' {unit}')} of {most} {unit}"
        line += f", less with {less}" if less else ""
        if not memory.fits:
            line += f", which does not fit: {cure}"
        elif memory.spare_bytes < 0:
            line += f", which fits with {EXPANDABLE} alone"
    except Exception as error:
        line = f"no estimate of the peak: {first_line(error)}"
    print(json.dumps((line, values), default=str), flush=True)
