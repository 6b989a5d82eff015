"""The way in: from a model name to a sharded, loaded, ready model. Every step is a public function of its own."""

import json
from collections.abc import Mapping
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_fsdp_tools.checkpoint.formats.dcp import find_dcp_folder
from hf_fsdp_tools.checkpoint.index import CheckpointIndex
from hf_fsdp_tools.checkpoint.io.reader import prefetch
from hf_fsdp_tools.checkpoint.io.watch import READ_TIMEOUT_S, patience, patiently
from hf_fsdp_tools.checkpoint.load import load_weights
from hf_fsdp_tools.checkpoint.report import LoadReport
from hf_fsdp_tools.checkpoint.vocabulary import resize_vocabulary
from hf_fsdp_tools.distributed.agreement import agreed, opened, refuse_other_commits
from hf_fsdp_tools.distributed.mesh import ParallelDims, rank_on_node
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.hub import HubRepository, is_hub_name
from hf_fsdp_tools.modeling.meta import build_meta_model, config_dtype, load_config
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.policy import HybridPolicy
from hf_fsdp_tools.sharding.adapters import add_adapter, load_adapter
from hf_fsdp_tools.sharding.shard import shard_model

__all__ = ["from_pretrained", "shard_arguments"]


@overload
def from_pretrained(
    name_or_path: str | PathLike[str], *, output_loading_info: Literal[True], **kwargs: Any
) -> tuple[PreTrainedModel, LoadReport]: ...


@overload
def from_pretrained(
    name_or_path: str | PathLike[str], *, output_loading_info: Literal[False] = False, **kwargs: Any
) -> PreTrainedModel: ...


def from_pretrained(
    name_or_path: str | PathLike[str],
    *,
    peft_config: Any = None,
    is_trainable: bool = False,
    auto_class: Any = AutoModelForCausalLM,
    policy: HybridPolicy | None = None,
    mesh: DeviceMesh | None = None,
    accelerator: Any = None,
    dtype: torch.dtype | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    activation_checkpointing: bool | None = None,
    compile: bool | Mapping[str, Any] = False,
    num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
    allow_pickle: bool = False,
    output_loading_info: bool = False,
    trust_remote_code: bool = False,
    hub_kwargs: dict[str, Any] | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **model_kwargs: Any,
) -> PreTrainedModel | tuple[PreTrainedModel, LoadReport]:
    """Load a Hugging Face checkpoint straight into FSDP2 shards: no rank ever holds more than its own share.

    The model is built on meta, planned, sharded, and filled with this rank's byte ranges of the files. It equals the
    model of `AutoModel….from_pretrained` bit for bit, and is in evaluation mode as that one is.

        accelerator = make_accelerator(mixed_precision="bf16")
        model = from_pretrained("Qwen/Qwen3-8B", accelerator=accelerator)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    Args:
        name_or_path: a hub name, or a folder with `config.json` and safetensors; or a DCP folder, as `dcp.save`, Accelerate's
            `save_state` and the Trainer (`checkpoint-500`) write it, with `config.json` in it or up to two folders above; or a
            PEFT adapter (hub name or folder), whose base is loaded first.
        peft_config: of PEFT, for example `LoraConfig(r=16, target_modules="all-linear")`: adds a new adapter to the loaded
            shards (`add_adapter`) and returns the `PeftModel`, of which only the adapter is trainable.
        is_trainable: where `name_or_path` is an adapter, whether to train it on; it is frozen otherwise, as in PEFT.
        auto_class: the `AutoModelFor…` class, or a model class.
        policy: what becomes a unit; None means the accelerator's, or `HybridPolicy()`.
        mesh: one axis for FSDP, two for HSDP; None means the accelerator's, or FSDP over all processes.
        accelerator: takes mesh, precision, offload and activation checkpointing from its FSDP plugin, where they are
            not given here.
        dtype: of the weights that each rank keeps (the master weights). None means float32 where computation is in a
            lower precision (`mp_policy.param_dtype`, or the accelerator's mixed precision), else the checkpoint's dtype.
            A base with an adapter is frozen and needs no masters: None means the checkpoint's dtype. Adapters are float32.
        mp_policy: dtypes of computation and reduction.
        offload_policy: `CPUOffloadPolicy()` keeps the shards on the CPU between uses.
        activation_checkpointing: recompute each block's activations in the backward pass; None means the plugin's choice.
        compile: compile each block in place, as in `shard_model`. An accelerator made to compile does so in `prepare`.
        num_tokens: resize the vocabulary while loading, usually to `len(tokenizer)`. As `resize_token_embeddings` does it,
            but old rows are read slice by slice, and new rows are the same for any number of ranks. Fewer tokens drop rows.
        pad_to_multiple_of: round the number of rows up; alone, of the vocabulary as it is.
        mean_resizing: new rows are the mean of the old ones; False: the model's own initialisation.
        allow_pickle: read legacy `pytorch_model*.bin` where there are no safetensors; no code of the file is run.
        output_loading_info: return `(model, LoadReport)`.
        trust_remote_code: run model code that comes with the checkpoint.
        hub_kwargs: where and how to fetch (`revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`).
        load_kwargs: passed to `load_weights` (`ignore_mismatched_sizes`, `seed`, `staging_bytes`, `read_mode`, …);
            `read_timeout_s` counts for the config, too.
        model_kwargs: for the config or the model, as in `from_pretrained` (`num_labels`, `attn_implementation`, …).

    Every rank must call, under `torchrun`, `accelerate launch`, or alone. Only the plan's digest and the outcome of
    loading travel between ranks; each node fetches a hub checkpoint once.

    Raises:
        CheckpointError: the checkpoint is absent, damaged, or does not fit the model; on all ranks alike.
        ConfigError, WrapPlanError, MeshError: as the steps say.
    """
    hub_kwargs, load_kwargs = hub_kwargs or {}, load_kwargs or {}
    # 1 what the accelerator decides, where the caller did not
    mesh, mp_policy, offload_policy, activation_checkpointing = _from_accelerator(
        accelerator, mesh, mp_policy, offload_policy, activation_checkpointing
    )
    mesh = mesh if mesh is not None else ParallelDims().build_mesh()
    # 2 what the checkpoint holds: its config and the headers of its files; of an adapter, those of its base
    doing, look = f"looking for {fspath(name_or_path)!r}", partial(_base_of_adapter, name_or_path, peft_config)
    with patience(load_kwargs.get("read_timeout_s", READ_TIMEOUT_S)):
        base_of_adapter = opened(doing, name_or_path, look, hub_kwargs)
        base, base_kwargs = base_of_adapter or (name_or_path, hub_kwargs)
        doing, read = f"opening {fspath(base)!r}", partial(_open, base, trust_remote_code, allow_pickle)
        config, index = opened(doing, base, read, base_kwargs)
    refuse_other_commits(base, config._commit_hash)
    with agreed(doing):
        _start_reading(index)
        # 3 the model without storage
        is_frozen = base_of_adapter is not None or peft_config is not None
        dtype = dtype or _default_dtype(config, index, mp_policy, is_frozen, model_kwargs)
        model = build_meta_model(
            config, auto_class=auto_class, dtype=dtype, trust_remote_code=trust_remote_code, **model_kwargs
        )
        if num_tokens is not None or pad_to_multiple_of is not None:
            resize_vocabulary(model, num_tokens, pad_to_multiple_of)
            load_kwargs = {"added_tokens": "mean" if mean_resizing else "random"} | load_kwargs
        _set_generation_config(model, base, config._commit_hash, base_kwargs)
        # 4 what is gathered together
        plan = make_wrap_plan(model, policy=policy or _policy_from(accelerator, model))
    # 5 shards without storage
    shard_model(
        model,
        plan,
        mesh=mesh,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        activation_checkpointing=bool(activation_checkpointing),
        compile=compile,
    )
    # 6 this rank's bytes
    report = load_weights(model, index, **load_kwargs)
    # 7 the adapter, which PEFT reads or makes
    if base_of_adapter is not None:
        model = load_adapter(model, name_or_path, is_trainable=is_trainable, **hub_kwargs)
    elif peft_config is not None:
        model = add_adapter(model, peft_config, seed=load_kwargs.get("seed", 0))
    return (model, report) if output_loading_info else model


