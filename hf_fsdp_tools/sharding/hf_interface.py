"""Make sharded models look right to transformers and to scripts: class names, marks, methods and `use_cache`."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from tempfile import mkdtemp
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.distributed.shards import as_dtensor, cut, part_of
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError
from hf_fsdp_tools.modeling.module_tree import original_classes, own_class
from hf_fsdp_tools.modeling.peft_view import is_adapted
from hf_fsdp_tools.sharding.fsdp2_internals import forward_begun, reshard_units
from hf_fsdp_tools.text import listed


def mark_for_transformers(model: nn.Module) -> None:
    """Give a model with all its units the class names, mark and methods that transformers looks at.

    - FSDP2's classes (`FSDPLlamaForCausalLM`) get the names of the classes that they extend. By class name the Trainer
      decides whether to shift labels under label smoothing, and writes model cards.
    - With transformers' own mark, `generate` goes on until every rank has finished, and layer drop runs every layer.
    - Methods that need whole weights work on shards (`answer_for_shards`).
    - `generate` runs encoders, of images or of text, before the model's own forward pass: what no other unit holds is
      gathered for them.
    - `DistributedDataParallel`, in which a plain Trainer or Accelerator wraps it, raises an error that names the cure;
      so does such an Accelerator itself, which in one process would go on without a word.
    """
    for module in model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        if isinstance(module, FSDPModule):
            cls, own = type(module), own_class(module)
            cls.__name__, cls.__qualname__ = own.__name__, own.__qualname__
            # The first thing that DDP asks a model for. Scripts of TRL set it; it means nothing to shards.
            refusing: Any = property(_refuse_ddp, lambda module, names: None)
            cls._ddp_params_and_buffers_to_ignore = refusing  # type: ignore[attr-defined]  # a name of DDP
            if module is model:
                mark: Any = property(_accelerates_mark, _set_accelerates_mark)
                cls._is_accelerate_prepared = mark  # type: ignore[attr-defined]  # a name of Accelerate
                cls.__reduce_ex__ = _refuse_pickle  # type: ignore[assignment]
    if isinstance(model, FSDPModule) and hasattr(model, "generate") and "generate" not in model.__dict__:
        _answer(model, "generate", _generate)
    answer_for_shards(model)


def _generate(model: nn.Module, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer `model.generate(…)` on shards; every rank must call."""
    assert isinstance(model, FSDPModule)
    try:
        with forward_begun(model):
            return plain(*args, **kwargs)
    finally:  # after an error, too
        reshard_units(model)


_CURE = (
    "In a Trainer, put FSDPTrainerMixin before the Trainer: class MyTrainer(FSDPTrainerMixin, Trainer). In a loop, "
    "make the Accelerator with make_accelerator(), after TrainingArguments, which reset it."
)


def _refuse_ddp(module: nn.Module) -> None:
    raise ConfigError(
        f"{type(module).__name__} is sharded and would be wrapped with DistributedDataParallel, which needs whole "
        f"weights. {_CURE}"
    )


def _accelerates_mark(module: nn.Module) -> bool:
    """Whether the model was prepared. Accelerate asks before it prepares a model for anything but FSDP2."""
    if not module.__dict__.get("_is_prepared", False):
        raise ConfigError(
            f"{type(module).__name__} is sharded, and is about to be prepared by a Trainer or an Accelerator that does "
            f"not run FSDP2. {_CURE}"
        )
    return True


def _set_accelerates_mark(module: nn.Module, is_prepared: bool) -> None:
    module.__dict__["_is_prepared"] = is_prepared


