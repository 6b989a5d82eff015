"""Every way to load a Hugging Face checkpoint into FSDP2 shards, side by side in one run, beside the limit of the machine.

    python benchmarks/load.py --size-gb 0.05 --runs 1        # a quick look; without options 1.5 GB per model
    python benchmarks/load.py --models dense --cache cold --ranks 2 --records load.jsonl     # some cells, kept as JSON lines
    python benchmarks/load.py --render load.jsonl --output benchmarks/results/load.md        # all that was kept

It writes its own checkpoints (real architectures, random bf16 weights, several files) and keeps them for the next run. Each
load runs in fresh processes on the CPU over gloo, the loaders in turn (A B C A B C …), so that a slow minute hits all. The
clock starts at a barrier, after imports, process group and a first load of a tiny checkpoint (which imports the rest), and
stops at a barrier after every page of every local shard has been touched once, because some loaders only map files.

--alone           instead: rank 3 of 8 alone on its machine, where no neighbour warms the page cache (a fake process group)
--slow-storage    instead: a request for data takes 5 ms and 10 ms per MB more (100 MB/s per stream), cached or not. Ours runs
          as it is, and in both of its read modes, with that delay put on each of its read calls. The last row replays the
          pattern of mapped files, as safetensors gives them to transformers: 4 threads fault the rank's slices in, and each
          fault brings in 128 KiB (Linux' read-ahead on network file systems). Nothing but those reads is counted there,
          which is generous.

limit     as many bytes as the rank's share, by `pread` on 4 threads from one contiguous part of each file into fresh memory;
          for fp32, which takes twice the memory, the other half is faulted in as well
read()    bytes that came through read calls; neither mapped files nor what ranks send each other count here
disk      bytes that came from the disk, mapped files included, charged to the rank that met them first
above     highest resident memory minus what was resident before minus the local shards; mapped files count where touched
large     the limit again, into memory for which large pages were asked, as ours does, which stops asking where they are slow
result    every parameter and buffer, non-persistent ones too, against plain `from_pretrained`, by checksums over all ranks
"""

import argparse
import gc
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers as hf
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_fsdp_tools
from hf_fsdp_tools.checkpoint import CheckpointIndex, reader
from hf_fsdp_tools.host_memory import empty_on_host
from hf_fsdp_tools.mesh import ParallelDims
from hf_fsdp_tools.meta import allocate, build_meta_model
from hf_fsdp_tools.shard import shard_model
from hf_fsdp_tools.wrap import make_wrap_plan
from tests._dist import run_ranks

PAGE = 4096
PRELOAD = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "qwen3_moe", "gpt2")]
PRELOAD += ["accelerate.utils.fsdp_utils", "torch.distributed.checkpoint.hf_storage", "hf_fsdp_tools.prepare"]
DTYPES = {"stored": torch.bfloat16, "fp32": torch.float32}
KINDS = ("dense", "moe", "tied", "gpt2")
Figures = dict[str, Any]
Row = dict[str, Any]
Load = Callable[[Path, torch.dtype], nn.Module | list[torch.Tensor]]


