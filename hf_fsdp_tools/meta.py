"""A model with shapes and no storage; later the storage of one rank's share, and the values that live in no file."""

import copy
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.host_memory import empty_on_host
from hf_fsdp_tools.hub import HubRepository, is_hub_name
from hf_fsdp_tools.quantization import make_quantizer, mark_weights, pack_weights, replace_linears

__all__ = [
    "allocate",
    "build_meta_model",
    "config_dtype",
    "draw_values",
    "initialize_missing",
    "load_config",
    "original_classes",
]


def load_config(name_or_config: str | PathLike[str] | PreTrainedConfig, **hub_kwargs: Any) -> PreTrainedConfig:
    """The configuration of a hub name, a local folder, or a `config.json`; a copy of one that is given.

    Args:
        name_or_config: what to open.
        hub_kwargs: passed to `AutoConfig.from_pretrained` (`revision`, `token`, `trust_remote_code`, `local_files_only`, …).

    Raises:
        CheckpointError: there is no such folder, no `config.json` in it, or the hub does not give it.
        ConfigError: the configuration is not JSON, or its `model_type` is unknown to the installed transformers.
    """
    if isinstance(name_or_config, PreTrainedConfig):
        return copy.deepcopy(name_or_config)
    name = fspath(name_or_config)
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"No config.json in {name!r} (found: {found}). Give a folder that `save_pretrained` wrote, "
            "a hub name, or the path of a config.json."
        )
    if not path.exists():
        if not is_hub_name(name):
            raise CheckpointError(
                f"No such folder: {name!r}. Give an existing local folder, a config.json, or a hub name."
            )
        hub_kwargs = _fetch_config(name, **hub_kwargs)
        commit = hub_kwargs["revision"]
    else:
        commit = None
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, **hub_kwargs)
    except ValueError as error:
        raise ConfigError(f"The configuration of {name!r} cannot be used: {_first_line(error)}") from error
    except OSError as error:
        raise CheckpointError(f"The configuration in {name!r} cannot be read: {_first_line(error)}") from error
    config._commit_hash = commit  # older versions of transformers set it; never written to a file
    return config


def config_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """The floating-point dtype that a configuration names for its weights, the text model's if only that has one."""
    for part in (config, config.get_text_config()):
        dtype = getattr(part, "dtype", None)
        dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            return dtype
    return None


