"""LoRA on bases that stay quantised, beside the same bases dequantised and beside QLoRA, in one run on the same rows.

    python benchmarks/packed.py                                    # CPU: 2 ranks, 512 tokens on each
    python benchmarks/packed.py --device cuda --tokens 4096 --records packed.jsonl                # one GPU or more

stays packed        `from_pretrained(dequantize=False)`
dequantised         the same checkpoint by `from_pretrained`, in bf16
QLoRA               the dequantised base packed in NF4 while it is read (`load_in_4bit`), by this package
PEFT, one process   the dequantised base whole in one process, by transformers and PEFT, which has the rows of all ranks
bitsandbytes, one   the same with transformers' own 4-bit layers

All train LoRA of rank 16 on all linear layers in bf16 with AdamW, from the same checkpoint, whose weights are random.
Of a mixture of experts the experts are quantised alone, as in gpt-oss, and adapters are on attention.

seconds        a step on the slowest rank, median of 3
÷ packed       the median over rounds of these over those of the packed base in the same round
base MB        bytes of frozen parameters that the fullest rank holds
gathered MB    bytes that all-gathers of one step deliver to a rank
peak MB        most memory of the process above what it had before the step (of a GPU: what its allocator gave out)
loss           of the first step; that of packed and dequantised bases must be equal
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from benchmarks.measuring import (
    Page,
    Row,
    about,
    add_page_options,
    add_rank_options,
    begin,
    measured,
    on_ranks,
    ranks_of,
    ratio,
    seconds_text,
    share_cores,
    table_of,
    usage,
    with_ranks,
)
from hf_fsdp_tools import export_checkpoint, from_pretrained, make_accelerator
from hf_fsdp_tools.distributed.shards import local_tensor
from hf_fsdp_tools.testing import hide_gpus
from tests._checkpoints import make_quantized

SCRIPT = "benchmarks/packed.py"
PACKED, PLAIN, QLORA = "stays packed", "dequantised", "QLoRA"
PEFT, BNB = "PEFT, one process", "bitsandbytes, one"
CONTESTANTS = (PACKED, PLAIN, QLORA, PEFT, BNB)
KINDS = ("fp8 of 128 x 128", "compressed int4", "compressed nvfp4", "awq", "mxfp4")
SIZES = {"cpu": (512, 8), "cuda": (4096, 16)}  # hidden size, layers
TIMED = 3


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_rank_options(parser)
    parser.add_argument("--tokens", type=int, default=512, help="of the row of each rank")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add_page_options(parser, "hf_fsdp_tools-packed")
    return with_ranks(parser.parse_args())


def cells(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for kind in args.kinds:
        folder = args.folder / f"{kind} {args.device}"
        if not (folder / "config.json").exists():
            make_quantized(kind, folder, partial(model_of, kind, args.device))
            export_checkpoint(folder, f"{folder} plain", dtype=torch.bfloat16)
        cell = {"kind": kind, "tokens": args.tokens, "ranks": args.ranks, "device": args.device}

        def once(
            name: str, is_first: bool, cell: dict[str, Any] = cell, folder: Path = folder
        ) -> tuple[list[dict[str, Any]], str]:
            ranks = 1 if name in (PEFT, BNB) else cell["ranks"]
            return on_ranks(one_run, ranks, name, cell, folder)

        yield {"cell": cell, "rows": measured(CONTESTANTS, args.runs, once), "about": about(SCRIPT, args.device)}


def model_of(kind: str, device: str) -> hf.PreTrainedModel:
    hidden, layers = SIZES[device]
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": 4096, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": hidden // 8, "max_position_embeddings": 2**17,
    }  # fmt: skip
    if kind == "mxfp4":
        experts = {"intermediate_size": hidden, "num_local_experts": 8, "num_experts_per_tok": 2}
        return hf.GptOssForCausalLM(hf.GptOssConfig(**sizes, **experts))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, intermediate_size=3 * hidden))


def adapter(kind: str) -> LoraConfig:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if kind == "mxfp4" else "all-linear"
    return LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")


def one_run(name: str, cell: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """Figures of this rank and the first loss of all; a function for `run_ranks`."""
    share_cores()
    device, ranks = torch.device(cell["device"]), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 4000, (cell["ranks"], cell["tokens"]), generator=generator).to(device)
    rows = rows.chunk(ranks)[dist.get_rank()]
    torch.manual_seed(0)
    model = made(name, cell, folder, device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    base = sum(local_tensor(p).nbytes for p in model.parameters() if not p.requires_grad)

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=name in (PEFT, BNB)):
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        return float(mean / ranks)

    with gathered_bytes() as delivered:
        first = step()
    before, seconds = begin(device), []
    for _ in range(TIMED):
        dist.barrier()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    after = usage(device)
    peak = after["device_peak"] - before["device"] if device.type == "cuda" else after["VmHWM"] - before["VmRSS"]
    figures = {"seconds": statistics.median(seconds), "base": base, "gathered": sum(delivered), "peak": peak}
    return figures, f"{first:.6f}"


def made(name: str, cell: dict[str, Any], folder: Path, device: torch.device) -> nn.Module:
    """The model of a contestant with its adapter."""
    kind = cell["kind"]
    four_bits = hf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    if name in (PACKED, PLAIN, QLORA):
        accelerator = make_accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
        options: dict[str, Any] = {"dequantize": False} if name == PACKED else {}
        options |= {"quantization_config": four_bits} if name == QLORA else {}
        quiet = {"progress": False, "seed": 0}
        return from_pretrained(
            folder,
            accelerator=accelerator,
            peft_config=adapter(kind),
            dtype=torch.bfloat16,
            load_kwargs=quiet,
            **options,
        )
    options = {"quantization_config": four_bits} if name == BNB else {}
    whole = hf.AutoModelForCausalLM.from_pretrained(f"{folder} plain", dtype=torch.bfloat16, **options)
    return get_peft_model(whole.to(device), adapter(kind))


@contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """A block in which the bytes that each all-gather delivers are noted."""
    delivered: list[int] = []

    def counting(own: Any) -> Any:
        def gather(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            delivered.append(output.nbytes)
            return own(output, *args, **kwargs)

        return gather

    with ExitStack() as stack:
        for name in ("all_gather_into_tensor", "all_gather_single"):  # before torch 2.14, and since
            if own := getattr(dist, name, None):
                stack.enter_context(patch.object(dist, name, counting(own)))
        yield delivered


def title_of(cell: dict[str, Any]) -> str:
    return f"{cell['kind']}, {cell['tokens']:,} tokens on each of {ranks_of(cell)}, {cell['device']}"


def table(rows: dict[str, Row]) -> list[str]:
    lines = []
    for name, row in rows.items():
        if "failed" in row:
            lines.append([name, "fails", "", "", "", "", row["failed"]])
            continue
        sizes = [f"{max(rank[key] for rank in row['ranks']) / 1e6:,.1f}" for key in ("base", "gathered", "peak")]
        lines.append([name, seconds_text(row["seconds"]), ratio(rows, name, PACKED), *sizes, row["wrong"]])
    columns = ["", "seconds: median (min–max)", "÷ packed", "base MB", "gathered MB", "peak MB", "loss"]
    return table_of(columns, lines)


PAGE = Page(title="Bases that stay quantised", script=SCRIPT, title_of=title_of, table=table)

if __name__ == "__main__":
    hide_gpus()
    PAGE.run(parsed(), cells)
