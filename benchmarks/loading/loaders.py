"""Every loader that is compared, as a function from a `Job` to a model; its time on one rank, what it reads and
takes, and whether its values are right."""

import gc
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config
from transformers.distributed import DistributedConfig

import hf_fsdp_tools
from benchmarks.measuring import LIMIT, OURS, Figures, begin, end_without_memory, share_cores, usage
from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.sharding.allocate import allocate
from hf_fsdp_tools.sharding.shard import shard_model

DTYPES = {"stored": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One load, the same on every rank."""

    folder: Path  # The checkpoint
    dtype: torch.dtype  # What its bf16 becomes
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the shards go: "cpu", or "cuda", a GPU per rank."""

    @property
    def torch_device(self) -> torch.device:
        """This rank's own."""
        return torch.device(self.device, torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait for what was queued on a GPU; on the CPU nothing is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Load = Callable[[Job], nn.Module | list[torch.Tensor]]
"""To a model, or to what takes the place of its parameters."""

PAGE = 4096
_PART_BYTES = 2**24  # of one request of the limit


def load_ours(job: Job) -> nn.Module:
    mesh = ParallelDims().build_mesh(job.device)
    return hf_fsdp_tools.from_pretrained(job.folder, dtype=job.dtype, mesh=mesh)


def dequantized(folder: Path) -> dict[str, Any]:
    """What transformers needs to be told to dequantise a quantised checkpoint; nothing for a plain one."""
    config = json.loads((folder / "config.json").read_text()).get("quantization_config")
    classes = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config, "compressed-tensors": CompressedTensorsConfig}
    return {"quantization_config": classes[config["quant_method"]](dequantize=True)} if config else {}


def load_native(job: Job) -> nn.Module:
    """transformers' own sharded loading."""
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    options = {"dtype": job.dtype, "distributed_config": config, **dequantized(job.folder)}
    return AutoModelForCausalLM.from_pretrained(job.folder, **options)


def load_plain(job: Job) -> nn.Module:
    """transformers without sharding: the whole model on each device."""
    options = {"dtype": job.dtype, "device_map": {"": job.torch_device}, **dequantized(job.folder)}
    return AutoModelForCausalLM.from_pretrained(job.folder, **options)


def load_accelerate(job: Job, *, ram_efficient: bool) -> nn.Module:
    """What `Accelerator.prepare` runs for FSDP2. Called directly, since an Accelerator drops FSDP on CPUs."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"  # with the plugin's own variable, transformers loads on rank 0 only
    settings = {"auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": ram_efficient}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, **settings)
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(ram_efficient)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), device=job.torch_device)
    accelerator.is_main_process = PartialState(cpu=job.device == "cpu").is_main_process
    accelerator.mixed_precision = "bf16" if job.dtype == torch.float32 else "no"  # bf16 makes fp32 master weights
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.bfloat16, **dequantized(job.folder))
    return fsdp2_prepare_model(accelerator, model)


def allocated(job: Job) -> nn.Module:
    """A model built and sharded by us, with storage."""
    model = build_meta_model(job.folder, dtype=job.dtype)
    shard_model(model, make_wrap_plan(model), mesh=ParallelDims().build_mesh(job.device))
    allocate(model, device=job.torch_device)
    return model


def load_dcp(job: Job) -> nn.Module:
    """torch's reader of safetensors, into a model that is built, sharded and tied by us, which is generous."""
    model = allocated(job)
    once = {id(tensor): key for key, tensor in reversed(model.state_dict(keep_vars=True).items())}
    state = {key: tensor for key, tensor in model.state_dict().items() if key in once.values()}
    load_state(state, storage_reader=HuggingFaceStorageReader(str(job.folder), thread_count=4))
    return model


def load_broadcast(job: Job) -> nn.Module:
    """torch's own way to load on rank 0 only, into a model that is built and sharded by us."""
    model = allocated(job)
    first = dist.get_rank() == 0
    plain = partial(AutoModelForCausalLM.from_pretrained, job.folder, dtype=job.dtype, **dequantized(job.folder))
    state = plain().state_dict() if first else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, state, options=options)
    return model


