"""Weights from a sharded model to a consumer on rank 0, by this package and by what others do, in one run.

    python benchmarks/stream.py                                   # CPU: 2 ranks, a dense model and a mixture of experts
    python benchmarks/stream.py --device cuda --records stream.jsonl                              # one GPU or more
    python benchmarks/stream.py --models tiny --runs 1            # to try the script

buckets              `live_weights(model, dtype=torch.bfloat16).buckets()`, to rank 0
buckets, all ranks   the same to every rank, as for a server on each GPU (vLLM's colocate mode)
TRL                  TRL's own loop of a weight sync (`VLLMGeneration._iter_named_params`): `full_tensor()` of each
                     parameter on every rank, then cast to bf16 as its server would
gather on rank 0     torch's `get_model_state_dict(full_state_dict=True, cpu_offload=True)`, then cast

The model has fp32 master weights, as under mixed precision. The consumer looks at every tensor once.

seconds        until all has arrived, on the slowest rank; median of the runs
÷ buckets      the median over rounds of these over those of the buckets in the same round
sent MB        bytes that crossed the network interface of the machine (loopback; not counted on GPUs)
peak MB        most memory of a process above what it had before, on rank 0 and on the fullest other rank
unknown        names that arrive and are not names of the checkpoint, of all that arrive
"""

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import transformers as hf
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from benchmarks.measuring import (
    Page,
    Row,
    about,
    add_page_options,
    begin,
    measured,
    on_ranks,
    parsed_with_ranks,
    ranks_of,
    ratio,
    seconds_text,
    share_cores,
    table_of,
    usage,
)
from hf_fsdp_tools import from_pretrained, live_weights
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.testing import hide_gpus

SCRIPT = "benchmarks/stream.py"
BUCKETS, EVERYWHERE, TRL, GATHER = CONTESTANTS = ("buckets", "buckets, all ranks", "TRL", "gather on rank 0")
BUCKET_BYTES = 128 * 2**20
_SIZES = {
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 4096,
}  # fmt: skip
MODELS = {
    "dense": lambda: hf.LlamaConfig(**_SIZES, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16),
    "experts": lambda: hf.Qwen3MoeConfig(
        **_SIZES, hidden_size=1024, moe_intermediate_size=384, intermediate_size=2816, num_hidden_layers=6,
        num_experts=32, num_experts_per_tok=4,
    ),
    "tiny": lambda: hf.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=128),
}  # fmt: skip


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["dense", "experts"])
    add_page_options(parser, "hf_fsdp_tools-stream")
    return parsed_with_ranks(parser)


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model in args.models:
        folder = args.folder / model
        if not (folder / "config.json").exists():
            hf.AutoModelForCausalLM.from_config(MODELS[model](), dtype=torch.bfloat16).save_pretrained(folder)
        cell = {"model": model, "ranks": args.ranks, "device": args.device}

        def once(
            name: str, is_first: bool, cell: dict[str, Any] = cell, folder: Path = folder
        ) -> tuple[list[dict[str, Any]], str]:
            return on_ranks(one_run, cell["ranks"], name, cell, folder)

        yield {"cell": cell, "rows": measured(CONTESTANTS, args.runs, once), "about": about(SCRIPT, args.device)}


def one_run(name: str, cell: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Figures of this rank, and how many names are unknown; a function for `run_ranks`."""
    share_cores()
    device = torch.device(cell["device"])
    model = from_pretrained(folder, dtype=torch.float32, load_kwargs={"progress": False})
    known = CheckpointIndex.open(folder).tensors
    arrive = {
        BUCKETS: partial(buckets, model, (0,)),
        EVERYWHERE: partial(buckets, model, None),
        TRL: partial(by_trl, model),
        GATHER: partial(gathered, model),
    }[name]()
    for _ in range(2):  # the first makes connections and the plan
        next(arrive)
        before, sent = begin(device), loopback_bytes()
        start = time.perf_counter()
        names, num_bytes = next(arrive)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        dist.barrier()
        after = usage(device)
    peak = after["device_peak"] - before["device"] if device.type == "cuda" else after["VmHWM"] - before["VmRSS"]
    figures = {"seconds": seconds, "sent": loopback_bytes() - sent, "peak": peak, "bytes": num_bytes}
    unknown = [name for name in names if name not in known]
    return figures, f"{len(unknown)} of {len(names)}"


def loopback_bytes() -> int:
    """Bytes that the loopback interface has received since the machine started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:")), 0)


# ---- contestants: each yields once before it is measured, and then what has arrived ----

Arrived = Iterator[tuple[list[str], int]]


def buckets(model: nn.Module, to: tuple[int, ...] | None) -> Arrived:
    weights = live_weights(model, dtype=torch.bfloat16)
    while True:
        yield [], 0
        names, num_bytes = list[str](), 0
        for bucket in weights.buckets(BUCKET_BYTES, to=to):
            names += bucket
            num_bytes += sum(looked_at(tensor) for tensor in bucket.values())
        yield names, num_bytes


def by_trl(model: nn.Module) -> Arrived:
    from trl.generation.vllm_generation import VLLMGeneration

    sync: Any = object.__new__(VLLMGeneration)  # vLLM itself is not needed for its loop
    sync.model, sync._dist = model, SimpleNamespace(is_fsdp=True, fsdp_version=2)
    sync.accelerator = SimpleNamespace(device=next(model.parameters()).device)
    while True:
        yield [], 0
        names, num_bytes = [], 0
        for name, tensor in sync._iter_named_params():
            names.append(name)
            if dist.get_rank() == 0:
                num_bytes += looked_at(tensor.to(torch.bfloat16))
        yield names, num_bytes


def gathered(model: nn.Module) -> Arrived:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    while True:
        yield [], 0
        state = get_model_state_dict(model, options=options)
        num_bytes = sum(looked_at(tensor.to(torch.bfloat16)) for tensor in state.values())
        yield list(state), num_bytes


def looked_at(tensor: torch.Tensor) -> int:
    """Read a tensor once; its bytes."""
    assert not bool(tensor.reshape(-1)[:: max(1, 4096 // tensor.itemsize)].isnan().any())
    return tensor.nbytes


# ---- the page ----


def title_of(cell: dict[str, Any]) -> str:
    return f"{cell['model']}, {ranks_of(cell)}, {cell['device']}"


def table(rows: dict[str, Row]) -> list[str]:
    lines = []
    for name, row in rows.items():
        if "failed" in row:
            lines.append([name, "fails", "", "", "", row["failed"]])
            continue
        peaks = [rank["peak"] / 1e6 for rank in row["ranks"]]
        memory = f"{peaks[0]:,.0f}, {max(peaks[1:], default=0):,.0f}"
        sent = f"{max(rank['sent'] for rank in row['ranks']) / 1e6:,.0f}"
        lines.append([name, seconds_text(row["seconds"]), ratio(rows, name, BUCKETS), sent, memory, row["wrong"]])
    return table_of(["", "seconds: median (min–max)", "÷ buckets", "sent MB", "peak MB", "unknown names"], lines)


PAGE = Page(title="Weights as a stream", script=SCRIPT, title_of=title_of, table=table)

if __name__ == "__main__":
    hide_gpus()
    PAGE.run(parsed(), cells)
