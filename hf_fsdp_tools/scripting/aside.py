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
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def estimated(model: Any, setup: "TrainingSetup", model_kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The peak of a setup in words, and the estimate as values for JSON."""
    from hf_fsdp_tools.foresight.memory import estimate_memory
    from hf_fsdp_tools.foresight.throughput import throughput_of

    memory = estimate_memory(model, setup, model_kwargs=dict(model_kwargs))
    speed = throughput_of(memory)
    rate = speed.tokens_per_second_per_gpu if speed.is_estimated else None
    most, unit = show_bytes(memory.limit_bytes).split()
    said = f"{show_bytes(memory.total).removesuffix(f' {unit}')} of {most} {unit}"
    said += ", which does not fit" * (memory.spare_bytes < 0)
    values = {"setup": asdict(setup), "peak_gb": memory.peak_allocated / 1e9, "tokens_per_second_per_gpu": rate}
    return said, values


class Aside:
    """An estimate that is being made; `values` are those of `estimated` once it is known, and None before, where it
    cannot be made, and where nobody began one. What it says is printed when it is known, with `cure` where the training
    does not fit.
    """

    values: dict[str, Any] | None = None

    def begin(self, model: str, setup: "TrainingSetup", model_kwargs: Mapping[str, Any], cure: str) -> None:
        """Start the process, which sees no GPU, and a thread that waits for it. One rank calls."""
        hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "", "TQDM_DISABLE": "1"}
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS} | hidden
        pipe, words = subprocess.PIPE, [sys.executable, "-c", _CODE]
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
        asked = pickle.dumps((model, setup, dict(model_kwargs)))
        Thread(target=self._hear, args=(process, asked, cure), daemon=True).start()

    def _hear(self, process: "subprocess.Popen[bytes]", asked: bytes, cure: str) -> None:
        lines = process.communicate(asked)[0].splitlines()
        if process.returncode or not lines:
            print(f"no estimate of the peak: its process ended with exit code {process.returncode}", flush=True)
            return
        said, problem, self.values = json.loads(lines[-1])
        end = f": {cure}" if said and said.endswith("does not fit") else ""
        print(f"no estimate of the peak: {problem}" if problem else f"estimated peak {said}{end}", flush=True)


def main() -> None:
    """Answer what `Aside` asks: a line of JSON with what it says, the problem if there is one, and the values."""
    model, setup, model_kwargs = pickle.load(sys.stdin.buffer)
    try:
        said, values = estimated(model, setup, model_kwargs)
        answer: tuple[Any, ...] = (said, None, values)
    except Exception as error:
        answer = (None, first_line(error), None)
    print(json.dumps(answer, default=str), flush=True)
