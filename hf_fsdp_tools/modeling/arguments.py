"""The arguments of `AutoModel….from_pretrained`, sorted: what is honoured, what asks for nothing, what is refused."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_fsdp_tools.distributed.agreement import rank_and_size
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.given import as_dtype, as_path
from hf_fsdp_tools.text import did_you_mean

_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
"""Where and how a checkpoint is fetched."""

_LOAD = ("ignore_mismatched_sizes",)
"""What `load_weights` takes."""

_OF_LOADING = {"added_tokens", "check_finite", "progress", "requests_in_flight", "seed", "staging_bytes", "strict"}
"""Arguments of `load_weights` that stand in `load_kwargs`."""

_ANY = object()

_ELSEWHERE: dict[str, tuple[tuple[object, ...], str]] = {
    "device_map": ((None,), "Leave it out: the mesh and the offload policy decide where weights are"),
    "tp_plan": ((None,), "Tensor parallelism is not part of this function"),
    "tp_size": ((None,), "Tensor parallelism is not part of this function"),
    "distributed_config": ((None,), "Give mesh, or accelerator"),
    "device_mesh": ((None,), "Give mesh"),
    "max_memory": ((None,), "Each rank holds its share; dp_shard_size and CPUOffloadPolicy decide how much that is"),
    "offload_folder": (
        (None,),
        "Weights are not kept on a disk between uses; CPUOffloadPolicy() keeps them on the host",
    ),
    "offload_state_dict": ((None, False), "No rank holds a state dict"),
    "low_cpu_mem_usage": ((_ANY,), ""),
    "use_safetensors": (
        (None, True),
        "Pass allow_pickle=True to read legacy .bin files where there are no safetensors",
    ),
    "weights_only": ((None, True), "No code of a checkpoint file is run"),
    "from_tf": ((None, False), "Convert the checkpoint to safetensors once, with plain transformers"),
    "from_flax": ((None, False), "Convert the checkpoint to safetensors once, with plain transformers"),
    "gguf_file": ((None,), "Convert the checkpoint to safetensors once, with plain transformers"),
    "variant": ((None,), "Copy the files of the variant to a folder, under the names without it"),
    "key_mapping": ((None,), "Rename the keys of the checkpoint once, or load it with plain transformers"),
    "state_dict": ((None,), "Save it to a folder, and give the folder"),
    "force_download": ((None, False), "Delete the repository from the cache (`hf cache delete`) to fetch it again"),
    "resume_download": ((_ANY,), ""),
    "proxies": ((None, {}), "Set HTTPS_PROXY"),
    "use_auth_token": ((None,), "Pass token"),
    "code_revision": ((None,), "Pass revision, which the code of the checkpoint is taken from too"),
    "adapter_kwargs": ((None, {}), "Give the adapter's own name, and is_trainable"),
    "_fast_init": ((_ANY,), ""),
    "mirror": ((_ANY,), ""),
    "load_in_8bit": ((None, False), "Give quantization_config=BitsAndBytesConfig(load_in_4bit=True, …)"),
    "load_in_4bit": ((None, False), "Give quantization_config=BitsAndBytesConfig(load_in_4bit=True, …)"),
    "device": ((None,), "The mesh decides where the shards are: mesh, or make_accelerator(cpu=True) for the CPU"),
    "gradient_checkpointing": ((None, False), "Pass activation_checkpointing=True"),
    "max_seq_length": ((None,), "It belongs to the trainer (max_length of SFTConfig)"),
    "tokenizer": ((None,), "Pass num_tokens=len(tokenizer), and the tokenizer to the trainer or to save_pretrained"),
    "use_kernels": ((None, False), "Call kernelize on the model before it is sharded"),
}
"""Arguments of transformers (5.23) that have another answer here: values that ask for nothing, and what to do
instead."""


@dataclass(frozen=True, kw_only=True)
class LoadingArguments:
    """The keywords of one call, by who takes them."""

    hub: Mapping[str, Any]
    """How to fetch."""

    load: Mapping[str, Any]
    """For `load_weights`."""

    model: dict[str, Any]
    """The rest: for the config or the model."""


def sort_arguments(keywords: Mapping[str, Any], device: torch.device) -> LoadingArguments:
    """Sort keywords of `AutoModel….from_pretrained`; those that ask for nothing are left out."""
    if "device_map" in keywords and _is_here(keywords["device_map"], device):
        keywords = {**keywords, "device_map": None}
    problems = [
        f"{name}={keywords[name]!r} ({cure})"
        for name, (idle, cure) in _ELSEWHERE.items()
        if name in keywords and _ANY not in idle and not any(keywords[name] is v or keywords[name] == v for v in idle)
    ]
    if problems:
        raise ConfigError(f"from_pretrained cannot honour {'; '.join(problems)}.")
    rest = {name: value for name, value in keywords.items() if name not in (*_HUB, *_LOAD, *_ELSEWHERE)}
    return LoadingArguments(
        hub={name: keywords[name] for name in _HUB if name in keywords},
        load={name: keywords[name] for name in _LOAD if name in keywords},
        model=rest,
    )


def _is_here(device_map: Any, device: torch.device) -> bool:
    """Whether a device map puts the whole model on this process's device: scripts of DDP and QLoRA write it so."""
    place = device_map
    if isinstance(device_map, Mapping):
        place = device_map[""] if device_map.keys() == {""} else None
    if place == "auto":
        return rank_and_size()[1] == 1
    index = device.index or 0
    if isinstance(place, int):
        return device.type != "cpu" and place == index
    try:
        named = torch.device(place)
    except (RuntimeError, TypeError):
        return False
    return named.type == device.type and named.index in (None, index)


