"""One short training run on GPUs, by this package or by plain transformers and PyTorch; its figures as JSON.

    python -m benchmarks.gpu.train --folder CHECKPOINT --result FILE [--plain] [options]
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.gpu.train …   # sharded

The same random tokens in the same order either way, two batches in turn, so that the loss falls soon; under several
ranks each takes its rows of every batch, and losses are means over all. The plain run has fp32 weights under autocast
where the other has fp32 master weights under mixed precision, gradient checkpointing where the other recomputes
activations, torch's loss scaling for fp16, and PEFT's own adapters.
"""

import argparse
import json
import os
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_fsdp_tools import HybridFSDPPlugin, HybridPolicy, from_pretrained, make_accelerator, save_pretrained

WARM_UP = 3
"""Steps that are not timed."""


class Plain:
    """transformers and PyTorch, without this package."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device("cuda", 0)
        dtype = getattr(torch, options.dtype) if options.dtype else None
        settings: dict[str, Any] = {"dtype": dtype or "auto", "device_map": {"": self.device}}
        if options.four_bit:
            settings["quantization_config"] = four_bits()
        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(options.folder, **settings)
        if options.adapter:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, options.adapter, is_trainable=True)
        if options.recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if options.compile:
            self.model.compile()
        self.model.train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=options.learning_rate)
        self.scaler = torch.amp.GradScaler("cuda", enabled=options.precision == "fp16")
        self.low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=self.low) if self.low else nullcontext():
            return self.model(input_ids=ids, labels=ids).loss

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.loss(ids)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()


class Ours:
    """This package, with Accelerate."""

    def __init__(self, options: argparse.Namespace) -> None:
        policy = HybridPolicy(replicate=tuple(options.whole)) if options.whole else None
        plugin = HybridFSDPPlugin(
            policy=policy, cpu_offload=options.offload, activation_checkpointing=options.recompute
        )
        self.accelerator = make_accelerator(
            mixed_precision=options.precision,
            fsdp_plugin=plugin,
            dynamo_backend="inductor" if options.compile else "no",
        )
        self.device = self.accelerator.device
        settings: dict[str, Any] = {"quantization_config": four_bits()} if options.four_bit else {}
        if options.adapter:
            settings["is_trainable"] = True
        elif options.dtype:
            settings["dtype"] = options.dtype
        model, self.report = from_pretrained(
            options.adapter or options.folder, accelerator=self.accelerator, output_loading_info=True, **settings
        )
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=options.learning_rate)
        self.model, self.optimizer = self.accelerator.prepare(model.train(), optimizer)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.loss(ids)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def four_bits() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def batches(options: argparse.Namespace, vocabulary: int, device: torch.device) -> list[torch.Tensor]:
    """This rank's rows of two batches of random tokens."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, vocabulary, (2, options.rows, options.length), generator=generator)
    return [batch[rank::world].to(device) for batch in ids]


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().float().clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.item()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Build, train, and what that took."""
    begin = time.perf_counter()
    work = Plain(options) if options.plain else Ours(options)
    torch.cuda.synchronize()
    loaded_s = time.perf_counter() - begin
    load_peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    data = batches(options, work.model.config.vocab_size, work.device)
    first = 0
    if options.resume:
        work.accelerator.load_state(options.resume)
        first = options.steps // 2
    losses, seconds = [], []
    for step in range(first, options.steps):
        if options.save and step == options.steps // 2:
            work.accelerator.save_state(options.save)
        torch.cuda.synchronize()
        is_traced = options.trace is not None and step == options.steps - 1
        begin = time.perf_counter()
        with torch.profiler.profile() if is_traced else nullcontext() as profiler:
            losses.append(work.step(data[step % 2]))
            torch.cuda.synchronize()
        if profiler is not None:
            profiler.export_chrome_trace(options.trace)
            continue  # its time is the profiler's too
        seconds.append(time.perf_counter() - begin)
    peaks = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    free, total = torch.cuda.mem_get_info()
    with torch.no_grad():
        after = mean_over_ranks(work.loss(data[0]))
    if options.export:
        save_pretrained(work.model, options.export)
    took = statistics.median(seconds[WARM_UP:] or seconds)
    return {
        "losses": [mean_over_ranks(loss) for loss in losses],
        "after": after,
        "load_s": loaded_s,
        "load_peak": load_peak,
        **peaks,
        "used": total - free,
        "step_s": took,
        "tokens_s": options.rows * options.length / took,
        "parameters": sum(p.numel() for p in work.model.parameters()),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", required=True, help="the checkpoint")
    parser.add_argument("--result", type=Path, required=True, help="JSON, written by rank 0")
    parser.add_argument("--plain", action="store_true", help="without this package")
    parser.add_argument("--precision", choices=["no", "bf16", "fp16"], default="bf16", help="mixed precision")
    parser.add_argument("--dtype", help="of the weights; unless given, fp32 under mixed precision")
    parser.add_argument("--adapter", help="a LoRA adapter to train on the frozen base")
    parser.add_argument("--four-bit", action="store_true", help="the base in 4 bits")
    parser.add_argument("--offload", action="store_true", help="shards and optimizer on the CPU")
    parser.add_argument("--whole", nargs="+", default=[], help="patterns of modules that no rank shards")
    parser.add_argument("--recompute", action="store_true", help="activations in the backward pass")
    parser.add_argument("--compile", action="store_true", help="by torch.compile, inductor")
    parser.add_argument("--trace", help="where torch's profiler writes the last step (.json.gz; chrome://tracing)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4, help="of a batch, over all ranks")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save", help="folder for the training state after half of the steps")
    parser.add_argument("--resume", help="such a folder; only the other half is trained")
    parser.add_argument("--export", help="folder for the checkpoint after the last step")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    torch.manual_seed(0)
    result = run(options)
    if os.environ.get("RANK", "0") == "0":
        options.result.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
