"""Stand-ins for consumers of weights, by their published contracts: vLLM 0.33, SGLang 0.5.23, verl 0.9. What a contract
refuses, a stand-in refuses."""

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
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world, rendezvous

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        assert self.owners and len(set(self.owners)) == len(self.owners)


class WeightSource:
    def __init_subclass__(cls, **kwargs: Any) -> None:
        assert isinstance(cls.__dict__.get("metadata"), cached_property)

    def owned_names(self, rank: int) -> list[str]:
        return [m.name for m in self.metadata if m.owners is None or rank in m.owners]  # type: ignore[attr-defined]


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    rank: int = field(kw_only=True)


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
        f"{transfer}.base": (WeightSource, ParamMeta),
        f"{transfer}.nccl_engine": (NCCLTrainerInitInfo,),
        "verl.workers.engine": (FSDPEngineWithLMHead,),
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


class Engine:
    """As vLLM's trainer engine for NCCL: rank 0 sends each tensor, the other ranks take part in its passes."""

    def __init__(self, source: Any, rank: int, server: "VLLMServer") -> None:
        assert all(m.owners[0] == 0 for m in source.metadata), "rank 0 is the one sender"
        self.source, self.rank, self.server = source, rank, server

    def send_weights(self) -> None:
        meta = iter(self.source.metadata)
        for name, tensor in self.source.iter_full():
            expected = next(meta)
            assert self.rank == 0 and name == expected.name
            assert (tensor.dtype, tuple(tensor.shape)) == (expected.dtype, expected.shape)
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
    def trainer_init(cls, init_info: NCCLTrainerInitInfo, *, client: VLLMServer, source: Any) -> Engine:
        return Engine(source, init_info.rank, client)


def expert_deltas_of_vllm(file: Mapping[str, torch.Tensor], num_experts: int, scale: float) -> Tensors:
    """What vLLM (0.33, `lora/model_manager.py`) adds to stacked experts by an adapter's file: behind `base_layer` are
    the factors of `gate_up_proj`, else those of `down_proj`; A has the experts outside the rank, B inside."""
    names = {".experts.base_layer": "gate_up_proj", ".experts": "down_proj"}
    deltas: Tensors = {}
    for key, a in file.items():
        module, found, _ = key.removeprefix("base_model.model.").partition(".lora_A.")
        ending = next((each for each in names if module.endswith(each)), None)
        if not found or ending is None:
            continue
        b = file[key.replace(".lora_A.", ".lora_B.")]
        a, b = a.reshape(num_experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1)
        deltas[f"{module.removesuffix(ending)}.experts.{names[ending]}"] = b @ a * scale
    return deltas


class Served:
    """An HTTP server on a thread of this process: a GET or POST calls the method of the path's last part, by the fields
    of a body."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, getattr(server, self.path.partition("?")[0].rsplit("/")[-1])())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
                name = self.path.partition("?")[0].rsplit("/")[-1]
                server.asked.append(name)
                try:
                    self.answer(200, getattr(server, name)(**body) or {"status": "ok"})
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
        self._http.shutdown()
        self._http.server_close()


class AsyncVLLMServer(Served):
    """`vllm serve` as TRL's async trainers drive it: an update takes as many bytes as the names, dtypes and shapes of
    its request say, from the connection that the handshake made; it keeps the tensors of each update.

    Where `fails_at` names a request, that one fails.
    """

    def __init__(self, dtype: str, *, max_loras: int = 0) -> None:
        self.updates: list[Tensors] = []
        self.adapters: dict[str, Path] = {}
        self.fails_at = ""
        self._dtype, self._max_loras, self._is_paused, self._is_open = dtype, max_loras, False, False
        super().__init__()

    def _may_fail(self, name: str) -> None:
        if self.fails_at == name:
            raise OSError("out of memory")

    def health(self) -> dict[str, Any]:
        return {}

    def server_info(self) -> dict[str, Any]:
        lora = {"max_lora_rank": 8, "max_loras": self._max_loras} if self._max_loras else None
        config = {"model_config": {"dtype": f"torch.{self._dtype}"}, "lora_config": lora}
        return {"vllm_config": config | {"parallel_config": {"data_parallel_size": 1}}}

    def get_world_size(self) -> dict[str, Any]:
        return {"world_size": 1}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._may_fail("init_weight_transfer_engine")
        assert init_info["rank_offset"] == 1 and init_info["world_size"] == 2 and init_info["packed"]
        self._connection = Client(("127.0.0.1", init_info["master_port"]))

    def pause(self) -> None:
        self._may_fail("pause")
        self._is_paused = True

    def start_weight_update(self, is_checkpoint_format: bool) -> None:
        assert self._is_paused and is_checkpoint_format and not self._is_open
        self._is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._may_fail("update_weights")
        assert self._is_open
        taken: Tensors = {}
        lists = (update_info[name] for name in ("names", "dtype_names", "shapes"))
        for name, dtype, shape in zip(*lists, strict=True):
            if not self._connection.poll(20):
                raise TimeoutError(f"nothing arrives for {name}")
            data = bytearray(self._connection.recv_bytes())
            taken[name] = torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape)
            if self.fails_at == "the third tensor" and len(taken) == 3:
                raise OSError("out of memory")
        self.updates.append(taken)

    def finish_weight_update(self) -> None:
        self._is_open = False

    def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool) -> None:
        assert self._is_paused and not load_inplace and Path(lora_path, "adapter_config.json").is_file()
        self.adapters[lora_name] = Path(lora_path)
        self.updates.append(load_file(Path(lora_path, "adapter_model.safetensors")))

    def unload_lora_adapter(self, lora_name: str) -> None:
        self.adapters.pop(lora_name)

    def resume(self) -> None:
        self._may_fail("resume")
        self._is_paused = False

    def in_the_trainer(self) -> dict[str, Any]:
        """What TRL's `weight_transfer` imports of vLLM."""
        listener = Listener(("127.0.0.1", 0))

        def trainer_init(init_info: dict[str, Any]) -> Any:
            assert init_info["master_port"] == listener.address[1]
            return SimpleNamespace(group=SimpleNamespace(connection=listener.accept()))

        def producer(iterator: Iterator[Any], group: Any, src: int, post_iter_func: Any) -> None:
            for item in iterator:
                tensor = post_iter_func(item).contiguous().reshape(-1).cpu()
                group.group.connection.send_bytes(tensor.view(torch.uint8).numpy().tobytes())

        return {
            "is_vllm_available": lambda *_, **__: True,
            "_HAS_STATEFUL_TRAINER_ENGINE": True,
            "open_trainer_endpoint": trainer_init,
            "packed_nccl_broadcast_producer": producer,
            "get_ip": lambda: "127.0.0.1",
            "get_open_port": lambda: listener.address[1],
        }


class SGLangServer(Served):
    """One worker that joins gloo groups as SGLang's does. It knows the tensors `known`, by shape and dtype, and keeps
    what arrives."""

    def __init__(self, known: Mapping[str, torch.Tensor]) -> None:
        self.known = {name: (tuple(t.shape), t.dtype) for name, t in known.items()}
        self.tensors: Tensors = {}
        self.version = None
        self.is_open, self.is_paused, self.groups = False, False, dict[str, Any]()
        super().__init__()

    def server_info(self) -> dict[str, Any]:
        return {"tp_size": 1}

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
