"""Let PEFT make adapters on shards: for this package's `add_adapter` and `load_adapter` alone.

PEFT asks nobody before it computes with the weights of the base. On shards some of its methods then stop half-way, and
some end the process: they put a DTensor into the memory of a plain parameter (`parameter.data = …`), which has none.
So `get_peft_model` on a sharded model is an error that says what to call.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from hf_fsdp_tools.distributed.shards import Held, as_dtensor, cut_whole
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError
from hf_fsdp_tools.modeling.module_tree import replaced, swap
from hf_fsdp_tools.modeling.packed import listed_as_parameters, require_floats, with_added
from hf_fsdp_tools.modeling.packed_weight import Factors
from hf_fsdp_tools.sharding.allocate import renew, with_data
from hf_fsdp_tools.sharding.fsdp2_internals import forward_begun, managed_parameters
from hf_fsdp_tools.sharding.hf_interface import override_method
from hf_fsdp_tools.sharding.sharding import Sharded
from hf_fsdp_tools.text import first_lines

_PLAIN = "Make the adapter on the plain model (get_peft_model), and let prepare() shard the whole."

_NEEDS_BASE = ("corda", "eva", "loftq", "lora_ga", "mica", "olora", "pissa")
"""Values of LoRA's `init_lora_weights` that need whole weights of the base (PEFT 0.21); all but EVA change them too."""

_DECOMPOSE = ("DEFT", "FROD")
"""Methods that make adapters of whole weights of the base (measured: PEFT 0.21)."""

_BESIDE_FORWARD = ("ADALORA", "SHADOW")
"""Methods that use weights outside of the forward passes of their modules (measured: PEFT 0.21)."""

_OF_SHARDS = ("DTensor", "sharding strategy", "size mismatch", "size of tensor", "shape", "can require gradients")
"""Words in torch's errors about whole tensors and shards in one operation, and about bytes."""


def add_in_passes(model: nn.Module) -> None:
    """Let PEFT's wrappers of parameters hand what they add to weights that take it; to others as before."""
    from peft.tuners.lora.layer import ParamWrapper

    for wrapper in model.modules():
        if isinstance(wrapper, ParamWrapper) and "_activate_lora" not in vars(wrapper):
            override_method(wrapper, "_activate_lora", _activate)


@contextmanager
def _activate(wrapper: Any, plain: Any, active: list[str]) -> Iterator[None]:
    added = partial(_factors, wrapper, active)
    with with_added(wrapper.get_base_layer(), wrapper.parameter_name, added, partial(plain, active)):
        yield


def _factors(wrapper: Any, active: list[str]) -> list[Factors]:
    """What PEFT's active adapters of a parameter add to it."""
    a, b, scaling = wrapper.lora_A, wrapper.lora_B, wrapper.scaling
    names = [adapter for adapter in active if adapter in a]
    if wrapper.num_experts == 1:  # PEFT has factors of stacks alone
        return [(b[each].weight[None], a[each].weight[None], scaling[each]) for each in names]
    return [wrapper.get_delta_factors(each) for each in names]


@cache
def refuse_other_injection() -> None:
    """From now on, let PEFT say what to call where it is given a sharded model by others, in this process. Nothing is
    replaced: torch asks before a module becomes part of another, as a model of PEFT's."""
    nn.modules.module.register_module_module_registration_hook(_refuse_other)


