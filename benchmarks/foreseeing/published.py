"""Published throughputs and peaks of memory of FSDP trainings, each as a model and a `TrainingSetup`.

`published_throughput.csv` and `published_memory.csv` have one training in a row. What a publication leaves open is
settled by these rules, none of which looks at a figure:

- MPT (llm-foundry) runs as GPT-2: the same sizes, learned positions, biases and tied head, with transformers' SDPA;
  transformers' own MPT has eager attention only, and llm-foundry ran flash kernels. Its parameter counts agree exactly.
- `checkpointing` "1/2" means every second block (torchtitan's "selective layer"). fms-fsdp's "selective" is 1/2 for 13B
  (its HFU over its MFU says so) and 34B, and 3/4 for 70B: the smallest usual share with which its batch fits.
- `checkpointing` "selective-op" is torchtitan's rule: attention and every second matmul of a block are kept, what is
  left is computed again. Nothing is estimated of the memory of such rows.
- `precision` "PURE" of llm-foundry reduces in bf16, "DEFAULT" in fp32 (Composer); fms-fsdp reduces in bf16.
- The network is the usual one of the GPU where a publication names none.
- The FSDP paper's 175B rows hold for 128 to 512 GPUs; 256 are taken.
- llm-foundry and TinyLlama run a fused cross entropy; that of transformers makes copies of the logits in fp32, so the
  memory of these rows is less than estimated, and no row of theirs is taken to wait for a full GPU.
- TinyLlama's fused kernels and FlashAttention-2 count as compiled, of 2024.
- FSDP1 wraps blocks alone (`units` "blocks"): the root gathers all else and keeps it until the backward pass ends.
- transformers made logits in fp32 before 2025, and copied them. A loop that holds the model's outputs while it runs
  backward (`keeps_outputs`) holds the logits too; the Trainer drops them.
- PyTorch's post of 2022 wrapped the linear layers of the decoder one by one. Its teraflop/s and those of the FSDP paper
  count the recomputation, 96 B s l h^2 (1 + s/6h + V/16lh) per step, as in the script that measured them (`calc_flop`
  in github.com/mrshenli/ptd_benchmark, trainer.py). Its GPT-1T, which kept checkpoints on the host, is left out.
"""

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config
from transformers.loss.loss_utils import LOSS_MAPPING

from hf_fsdp_tools.foresight.events import Event, Mark, Work
from hf_fsdp_tools.foresight.forecast import _traces, step_of
from hf_fsdp_tools.foresight.fsdp2.step import compose
from hf_fsdp_tools.foresight.memory import MemoryEstimate, memory_of
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.throughput import throughput_of
from hf_fsdp_tools.foresight.timing.efficiency import NEWER_ATTENTION, Efficiency, efficiency_of
from hf_fsdp_tools.foresight.timing.hardware import gpu_named
from hf_fsdp_tools.planning.policy import WrapPolicy

BLOCKS_ALONE = WrapPolicy(min_unit_params=math.inf, floor_params=0, group_tail=False)

Recomputed = Fraction | Literal["selective-op"]
"""Share of the blocks that activation checkpointing computes again, or torchtitan's rule for operations."""