def build_meta_model(
    name_or_config: str | PathLike[str] | PreTrainedConfig,
    *,
    auto_class: Any = AutoModelForCausalLM,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    **model_kwargs: Any,
) -> PreTrainedModel:
    """Build a model whose parameters and buffers have shapes and dtypes but no storage, whatever its size.

    It is built as `from_pretrained` builds it before it reads a file: same class, same dtypes (also the modules that
    transformers keeps in fp32), weights tied where the config ties them, in evaluation mode.

    Args:
        name_or_config: a hub name, a local folder, the path of a `config.json`, or a `PreTrainedConfig` (copied).
        auto_class: the `AutoModelFor…` class, or a model class itself.
        dtype: of the floating-point parameters; None means the dtype that the config names, or float32 if it names none.
        trust_remote_code: run model code that comes with the checkpoint.
        model_kwargs: as in `from_pretrained`: what the config has is set there (`num_labels`, …), the rest goes to the model
            (`attn_implementation`, …). `quantization_config=BitsAndBytesConfig(load_in_4bit=True, …)` makes linear layers
            4-bit layers of bitsandbytes, with weights of the packed shape.

    No rank communicates; every rank may call.

    Raises:
        CheckpointError: the configuration cannot be found.
        ConfigError: the architecture is unknown, `auto_class` has no model for it, a keyword fits nothing, or a quantisation
            that cannot be sharded.
    """
    config = load_config(name_or_config, trust_remote_code=trust_remote_code)
    quantizer = make_quantizer(config, model_kwargs)
    dtype = dtype or config_dtype(config) or torch.float32
    for name in [name for name in model_kwargs if hasattr(config, name) and not name.endswith("_implementation")]:
        setattr(config, name, model_kwargs.pop(name))
    is_model_class = isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel)
    try:
        # linspace stays real: code that calls .item() while a model is built would fail on meta tensors.
        with torch.device("meta"), init.meta_device_safe_creation_ops():
            if is_model_class:
                model = auto_class._from_config(config, dtype=dtype, **model_kwargs)
            else:
                model = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **model_kwargs)
    except TypeError as error:
        if not model_kwargs:
            raise
        raise ConfigError(
            f"{', '.join(model_kwargs)} fit neither the config nor the model: {_first_line(error)}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{getattr(auto_class, '__name__', auto_class)} has no model for {type(config).__name__}: {_first_line(error)} "
            "Choose another auto_class (AutoModel always has the base model)."
        ) from error
    if quantizer is not None:
        replace_linears(model, quantizer, dtype)
    _keep_in_fp32(model, dtype)
    if quantizer is not None:
        pack_weights(model, quantizer)
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def allocate(model: nn.Module, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Give every tensor of a meta model uninitialised storage on `device`, in place: of a DTensor only this rank's shard.

    Tied parameters stay one parameter and FSDP2 is told of the new ones. Tensors that have storage stay as they are.

    Args:
        model: plain, or sharded by `fully_shard` while on meta.
        device: where the storage of shards goes: the CPU for a CPU-offloaded FSDP2 model. Buffers and whole parameters of a
            sharded model go to the mesh's device.
        dtype: what floating-point parameters become; None keeps each one's own. Buffers always keep their own.

    No rank communicates.
    """
    replaced = _allocated(model, device, dtype)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = replaced[tensor]  # type: ignore[assignment]  # a Parameter for a Parameter
    # FSDP2 keeps its own reference to each shard and renews it in `_apply`; a function that changes nothing is enough.
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # torch's own
    mark_weights(model)


def initialize_missing(model: nn.Module, *, missing_keys: Collection[str], seed: int = 0) -> None:
    """Fill what no checkpoint holds: missing parameters and persistent buffers, and every non-persistent buffer.

    The model's own `_init_weights` (or `reset_parameters` of a plain module) makes the values. Each module's are drawn
    from a generator seeded by `seed` and the module's name, whole and on the CPU, and then cut to the shard, so they do
    not depend on the number of ranks, on their order, or on what else is missing. One module's missing tensors are whole
    on the host at a time.

    Args:
        model: allocated; sharded or not.
        missing_keys: names as in `state_dict()`; all other parameters and buffers are left as they are.
        seed: of the whole model.

    No rank communicates.

    Raises:
        CheckpointError: a missing tensor or non-persistent buffer that the model's own code does not initialise.
    """
    missing = set(missing_keys)
    _mark_initialized(model, except_for=missing)
    untouched: list[str] = []
    with original_classes(model):
        for path in _module_paths(model):
            name, module = path[-1]
            wanted = {key: tensor for key, tensor in _own_tensors(module) if _is_wanted(module, name, key, missing)}
            if wanted:
                _refuse_adapters(path, wanted)
                untouched += _initialize_module(path, wanted, seed ^ zlib.crc32(name.encode()))
    if untouched:
        raise CheckpointError(
            f"In no checkpoint file, and not initialised by the model's own code: {', '.join(untouched)}. "
            "Initialise them in the model's `_init_weights`, or register the buffers as persistent and save them."
        )


def draw_values(model: nn.Module, shapes: Mapping[str, Sequence[int]], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the model's own initialisation makes of some of its tensors if they had other shapes: rows for added tokens.

    Drawn per module on the CPU, as `initialize_missing` does, in the dtypes of the model. The model is not changed.

    Args:
        model: sharded or not.
        shapes: state-dict key to shape.
        seed: of the whole model.

    No rank communicates; the values are the same on all.

    Raises:
        CheckpointError: the model's own code does not initialise one of them.
    """
    _mark_initialized(model, except_for=set())
    drawn: dict[str, torch.Tensor] = {}
    with original_classes(model):
        for path in _module_paths(model):
            name, module = path[-1]
            own = {key: f"{name}.{key}" if name else key for key, _ in _own_tensors(module)}
            wanted = {key: shapes[fqn] for key, fqn in own.items() if fqn in shapes}
            if wanted:
                with _without_padding(module):
                    made = _draw(path, wanted, seed ^ zlib.crc32(name.encode()))
                drawn |= {own[key]: value for key, value in made.items()}
    if untouched := sorted(shapes.keys() - drawn.keys()):
        raise CheckpointError(f"Not initialised by the model's own code: {', '.join(untouched)}.")
    return drawn


@contextmanager
def _without_padding(module: nn.Module) -> Iterator[None]:
    """An embedding without its padding row, which is an index of its own shape and of no other."""
    padding = getattr(module, "padding_idx", None)
    if padding is None:
        yield
        return
    module.padding_idx = None  # type: ignore[assignment]  # as nn.Embedding has it
    try:
        yield
    finally:
        module.padding_idx = padding


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """The modules of a model under their own classes for a while: FSDP2 gives each of its modules a class of its own, and
    transformers takes a class from another module for a user's code."""
    renamed = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, cls in renamed:
            module.__class__ = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        yield
    finally:
        for module, cls in renamed:
            module.__class__ = cls


# ---- building ----


def _fetch_config(name: str, **hub_kwargs: Any) -> dict[str, Any]:
    """The arguments with which transformers finds the configuration of a hub name in the cache, where it is put first:
    left to itself, transformers asks a hub that does not answer for more than a minute."""
    fetched = {
        key: hub_kwargs[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in hub_kwargs
    }
    folder = f"{hub_kwargs['subfolder']}/" if hub_kwargs.get("subfolder") else ""
    own_code = bool(hub_kwargs.get("trust_remote_code"))
    files = [f"{folder}config.json", f"{folder}generation_config.json", *(["*.py"] if own_code else [])]
    snapshot = HubRepository.open(name, **fetched).fetch(*files)
    if not (snapshot / files[0]).is_file():
        raise CheckpointError(
            f"No {files[0]} in {name!r} (commit {snapshot.name}). Give the name of a transformers model, or its subfolder."
        )
    # Code may come from yet another repository, so only without it is everything there.
    return hub_kwargs | {
        "revision": snapshot.name,
        "local_files_only": not own_code or hub_kwargs.get("local_files_only"),
    }


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """transformers loads some modules in fp32 whatever dtype is asked for; the meta model says so already."""
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    if not patterns:
        return
    kept = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))  # searched anywhere, as transformers does
    for name, module in model.named_modules():
        for key, tensor in _own_tensors(module):
            if kept.search(f"{name}.{key}" if name else key) and tensor.is_floating_point():
                if key in module._parameters:
                    tensor.data = tensor.data.to(torch.float32)
                elif key not in module._non_persistent_buffers_set:
                    module._buffers[key] = tensor.to(torch.float32)


