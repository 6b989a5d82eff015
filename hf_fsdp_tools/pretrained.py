"""A model in shards: loaded by name (`from_pretrained`), or new, from its configuration alone (`from_config`)."""

from collections.abc import Mapping
from inspect import signature
from os import PathLike
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from transformers import PreTrainedConfig, PreTrainedModel

from hf_fsdp_tools.distributed.agreement import agreed, agreed_steps, compare_at_end, own_seed, same_on_all_ranks
from hf_fsdp_tools.distributed.mesh import ParallelDims, local_device, mesh_of
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.loading.adapter_state import restore_adapter
from hf_fsdp_tools.loading.load import load_weights, rolled_back
from hf_fsdp_tools.loading.opening import Checkpoint, open_checkpoint
from hf_fsdp_tools.loading.quantized.keep import keep_stored
from hf_fsdp_tools.loading.vocabulary import resize_vocabulary
from hf_fsdp_tools.modeling.arguments import one_dtype, one_name, refuse_misspelt, sort_arguments
from hf_fsdp_tools.modeling.configs import set_generation_config
from hf_fsdp_tools.modeling.four_bits import has_4bit_layers
from hf_fsdp_tools.modeling.initialize import initialize_missing
from hf_fsdp_tools.modeling.meta import build_meta_model, config_dtype
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.planning.make_plan import plan_with_tree
from hf_fsdp_tools.planning.policy import WrapPolicy, as_policy
from hf_fsdp_tools.sharding.adapters import add_adapter, as_peft_config, load_adapter, with_modules_to_save
from hf_fsdp_tools.sharding.allocate import allocate
from hf_fsdp_tools.sharding.compile import as_compile, as_mesh, as_mp_policy, as_offload_policy, as_parallel
from hf_fsdp_tools.sharding.injection import refuse_for_shards
from hf_fsdp_tools.sharding.recompute import as_recompute
from hf_fsdp_tools.sharding.shard import checked_sharding, parallelize_model, shard_checked
from hf_fsdp_tools.sharding.sharding import Sharding
from hf_fsdp_tools.text import quoted

_MAY_DIFFER = ("requests_in_flight", "progress")
"""Arguments of `load_weights` that each rank may have for itself."""


