"""Record one step of a real training: its memory and its schedule, in any loop and as a callback of the Trainer."""

import json
import tempfile
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import profile
from transformers import TrainerCallback

from hf_fsdp_tools.distributed.shards import local_tensor
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.memory import MemoryEstimate
from hf_fsdp_tools.foresight.timeline import Schedule, Timeline, read_memory, read_schedule, step_schedule
from hf_fsdp_tools.plots.figure import check_matplotlib, page_text, save
from hf_fsdp_tools.plots.memory import draw_memory
from hf_fsdp_tools.plots.schedule import draw_schedule
from hf_fsdp_tools.text import show_bytes


class MemoryTimeline(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """The memory of one training step by allocation, and its schedule: what was predicted, measured.

    In a loop of one's own, around one step that is not the first, in which the optimizer makes its state:

        with MemoryTimeline(model, optimizer) as recorded:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(recorded.timeline.peak_bytes)

    In a Trainer, drawn over what was predicted:

        estimate = estimate_memory(name, num_gpus=8, gpu="h100-80gb", seq_len=8192)
        trainer.add_callback(MemoryTimeline(step=3, path="step.html", predicted=estimate))

    torch's profiler records the step; no other step is slowed. On an accelerator the memory is that of its caching
    allocator, allocated and reserved, and the schedule that of its streams. On a CPU it is what PyTorch's allocator
    gives out, gloo's buffers among it, above the shards, buffers, gradients and optimizer state that are there before;
    the batch, if it was made before, is not counted. Which unit computes is read from FSDP2's labels.

    Each rank that calls records its own step; nothing is communicated.

    Example:
        >>> model = from_pretrained("checkpoint", load_kwargs={"progress": False})
        >>> tokens = torch.arange(12).reshape(2, 6)
        >>> with MemoryTimeline(model) as recorded:
        ...     model(input_ids=tokens, labels=tokens).loss.backward()
        >>> recorded.timeline.peak_bytes > 0
        True
    """

    timeline: Timeline | None = None
    """Memory of the recorded step; None until it is over."""
    schedule: Schedule | None = None
    """Streams of the recorded step; None until it is over."""

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int = 3,
        path: str | Path | None = None,
        predicted: MemoryEstimate | None = None,
    ) -> None:
        """Prepare for a recording; nothing runs yet."""
        if step < 1:
            raise ConfigError(f"step is {step}; the first step of a training is 1. Take 3, when memory is steady.")
        self.model, self.optimizer, self.step = model, optimizer, step
        self.path, self.predicted = None if path is None else Path(path), predicted
        if self.path is not None:
            _check_path(self.path)
        self._resident_bytes = 0
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        """Begin to record."""
        # torch would end the other one without a word
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # it comes from C++
            raise ConfigError("Another profiler is running, and torch runs one at a time. End it before this step.")
        self._resident_bytes = _resident_bytes(self.model, self.optimizer)
        recording = profile(profile_memory=True)  # of every kind of device that torch can profile here
        recording.start()
        self._profile = recording
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the recording, and read it unless the step failed."""
        recording, self._profile = self._profile, None
        assert recording is not None
        recording.stop()
        if error is not None:
            return
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder, "trace.json")
            recording.export_chrome_trace(str(written))
            trace = json.loads(written.read_text())
        self.timeline = read_memory(trace, resident_bytes=self._resident_bytes)
        self.schedule = read_schedule(trace)

    def save(self, path: str | Path) -> None:
        """Write the recorded step, over the predicted one where there is one.

        Args:
            path: of the file, which is replaced. `.json`: `{"timeline": …, "schedule": …}`, as their `to_json` gives
                them; `.html`: a page with the pictures of both; `.png`, `.svg`, `.pdf`: the picture of the memory.

        Raises:
            ConfigError: no step was recorded, the suffix is another one, or matplotlib is absent.
        """
        path = Path(path)
        _check_path(path)
        if self.timeline is None or self.schedule is None:
            raise ConfigError("No step was recorded, so there is nothing to write. Run one inside of the `with` block.")
        if path.suffix == ".json":
            values = {name: json.loads(getattr(self, name).to_json()) for name in ("timeline", "schedule")}
            path.write_text(json.dumps(values) + "\n")
            return
        model = type(self.model).__name__ if self.model is not None else "a model"
        predicted = None if self.predicted is None else self.predicted.timeline
        memory = draw_memory(predicted or self.timeline, model=model, measured=self.timeline if predicted else None)
        if path.suffix != ".html":
            save(memory, path)
            return
        numbers = {"peak memory, measured": show_bytes(self.timeline.peak_bytes)}
        forecast, streams = None, draw_schedule(self.schedule, model=model)
        if self.predicted is not None:
            numbers["peak memory, predicted"] = show_bytes(self.predicted.timeline.peak_bytes)
            forecast = self.predicted.forecast
            steps = step_schedule(forecast.step.events, forecast.timing.spans)
            streams = draw_schedule(steps, model=model, measured=self.schedule)
        page = page_text(
            title=f"One step of {model}",
            setting="recorded by torch's profiler",
            numbers=numbers | {"exposed communication, measured": f"{1e3 * self.schedule.exposed_seconds:,.1f} ms"},
            breakdown=self.predicted.at_peak if self.predicted is not None else {},
            figures={"memory of a step": memory, "streams of a step": streams},
            plan=forecast.plan if forecast is not None else None,
        )
        path.write_text(page, encoding="utf-8")

    # ---- called by the Trainer ----

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin to record before the chosen step."""
        if state.global_step + 1 == self.step and state.is_world_process_zero and self.timeline is None:
            self.model, self.optimizer = objects.get("model"), objects.get("optimizer")
            self.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End the recording after the chosen step, with its optimizer step."""
        if self._profile is None:
            return
        self.__exit__(None, None, None)
        if self.path is not None:
            self.save(self.path)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Say so where the training was too short."""
        if self.timeline is None and state.is_world_process_zero:
            warnings.warn(
                f"MemoryTimeline recorded nothing: the training ended after step {state.global_step}, before step "
                f"{self.step}. Give it a smaller step.",
                stacklevel=2,
            )


def _check_path(path: Path) -> None:
    """Refuse a file that cannot be written, before the step is there to be written."""
    if path.suffix not in (".json", ".html", ".png", ".svg", ".pdf"):
        raise ConfigError(f"{path.name} cannot be written: name it .json, .html, .png, .svg or .pdf.")
    if path.suffix != ".json":
        check_matplotlib()


def _resident_bytes(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the storages on the CPU that a model, its gradients and its optimizer hold."""
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
    tensors += [value for state in getattr(optimizer, "state", {}).values() for value in state.values()]
    storages = [local_tensor(each).untyped_storage() for each in tensors if isinstance(each, torch.Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.device.type == "cpu"}.values())