def _refuse_other(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    if name not in ("model", "base_model") or module is None or name in owner._modules:
        return
    if not any(cls.__module__.startswith("peft.") for cls in type(owner).__mro__):
        return
    sharded = [each for each in module.modules() if Sharded.of(each).sharding is not None]
    if any(not Sharded.of(each).takes_adapter for each in sharded):
        raise ConfigError(
            f"PEFT (get_peft_model, PeftModel.from_pretrained) is given a {type(sharded[0]).__name__} that is sharded. "
            "On every rank, give peft_config= to from_pretrained or to a trainer with FSDPTrainerMixin, or call "
            "hf_fsdp_tools.add_adapter(model, config), hf_fsdp_tools.load_adapter(model, folder)."
        )


def _cut_values(root: nn.Module, values: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut whole values of parameters that are sharded: PEFT before 0.21.2 copies them as they are."""
    cut_whole(values, ((prefix + name, parameter) for name, parameter in root.named_parameters()))


def _sum_partial(root: nn.Module) -> None:
    """Make whole what DoRA made of shards: norms over the dimension that is split, which PEFT cannot load into."""
    added = [each for each in root.parameters() if isinstance(each, DTensor)]
    sums = [each for each in added if any(place.is_partial() for place in each.placements)]
    swap(root, {each: with_data(each, each.full_tensor()) for each in sums})


@contextmanager
def names_as_saved() -> Iterator[None]:
    """A block in which PEFT reads an adapter whose names are the model's by these names.

    PEFT (0.21) takes them for names of the base's checkpoint, renames them, and drops what then fits nothing: the
    adapters of shared experts of Laguna, whose checkpoint has `mlp.shared_expert`. Norms of DoRA are made whole before.
    """
    from peft.utils import transformers_weight_conversion as conversion

    convert = conversion.convert_peft_adapter_state_dict_for_transformers

    def converted(model: Any, peft_config: Any, adapter_state_dict: Any, adapter_name: str = "default") -> Any:
        _sum_partial(model)
        names = {f"{n}.".replace(f".{adapter_name}.", ".").removesuffix(".") for n, _ in model.named_parameters()}
        if all(key in names for key in adapter_state_dict if ".lora_" in key):
            return adapter_state_dict
        return convert(model, peft_config, adapter_state_dict, adapter_name)

    with replaced(conversion, convert_peft_adapter_state_dict_for_transformers=converted):
        yield


@contextmanager
def guarded(model: nn.Module, config: Any) -> Iterator[None]:
    """A block in which PEFT makes an adapter of a model, sharded or not, and may load its values."""
    root = next((module for module in model.modules() if Sharded.of(module).sharding), None)
    refuse_for_shards(config, root or model, Sharded.of(root or model).sharding)
    if root is None:
        with errors_of_peft(config):
            yield
        return
    # Prompts that begin as words run the embedding, which FSDP2 would take for the root.
    around = forward_begun(root) if config.is_prompt_learning else _one_axis(root)
    cut = root.register_load_state_dict_pre_hook(_cut_values)  # type: ignore[no-untyped-call]  # torch's
    Sharded.put(root, takes_adapter=True)
    try:  # DoRA: whole adapters and shards together
        with errors_of_peft(config), around, cut, listed_as_parameters(root), implicit_replication():
            yield
            _sum_partial(root)
            add_in_passes(root)
    finally:
        Sharded.put(root, takes_adapter=False)


def refuse_for_any(config: Any) -> None:
    """Refuse methods of PEFT that train with no kind of shards."""
    if _kind(config) in _BESIDE_FORWARD:
        raise ConfigError(
            f"{_kind(config)} computes with weights outside the forward passes of their modules, when no rank has them "
            "whole. Use LoraConfig, with rank_pattern where modules are to have other ranks."
        )


def refuse_for_shards(config: Any, model: nn.Module, sharding: Any) -> None:
    """Refuse an adapter that cannot be made on a model that is sharded so."""
    refuse_for_any(config)
    if getattr(config, "use_dora", False):
        require_floats(
            model,
            "DoRA takes norms over whole rows of the base, and a shard of quantised weights holds bytes. Use "
            "use_dora=False, or load the base without quantization_config and dequantize=False.",
        )
        if sharding is not None and sharding.axes.dims.tp_size > 1:
            raise ConfigError(
                "DoRA takes norms over whole rows of the base, which ranks share here (tp_size). Use use_dora=False."
            )
    whole = tuple(getattr(config, "modules_to_save", None) or ())
    require_floats(
        model,
        "modules_to_save would train {}, which are quantised as stored. Leave them out, or load the base without "
        "dequantize=False.",
        among=lambda fqn: any(name.endswith(whole) for name in accumulate(fqn.split(".")[:-1], "{}.{}".format)),
    )
    start = getattr(config, "init_lora_weights", None)
    needs = {
        f"init_lora_weights={start!r}": isinstance(start, str) and start.lower().startswith(_NEEDS_BASE),
        _kind(config): _kind(config) in _DECOMPOSE,
        "layer_replication": bool(getattr(config, "layer_replication", None)),
    }
    names = [name for name, is_needed in needs.items() if is_needed]
    if names and not (sharding and sharding.is_whole):
        raise ConfigError(f"{names[0]} needs whole weights of the base, and no rank has them. {_PLAIN}")


def changes_base(config: Any) -> bool:
    """Whether making this adapter may have changed weights of its base, so that the base's files do not hold them."""
    start = getattr(config, "init_lora_weights", None)
    is_start = isinstance(start, str) and start.lower().startswith(_NEEDS_BASE) and start.lower() != "eva"
    return is_start or _kind(config) in _DECOMPOSE


def _kind(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


@contextmanager
def errors_of_peft(config: Any) -> Iterator[None]:
    """Translate errors of PEFT, while it makes an adapter, to a `ConfigError`.

    Errors of the device and of communication pass unchanged; of plain `RuntimeError`s only those that speak of shards
    or shapes are PEFT's.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError, FSDPToolsError):
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"PEFT cannot make this {_kind(config)} adapter: {first_lines(error)}.") from None
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError) as error:
        if type(error) is RuntimeError and not any(word in str(error) for word in _OF_SHARDS):
            raise  # the others are how methods of PEFT meet layers that they do not know; what they say is passed on
        cure = "Load the base that it was trained on." if "size mismatch" in str(error) else _PLAIN
        if rows := re.search(r"(?:embed|lm_head|wte)\S*: copying a param with shape torch.Size\(\[(\d+), ", str(error)):
            cure = f"It was trained on a base with {rows[1]} tokens: give that, or num_tokens={rows[1]} with this one."
        raise ConfigError(
            f"PEFT cannot make a {_kind(config)} adapter on this model ({first_lines(error)}). {cure}"
        ) from error


@contextmanager
def _one_axis(model: nn.Module) -> Iterator[None]:
    """Show the shards on a nameless mesh of one axis for a block: of others, PEFT assumes tensor parallelism."""
    shards = managed_parameters(model)
    mesh: Any = shards[0].device_mesh if shards else None  # type: ignore[attr-defined]  # a DTensor
    if mesh is None or mesh.mesh_dim_names is None:
        yield
        return
    axis = DeviceMesh.from_group(mesh.get_group(mesh.ndim - 1), mesh.device_type)
    views: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in shards:
        shard = parameter.detach()
        assert isinstance(shard, DTensor)
        view = as_dtensor(Held.of(shard).memory, axis, shard.placements[-1:], shard)
        views[parameter] = with_data(parameter, view)
        # one axis cannot say how a divided layer's shards lie: what PEFT copies (`modules_to_save`) is the shard itself
        views[parameter].__deepcopy__ = partial(deepcopy, parameter)  # type: ignore[method-assign]
    swap(model, views)
    try:
        yield
    finally:
        for parameter, shown in views.items():
            parameter.requires_grad_(shown.requires_grad)
        swap(model, {shown: parameter for parameter, shown in views.items()})
        renew(model)
