"""Counts what loading and saving ask of the CUDA runtime, on a stand-in for it; two ranks, rank 1 prints tables.

Uses only what older versions of the package have, too, so that a change can be compared with what was before it.
"""

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hf_fsdp_tools.loading.io.files import write_transfers
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.regions import row_major_strides
from tests._transfers import read_transfers

__all__ = ["CASES", "make_llama", "move_counted", "transfers_of"]

MIB = 2**20
BF16, FP32 = torch.bfloat16, torch.float32

CASES: dict[str, tuple[list[tuple[int, ...]], torch.dtype, torch.dtype, int]] = {
    # shapes, stored dtype, dtype in memory, one column in so many is wanted
    "tensors of 16 MiB": ([(2048, 4096)] * 16, BF16, BF16, 1),
    "mixed sizes": ([(1024, 4096), (4096,), (512, 4096), (4096,), (3000, 1000)] * 16, BF16, BF16, 1),
    "tensors of 32 KiB": ([(64, 256)] * 8000, BF16, BF16, 1),
    "fp32 to bf16": ([(2048, 4096)] * 8, FP32, BF16, 1),
    "one column in 8": ([(2048, 4096)] * 16, BF16, BF16, 8),
}


def transfers_of(file: Path, case: str, device: torch.device) -> list[Transfer]:
    """Transfers of tensors that lie one after the other in a file, which is made."""
    shapes, of_file, of_memory, columns = CASES[case]
    found, start = [], 0
    for shape in shapes:
        kept = (*shape[:-1], shape[-1] // columns)
        memory = torch.empty(kept, dtype=of_memory, device=device)
        found.append(Transfer(file=file, start=start, dtype=of_file, strides=row_major_strides(shape), memory=memory))
        start += torch.Size(shape).numel() * of_file.itemsize
    with open(file, "wb") as stream:
        stream.truncate(start)
    return found


def move_counted(move: Callable[[], object], num_bytes: int) -> dict[str, float]:
    """Calls of a move: copies, kernels and waits per GB; calls that set device 0, pinned allocations."""
    import fakegpu

    torch.cuda.synchronize()
    fakegpu.reset()
    move()
    found = fakegpu.stats()

    def per_gb(*prefixes: str) -> float:
        return 1e9 * sum(count for key, count in found.items() if key.startswith(prefixes)) / num_bytes

    return {
        "H2D": per_gb("copy H2D"),
        "D2H": per_gb("copy D2H"),
        "D2D": per_gb("copy D2D"),
        "kernels": 1e9 * found.get("kernel", 0) / num_bytes,
        "waits": per_gb("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
        "pageable": per_gb("copy H2D pageable", "copy D2H pageable"),
        "sets device 0": found.get("cudaSetDevice 0", 0),
        "pinned blocks": found.get("cudaHostAlloc", 0),
    }


def make_llama(folder: Path) -> None:
    """A Llama of 50 MB in several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(num_hidden_layers=4, vocab_size=8001, tie_word_embeddings=False, **shape)
    LlamaForCausalLM(config).to(BF16).save_pretrained(folder, max_shard_size="20MB")


def _row(*cells: object) -> None:
    print("|", " | ".join(f"{cell:.0f}" if isinstance(cell, float) else str(cell) for cell in cells), "|", flush=True)


def _count_transfers(folder: Path, device: torch.device) -> None:
    for case in CASES:
        transfers = transfers_of(folder / "stored", case, device)
        num_bytes = sum(transfer.num_bytes for transfer in transfers)
        for way, move in (("read", read_transfers), ("written", write_transfers)):
            if way == "written" and CASES[case][3] > 1:
                continue
            for staging in (64, 320) if way == "read" else (64,):
                counts = move_counted(lambda: move(transfers, staging_bytes=staging * MIB), num_bytes)  # noqa: B023
                _row(case, way, f"{staging} MiB", *counts.values())
        gc.collect()


def _count_loads(folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    from hf_fsdp_tools import from_pretrained

    gc.collect()
    torch.cuda.empty_cache()
    gc.disable()
    seen = []
    for _ in range(10):
        model = from_pretrained(folder, dtype=dtype, load_kwargs={"progress": False})
        torch.cuda.synchronize()
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        stats = torch.cuda.host_memory_stats()
        seen.append((stats["active_bytes.current"], stats["allocated_bytes.current"], unused))
        del model
    gc.enable()
    if dist.get_rank() == 1:
        _row(str(dtype), *(f"{seen[0][i] / MIB:.0f} → {seen[-1][i] / MIB:.0f}" for i in range(3)))


def _main() -> None:
    import fakegpu

    from hf_fsdp_tools import ParallelDims

    ParallelDims().build_mesh()
    rank = dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory(prefix="count-") as scratch:
        where = [scratch]
        dist.broadcast_object_list(where, src=0, device=torch.device("cpu"))
        folder = Path(where[0])
        if rank == 0:
            make_llama(folder / "llama")
        dist.barrier()
        if rank == 1:
            print(f"torch {torch.__version__}; contexts at first {fakegpu.contexts()}\n")
            _row("bf16 or fp32", "pinned in use, MiB", "pinned and kept, MiB", "reserved beyond tensors, MiB")
            _row(*["---"] * 4)
        for dtype in (BF16, FP32):
            _count_loads(folder / "llama", device, dtype)
        if rank == 1:
            print(f"\ncontexts after 20 loads {fakegpu.contexts()}\n")
            names = ["H2D", "D2H", "D2D", "kernels", "waits", "pageable", "sets device 0", "pinned blocks"]
            _row("what", "way", "staging", *names)
            _row(*["---"] * 11)
            _count_transfers(folder, device)
            print(f"\ncontexts in the end {fakegpu.contexts()}")
        dist.barrier()
    os._exit(0)  # nothing is left to tear down


if __name__ == "__main__":
    _main()
