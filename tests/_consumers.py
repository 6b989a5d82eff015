"""Stand-ins for consumers of weights, by their published contracts: vLLM 0.33 (`distributed/weight_transfer/base.py`,
`nccl_engine.py`, `sparse_nccl_engine.py`, `m2n_common.py`), SGLang 0.5.23 (`http_server.py`, `io_struct.py`,
`weight_updater.py`, `tensor_bucket.py`) and verl 0.9 (`workers/engine/spec.py`, `utils.py`).

What a contract refuses, a stand-in refuses.
"""

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world, rendezvous

Tensors = dict[str, torch.Tensor]

# ---- vLLM and verl, as modules ----


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        assert self.owners and len(set(self.owners)) == len(self.owners)
        assert prod(self.mesh_shape or (len(self.owners),)) == len(self.owners)
        assert self.placements is None or len(self.placements) == len(self.mesh_shape or (0,))


class WeightSource:
    def __init_subclass__(cls, **kwargs: Any) -> None:
        assert isinstance(cls.__dict__.get("metadata"), cached_property)

    def owned_names(self, rank: int) -> list[str]:
        return [m.name for m in self.metadata if m.owners is None or rank in m.owners]  # type: ignore[attr-defined]


@dataclass
class SparseWeightPatch:
    name: str
    indices: torch.Tensor
    values: torch.Tensor
    full_shape: tuple[int, ...]


@dataclass(frozen=True)
class BlockPlacement:
    local_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    full_shape: tuple[int, ...]


@dataclass
class ShardSpec:
    full_shape: tuple[int, ...]
    place: Any = None
    gather_group: Any = None
    contributes: bool = True


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    rank: int = field(kw_only=True)


class SparseNCCLTrainerInitInfo(NCCLTrainerInitInfo):
    pass


class FSDPEngineWithLMHead:
    """verl's engine: it makes its module in `initialize`."""

    def __init__(self, module: Any) -> None:
        self._given = module

    def initialize(self) -> None:
        self.module = self._given


def _modules() -> dict[str, tuple[Any, ...]]:
    transfer = "vllm.distributed.weight_transfer"
    return {
        transfer: (HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory),
        f"{transfer}.base": (WeightSource, ParamMeta, Shard, Replicate),
        f"{transfer}.nccl_engine": (NCCLTrainerInitInfo,),
        f"{transfer}.sparse_nccl_engine": (SparseWeightPatch, SparseNCCLTrainerInitInfo),
        "verl.workers.engine": (FSDPEngineWithLMHead,),
        "verl.workers.engine.spec": (ShardSpec, BlockPlacement),
    }


@contextmanager
def stand_ins() -> Iterator[None]:
    """Imports find the stand-ins, in the place of libraries that are installed too."""
    modules: dict[str, ModuleType] = {}
    for name, things in _modules().items():
        for end in range(1, len(parts := name.split(".")) + 1):
            modules.setdefault(path := ".".join(parts[:end]), ModuleType(path))
            if end > 1:
                setattr(modules[".".join(parts[: end - 1])], parts[end - 1], modules[path])
        vars(modules[name]).update({thing.__name__: thing for thing in things})
    with patch.dict(sys.modules, modules):
        yield


# ---- vLLM's trainer engines ----


class Engine:
    """As vLLM's trainer engine for NCCL: rank 0 sends each tensor, the other ranks take part in its passes."""

    def __init__(self, source: Any, rank: int, server: "VLLMServer") -> None:
        assert source is None or all(m.owners[0] == 0 for m in source.metadata), "rank 0 is the one sender"
        self.source, self.rank, self.server = source, rank, server

    def send_weights(self, patches: list[Any] | None = None) -> None:
        if patches is not None:
            for each in patches:
                assert each.indices.dtype == torch.int32 and each.indices.ndim == each.values.ndim == 1
                assert len(each.indices) == len(each.values) > 0
                self.server.tensors[each.name].view(-1)[each.indices.long()] = each.values
            return
        meta = iter(self.source.metadata)
        for name, tensor in self.source.iter_full():
            expected = next(meta)
            assert self.rank == 0 and (name, tensor.dtype, tuple(tensor.shape)) == (
                expected.name,
                expected.dtype,
                expected.shape,
            )
            self.server.take(name, tensor)
        assert self.rank != 0 or next(meta, None) is None


class VLLMServer:
    """What arrives at a server; it may fail at some tensor."""

    def __init__(self, fails_at: int = -1) -> None:
        self.tensors: Tensors = {}
        self.fails_at = fails_at

    def take(self, name: str, tensor: torch.Tensor) -> None:
        if len(self.tensors) == self.fails_at:
            raise OSError("500 Server Error")
        self.tensors[name] = tensor.clone()


class HTTPVLLMWeightSyncClient(VLLMServer):
    def __init__(self, base_url: str, timeout: float = 300) -> None:
        super().__init__()
        self.url = base_url