def _base_of_adapter(
    name_or_path: str | PathLike[str], peft_config: Any, hub_kwargs: dict[str, Any]
) -> tuple[str, dict[str, Any]] | None:
    """The base that an adapter names, and how to fetch it; None for a folder or repository with a model of its own."""
    name = fspath(name_or_path)
    if (Path(name) / "config.json").is_file():
        return None
    folder = Path(name)
    if not folder.exists() and is_hub_name(name):
        asked = {key: value for key, value in hub_kwargs.items() if key != "subfolder"}
        folder = HubRepository.open(name, **asked).fetch("*config.json")
    file = folder / (hub_kwargs.get("subfolder") or "") / "adapter_config.json"
    if not file.is_file() or (file.parent / "config.json").is_file():
        return None
    if peft_config is not None:
        raise ConfigError(
            f"{name!r} is an adapter, and peft_config asks for another. Give the base, or leave peft_config out."
        )
    try:
        written: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{str(file)!r} is not JSON: {error}. Copy the adapter again.") from error
    base = written.get("base_model_name_or_path")
    if not base:
        raise CheckpointError(
            f"The adapter {name!r} names no base model (base_model_name_or_path in {file.name}). Write the base's name or "
            "folder there, or load the base and call load_adapter(model, folder)."
        )
    revision = {"revision": written["revision"]} if written.get("revision") else {}
    kept = {key: value for key, value in hub_kwargs.items() if key not in ("revision", "subfolder")}
    return base, kept | revision


def _open(
    name_or_path: str | PathLike[str], trust_remote_code: bool, allow_pickle: bool, hub_kwargs: dict[str, Any]
) -> tuple[PreTrainedConfig, CheckpointIndex]:
    """Config and index; of a hub name, both of one commit, whatever is pushed meanwhile."""
    home = _config_home(name_or_path)
    read = partial(load_config, home, trust_remote_code=trust_remote_code, **hub_kwargs)
    config = patiently(read, file=Path(home) if Path(home).exists() else None)
    revision = {"revision": config._commit_hash} if config._commit_hash else {}
    return config, CheckpointIndex.open(name_or_path, allow_pickle=allow_pickle, **hub_kwargs | revision)


