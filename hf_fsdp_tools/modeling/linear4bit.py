"""Linear layers with 4-bit weights of bitsandbytes, in a form that FSDP2 shards like any other frozen parameter.

transformers decides which layers are quantised and puts bitsandbytes' layers in their place. Here each layer gets a
weight on meta of the packed shape, and keeps a note of how the weight is packed, since a shard cannot keep it. In every
forward pass bitsandbytes looks for the scales on the weight, and takes the layer's where the weight has none
(`fix_4bit_weight_quant_state_from_module`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import get_hf_quantizer

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.notes import add_to_note, note_of


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How the weight of one linear layer is packed: two values a byte, in blocks of the flattened weight."""

    shape: tuple[int, int]
    """Shape of the weight before it is packed: (out_features, in_features)."""
    dtype: torch.dtype
    """Dtype of the values before they are packed, and after a forward pass unpacks them."""
    storage: torch.dtype
    """Dtype as which the packed bytes are kept and gathered."""
    quant_type: str
    """"nf4" or "fp4"."""
    blocksize: int
    """Values of the flattened weight that share a scale."""
    is_nested: bool
    """Whether the scales are quantised too ("double quantisation")."""
    is_transposed: bool
    """Whether a plain checkpoint holds the weight as (in_features, out_features), as for GPT-2's `Conv1D`."""
    is_stored: bool
    """Whether the checkpoint holds the weight packed."""

    @property
    def numel(self) -> int:
        """Number of values of the weight."""
        return self.shape[0] * self.shape[1]

    @property
    def num_blocks(self) -> int:
        """Number of blocks, and so of scales."""
        return -(-self.numel // self.blocksize)


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


def replace_linears(model: PreTrainedModel, quantizer: Any, dtype: torch.dtype) -> None:
    """Put bitsandbytes' layers where transformers would, on meta, with weights and biases of `dtype` for now."""
    quantizer.preprocess_model(
        model=model, dtype=dtype, device_map={"": "cpu"}, checkpoint_files=None, use_kernels=False
    )
    layers = _linear4bits(model)
    if not layers:
        skipped = ", ".join(sorted(quantizer.modules_to_not_convert)) or "none"
        raise ConfigError(
            f"No layer of {type(model).__name__} would be quantised (left out: {skipped}). Change "
            "llm_int8_skip_modules, or leave quantization_config out."
        )
    for module in layers.values():
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


def pack_weights(model: nn.Module, quantizer: Any) -> None:
    """Give each layer of bitsandbytes a frozen weight on meta of the packed shape and dtype, and note how it is
    packed.
    """
    for key, module in _linear4bits(model).items():
        weight: Any = module.weight
        storage = module.quant_storage
        packing = Packing(
            shape=(module.out_features, module.in_features),
            dtype=weight.dtype,
            storage=storage,
            quant_type=weight.quant_type,
            blocksize=weight.blocksize,
            is_nested=weight.compress_statistics,
            is_transposed=issubclass(module.source_cls, Conv1D),
            is_stored=quantizer.pre_quantized,
        )
        num_bytes = (packing.numel + 1) // 2
        if num_bytes % storage.itemsize:
            raise ConfigError(
                f"{key!r} {list(packing.shape)} has {num_bytes} bytes at 4 bits, which are no whole number of "
                f"{storage} values. Choose bnb_4bit_quant_storage=torch.uint8, or leave the layer out "
                "with llm_int8_skip_modules."
            )
        packed = torch.empty((num_bytes // storage.itemsize, 1), dtype=storage, device="meta")
        module.weight = nn.Parameter(packed, requires_grad=False)
        add_to_note(module, packing=packing)
        # On a CPU with AVX512-BF16, bitsandbytes would replace the gathered weight by a rearranged copy in evaluation.
        module.support_avx512bf16_for_cpu = False
        module.register_forward_pre_hook(_before_forward)
        mark_weights(module)


def packed_linears(model: nn.Module) -> dict[str, Any]:
    """The layers that `pack_weights` packed, by the name of their weight."""
    named = model.named_modules()
    return {f"{name}.weight".lstrip("."): module for name, module in named if note_of(module).packing}


def packing_of(module: nn.Module) -> Packing:
    """How the weight of a layer from `packed_linears` is packed."""
    packing = note_of(module).packing
    assert isinstance(packing, Packing)
    return packing


def set_quant_state(module: nn.Module, state: Any) -> None:
    """Give a packed layer the scales of its whole weight (bitsandbytes' `QuantState`); None takes them away."""
    module.quant_state = state
    mark_weights(module)


def mark_weights(model: nn.Module) -> None:
    """Set the attributes of 4-bit weights that PEFT reads; call again after `_apply`, which drops them from shards."""
    for module in packed_linears(model).values():
        packing = packing_of(module)
        module.weight.quant_type = packing.quant_type
        module.weight.compress_statistics = packing.is_nested


def refuse_cast(model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Refuse a computation dtype to which FSDP2 would cast packed bytes, and storage that FSDP2 cannot shard."""
    for key, module in packed_linears(model).items():
        storage = packing_of(module).storage
        wanted = str(param_dtype or torch.bfloat16)
        if storage.is_floating_point and param_dtype not in (None, storage):
            raise ConfigError(
                f"{key!r} keeps its 4-bit values as {storage}, and computation in {param_dtype} would cast them to "
                f"it, which destroys them. Quantise with bnb_4bit_quant_storage={wanted}."
            )
        if not storage.is_floating_point and torch.__version__ < "2.13":
            raise ConfigError(
                f"{key!r} keeps its 4-bit values as {storage}, which FSDP2 of torch {torch.__version__} cannot shard "
                f"(2.13 can). Quantise with bnb_4bit_quant_storage={wanted}."
            )


def refuse_cast_weights(model: nn.Module) -> None:
    """Refuse weights that were cast after they were packed, as by PEFT's `prepare_model_for_kbit_training`."""
    for module in packed_linears(model).values():
        storage = packing_of(module).storage
        if module.weight.dtype != storage:
            raise ConfigError(
                f"A 4-bit weight was packed as {storage} and is {module.weight.dtype} now; a cast destroys it. Do not "
                "cast the model, and leave out prepare_model_for_kbit_training: load_weights and add_adapter do its "
                "work."
            )


def _has(config: Any, bits: str) -> bool:
    return bool(config.get(bits) if isinstance(config, Mapping) else getattr(config, bits, False))


def _linear4bits(model: nn.Module) -> dict[str, Any]:
    """bitsandbytes' 4-bit layers, packed or not, by the name of their weight."""
    from bitsandbytes.nn import Linear4bit

    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def _before_forward(module: nn.Module, args: object) -> None:
    refuse_cast_weights(module)
