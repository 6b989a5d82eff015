"""Modules whose weights stay as a checkpoint stores them: frozen parameters of bytes, which FSDP2 shards and gathers.

    experts.gate_up_proj                  a `PackedWeight` (experts, out, in), no parameter
    experts.gate_up_proj_packed           uint8 (experts, rows, bytes of a row): the values
    experts.gate_up_proj_scale            uint8 (experts, rows of blocks, bytes): what the rule takes next to them

FSDP2 frees the gathered bytes after a pass and gathers them again for the next, as it does with any weight.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.configs import text_config
from hf_fsdp_tools.modeling.notes import Note
from hf_fsdp_tools.modeling.packed_weight import Factors, Look, PackedForm, PackedWeight, product
from hf_fsdp_tools.text import dtype_name, listed


@dataclass(frozen=True)
class Packed(Note):
    """What is known of a module, or of a model, whose weights are quantised as stored."""

    forms: Mapping[str, PackedForm] = field(default_factory=dict)
    """Of each such weight of the module."""
    parts: Mapping[str, PackedForm] = field(default_factory=dict)
    """The form of this rank's part of such a weight that ranks share."""
    compute_dtype: torch.dtype | None = None
    """In which the module computes, if it is not that of the plain weights."""
    deltas: Mapping[str, Sequence[Factors]] = field(default_factory=dict)
    """What adapters add to weights of the module in this pass (`with_added`)."""
    stored_quantization: Mapping[str, Any] | None = None
    """How the checkpoint of a plain model is quantised, until it is loaded."""


IMPLEMENTATIONS = ("eager", "grouped_mm")
"""transformers' ways to run fused experts that dequantise one expert, or one group of them, at a time."""


def pack(model: nn.Module, forms: Mapping[str, PackedForm]) -> None:
    """Put parameters of bytes on meta in the place of parameters of a plain model, by their fqns, in place."""
    below: dict[str, dict[str, PackedForm]] = {}
    for fqn, form in forms.items():
        owner, _, name = fqn.rpartition(".")
        below.setdefault(owner, {})[name] = form
        module = model.get_submodule(owner)
        del module._parameters[name]
        shapes = form.shapes(name)
        for own, part in form.parts(name).items():
            empty = torch.empty(shapes[own], dtype=torch.uint8, device="meta")
            if part.is_whole:
                module.register_buffer(own, empty)
            else:
                module._parameters[own] = nn.Parameter(empty, requires_grad=False)
    for owner, named in below.items():
        module = model.get_submodule(owner)
        Packed.put(module, forms=named)
        module.__class__ = _seen_as_floats(type(module), tuple(named))  # type: ignore[arg-type]  # a class has a hash


def packed_parameters(model: nn.Module) -> dict[str, PackedForm]:
    """The forms of a model's packed parameters by fqn."""
    return {
        f"{fqn}.{name}".lstrip("."): form
        for fqn, module in model.named_modules()
        for name, form in Packed.of(module).forms.items()
    }


def packed_parts(model: nn.Module) -> set[str]:
    """The fqns of the parameters of bytes, and of buffers that belong to them."""
    return {part for fqn, form in packed_parameters(model).items() for part in form.parts(fqn)}


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By fqn, the parameters on meta in whose place the packed ones are."""
    forms = packed_parameters(model)
    return {fqn: nn.Parameter(torch.empty(f.shape, dtype=f.dtype, device="meta")) for fqn, f in forms.items()}


def floats_held(model: nn.Module) -> dict[nn.Parameter, tuple[int, str]]:
    """How many floats each parameter of a model holds, and how it holds them: "bfloat16", or "nf4 in uint8"."""
    held = {p: (p.numel(), dtype_name(p.dtype)) for p in model.parameters() if p.is_floating_point()}
    for fqn, form in packed_parameters(model).items():
        for name, part in form.parts(fqn).items():
            if not part.is_whole:
                parameter, stored = (
                    model.get_parameter(name),
                    form.codec.kind if form.flat_block else dtype_name(part.dtype),
                )
                count = math.prod(form.shape) if part is form.values else 0
                held[parameter] = count, f"{stored} in {dtype_name(parameter.dtype)}"
    return held


def require_floats(model: nn.Module, problem: str, *, among: Callable[[str], bool] = lambda fqn: True) -> None:
    """Refuse weights (`among` fqns) that are no floats, in which "{}" of the problem is the list of them."""
    if packed := [fqn for fqn in packed_parameters(model) if among(fqn)]:
        raise ConfigError(problem.replace("{}", listed(packed)))


def refuse_cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Refuse a dtype that some weights of a model cannot have."""
    if dtype is not None and (packed := packed_parameters(model)):
        raise ConfigError(
            f"dtype={dtype} cannot be honoured: {min(packed)!r} holds quantised values, which a cast destroys. "
            "Leave dtype out; from_pretrained and build_meta_model take that of the floats."
        )