_GPT = {  # width, blocks, heads, vocabulary
    "mpt-125m": (768, 12, 12, 50368),
    "mpt-350m": (1024, 24, 16, 50368),
    "mpt-760m": (1536, 24, 12, 50368),
    "mpt-1b": (2048, 24, 16, 50368),
    "mpt-3b": (2560, 32, 20, 50368),
    "mpt-7b": (4096, 32, 32, 50368),
    "mpt-13b": (5120, 40, 40, 50368),
    "mpt-30b": (7168, 48, 56, 50368),
    "mpt-70b": (8192, 80, 64, 50368),
    "gpt-175b": (12288, 96, 96, 50000),
}
_LLAMA = {  # width, blocks, heads, heads of keys, width of the MLP, vocabulary
    "tinyllama-1.1b": (2048, 22, 32, 4, 5632, 32000),
    "llama2-7b": (4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": (5120, 40, 40, 40, 13824, 32000),
    "llama2-34b": (8192, 48, 64, 8, 22016, 32000),
    "llama2-70b": (8192, 80, 64, 8, 28672, 32000),
    "llama3-8b": (4096, 32, 32, 8, 14336, 128256),
    "llama3.1-8b": (4096, 32, 32, 8, 14336, 128256),
    "llama3.1-70b": (8192, 80, 64, 8, 28672, 128256),
    "llama3.2-3b": (3072, 28, 24, 8, 8192, 128256),
    "kempner-13b": (5120, 40, 40, 8, 18432, 128256),
    "mistral-7b": (4096, 32, 32, 8, 14336, 32000),
    "qwen2-7b": (3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 8960, 151936),
    "yi-34b": (7168, 60, 56, 8, 20480, 64000),
}
_TIED = ("llama3.2-3b", "qwen2.5-1.5b")


@cache
def model_config(name: str, max_length: int) -> PreTrainedConfig:
    """transformers' configuration of a published model, with positions for a sequence."""
    if name in _GPT:
        width, blocks, heads, vocabulary = _GPT[name]
        return GPT2Config(
            vocab_size=vocabulary, n_positions=max_length, n_embd=width, n_layer=blocks, n_head=heads,
            activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0, tie_word_embeddings=name.startswith("mpt"),
        )  # fmt: skip
    width, blocks, heads, key_heads, inner, vocabulary = _LLAMA[name]
    return (Qwen2Config if name.startswith("qwen") else LlamaConfig)(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=blocks, num_attention_heads=heads,
        num_key_value_heads=key_heads, intermediate_size=inner, max_position_embeddings=max_length,
        tie_word_embeddings=name in _TIED,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published training."""

    entry: dict[str, str]  # The row of the file
    setup: TrainingSetup
    recomputed: Recomputed
    tokens_per_second: float | None  # Per GPU

    @property
    def publisher(self) -> str:
        """Who measured: fms-fsdp's team wrote its README and two posts of PyTorch's blog."""
        source = self.entry["source"]
        return "fms-fsdp" if "fms-fsdp" in source else re.split("[ #]", source)[0]

    @property
    def name(self) -> str:
        """A short description."""
        setup = self.setup
        words = [self.entry["model"], str(setup.gpu), f"x{setup.num_processes}"]
        words += [f"seq {setup.max_length}", f"batch {setup.per_device_train_batch_size}"]
        words += [f"x{setup.gradient_accumulation_steps}"] if setup.gradient_accumulation_steps > 1 else []
        words += [f"AC {self.recomputed}" if self.recomputed != 1 else "AC"] if self.recomputed else []
        flags = {"HSDP": setup.dp_replicate_size > 1, "offload": setup.offload_params, "compile": setup.compile}
        return " ".join([*words, *(word for word, holds in flags.items() if holds)])

    @property
    def efficiency(self) -> Efficiency:
        """That of its GPU in the software of its year."""
        latest = efficiency_of(gpu_named(self.setup.gpu))
        is_old = self.entry.get("era", "2024") < "2024"
        return replace(latest, attention=latest.attention / NEWER_ATTENTION) if is_old else latest

    def estimate(self) -> MemoryEstimate:
        """The memory of the training, with the events of its step."""
        kept: list[torch.Tensor] = []  # logits, while the loop holds the model's outputs
        forecast_of = partial(step_of, model_config(self.entry["model"], self.setup.max_length), self.setup)
        if self.setup.loss == "full" and "keeps_outputs" in self.entry:
            keeps, years = self.entry["keeps_outputs"] == "yes", re.findall(r"\b20\d\d\b", self.entry["source"])
            loss = partial(loss_of_its_time, kept=kept if keeps else None, is_old=min(years) < "2025")
            with patch.dict(LOSS_MAPPING, ForCausalLM=loss):
                _traces.clear()  # they know no such loss
                forecast = forecast_of()
            _traces.clear()
        else:
            forecast = forecast_of()
        if self.recomputed not in (0, 1):
            trace = replace(forecast.trace, events=tuple(recomputed_events(forecast.trace.events, self.recomputed)))
            few = replace(forecast.setup, gradient_accumulation_steps=min(3, self.setup.gradient_accumulation_steps))
            forecast = replace(forecast, trace=trace, step=compose(trace, forecast.plan, few))
        return memory_of(forecast)


def loss_of_its_time(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    *,
    kept: list[torch.Tensor] | None,
    is_old: bool,
    **_: Any,
) -> torch.Tensor:
    """transformers' loss; before 2025 of logits in fp32, which it copied without the last token."""
    logits = logits.float() if is_old else logits
    if kept is not None:
        kept.append(logits)
    upcast = logits.float()
    if not is_old:
        return functional.cross_entropy(upcast.view(-1, vocab_size), labels.view(-1))
    return functional.cross_entropy(upcast[..., :-1, :].reshape(-1, vocab_size), labels[..., 1:].reshape(-1))


def read_rows(kind: Literal["throughput", "memory"]) -> list[Row]:
    """The published rows of a file but those in fp8, in which the library does not train, and GPT-1T."""
    with Path(__file__).with_name(f"published_{kind}.csv").open(newline="") as file:
        entries = [entry for entry in csv.DictReader(file) if entry.get("offload") != "all"]
    return [_row(entry) for entry in entries if entry.get("precision") != "fp8"]


def _row(entry: dict[str, str]) -> Row:
    own: dict[str, Any] = {
        "num_processes": int(entry["gpus"]),
        "gpu": entry["gpu"],
        "per_device_train_batch_size": int(entry["batch_size"]),
        "max_length": int(entry["max_length"]),
        "activation_checkpointing": entry["checkpointing"] != "none",
        "master_dtype": entry["master"],
        "reduce_dtype": entry["reduce"],
        "optimizer": entry["optimizer"],
        "offload_params": entry["offload"] != "no",
        "compile": entry["compile"] == "yes",
        "loss": entry.get("loss", "full"),
    }
    if "era" in entry:
        own |= {
            "gpus_per_node": int(entry["gpus_per_node"]),
            "network_gbit_s": float(entry["network_gbit_s"]) if entry["network_gbit_s"] else None,
            "dp_replicate_size": int(entry["replicas"]),
            "gradient_accumulation_steps": int(entry["accumulation"]),
            "mixed_precision": entry["precision"],
            "reshard_after_forward": entry["reshard"] == "yes",
            "attn_implementation": "eager" if entry["era"] == "2022" else "sdpa",
            "policy": WrapPolicy(block_types=("Conv1D",)) if own["offload_params"] else WrapPolicy(),
        }
    else:
        targets = entry["lora_targets"]
        own |= {
            "wrapping": entry["wrapping"],
            "lora_r": int(entry["lora_r"]) if entry["lora_r"] else None,
            "lora_target_modules": "all-linear" if targets in ("", "all-linear") else tuple(targets.split()),
            "lora_dropout": float(entry["lora_dropout"]),
            "load_in_4bit": entry["four_bit"] == "yes",
            "policy": BLOCKS_ALONE if entry["units"] == "blocks" else WrapPolicy(),
        }
    rate = float(entry["tokens_s_gpu"]) if entry["tokens_s_gpu"] else None
    if entry.get("tflops_gpu"):
        rate = float(entry["tflops_gpu"]) / teraflops(entry["model"], 1.0, own["max_length"])
    share = {"none": "0", "full": "1"}.get(entry["checkpointing"], entry["checkpointing"])
    recomputed: Recomputed = "selective-op" if share == "selective-op" else Fraction(share)
    return Row(entry=entry, setup=TrainingSetup(**own), recomputed=recomputed, tokens_per_second=rate)


def teraflops(model: str, tokens_per_second: float, max_length: int) -> float:
    """Teraflop/s of a GPT as the publications of 2022 and 2023 count them, with recomputation (see above)."""
    width, blocks, _, vocabulary = _GPT[model]
    share = 1 + max_length / (6 * width) + vocabulary / (16 * blocks * width)
    return tokens_per_second * 96 * blocks * width**2 * share / 1e12


def recomputed_events(events: Iterable[Event], rule: Recomputed) -> Iterator[Event]:
    """Yield the events without what selective activation checkpointing does not compute again.

    Of a share of blocks, those are spread evenly over the model (`ac_handler.py` of fms-fsdp); of operations, attention
    and every other matmul of a block, the first among them, are kept (`_save_list` of torchtitan).
    """
    known: dict[str, bool] = {}
    matmuls = 0
    for event in events:
        if isinstance(event, Mark):
            matmuls = 0
        elif isinstance(event, Work) and event.again:
            if isinstance(rule, Fraction):
                number = len(known) + 1
                known.setdefault(
                    event.unit, int(number * rule + Fraction(1, 2)) > int((number - 1) * rule + Fraction(1, 2))
                )
                if not known[event.unit]:
                    continue
            else:
                matmuls += event.operation == "matmul"
                if event.operation == "attention" or (event.operation == "matmul" and matmuls % 2):
                    continue
        yield event


# ---- the efficiencies that fit published throughputs best ----

START = {
    "a100.matmul": 0.8,
    "a100.attention": 0.35,
    "a100.memory": 0.6,
    "a100.straggler": 0.02,
    "h100.matmul": 0.7,
    "h100.attention": 0.25,
    "h100.memory": 0.6,
    "h100.straggler": 0.03,
    "newer.attention": 1.6,
    "newer.compiled": 0.4,
}
"""Where the search begins: shares that are usual for large kernels. There are no other constants: of each generation
of GPUs the share of the peak that matmuls and attention reach, the share of the memory's bandwidth, and how much
slower the slowest GPU is; of both how much faster attention of 2024 is, and what compilation leaves of the traffic of
memory."""

_SOFT = 0.04
"""Relative error from which a row counts by its error, not by the error's square."""

_WIDTH = {"straggler": 1.0}
"""How far (standard deviation of the logarithm) constants may be from where the search begins, by their last name;
all others 0.3."""


def efficiency_from(constants: Mapping[str, float], row: Row) -> Efficiency:
    """The efficiency of a row's GPU in its era."""
    family = gpu_named(row.setup.gpu).family
    own = {key: constants[f"{family}.{key}"] for key in ("matmul", "attention", "memory", "straggler")}
    own["attention"] *= constants["newer.attention"] if row.entry["era"] >= "2024" else 1.0
    compiled = constants["newer.compiled"] if row.setup.compile else 1.0
    return Efficiency(**own, compiled_memory=compiled, error=0.0, source="fitted")


def fit(rows: Sequence[Row], rounds: int = 4) -> dict[str, float]:
    """The constants with which rows are estimated best: least squares of the logarithms, large errors softened.

    Every publisher has the weight of the square root of the number of its rows for a GPU; the constants are drawn to
    `START` a little. Each round simulates every row once for each constant, which takes minutes.
    """
    memories = [row.estimate() for row in rows]
    groups = [(row.publisher, gpu_named(row.setup.gpu).family) for row in rows]
    counts = Counter(groups)
    weights = np.array([1 / math.sqrt(counts[group]) for group in groups])
    constants, step = dict(START), 0.01
    widths = np.array([_WIDTH.get(name.partition(".")[2], 0.3) for name in constants])
    for _ in range(rounds):
        now = _errors(rows, memories, constants)
        moved = [_errors(rows, memories, {**constants, name: value * (1 + step)}) for name, value in constants.items()]
        importance = np.sqrt(weights / np.sqrt(1 + (now / _SOFT) ** 2))
        far = np.array([math.log(value / START[name]) for name, value in constants.items()])
        slopes = np.vstack(
            [importance[:, None] * (np.stack(moved, axis=1) - now[:, None]) / step, np.diag(_SOFT / widths)]
        )
        targets = np.concatenate([-importance * now, -_SOFT * far / widths])
        move = np.linalg.lstsq(slopes, targets, rcond=None)[0].clip(-0.3, 0.3)
        constants = {name: value * math.exp(by) for (name, value), by in zip(constants.items(), move, strict=True)}
    return constants


def _errors(rows: Sequence[Row], memories: Sequence[MemoryEstimate], constants: Mapping[str, float]) -> np.ndarray:
    """Logarithms of estimated over published rates."""
    rates = [
        throughput_of(memory, efficiency=efficiency_from(constants, row)).tokens_per_second_per_gpu
        for row, memory in zip(rows, memories, strict=True)
    ]
    return np.log([rate / (row.tokens_per_second or 1) for row, rate in zip(rows, rates, strict=True)])
