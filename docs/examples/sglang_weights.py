"""Weights for servers of SGLang (0.5.23), from rank 0 of a training, through a process group with their workers.

    servers = SGLangServers(live_weights(model, dtype="bfloat16"), ["http://node7:30000", "http://node8:30000"])
    for step in range(10):
        train_a_step(model)
        servers.update(str(step))                             # on every rank

An update pauses the servers, sends buckets in a session, flushes their caches, and then resumes the requests that were
running. A server that has half of an update stays paused until one succeeds. Each server is one replica (`dp_size` and
`pp_size` 1). An adapter alone goes as a folder: `save_pretrained(model, folder)`, then `/load_lora_adapter`.
"""

import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from hf_fsdp_tools import ConfigError


class SGLangServers:
    """Servers that get the weights of a model whenever `update` is called on every rank."""

    def __init__(self, weights: Any, urls: Sequence[str], *, backend: str = "nccl", timeout_s: float = 120) -> None:
        """Keep what `update` needs; `weights` is `live_weights(…)`, and `backend` gloo or nccl."""
        self.weights, self.urls, self.backend, self.timeout_s = weights, list(urls), backend, timeout_s
        self.group: Any = None
        self.is_open, self.name, self.version = True, "", ""
        self.last = list(weights.tensors)[-1]

    def update(self, version: str) -> None:
        """Give every server the weights of this moment. What fails on rank 0 is raised on all ranks."""
        self.version = version
        self.is_first = True
        try:
            self.weights.send(self._give, to=(0,))  # all happens in it: an error there is that of all ranks
        except Exception:
            self.group = None  # the next update makes another
            raise

    def _give(self, bucket: dict[str, torch.Tensor]) -> None:
        if self.is_first:
            self.is_first = False
            self._begin()
        tensors = sorted(bucket.items(), key=lambda pair: -pair[1].itemsize)  # each begins at a multiple of its width
        data = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in tensors])
        body = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
            "group_name": self.name,
            "load_format": "flattened_bucket",
            "flush_cache": True,
            "weight_version": self.version,
        }
        with ThreadPoolExecutor(len(self.urls)) as pool:
            asking = [pool.submit(self._ask, url, "update_weights_from_distributed", body) for url in self.urls]
            sending = self.group.broadcast([data], dist.BroadcastOptions())
            for answer in asking:
                answer.result()
            sending.wait()
        if self.last in bucket:
            self._ask_all("end_weight_update")
            self.is_open = False
            self._ask_all("continue_generation")

    def _begin(self) -> None:
        self._ask_all("pause_generation", mode="retract")
        if self.is_open:  # an update that failed has left a session open
            with suppress(ConfigError):
                self._ask_all("end_weight_update")
        if self.group is None:
            self._join()
        self.is_open = True
        self._ask_all("begin_weight_update")

    def _join(self) -> None:
        """Make a process group of this rank and the workers of all servers, with the keys that they look for."""
        sizes = [int(self._ask(url, "server_info", None)["tp_size"]) for url in self.urls]
        limit, place = timedelta(seconds=self.timeout_s), urllib.parse.urlsplit(self.urls[0])
        with socket.create_connection((place.hostname, place.port), timeout=self.timeout_s) as seen:
            address = seen.getsockname()[0]
        store: Any = dist.TCPStore(address, 0, is_master=True, timeout=limit, wait_for_workers=False)
        self.name = uuid4().hex
        common = {"master_address": address, "master_port": store.port, "world_size": 1 + sum(sizes)}
        common |= {"group_name": self.name, "backend": self.backend}
        for prefix in (self.name, f"{self.name}/", "cpu/" if self.backend == "gloo" else "cuda/"):
            store = dist.PrefixStore(prefix, store)
        kind = dist.ProcessGroupGloo if self.backend == "gloo" else dist.ProcessGroupNCCL
        with ThreadPoolExecutor(len(self.urls)) as pool:
            asking = []
            for i, url in enumerate(self.urls):
                body = common | {"rank_offset": 1 + sum(sizes[:i])}
                asking.append(pool.submit(self._ask, url, "init_weights_update_group", body))
            self.group = kind(store, 0, 1 + sum(sizes), limit)
            for answer in asking:
                answer.result()

    def _ask_all(self, path: str, **body: Any) -> None:
        for url in self.urls:
            self._ask(url, path, body)

    def _ask(self, url: str, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return json.loads(answer.read())
        except OSError as error:  # HTTPError, too
            said = error.read().decode(errors="replace")[:500] if hasattr(error, "read") else ""
            raise ConfigError(f"SGLang at {url} has not taken the weights ({path}): {error} {said}") from error
