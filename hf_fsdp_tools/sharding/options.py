"""Short forms of mesh, precision, offload and compilation, as the objects that FSDP2 and torch take."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.text import did_you_mean, quoted


def as_mesh(value: DeviceMesh | ParallelDims | None) -> DeviceMesh | None:
    """The mesh; that of `ParallelDims`, for which every rank must call."""
    return value.build_mesh() if isinstance(value, ParallelDims) else value


def as_mp_policy(value: Any) -> MixedPrecisionPolicy | None:
    """The policy; for a dtype or its name ("bf16"), computation in it and reduction in fp32. "no" is None."""
    if value is None or value == "no":
        return None
    if isinstance(value, str | torch.dtype):
        return MixedPrecisionPolicy(param_dtype=as_dtype(value, "mp_policy"), reduce_dtype=torch.float32)
    if not isinstance(value, MixedPrecisionPolicy):
        raise ConfigError(
            f"mp_policy is {quoted(value)}: it must be a MixedPrecisionPolicy of torch.distributed.fsdp, or a dtype of "
            "computation, such as 'bf16'."
        )
    names = [each.name for each in fields(value) if each.name.endswith("dtype")]
    return replace(value, **{name: as_dtype(getattr(value, name), f"mp_policy.{name}") for name in names})


def as_offload_policy(value: Any) -> OffloadPolicy | None:
    """The policy; `CPUOffloadPolicy()` for True and "cpu", None for False."""
    if value is None or value is False or isinstance(value, OffloadPolicy):
        return value or None
    if value is True or value == "cpu":
        return CPUOffloadPolicy()
    raise ConfigError(
        f"offload_policy is {quoted(value)}: give CPUOffloadPolicy() of torch.distributed.fsdp (or True) to keep the "
        "shards on the CPU between uses, or leave it out."
    )


def as_compile(value: bool | str | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Options of `torch.compile`; a text is the name of a backend, None and False mean none."""
    if isinstance(value, str):
        backends = torch.compiler.list_backends(exclude_tags=())
        if value not in backends:
            raise ConfigError(f"compile={value!r} is no backend of torch.compile{did_you_mean(value, backends)}")
        return {"backend": value}
    if value is None or isinstance(value, bool):
        return {} if value else None
    return dict(value)