class WeightTransferTrainerFactory:
    @classmethod
    def trainer_init(cls, init_info: NCCLTrainerInitInfo, *, client: VLLMServer, source: Any = None) -> Engine:
        assert (source is None) == isinstance(init_info, SparseNCCLTrainerInitInfo)
        return Engine(source, init_info.rank, client)


def local_piece(whole: torch.Tensor, meta: Any, rank: int) -> torch.Tensor:
    """What a rank's piece is by what `meta` declares: `torch.chunk` along the mesh axis that cuts; even, for M2N."""
    if meta.placements is None:
        return whole
    place = meta.owners.index(rank)
    for size, placement in reversed(list(zip(meta.mesh_shape, meta.placements, strict=True))):
        index, place = place % size, place // size
        if type(placement).__name__ == "Shard":
            assert whole.shape[placement.dim] % size == 0, "nccl_m2n divides evenly"
            whole = whole.chunk(size, placement.dim)[index]
    return whole


# ---- SGLang ----


class SGLangServer:
    """A server on a thread of this process, with one worker that joins gloo groups as SGLang's does.

    It knows the tensors `known`, by shape and dtype, and keeps what arrives. `fault` is what goes wrong with the second
    bucket.
    """

    def __init__(self, known: Mapping[str, torch.Tensor], **info: int) -> None:
        self.known = {name: (tuple(t.shape), t.dtype) for name, t in known.items()}
        self.info = {"tp_size": 1, "pp_size": 1, "dp_size": 1} | info
        self.tensors: Tensors = {}
        self.asked: list[str] = []
        self.fault, self.version = "", None
        self.is_open, self.is_paused, self.groups = False, False, dict[str, Any]()
        self.adapters: dict[str, str] = {}
        self.over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/server_info"
                self.answer(200, server.info)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append(self.path[1:])
                try:
                    self.answer(200, getattr(server, self.path[1:])(**body) or {"status": "ok"})
                except ConnectionError:
                    self.connection.close()
                except (ValueError, RuntimeError) as error:
                    self.answer(400, {"success": False, "message": str(error)})
                except Exception as error:
                    self.answer(500, {"error": repr(error)})

            def answer(self, status: int, content: Any) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def stop(self) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()

    # ---- its endpoints, by their names ----

    def pause_generation(self, mode: str) -> None:
        assert mode == "retract", "caches cannot be flushed while requests hold them"
        self.is_paused = True

    def continue_generation(self) -> None:
        self.is_paused = False

    def begin_weight_update(self) -> dict[str, Any]:
        if self.is_open:
            raise ValueError("a weight-update session is already open; call end_weight_update() first")
        self.is_open = True
        return {"success": True, "message": "Success"}

    def end_weight_update(self) -> dict[str, Any]:
        if not self.is_open:
            raise ValueError("no weight-update session is open; call begin_weight_update() first")
        self.is_open = False
        return {"success": True, "message": "Success"}

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> dict[str, Any]:
        """As `init_custom_process_group` of SGLang, which makes the group by torch's own function."""
        limit = timedelta(seconds=20)
        found = rendezvous(f"tcp://{master_address}:{master_port}", rank_offset, world_size, timeout=limit)
        store, rank, world_size = next(found)
        group, _ = _new_process_group_helper(
            world_size, rank, [], dist.Backend(backend), PrefixStore(group_name, store), group_name, timeout=limit
        )
        _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        self.groups[group_name] = group
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    def destroy_weights_update_group(self, group_name: str) -> dict[str, Any]:
        dist.destroy_process_group(self.groups.pop(group_name))
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str,
        flush_cache: bool,
        weight_version: str | None,
    ) -> dict[str, Any]:
        assert self.is_paused and load_format == "flattened_bucket" and flush_cache
        if not self.is_open:
            raise ValueError("update_weights_from_distributed must run between begin and end_weight_update()")
        if self.tensors and (fault := self.fault):
            if fault == "silent":
                self.over.wait(60)
            if fault == "dies":
                raise ConnectionError
            if fault == "500":
                raise KeyError("out of memory")
        self._receive(names, dtypes, shapes, group_name)
        self.version = weight_version
        return {"success": True, "message": "Succeeded to update parameter online."}

    def _receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str) -> None:
        kinds = [getattr(torch, dtype) for dtype in dtypes]
        sizes = [prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        data = torch.empty(sum(sizes), dtype=torch.uint8)
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            if sum(sizes[:i]) % kind.itemsize:
                raise ValueError(f"Unaligned received tensor {name}")
        dist.broadcast(data, src=0, group=self.groups[group_name])
        for name, part, kind, shape in zip(names, data.split(sizes), kinds, shapes, strict=True):
            if self.known.get(name) != (tuple(shape), kind):
                raise ValueError(f"Failed to update parameter online: {name}. Please discard the whole weights.")
            self.tensors[name] = part.clone().view(kind).reshape(shape)

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, Any]:
        if lora_name in self.adapters:
            raise ValueError(f"LoRA with name {lora_name} already exists")
        self.adapters[lora_name] = lora_path
        return {"success": True}

    def unload_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        del self.adapters[lora_name]
        return {"success": True}
