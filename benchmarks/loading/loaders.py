"""Every loader that is compared, as a function from a `Job` to a `Loaded`."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config
from transformers.distributed import DistributedConfig

import hf_fsdp_tools
from benchmarks.measuring.comparison import LIMIT, OURS
from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.sharding.allocate import allocate
from hf_fsdp_tools.sharding.shard import shard_model

DTYPES = {"stored": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One load, the same on every rank."""

    folder: Path
    """The checkpoint."""

    dtype: torch.dtype
    """What its bf16 becomes."""

    device: str = "cpu"
    """Where the shards go: "cpu", or "cuda", a GPU per rank."""

    replicas: int = 1
    """Copies of the model that the ranks hold together; above 1 this is HSDP."""

    @property
    def torch_device(self) -> torch.device:
        """This rank's own."""
        return torch.device(self.device, torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")


@dataclass(kw_only=True)
class Loaded:
    """What a loader made, kept until the clock has stopped."""

    model: nn.Module | None = None
    """The model, if there is one."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    """What takes the place of its parameters where there is none."""

    notes: dict[str, Any] = field(default_factory=dict)
    """Whatever else is worth keeping."""

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter once."""
        return [t.detach() for t in (self.tensors if self.model is None else self.model.parameters())]


def synchronize(device: torch.device) -> None:
    """Wait for what was queued on a GPU; on the CPU nothing is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Load = Callable[[Job], Loaded]

PAGE = 4096
_PART_BYTES = 2**24  # of one request of the limit


def load_ours(job: Job) -> Loaded:
    mesh = ParallelDims(dp_replicate_size=job.replicas).build_mesh(job.device)
    model, report = hf_fsdp_tools.from_pretrained(job.folder, dtype=job.dtype, mesh=mesh, output_loading_info=True)
    return Loaded(model=model, notes={"stages": report.seconds})


def dequantized(folder: Path) -> dict[str, Any]:
    """What transformers needs to be told to dequantise a quantised checkpoint; nothing for a plain one."""
    config = json.loads((folder / "config.json").read_text()).get("quantization_config")
    classes = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config, "compressed-tensors": CompressedTensorsConfig}
    return {"quantization_config": classes[config["quant_method"]](dequantize=True)} if config else {}


def load_native(job: Job) -> Loaded:
    """transformers' own sharded loading."""
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    options = {"dtype": job.dtype, "distributed_config": config, **dequantized(job.folder)}
    return Loaded(model=AutoModelForCausalLM.from_pretrained(job.folder, **options))


def load_plain(job: Job) -> Loaded:
    """transformers without sharding: the whole model on each device."""
    options = {"dtype": job.dtype, "device_map": {"": job.torch_device}, **dequantized(job.folder)}
    return Loaded(model=AutoModelForCausalLM.from_pretrained(job.folder, **options))


def load_accelerate(job: Job, *, ram_efficient: bool) -> Loaded:
    """What `Accelerator.prepare` runs for FSDP2. Called directly, since an Accelerator drops FSDP on CPUs."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"  # with the plugin's own variable, transformers loads on rank 0 only
    settings = {"auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": ram_efficient}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, **settings)
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(ram_efficient)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), device=job.torch_device)
    accelerator.is_main_process = PartialState(cpu=job.device == "cpu").is_main_process
    accelerator.mixed_precision = "bf16" if job.dtype == torch.float32 else "no"  # bf16 makes fp32 master weights
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.bfloat16, **dequantized(job.folder))
    return Loaded(model=fsdp2_prepare_model(accelerator, model))


def allocated(job: Job) -> nn.Module:
    """A model built and sharded by us, with storage."""
    model = build_meta_model(job.folder, dtype=job.dtype)
    shard_model(model, make_wrap_plan(model), mesh=ParallelDims().build_mesh(job.device))
    allocate(model, device=job.torch_device)
    return model


def load_dcp(job: Job) -> Loaded:
    """torch's reader of safetensors, into a model that is built, sharded and tied by us, which is generous."""
    model = allocated(job)
    once = {id(tensor): key for key, tensor in reversed(model.state_dict(keep_vars=True).items())}
    state = {key: tensor for key, tensor in model.state_dict().items() if key in once.values()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(job.folder), thread_count=4))
    return Loaded(model=model)


def load_broadcast(job: Job) -> Loaded:
    """torch's own way to load on rank 0 only, into a model that is built and sharded by us."""
    model = allocated(job)
    first = dist.get_rank() == 0
    plain = partial(AutoModelForCausalLM.from_pretrained, job.folder, dtype=job.dtype, **dequantized(job.folder))
    state = plain().state_dict() if first else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, state, options=options)
    return Loaded(model=model)


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


def limit_threads() -> int:
    """Four, or as many as a rank has cores."""
    return max(4, len(os.sched_getaffinity(0)) // dist.get_world_size())


def load_limit(job: Job) -> Loaded:
    """The rank's share of bytes into fresh memory of the host, and nothing else. For fp32 that is twice the memory."""
    parts = parts_of_share(job.folder)
    sizes = [size * job.dtype.itemsize // 2 for _, _, size in parts]
    memory = list(torch.empty(sum(sizes), dtype=torch.uint8).split(sizes))
    with ThreadPoolExecutor(limit_threads()) as pool:
        list(pool.map(lambda part, into: read_part(part, into[: part[2]]), parts, memory))
        list(pool.map(lambda part, into: into[part[2] :: PAGE].zero_(), parts, memory))
    return Loaded(tensors=memory)


_PEERS: dict[str, Load] = {
    "transformers native": load_native,
    "accelerate FSDP2, RAM-efficient": partial(load_accelerate, ram_efficient=True),
    "accelerate FSDP2, every rank loads all": partial(load_accelerate, ram_efficient=False),
    "torch broadcast_from_rank0": load_broadcast,
    "torch DCP HuggingFaceStorageReader": load_dcp,
}
LOADERS: dict[str, dict[str, Load]] = {
    "cpu": {LIMIT: load_limit, OURS: load_ours, **_PEERS},
    "cuda": {
        LIMIT: load_limit,
        OURS: load_ours,
        "transformers from_pretrained(device_map)": load_plain,
        **_PEERS,
    },
}
"""For a device, name to function, in the table's order."""
