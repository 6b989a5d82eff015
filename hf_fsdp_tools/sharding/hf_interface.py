"""Make sharded models look right to transformers and to scripts: class names, marks, methods and `use_cache`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from importlib import import_module
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from hf_fsdp_tools.accelerator import free_bytes
from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.distributed.shards import cut_whole
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.configs import text_config, with_older_keys
from hf_fsdp_tools.modeling.module_tree import original_classes, own_class, replaced
from hf_fsdp_tools.modeling.packed import require_floats
from hf_fsdp_tools.sharding.fsdp2_internals import (
    bytes_gathered,
    forward_begun,
    gather_units,
    keep_gathered,
    reshard_units,
)
from hf_fsdp_tools.sharding.replica_checks import compare_inputs, sync_rng
from hf_fsdp_tools.sharding.sharding import Sharded
from hf_fsdp_tools.text import listed


def mark_for_transformers(model: nn.Module, *, is_whole: bool) -> None:
    """Give a model with all its units the class names, marks and methods that other libraries look at.

    A model that is whole has no units and keeps its classes; it gets the methods alone. Those of FSDP2 do nothing on
    it, so that a script for several ranks runs on one.

    - FSDP2's classes (`FSDPLlamaForCausalLM`) get the names of the classes that they extend, by which the Trainer
      decides whether to shift labels under label smoothing.
    - With transformers' own mark, `generate` goes on until every rank has finished, and layer drop runs every layer.
    - `generate` gathers weights once where they fit. It runs encoders before the model's own forward
      pass: what no other unit holds is gathered for them.
    - A Trainer or Accelerator without FSDP2, which would wrap the model with DDP or train it as it is, gets an error.
    """
    if is_whole:
        names = (name for name in vars(FSDPModule) if not name.startswith("_"))
        model.__dict__.update(dict.fromkeys(names, lambda *args, **kwargs: None))
    for module in () if is_whole else model.modules():
        module._is_fsdp_managed_module = True  # type: ignore[assignment]  # transformers reads it
        if isinstance(module, FSDPModule):
            cls, own = type(module), own_class(module)
            cls.__name__, cls.__qualname__ = own.__name__, own.__qualname__
    if isinstance(model, FSDPModule):
        is_prepared: Any = property(_is_prepared, lambda module, value: Sharded.put(module, is_prepared=value))
        type(model)._is_accelerate_prepared = is_prepared  # type: ignore[attr-defined]  # Accelerate reads it
    if hasattr(model, "generate") and "generate" not in model.__dict__:
        override_method(model, "generate", _generate)
    install_model_methods(model)


def _is_prepared(module: nn.Module) -> bool:
    if not Sharded.of(module).is_prepared:
        raise ConfigError(
            f"{type(module).__name__} is sharded, and a Trainer or an Accelerator that does not run FSDP2 prepares it. "
            "In a Trainer, put FSDPTrainerMixin before the Trainer: class MyTrainer(FSDPTrainerMixin, Trainer). In a "
            "loop, make the Accelerator with make_accelerator(), after TrainingArguments, which reset it."
        )
    return True


def install_model_methods(model: nn.Module) -> None:
    """Let the methods of a sharded model that need whole weights do what they say, where every rank calls them.

    - `model.save_pretrained(folder)` calls this package's `save_pretrained`, `model.resize_token_embeddings(n)` its
      `resize_token_embeddings`; of PEFT models, too. `model.push_to_hub` is refused, with the call that does the same.
    - `model.requires_grad_(True)` is refused where weights are quantised as stored.
    - `model.get_parameter(name)` gives what `named_parameters` does, also while an attribute gives what is gathered.
    - `model.load_state_dict(plain)` takes each rank's part of whole tensors; nothing is communicated.
    - PEFT merges, unmerges and disables adapters of what modules register, and not of what is gathered.
    """
    answers: dict[str, Callable[..., Any]] = {
        "save_pretrained": _save_pretrained,
        "push_to_hub": _push_to_hub,
        "resize_token_embeddings": _resize_token_embeddings,
        "requires_grad_": _requires_grad,
        "get_parameter": _get_parameter,
    }
    for name, answer in answers.items():
        if hasattr(type(model), name) and name not in model.__dict__:
            override_method(model, name, answer)
    for module in model.modules():
        for name, answer in _OF_TUNERS.items() if hasattr(type(module), "merge_adapter") else ():
            if name not in module.__dict__:  # tensor parallelism has its own
                override_method(module, name, answer)
        hooks: Any = module._load_state_dict_pre_hooks.values()
        if not any(hook.hook is _cut_whole_tensors for hook in hooks):
            module.register_load_state_dict_pre_hook(_cut_whole_tensors)  # type: ignore[no-untyped-call]  # torch's own


def _merge(tuner: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    reshard_units(tuner.model)
    return plain(*args, **kwargs)


def _disable(tuner: Any, plain: Any) -> None:
    if any(getattr(module, "merged", False) for module in tuner.model.modules()):
        tuner.unmerge_adapter()  # PEFT would do it in the next pass, to gathered weights
    plain()


_OF_TUNERS = {**dict.fromkeys(("merge_adapter", "unmerge_adapter", "merge_and_unload"), _merge)}
_OF_TUNERS |= {"disable_adapter_layers": _disable}
"""Methods of what PEFT puts around a model, which write to weights."""


def override_method(model: nn.Module, name: str, answer: Callable[..., Any]) -> None:
    """Give a model a method of its own that calls `answer(model, plain, …)`; scripts see the name of the plain one."""
    if not hasattr(type(model), name):
        model = model._orig_mod  # type: ignore[assignment]  # the model in one that torch.compile made
    plain = getattr(type(model), name)

    @wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return answer(self, MethodType(plain, self), *args, **kwargs)

    setattr(model, name, MethodType(method, model))


def _requires_grad(model: nn.Module, plain: Any, requires_grad: bool = True) -> Any:
    """Answer `model.requires_grad_(…)`, which bytes cannot have."""
    if requires_grad:
        fact = "{} cannot be trained while they are quantised as stored."
        require_floats(model, f"{fact} Give from_pretrained a peft_config, or dequantize=True.")
    return plain(requires_grad)


def _get_parameter(model: nn.Module, plain: Any, target: str) -> Any:
    """Answer `model.get_parameter(…)` with what a module registers."""
    owner, _, name = target.rpartition(".")
    found = model.get_submodule(owner)._parameters.get(name)
    return plain(target) if found is None else found


def _public(name: str) -> Any:
    """A public function, looked up when it is called: sharding imports nothing of reading and saving."""
    return getattr(import_module("hf_fsdp_tools"), name)


_NEEDLESS = {"is_main_process", "save_function", "safe_serialization", "push_to_hub", "token"}
"""Arguments of transformers' and PEFT's `save_pretrained` that are left out: every rank writes its own slices, as
safetensors, and a save without an upload needs no token."""

_HONOURED = {
    "max_shard_size", "blocking", "repo_id", "private", "commit_message", "commit_description", "revision", "create_pr",
}  # fmt: skip
"""Arguments of theirs that this package's `save_pretrained` has too."""


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
        with original_classes(model), with_cache_as_found(model), with_older_keys():
            return plain(save_directory, state_dict=state_dict, **kwargs)
    options = {name: value for name, value in kwargs.items() if name in _HONOURED}
    if kwargs.get("push_to_hub"):
        options |= {name: kwargs[name] for name in ("push_to_hub", "token") if name in kwargs}
    refused = [name for name, value in kwargs.items() if value is not None and name not in {*options, *_NEEDLESS}]
    if kwargs.get("safe_serialization") is False:
        refused.append("safe_serialization")
    if refused:
        raise ConfigError(
            f"model.save_pretrained cannot honour {listed(f'{name}={kwargs[name]!r}' for name in refused)} on shards. "
            "Leave that out; to change what is saved, save first, then open the folder with plain transformers or PEFT."
        )
    return _public("save_pretrained")(model, save_directory, **options)