@contextmanager
def none_unpacked(model: nn.Module) -> Iterator[None]:
    """A block that resizes a vocabulary, and must leave weights that are no floats as they are."""
    packed = packed_parameters(model).keys()
    yield
    if lost := packed - packed_parameters(model).keys():
        raise ConfigError(f"{listed(lost)} cannot be resized while it is quantised as stored. Use dequantize=True.")


def pack_alike(twin: nn.Module, model: nn.Module) -> None:
    """Let a twin on meta have the packed parameters of a model; those of 4 bits follow from its config."""
    own = packed_parameters(twin)
    pack(twin, {fqn: form for fqn, form in packed_parameters(model).items() if fqn not in own})


def compute_in(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Let weights that no unit casts be multiplied in a dtype; None: that of their floats."""
    for module in model.modules():
        if Packed.of(module).forms:
            Packed.put(module, compute_dtype=dtype)


def trains_in_fp32(base: nn.Module) -> bool:
    """Whether what is trained on a base is in fp32 whatever it computes in: where the base is bytes, as in PEFT."""
    return bool(packed_parameters(base))


def revert(
    model: nn.Module, tensors: Mapping[str, Any], plain: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Whole tensors, or symbols of them, in the hub's layout, into which `plain` brings those of a plain model; parts
    of packed parameters, by stored key, as bytes, of which symbols have the stored look.

    A conversion takes the plain names: values, and each kind of scales, pass through it under these, their dimensions
    in the order of the plain parameter's.
    """
    forms = packed_parameters(model)
    of_name = {name: (form, part) for key, form in forms.items() for name, part in form.parts(key).items()}
    found = plain({name: tensor for name, tensor in tensors.items() if name not in of_name})
    kinds: dict[int, dict[str, Any]] = {}
    for key, form in forms.items():
        for kind, (name, part) in enumerate(form.parts(key).items()):
            if name in tensors and not part.is_whole:  # those are in `beside_4bit`
                kinds.setdefault(kind, {})[key] = exchanged(tensors[name], form.is_transposed)
    for kind, named in kinds.items():
        first = list(forms[next(iter(named))].parts(next(iter(named))))[kind]
        for key, tensor in plain(named).items():
            form, part = of_name[min(getattr(tensor, "sources", (first,)))]
            tensor = exchanged(tensor, form.is_transposed)
            if hasattr(tensor, "look"):
                tensor.look = part.look(tensor.shape)
            found[part.key(key)] = tensor
    return found


def exchanged(tensor: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Bytes of a packed parameter with the dimensions in the order of the plain one's, and back."""
    return tensor.transpose(-2, -1) if is_transposed else tensor


def is_packable(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a module's code takes a packed weight: linear layers, and stacks of experts."""
    return isinstance(module, (nn.Linear, Conv1D)) or parameter.dim() == 3


def check_experts(model: nn.Module) -> None:
    """Refuse ways to run packed experts that would dequantise an expert for each token."""
    config: Any = getattr(model, "config", None)
    chosen = getattr(config, "_experts_implementation", None)
    stacks = [fqn for fqn, form in packed_parameters(model).items() if len(form.shape) == 3]
    if stacks and chosen not in (None, *IMPLEMENTATIONS):
        raise ConfigError(
            f"experts_implementation {chosen!r} cannot compute with experts quantised as stored ({stacks[0]!r}). "
            f"Use experts_implementation={' or '.join(map(repr, IMPLEMENTATIONS))}, or dequantize=True."
        )


@cache
def _seen_as_floats(cls: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """A class like `cls` whose instances give the floats of these parameters."""
    content: dict[str, Any] = {name: property(partial(_packed_weight, name=name)) for name in names}
    if cls.forward in (nn.Linear.forward, Conv1D.forward):
        content["forward"] = _linear
    return type(cls.__name__, (cls,), {**content, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _packed_weight(module: nn.Module, name: str) -> PackedWeight:
    return PackedWeight(*_held(module, name))


def _held(
    module: nn.Module, name: str, dtype: torch.dtype | None = None, *, is_flipped: bool = False
) -> tuple[Look, list[torch.Tensor]]:
    """What a module holds in the place of a parameter; `dtype`: of its floats, where it is not that of computation."""
    note = Packed.of(module)
    form = note.forms[name]
    tensors = [getattr(module, part) for part in form.parts(name)]
    if name in note.parts and not isinstance(tensors[0], DTensor):
        form = note.parts[name]
    added = note.deltas.get(name, ())
    look = Look(
        form=form,
        dtype=dtype or note.compute_dtype or form.dtype,
        is_flipped=is_flipped,
        scalings=tuple(scaling for *_, scaling in added),
    )
    factors = [each for lhs, rhs, _ in added for each in (lhs, rhs)]
    return look, [*factors, *tensors]


def _linear(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """A linear layer's own pass, without a `PackedWeight`, of which torch's compiler knows nothing."""
    dtype, bias = Packed.of(module).forms["weight"].compute_dtype, module.bias
    look, tensors = _held(module, "weight", dtype, is_flipped=isinstance(module, Conv1D))  # whose weight is (in, out)
    if dtype is None:
        return product(hidden, look, tensors, bias)
    return product(hidden.to(dtype), look, tensors, None if bias is None else bias.to(dtype)).to(hidden.dtype)


@contextmanager
def with_added(
    module: nn.Module,
    name: str,
    added: Callable[[], Sequence[Factors]],
    plain: Callable[[], AbstractContextManager[None]],
) -> Iterator[None]:
    """A block in which a module computes with more than a parameter holds: with what adapters add to it. Where it holds
    floats, the block is within `plain()`."""
    former = Packed.of(module).deltas
    if name not in Packed.of(module).forms:
        with plain():
            yield
        return
    Packed.put(module, deltas={**former, name: (*former.get(name, ()), *added())})
    try:
        yield
    finally:
        Packed.put(module, deltas=former)


@contextmanager
def listed_as_parameters(model: nn.Module) -> Iterator[None]:
    """A block in which modules list packed parameters too: PEFT looks for `target_parameters` among their own.

    They have the dtype of the plain weights, to which PEFT rounds new adapters, and not that of computation.
    """
    packed = {m: Packed.of(m).compute_dtype for m in model.modules() if Packed.of(m).forms}

    def own(module: nn.Module, listed: Any, *args: Any, recurse: bool = True, **kwargs: Any) -> Iterator[Any]:
        yield from listed(*args, recurse=recurse, **kwargs)
        if not recurse:
            yield from ((name, getattr(module, name)) for name in Packed.of(module).forms)

    for module in packed:
        module.__dict__["named_parameters"] = partial(own, module, module.named_parameters)
        Packed.put(module, compute_dtype=None)
    try:
        yield
    finally:
        for module, compute_dtype in packed.items():
            Packed.put(module, compute_dtype=compute_dtype)
            del module.__dict__["named_parameters"]


# ---- how a config says it, kept apart from the plain model that is built of it ----


def set_aside_quantization(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """Take the quantisation out of a config, which then describes a plain model; None where there is none.

    That of bitsandbytes stays: its layers are built (`make_quantizer`), or refused when files are matched.
    """
    quantization = None
    for part in _parts_of(config):
        content = _as_mapping(getattr(part, "quantization_config", None))
        if content is not None and not _is_of_bitsandbytes(content):
            quantization = content if quantization is None else quantization
            del part.quantization_config
    return quantization


def stored_quantization(model: nn.Module) -> Mapping[str, Any] | None:
    """How the checkpoint of a model is quantised, by the note on the model or else by its config; None if it is not.

    4 bits of bitsandbytes do not count: the model has layers for them, whatever its checkpoint holds.
    """
    if (noted := Packed.of(model).stored_quantization) is not None:
        return noted
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return _as_mapping(getattr(config, "quantization_config", None))
    found = (_as_mapping(getattr(part, "quantization_config", None)) for part in _parts_of(config))
    return next((content for content in found if content is not None and not content.get("load_in_4bit")), None)


def forget_quantization(model: nn.Module) -> None:
    """Make a model that holds floats a plain one to everybody who asks, as transformers does after dequantising."""
    if packed_parameters(model):
        return
    Packed.put(model, stored_quantization=None)
    config = getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        set_aside_quantization(config)


def saved_quantization(model: nn.Module) -> Mapping[str, Any] | None:
    """How saves of a model are quantised, in its checkpoint's own words; None where they hold floats."""
    return Packed.of(model).stored_quantization if packed_parameters(model) else None


@contextmanager
def with_stored_quantization(model: Any) -> Iterator[None]:
    """A block in which the config of a model says how its saves are quantised."""
    if (stored := saved_quantization(model)) is not None:
        model.config.quantization_config = dict(stored)
    try:
        yield
    finally:
        if stored is not None:
            del model.config.quantization_config


def _parts_of(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    text = text_config(config)
    return [config] if text is config else [config, text]


def _as_mapping(quantization: Any) -> Mapping[str, Any] | None:
    if quantization is None or isinstance(quantization, Mapping):
        return quantization
    if not hasattr(quantization, "to_dict"):  # whatever a file may say
        return {"quant_method": quantization}
    content: Mapping[str, Any] = quantization.to_dict()
    return content


def _is_of_bitsandbytes(content: Mapping[str, Any]) -> bool:
    return bool(content.get("load_in_4bit") or content.get("load_in_8bit")) or content.get("quant_method") in (
        "bitsandbytes",
        "bitsandbytes_4bit",
        "bitsandbytes_8bit",
    )