def _start_reading(index: CheckpointIndex) -> None:
    """Where all ranks share one machine, the disk need not wait until the model is built: every byte is wanted here."""
    rank, ranks = rank_on_node()
    if ranks == dist.get_world_size():
        prefetch(list(dict.fromkeys(tensor.file for tensor in index.tensors.values())), part=rank, parts=ranks)


def _default_dtype(
    config: PreTrainedConfig,
    index: CheckpointIndex,
    mp_policy: MixedPrecisionPolicy | None,
    is_frozen: bool,
    model_kwargs: dict[str, Any],
) -> torch.dtype | None:
    """float32 for masters of what is computed in a lower precision; the checkpoint's dtype where none are needed."""
    quantization = model_kwargs.get("quantization_config") or getattr(config, "quantization_config", None)
    is_lower = mp_policy is not None and mp_policy.param_dtype is not None
    if is_lower and not is_frozen and quantization is None:
        return torch.float32
    return config_dtype(config) or index.dtype


def _from_accelerator(
    accelerator: Any,
    mesh: DeviceMesh | None,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None,
    activation_checkpointing: bool | None,
) -> tuple[DeviceMesh | None, MixedPrecisionPolicy | None, OffloadPolicy | None, bool | None]:
    """Fill what is None from the accelerator's FSDP plugin. Attributes only: this room does not import accelerate."""
    if accelerator is None:
        return mesh, mp_policy, offload_policy, activation_checkpointing
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if not hasattr(accelerator.state, "distributed_type"):
        raise ConfigError(
            "Accelerate's state was reset after this accelerator was made: TrainingArguments does that. Make the arguments "
            "first, then the accelerator and the model."
        )
    if plugin is None or plugin.fsdp_version != 2:
        raise ConfigError(
            f"The accelerator does not run FSDP2 (distributed type {accelerator.distributed_type}). "
            "Make it with make_accelerator(), or give Accelerator a HybridFSDPPlugin()."
        )
    if hasattr(plugin, "adopt"):
        plugin.adopt(accelerator)
    elif plugin.auto_wrap_policy is not None or plugin.activation_checkpointing:
        raise ConfigError(
            f"A plain {type(plugin).__name__} looks for layers by class names that sharding changes. Give it "
            "auto_wrap_policy='no_wrap' and no activation_checkpointing, or use make_accelerator()."
        )
    given = shard_arguments(accelerator, mesh)
    if activation_checkpointing is None:
        activation_checkpointing = given["activation_checkpointing"]
    return (
        given["mesh"],
        mp_policy or given["mp_policy"],
        offload_policy or given["offload_policy"],
        activation_checkpointing,
    )


def shard_arguments(accelerator: Any, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Keywords of `shard_model` as an Accelerator and its FSDP plugin say them: mesh, precision, offload, checkpointing.

    Args:
        accelerator: of Accelerate, running FSDP2, with whatever plugin.
        mesh: instead of the Accelerator's own, which is FSDP over all processes where it has no parallelism config.
    """
    plugin, config = accelerator.state.fsdp_plugin, accelerator.parallelism_config
    if mesh is None and config:
        mesh = accelerator.torch_device_mesh[tuple(config.fsdp_dim_names)]
    return {
        "mesh": mesh if mesh is not None else ParallelDims().build_mesh(accelerator.device.type),
        "mp_policy": plugin.mixed_precision_policy,
        "offload_policy": plugin.cpu_offload,
        "activation_checkpointing": plugin.activation_checkpointing,
    }


def _policy_from(accelerator: Any, model: PreTrainedModel) -> HybridPolicy:
    """The policy of the accelerator's plugin for this model; the default one without."""
    plugin: Any = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    policy: HybridPolicy = plugin.policy_for(model) if hasattr(plugin, "policy_for") else HybridPolicy()
    return policy


def _config_home(name_or_path: str | PathLike[str]) -> str | PathLike[str]:
    """Where the config is: of a DCP folder that has none, the nearest of the two folders above; else the name itself."""
    folder = Path(name_or_path)
    if not folder.is_dir() or (folder / "config.json").is_file() or find_dcp_folder(folder) is None:
        return name_or_path
    above = list(folder.absolute().parents)[:2]
    return next((path for path in above if (path / "config.json").is_file()), name_or_path)


def _set_generation_config(
    model: PreTrainedModel, name_or_path: str | PathLike[str], commit: str | None, hub_kwargs: dict[str, Any]
) -> None:
    """As `from_pretrained` does: the checkpoint's own generation settings, where it has any."""
    if not model.can_generate():
        return
    if commit:  # a hub name: fetched with the config, or not there
        hub_kwargs = hub_kwargs | {"revision": commit, "local_files_only": True}
    try:
        model.generation_config = GenerationConfig.from_pretrained(_config_home(name_or_path), **hub_kwargs)
    except OSError:
        return  # the checkpoint has no generation_config.json: the model made one from its config