def refuse_misspelt(keywords: Iterable[str], config: PreTrainedConfig, known: Iterable[str]) -> None:
    """Refuse keywords that are neither the config's nor known, where they look like one of these or have a cure.

    Others may be arguments of a model's own class, which has the last word.
    """
    names = {*known, *_HUB, *_LOAD, *_ELSEWHERE, *_OF_LOADING}
    for keyword in keywords:
        if hasattr(config, keyword) or keyword in names - _OF_LOADING or keyword.endswith("_implementation"):
            continue
        if keyword in _OF_LOADING:
            raise ConfigError(
                f"from_pretrained has no argument {keyword!r}, load_weights has: pass load_kwargs={{{keyword!r}: …}}."
            )
        if end := did_you_mean(keyword, names | config.to_dict().keys(), otherwise=""):
            raise ConfigError(f"from_pretrained has no argument {keyword!r}{end}")


def one_name(name: Any, by_transformers: Any) -> Any:
    """What `name_or_path` or, by transformers' name, `pretrained_model_name_or_path` says."""
    if (name is None) == (by_transformers is None):
        said = "neither" if name is None else "both"
        raise ConfigError(
            f"from_pretrained got {said} of name_or_path and pretrained_model_name_or_path, two names of one thing. "
            "Give one: a folder, or the name of a model on the hub."
        )
    return name if by_transformers is None else as_path(by_transformers, "pretrained_model_name_or_path")


def one_dtype(dtype: torch.dtype | str | None, torch_dtype: torch.dtype | str | None) -> torch.dtype | str | None:
    """The dtype that `dtype` or, by its older name, `torch_dtype` means; "auto" stays as it is."""
    asked = {"dtype": dtype, "torch_dtype": torch_dtype}
    found = [given if given == "auto" else as_dtype(given, name) for name, given in asked.items() if given is not None]
    if len(set(found)) > 1:
        raise ConfigError(
            f"dtype={dtype!r} and torch_dtype={torch_dtype!r} are two names of one thing. Give dtype only."
        )
    return found[0] if found else None