def answer_for_shards(model: nn.Module) -> None:
    """Let the methods of a sharded model that need whole weights do what they say, where every rank calls them.

    - `model.save_pretrained(folder)` and `model.push_to_hub(repo_id)` call this package's `save_pretrained`,
      `model.resize_token_embeddings(n)` its `resize_token_embeddings`. The functions are looked up at the front door
      when they are called, so that nothing of reading and saving is imported for sharding. Of PEFT models, too.
    - `model.load_state_dict(plain)` takes each rank's part of whole tensors; nothing is communicated.
    """
    answers: dict[str, Callable[..., Any]] = {
        "save_pretrained": _save_pretrained,
        "push_to_hub": _push_to_hub,
        "resize_token_embeddings": _resize_token_embeddings,
    }
    for name, answer in answers.items():
        if hasattr(type(model), name) and name not in model.__dict__:
            _answer(model, name, answer)
    for module in model.modules():
        hooks: Any = module._load_state_dict_pre_hooks.values()
        if not any(hook.hook is _cut_whole_tensors for hook in hooks):
            module.register_load_state_dict_pre_hook(_cut_whole_tensors)  # type: ignore[no-untyped-call]  # torch's own


def _answer(model: nn.Module, name: str, answer: Callable[..., Any]) -> None:
    """Give a model a method of its own that calls `answer(model, plain, …)`; scripts see the name of the plain one."""
    if not hasattr(type(model), name):
        model = model._orig_mod  # type: ignore[assignment]  # the model in one that torch.compile made
    plain = getattr(type(model), name)

    @wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return answer(self, MethodType(plain, self), *args, **kwargs)

    setattr(model, name, MethodType(method, model))


_IDLE: dict[str, tuple[object, ...]] = {
    "distributed_checkpoint": (False,),
    "path_initial_model_for_weight_conversion": (None,),
    "safe_serialization": (True, None),
    "save_embedding_layers": ("auto",),
    "save_original_format": (True,),
    "save_peft_format": (True,),
    "selected_adapters": (None,),
    "variant": (None,),
}
"""Arguments of `save_pretrained` of transformers (5.23) and PEFT (0.21), and the values that ask for what is done
anyway."""

_NEEDLESS = ("is_main_process", "save_function")
"""Arguments of theirs that are not needed: every rank writes its own bytes, locally."""

_OF_AN_UPLOAD = (
    "repo_id", "private", "token", "commit_message", "commit_description", "revision", "create_pr",
)  # fmt: skip
"""Arguments of theirs that this package's `save_pretrained` has too, for `push_to_hub`."""


def _save_pretrained(
    model: nn.Module, plain: Any, save_directory: Any, *, state_dict: Any = None, **kwargs: Any
) -> Any:
    """Answer `model.save_pretrained(folder, …)` on shards.

    Without a state dict, `save_pretrained` of this package writes the model; every rank must call. With one, gathered
    by `accelerator.get_state_dict`, the plain method writes it: on rank 0, where it is whole, and nothing elsewhere.
    """
    if state_dict is not None:
        if any(isinstance(value, DTensor) for value in state_dict.values()):
            raise ConfigError(
                "model.save_pretrained got a state_dict of shards (DTensor). Leave state_dict out and call it on every "
                "rank, or give accelerator.get_state_dict(model)."
            )
        if not state_dict or not kwargs.get("is_main_process", True):
            return None
        _refuse_other_kind(model, Path(save_directory))
        with original_classes(model), with_cache_as_found(model):
            return plain(save_directory, state_dict=state_dict, **kwargs)
    passed = {name: kwargs.pop(name) for name in ("max_shard_size", "blocking", *_OF_AN_UPLOAD) if name in kwargs}
    if kwargs.pop("push_to_hub", False):
        passed["push_to_hub"] = True
    else:
        passed.pop("token", None)  # transformers takes it, to ask nobody
    asked = [f"{name}={value!r}" for name, value in kwargs.items() if value not in _IDLE.get(name, (value,))]
    asked += [f"{name}={value!r}" for name, value in kwargs.items() if name not in (*_IDLE, *_NEEDLESS)]
    if asked:
        raise ConfigError(
            f"model.save_pretrained cannot honour {', '.join(asked)} on shards. Leave that out; to change what is "
            "saved, save first, then open the folder with plain transformers or PEFT."
        )
    import hf_fsdp_tools

    save: Any = hf_fsdp_tools.save_pretrained
    return save(model, save_directory, **passed)


