"""What a run shows and notes while it trains: loss, tokens/s, learning rate and memory."""

import resource
import sys
import time
from typing import Any

import torch
from transformers import ProgressCallback

from hf_fsdp_tools.accelerator import find_accelerator
from hf_fsdp_tools.distributed.agreement import all_ranks


class Progress(ProgressCallback):  # type: ignore[misc]  # transformers is not typed
    """A bar with loss and tokens/s on a terminal, one readable line for each log elsewhere and with `--disable_tqdm`.

    It adds `tokens_per_second` (of all ranks; `samples_per_second` where the trainer does not count tokens) and
    `peak_memory_gb` (of the rank that needs most) to what is logged, so that they stand in `trainer_state.json` and
    reach whatever `--report_to` names. For this it must come before the callbacks that report: `train` sees to that.
    Every rank needs one; each log exchanges one number.

    Example:
        >>> from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments
        >>> rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
        >>> training = TrainingArguments("outputs", use_cpu=True, max_steps=1, logging_steps=1, disable_tqdm=True)
        >>> model = AutoModelForCausalLM.from_pretrained("checkpoint")
        >>> trainer = Trainer(model, training, train_dataset=rows, callbacks=[Progress()])
        >>> trainer.remove_callback(PrinterCallback)
        >>> _ = trainer.train()
        step 1 of 1: loss ..., ... samples/s, learning rate 5e-05, ... GB at most
    """

    shows_bar = False
    last: tuple[float, int | None, int] | None = None
    """(time, tokens counted, step) of the last log."""
    evaluating_s: float | None = None
    """When the evaluation began that is going on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock, and the bar where one can be seen."""
        self.shows_bar = sys.stderr.isatty() and not args.disable_tqdm
        if self.shows_bar:
            super().on_train_begin(args, state, control, **kwargs)
        self.start_s = time.perf_counter()
        self.first_step = state.global_step
        self.last = (self.start_s, 0 if not state.global_step else None, state.global_step)
        if state.global_step and state.is_world_process_zero:
            asked = args.resume_from_checkpoint
            path = asked if isinstance(asked, str) else f"{args.output_dir}/checkpoint-{state.global_step}"
            print(f"step {state.global_step:,} of {state.max_steps:,}: goes on from {path}", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self.shows_bar:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Move the bar of an evaluation."""
        self.evaluating_s = self.evaluating_s or time.perf_counter()
        if self.shows_bar:
            super().on_prediction_step(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add speed and memory to what is logged, and show it."""
        logs = {} if logs is None else logs
        if "loss" in logs:
            measured = self._speed(args, state, logs)
            measured["peak_memory_gb"] = round(max(all_ranks(peak_bytes(), "comparing peak memory")) / 1e9, 3)
            logs.update(measured)
            if state.log_history:
                state.log_history[-1].update(measured)
        if not state.is_world_process_zero:
            return
        if self.shows_bar and self.training_bar is not None:
            if "loss" in logs:
                self.training_bar.set_postfix_str(_shown(logs))
        elif "loss" in logs or "eval_loss" in logs:
            print(f"step {state.global_step:,} of {state.max_steps:,}: {_shown(logs)}{self._left(state)}", flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar."""
        if self.shows_bar:
            super().on_train_end(args, state, control, **kwargs)
        self.shows_bar = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the bar of the evaluation, whose time is not the training's."""
        super().on_evaluate(args, state, control, **kwargs)
        if self.evaluating_s is not None and self.last is not None:
            start_s, count, step = self.last
            self.last = (start_s + time.perf_counter() - self.evaluating_s, count, step)
        self.evaluating_s = None

    def _speed(self, args: Any, state: Any, logs: Any) -> dict[str, float]:
        """Tokens, or else samples, of all ranks in each second since the last log."""
        now = time.perf_counter()
        counted = logs.get("num_tokens")
        last_s, last_count, last_step = self.last or (now, None, 0)
        self.last = (now, counted, state.global_step)
        if counted is not None:
            return (
                {} if last_count is None else {"tokens_per_second": round((counted - last_count) / (now - last_s), 1)}
            )
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return {"samples_per_second": (state.global_step - last_step) * batch / (now - last_s)}

    def _left(self, state: Any) -> str:
        """How long the rest will take, at the pace so far."""
        done, rest = state.global_step - self.first_step, state.max_steps - state.global_step
        if done <= 0 or rest <= 0:
            return ""
        left_s = round((time.perf_counter() - self.start_s) / done * rest)
        return f", {left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left"


def peak_bytes() -> int:
    """The most memory that this process has held: of its accelerator, or on a CPU of the process.

    Example:
        >>> print(f"at most {peak_bytes() / 1e9:.1f} GB")
        at most ... GB
    """
    if find_accelerator() is not None:
        return int(torch.accelerator.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _shown(logs: dict[str, Any]) -> str:
    """One log as a person reads it."""
    parts = [
        f"{words} {float(logs[name]):.3f}"
        for name, words in (("loss", "loss"), ("eval_loss", "evaluation loss"), ("eval_accuracy", "accuracy"))
        if name in logs
    ]
    for name, words in (("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s")):
        if name in logs:
            parts.append(f"{float(logs[name]):,.0f} {words}")
    if "learning_rate" in logs:
        parts.append(f"learning rate {float(logs['learning_rate']):.2g}")
    if "peak_memory_gb" in logs:
        parts.append(f"{float(logs['peak_memory_gb']):.1f} GB at most")
    return ", ".join(parts)