def _push_to_hub(model: nn.Module, plain: Any, repo_id: str = "", *args: Any, **kwargs: Any) -> None:
    """Answer `model.push_to_hub(repo_id)`, which would save to a temporary folder of each rank."""
    raise ConfigError(
        "model.push_to_hub needs a folder that all ranks see. Call model.save_pretrained(folder, push_to_hub=True, "
        f"repo_id={repo_id!r}) on every rank."
    )


def _resize_token_embeddings(
    model: nn.Module,
    plain: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Answer `model.resize_token_embeddings(n)` on shards; every rank must call."""
    resized: nn.Module = _public("resize_token_embeddings")(
        model, new_num_tokens, pad_to_multiple_of=pad_to_multiple_of, mean_resizing=mean_resizing
    )
    return resized


def _cut_whole_tensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *others: Any
) -> None:
    """Put this rank's part in the place of each whole tensor that is to be loaded into a shard of a module's own.

    Parts are views, which torch copies into the shards; with `assign=True` they become the shards, in new memory, and
    what takes the place of a whole parameter is brought to its device. A tensor of another shape stays as it is, for
    torch's error.
    """
    own = {prefix + name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    is_assigned = local_metadata.get("assign_to_params_buffers", False)
    cut_whole(state_dict, own.items(), views=not is_assigned)
    for name in own.keys() & state_dict.keys() if is_assigned else ():
        if not isinstance(own[name], DTensor) and not own[name].is_meta:
            state_dict[name] = state_dict[name].to(own[name].device)


def turn_cache_off(model: nn.Module) -> None:
    """Turn off the cache of keys and values of a model that is trained."""
    configs = _configs(model)
    cached = tuple(i for i, config in enumerate(configs) if getattr(config, "use_cache", False))
    for i in cached:
        configs[i].use_cache = False
    if cached:
        Sharded.put(model, cached=cached)


def _configs(model: Any) -> list[Any]:
    """The configuration of a model, and that of its text, from which blocks take `use_cache`; none of other models."""
    config = getattr(model, "config", None)
    found = (config, text_config(config)) if isinstance(config, PreTrainedConfig) else ()
    return [*{id(each): each for each in found}.values()]


def with_cache_as_found(model: nn.Module) -> AbstractContextManager[None]:
    """Undo `turn_cache_off` in the config for a block that writes the config to a checkpoint."""
    configs = _configs(model)
    return replaced(*(configs[i] for i in Sharded.of(model).cached), use_cache=True)


# ---- weights gathered once for a block, as while text is generated ----

_SHARE = 0.5
"""The share of free memory that gathered weights may take; the rest is for keys, values and activations. (assumed)"""


@contextmanager
def unsharded(model: nn.Module, gathered: bool = True) -> Iterator[None]:
    """A block in which a sharded model keeps all its weights gathered, for any number of `generate` calls in it.

    A single `model.generate(…)` does so by itself where the weights take at most half of the memory that is free on
    every rank, and gathers unit by unit for each token where they do not. This block is for several calls, and to
    decide otherwise. While weights are gathered, forward passes communicate nothing: ranks may generate texts of other
    lengths and numbers, or none. Where ranks share layers, experts or rows, they still run each forward pass together.

    Args:
        model: sharded by this package, also inside PEFT's wrapper; of any other model nothing is done.
        gathered: False: `generate` in this block gathers unit by unit, which takes the memory of one unit.

    The weights are in the dtype of computation, as they are where the block begins: train and step outside of it, and
    run its forward passes without gradients. Every rank must call. Each unit is gathered once, at the beginning; at the
    end everything is sharded again, after an error too.

    Example:
        >>> model = from_pretrained("checkpoint")
        >>> with unsharded(model):
        ...     first = model.generate(torch.tensor([[3, 4]]), max_new_tokens=2)
        ...     second = model.generate(torch.tensor([[5]]), max_new_tokens=4)
        >>> second.shape[0]
        1
    """
    root = next((module for module in model.modules() if Sharded.of(module).sharding), None)
    if root is None:
        yield
        return
    before = Sharded.of(root).gathered
    Sharded.put(root, gathered=gathered)
    try:
        if gathered:
            with _kept(root):
                yield
        else:
            yield
    finally:
        Sharded.put(root, gathered=before)


@contextmanager
def _kept(root: nn.Module) -> Iterator[None]:
    """A block in which the units of a root are gathered, and ranks that share nothing else do not wait for others."""
    marked: list[Any] = []
    if not (Sharded.of(root).sharding.axes.groups):
        marked = [module for module in root.modules() if getattr(module, "_is_fsdp_managed_module", False)]
    # By the mark, `generate` goes on until every rank has finished.
    with replaced(*marked, _is_fsdp_managed_module=False), keep_gathered(root):
        yield


def _generate(model: nn.Module, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer `model.generate(…)` on shards; every rank must call, but within `unsharded`."""
    asked = Sharded.of(model).gathered
    if asked is None:
        with unsharded(model, _fits(model)):
            return _generate(model, plain, *args, **kwargs)
    if asked:
        gather_units(model)  # nothing, unless a save in the block has sharded them
    axes = Sharded.of(model).sharding.axes
    shared = axes.sharing(of_rows=True)
    for mesh in shared:
        compare_inputs((*args, *kwargs.values()), mesh.get_group(), "rows (cp_size, tp_size) and are to generate")
    sync_rng(shared, Sharded.of(model).sharding.device)
    try:
        with forward_begun(model):
            return plain(*args, **kwargs)
    finally:  # after an error, too
        if not asked:
            reshard_units(model)


def _fits(model: nn.Module) -> bool:
    """Whether the weights can be gathered on every rank. Every rank must call."""
    sharding = Sharded.of(model).sharding
    mesh = sharding.mesh
    share = _SHARE / (rank_on_node()[1] if mesh.device_type == "cpu" else 1)
    ranks = None if sharding.is_divided else sorted(mesh.mesh.flatten().tolist())
    return all(all_ranks(bytes_gathered(model) <= share * free_bytes(mesh.device_type), "generating", ranks=ranks))
