"""Load a model by name into shards (`from_pretrained`); each step is a public function."""

from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from transformers import PreTrainedConfig, PreTrainedModel

from hf_fsdp_tools.distributed.agreement import agreed, same_on_all_ranks
from hf_fsdp_tools.distributed.mesh import ParallelDims, local_device
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.loading.adapter_state import restore_adapter
from hf_fsdp_tools.loading.load import load_weights
from hf_fsdp_tools.loading.opening import Checkpoint, open_checkpoint
from hf_fsdp_tools.loading.report import LoadReport
from hf_fsdp_tools.loading.vocabulary import resize_vocabulary
from hf_fsdp_tools.modeling.arguments import one_dtype, one_name, refuse_misspelt, sort_arguments
from hf_fsdp_tools.modeling.configs import set_generation_config
from hf_fsdp_tools.modeling.linear4bit import has_4bit_layers
from hf_fsdp_tools.modeling.meta import build_meta_model, config_dtype
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.policy import HybridPolicy, as_policy
from hf_fsdp_tools.sharding.adapter_files import as_peft_config, with_modules_to_save
from hf_fsdp_tools.sharding.adapters import add_adapter, load_adapter
from hf_fsdp_tools.sharding.options import as_compile, as_mesh, as_mp_policy, as_offload_policy
from hf_fsdp_tools.sharding.shard import shard_model
from hf_fsdp_tools.text import quoted

_FREE_ON_EACH_RANK = ("requests_in_flight", "progress")
"""Arguments of `load_weights` that may differ between ranks."""


class PretrainedOptions(TypedDict, total=False):
    """The keywords of `from_pretrained`, for editors and type checkers."""

    peft_config: Any
    is_trainable: bool
    auto_class: Any
    policy: HybridPolicy | None
    mesh: DeviceMesh | None
    accelerator: Any
    dtype: torch.dtype | str | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    activation_checkpointing: bool | None
    compile: bool | str | Mapping[str, Any] | None
    num_tokens: int | None
    pad_to_multiple_of: int | None
    mean_resizing: bool
    allow_pickle: bool
    trust_remote_code: bool
    config: PreTrainedConfig | str | PathLike[str] | None
    torch_dtype: torch.dtype | str | None
    load_kwargs: dict[str, Any] | None
    revision: str | None
    token: str | bool | None
    cache_dir: str | PathLike[str] | None
    local_files_only: bool
    subfolder: str | None
    ignore_mismatched_sizes: bool
    num_labels: int
    attn_implementation: str
    quantization_config: Any


@overload
def from_pretrained(
    name_or_path: str | PathLike[str], *, output_loading_info: Literal[True], **options: Unpack[PretrainedOptions]
) -> tuple[PreTrainedModel, LoadReport]: ...


@overload
def from_pretrained(
    name_or_path: str | PathLike[str],
    *,
    output_loading_info: Literal[False] = False,
    **options: Unpack[PretrainedOptions],
) -> PreTrainedModel: ...


