"""Arguments of loading: names of dtypes, and the keywords of `AutoModel….from_pretrained`, sorted."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_fsdp_tools.distributed.agreement import rank_and_size
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import did_you_mean

CACHES = ("past_key_values", "cache")
"""Names of the argument by which a model is given a cache, before transformers 5.24 and since."""

_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Names of dtypes that Accelerate, Trainer and the command line have, and torch has not."""

_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
"""Where and how a checkpoint is fetched."""

_LOAD = ("carry_heads", "ignore_mismatched_sizes")
"""What `load_weights` takes."""

_OF_LOADING = {"added_tokens", "progress", "requests_in_flight", "seed", "staging_bytes", "strict"}
"""Arguments of `load_weights` that stand in `load_kwargs`."""

_NOT_HONOURED = frozenset((
    "adapter_kwargs", "code_revision", "device", "device_map", "device_mesh", "distributed_config", "force_download",
    "from_flax", "from_tf", "gguf_file", "key_mapping", "load_in_4bit", "load_in_8bit", "max_memory", "offload_folder",
    "offload_state_dict", "proxies", "state_dict", "tp_plan", "tp_size", "use_auth_token", "use_kernels", "variant",
))  # fmt: skip
"""Arguments of transformers (5.23) that this package has not; of each, None, False and {} ask for nothing."""

_DONE_ANYWAY = frozenset(("low_cpu_mem_usage", "use_safetensors", "weights_only"))
"""Arguments of transformers whose True asks for what is done anyway."""

_CURES = {
    "use_safetensors": "allow_pickle=True reads .bin files where there are no safetensors",
    "load_in_4bit": "give quantization_config=BitsAndBytesConfig(load_in_4bit=True, …)",
}


def sort_arguments(
    keywords: Mapping[str, Any], device: torch.device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Sort keywords of `AutoModel….from_pretrained`: how to fetch, for `load_weights`, and for the config or the model.

    Those that ask for nothing are left out.
    """
    refused = []
    for name in keywords.keys() & (_NOT_HONOURED | _DONE_ANYWAY):
        value = keywords[name]
        is_idle = value is True if name in _DONE_ANYWAY else value in (False, {})
        if not (value is None or is_idle or (name == "device_map" and _is_here(value, device))):
            refused.append(f"{name}={value!r}" + (f" ({_CURES[name]})" if name in _CURES else ""))
    if refused:
        raise ConfigError(
            f"from_pretrained cannot honour {'; '.join(sorted(refused))}. Leave it out; mesh, dtype, mp_policy and "
            "offload_policy decide where weights are, and in which precision."
        )
    hub = {name: keywords[name] for name in _HUB if name in keywords}
    load = {name: keywords[name] for name in _LOAD if name in keywords}
    needless = {*_NOT_HONOURED, *_DONE_ANYWAY, *hub, *load}
    return hub, load, {name: value for name, value in keywords.items() if name not in needless}


def _is_here(device_map: Any, device: torch.device) -> bool:
    """Whether a device map puts the whole model on this process's device: scripts of DDP and QLoRA write it so."""
    place = device_map
    if isinstance(device_map, Mapping):
        place = device_map[""] if device_map.keys() == {""} else None
    if place == "auto":
        return rank_and_size()[1] == 1
    if isinstance(place, int):
        return device.type != "cpu" and place == (device.index or 0)
    try:
        named = torch.device(place)
    except (RuntimeError, TypeError):
        return False
    return named.type == device.type and named.index in (None, device.index or 0)


def refuse_misspelt(keywords: Iterable[str], config: PreTrainedConfig, known: Iterable[str]) -> None:
    """Refuse keywords that are neither the config's nor known, where they look like one of these.

    Others may be arguments of a model's own class, which has the last word.
    """
    names = {*known, *_HUB, *_LOAD}
    for keyword in keywords:
        if hasattr(config, keyword) or keyword in names or keyword.endswith("_implementation"):
            continue
        if keyword in _OF_LOADING:
            raise ConfigError(
                f"from_pretrained has no argument {keyword!r}, load_weights has: pass load_kwargs={{{keyword!r}: …}}."
            )
        if end := did_you_mean(keyword, {*names, *_OF_LOADING, *config.to_dict()}, otherwise=""):
            raise ConfigError(f"from_pretrained has no argument {keyword!r}{end}")


def one_name(name: Any, transformers_name: Any) -> Any:
    """The one of `name_or_path` and, by transformers' name, `pretrained_model_name_or_path` that is given."""
    if (name is None) == (transformers_name is None):
        raise ConfigError(
            f"from_pretrained got {'neither' if name is None else 'both'} of name_or_path and "
            "pretrained_model_name_or_path, two names of one thing. Give one: a folder, or a model on the hub."
        )
    return transformers_name if name is None else name


def one_dtype(dtype: torch.dtype | str | None, torch_dtype: torch.dtype | str | None) -> torch.dtype | str | None:
    """The dtype that `dtype` or, by its older name, `torch_dtype` means; "auto" stays as it is."""
    named = {"dtype": dtype, "torch_dtype": torch_dtype}
    dtypes = {value if value == "auto" else as_dtype(value, name) for name, value in named.items() if value is not None}
    if len(dtypes) > 1:
        raise ConfigError(
            f"dtype={dtype!r} and torch_dtype={torch_dtype!r} are two names of one thing. Give dtype only."
        )
    return dtypes.pop() if dtypes else None


def as_dtype(value: Any, name: str = "dtype") -> Any:
    """A floating-point dtype, also by its name ("bfloat16", "bf16", "torch.bfloat16"); None stays None."""
    if value is None:
        return None
    dtype = value
    if isinstance(value, str):
        plain = value.strip().lower().removeprefix("torch.")
        dtype = _SHORT.get(plain, getattr(torch, plain, None))
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise ConfigError(f"{name}={value!r} is no floating-point dtype. Use float32, bfloat16 or float16.")
