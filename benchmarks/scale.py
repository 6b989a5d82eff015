"""What this package's own work costs one rank of N, for N from 8 to 4,096, on one process of a CPU.

    python benchmarks/scale.py --out benchmarks/results/scale.md  # --ranks 8 64: a quick look

Rank N // 3 of torch's fake process group runs each stage alone: nothing is sent. Checkpoints are sparse files with real
headers, of two layers of the shapes of DeepSeek-V3 (a dense one and one of 256 experts), Llama-3.1-405B, Qwen3-235B and
gpt-oss-120b. From 512 ranks on, where a share is small, the rank also loads, saves its own parts and steps.

CPU seconds    of each stage, with Python's garbage collector on; of `shard_model` and of plain `fully_shard`
reads          to plan them; system calls that load the rank's share; bytes that they read ÷ bytes of the share
load           `load_weights`
writes         to plan them; transfers of the rank's own parts in a save; to write them
DCP            µs per chunk to check an optimizer's metadata, as N ranks save it, and of torch's own reading; chunks
stream         to plan what goes to rank 0; boxes that this rank sends of it
Muon           to plan a step; matrices that this rank owns; its own work in a step, without Newton-Schulz
memory         MB at the highest point above the model on meta, with the shards and gradients of ranks that load
"""

import argparse
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig, Qwen3MoeConfig

from benchmarks.measuring import about, table_of
from hf_fsdp_tools import Muon, live_weights
from hf_fsdp_tools.distributed.shards import Box, local_boxes
from hf_fsdp_tools.loading.conversion import persistent_tensors, saved_tensors
from hf_fsdp_tools.loading.fill import _share_of
from hf_fsdp_tools.loading.formats.dcp import check_dcp
from hf_fsdp_tools.loading.io.files import MAX_GAP_BYTES, STAGING_BYTES, write_transfers
from hf_fsdp_tools.loading.io.transfer import Limits
from hf_fsdp_tools.loading.match import match_checkpoint
from hf_fsdp_tools.loading.quantized.dequantize import reads_of
from hf_fsdp_tools.loading.report import MemoryWatch
from hf_fsdp_tools.saving.layout import plan_layout
from hf_fsdp_tools.sharding.allocate import allocate
from hf_fsdp_tools.steps import build_meta_model, load_weights, make_wrap_plan, open_checkpoint, shard_model
from hf_fsdp_tools.streaming.held import parts_of, shares
from hf_fsdp_tools.streaming.routes import plan_buckets
from hf_fsdp_tools.testing import run_ranks

COLUMNS = ("open", "plan", "shard", "match", "reads", "load", "layout", "writes", "stream", "Muon", "DCP", "memory")
MODELS = {
    "DeepSeek-V3": lambda: DeepseekV3Config(num_hidden_layers=2, first_k_dense_replace=1, dtype="bfloat16"),
    "Llama-3.1-405B": lambda: LlamaConfig(num_hidden_layers=2, hidden_size=16384, intermediate_size=53248,
        num_attention_heads=128, num_key_value_heads=8, vocab_size=128256, dtype="bfloat16"),
    "Qwen3-235B": lambda: Qwen3MoeConfig(num_hidden_layers=2, hidden_size=4096, moe_intermediate_size=1536,
        num_attention_heads=64, head_dim=128, num_key_value_heads=4, num_experts=128, dtype="bfloat16"),
    "gpt-oss-120b": lambda: GptOssConfig(num_hidden_layers=2, dtype="bfloat16"),
}  # fmt: skip


