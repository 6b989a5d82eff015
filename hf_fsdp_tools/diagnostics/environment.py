"""Checks before a run: whether this machine is fit for FSDP, and how a model would be sharded on N processes."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.version import Version
from torch import nn

from hf_fsdp_tools.accelerator import computes_bfloat16, find_accelerator
from hf_fsdp_tools.diagnostics.diagnosis import Diagnosis, diagnose
from hf_fsdp_tools.diagnostics.findings import Finding, Report, by_severity, error, warning
from hf_fsdp_tools.distributed.mesh import ParallelDims, loopback_advice, streams_are_serialized
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.policy import WrapPolicy
from hf_fsdp_tools.sharding.shard import shard_model
from hf_fsdp_tools.text import table

_NEWEST = {
    "torch": "2.15",
    "transformers": "5.24",
    "accelerate": "1.15",
    "safetensors": None,
    "huggingface_hub": None,
    "peft": "0.21",
    "trl": "1.16",
    "datasets": "5.2",
    "bitsandbytes": "0.50",
}
"""The newest version of each package with which the whole suite has run (`.ci/run newest`); None accepts any. The
oldest are the bounds in this package's metadata, with which it has run, too (`.ci/run oldest`)."""


@dataclass(frozen=True, kw_only=True)
class Environment(Report):
    """The packages, devices and backends of this process, and findings about them."""

    versions: dict[str, str | None]
    """Version by package; None where the package is not installed."""
    tried: dict[str, tuple[str, str | None]]
    """(oldest, newest) version with which the tests have run, by package; None accepts any from the oldest on."""
    devices: tuple[str, ...]
    """Accelerators that this process sees, with their memory; the CPU where there is none."""
    backends: tuple[str, ...]
    """Process-group backends that this torch was built with."""

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        for name, found in self.versions.items():
            least, last = self.tried[name]
            tried = f"tried {least}" if least == last else f"tried {least} to {last}"
            rows.append((name, found or "not installed", tried if last else f"needs {least} or later"))
        about = [("device" if not index else "", device) for index, device in enumerate(self.devices)]
        about.append(("backends", ", ".join(self.backends) or "none"))
        lines = [*table(rows), "", *table(about), "", *(map(str, self.findings) if self.findings else ["no findings"])]
        return "\n".join(lines)


def check_environment() -> Environment:
    """The versions, devices and process-group backends of this process, and known problems with them.

    Nothing is communicated, no process group is started, and no package but torch is imported.
    """
    versions = {name: _version(name) for name in _NEWEST}
    known = ("gloo", "nccl", "xccl", "hccl", "mpi") if dist.is_available() else ()
    backends = tuple(name for name in known if dist.is_backend_available(name))
    findings = [*_check_packages(versions), *_check_devices(backends), *_check_network()]
    return Environment(
        versions=versions,
        tried={name: (least, _NEWEST[name]) for name, (least, _) in _bounds().items()},
        devices=_devices(),
        backends=backends,
        findings=by_severity(findings),
    )


def rehearse(model: nn.Module, *, num_processes: int = 8, policy: WrapPolicy | None = None) -> Diagnosis:
    """Shard a meta model in this process alone, as rank 0 of `num_processes` would, and diagnose it.

    Nothing is communicated: the process group is torch's "fake" one, and is destroyed at the end.
    """
    if num_processes < 1:
        raise ConfigError(f"num_processes is {num_processes}; it must be 1 or more.")
    if dist.is_initialized():
        raise ConfigError(
            "A process group is running; a rehearsal needs a process of its own. Use diagnose(model) here."
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_processes)
    try:
        plan = make_wrap_plan(model, policy=policy or WrapPolicy())
        shard_model(model, plan, mesh=ParallelDims().build_mesh("cpu"))
        diagnosis = diagnose(model)
    finally:
        dist.destroy_process_group()
    # No weights are loaded here, so this finding says nothing. (Some models have a few small parameters with values.)
    findings = tuple(finding for finding in diagnosis.findings if finding.code != "meta-parameters")
    return replace(diagnosis, findings=findings)


