"""Train one step of long rows that ranks share, beside what others ship, in one run on the same rows.

    python benchmarks/context.py                                   # CPU: 2 ranks, rows of 2,048 tokens
    python benchmarks/context.py --device cuda --tokens 65536 --records context.jsonl              # two GPUs or more

hf_fsdp_tools              `ParallelDims(cp_size=N)`: heads are exchanged for tokens around the model's own attention
Accelerate                 its hooks for context parallelism (`cp_backend="torch"`), which drop every mask, and torch's
                           `context_parallel`, which passes keys and values around a ring
whole rows                 FSDP2 alone: every rank has the rows whole. No peer, but what sharing is to save

Rows are `causal` (full), `padded` (the second row to a half) or `packed` (four documents in one row). All begin from
the same weights and see the same rows; weights are sharded over all ranks by the same plan.

seconds        a forward and a backward pass on the slowest rank, median of 3
÷ ours         the median over rounds of these over ours in the same round
kept MB        what autograd keeps for the backward pass on a rank, and ÷ ours
result         how far loss and gradients are from one process that sees the whole rows
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measuring import (
    OURS,
    Page,
    Row,
    about,
    add_page_options,
    add_rank_options,
    measured,
    on_ranks,
    ranks_of,
    ratio,
    seconds_text,
    share_cores,
    table_of,
    with_ranks,
)
from hf_fsdp_tools import ParallelDims, make_wrap_plan, shard_model
from hf_fsdp_tools.testing import hide_gpus

SCRIPT = "benchmarks/context.py"
ACCELERATE, WHOLE = "Accelerate", "whole rows"
CONTESTANTS = (OURS, ACCELERATE, WHOLE)
KINDS = ("causal", "padded", "packed")
SIZES = {"cpu": (256, 4, 4096), "cuda": (2048, 16, 32768)}  # hidden size, layers, words
TIMED = 3


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_rank_options(parser)
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    add_page_options(parser, "hf_fsdp_tools-context")
    return with_ranks(parser.parse_args())


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for kind in KINDS:
        cell = {"kind": kind, "tokens": args.tokens, "ranks": args.ranks, "device": args.device}

        def once(name: str, is_first: bool, cell: dict[str, Any] = cell) -> tuple[list[dict[str, Any]], str]:
            return on_ranks(one_step, cell["ranks"], name, cell, is_first)

        yield {"cell": cell, "rows": measured(CONTESTANTS, args.runs, once), "about": about(SCRIPT, args.device)}


def one_step(name: str, cell: dict[str, Any], is_first: bool) -> tuple[dict[str, Any], str]:
    """Figures of this rank, and how far its loss and gradients are from one process; a function for `run_ranks`."""
    share_cores()
    device = torch.device(cell["device"])
    batch = {key: value.to(device) for key, value in rows_of(cell["kind"], cell["tokens"]).items()}
    dims = ParallelDims(cp_size=cell["ranks"] if name == OURS else 1)
    model = shard_model(plain := model_on(device), make_wrap_plan(plain), mesh=dims.build_mesh(device.type))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    run = run_as_accelerate if name == ACCELERATE else run_whole
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = run(model, batch)
    result = compared(loss, model, batch, device) if is_first else ""
    seconds = []
    for _ in range(TIMED):
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        run(model, batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "kept": sum(kept.values())}, result


def model_on(device: torch.device) -> LlamaForCausalLM:
    """The same random model for everyone, in fp32."""
    hidden, layers, words = SIZES[device.type]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=words, max_position_embeddings=2**20,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).train()


def rows_of(kind: str, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 4000, (2, tokens), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, tokens // 2 :] = 0
        batch["labels"][1, tokens // 2 :] = -100
    if kind == "packed":
        batch["position_ids"] = (torch.arange(tokens) % (tokens // 4)).expand(2, -1).contiguous()
        batch["labels"][:, :: tokens // 4] = -100
    return batch


def run_whole(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def run_as_accelerate(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """As a loop with `accelerator.maybe_context_parallel`: labels shifted before rows are cut, losses averaged."""
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    batch = {key: value.clone() for key, value in batch.items()}
    if not hasattr(model, "_ring"):
        _attach_context_parallel_hooks(model)
        model._ring = init_device_mesh(batch["input_ids"].device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    labels = nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:].contiguous()
    batch.setdefault("position_ids", torch.arange(labels.shape[1], device=labels.device).expand(2, -1).contiguous())
    count = (labels != -100).sum() / dist.get_world_size()
    buffers = [labels, *batch.values()]
    with context_parallel(model._ring, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
        output = model(**batch, labels=labels, shift_labels=labels, num_items_in_batch=count, use_cache=False)
        output.loss.backward()
    mean = output.loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())


def compared(loss: float, model: nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> str:
    """How far a loss and all gradients are from those of the plain model, relative to the largest of each."""
    plain = model_on(device)
    expected = run_whole(plain, batch)
    worst = 0.0
    for (_, shard), (_, whole) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        difference = (shard.grad.full_tensor() - whole.grad).abs().max()
        worst = max(worst, float(difference / whole.grad.abs().max()))
    return f"loss {abs(loss - expected) / expected:.0e}, gradients {worst:.0e}"


def title_of(cell: dict[str, Any]) -> str:
    return f"{cell['kind']} rows of {cell['tokens']:,} tokens, {ranks_of(cell)}"


def table(rows: dict[str, Row]) -> list[str]:
    lines = []
    for name, row in rows.items():
        if "failed" in row:
            lines.append([name, "fails", "", "", "", row["failed"]])
            continue
        kept = max(rank["kept"] for rank in row["ranks"])
        ours = rows[OURS].get("ranks")
        share = "" if ours is None or name == OURS else f"{kept / max(rank['kept'] for rank in ours):.2f}"
        seconds = seconds_text(row["seconds"])
        lines.append([name, seconds, ratio(rows, name, OURS), f"{kept / 1e6:,.0f}", share, row["wrong"]])
    return table_of(["", "seconds: median (min–max)", "÷ ours", "kept MB", "÷ ours", "result"], lines)


PAGE = Page(title="Rows that ranks share", script=SCRIPT, title_of=title_of, table=table)

if __name__ == "__main__":
    hide_gpus()
    PAGE.run(parsed(), cells)
