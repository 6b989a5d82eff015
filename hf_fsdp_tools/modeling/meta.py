"""A model with shapes and no storage, built from its configuration as `from_pretrained` builds it."""

import copy
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from hf_fsdp_tools.doors import load_extension
from hf_fsdp_tools.errors import CheckpointError, ConfigError, FSDPToolsError, library_errors
from hf_fsdp_tools.hub import OF_GGUF, fetch, local_path
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.modeling.configs import model_class, text_config
from hf_fsdp_tools.modeling.four_bits import layers_of, make_quantizer, pack_4bit
from hf_fsdp_tools.modeling.module_tree import plain_name
from hf_fsdp_tools.modeling.notes import Chosen
from hf_fsdp_tools.modeling.packed import Packed, set_aside_quantization
from hf_fsdp_tools.modeling.pickles import read_json_object
from hf_fsdp_tools.stores import pinned, told
from hf_fsdp_tools.text import did_you_mean, dtype_name, first_line, first_lines, kind_of_file, listed, quoted

_CURE = "Use the config.json that belongs to the checkpoint: copy or download it again."

_MOST_LAYERS, _MOST_LABELS = 10_000, 1_000_000
"""More layers than any model has: classes of configurations make a list with an entry for each. (assumed)"""

_COUNTS_OF_LAYERS = ("block", "blocks", "depth", "depths", "layer", "layers")
"""How names of configurations end that count layers."""


@pinned()
def load_config(name_or_config: str | PathLike[str] | PreTrainedConfig, **hub_kwargs: Any) -> PreTrainedConfig:
    """The configuration of a hub name, a local folder, or a `config.json`; a copy of a given configuration."""
    if isinstance(name_or_config, PreTrainedConfig):
        with library_errors(_of_config(name_or_config), _CURE):
            return copy.deepcopy(name_or_config)
    name = fspath(name_or_config)
    path = local_path(name)
    if path is None:
        hub_kwargs = _fetch_config(name, hub_kwargs)
        commit = hub_kwargs["revision"]
    else:
        _check_config_is_there(path)
        kind = kind_of_file(path) if path.is_file() else None
        if kind not in (None, "a model's config.json"):
            cure = OF_GGUF if "GGUF" in str(kind) else "Give the model's folder, or a hub name."
            raise CheckpointError(f"{path} is {kind}, and no model. {cure}")
        _check_config_file(path if path.is_file() else path / (hub_kwargs.get("subfolder") or "") / "config.json")
        name, commit = str(path), None
    with library_errors(f"The configuration of {name!r} cannot be used", _CURE):
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(name, **hub_kwargs)
        except ValueError as error:
            raise ConfigError(f"The configuration of {name!r} cannot be used: {first_lines(error)}.") from None
        except OSError as error:
            raise CheckpointError(f"The configuration in {name!r} cannot be read: {first_lines(error)}.") from None
    config.name_or_path = told(config.name_or_path)
    config._commit_hash = commit  # older versions of transformers set it; never written to a file
    return config


def _of_config(config: PreTrainedConfig) -> str:
    name = config.name_or_path
    return f"The configuration of {name!r} cannot be used" if name else f"The {type(config).__name__} cannot be used"


def _check_config_file(file: Path) -> None:
    """Refuse a configuration that is no JSON object, names a dtype that torch lacks, or has absurdly many layers."""
    content = read_json_object(file)
    sections = [value for key, value in content.items() if isinstance(value, dict) and key != "quantization_config"]
    for key, value in (item for section in (content, *sections) for item in section.items()):
        is_dtype = key in ("dtype", "torch_dtype") and isinstance(value, str) and value != "auto"
        if is_dtype and not isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
            raise CheckpointError(f"{file}: names the dtype {quoted(value)}, which torch does not have. {_CURE}")
        most = _MOST_LABELS if key == "num_labels" else _MOST_LAYERS if key.endswith(_COUNTS_OF_LAYERS) else math.inf
        least = 0 if key in ("num_labels", "num_hidden_layers") else -math.inf  # others count from the last layer
        if type(value) is int and not least <= value <= most:
            fact = f"{quoted(key)} is {quoted(value)}, expected at most {most:,} and none below 0"
            raise CheckpointError(f"{file}: {fact}. {_CURE}")


def config_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """The floating-point dtype that a configuration, or its text model, names for the weights; None without one."""
    for part in (config, text_config(config)):
        dtype = getattr(part, "dtype", None)
        dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            return dtype
    return None


