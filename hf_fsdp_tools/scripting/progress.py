"""What a run shows while it trains."""

import time
from typing import Any

from transformers import ProgressCallback

__all__ = ["Progress"]


class Progress(ProgressCallback):  # type: ignore[misc]  # transformers is not typed
    """The Trainer's progress bar with loss and tokens/s behind it, instead of a line for each log."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar and the clock."""
        super().on_train_begin(args, state, control, **kwargs)
        self.last = (time.perf_counter(), 0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show loss and tokens/s behind the bar."""
        if self.training_bar is None or "loss" not in (logs or {}):
            return
        now, tokens = time.perf_counter(), int(logs.get("num_tokens", 0))
        speed = (tokens - self.last[1]) / (now - self.last[0])
        self.last = (now, tokens)
        self.training_bar.set_postfix_str(f"loss {float(logs['loss']):.3f}, {speed:,.0f} tokens/s")
