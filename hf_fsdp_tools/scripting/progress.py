"""The loss, tokens/s, learning rate and memory that a run shows and notes while it trains."""

import time
from datetime import timedelta
from functools import partial
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # has no stubs
from transformers import TrainerCallback

from hf_fsdp_tools.accelerator import peak_bytes
from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.distributed.mesh import ranks_per_row
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.scripting.aside import Aside
from hf_fsdp_tools.text import did_you_mean, listed

_SHOWN = {
    "loss": "loss {:.3f}",
    "eval_loss": "evaluation loss {:.3f}",
    "reward": "reward {:.3f}",
    "eval_reward": "evaluation reward {:.3f}",
    "eval_accuracy": "accuracy {:.3f}",
    "eval_f1": "F1 {:.3f}",
    "eval_exact_match": "written exactly {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "samples_per_second": "{:,.0f} samples/s",
    "learning_rate": "learning rate {:.2g}",
    "peak_memory_gb": "{:.1f} GB at most",
}
"""Words for each value of a log; a trainer that logs rewards has a loss without a meaning of its own."""


class Progress(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Adds speed and memory to each log, and prints logs as readable lines, above the Trainer's bar where it has one.

    It adds `tokens_per_second` (of all ranks; `samples_per_second` where the trainer does not count tokens) and
    `peak_memory_gb` (of the rank that needs most). For this it must come before the callbacks that report. Every rank
    needs one; each log exchanges one number.

    `estimate` knows on rank 0 what GPUs can do, once it is made; without one nothing is compared.
    """

    def __init__(self, *, has_bar: bool = False, estimate: Aside | None = None) -> None:
        self.estimate = estimate
        self.say = tqdm.write if has_bar else partial(print, flush=True)
        self.last: tuple[float, int | None, int] | None = None  # time, tokens counted and step of the last log
        self.evaluating_s: float | None = None  # when the evaluation began that is going on

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.start_s = time.perf_counter()
        self.first_step = state.global_step
        self.last = (self.start_s, 0 if not state.global_step else None, state.global_step)
        if state.global_step and state.is_world_process_zero:
            resumed = args.resume_from_checkpoint
            path = resumed if isinstance(resumed, str) else f"{args.output_dir}/checkpoint-{state.global_step}"
            print(f"step {state.global_step:,} of {state.max_steps:,}: goes on from {path}", flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add speed and memory to the log, and print it."""
        logs = {} if logs is None else logs
        if "loss" in logs:
            measured = self._speed(args, state, logs)
            measured["peak_memory_gb"] = round(max(all_ranks(peak_bytes(), "comparing peak memory")) / 1e9, 3)
            logs.update(measured)
            if state.log_history:
                state.log_history[-1].update(measured)
        if state.is_world_process_zero and ("loss" in logs or "eval_loss" in logs):
            hidden = {"loss", "eval_loss"} if {"reward", "eval_reward"} & set(logs) else set()
            shown = [text.format(float(logs[name])) for name, text in _SHOWN.items() if name in {*logs} - hidden]
            if logs.get("frac_reward_zero_std") == 1:  # TRL's own figure
                shown.append("all answers of a prompt have the same reward, so that nothing is learnt")
            known = self.estimate.values if self.estimate is not None else None
            rate = (known or {}).get("tokens_per_second_per_gpu")
            if rate and "tokens_per_second" in logs:
                share = logs["tokens_per_second"] / (rate * args.world_size)
                shown.append(f"{share:.0%} of what these GPUs can do")
            line = ", ".join(shown) + self._time_left(state)
            self.say(f"step {state.global_step:,} of {state.max_steps:,}: {line}")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock, for an evaluation's time is not the training's."""
        self.evaluating_s = self.evaluating_s or time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Start the clock again; refuse a best model by what no evaluation says, at the first one."""
        best, found = args.metric_for_best_model, [name for name in metrics or () if name.startswith("eval_")]
        if best and found and not {best, f"eval_{best}"} & {*found}:
            near = did_you_mean(f"eval_{best}", found, otherwise=f": it has {listed(found)}.")
            raise ConfigError(f"--metric_for_best_model {best}: no evaluation gives it{near}")
        if self.evaluating_s is not None and self.last is not None:
            start_s, count, step = self.last
            self.last = (start_s + time.perf_counter() - self.evaluating_s, count, step)
        self.evaluating_s = None

    def _speed(self, args: Any, state: Any, logs: Any) -> dict[str, float]:
        """Tokens, or else samples, of all ranks in each second since the last log."""
        now, count = time.perf_counter(), logs.get("num_tokens")
        last_s, last_count, last_step = self.last or (now, None, 0)
        self.last = (now, count, state.global_step)
        if count is None:
            batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size // ranks_per_row()
            return {"samples_per_second": (state.global_step - last_step) * batch / (now - last_s)}
        return {} if last_count is None else {"tokens_per_second": round((count - last_count) / (now - last_s), 1)}

    def _time_left(self, state: Any) -> str:
        """The time that the rest will take, at the pace so far."""
        done, rest = state.global_step - self.first_step, state.max_steps - state.global_step
        if done <= 0 or rest <= 0:
            return ""
        return f", {timedelta(seconds=round((time.perf_counter() - self.start_s) / done * rest))} left"