def build_meta_model(
    name_or_config: str | PathLike[str] | PreTrainedConfig,
    *,
    auto_class: Any = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    **model_kwargs: Any,
) -> PreTrainedModel:
    """Build a model whose parameters and buffers have shapes and dtypes but no storage, whatever its size.

    The model is that of transformers' `from_pretrained` before it reads weights: the same class and dtypes (also of
    modules that transformers keeps in fp32), weights tied as in the config, in evaluation mode.

    Args:
        name_or_config: a hub name, a local folder, the path of a `config.json`, or a `PreTrainedConfig` (copied).
        auto_class: the `AutoModelFor…` class, a model class itself, or the name of one. None means the class that the
            config's `architectures` name, or else that which its kind is trained with (for Llama, the causal LM).
        dtype: of the floating-point parameters; None means the config's dtype, or float32 if it has none.
        trust_remote_code: run model code that comes with the checkpoint.
        model_kwargs: attributes of the config are set there (`num_labels`, …), other keywords go to the model
            (`attn_implementation`, …). `quantization_config=BitsAndBytesConfig(load_in_4bit=True, …)` makes linear
            layers 4-bit layers of bitsandbytes, with weights of the packed shape. `use_liger_kernel=True`, or a mapping
            as of `liger_kernel_config`, has Liger's fused kernels in the place of norms, gated layers and loss.

    The model of a config with another quantisation is the plain model, and its config has none; how the checkpoint is
    quantised is noted for `load_weights`, which dequantises it.

    Any rank may call; no rank communicates.

    Raises:
        CheckpointError: the configuration cannot be found, or no model can be made of what it says.
        ConfigError: the architecture is unknown, `auto_class` is no class or has no model for it, a keyword fits
            neither config nor model, or the quantisation cannot be sharded.

    Example:
        >>> model = build_meta_model("checkpoint", dtype=torch.bfloat16)
        >>> type(model).__name__, model.device, model.dtype
        ('LlamaForCausalLM', device(type='meta'), torch.bfloat16)
        >>> type(build_meta_model("checkpoint", auto_class="AutoModelForSequenceClassification", num_labels=3)).__name__
        'LlamaForSequenceClassification'
    """
    config = load_config(name_or_config, trust_remote_code=trust_remote_code)
    quantization = set_aside_quantization(config)
    quantizer, fused = make_quantizer(config, model_kwargs), model_kwargs.pop("use_liger_kernel", False)
    dtype = as_dtype(dtype) or config_dtype(config) or torch.float32
    if dtype.itemsize == 1:
        raise ConfigError(
            f"A model cannot be built in {dtype_name(dtype)}, which needs scales next to its values. Use bfloat16; "
            "checkpoints in FP8 are dequantised to it while they are read."
        )
    for name in [name for name in model_kwargs if hasattr(config, name) and not name.endswith("_implementation")]:
        setattr(config, name, model_kwargs.pop(name))
    auto_class = model_class(config, auto_class, trust_remote_code=trust_remote_code)
    is_model_class = isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel)
    with _built_by_transformers(config, auto_class):
        try:
            # linspace stays real: code that calls .item() while a model is built would fail on meta tensors.
            with torch.device("meta"), init.meta_device_safe_creation_ops():
                if is_model_class:
                    model = auto_class._from_config(config, dtype=dtype, **model_kwargs)
                else:
                    model = auto_class.from_config(
                        config, dtype=dtype, trust_remote_code=trust_remote_code, **model_kwargs
                    )
        except FSDPToolsError:
            raise
        except (TypeError, ValueError) as error:
            if (problem := _misused(error, config, auto_class, model_kwargs)) is None:
                raise
            raise ConfigError(problem) from None  # it repeats the library's, at length
    layers = layers_of(model, quantizer)
    for module, key, tensor in [*kept_in_fp32(model, dtype)]:
        if key in module._parameters:
            tensor.data = tensor.data.to(torch.float32)
        elif key not in module._non_persistent_buffers_set:
            module._buffers[key] = tensor.to(torch.float32)
    pack_4bit(model, layers)
    model.eval()
    assert isinstance(model, PreTrainedModel)
    Packed.put(model, stored_quantization=quantization)
    Chosen.put(model, has_attention=model_kwargs.get("attn_implementation") is not None)
    if fused:
        load_extension("liger").use_liger(model, fused)
    return model


def copy_on_meta(model: nn.Module) -> Any:
    """A copy of a model, of whose tensors it has the shapes alone: to be tried and thrown away."""
    memo: dict[int, Any] = {id(each): torch.empty_like(each, device="meta") for each in model.buffers()}
    for each in model.parameters():
        memo[id(each)] = nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
    return copy.deepcopy(model, memo)


