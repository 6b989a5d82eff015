"""Describe the sharding of a model as text: its plan, mesh and precisions, and this rank's memory."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.packed import floats_held
from hf_fsdp_tools.sharding.shard import features_of
from hf_fsdp_tools.sharding.sharding import sharding_of
from hf_fsdp_tools.text import dtype_name, grouped, merge_alike, show_bytes


def describe_sharding(model: nn.Module) -> str:
    """The plan, mesh and precisions of a sharded model and the bytes of this rank's shards, as a short text.

    Args:
        model: sharded by `shard_model`, on meta or with storage, also inside PEFT's wrapper or that of `torch.compile`.

    Any rank may call; nothing is communicated.

    Raises:
        ConfigError: `shard_model` did not shard this model.

    Example:
        >>> print(describe_sharding(from_pretrained("checkpoint", load_kwargs={"progress": False})))
        LlamaForCausalLM: 45.9 K parameters in 5 units
        ...
        mesh         dp_shard 1 on cpu, whole: nothing is gathered
        weights      float32, 183.7 kB on this rank
        ...
    """
    sharding = sharding_of(model)
    if sharding is None:
        raise ConfigError(f"{type(model).__name__} was not sharded by shard_model, so there is no plan to describe.")
    held = floats_held(model)
    groups = grouped(("trained" if p.requires_grad else "frozen", p) for p in held)
    if len(groups) == 1:
        groups = {"weights": list(held)}
    offloaded = " (kept on the CPU between uses)" if sharding.device.type != sharding.mesh.device_type else ""
    compute = sharding.mp_policy.param_dtype
    # FSDP2 reduces in this dtype where no other is given; since torch 2.15 in that of the weights.
    reduce = sharding.mp_policy.reduce_dtype or (compute if torch.__version__ < "2.15" else None)
    sizes = {name.removesuffix("_size"): size for name, size in vars(sharding.axes.dims).items()}
    axes = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "dp_shard")
    whole = ", whole: nothing is gathered" * sharding.is_whole
    lines = [str(sharding.plan), f"mesh         {axes} on {sharding.mesh.device_type}{whole}"]
    for name, group in sorted(groups.items()):
        dtypes = " and ".join(sorted({held[p][1] for p in group}))
        share = sum(held[p][0] for p in group) / sum(count for count, _ in held.values())
        of_all = f", {share:.2%} of the parameters" if name == "trained" else ""
        num_bytes = sum(Held.of(p).memory.nbytes for p in group)
        lines.append(f"{name:<13}{dtypes}, {show_bytes(num_bytes)} on this rank{of_all}{offloaded}")
    split = grouped(
        (getattr(parameter.placements[-1], "dim", 0), name)
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == sharding.mesh.ndim
    )
    for dim in sorted(split.keys() - {0}):
        why = f"split along dimension {dim}, having too few rows for {sharding.mesh.shape[-1]} ranks"
        lines += [f"{why}: {names}" for names in merge_alike(split[dim])]
    computed = (feature.describe(model) for feature in features_of(model, sharding))
    words = [dtype_name(compute) if compute else "in the dtype of the weights", *filter(None, computed)]
    lines += [
        f"computation  {', '.join(words)}",
        f"reduction    {dtype_name(reduce) if reduce else 'in the dtype of the weights'}",
        f"activations  {sharding.activation_checkpointing.words if sharding.activation_checkpointing else 'kept'}",
    ]
    if sharding.compile is not None:
        lines.append(f"compilation  block by block, {sharding.compile.get('backend', 'inductor')}")
    return "\n".join(lines)
