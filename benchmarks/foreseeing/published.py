"""Published peaks of memory, and speeds on other GPUs and stacks than those that were fitted, beside what is foreseen.

`published_memory.csv` has one training in a row. Each is foreseen twice:

- as a user would ask: the fields of `TrainingSetup`, which knows FSDP2 and transformers of today;
- as it ran: with what its publication's code keeps besides. `units` "blocks": FSDP1, and Accelerate without this
  package, leave embeddings and head in the root, gathered and with whole gradients until the backward pass ends.
  `keeps_outputs`: a loop that holds the model's outputs until the next step holds the logits; transformers made them
  fp32 until 2024, and copied them once more for the loss.

Rows whose checkpointing is "selective-op" have no memory that can be foreseen.
"""

import csv
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from benchmarks.foreseeing.throughput import recomputed_events
from hf_fsdp_tools.foresight.build import build
from hf_fsdp_tools.foresight.forecast import Forecast, step_of
from hf_fsdp_tools.foresight.fsdp2.step import compose
from hf_fsdp_tools.foresight.memory import memory_of
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.throughput import throughput
from hf_fsdp_tools.foresight.tracing.dry_run import trace_model
from hf_fsdp_tools.planning.policy import HybridPolicy

__all__ = ["published_report"]

_TABLE = Path(__file__).with_name("published_memory.csv")

_MODELS: dict[str, tuple[type[PreTrainedConfig], tuple[int, int, int, int, int, int], bool]] = {
    # width, blocks, heads, heads of keys, width of the MLP, vocabulary; whether the head is tied
    "llama2-7b": (LlamaConfig, (4096, 32, 32, 32, 11008, 32000), False),
    "llama2-13b": (LlamaConfig, (5120, 40, 40, 40, 13824, 32000), False),
    "llama2-70b": (LlamaConfig, (8192, 80, 64, 8, 28672, 32000), False),
    "llama3-8b": (LlamaConfig, (4096, 32, 32, 8, 14336, 128256), False),
    "llama3.2-3b": (LlamaConfig, (3072, 28, 24, 8, 8192, 128256), True),
    "mistral-7b": (LlamaConfig, (4096, 32, 32, 8, 14336, 32000), False),
    "qwen2-7b": (Qwen2Config, (3584, 28, 28, 4, 18944, 152064), False),
    "qwen2.5-1.5b": (Qwen2Config, (1536, 28, 12, 2, 8960, 151936), True),
    "yi-34b": (LlamaConfig, (7168, 60, 56, 8, 20480, 64000), False),
}

_PREFACE = """# Published trainings that no constant was fitted on

Made by `python benchmarks/foresight.py published`. `benchmarks/foreseeing/published.py` says how publications were
read, `published_memory.csv` has the facts with their sources. "As asked" is what `estimate_memory` says; "as it ran"
adds what the publication's own code keeps (embeddings in the root, outputs that a loop holds, logits in fp32).
Errors are foreseen over published, less 1.
"""


@dataclass(frozen=True)
class _Found:
    """A row, and what was foreseen of it."""

    entry: dict[str, str]
    asked: float
    """Foreseen over published, less 1."""
    ran: float
    values: tuple[float, ...]


def published_report() -> str:
    """The whole text, in Markdown."""
    with _TABLE.open(newline="") as file:
        entries = list(csv.DictReader(file))
    memory = [_memory(entry) for entry in entries if entry["gib"]]
    speed = [_speed(entry) for entry in entries if entry["tokens_s_gpu"]]
    return "\n".join([_PREFACE, *_memory_tables(memory), *_speed_tables(speed)]) + "\n"


# ---- what is foreseen ----


def _setup(entry: dict[str, str], *, as_it_ran: bool) -> TrainingSetup:
    lora_r = int(entry["lora_r"]) if entry["lora_r"] else None
    targets = entry["lora_targets"]
    blocks = HybridPolicy(min_unit_params=math.inf, floor_params=0, group_tail=False)
    return TrainingSetup(
        num_gpus=int(entry["gpus"]),
        gpu=entry["gpu"],
        seq_len=int(entry["seq_len"]),
        batch_size=int(entry["batch_size"]),
        activation_checkpointing=entry["checkpointing"] != "none",
        wrapping=cast(Any, entry["wrapping"]),
        policy=blocks if as_it_ran and entry["units"] == "blocks" else HybridPolicy(),
        lora_r=lora_r,
        lora_target_modules="all-linear" if targets in ("", "all-linear") else tuple(targets.split()),
        lora_dropout=float(entry["lora_dropout"]),
        load_in_4bit=entry["four_bit"] == "yes",
        master_dtype=cast(Any, entry["master"]),
        reduce_dtype=cast(Any, entry["reduce"]),
        optimizer=entry["optimizer"],
        loss=cast(Any, entry["loss"]),
        offload=entry["offload"] == "yes",
        compile=entry["compile"] == "yes",
    )


def _config(entry: dict[str, str]) -> PreTrainedConfig:
    kind, (width, blocks, heads, key_heads, inner, vocabulary), is_tied = _MODELS[entry["model"]]
    return kind(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        max_position_embeddings=131072,
        tie_word_embeddings=is_tied,
    )


