"""Run a training script as it stands, and write down each of its steps.

    accelerate launch … -m benchmarks.tuning FOLDER SCRIPT ARGUMENTS…

The script gets one callback of the Trainer more, by the list of those that every Trainer has. Each rank writes
FOLDER/RANK.json when the training is over, and ends there: what scripts do afterwards is not measured, and the ends of
some processes wait for ever. "native" in place of a script is TRL's SFTTrainer on a model that transformers itself
shards while it loads it, with the options of TRL's `sft` script.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import TrainerCallback, trainer

from benchmarks.measuring import begin, end_without_memory, usage

_STARTED = time.perf_counter()


class Recorder(TrainerCallback):
    """Seconds of each step, losses, and what memory the training took."""

    folder = Path()

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.losses: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.device = args.device
        begin(self.device)
        self.ready = time.perf_counter() - _STARTED
        self.last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.steps.append(now - self.last)
        self.last = now

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        after = usage(self.device)
        on_gpu = self.device.type == "cuda"
        figures = {
            "steps": self.steps,
            "losses": self.losses,
            "ready": self.ready,
            "peak": after["device_peak"] if on_gpu else after["VmHWM"],
            "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
            "shards": any(hasattr(parameter, "to_local") for parameter in model.parameters()),
        }
        (self.folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(figures))
        if dist.is_initialized():
            dist.barrier()
        os._exit(0)


def train_natively() -> None:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.distributed import DistributedConfig
    from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

    script, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    training.device  # noqa: B018  # starts the process group
    sharded = AutoModelForCausalLM.from_pretrained(
        model.model_name_or_path,
        dtype=model.dtype,
        distributed_config=DistributedConfig(fsdp_size=int(os.environ.get("WORLD_SIZE", "1"))),
    )
    native = SFTTrainer(
        model=sharded,
        args=training,
        train_dataset=load_dataset(script.dataset_name)[script.dataset_train_split],
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
        peft_config=get_peft_config(model),
    )
    native.train()


def main() -> None:
    folder, script, *arguments = sys.argv[1:]
    Recorder.folder = Path(folder)
    end_without_memory()
    trainer.DEFAULT_CALLBACKS.append(Recorder)
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    sys.argv = [script, *arguments]
    if script == "native":
        train_natively()
        return
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