def config_of(kind: str, width: int, layers: int) -> hf.PreTrainedConfig:
    """A real architecture of that width; its vocabulary shrinks with widths below 1024."""
    heads = max(width // 64, 2)
    common = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    common |= {"num_key_value_heads": heads // 2, "max_position_embeddings": 4096}
    vocab = {"dense": 32000, "moe": 32000, "tied": 151936, "gpt2": 50257}[kind] * min(width, 1024) // 1024
    if kind == "dense":
        return hf.LlamaConfig(**common, vocab_size=vocab, intermediate_size=width * 11 // 4, tie_word_embeddings=False)
    if kind == "tied":
        sizes = {"vocab_size": vocab, "intermediate_size": width * 3, "head_dim": 64}
        return hf.Qwen3Config(**common, **sizes, tie_word_embeddings=True)
    if kind == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocab}
        return hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    experts = {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": width * 3 // 8, "head_dim": 64}
    return hf.Qwen3MoeConfig(**common, **experts, vocab_size=vocab, tie_word_embeddings=False)


def config_of_size(kind: str, num_bytes: float) -> hf.PreTrainedConfig:
    """The widest model of about that many bytes in bf16 that has at least 8 layers."""
    for width in (2048, 1536, 1024, 768, 512, 256, 128):
        one, two = (build_meta_model(config_of(kind, width, n)).num_parameters() * 2 for n in (1, 2))
        layers = round((num_bytes - (2 * one - two)) / (two - one))
        if layers >= 8:
            break
    return config_of(kind, width, max(layers, 2))


def make_checkpoint(kind: str, num_bytes: float, folder: Path) -> None:
    """Unless it is there, write the model in the hub's layout: experts apart, GPT-2 without its head's prefix."""
    if folder.exists():
        return
    model = build_meta_model(config_of_size(kind, num_bytes), dtype=torch.bfloat16)
    allocate(model, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    part = folder.with_name(f"{folder.name}.part")
    saved = model.base_model if kind == "gpt2" else model
    saved.save_pretrained(part, max_shard_size=math.ceil(model.num_parameters() * 2 / 6 * 1.05))  # about six files
    part.rename(folder)


def set_cache(folder: Path, cache: str) -> None:
    """Bring the files into the page cache, or ask the system to forget them."""
    for file in folder.iterdir():
        with open(file, "rb") as stream:
            if cache == "warm":
                stream.read()
            else:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_ours(folder: Path, dtype: torch.dtype, **load_kwargs: Any) -> nn.Module:
    model, report = hf_fsdp_tools.from_pretrained(folder, dtype=dtype, output_loading_info=True, **load_kwargs)
    model.load_seconds = report.seconds
    return model


def load_native(folder: Path, dtype: torch.dtype) -> nn.Module:
    """transformers' own sharded loading."""
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=config)


def load_accelerate(folder: Path, dtype: torch.dtype, *, ram_efficient: bool) -> nn.Module:
    """What `Accelerator.prepare` runs for FSDP2. Called directly, since an Accelerator drops FSDP on CPUs."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"  # with the plugin's own variable, transformers loads on rank 0 only
    settings = {"auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": ram_efficient}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, **settings)
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(ram_efficient)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"))
    accelerator.is_main_process = PartialState(cpu=True).is_main_process
    accelerator.mixed_precision = "bf16" if dtype == torch.float32 else "no"  # bf16 makes fp32 master weights
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return fsdp2_prepare_model(accelerator, model)


def allocate_plainly(model: nn.Module) -> None:
    """Storage as torch gives it: what our own pages are good for is not to be somebody else's figure."""
    plain = patch("hf_fsdp_tools.meta.empty_on_host", lambda wanted: [torch.empty(s, dtype=d) for s, d in wanted])
    with plain:
        allocate(model, device=torch.device("cpu"))


def load_dcp(folder: Path, dtype: torch.dtype) -> nn.Module:
    """torch's reader of safetensors, into a model that is built, sharded and tied by us, which is generous."""
    model = build_meta_model(folder, dtype=dtype)
    shard_model(model, make_wrap_plan(model), mesh=ParallelDims().build_mesh())
    allocate_plainly(model)
    once = {id(tensor): key for key, tensor in reversed(model.state_dict(keep_vars=True).items())}
    state = {key: tensor for key, tensor in model.state_dict().items() if key in once.values()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder), thread_count=4))
    return model


def load_limit(folder: Path, dtype: torch.dtype, *, large_pages: bool = False) -> list[torch.Tensor]:
    """The rank's share of bytes into fresh memory, and nothing else."""
    rank, world = dist.get_rank(), dist.get_world_size()
    memory, pieces = [], []
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")  # the header, which begins with its length
        begin, end = ((file.stat().st_size - start) * r // world for r in (rank, rank + 1))
        size = (end - begin) * dtype.itemsize // 2
        memory += empty_on_host([((size,), torch.uint8)]) if large_pages else [torch.empty(size, dtype=torch.uint8)]
        parts = memory[-1][: end - begin].split(2**24)
        pieces += [(file, start + begin + i * 2**24, part) for i, part in enumerate(parts)]

    def read(piece: tuple[Path, int, torch.Tensor]) -> None:
        with open(piece[0], "rb", buffering=0) as stream:
            assert os.preadv(stream.fileno(), [piece[2].numpy().data], piece[1]) == piece[2].numel()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, pieces))
        list(pool.map(lambda buffer: buffer[buffer.numel() * 2 // dtype.itemsize :: PAGE].zero_(), memory))
    return memory


def load_broadcast(folder: Path, dtype: torch.dtype) -> nn.Module:
    """torch's own way to load on rank 0 only, into a model that is built and sharded by us."""
    model = build_meta_model(folder, dtype=dtype)
    shard_model(model, make_wrap_plan(model), mesh=ParallelDims().build_mesh())
    allocate_plainly(model)
    first = dist.get_rank() == 0
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict() if first else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, state, options=options)
    return model


def load_slowly(folder: Path, dtype: torch.dtype, **load_kwargs: Any) -> nn.Module:
    """Ours, where every read call takes as long as `slow_request` says."""
    fast = os.preadv
    reader.os.preadv = slow_request
    try:
        return load_ours(folder, dtype, **load_kwargs)
    finally:
        reader.os.preadv = fast


def slow_request(descriptor: int, buffers: list[memoryview], position: int, flags: int = 0) -> int:
    """A read call on the simulated storage; one that is not to wait (flags) asks the cache only, and is quick."""
    if not flags:
        time.sleep(0.005 + sum(len(buffer) for buffer in buffers) / 100e6)
    return REAL_PREADV(descriptor, buffers, position, flags)


def replay_mapped(folder: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """The rank's rows of every tensor, faulted in by 4 threads in windows of 128 KiB on the simulated storage."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [t for t in CheckpointIndex.open(folder).tensors.values() if t.num_bytes]

    def fault_in(index: int) -> torch.Tensor:
        tensor = tensors[index]
        begin, end = (tensor.num_bytes * r // world for r in (rank, rank + 1))
        memory = torch.empty(end - begin, dtype=torch.uint8)
        with open(tensor.file, "rb", buffering=0) as stream:
            for i in range(0, end - begin, 2**17):
                slow_request(stream.fileno(), [memory[i : i + 2**17].numpy().data], tensor.offset + begin + i)
        return memory

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(fault_in, range(len(tensors))))


REAL_PREADV = os.preadv
LOADERS: dict[str, tuple[Load, bool]] = {  # name: (function, whether each page is written instead of read at the end)
    "limit": (load_limit, False),
    "hf_fsdp_tools": (load_ours, False),
    "transformers native, then read once": (load_native, False),
    "transformers native, then written once": (load_native, True),
    "accelerate FSDP2, RAM-efficient": (partial(load_accelerate, ram_efficient=True), False),
    "accelerate FSDP2, every rank loads all": (partial(load_accelerate, ram_efficient=False), False),
    "torch broadcast_from_rank0": (load_broadcast, False),
    "torch DCP HuggingFaceStorageReader": (load_dcp, False),
    "limit, large pages": (partial(load_limit, large_pages=True), False),
}
SLOW: dict[str, tuple[Load, bool]] = {
    "hf_fsdp_tools": (load_slowly, False),
    "hf_fsdp_tools, read_mode rank": (partial(load_slowly, load_kwargs={"read_mode": "rank"}), False),
    "hf_fsdp_tools, read_mode node": (partial(load_slowly, load_kwargs={"read_mode": "node"}), False),
    "mapped files, replayed": (replay_mapped, False),
}
LAZY = "transformers native, then written once"
ALONE = {name: LOADERS[name] for name in ("limit", "hf_fsdp_tools", LAZY)}


def measure(name: str, folder: Path, tiny: Path, dtype: torch.dtype, check: bool, mode: str) -> Figures:
    """Load once on this rank; the figures of this rank."""
    load, write = MODES[mode][name]
    if mode == "alone":
        dist.destroy_process_group()
        os.environ |= {"RANK": "3", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "1"}
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, this ends and not the user's work
    load(tiny, dtype)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    dist.barrier()
    before = usage()
    start = time.perf_counter()
    model = load(folder, dtype)
    tensors = [t.detach() for t in (model if isinstance(model, list) else model.parameters())]
    shards = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    for shard in shards:
        pages = shard.view(-1).view(torch.uint8)[::PAGE] if shard.is_contiguous() else shard
        pages.add_(0) if write else pages.sum()
    dist.barrier()
    seconds = time.perf_counter() - start
    after = usage()
    held = sum(shard.nbytes for shard in shards)
    fields = (("read", "rchar"), ("disk", "read_bytes"), ("mapped", "RssFile"))
    figures = {figure: after[field] - before[field] for figure, field in fields}
    figures["above"] = after["VmHWM"] - before["VmRSS"] - held
    figures["share"] = held * 2 // dtype.itemsize  # as stored
    sums = checksums(model) if check and mode == "side by side" and isinstance(model, nn.Module) else {}
    return {"seconds": seconds, "stages": getattr(model, "load_seconds", {}), "tensors": sums, **figures}


MODES = {"side by side": LOADERS, "alone": ALONE, "slow storage": SLOW}


def usage() -> dict[str, int]:
    """Bytes read and bytes resident of this process, from /proc."""
    fields = (line.split() for name in ("io", "status") for line in Path("/proc/self", name).read_text().splitlines())
    return {f[0].rstrip(":"): int(f[1]) * (1024 if f[-1] == "kB" else 1) for f in fields if f[1:] and f[1].isdigit()}


def checksum(local: torch.Tensor, shape: Sequence[int], first_row: int = 0) -> torch.Tensor:
    """An int64 that depends on every bit and its place; those of the parts of a tensor add up to that of the whole."""
    row_bytes = math.prod(shape[1:]) * local.element_size()
    word_bytes = 8 if len(shape) > 1 and row_bytes % 8 == 0 else local.element_size()
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word_bytes]
    total = torch.zeros((), dtype=torch.int64)
    index = first_row * row_bytes // word_bytes
    for part in local.contiguous().view(-1).clone().view(word).split(2**22):
        places = torch.arange(index, index + part.numel())
        total += (part.to(torch.int64) * (2 * places + 1)).sum()
        index += part.numel()
    return total


@torch.no_grad()
def checksums(model: nn.Module) -> Figures:
    """Dtype, shape and checksum over all ranks of every parameter and buffer. Every rank must call."""
    found = {}
    buffers = model.named_buffers(remove_duplicate=False)
    for name, tensor in sorted([*model.named_parameters(remove_duplicate=False), *buffers]):
        if isinstance(tensor, DTensor) and tensor.placements == (Shard(0),):
            rows = math.ceil(tensor.shape[0] / tensor.device_mesh.size())
            first = min(rows * tensor.device_mesh.get_local_rank(), tensor.shape[0])
            total = checksum(tensor.to_local(), tensor.shape, first)
            dist.all_reduce(total)
        else:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            total = torch.tensor(-1) if whole.is_meta else checksum(whole, whole.shape)
        found[name] = (tensor.dtype, tuple(tensor.shape), int(total))
    return found


def reference(folder: Path, dtype: torch.dtype) -> Figures:
    return checksums(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))


def run_cell(
    what: tuple[Path, Path, torch.dtype], cache: str, ranks: int, runs: int, mode: str, expected: Figures
) -> dict[str, Row]:
    """The loaders in turn; what they took, or why they failed."""
    results: dict[str, list[list[Figures]]] = {name: [] for name in MODES[mode]}
    failed: dict[str, str] = {}
    for run, name in itertools.product(range(runs), results):
        if name not in failed:
            set_cache(what[0], cache)
            try:  # to check the first run is enough
                results[name].append(run_ranks(measure, ranks, name, *what, run == 0, mode, timeout_s=900))
            except AssertionError as error:  # holds the failing ranks' tracebacks
                lines = str(error).split("\n--- rank")[0].splitlines()
                errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
                failed[name] = [lines[0], *errors][-1][:160].replace("|", "/")
    return {name: summary(runs_of, failed.get(name, ""), expected) for name, runs_of in results.items()}


def summary(runs: list[list[Figures]], failed: str, expected: Figures) -> Row:
    """What is kept of a loader's runs: each run's slowest rank, the last run's figures by rank, what was wrong."""
    if failed:
        return {"failed": failed}
    wrong = sorted(
        {key for rank in runs[0] if rank["tensors"] for key, _ in rank["tensors"].items() ^ expected.items()}
    )
    keys = ("read", "disk", "above", "mapped", "share")
    return {
        "seconds": [max(rank["seconds"] for rank in run) for run in runs],
        "ranks": [{key: rank[key] for key in keys} for rank in runs[-1]],
        "stages": runs[-1][0]["stages"],
        "wrong": f"wrong: {len(wrong)} tensors, {wrong[0]}" if wrong else "equal" if runs[0][0]["tensors"] else "–",
    }


def table(rows: dict[str, Row]) -> list[str]:
    """One row per loader; ratios are medians over runs of the same round."""
    columns = ["loader", "seconds: median (min–max)", "÷ limit", "÷ ours", "read() MB by rank", "÷ share"]
    columns += ["disk MB by rank", "÷ share", "above the shards MB by rank (mapped files)", "result"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | fails | | | | | | | | {row['failed']} |")
            continue
        took = row["seconds"]
        bases = (rows.get(base, {}).get("seconds", []) for base in ("limit", "hf_fsdp_tools"))
        ratios = [[a / b for a, b in zip(took, base, strict=False)] for base in bases]
        shown = " | ".join(f"{statistics.median(pairs):.2f}" if pairs else "" for pairs in ratios)
        by_rank = {key: ", ".join(f"{r[key] / 1e6:.0f}" for r in row["ranks"]) for key in row["ranks"][0]}
        read, disk = (max(r[key] / r["share"] for r in row["ranks"]) for key in ("read", "disk"))
        lines.append(
            f"| {name} | {statistics.median(took):.2f} ({min(took):.2f}–{max(took):.2f}) | {shown} "
            f"| {by_rank['read']} | {read:.3f} | {by_rank['disk']} | {disk:.2f} "
            f"| {by_rank['above']} ({by_rank['mapped']}) | {row['wrong']} |"
        )
    stages = [f"{stage} {seconds:.2f}" for stage, seconds in rows["hf_fsdp_tools"].get("stages", {}).items()]
    lines += ["", f"hf_fsdp_tools, rank 0, last run: {', '.join(stages)} s; the rest is building and sharding on meta."]
    return lines


def about() -> dict[str, str]:
    """Where and how a cell was measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = (f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "safetensors"))
    machine = f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB of memory, gloo on the CPU"
    return {
        "where": f"{date.today()}; hf_fsdp_tools {hf_fsdp_tools.__version__}, {', '.join(versions)}; {machine}.",
        "command": f"python benchmarks/load.py {' '.join(sys.argv[1:])}",
    }


def render(records: Sequence[Figures], preface: str = "") -> str:
    """All cells as one Markdown page; of a cell that was measured twice, the last."""
    lines = ["# Loading into FSDP2 shards", "", "What each column means is said at the top of `benchmarks/load.py`."]
    lines += ["", preface.strip()] if preface else []
    for where in dict.fromkeys(record["about"]["where"] for record in records):
        lines += ["", where]
    cells = {record["title"]: record for record in records}
    for title, record in cells.items():
        lines += ["", f"## {title}", "", f"`{record['about']['command']}`", "", *table(record["rows"])]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--size-gb", type=float, default=1.5, help="bf16 bytes of each model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cache", nargs="+", choices=["warm", "cold"], default=["warm", "cold"])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--alone", action="store_true", help="rank 3 of 8 alone, cold")
    parser.add_argument("--slow-storage", action="store_true", help="5 ms per request, 100 MB/s per stream")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "hf-fsdp-load"), help="of models")
    parser.add_argument("--records", type=Path, help="JSON lines, one per cell, to which this run adds its own")
    parser.add_argument("--render", type=Path, help="measure nothing; make --output of such a file")
    parser.add_argument("--preface", type=Path, help="with --render: Markdown to put before the cells")
    parser.add_argument("--output", type=Path, help="Markdown file")
    args = parser.parse_args()
    if args.render:
        records = [json.loads(line) for line in args.render.read_text().splitlines()]
        args.output.write_text(render(records, args.preface.read_text() if args.preface else ""))
        return
    multiprocessing.set_forkserver_preload(PRELOAD)
    mode = "alone" if args.alone else "slow storage" if args.slow_storage else "side by side"
    made = []
    for record in cells(args, mode):
        made.append(record)
        print("", f"## {record['title']}", "", *table(record["rows"]), sep="\n", flush=True)
        if args.records:
            with args.records.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        if args.output:
            args.output.write_text(render(made))


def cells(args: argparse.Namespace, mode: str) -> Iterator[Figures]:
    """Measure what was asked for, one cell after another."""
    for kind in args.models:
        folder, tiny = args.folder / f"{kind}-{args.size_gb:g}GB", args.folder / f"{kind}-tiny"
        run_ranks(make_checkpoint, 1, kind, args.size_gb * 1e9, folder, timeout_s=900)
        run_ranks(make_checkpoint, 1, kind, 1e6, tiny, timeout_s=900)
        size = f"{sum(file.stat().st_size for file in folder.glob('*.safetensors')) / 1e9:.2f} GB of bf16"
        for dtype in args.dtype:
            side = mode == "side by side"
            expected = run_ranks(reference, 1, folder, DTYPES[dtype], timeout_s=900)[0] if side else {}
            caches, ranks_of = (["cold"], [1]) if args.alone else (args.cache, args.ranks)
            for cache, ranks in itertools.product(caches, ranks_of):
                rows = run_cell((folder, tiny, DTYPES[dtype]), cache, ranks, args.runs, mode, expected)
                who = "rank 3 of 8 alone" if args.alone else f"{ranks} ranks"
                title = f"{kind}, {size}, {dtype}, {cache} cache, {who}{', slow storage' if args.slow_storage else ''}"
                yield {"title": title, "rows": rows, "about": about()}


if __name__ == "__main__":
    main()