def from_pretrained(
    name_or_path: str | PathLike[str] | None = None,
    *,
    peft_config: Any = None,
    is_trainable: bool = False,
    auto_class: Any = None,
    policy: HybridPolicy | None = None,
    mesh: DeviceMesh | None = None,
    accelerator: Any = None,
    dtype: torch.dtype | str | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    activation_checkpointing: bool | None = None,
    compile: bool | str | Mapping[str, Any] | None = False,
    num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
    allow_pickle: bool = False,
    output_loading_info: bool = False,
    trust_remote_code: bool = False,
    config: PreTrainedConfig | str | PathLike[str] | None = None,
    torch_dtype: torch.dtype | str | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> PreTrainedModel | tuple[PreTrainedModel, LoadReport]:
    """Load a Hugging Face checkpoint straight into FSDP2 shards; each rank reads and holds its own shards only.

    The model is built on meta, planned, sharded, and filled with this rank's byte ranges of the files. It equals the
    model of `AutoModel….from_pretrained` bit for bit, and is in evaluation mode too.

        accelerator = make_accelerator(mixed_precision="bf16")
        model = from_pretrained("Qwen/Qwen3-8B", accelerator=accelerator)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    Args:
        name_or_path: a hub name, or a folder with `config.json` and safetensors; transformers' name of the argument is
            taken too. Or a training state, as `dcp.save`, Accelerate's `save_state`, the Trainer, TRL and Axolotl
            (`checkpoint-500`) and torch's `HuggingFaceStorageWriter` (torchtitan) write it, with `config.json` in it or
            up to two folders above; or a PEFT adapter (hub name or folder), whose base is loaded first. A state of a
            `PeftModel`, with its `adapter_config.json` in it or up to two folders above, gives the adapter, and the
            base if that was saved.
        peft_config: of PEFT, for example `LoraConfig(r=16, target_modules="all-linear")`, or a dict of its arguments
            (`{"r": 16}`; LoRA where it names no `peft_type`): adds a new adapter to the loaded shards (`add_adapter`)
            and returns the `PeftModel`, of which only the adapter is trainable. Where a training state holds values of
            an adapter, this is the config of that adapter, which gets these values. Modules with weights that no file
            holds (a new head) are trained whole and saved with the adapter, as if they were in `modules_to_save`:
            whoever opens the adapter would draw others.
        is_trainable: whether an adapter that is loaded is trainable; it is frozen otherwise, as in PEFT. With
            `peft_config` it is trainable.
        auto_class: the `AutoModelFor…` class, a model class, or the name of one. None means the class that the config's
            `architectures` name; of a base model (`LlamaModel`), or where they name none, that which its kind is
            trained with, so that causal LMs are as `AutoModelForCausalLM` has them.
        policy: what becomes a unit; None means the accelerator's, or `HybridPolicy()`. The name or class of a block, or
            several, mean a policy with these `block_types`.
        mesh: one axis for FSDP, two for HSDP, or the `ParallelDims` that make it; None means the accelerator's, or FSDP
            over all processes.
        accelerator: its FSDP plugin gives mesh, precision, offload and activation checkpointing, unless they are given
            here.
        dtype: of the shards (the master weights), also by its name ("bfloat16", "bf16"). None means float32 where
            computation is in a lower precision (`mp_policy.param_dtype`, or the accelerator's mixed precision), else
            the checkpoint's dtype, which "auto" means always. For a base with an adapter, which is frozen, None means
            the checkpoint's dtype; adapters are float32. Quantised weights (FP8, MXFP4, 8-bit compressed-tensors) are
            dequantised straight to it; of such a checkpoint, the config's dtype is meant.
        mp_policy: dtypes of computation and reduction; a dtype or its name ("bf16") computes in it and reduces in fp32.
        offload_policy: `CPUOffloadPolicy()` (or True) keeps the shards on the CPU between uses.
        activation_checkpointing: recompute each block's activations in the backward pass; None means the plugin's
            choice.
        compile: compile each block in place, as in `shard_model`. An accelerator made to compile does so in `prepare`.
        num_tokens: resize the vocabulary while loading, usually to `len(tokenizer)`, without gathering it. New rows are
            the same for any number of ranks; fewer tokens drop rows.
        pad_to_multiple_of: round the number of rows up, of `num_tokens` or of the vocabulary as it is.
        mean_resizing: new rows are the mean of the old ones; False: the model's own initialisation.
        allow_pickle: read legacy `pytorch_model*.bin` where there are no safetensors; no code of the file is run.
        output_loading_info: return `(model, LoadReport)`.
        trust_remote_code: run model code that comes with the checkpoint; of an adapter, with the base that its files
            name.
        config: in place of the checkpoint's own, or where it has none; a value, a name or a folder.
        torch_dtype: the older name of `dtype`.
        load_kwargs: passed to `load_weights` (`seed`, `staging_bytes`, `check_finite`, …).
        kwargs: as for `AutoModel….from_pretrained`: how to fetch (`revision`, `token`, `cache_dir`, `local_files_only`,
            `subfolder`); `ignore_mismatched_sizes`; for the config or the model (`num_labels`, `attn_implementation`,
            …), as in `build_meta_model`. Arguments that ask for nothing are left out (`device_map={"": d}` for the
            device d of this process, too); others are refused by name.

    Every rank must call, under `torchrun`, `accelerate launch`, or alone, with equal arguments but for names of folders
    and how to fetch. The ranks exchange errors, digests of the arguments, the checkpoint and the plan, and the figures
    of the report, and under HSDP shards. Each node fetches a hub checkpoint once.

    Raises:
        CheckpointError: the checkpoint is absent, damaged, not the same on all ranks, or does not fit the model; on all
            ranks alike.
        RanksError: a rank does not come, is lost, or makes no progress for ten minutes (see `patience`).
        ConfigError, WrapPlanError, MeshError: as the steps say; on all ranks alike.

    Example:
        >>> model = from_pretrained("checkpoint", dtype=torch.bfloat16, load_kwargs={"progress": False})
        >>> model.lm_head.weight.placements
        (Shard(dim=0),)
    """
    # 1 the mesh, and settings of the accelerator where the caller gave none
    mesh = as_mesh(mesh)
    if accelerator is None and mesh is None:
        mesh = ParallelDims().build_mesh()
    with agreed("checking the arguments of from_pretrained"):
        name_or_path = one_name(name_or_path, kwargs.pop("pretrained_model_name_or_path", None))
        dtype = one_dtype(dtype, torch_dtype)
        policy, peft_config = as_policy(policy), as_peft_config(peft_config)
        mp_policy, offload_policy = as_mp_policy(mp_policy), as_offload_policy(offload_policy)
        compile = as_compile(compile)
        check_accelerator(accelerator)
        kind = mesh.device_type if mesh is not None else accelerator.device.type
        device = local_device() if kind != "cpu" else torch.device("cpu")
        hub_kwargs, of_loading, model_kwargs = sort_arguments(kwargs, device)
    load_kwargs = {**of_loading, **(load_kwargs or {})}
    settings = shard_arguments(accelerator, mesh)
    asked = {
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "activation_checkpointing": activation_checkpointing,
    }
    settings |= {name: value for name, value in asked.items() if value is not None}
    same_on_all_ranks(
        "loading the model",
        peft_config=peft_config,
        is_trainable=is_trainable,
        auto_class=auto_class,
        policy=policy,
        dtype=dtype,
        compile=compile,
        num_tokens=num_tokens,
        pad_to_multiple_of=pad_to_multiple_of,
        mean_resizing=mean_resizing,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
        load_kwargs={name: value for name, value in load_kwargs.items() if name not in _FREE_ON_EACH_RANK},
        model_kwargs=model_kwargs,
        **{name: value for name, value in settings.items() if name != "mesh"},
    )
    # 2 config and headers of the checkpoint
    checkpoint = open_checkpoint(
        name_or_path,
        config=config,
        peft_config=peft_config,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        **hub_kwargs,
    )
    if checkpoint.adapter is not None and peft_config is not None:
        raise ConfigError(
            f"{checkpoint.adapter!r} is an adapter, and peft_config asks for another. "
            "Give the base, or leave peft_config out."
        )
    with agreed("checking the arguments of from_pretrained"):
        refuse_misspelt(model_kwargs, checkpoint.config, PretrainedOptions.__annotations__)
    # 3 the model without storage
    is_frozen = any(a is not None for a in (checkpoint.adapter, checkpoint.adapter_state, peft_config))
    with agreed("building the model"):
        model = build_meta_model(
            checkpoint.config,
            auto_class=auto_class,
            dtype=_chosen_dtype(dtype, checkpoint, settings.get("mp_policy"), is_frozen, model_kwargs),
            trust_remote_code=trust_remote_code,
            **model_kwargs,
        )
        set_generation_config(model, checkpoint.generation_config)
        if num_tokens is not None or pad_to_multiple_of is not None:
            resize_vocabulary(model, num_tokens, pad_to_multiple_of)
            load_kwargs = {"added_tokens": "mean" if mean_resizing else "random"} | load_kwargs
    # 4 the plan of its units
    with agreed("planning the units"):
        plan = make_wrap_plan(model, policy=policy or policy_from(accelerator, model))
    # 5 shards without storage
    shard_model(model, plan, compile=compile, **settings)
    # 6 this rank's bytes of the files
    report = load_weights(model, checkpoint.index, **load_kwargs)
    # 7 the adapter, which PEFT reads or makes
    drawn = report.initialized_keys
    model = _with_adapter(model, checkpoint, peft_config, is_trainable, drawn, load_kwargs.get("seed"))
    return (model, report) if output_loading_info else model


def _with_adapter(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    peft_config: Any,
    is_trainable: bool,
    drawn: Collection[str],
    seed: int | None,
) -> Any:
    """The loaded model, or the `PeftModel` around it; a new adapter has the modules whose weights were drawn."""
    if checkpoint.adapter is not None:
        return load_adapter(model, checkpoint.adapter, is_trainable=is_trainable, **checkpoint.hub_kwargs)
    if (state := checkpoint.adapter_state) is not None:
        return restore_adapter(model, state, is_trainable=is_trainable or peft_config is not None)
    if peft_config is None:
        return model
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    config = with_modules_to_save(peft_config, [key for key in drawn if key in weights])
    return add_adapter(model, config, seed=seed)


def _chosen_dtype(
    dtype: torch.dtype | str | None,
    checkpoint: Checkpoint,
    mp_policy: MixedPrecisionPolicy | None,
    is_frozen: bool,
    model_kwargs: dict[str, Any],
) -> torch.dtype | None:
    """The dtype asked for, else float32 for masters of a lower precision and the checkpoint's where none are needed."""
    if isinstance(dtype, torch.dtype):
        return dtype
    is_lower = mp_policy is not None and mp_policy.param_dtype is not None
    if dtype is None and is_lower and not is_frozen and not has_4bit_layers(checkpoint.config, model_kwargs):
        return torch.float32
    return config_dtype(checkpoint.config) or checkpoint.index.dtype


def check_accelerator(accelerator: Any) -> None:
    """Refuse an accelerator that does not run FSDP2, or whose plugin cannot be honoured."""
    if accelerator is None:
        return
    if not hasattr(accelerator, "state"):
        raise ConfigError(
            f"accelerator is {quoted(accelerator)}: it must be an Accelerator. Make one with make_accelerator()."
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if not hasattr(accelerator.state, "distributed_type"):
        raise ConfigError(
            "Accelerate's state was reset after this accelerator was made: TrainingArguments does that. Make the "
            "arguments first, then the accelerator and the model."
        )
    if plugin is None:
        raise ConfigError(
            f"The accelerator does not run FSDP2 (distributed type {accelerator.distributed_type}). Make it with "
            "make_accelerator(), which takes the same arguments; on CPUs and in one process, Accelerate itself drops "
            "every FSDP plugin."
        )
    if plugin.fsdp_version != 2:
        raise ConfigError(
            "The accelerator runs FSDP1, which the plugin, FSDP_VERSION or the launch config asks for, and "
            "from_pretrained shards with FSDP2. Write `fsdp_version: 2` under `fsdp_config`, "
            "or pass fsdp_plugin=HybridFSDPPlugin(fsdp_version=2). Settings of FSDP1 are translated."
        )
    if hasattr(plugin, "adopt"):
        plugin.adopt(accelerator)
    elif plugin.auto_wrap_policy is not None or plugin.activation_checkpointing:
        raise ConfigError(
            f"A plain {type(plugin).__name__} looks for layers by class names that sharding changes. Give it "
            "auto_wrap_policy='no_wrap' and no activation_checkpointing, or use make_accelerator()."
        )


def shard_arguments(accelerator: Any, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Keywords of `shard_model` from an Accelerator and its FSDP plugin: mesh, precision, offload, checkpointing.

    Args:
        accelerator: of Accelerate, running FSDP2, with any plugin; of None, there is the mesh alone.
        mesh: instead of the Accelerator's own, which is FSDP over all processes where it has no parallelism config.

    Every rank must call: a mesh may be made.
    """
    if accelerator is None:
        return {"mesh": mesh}
    plugin, config = accelerator.state.fsdp_plugin, accelerator.parallelism_config
    if mesh is None and config:
        mesh = accelerator.torch_device_mesh[tuple(config.fsdp_dim_names)]
    return {
        "mesh": mesh if mesh is not None else ParallelDims().build_mesh(accelerator.device.type),
        "mp_policy": plugin.mixed_precision_policy,
        "offload_policy": plugin.cpu_offload,
        "activation_checkpointing": plugin.activation_checkpointing,
    }


def policy_from(accelerator: Any, model: PreTrainedModel) -> HybridPolicy:
    """The policy of the accelerator's plugin for this model; `HybridPolicy()` without one."""
    plugin: Any = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    policy: HybridPolicy = plugin.policy_for(model) if hasattr(plugin, "policy_for") else HybridPolicy()
    return policy