def parts_of_share(folder: Path) -> list[tuple[Path, int, int]]:
    """(file, position, bytes) of requests that bring the rank's share: one contiguous part of each file."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = []
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")  # the header, which begins with its length
        begin, end = (start + (file.stat().st_size - start) * r // world for r in (rank, rank + 1))
        parts += [(file, at, min(_PART_BYTES, end - at)) for at in range(begin, end, _PART_BYTES)]
    return parts


def read_part(part: tuple[Path, int, int], memory: torch.Tensor) -> None:
    with open(part[0], "rb", buffering=0) as stream:
        assert os.preadv(stream.fileno(), [memory.numpy().data], part[1]) == part[2] == memory.numel()


def load_limit(job: Job) -> list[torch.Tensor]:
    """The rank's share of bytes into fresh memory of the host, and nothing else. For fp32 that is twice the memory."""
    parts = parts_of_share(job.folder)
    sizes = [size * job.dtype.itemsize // 2 for _, _, size in parts]
    memory = list(torch.empty(sum(sizes), dtype=torch.uint8).split(sizes))
    with ThreadPoolExecutor(max(4, len(os.sched_getaffinity(0)) // dist.get_world_size())) as pool:
        list(pool.map(lambda part, into: read_part(part, into[: part[2]]), parts, memory))
        list(pool.map(lambda part, into: into[part[2] :: PAGE].zero_(), parts, memory))
    return memory


_PEERS: dict[str, Load] = {
    "transformers native": load_native,
    "accelerate FSDP2, RAM-efficient": partial(load_accelerate, ram_efficient=True),
    "accelerate FSDP2, every rank loads all": partial(load_accelerate, ram_efficient=False),
    "torch broadcast_from_rank0": load_broadcast,
    "torch DCP HuggingFaceStorageReader": load_dcp,
}
LOADERS: dict[str, dict[str, Load]] = {
    "cpu": {LIMIT: load_limit, OURS: load_ours, **_PEERS},
    "cuda": {LIMIT: load_limit, OURS: load_ours, "transformers from_pretrained(device_map)": load_plain, **_PEERS},
}
"""For a device, name to function, in the table's order."""


# ---- one load on one rank ----


def measure(name: str, job: Job, tiny: Path, check: bool) -> Figures:
    """Load once on this rank; the figures of this rank."""
    load = LOADERS[job.device][name]
    share_cores()
    end_without_memory()
    load(replace(job, folder=tiny))
    gc.collect()
    device = job.torch_device
    synchronize(device)
    before = begin(device)
    start = time.perf_counter()
    loaded = load(job)
    tensors = loaded if isinstance(loaded, list) else [parameter.detach() for parameter in loaded.parameters()]
    shards = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    touch([shard for shard in shards if shard.device.type == "cpu"])
    synchronize(device)
    dist.barrier()
    seconds = time.perf_counter() - start
    after = usage(device)  # before anything collects garbage: what a load leaves behind must show
    on_host, on_device = (sum(t.nbytes for t in shards if (t.device.type == "cpu") is host) for host in (True, False))
    fields = (("read", "rchar"), ("disk", "read_bytes"), ("mapped", "RssFile"), ("cpu_us", "cpu_us"))
    figures: Figures = {figure: after[field] - before[field] for figure, field in fields}
    figures["above"] = after["VmHWM"] - before["VmRSS"] - on_host
    figures["above_device"] = after["device_peak"] - before["device"] - on_device
    figures["reserved_left"] = after["device_reserved"] - before["device_reserved"] - on_device
    figures["pinned"] = after["pinned_peak"]
    figures["pinned_left"] = after["pinned"]
    figures["share"] = (on_host + on_device) * 2 // job.dtype.itemsize  # as stored
    sums = checksums(loaded) if check and isinstance(loaded, nn.Module) else {}
    return {"seconds": seconds, "tensors": sums, **figures}


def touch(shards: Sequence[torch.Tensor]) -> None:
    """Write to every page once: some loaders only map files."""
    for shard in shards:
        (shard.view(-1).view(torch.uint8)[::PAGE] if shard.is_contiguous() else shard).add_(0)


@torch.no_grad()
def checksums(model: nn.Module) -> Figures:
    """Dtype, shape and checksum of every whole parameter and buffer. Every rank must call."""
    found = {}
    buffers = model.named_buffers(remove_duplicate=False)
    for name, tensor in sorted([*model.named_parameters(remove_duplicate=False), *buffers]):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        data: Any = b"" if whole.is_meta else whole.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        found[name] = (tensor.dtype, tuple(tensor.shape), zlib.crc32(data))
    return found


def reference(job: Job) -> list[Figures]:
    """Checksums of plain `from_pretrained` on the CPU and, for a GPU, there too, since sines of buffers may differ.

    Of a quantised checkpoint, transformers leaves tensors that are stored plain in their stored dtype (5.23); a model
    that is wholly of the dtype asked for is right too.
    """
    devices: list[dict[str, Any]] = [{}, {"device_map": {"": "cuda:0"}}] if job.device == "cuda" else [{}]
    found = []
    for device in devices:
        options = {"dtype": job.dtype, **device, **dequantized(job.folder)}
        model = AutoModelForCausalLM.from_pretrained(job.folder, **options)
        found.append(checksums(model))
        if "quantization_config" in options:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(job.dtype)
            found.append(checksums(model))
    return found
