"""A new model in shards, from its configuration alone (`from_config`)."""

from os import PathLike
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_fsdp_tools.distributed.agreement import agreed, same_on_all_ranks, shared_seed
from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.loading.load import rolled_back
from hf_fsdp_tools.modeling.arguments import one_dtype
from hf_fsdp_tools.modeling.initialize import initialize_missing
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.pretrained import check_accelerator, policy_from, shard_arguments
from hf_fsdp_tools.sharding.allocate import allocate
from hf_fsdp_tools.sharding.shard import shard_model, sharding_of


def from_config(
    config: PreTrainedConfig | str | PathLike[str],
    *,
    accelerator: Any = None,
    seed: int | None = None,
    auto_class: Any = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    **model_kwargs: Any,
) -> PreTrainedModel:
    """Make a new FSDP2 model from its configuration: the model's own initialisation draws the weights, into shards.

        accelerator = make_accelerator(mixed_precision="bf16")
        model = from_config("Qwen/Qwen3-0.6B", accelerator=accelerator, seed=0)

    The values are the same for any number of ranks, and other than those of transformers' `from_config`: module after
    module is drawn whole, on the CPU, by a generator seeded by `seed` and the module's name, and each rank keeps its
    shard. The model is in evaluation mode.

    Args:
        config: a configuration, a `config.json`, or a hub name or folder that has one; no weights are read.
        accelerator: its FSDP plugin gives policy, mesh, precision, offload and activation checkpointing. None: FSDP
            over all processes, in the dtype of the weights.
        seed: of the whole model. None: it follows from rank 0's generator, that is from `torch.manual_seed` or
            `set_seed`.
        auto_class: as in `from_pretrained`.
        dtype: of the shards (the master weights), also by its name. None means float32 where computation is in a lower
            precision, else the config's dtype, or float32 if it has none.
        trust_remote_code: run model code that comes with the configuration.
        model_kwargs: for the config or the model (`attn_implementation`, …), as in `build_meta_model`.

    Every rank must call with equal arguments; the ranks exchange errors, and digests of the arguments and the plan.

    Raises:
        CheckpointError: there is no such configuration, or the model's own code leaves a tensor without values.
        ConfigError, WrapPlanError, MeshError: as for `from_pretrained`.

    Example:
        >>> model = from_config("checkpoint/config.json", seed=0)
        >>> model.training, model.lm_head.weight.placements
        (False, (Shard(dim=0),))
    """
    mesh = ParallelDims().build_mesh() if accelerator is None else None
    with agreed("checking the arguments of from_config"):
        chosen = one_dtype(dtype, None)
        check_accelerator(accelerator)
    given = shard_arguments(accelerator, mesh)
    computed = getattr(given.get("mp_policy"), "param_dtype", None)
    masters = torch.float32 if chosen is None and computed is not None else None
    with agreed("building the model"):
        model = build_meta_model(
            config,
            auto_class=auto_class,
            dtype=chosen if isinstance(chosen, torch.dtype) else masters,
            trust_remote_code=trust_remote_code,
            **model_kwargs,
        )
        plan = make_wrap_plan(model, policy=policy_from(accelerator, model))
    content = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    same_on_all_ranks("making the model", seed=seed, model=type(model), dtype=model.dtype, config=content)
    shard_model(model, plan, **given)
    sharding = sharding_of(model)
    assert sharding is not None
    seed = shared_seed(seed)
    with rolled_back(model), agreed("initialising the model (it is on meta again)"):
        # tied parameters are named once, and buffers that are in no state dict are always made
        names = {name for name, _ in model.named_parameters()}
        names |= {name for name, _ in model.named_buffers()} & model.state_dict().keys()
        allocate(model, device=sharding.device)
        initialize_missing(model, missing_keys=names, seed=seed)
    return model