def _bounds() -> dict[str, tuple[str, bool]]:
    """The lower bound of each package, and whether it must be there: no extra asks for it."""
    declared = {each.name.replace("-", "_"): each for each in map(Requirement, requires("hf_fsdp_tools") or ())}
    return {name: (next(iter(declared[name].specifier)).version, declared[name].marker is None) for name in _NEWEST}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> tuple[str, ...]:
    accelerator = find_accelerator()
    if accelerator is None:
        return (f"CPU, {os.cpu_count()} cores",)
    return tuple(_described(torch.device(accelerator.type, index)) for index in range(torch.accelerator.device_count()))


def _described(device: torch.device) -> str:
    """A device with its name and memory, as far as torch says them."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    name, memory = getattr(properties, "name", ""), getattr(properties, "total_memory", None)
    return f"{device} {name}".rstrip() + (f", {memory / 1e9:.1f} GB" if memory else "")


def untried_versions(*names: str) -> Iterator[Finding]:
    """Yield a warning for each of the packages `names` whose version is later than all tested ones."""
    for name in names:
        least, last, found = _bounds()[name][0], _NEWEST[name], _version(name)
        if found and last and Version(found).release[:2] > Version(last).release:
            tried = last if least == last else f"{least} to {last}"
            yield warning(
                code="version-untried",
                problem=f"{name} {found} is installed, and hf_fsdp_tools was tested with {tried}.",
                fix=f'pip install "{name}=={last}.*", or go on and look closely.',
            )


def _check_packages(versions: dict[str, str | None]) -> Iterator[Finding]:
    for name, (least, is_required) in _bounds().items():
        found = versions[name]
        if is_required if found is None else Version(found).release < Version(least).release:
            yield error(
                code="package-missing" if found is None else "version-too-old",
                problem=f"{name} is {'not installed' if found is None else found}; {least} or later is needed.",
                fix=f'pip install "{name}>={least}"',
            )
    yield from untried_versions(*versions)


def _check_devices(backends: tuple[str, ...]) -> Iterator[Finding]:
    accelerator = find_accelerator()
    own = dist.get_default_backend_for_device(accelerator) if accelerator is not None and backends else ""
    if not backends:
        yield error(
            code="no-backend",
            problem="This torch was built without distributed backends.",
            fix="Install a torch with them: the wheels for Linux have gloo, those for CUDA also NCCL.",
        )
    elif accelerator is not None and not dist.is_backend_available(own):
        yield error(
            code=f"no-{own}",
            problem=f"{torch.accelerator.device_count()} {accelerator.type} device(s) and no {own}; the backends are "
            f"{', '.join(backends)}.",
            fix=f"Install the torch wheel for {accelerator.type} on Linux.",
        )
    built_for = torch.accelerator.current_accelerator()
    if accelerator is None and built_for is not None and built_for.type != "mps":
        release = torch.version.cuda or torch.version.hip or ""
        yield warning(
            code="no-device",
            problem=f"This torch is built for {built_for.type} {release}".rstrip()
            + " and sees no device: it would run "
            "on the CPU.",
            fix="Check the driver's version (nvidia-smi, rocm-smi, xpu-smi) and variables that hide devices "
            "(CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES, ZE_AFFINITY_MASK).",
        )
    if accelerator is not None and not computes_bfloat16(accelerator):
        yield warning(
            code="no-bfloat16",
            problem=f"{_described(accelerator)} does not compute in bfloat16.",
            fix="Use mixed_precision fp16 or no.",
        )
    if accelerator is not None and streams_are_serialized():
        yield warning(
            code="one-connection",
            problem="CUDA_DEVICE_MAX_CONNECTIONS is 1, as Megatron's tensor parallelism wants it: FSDP's gathers then "
            "wait for computation instead of running at the same time.",
            fix="unset CUDA_DEVICE_MAX_CONNECTIONS",
        )


def _check_network() -> Iterator[Finding]:
    if advice := loopback_advice():
        fact, _, cure = advice.partition(". ")
        yield warning(code="loopback", problem=f"{fact}.", fix=cure)