def _first_line(error: BaseException) -> str:
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line if line.endswith((".", "!", "?")) else f"{line}."


# ---- storage ----


def _allocated(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> dict[torch.Tensor, torch.Tensor]:
    """What takes the place of each tensor on meta; tied ones are one tensor."""
    found = dict.fromkeys(t for m in model.modules() for _, t in _own_tensors(m) if t.is_meta)
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    # CPU offload is for shards alone: what every rank holds whole is used where the mesh is.
    whole_on = torch.device(mesh.device_type) if mesh is not None else device
    homes = [device if isinstance(tensor, DTensor) else whole_on for tensor in found]
    wanted = [(_local_shape(tensor), _storage_dtype(tensor, dtype)) for tensor in found]
    on_host = iter(empty_on_host([want for want, home in zip(wanted, homes, strict=True) if home.type == "cpu"]))
    return {
        tensor: _with_storage(
            tensor, next(on_host) if home.type == "cpu" else torch.empty(shape, dtype=kind, device=home)
        )
        for tensor, (shape, kind), home in zip(found, wanted, homes, strict=True)
    }


def _local_shape(tensor: torch.Tensor) -> torch.Size:
    return tensor.to_local().shape if isinstance(tensor, DTensor) else tensor.shape


def _storage_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Buffers keep their own dtype, and so do parameters that are no floating-point numbers."""
    chosen = dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    return dtype if chosen and dtype is not None else tensor.dtype


def _with_storage(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The same parameter or buffer with `local` as its memory on this rank."""
    data = local
    if isinstance(tensor, DTensor):
        data = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    elif not tensor.is_contiguous():
        data = torch.empty_like(tensor, dtype=local.dtype, device=local.device)  # another order of its dimensions
    if not isinstance(tensor, nn.Parameter):
        return data
    allocated = nn.Parameter(data, requires_grad=tensor.requires_grad)
    allocated.__dict__.update(tensor.__dict__)  # attributes that model code hangs on its parameters
    for hook in (tensor._post_accumulate_grad_hooks or {}).values():  # set while on meta, by shard_model
        allocated.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's own
    return allocated


# ---- values that live in no file ----

ModulePath = tuple[tuple[str, nn.Module], ...]
"""A module and its ancestors, root first, each with its fqn."""


def _refuse_adapters(path: ModulePath, wanted: Collection[str]) -> None:
    """PEFT draws adapter weights when it adds an adapter; the model's own initialiser would make other values of them."""
    if any(hasattr(module, "adapter_layer_names") for _, module in path[:-1]):
        names = ", ".join(f"{path[-1][0]}.{key}" for key in wanted)
        raise CheckpointError(
            f"Adapter weights on meta, which no checkpoint fills: {names}. Add the adapter to a model with real weights and "
            "let prepare() shard it."
        )


def _module_paths(model: nn.Module) -> Iterator[ModulePath]:
    """Every module once, children before parents, as transformers initialises them."""
    seen: set[nn.Module] = set()

    def walk(path: ModulePath) -> Iterator[ModulePath]:
        name, module = path[-1]
        seen.add(module)
        for child_name, child in module.named_children():
            if child not in seen:
                yield from walk((*path, (f"{name}.{child_name}" if name else child_name, child)))
        yield path

    return walk((("", model),))


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    own = [*module._parameters.items(), *module._buffers.items()]
    return [(key, tensor) for key, tensor in own if tensor is not None]


def _is_wanted(module: nn.Module, name: str, key: str, missing: set[str]) -> bool:
    return key in module._non_persistent_buffers_set or (f"{name}.{key}" if name else key) in missing


def _mark_initialized(model: nn.Module, *, except_for: set[str]) -> None:
    """transformers' initialisers leave a tensor with this mark alone."""
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor._is_hf_initialized = key not in except_for  # type: ignore[attr-defined]  # transformers' own mark


def _initialize_module(path: ModulePath, wanted: dict[str, torch.Tensor], seed: int) -> list[str]:
    """Initialise the `wanted` tensors of the last module of `path`; return the names of those that nobody wrote."""
    name = path[-1][0]
    made = _draw(path, {key: tensor.shape for key, tensor in wanted.items()}, seed)
    for key, tensor in wanted.items():
        if key in made:
            _copy_into(tensor, made[key])
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own mark
    return [f"{name}.{key}" if name else key for key in wanted if key not in made]


def _draw(path: ModulePath, shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, torch.Tensor]:
    """What the model's own initialisers make of tensors of these shapes in the last module of `path`, on the CPU; those that
    nobody wrote are left out. The module keeps its own tensors."""
    module = path[-1][1]
    stores: dict[str, dict[str, Any]] = {
        key: module._parameters if key in module._parameters else module._buffers for key in shapes
    }
    own = {key: stores[key][key] for key in shapes}
    whole = {key: _zeros_on_cpu(own[key], shape) for key, shape in shapes.items()}
    versions = {key: tensor._version for key, tensor in whole.items()}
    for key, tensor in whole.items():
        stores[key][key] = tensor
    try:
        with torch.random.fork_rng(devices=()), torch.no_grad(), init.guard_torch_init_functions():
            torch.default_generator.manual_seed(seed)  # that of GPUs is not restored, and not needed
            for initialize in _initializers(path):
                initialize()
        made = {key: stores[key][key] for key in shapes}  # a module may have set a new tensor in its place
    finally:
        for key, tensor in own.items():
            stores[key][key] = tensor
    return {key: t for key, t in made.items() if t is not whole[key] or t._version != versions[key]}


def _initializers(path: ModulePath) -> Iterator[Callable[[], object]]:
    """What initialises the last module of a path: its own initialiser, then those of its ancestors that reach into it."""
    for depth in range(len(path), 0, -1):
        module = path[depth - 1][1]
        owners = [ancestor for _, ancestor in path[:depth] if isinstance(ancestor, PreTrainedModel)]
        if not owners:
            if depth == len(path) and callable(reset := getattr(module, "reset_parameters", None)):
                yield reset
        elif depth == len(path) or not owners[-1].is_custom_code():
            # Code outside transformers may write tensors without looking at the mark, so it sees no other module.
            yield partial(owners[-1]._init_weights, module)


def _zeros_on_cpu(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    zeros = torch.zeros(tuple(shape), dtype=like.dtype, device="cpu")
    return nn.Parameter(zeros, requires_grad=False) if isinstance(like, nn.Parameter) else zeros


def _copy_into(target: torch.Tensor, whole: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(target, DTensor):
            from torch.distributed.tensor import distribute_tensor

            shard = distribute_tensor(whole.data, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(shard.to_local())
        else:
            target.copy_(whole)
