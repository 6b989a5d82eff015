"""Weights for SGLang's HTTP servers, through the process group that they make with a trainer."""

import http.client
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from os import PathLike
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size, same_on_all_ranks
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.streaming.live import BUCKET_BYTES, LiveWeights
from hf_fsdp_tools.text import dtype_name, first_lines, listed

_c10d: Any = dist  # type checkers do not see its stores, nor NCCL's group
_FIRST_DEVICE = {"gloo": "cpu", "nccl": "cuda"}
"""Of the devices of a backend, the one after which torch names a group's keys in its store."""

_CURE = (
    "It is to be there, with the same model: look at its log, start it again if it is stuck, and call update again. "
    "Training can go on."
)


class SGLangServers:
    """Servers of SGLang that get the weights of a model, from rank 0, when `update` is called on every rank.

    Rank 0 and the tensor-parallel workers of all servers, on any machine, make a process group. Each server has one
    replica (`dp_size` and `pp_size` 1); start several for more.
    """

    def __init__(
        self,
        weights: LiveWeights,
        urls: str | Sequence[str],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 300,
        port: int = 0,
        backend: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Keep what `update` needs; nothing is asked of a server.

        Args:
            weights: of a model; of a PEFT model, with its adapters merged.
            urls: "http://HOST:PORT" of each server.
            bucket_bytes: as in `LiveWeights.send`; rank 0 joins what it got of a bucket, which takes half as much more.
            timeout_s: how long a server may take for an answer, or to take a bucket; less than the ranks' `patience`.
            port: of rank 0's machine, on which the servers find the group; 0: a free one.
            backend: "nccl" or "gloo"; by default that of the model's mesh.
            headers: of each request, such as `{"Authorization": "Bearer KEY"}`.
        """
        self._weights = weights
        self._urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        self._bucket_bytes, self._timeout_s, self._port = bucket_bytes, timeout_s, port
        self._backend = backend or ("gloo" if weights.device.type == "cpu" else "nccl")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if self._backend not in _FIRST_DEVICE or not self._urls or not timeout_s > 0:
            raise ConfigError(
                f"urls={self._urls}, timeout_s={timeout_s}, backend={self._backend!r}: give one url at least, seconds "
                "above 0, and gloo or nccl."
            )
        self._store: Any = None
        self._group: Any = None
        self._name, self._may_be_open = "", True
        self._adapters: set[str] = set()

    def update(self, *, weight_version: str | None = None) -> None:
        """Give every server the weights of this moment; when this returns, they generate with them.

        The servers pause, take up again what runs with the new weights (`retract`), and flush their caches. Every rank
        must call. After an error a server may hold weights of both kinds: it stays paused until an `update`
        succeeds. The model and its optimizer are not touched.

        Args:
            weight_version: what the servers say of themselves from now on.

        Raises:
            ConfigError: a server is away, refuses, has another model, or does not answer in time, on all ranks.
        """
        doing, weights = "sending weights to SGLang", self._weights.of_a_model("SGLang")
        same_on_all_ranks(doing, urls=self._urls, bucket_bytes=self._bucket_bytes, weight_version=weight_version)
        try:
            with agreed(doing):
                if rank_and_size()[0] == 0:
                    self._begin()
            weights.send(partial(self._send, weight_version), self._bucket_bytes)
            with agreed(doing):
                if rank_and_size()[0] == 0:
                    self._ask_all("end_weight_update")
                    self._may_be_open = False
                    self._ask_all("continue_generation")
        except BaseException:
            self._leave()
            raise

    def load_adapter(self, folder: str | PathLike[str], name: str) -> None:
        """Let every server load a saved LoRA adapter, in the place of the last that was loaded by this name here.

        Every rank must call, after `save_pretrained(model, folder)` of the adapter alone; the servers read the folder.
        Errors are those of `update`.
        """
        with agreed("giving SGLang an adapter"):
            if rank_and_size()[0] == 0:
                if name in self._adapters:
                    self._adapters.remove(name)
                    self._ask_all("unload_lora_adapter", lora_name=name)
                self._ask_all("load_lora_adapter", lora_name=name, lora_path=str(folder))
                self._adapters.add(name)

    def close(self) -> None:
        """Let the servers leave the group. Every rank must call; errors are those of `update`."""
        with agreed("leaving SGLang's group"):
            if self._group is not None:
                self._ask_all("destroy_weights_update_group", group_name=self._name)
        self._leave()

    # ---- on rank 0 ----

    def _begin(self) -> None:
        self._ask_all("pause_generation", mode="retract")
        if self._may_be_open:  # an update that failed, or of a trainer that ended, has left a session open
            with suppress(ConfigError):  # where none is open, the server says so
                self._ask_all("end_weight_update")
        if self._group is None:
            self._join()
        self._may_be_open = True
        self._ask_all("begin_weight_update")

    def _join(self) -> None:
        infos = self._ask_all("server_info", get=True)
        for url, info in zip(self._urls, infos, strict=True):
            if "tp_size" not in info:
                raise ConfigError(f"{url} is no server of SGLang: its /server_info has no tp_size.")
            if more := [f"{key}={info[key]}" for key in ("pp_size", "dp_size") if info.get(key, 1) != 1]:
                raise ConfigError(
                    f"{url} runs with {listed(more)}, where SGLang takes no weights from a group: start a server with "
                    "tp_size alone for each replica, and give all urls."
                )
        sizes, limit = [int(info["tp_size"]) for info in infos], timedelta(seconds=self._timeout_s)
        ((address, self._store),) = self._at_once(partial(self._meeting_place, limit))
        self._name = f"hf_fsdp_tools {uuid4().hex}"  # a server may still be in another group of ours
        common = {"master_address": address, "master_port": self._store.port, "world_size": 1 + sum(sizes)}
        common |= {"group_name": self._name, "backend": self._backend}
        asking = [
            partial(self._ask, url, "init_weights_update_group", common | {"rank_offset": 1 + sum(sizes[:i])})
            for i, url in enumerate(self._urls)
        ]
        self._group = self._at_once(partial(self._make_group, 1 + sum(sizes), limit), *asking)[0]

    def _meeting_place(self, limit: timedelta) -> tuple[str, Any]:
        """This machine's address, as the servers see it, and the store that they find there."""
        parts = urllib.parse.urlsplit(self._urls[0])
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
        with socket.create_connection((parts.hostname, port), timeout=self._timeout_s) as seen:
            address = seen.getsockname()[0]
        options = {"is_master": True, "timeout": limit, "wait_for_workers": False, "multi_tenant": True}
        return address, self._store or _c10d.TCPStore(address, self._port, **options)

    def _make_group(self, size: int, limit: timedelta) -> Any:
        """The group as torch makes it for the servers, with its names of keys, but apart from the trainers' groups, of
        which torch would split NCCL's communicator, which takes all trainers."""
        store: Any = self._store
        for prefix in (self._name, f"{self._name}/", f"{_FIRST_DEVICE[self._backend]}/"):
            store = _c10d.PrefixStore(prefix, store)
        if self._backend == "gloo":
            return dist.ProcessGroupGloo(store, 0, size, timeout=limit)
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = 10 * limit  # its watchdog ends the process; `_at_once` comes first
        return _c10d.ProcessGroupNCCL(store, 0, size, options)

    def _send(self, weight_version: str | None, bucket: dict[str, torch.Tensor]) -> None:
        tensors = sorted(bucket.items(), key=lambda pair: -pair[1].itemsize)  # each begins at a multiple of its width
        data = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in tensors])
        body = {
            "names": [name for name, _ in tensors],
            "dtypes": [dtype_name(tensor.dtype) for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": True,
            "weight_version": weight_version,
        }
        if data.is_cuda:
            torch.cuda.current_stream().synchronize()  # another thread sends it

        def broadcast() -> None:
            with torch.accelerator.device_index(data.device.index):
                self._group.broadcast([data], dist.BroadcastOptions()).wait()
                if data.is_cuda:
                    torch.cuda.current_stream().synchronize()

        asking = [partial(self._ask, url, "update_weights_from_distributed", body) for url in self._urls]
        self._at_once(broadcast, *asking)

    def _leave(self) -> None:
        """Forget the group, and what it still waits for; the next update makes another."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    # ---- requests ----

    def _ask_all(self, path: str, *, get: bool = False, **body: Any) -> list[Any]:
        return self._at_once(*(partial(self._ask, url, path, None if get else body) for url in self._urls))

    def _ask(self, url: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """The answer of a server, whose `success` is not false; `ConfigError` otherwise."""
        request = urllib.request.Request(
            f"{url}/{path}", None if body is None else json.dumps(body).encode(), self._headers
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                said = json.loads(answer.read())
            if isinstance(said, dict) and said.get("success", True):
                return said
            problem = f"answers {said}"
        except urllib.error.HTTPError as error:
            problem = f"answers {error.code}: {error.read().decode(errors='replace')[:500]}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            problem = f"does not answer: {first_lines(error)}"
        raise ConfigError(f"SGLang at {url} {problem} ({path}). {_CURE}")

    def _at_once(self, *calls: Callable[[], Any]) -> list[Any]:
        """What the calls return, each of which may wait for another; the first error at once.

        They run on threads that nobody waits for: NCCL waits for a server that has failed without end.
        """
        done: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()

        def run(i: int, call: Callable[[], Any]) -> None:
            try:
                done.put((i, call(), None))
            except BaseException as error:
                done.put((i, None, error))

        for i, call in enumerate(calls):
            Thread(target=run, args=(i, call), daemon=True).start()
        results: dict[int, Any] = {}
        end_s = monotonic() + self._timeout_s
        while len(results) < len(calls):
            try:
                i, result, error = done.get(timeout=max(0.0, end_s - monotonic()))
            except Empty:
                raise ConfigError(
                    f"SGLang at {listed(self._urls)} has not answered within timeout_s={self._timeout_s:g}. {_CURE}"
                ) from None
            if isinstance(error, ConfigError):
                raise error
            if error is not None:
                raise ConfigError(
                    f"SGLang at {listed(self._urls)} is out of reach: {first_lines(error)}. {_CURE}"
                ) from error
            results[i] = result
        return [results[i] for i in range(len(calls))]