def from_pretrained(
    name_or_path: str | PathLike[str] | None = None,
    *,
    peft_config: Any = None,
    is_trainable: bool = False,
    auto_class: Any = None,
    policy: WrapPolicy | None = None,
    mesh: DeviceMesh | None = None,
    distributed_config: Any = None,
    accelerator: Any = None,
    dtype: torch.dtype | str | None = None,
    mp_policy: MixedPrecisionPolicy | torch.dtype | str | None = None,
    offload_policy: OffloadPolicy | bool | None = None,
    activation_checkpointing: bool | Mapping[str, Any] | None = None,
    compile: bool | str | Mapping[str, Any] | None = False,
    num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
    dequantize: bool = True,
    allow_pickle: bool = False,
    output_loading_info: bool = False,
    trust_remote_code: bool = False,
    config: PreTrainedConfig | str | PathLike[str] | None = None,
    torch_dtype: torch.dtype | str | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a Hugging Face checkpoint straight into FSDP2 shards; each rank reads and holds its own shards only.

    The model is built on meta, planned, sharded, and filled with this rank's byte ranges of the files. It equals the
    model of `AutoModel….from_pretrained` bit for bit, and is in evaluation mode too. On one rank it stays a plain model
    (but for CPU offload and FP8), which computes in the same dtypes as shards.

        accelerator = make_accelerator(mixed_precision="bf16")
        model = from_pretrained("Qwen/Qwen3-8B", accelerator=accelerator)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    Args:
        name_or_path: a hub name, or a folder with `config.json` and safetensors, also one in a store of fsspec
            ("s3://bucket/run"), of which each rank reads its ranges. Or a training state, as `dcp.save`,
            Accelerate's `save_state`, the Trainer, TRL and Axolotl (`checkpoint-500`) and torch's
            `HuggingFaceStorageWriter` (torchtitan) write it, with `config.json` in it or up to two folders above; or a
            PEFT adapter, whose base is loaded first. A state of a `PeftModel`, with its `adapter_config.json` in it or
            up to two folders above, gives the adapter, and the base if that was saved.
        peft_config: of PEFT, for example `LoraConfig(r=16, target_modules="all-linear")`, or a dict of its arguments
            (`{"r": 16}`; LoRA where it names no `peft_type`): adds a new adapter to the loaded shards (`add_adapter`)
            and returns the `PeftModel`, of which only the adapter is trainable. Where a training state holds values of
            an adapter, they fill this one. Modules with weights that no file holds (a new head) are trained whole and
            saved with the adapter, as if they were in `modules_to_save`.
        is_trainable: whether an adapter that is loaded is trainable; it is frozen otherwise, as in PEFT.
        auto_class: the `AutoModelFor…` class, a model class, or the name of one. None means the class that the config's
            `architectures` name; of a base model (`LlamaModel`), or where they name none, that which its kind is
            trained with; of an adapter, that of its task or that it was made on.
        policy: what becomes a unit; None means the accelerator's, or `WrapPolicy()`. The name or class of a block, or
            several, mean a policy with these `block_types`.
        mesh: one axis for FSDP, two for HSDP, or the `ParallelDims` that make it; None means the accelerator's, or FSDP
            over all processes.
        distributed_config: transformers' `DistributedConfig`, or a dict of its arguments: `tp_size`, `ep_size`,
            `fsdp_size` and `dp_replicate_size` in place of `mesh`; and the rules `tp_plan`, `ep_plan`,
            `ep_implementation` and `enable_sequence_parallel` (see `parallelize_model`), which hold with a mesh, or
            that of the accelerator, too.
        accelerator: its FSDP plugin gives mesh, precision, offload and activation checkpointing, unless they are given
            here.
        dtype: of the shards (the master weights), also by its name ("bfloat16", "bf16"). None means float32 where
            computation is in a lower precision (`mp_policy.param_dtype`, or the accelerator's mixed precision), else
            the checkpoint's dtype, which "auto" means always. For a base with an adapter, which is frozen, None means
            the checkpoint's dtype; adapters are float32. Quantised weights (FP8, MXFP4, GPTQ, AWQ, …) are dequantised
            straight to it; of such a checkpoint, the config's dtype is meant.
        mp_policy: dtypes of computation and reduction; a dtype or its name ("bf16") computes in it and reduces in fp32;
            "fp8" is `Float8Policy()`.
        offload_policy: `CPUOffloadPolicy()` (or True) keeps the shards on the CPU between uses.
        activation_checkpointing: recompute each block's activations in the backward pass, or, as in `shard_model`, a
            mapping with `every_n_layers`, `offload` and `save_ops`; None: as the plugin says.
        compile: compile each block in place, as in `shard_model`. An accelerator made to compile does so in `prepare`.
        num_tokens: resize the vocabulary while loading, usually to `len(tokenizer)`, without gathering it. New rows are
            the same for any number of ranks; fewer tokens drop rows.
        pad_to_multiple_of: round the number of rows up, of `num_tokens` or of the vocabulary as it is.
        mean_resizing: new rows are the mean of the old ones; False: the model's own initialisation.
        dequantize: False keeps the weights of a quantised checkpoint (FP8, MXFP4, NVFP4, GPTQ, AWQ, 4 and 8
            bits of compressed-tensors) as they are stored, frozen: each rank holds and FSDP2 gathers their bytes, and
            each weight is dequantised when it is multiplied, in the forward and again in the backward pass. For
            adapters (`peft_config`).
        allow_pickle: read legacy `pytorch_model*.bin` where there are no safetensors; no code of the file is run.
        output_loading_info: return `(model, LoadReport)` in place of the model.
        trust_remote_code: run model code that comes with the checkpoint, or with the base of an adapter.
        config: in place of the checkpoint's own, or where it has none; a value, a name or a folder.
        torch_dtype: the older name of `dtype`.
        load_kwargs: passed to `load_weights` (`seed`, `staging_bytes`, `progress`, …).
        kwargs: as for `AutoModel….from_pretrained`: how to fetch (`revision`, `token`, `cache_dir`, `local_files_only`,
            `subfolder`); `ignore_mismatched_sizes` and `carry_heads`, as for `load_weights`; for the config or the
            model (`num_labels`, `attn_implementation`, …), as in `build_meta_model`. Arguments that ask for nothing are
            left out (`device_map={"": d}` for the device d of this process, too); others are refused by name.

    Every rank must call, with equal arguments but for names of folders and how to fetch. The ranks exchange errors,
    digests of arguments, checkpoint and plan, and under HSDP shards. Each node fetches a hub checkpoint once.

    Raises:
        CheckpointError: the checkpoint is absent, damaged, not the same on all ranks, or does not fit the model.
        RanksError: a rank does not come, is lost, or makes no progress for ten minutes (see `rank_timeout`).
        ConfigError, WrapPlanError, MeshError: as the steps say; all of these on all ranks alike.

    Example:
        >>> model = from_pretrained("checkpoint", dtype=torch.bfloat16, load_kwargs={"progress": False})
        >>> model.lm_head.weight.shape  # on several ranks a DTensor
        torch.Size([131, 48])
    """
    rules, mesh = _layout(distributed_config, mesh)
    settings = _settings_of(accelerator, mesh)
    with agreed_steps("loading the model"):  # one round for the errors, and the digests of arguments and plan
        with agreed("checking the arguments of from_pretrained"):
            name_or_path = one_name(name_or_path, kwargs.pop("pretrained_model_name_or_path", None))
            dtype, options = one_dtype(dtype, torch_dtype), as_compile(compile)
            policy, peft_config = as_policy(policy), as_peft_config(peft_config)
            settings |= _given_settings(mp_policy, offload_policy, activation_checkpointing)
            device = torch.device("cpu") if settings["mesh"].device_type == "cpu" else local_device()
            hub_kwargs, of_loading, model_kwargs = sort_arguments(kwargs, device)
        load_kwargs = {**of_loading, **(load_kwargs or {})}
        of_code = {"allow_pickle": allow_pickle, "trust_remote_code": trust_remote_code}
        given = {"policy": policy, "dtype": dtype, "compile": options, "rules": rules, "auto_class": auto_class}
        given |= {"peft_config": peft_config, "is_trainable": is_trainable, "dequantize": dequantize, **of_code}
        given |= {"num_tokens": num_tokens, "pad_to_multiple_of": pad_to_multiple_of, "mean_resizing": mean_resizing}
        given |= {name: value for name, value in settings.items() if name != "mesh"}
        same = {name: value for name, value in load_kwargs.items() if name not in _MAY_DIFFER}
        same_on_all_ranks("loading the model", load_kwargs=same, model_kwargs=model_kwargs, **given)
        checkpoint = open_checkpoint(name_or_path, config=config, peft_config=peft_config, **of_code, **hub_kwargs)
        known = {*signature(from_pretrained).parameters, "quantization_config"}
        refuse_misspelt(model_kwargs, checkpoint.config, known)
        chosen = {"auto_class": auto_class} if auto_class is not None else {}
        model_kwargs = {**checkpoint.base_options, **chosen, **model_kwargs, "trust_remote_code": trust_remote_code}
        with agreed("building the model"):
            dtype = _chosen_dtype(dtype, checkpoint, settings.get("mp_policy"), peft_config, model_kwargs)
            model = _without_storage(checkpoint, dtype, peft_config, model_kwargs, dequantize=dequantize)
            if num_tokens is not None or pad_to_multiple_of is not None:
                resize_vocabulary(model, num_tokens, pad_to_multiple_of)
                load_kwargs = {"added_tokens": "mean" if mean_resizing else "random"} | load_kwargs
        sharding, tree = _planned(model, accelerator, policy, options, settings, rules)
        with agreed("checking the adapter"):
            if peft_config is not None:
                refuse_for_shards(peft_config, model, sharding)
    shard_checked(model, sharding, tree)
    report = load_weights(model, checkpoint.index, **load_kwargs)  # this rank's bytes of the files
    if peft_config is not None:  # which has the modules whose weights were drawn
        weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        peft_config = with_modules_to_save(peft_config, [key for key in report.initialized_keys if key in weights])
    adapted = _with_adapter(model, checkpoint, peft_config, load_kwargs.get("seed"), is_trainable=is_trainable)
    return (adapted, report) if output_loading_info else adapted


def _with_adapter(
    model: nn.Module, checkpoint: Checkpoint, peft_config: Any, seed: int | None, *, is_trainable: bool
) -> Any:
    """The loaded base with the checkpoint's adapter, the one that its training state holds, or a new one."""
    if checkpoint.adapter is not None:
        return load_adapter(model, checkpoint.adapter, is_trainable=is_trainable, **checkpoint.hub_kwargs)
    if (state := checkpoint.adapter_state) is not None:
        return restore_adapter(model, state, is_trainable=is_trainable or peft_config is not None)
    return model if peft_config is None else add_adapter(model, peft_config, seed=seed)


def from_config(
    config: PreTrainedConfig | str | PathLike[str],
    *,
    seed: int | None = None,
    auto_class: Any = None,
    policy: WrapPolicy | None = None,
    mesh: DeviceMesh | None = None,
    distributed_config: Any = None,
    accelerator: Any = None,
    dtype: torch.dtype | str | None = None,
    mp_policy: MixedPrecisionPolicy | torch.dtype | str | None = None,
    offload_policy: OffloadPolicy | bool | None = None,
    activation_checkpointing: bool | Mapping[str, Any] | None = None,
    compile: bool | str | Mapping[str, Any] | None = False,
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
        seed: of the whole model; None: it follows from rank 0's generator.
        auto_class, policy, mesh, distributed_config, accelerator, mp_policy, offload_policy, activation_checkpointing,
            compile: as in `from_pretrained`.
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
        >>> model.training, model.lm_head.weight.device.type
        (False, 'cpu')
    """
    rules, mesh = _layout(distributed_config, mesh)
    settings = _settings_of(accelerator, mesh)
    seeds: list[int] = []
    with agreed_steps("making the model"):
        with agreed("checking the arguments of from_config"):
            dtype, options, policy = one_dtype(dtype, None), as_compile(compile), as_policy(policy)
            settings |= _given_settings(mp_policy, offload_policy, activation_checkpointing)
        computed = getattr(settings.get("mp_policy"), "param_dtype", None)
        masters = torch.float32 if dtype is None and computed is not None else None
        with agreed("building the model"):
            model_kwargs |= {"auto_class": auto_class, "trust_remote_code": trust_remote_code}
            model = build_meta_model(config, dtype=dtype if isinstance(dtype, torch.dtype) else masters, **model_kwargs)
        content = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
        own = {name: value for name, value in settings.items() if name != "mesh"}
        own |= {"policy": policy, "compile": options, "rules": rules}
        same_on_all_ranks("making the model", seed=seed, model=type(model), dtype=model.dtype, config=content, **own)
        compare_at_end(own_seed(seed), seeds.extend)
        sharding, tree = _planned(model, accelerator, policy, options, settings, rules)
    shard_checked(model, sharding, tree)
    with rolled_back(model) as after, agreed(f"initialising the model ({after})"):
        # tied parameters are named once, and buffers that are in no state dict are always made
        names = {name for name, _ in model.named_parameters()}
        names |= {name for name, _ in model.named_buffers()} & model.state_dict().keys()
        allocate(model, device=sharding.device)
        initialize_missing(model, missing_keys=names, seed=seeds[0])
    return model


def _layout(distributed_config: Any, mesh: Any) -> tuple[dict[str, Any], DeviceMesh | None]:
    """The rules by which layers and experts are divided, and the mesh that is asked for."""
    sizes = as_parallel({} if distributed_config is None else distributed_config)
    names = ("tp_plan", "ep_plan", "ep_implementation")
    rules = {name: sizes.pop(name) for name in names if name in sizes}
    rules |= {"sequence_parallel": True} if sizes.pop("enable_sequence_parallel", False) else {}
    if sizes and mesh is not None:
        raise ConfigError(
            f"distributed_config gives {', '.join(sizes)}, and mesh another layout. Leave one of them out."
        )
    return rules, as_mesh(SimpleNamespace(**sizes) if sizes else mesh)


def _given_settings(mp_policy: Any, offload_policy: Any, activation_checkpointing: Any) -> dict[str, Any]:
    """The settings that are given next to an accelerator, in whose place they hold."""
    recompute = as_recompute(activation_checkpointing)
    given = {
        "mp_policy": as_mp_policy(mp_policy),
        "offload_policy": as_offload_policy(offload_policy),
        "activation_checkpointing": None if activation_checkpointing is None else recompute or False,
    }
    return {name: value for name, value in given.items() if value is not None}


def _without_storage(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    peft_config: Any,
    model_kwargs: dict[str, Any],
    *,
    dequantize: bool,
) -> PreTrainedModel:
    """The model of a checkpoint on meta."""
    if checkpoint.adapter is not None and peft_config is not None:
        raise ConfigError(
            f"{checkpoint.adapter!r} is an adapter, and peft_config asks for another. "
            "Give the base, or leave peft_config out."
        )
    if not dequantize and "quantization_config" in model_kwargs:
        raise ConfigError(
            "dequantize=False keeps a quantised base, quantization_config quantises a plain one. Give one."
        )
    model = build_meta_model(checkpoint.config, dtype=dtype, **model_kwargs)
    set_generation_config(model, checkpoint.generation_config)
    if not dequantize:
        keep_stored(model, checkpoint.index)
    return model


def _planned(
    model: PreTrainedModel,
    accelerator: Any,
    policy: WrapPolicy | None,
    compile: Any,
    settings: dict[str, Any],
    rules: Mapping[str, Any],
) -> tuple[Sharding, ModuleTree]:
    """How the model is sharded, and the tree of its modules; its layers and experts are divided first."""
    plugin: Any = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    with agreed("dividing layers and experts"):
        rules = {"sequence_parallel": getattr(plugin, "sequence_parallel", False), **rules}
        parallelize_model(model, settings["mesh"], **rules)
    with agreed("planning the units"):
        if policy is None and hasattr(plugin, "policy_for"):
            policy = plugin.policy_for(model)
        plan, tree = plan_with_tree(model, policy)
    with agreed("checking the plan"):
        return checked_sharding(model, plan, tree, compile=compile, **settings), tree


def _settings_of(accelerator: Any, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Keywords of `shard_model` from an Accelerator's plugin, or the mesh alone. Every rank must call."""
    if accelerator is None:
        return {"mesh": ParallelDims().build_mesh() if mesh is None else mesh}
    with agreed("checking the accelerator"):
        state = getattr(accelerator, "state", None)
        if state is None:
            raise ConfigError(
                f"accelerator is {quoted(accelerator)}: it must be an Accelerator. Make one with make_accelerator()."
            )
        if not hasattr(state, "distributed_type"):
            raise ConfigError(
                "Accelerate's state was reset after this accelerator was made: TrainingArguments does that. Make the "
                "arguments first, then the accelerator and the model."
            )
        plugin: Any = getattr(state, "fsdp_plugin", None)
        if plugin is None:
            raise ConfigError(
                f"The accelerator does not run FSDP2 (distributed type {accelerator.distributed_type}). Make it with "
                "make_accelerator(), which takes the same arguments; on CPUs and in one process, Accelerate itself "
                "drops every FSDP plugin."
            )
        if not hasattr(plugin, "shard_arguments") and (
            plugin.fsdp_version != 2 or plugin.auto_wrap_policy is not None or plugin.activation_checkpointing
        ):
            raise ConfigError(
                f"A plain {type(plugin).__name__} looks for layers by class names that sharding changes. Give it "
                "fsdp_version=2, auto_wrap_policy='no_wrap' and no activation_checkpointing, or use make_accelerator()."
            )
    settings = {"mp_policy": plugin.mixed_precision_policy, "offload_policy": plugin.cpu_offload}
    if hasattr(plugin, "shard_arguments"):
        settings = plugin.shard_arguments(accelerator)
    return {"mesh": mesh_of(accelerator) if mesh is None else mesh, **settings}


def _chosen_dtype(
    dtype: torch.dtype | str | None,
    checkpoint: Checkpoint,
    mp_policy: MixedPrecisionPolicy | None,
    peft_config: Any,
    model_kwargs: dict[str, Any],
) -> torch.dtype | None:
    """The given dtype, else float32 for masters of a lower precision and the checkpoint's where none are needed."""
    if isinstance(dtype, torch.dtype):
        return dtype
    is_frozen = any(each is not None for each in (checkpoint.adapter, checkpoint.adapter_state, peft_config))
    is_lower = mp_policy is not None and mp_policy.param_dtype is not None
    if dtype is None and is_lower and not is_frozen and not has_4bit_layers(checkpoint.config, model_kwargs):
        return torch.float32
    return config_dtype(checkpoint.config) or checkpoint.index.dtype
