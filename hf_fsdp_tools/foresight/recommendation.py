"""A recommended setting as a value: what was chosen, why, and what was rejected by how much."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.text import show_bytes


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another setting that was estimated, and rejected."""

    setup: TrainingSetup
    changes: Mapping[str, Any]
    """Fields that differ from the recommended setting and their values; first the one that it is an alternative of."""
    peak_bytes: int
    step_seconds: float
    verdict: str
    """Why it was rejected, with figures."""

    def __str__(self) -> str:
        return f"{', '.join(setting_words(*change) for change in self.changes.items())}: {self.verdict}"

    @property
    def short(self) -> str:
        """As `str()`, for a line that names the field."""
        (_, value), *more = (*self.changes.items(),)
        also = f" ({', '.join(setting_words(*change) for change in more)})" if more else ""
        return f"{_value_words(value)}{also}: {self.verdict}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The value of one field, and what other values would have meant."""

    field: str
    """Name in `TrainingSetup`."""
    value: Any
    fixed: bool
    """Whether the user has fixed it."""
    rejected: tuple[Alternative, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, in one line per rejected value."""
        if self.fixed:
            return ("as given",)
        return tuple(other.short for other in self.rejected) or ("nothing else to choose from",)

    def lines(self, width: int) -> list[str]:
        """Name, value and reasons, the name padded to `width`."""
        head = f"{_TITLES[self.field]:<{width}}  {_value_words(self.value):>5}  "
        return [(head if not number else " " * len(head)) + reason for number, reason in enumerate(self.reasons)]


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The fastest setting that fits, and what speaks for it.

    Example:
        >>> best = recommend_config("checkpoint", num_gpus=2, gpu="h100-80gb", seq_len=32, global_batch_size=4)
        >>> isinstance(best, Recommendation), best.global_batch_size
        (True, 4)
    """

    model: str
    setup: TrainingSetup
    peak_bytes: int
    """Of each GPU's memory, at the peak: what PyTorch reserves, and what CUDA and NCCL take beside it."""
    gpu_bytes: int
    margin: float
    """Part of `gpu_bytes` that stays free at least."""
    host_bytes: int
    """Host memory of one process under offload, else 0."""
    step_seconds: float
    retries: int = 0
    """How often in a step the allocator is full and gives cached memory back, for which the GPU stands still."""
    whole_logits_bytes: int = 0
    """`peak_bytes` of the same with whole logits; 0 where the loss was named, or is never made in pieces."""
    proposals: tuple[Alternative, ...] = ()
    """Faster settings that fit and are not chosen unasked, since they change how numbers are rounded or how the model
    is started."""
    notes: tuple[str, ...] = ()
    choices: tuple[Choice, ...]
    """One per field that was searched or could have been."""
    estimated: int
    possible: int
    """Settings among which was searched; the others follow from the estimated ones."""

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, over all GPUs."""
        return self.setup.batch_size * self.setup.gradient_accumulation_steps * self.setup.num_gpus

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.global_batch_size * self.setup.seq_len / self.step_seconds / self.setup.num_gpus

    def __str__(self) -> str:
        setup = self.setup
        width = max(len(_TITLES[choice.field]) for choice in self.choices)
        tokens = self.global_batch_size * setup.seq_len
        return "\n".join(
            [
                f"{self.model}, {training_words(setup)}, on {setup.num_gpus} x {setup.gpu}",
                *wrap(setup.words, 99, initial_indent="assumed   ", subsequent_indent=" " * 10),
                "",
                *(line for choice in self.choices for line in choice.lines(width)),
                f"{'global batch':<{width}}  {self.global_batch_size:>5,}  {setup.num_gpus} GPUs x "
                f"{setup.batch_size} x {setup.gradient_accumulation_steps} steps, {tokens:,} tokens",
                "",
                *self._figures(),
                *(f"{'' if number else 'faster':<10}{each}" for number, each in enumerate(self.proposals)),
                *(f"note      {note}" for note in self.notes),
                f"searched  {self.estimated} estimates; the others of {self.possible:,} settings follow from these",
            ]
        )

    def _figures(self) -> list[str]:
        of, free = show_bytes(self.gpu_bytes), percent(1 - self.peak_bytes / self.gpu_bytes)
        reserve = f"at least {percent(self.margin)} for what estimates cannot know"
        lines = [f"memory    {show_bytes(self.peak_bytes)} of {of} per GPU, {free} free ({reserve})"]
        if self.retries:
            lines.append(
                f"          full {self.retries} times per step, for which the GPU stands still (in the speed below)"
            )
        if self.whole_logits_bytes:
            whole = show_bytes(self.whole_logits_bytes)
            fits = "" if self.whole_logits_bytes <= self.gpu_bytes * (1 - self.margin) else ", which does not fit"
            lines.append(f"loss      in pieces, as hf-fsdp finetune makes it; with whole logits {whole}{fits}")
        if self.host_bytes:
            processes = min(self.setup.gpus_per_node, self.setup.num_gpus)
            lines.append(f"on host   {show_bytes(self.host_bytes * processes)} of memory per machine")
        rate = f"{self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        return [*lines, f"speed     {self.step_seconds:,.2f} s per step, {rate}, with full rows"]

    def to_json(self) -> str:
        """All of it as JSON: fields as here, sizes in bytes."""
        derived = {name: getattr(self, name) for name in ("global_batch_size", "tokens_per_second_per_gpu")}
        return json.dumps(asdict(self) | derived, indent=1, default=str)


def percent(part: float) -> str:
    """0.123 as "12 %", 0.004 as "0.4 %"."""
    return f"{100 * part:.{1 if abs(part) < 0.0095 else 0}f} %"


def training_words(setup: TrainingSetup) -> str:
    """What is trained how, without what is searched: "LoRA (r 16), sequences of 4,096 tokens"."""
    kind = "full fine-tuning" if setup.lora_r is None else f"LoRA (r {setup.lora_r})"
    kind = kind.replace("LoRA", "QLoRA") if setup.load_in_4bit else kind
    return f"{kind}, sequences of {setup.seq_len:,} tokens"


def setting_words(field: str, value: Any) -> str:
    """One field with its value, in words: "without activation checkpointing"."""
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {_TITLES[field]}"
    return f"{_TITLES[field]} {value}"


def _value_words(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


_TITLES = {
    "seq_len": "tokens per sequence",
    "batch_size": "micro-batch",
    "activation_checkpointing": "activation checkpointing",
    "reshard_after_forward": "reshard after forward",
    "sync_each_batch": "reduction in every micro-step",
    "dp_replicate_size": "copies of the model",
    "offload": "offload",
    "compile": "torch.compile",
    "reduce_dtype": "reduction in",
    "wrapping": "wrapping",
}