def _forecast_as_it_ran(entry: dict[str, str]) -> Forecast:
    setup = _setup(entry, as_it_ran=True)
    model, plan = build(_config(entry), setup)
    years = re.findall(r"20\d\d", entry["source"])
    if setup.loss == "full" and (entry["keeps_outputs"] == "yes" or years < ["2025"]):
        cast(Any, model).loss_function = _Loss(is_old=years < ["2025"], keeps=entry["keeps_outputs"] == "yes")
    trace = trace_model(model, plan, setup)
    return Forecast(setup=setup, plan=plan, trace=trace, step=compose(trace, plan, setup))


class _Loss:
    """transformers' loss, with logits that a loop keeps.

    Args:
        is_old: logits are fp32, and copied without the last token, as until 2024.
        keeps: whether they stay until the step ends.
    """

    def __init__(self, *, is_old: bool, keeps: bool) -> None:
        self._is_old, self._keeps = is_old, keeps
        self._kept: list[torch.Tensor] = []

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        logits = logits.float() if self._is_old else logits
        if self._keeps:
            self._kept.append(logits)
        upcast = logits.float()
        if self._is_old:
            upcast = upcast[..., :-1, :].contiguous()
            return functional.cross_entropy(upcast.view(-1, vocab_size), labels[..., 1:].reshape(-1))
        return functional.cross_entropy(upcast.view(-1, vocab_size), labels.reshape(-1))


def _memory(entry: dict[str, str]) -> _Found:
    published, kind = float(entry["gib"]), entry["kind"]
    found, values = [], []
    for forecast in (step_of(_config(entry), _setup(entry, as_it_ran=False)), _forecast_as_it_ran(entry)):
        estimate = memory_of(forecast)
        gib = {"allocated": estimate.peak_allocated, "reserved": estimate.peak_reserved, "total": estimate.total}
        values.append(gib[kind] / 2**30)
        found.append(values[-1] / published - 1)
    return _Found(entry, found[0], found[1], tuple(values))


def _speed(entry: dict[str, str]) -> _Found:
    setup = _setup(entry, as_it_ran=False)
    forecast = step_of(_config(entry), setup)
    events: Iterable[Any] = forecast.step.events
    if entry["checkpointing"] == "selective-op":
        events = (event for _, event in recomputed_events(enumerate(events), "selective-op"))
    trace = forecast.trace
    estimate = throughput(list(events), setup, name="", tokens=trace.tokens, model_flops=trace.model_flops)
    rate = estimate.tokens_per_second_per_gpu
    error = rate / float(entry["tokens_s_gpu"]) - 1
    return _Found(entry, error, error, (rate, estimate.error))


# ---- the text ----


def _memory_tables(found: Sequence[_Found]) -> Iterator[str]:
    yield "## Peak memory on real GPUs"
    yield ""
    yield "| rows | number | mean | median | bias | 90 % below | worst | more than 10 % too low |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    eager = [each for each in found if each.entry["compile"] == "no"]
    for name, some in (("all", found), ("not compiled", eager)):
        yield _summary(f"{name}, as asked", [each.asked for each in some])
        yield _summary(f"{name}, as it ran", [each.ran for each in some])
    yield ""
    yield "| published by | training | GPUs | tokens | published GiB | counted | as asked | error | as it ran | error |"
    yield "|---|---|---|---|---:|---|---:|---:|---:|---:|"
    for each in found:
        entry, (asked, ran) = each.entry, each.values
        cells = [*_named(entry), entry["gib"], entry["kind"], f"{asked:.1f}", f"{each.asked:+.1%}"]
        yield f"| {' | '.join([*cells, f'{ran:.1f}', f'{each.ran:+.1%}'])} |"
    yield ""


def _speed_tables(found: Sequence[_Found]) -> Iterator[str]:
    yield "## Tokens per second of other GPUs and other stacks"
    yield ""
    yield "Shares of RTX 3090, RTX 4090, B200 and MI300X were set from these rows; nothing was fitted on the others."
    yield ""
    yield "| published by | training | GPUs | tokens | published tokens/s per GPU | foreseen | range | error |"
    yield "|---|---|---|---|---:|---:|---:|---:|"
    for each in sorted(found, key=lambda one: one.entry["gpu"]):
        rate, error = each.values
        published = f"{float(each.entry['tokens_s_gpu']):,.0f}"
        cells = [*_named(each.entry), published, f"{rate:,.0f}", f"± {error:.0%}", f"{each.asked:+.1%}"]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _named(entry: dict[str, str]) -> list[str]:
    extra = [word for word, holds in (("offload", entry["offload"]), ("compiled", entry["compile"])) if holds == "yes"]
    extra += [f"checkpointing {entry['checkpointing']}"] if entry["checkpointing"] != "none" else []
    training = ", ".join([entry["training"], *extra])
    return [
        entry["source"],
        training,
        f"{entry['gpus']} × {entry['gpu']}",
        f"{entry['batch_size']} × {entry['seq_len']}",
    ]


def _summary(name: str, errors: Sequence[float]) -> str:
    sizes = sorted(map(abs, errors))
    cells = [
        str(len(errors)),
        f"{statistics.mean(sizes):.1%}",
        f"{statistics.median(sizes):.1%}",
        f"{statistics.mean(errors):+.1%}",
        f"{sizes[math.ceil(0.9 * len(sizes)) - 1]:.1%}",
        f"{max(errors, key=abs):+.1%}",
        str(sum(error < -0.1 for error in errors)),
    ]
    return f"| {name} | {' | '.join(cells)} |"
