"""Muon on shards: torch's own on whole matrices, at its cost, saved and resumed on another number of ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from transformers import AutoModelForCausalLM

from hf_fsdp_tools import ConfigError, HybridPolicy, Muon, ParallelDims, from_pretrained, make_accelerator
from hf_fsdp_tools.distributed.shards import cut
from hf_fsdp_tools.streaming.owners import matrices_in
from tests._checkpoints import full, randomize, tiny_config
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, apart, arguments, full_parameters, logged, make_rows, new_accelerator

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def checkpoints(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Those of all tests, and one whose words and heads two ranks can share."""
    folder = tmp_path_factory.mktemp("divisible")
    torch.manual_seed(0)
    randomize(AutoModelForCausalLM.from_config(tiny_config("llama", 2))).save_pretrained(folder)
    return {**folders, "divisible": folder}


def set_gradients(model: nn.Module, number: int) -> None:
    """Give each parameter a gradient that its name and the number of the step decide."""
    for name, p in model.named_parameters():
        seed = number * 977 + sum(map(ord, name))
        whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
        p.grad = cut(whole, p) if isinstance(p, DTensor) else whole


def by_torch(folder: Path, steps: int = STEPS, dtype: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    """A plain model after steps of torch's own Muon and AdamW: each matrix a parameter of its own."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    if dtype is not None:
        model.to(dtype)
    own = Muon(model, **{**OPTIONS, **options})
    shared = {"lr", "weight_decay", "nesterov", "adjust_lr_fn"}
    settings = {key: value for key, value in own.param_groups[0].items() if key in shared}
    named = dict(model.named_parameters())
    pieces = matrices_in(model, own.matrices.matrices)
    matrices = {
        (name, i): nn.Parameter(torch.as_strided(named[name].detach(), p.view.length, p.view.strides, p.view.offset))
        for name, parts in pieces.items()
        for i, p in enumerate(parts)
    }
    rest = [p for name, p in named.items() if name not in pieces]
    optimizers = [
        torch.optim.Muon(matrices.values(), **settings),
        torch.optim.AdamW(
            [{"params": [p for p in rest if p.ndim > 1]}, {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0}],
            **OPTIONS,
            fused=True,
        ),
    ]
    for number in range(steps):
        set_gradients(model, number)
        for (name, i), matrix in matrices.items():
            view, gradient = pieces[name][i].view, named[name].grad
            assert gradient is not None
            matrix.grad = torch.as_strided(gradient, view.length, view.strides, view.offset)
        for optimizer in optimizers:
            optimizer.step()
    return full_parameters(model)


LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "sharded": (2, "llama", {}, {}),
    "torch's rate": (2, "llama", {}, {"adjust_lr_fn": "original", "nesterov": False, "adamw_lr": 1e-2}),
    "bf16": (2, "llama", {"dtype": torch.bfloat16}, {}),
    "experts": (2, "mixtral", {}, {"bucket_bytes": 10_000}),
    "transposed": (2, "gpt2", {}, {}),
    "whole": (2, "llama", {"policy": HybridPolicy(replicate=("*.o_proj.weight", "model.norm.weight"))}, {}),
    "uneven": (3, "deepseek_v3", {}, {"bucket_bytes": 5_000}),
    "empty": (3, "tied", {}, {}),
    "replicas": (4, "mixtral", {"mesh": ParallelDims(dp_replicate_size=2, dp_shard_size=2)}, {}),
    "layers": (4, "divisible", {"mesh": ParallelDims(tp_size=2, dp_shard_size=2)}, {}),
    "experts on ranks": (4, "mixtral", {"mesh": ParallelDims(ep_size=2)}, {}),
}
"""(ranks, kind of checkpoint, options of `from_pretrained`, options of Muon)."""


def stepped(name: str, folders: dict[str, Path], root: Path) -> dict[str, Any]:
    """The parameters after some steps, the bytes that this rank has sent in the last, and what was said of them."""
    _, kind, options, settings = LAYOUTS[name]
    model = from_pretrained(folders[kind], **options)
    optimizer = Muon(model, **{**OPTIONS, **settings})
    sent = 0
    whole = dist.all_to_all_single

    def counting(into: torch.Tensor, out: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += out.nbytes
        return whole(into, out, *args, **kwargs)

    for number in range(STEPS):
        set_gradients(model, number)
        with pytest.MonkeyPatch.context() as patch:
            if number == STEPS - 1:
                patch.setattr(dist, "all_to_all_single", counting)
            optimizer.step()
    ownership = optimizer.ownership()
    return {
        "parameters": full_parameters(model),
        "sent": sent,
        "foretold": ownership.sent_bytes,
        "flops": ownership.flops,
        "sizes": [m.shape[0] * m.shape[1] for m in ownership.matrices],
        "buckets": len(ownership.buckets),
        "text": repr(optimizer),
    }