def make_sparse(name: str, folder: Path) -> None:
    """A checkpoint with headers, and holes in the place of data."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build_meta_model(MODELS[name](), dtype=torch.bfloat16)
    layout = plan_layout(model, None, "5GB")
    for file, header in layout.headers.items():
        with (folder / file).open("wb") as stream:
            stream.write(header)
            stream.truncate(layout.sizes[file])
    files = {key: str(place.file) for key, place in layout.places.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    model.config.save_pretrained(folder)


def write_metadata(model: nn.Module, ranks: int, folder: Path) -> int:
    """DCP's metadata of an optimizer's two moments, as all ranks save it; the number of chunks."""
    entries: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            key, chunks = f"optimizer.state.{name}.{moment}", []
            for rank in range(ranks):
                for box, _ in local_boxes(parameter.shape, parameter.placements, (ranks,), (rank,)):  # type: ignore[attr-defined]
                    chunk = dcp.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.length))
                    chunks.append(chunk)
                    index = dcp.MetadataIndex(key, chunk.offsets, len(chunks) - 1)
                    places[index] = _StorageInfo(f"__{rank}_0.distcp", len(places), box.numel * 2)
            entries[key] = dcp.TensorStorageMetadata(dcp.TensorProperties(), parameter.shape, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(entries, storage_data=places)))
    return len(places)


def one_rank(name: str, ranks: int, folder: Path) -> dict[str, str]:
    """The row of a rank; a function for `run_ranks`, whose group is not the one that it needs."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 3, world_size=ranks)
    row: dict[str, list[str]] = {"": [f"{name}, {ranks:,}"], **{column: [] for column in COLUMNS}}

    def timed(column: str, work: Callable[[], Any], chunks: float = 0.0) -> Any:
        start = time.process_time()
        found = work()
        seconds = time.process_time() - start
        row[column].append(f"{1e6 * seconds / chunks:.0f}" if chunks else f"{seconds:.2f}")
        return found

    checkpoint = timed("open", lambda: open_checkpoint(folder))
    model = build_meta_model(checkpoint.config, dtype=torch.bfloat16)
    plan = timed("plan", lambda: make_wrap_plan(model))
    watch, mesh = MemoryWatch(), init_device_mesh("cpu", (ranks,))
    timed("shard", lambda: shard_model(model, plan, mesh=mesh))
    plain = build_meta_model(checkpoint.config, dtype=torch.bfloat16)
    timed("shard", lambda: [fully_shard(part, mesh=mesh) for part in (*plain.model.layers, plain)])
    match = timed("match", lambda: match_checkpoint(model, checkpoint.index))
    allocate(model, device=torch.device("cpu"), dtype=None)

    def reads() -> tuple[int, int, int]:
        places, bands, _, _, share = _share_of(persistent_tensors(model), match.index, match.loaded, {})
        places += (place for band in bands if band for place in band.begin(ranks // 3)[0])
        transfers, _ = reads_of(places, match.index)
        limits: dict[str, int] = {"request_bytes": 2**23, "buffer_bytes": 2**25, "device_gap_bytes": 0}
        cut = Limits(**limits, host_gap_bytes=MAX_GAP_BYTES, on_device=lambda memory: False)
        sizes = [request.stop - request.start for batch in cut.batches(transfers) for request in batch]
        return len(sizes), sum(sizes), share

    calls, read, share = timed("reads", reads)
    row["reads"] += [f"{calls:,}", f"{read / max(1, share):.2f} ×"]
    layout = timed("layout", lambda: plan_layout(model, None, "5GB"))
    state = saved_tensors(model)
    own = lambda: shares(part for _, parts in parts_of(layout.places, state) for part in parts)  # noqa: E731
    writes = [replace(each, file=folder / each.file) for each in timed("writes", lambda: layout.transfers(own()))]
    row["writes"].append(f"{len(writes):,}")
    if is_whole := ranks >= 512:
        timed("load", lambda: load_weights(model, checkpoint.index, progress=False))
        timed("writes", lambda: write_transfers(writes, staging_bytes=STAGING_BYTES))  # zeros into the same holes
    spread = (weights := live_weights(model)).spread()
    whole = {key: (Box.whole(each.symbol.shape), each.element) for key, each in weights.tensors.items()}
    buckets = timed("stream", lambda: plan_buckets((0,), whole, spread, ranks, 2**34))
    muon = Muon(model)
    row["Muon"].append(f"{sum(m.owner == ranks // 3 for m in timed('Muon', muon.ownership).matrices):,}")
    if is_whole:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with patch("torch.optim._muon._zeropower_via_newtonschulz", lambda update, *options: update):
            timed("Muon", muon.step)
    row["stream"].append(f"{sum(len(list(a.parts(ranks // 3))) for bucket in buckets for a in bucket.arrivals):,}")
    with tempfile.TemporaryDirectory() as saved:
        chunks = write_metadata(model, ranks, Path(saved))
        timed("DCP", lambda: check_dcp(Path(saved)), chunks)
        timed("DCP", FileSystemReader(saved).read_metadata, chunks)
    row["DCP"].append(f"{chunks:,}")
    row["memory"].append(f"{watch.above(0) / 1e6:,.0f}")
    return {column: "; ".join(cells) for column, cells in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=(8, 64, 512, 4096))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "scale"))
    parser.add_argument("--out", type=Path, help="the page")
    args = parser.parse_args()
    rows = list[dict[str, str]]()
    for name in args.models:
        make_sparse(name, args.folder / name)
        for ranks in args.ranks:
            rows += run_ranks(one_rank, 1, name, ranks, args.folder / name, timeout_s=900)
            print(rows[-1], flush=True)
    facts = about("benchmarks/scale.py", "cpu")
    head = "# The work of one rank of N"
    meaning = "What each column means is said at the top of `benchmarks/scale.py`."
    table = "\n".join(table_of(list(rows[0]), [list(row.values()) for row in rows]))
    page = "\n\n".join([head, facts["where"], meaning, f"`{facts['command']}`", table])
    print(page)
    if args.out:
        args.out.write_text(page + "\n")


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
