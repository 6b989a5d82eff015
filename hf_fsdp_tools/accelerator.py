"""This machine's accelerator: CUDA, ROCm, XPU or NPU, all through `torch.accelerator`."""

import ctypes
import resource
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import psutil
import torch


def find_accelerator() -> torch.device | None:
    """The kind of accelerator that FSDP can use on this machine, without an index; None on a machine without one.

    MPS counts as none: it has no collectives, and FSDP2 does not run there.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None or accelerator.type == "mps" else accelerator


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the device itself does; True where torch does not say."""
    check = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if check is None:
        return True
    emulated = "including_emulation" in signature(check).parameters
    return bool(check(including_emulation=False) if emulated else check())


def runs_documents(device_type: str) -> bool:
    """Whether the devices of this process run torch's attention for lengths that vary (`torch.nn.attention.varlen`):
    NVIDIA's GPUs from Ampere on, compute capability 8.0 (source: torch's `sdp_utils.cpp`)."""
    is_built = device_type == "cuda" and torch.version.cuda is not None
    is_built = is_built and torch.backends.cuda.is_flash_attention_available()
    return is_built and torch.cuda.get_device_capability() >= (8, 0)


def device_title(device: torch.device) -> str | None:
    """The device's own name, such as "NVIDIA H100 80GB HBM3"; None where torch does not say."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return None if name is None else str(name())


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that this process has loaded, also by LD_PRELOAD; empty where torch has none.

    `torch.cuda.nccl.version()` is the version with which torch was compiled.
    """
    for name in (None, "libnccl.so.2"):  # what is preloaded comes first, as for torch
        with suppress(OSError, AttributeError):
            number = ctypes.c_int()
            ctypes.CDLL(name).ncclGetVersion(ctypes.byref(number))
            return number.value // 10000, number.value // 100 % 100, number.value % 100
    compiled: Any = torch.cuda.nccl
    return tuple(compiled.version()[:3]) if hasattr(torch._C, "_nccl_version") else ()


def device_bytes(device: torch.device) -> int | None:
    """The memory of the first device of a kind; None where torch does not say. It makes no context there."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(0)
    return getattr(properties, "total_memory", None)


def available_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still get without swapping, of the machine and within a container's limit (cgroups 1
    and 2), also of what files take."""
    limits: list[int] = [psutil.virtual_memory().available]
    for folder, limit, usage in (
        (groups, "memory.max", "memory.current"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            most, now = ((folder / name).read_text().strip() for name in (limit, usage))
            stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            limits.append(max(0, int(most) - int(now) + files))
    return min(limits)


def peak_bytes() -> int:
    """The most memory that this process has had: on its accelerator, or on a CPU of the process."""
    if find_accelerator() is not None:
        return int(torch.accelerator.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_bytes(device_type: str) -> int:
    """Bytes that this process can still get on its current device of that kind, with what PyTorch keeps for later.

    Of the CPU: `available_bytes`.
    """
    if device_type == "cpu":
        return available_bytes()
    module = torch.get_device_module(device_type)
    return int(module.mem_get_info()[0]) + int(module.memory_reserved()) - int(module.memory_allocated())


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised host memory that the accelerator copies from and to by itself."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)


class SideStream:
    """A stream of one device next to the stream that the program computes on, and the memory that its copies need.

    What is queued runs in order, and the host goes on at once. Any thread may queue, after it has called `enter`.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a stream."""
        self.device = device
        self._stream = torch.Stream(device=device)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is on this device."""
        return tensor.device == self.device

    def enter(self) -> None:
        """Let the calling thread use this device and this stream from now on.

        A new thread's current device is device 0; whatever a thread does there makes a context on device 0, which takes
        half a gigabyte for as long as the process lives.
        """
        torch.accelerator.set_device_index(self.device)
        torch.accelerator.set_stream(self._stream)

    def follow(self) -> None:
        """Let what is queued from now on wait for what the calling thread's current stream has to do until now."""
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised bytes of pinned memory."""
        return pinned_empty((num_bytes,), torch.uint8)

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised bytes on the device, for the calling thread's current stream."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between pinned and device memory: the same dtype, both contiguous."""
        to.copy_(source, non_blocking=True)

    def copy_after_current(self, to: torch.Tensor, source: torch.Tensor) -> torch.Event:
        """Queue a copy as `copy` does it, from a thread that has not entered, behind what that thread's stream has to
        do until now; an event after it, for `lead`."""
        self.follow()
        with self._stream:
            self.copy(to, source)
        return self.mark()

    def lead(self, event: torch.Event) -> None:
        """Let what the calling thread's current stream is given from now on wait for an event."""
        torch.accelerator.current_stream(self.device).wait_event(event)

    def copy_each(self, to: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queue copies within the device, any dtypes and strides, in as few kernels as the device can."""
        torch._foreach_copy_(to, sources)

    def mark(self) -> torch.Event:
        """An event after everything that is queued now."""
        return self._stream.record_event()

    def wait(self) -> None:
        """Wait until everything that is queued is done."""
        self._stream.synchronize()

    def release(self) -> None:
        """Give back memory that PyTorch keeps for later: of the device, and pinned (not with torch 2.11)."""
        torch.accelerator.empty_cache()
        if hasattr(torch.accelerator, "empty_host_cache"):
            self.wait()  # a pinned block counts as used until the stream has passed the event of its being freed
            torch.accelerator.empty_host_cache()


def side_stream_for(tensors: Iterable[torch.Tensor]) -> SideStream | None:
    """The side stream of the first device of these tensors that is of this machine's accelerator; None without one.

    Each device has one for the life of the process: PyTorch keeps freed memory for the stream that it was allocated on,
    so that each further stream would hold memory of its own.
    """
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    if all(device.type == "cpu" for device in devices):
        return None
    accelerator = find_accelerator()
    device = next((d for d in devices if accelerator is not None and d.type == accelerator.type), None)
    return None if device is None else _side_stream(device)


_side_stream = cache(SideStream)
