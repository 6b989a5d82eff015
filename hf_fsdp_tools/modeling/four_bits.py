"""4-bit weights of bitsandbytes as packed weights: transformers decides which layers have them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import get_hf_quantizer

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.codecs.bitsandbytes import NESTED_BLOCKSIZE, FourBits
from hf_fsdp_tools.modeling.packed import pack, packed_parameters
from hf_fsdp_tools.modeling.packed_weight import PackedForm, part_name
from hf_fsdp_tools.modeling.patterns import matched_in
from hf_fsdp_tools.modeling.roles import fused_experts


def make_quantizer(config: PreTrainedConfig, model_kwargs: dict[str, Any]) -> Any:
    """transformers' quantizer for a model with 4-bit weights of bitsandbytes; None for a plain model."""
    chosen = model_kwargs.pop("quantization_config", None)
    if getattr(chosen, "dequantize", False):  # what is done with such a checkpoint anyway
        chosen = None
    stored = _stored_in(config)
    if chosen is not None and not _has(chosen, "load_in_4bit"):
        raise ConfigError(
            f"quantization_config is a {type(chosen).__name__} without load_in_4bit: only 4-bit weights of "
            "bitsandbytes are packed in blocks that a shard can hold whole. Use "
            "BitsAndBytesConfig(load_in_4bit=True, …), or load without it: the base stays in bf16, spread over all "
            "ranks."
        )
    if chosen is None and not _has(stored, "load_in_4bit"):
        return None
    if stored is not None and not isinstance(stored, Mapping):
        config.quantization_config = stored.to_dict()  # transformers reads a config's quantization only in this form
    try:
        quantizer, _, _ = get_hf_quantizer(config, chosen, device_map={"": "cpu"}, weights_only=True, user_agent={})
    except ImportError as error:
        raise ConfigError(
            f"4-bit weights need bitsandbytes and accelerate: pip install bitsandbytes. ({error})"
        ) from None
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"This quantisation cannot be had: {error}") from None
    return quantizer


def has_4bit_layers(config: PreTrainedConfig, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether a model of this config, with these keywords, has 4-bit layers of bitsandbytes."""
    return _has(model_kwargs.get("quantization_config"), "load_in_4bit") or _has(_stored_in(config), "load_in_4bit")


def _stored_in(config: PreTrainedConfig) -> Any:
    stored = getattr(config, "quantization_config", None)
    return stored or getattr(config.get_text_config(decoder=True), "quantization_config", None)


def layers_of(model: PreTrainedModel, quantizer: Any) -> dict[str, Any]:
    """By fqn, bitsandbytes' layers as transformers would put them into a model on meta, which stays as it is; none
    for a plain model, whose `quantizer` is None."""
    if quantizer is None:
        return {}
    from bitsandbytes.nn import Linear4bit

    plain = dict(model.named_modules())
    with matched_in("transformers.quantizers", model.config.name_or_path):
        quantizer.preprocess_model(
            model=model, dtype=model.dtype, device_map={"": "cpu"}, checkpoint_files=None, use_kernels=False
        )
    layers = {fqn: module for fqn, module in model.named_modules() if isinstance(module, Linear4bit)}
    for fqn in layers:
        model.set_submodule(fqn, plain[fqn])
    if not layers:
        skipped = ", ".join(sorted(quantizer.modules_to_not_convert)) or "none"
        raise ConfigError(
            f"No layer of {type(model).__name__} would be quantised (left out: {skipped}). Change "
            "llm_int8_skip_modules, or leave quantization_config out."
        )
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    return layers


def pack_4bit(model: PreTrainedModel, layers: Mapping[str, Any]) -> None:
    """Let linear layers of a model on meta have 4-bit weights, as `layers` from `layers_of` have them, in place."""
    pack(
        model, {f"{fqn}.weight": _form(f"{fqn}.weight", model.get_submodule(fqn), each) for fqn, each in layers.items()}
    )
    for fqn in layers:
        model.get_submodule(fqn).requires_grad_(False)


def _form(fqn: str, module: nn.Module, layer: Any) -> PackedForm:
    weight: Any = module.weight
    block = layer.weight.blocksize
    if weight.numel() % block:
        raise ConfigError(
            f"{fqn!r} {list(weight.shape)} has {weight.numel()} values, which are no whole number of blocks of "
            f"{block}. Leave the layer out with llm_int8_skip_modules."
        )
    codec = FourBits(
        kind=layer.weight.quant_type,
        block=block,
        is_nested=layer.weight.compress_statistics,
        storage=layer.quant_storage,
    )
    return replace(
        codec.layout(tuple(weight.shape)),
        dtype=weight.dtype,
        is_transposed=isinstance(module, Conv1D),
        compute_dtype=layer.compute_dtype,
    )


def weights_4bit(model: nn.Module) -> dict[str, PackedForm]:
    """The forms of a model's 4-bit weights of bitsandbytes, by the fqn of the plain weight."""
    return {fqn: form for fqn, form in packed_parameters(model).items() if form.flat_block}


def left_as_floats(model: nn.Module) -> Iterator[str]:
    """Yield what a reader should know of weights that stay floats next to 4-bit ones."""
    if packed_parameters(model) and any(stack.is_floating_point() for *_, stack in fused_experts(model)):
        yield "Experts stay in the dtype of computation: bitsandbytes' 4 bits are for linear layers alone."


def beside_4bit(model: nn.Module) -> dict[str, torch.Tensor]:
    """What bitsandbytes stores next to the values and scales of 4-bit weights, by stored key of a plain layout.

    Each is whole on every rank: tables, and the text that says how the weight is packed.
    """
    found: dict[str, torch.Tensor] = {}
    if not (forms := weights_4bit(model)):
        return found
    from bitsandbytes.functional import QuantState, get_4bit_type

    for fqn, form in forms.items():
        empty, nested, whole = torch.empty(0), None, {}
        for name, part in form.scales.items():
            if part.is_whole:
                whole[name] = model.get_buffer(part_name(fqn, name)).cpu().view(part.dtype).flatten()
        if whole:
            nested = QuantState(empty, code=whole["code"], blocksize=NESTED_BLOCKSIZE, dtype=torch.float32)
        state = QuantState(
            absmax=empty,
            shape=torch.Size((form.rows, form.columns)),
            code=get_4bit_type(form.codec.kind, device="cpu"),
            blocksize=form.flat_block,
            quant_type=form.codec.kind,
            dtype=form.dtype,
            offset=whole.get("offset"),
            state2=nested,
        )
        stored = state.as_dict(packed=True)
        found |= {f"{fqn}.{name}": tensor for name, tensor in stored.items() if not name.endswith("absmax")}
    return found


def _has(config: Any, bits: str) -> bool:
    return bool(config.get(bits) if isinstance(config, Mapping) else getattr(config, bits, False))
