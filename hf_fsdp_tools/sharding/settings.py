"""What callers give for mesh, precision, offload and compilation as the objects that FSDP2 and torch take."""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.given import as_dtype
from hf_fsdp_tools.text import did_you_mean, first_line, quoted


def as_mesh(value: Any, name: str) -> DeviceMesh | None:
    """The mesh; that of `ParallelDims`, which every rank must then give. None where the function decides."""
    if isinstance(value, ParallelDims):
        return value.build_mesh()
    if value is None or isinstance(value, DeviceMesh):
        return value
    raise ConfigError(
        f"{name} is {quoted(value)}: it must be a DeviceMesh. Give ParallelDims(dp_shard_size=…).build_mesh(), or "
        "leave it out for FSDP over all processes."
    )


def as_mp_policy(value: Any, name: str) -> MixedPrecisionPolicy | None:
    """The policy; for a dtype or its name (`"bf16"`), computation in it and reduction in fp32. "no" is None."""
    if value is None or value == "no":
        return None
    if isinstance(value, str | torch.dtype):
        return MixedPrecisionPolicy(param_dtype=as_dtype(value, name), reduce_dtype=torch.float32)
    known = [each.name for each in fields(MixedPrecisionPolicy)]
    if isinstance(value, Mapping):
        for key in value.keys() - set(known):
            raise ConfigError(f"{name} has no {key!r}{did_you_mean(str(key), known)}")
        value = MixedPrecisionPolicy(**value)
    if not isinstance(value, MixedPrecisionPolicy):
        raise ConfigError(
            f"{name} is {quoted(value)}: it must be a MixedPrecisionPolicy of torch.distributed.fsdp, or a dtype of "
            "computation, such as 'bf16'."
        )
    dtypes = {key: as_dtype(getattr(value, key), f"{name}.{key}") for key in known if key.endswith("dtype")}
    return replace(value, **dtypes)


def as_offload_policy(value: Any, name: str) -> OffloadPolicy | None:
    """The policy; `CPUOffloadPolicy()` for True and "cpu", None for False."""
    if value is None or value is False:
        return None
    if value is True or value == "cpu":
        return CPUOffloadPolicy()
    if isinstance(value, OffloadPolicy):
        return value
    raise ConfigError(
        f"{name} is {quoted(value)}: give CPUOffloadPolicy() of torch.distributed.fsdp (or True) to keep the shards on "
        "the CPU between uses, or leave it out."
    )


def as_peft_config(value: Any, name: str) -> Any:
    """A config of PEFT; of a dict, the one with these arguments (LoRA where it names no `peft_type`)."""
    if value is None or hasattr(value, "peft_type"):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name} is {quoted(value)}: it must be a config of PEFT, such as LoraConfig(r=16, "
            "target_modules='all-linear'), or a dict of its arguments."
        )
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kinds = {str(getattr(kind, "value", kind)): found for kind, found in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    asked = str(value.get("peft_type", "LORA"))
    if (kind := kinds.get(asked.upper())) is None:
        raise ConfigError(f"{name} has the peft_type {asked!r}, which PEFT has not{did_you_mean(asked.upper(), kinds)}")
    known = [each.name for each in fields(kind) if each.init]
    for key in value.keys() - {*known, "peft_type"}:
        raise ConfigError(f"{name} has no {key!r}{did_you_mean(str(key), known)} It is a {kind.__name__} of PEFT.")
    try:
        return kind(**{key: one for key, one in value.items() if key != "peft_type"})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is no {kind.__name__}: {first_line(error)}.") from None


_HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score"), "QUESTION_ANS": ("qa_outputs",)}
"""What PEFT itself adds to `modules_to_save` for a task type. (PEFT 0.21)"""


def with_modules_to_save(config: Any, parameters: Iterable[str]) -> Any:
    """A config of PEFT by which the owners of these parameters are trained whole and saved; the same if they are.

    PEFT takes a module for one of `modules_to_save` where its name ends in that.
    """
    if not hasattr(config, "modules_to_save"):
        return config
    task = getattr(config.task_type, "value", config.task_type)
    asked = list(config.modules_to_save or ())
    covered = (*asked, *_HEADS.get(str(task), ()))
    owners = [name.rpartition(".")[0] for name in parameters]
    new = [owner for owner in dict.fromkeys(owners) if owner and not _ends_in(owner, covered)]
    if new:
        config = copy(config)
        config.modules_to_save = [*asked, *new]
    return config


def _ends_in(name: str, endings: tuple[str, ...]) -> bool:
    """Whether the name of a module, or of one around it, ends in one of these."""
    parts = name.split(".")
    return any(".".join(parts[:count]).endswith(endings) for count in range(1, len(parts) + 1))


def as_compile(value: Any, name: str) -> bool | Mapping[str, Any]:
    """True, False or options of `torch.compile`; a text is the name of a backend."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, Mapping):
        return value
    backends = torch.compiler.list_backends(exclude_tags=()) if isinstance(value, str) else []
    if value in backends:
        return {"backend": value}
    if isinstance(value, str):
        raise ConfigError(
            f"{name}={value!r} is no backend of torch.compile{did_you_mean(value, backends)} "
            "Give True for the usual one."
        )
    raise ConfigError(
        f"{name} is {quoted(value)}: give True, or options of torch.compile, as in {{'mode': 'max-autotune'}}."
    )