def run_on_meta(twin: nn.Module, length: int, *, has_mask: bool = True) -> None:
    """Run a decoder of `copy_on_meta`, where no value can be read: its mask is made, unless it takes none of that form,
    and so are positions; its experts run by the one implementation of transformers that reads none."""
    configs: list[Any] = [part.config for part in twin.modules() if hasattr(part, "config")]
    for config in configs:
        config._experts_implementation_internal = "batched_mm"
    with torch.device("meta"), torch.no_grad():
        inputs = {"input_ids": torch.zeros(1, length, dtype=torch.int64)}
        if has_mask:
            inputs["attention_mask"] = torch.ones(1, 1, length, length, dtype=torch.bool)
        if "position_ids" in inspect.signature(twin.forward).parameters:
            inputs["position_ids"] = torch.zeros(1, length, dtype=torch.int64)
        twin(**inputs, use_cache=False)


def _misused(error: TypeError | ValueError, config: Any, auto_class: Any, keywords: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a model that could not be built; None where it may be the config's fault."""
    kind = getattr(auto_class, "__name__", str(auto_class))
    if isinstance(error, ValueError):
        return f"{kind} cannot make a model of this {type(config).__name__}: {first_line(error)}."
    if not keywords:
        return None
    known = [*config.to_dict(), "attn_implementation", "quantization_config"]
    end = did_you_mean(next(iter(keywords)), known, otherwise=".")
    return f"{', '.join(keywords)}: neither the config nor the model, {kind}, has such an argument{end}"


def _built_by_transformers(config: PreTrainedConfig, auto_class: Any) -> AbstractContextManager[None]:
    """For a block that builds a model: errors are the config's, unless the model's class is the caller's own."""
    if isinstance(auto_class, type) and not auto_class.__module__.startswith("transformers."):
        return nullcontext()
    what = f"{_of_config(config)} to build a model"
    if config.name_or_path:
        return library_errors(what, _CURE)
    return library_errors(what, "Correct the configuration.", ConfigError)


def _check_config_is_there(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(
            f"No such folder: {str(path)!r}. Give an existing local folder, a config.json, or a hub name."
        )
    if path.is_dir() and not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{str(path)!r} holds an adapter alone. Give the folder of its base, or one that `--merge_adapters` or "
                "PEFT's `merge_and_unload` has made."
            )
        names = sorted(entry.name for entry in path.iterdir())
        cure = "Give a folder that `save_pretrained` wrote, a hub name, or the path of a config.json."
        cure = OF_GGUF if any(name.endswith(".gguf") for name in names) else cure
        raise CheckpointError(f"No config.json in {str(path)!r} (found: {listed(names, 8) or 'nothing'}). {cure}")


def _fetch_config(name: str, hub_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Fetch the configuration of a hub name into the cache; return arguments with which transformers finds it there.

    Without this, transformers asks a hub that does not answer for more than a minute.
    """
    keys = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
    options = {key: hub_kwargs[key] for key in keys if key in hub_kwargs}
    own_code = bool(hub_kwargs.get("trust_remote_code"))
    folder, pinned = fetch(name, "config.json", "generation_config.json", *(["*.py"] if own_code else []), **options)
    if not (folder / "config.json").is_file():
        where = f", folder {options['subfolder']!r}" if options.get("subfolder") else ""
        cure = OF_GGUF if "gguf" in name.lower() else "Give the name of a transformers model, or its subfolder."
        raise CheckpointError(f"No config.json in {name!r}{where} (commit {pinned['revision']}). {cure}")
    _check_config_file(folder / "config.json")
    # Remote code may come from another repository, so only without it is everything in the cache.
    return hub_kwargs | pinned | {"local_files_only": not own_code or pinned["local_files_only"]}


def kept_in_fp32(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield the parameters and buffers of a model of transformers that it computes with in fp32, asked for `dtype`.

    The names are those of the model without adapters: a pattern of transformers (`base` is one) may mean PEFT's own.
    """
    plan: Any = getattr(model, "_get_dtype_plan", None)
    patterns = [pattern.replace("*", ".*") for pattern in (plan(dtype) if plan is not None else ())]
    kept = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))  # searched anywhere in a name
    for name, module in model.named_modules() if patterns else ():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            fqn = plain_name(f"{name}.{key}" if name else key, adapters=True).removeprefix("base_model.model.")
            if tensor is not None and tensor.is_floating_point() and kept.search(fqn):
                yield module, key, tensor