def _refuse_other_kind(model: nn.Module, folder: Path) -> None:
    """Refuse a folder with files of another kind of model, which would be opened with what plain methods write."""
    others = ("config.json",) if is_adapted(model) else ("adapter_config.json", "adapter_model.safetensors")
    if found := [name for name in others if (folder / name).is_file()]:
        raise ConfigError(
            f"{str(folder)!r} holds another kind of model, whose {listed(found)} would be opened with what is saved "
            "there. Leave state_dict out and call it on every rank, which puts them aside, or give another folder."
        )


def _refuse_pickle(module: nn.Module, protocol: Any) -> Any:
    """Answer `torch.save(model)`, which pickles by protocol 2; copies use a later one."""
    if int(protocol) == 2:
        raise ConfigError(
            f"torch.save would pickle this rank's shards of {type(module).__name__}, which no other process could "
            "open. Call save_pretrained(model, folder) on every rank."
        )
    return object.__reduce_ex__(module, protocol)


def _push_to_hub(
    model: nn.Module,
    plain: Any,
    repo_id: str,
    *,
    max_shard_size: int | str | None = None,
    tags: Sequence[str] | str | None = None,
    **upload: Any,
) -> str:
    """Answer `model.push_to_hub(repo_id, …)` on shards: the page of the commit. Every rank must call.

    The model is saved to a temporary folder of rank 0, which all ranks must see. Where the upload fails, the folder is
    kept, and the error names it.
    """
    import hf_fsdp_tools

    if tags is not None:
        model.add_model_tags(tags)  # type: ignore[operator]  # transformers' own
    folder = ""
    with agreed("making a temporary folder"):
        if not upload.get("blocking", True):
            raise ConfigError(
                "push_to_hub(blocking=False) would remove its temporary folder while that is written. Use "
                "save_pretrained(folder, push_to_hub=True, blocking=False), with a folder that stays."
            )
        if rank_and_size()[0] == 0:
            folder = mkdtemp(prefix="push_to_hub-")
    folder = all_ranks(folder, "making a temporary folder")[0]
    size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    try:
        save: Any = hf_fsdp_tools.save_pretrained
        url: str = save(model, folder, push_to_hub=True, repo_id=repo_id, **size, **upload).commit_url
    except FSDPToolsError:
        if rank_and_size()[0] == 0:
            with suppress(OSError):  # it holds the model, and was not uploaded
                os.rmdir(folder)
        raise
    if rank_and_size()[0] == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return url


def _resize_token_embeddings(
    model: nn.Module,
    plain: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Answer `model.resize_token_embeddings(n)` on shards; every rank must call."""
    import hf_fsdp_tools

    resize: Any = hf_fsdp_tools.resize_token_embeddings
    resized: nn.Module = resize(
        model, new_num_tokens, pad_to_multiple_of=pad_to_multiple_of, mean_resizing=mean_resizing
    )
    return resized


def _cut_whole_tensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *others: Any
) -> None:
    """Put this rank's part in the place of each whole tensor that is to be loaded into a shard of a module's own.

    Parts are views of the whole tensors, on their devices, and torch copies them into the shards. With `assign=True`
    they become the shards: new memory on the device of the old ones. A tensor of another shape stays as it is, for
    torch's error.
    """
    reshard_units(module)  # FSDP2's own hook does so too late, after this one
    is_kept = local_metadata.get("assign_to_params_buffers", False)
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if (
            isinstance(parameter, DTensor)
            and isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
            and value.shape == parameter.shape
        ):
            whole = value.detach()
            state_dict[prefix + name] = (
                cut(whole, parameter) if is_kept else as_dtensor(part_of(whole, parameter), parameter)
            )


def turn_cache_off(model: nn.Module) -> None:
    """Turn off the cache of keys and values of a model that is trained.

    `generate` asks for its own cache, and saving writes the value that was set before (`with_cache_as_found`).
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
        model._cache_is_off = True  # type: ignore[assignment]  # a plain attribute of our own


@contextmanager
def with_cache_as_found(model: nn.Module) -> Iterator[None]:
    """Undo `turn_cache_off` in the config for a block that writes the config to a checkpoint."""
    if not model.__dict__.get("_cache_is_off", False):
        yield
        return
    config: Any = model.config
    config.use_cache = True
    try:
        yield
    finally:
        config.use_cache = False
