"""Peaks of ranks that share this machine's GPU, each by its own allocator, beside what was estimated before.

FSDP2's schedule decides them, over real collectives and streams; no time is looked at.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.foreseeing.cases import SIZES, Case, case_named
from benchmarks.foreseeing.memory import counted
from benchmarks.foreseeing.training import Training
from benchmarks.gpu.one import GPU, SHAPES
from hf_fsdp_tools import estimate_memory
from hf_fsdp_tools.distributed.mesh import local_device
from hf_fsdp_tools.testing import run_ranks

_QWEN = {"num_key_value_heads": 8, "num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936}
_3B = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "tie_word_embeddings": True}
_30B = {"hidden_size": 2048, "intermediate_size": 6144, "num_key_value_heads": 4, "num_hidden_layers": 4}
_30B |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
MODELS: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any], str]] = {
    "1B": (LlamaConfig, SHAPES["1b"], "dense"),
    "3B": (LlamaConfig, SHAPES["1b"] | _3B | {"head_dim": 128}, "dense"),
    "4B": (Qwen3Config, _QWEN | _4B, "tied"),
    "mixture": (Qwen3MoeConfig, _QWEN | _30B, "MoE"),
}
"""The class, the sizes (Llama 3.2 1B and 3B; Qwen3 4B; four layers of Qwen3 30B-A3B), and the case of its tiny size."""

_BATCH = {"max_length": 2048, "per_device_train_batch_size": 1}
_RECOMPUTED = {"activation_checkpointing": True}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1B, 2 ranks": ("1B", 2, {}),
    "1B, 4 ranks": ("1B", 4, {}),
    "1B, HSDP, 4 ranks": ("1B", 4, {"dp_replicate_size": 2}),
    "1B, cp 2, 2 ranks": ("1B", 2, {"cp_size": 2}),
    "1B, tp 2, 2 ranks": ("1B", 2, {"tp_size": 2}),
    "4B LoRA, 2 ranks": ("4B", 2, {"lora_r": 16}),
    "1B, offload, 2 ranks": ("1B", 2, {"offload_params": True}),
    "1B, packed, 2 ranks": ("1B", 2, {"packed": True}),
    "mixture, 2 ranks": ("mixture", 2, {}),
    "1B, checkpointed, 8 ranks": ("1B", 8, _RECOMPUTED),
    "3B, 4 ranks": ("3B", 4, {}),
    "mixture, ep 2, 2 ranks": ("mixture", 2, {"ep_size": 2}),
    "1B, tp 2, 4 ranks": ("1B", 4, {"tp_size": 2}),
    "4B, checkpointed, 4 ranks": ("4B", 4, _RECOMPUTED),
    "4B LoRA, checkpointed, 8 ranks": ("4B", 8, {"lora_r": 16} | _RECOMPUTED),
    "3B, checkpointed, 8 ranks": ("3B", 8, _RECOMPUTED),
}
"""Model, ranks and fields of `TrainingSetup`, the weightiest first."""
STEPS = {name: 60 + 15 * ranks for name, (_, ranks, _) in CASES.items()}
HEADS = ("allocated GB, each rank", "estimated", "error", "reserved GB, each rank", "estimated", "error")


def case_of(name: str, *, tiny: bool) -> Case:
    model, ranks, settings = CASES[name]
    kind, sizes, tiny_case = MODELS[model]
    settings = {key: value for key, value in settings.items() if key != "packed"}
    if tiny:
        return replace(case_named(tiny_case), name=name, settings=settings, ranks=ranks)
    return Case(name=name, config=lambda _: kind(**sizes), settings=_BATCH | settings, ranks=ranks)


def stepped(name: str, tiny: bool) -> dict[str, Any]:
    """What this rank's allocator counts of a step; on a CPU, the loss alone; a function for `run_ranks`."""
    case = case_of(name, tiny=tiny)
    training = Training(case, "tiny", num_processes=case.ranks, device=local_device())
    if "packed" in CASES[name][2]:
        ids = training.batch["input_ids"]
        places = torch.arange(ids.shape[1], device=ids.device).remainder(ids.shape[1] // 4)
        training.batch["position_ids"] = places.expand(ids.shape)
    if local_device().type == "cpu":
        training.step()
        return {"allocated": 0, "reserved": 0}
    return counted(training)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    ranks = run_ranks(stepped, CASES[name][1], name, options.tiny, device=options.device, timeout_s=STEPS[name])
    return {"allocated": [rank["allocated"] for rank in ranks], "reserved": [rank["reserved"] for rank in ranks]} | {
        key: ranks[0].get(key) for key in ("held", "segments", "retries", "parameters", "device", "torch")
    }


def foresee(name: str, *, tiny: bool) -> dict[str, Any]:
    case = case_of(name, tiny=tiny)
    setup = case.sized("tiny", case.ranks)
    found = estimate_memory(case.config(SIZES["tiny"]), replace(setup, gpu=GPU, loss="full"))
    return {"allocated": found.peak_allocated, "reserved": found.peak_reserved}


def cells(row: dict[str, Any], foreseen: dict[str, Any]) -> list[str]:
    shown = []
    for key in ("allocated", "reserved"):
        guess, most = foreseen.get(key), max(row[key])
        shown += [", ".join(f"{each / 1e9:.3f}" for each in row[key]), f"{guess / 1e9:.3f}" if guess else ""]
        shown += [f"{guess / most - 1:+.2%}" if guess and most else ""]
    return shown
