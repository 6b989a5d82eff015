"""The stored tensors that a quantization_config promises, for a model of whose checkpoint no file is at hand."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn

from hf_fsdp_tools.errors import CheckpointError, ConfigError, FSDPToolsError
from hf_fsdp_tools.loading.conversion import map_parts
from hf_fsdp_tools.loading.formats.stored import StoredTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.quantized.keep import keep_stored
from hf_fsdp_tools.modeling.codecs.base import Codec, DoesNotFit, cannot_stay
from hf_fsdp_tools.modeling.codecs.table import CODECS
from hf_fsdp_tools.modeling.packed import packed_parameters, stored_quantization
from hf_fsdp_tools.modeling.roles import fused_experts
from hf_fsdp_tools.text import first_line


def keep_by_config(model: nn.Module, *, has_values: bool = False) -> None:
    """Keep weights of a plain model on meta as stored, as `keep_stored` does, without its checkpoint's files; where
    some are kept already, leave it as it is.

    Raises:
        ConfigError: it stands for a model that `has_values`, which are floats; its config does not say how the
            checkpoint is quantised, or names a method or format whose weights cannot stay as they are.
    """
    if packed_parameters(model):
        return
    if has_values:
        raise ConfigError("dequantize=False: this model has floats. Give its checkpoint's name, or its config.")
    config = stored_quantization(model)
    if not config:
        raise ConfigError(
            f"dequantize=False: the configuration of {type(model).__name__} has no quantization_config, so its "
            "checkpoint holds no quantised weights. Leave dequantize out."
        )
    method = str(config.get("quant_method"))
    codec = next((codec for codec in CODECS if method in codec.methods), None)
    if codec is None:
        raise cannot_stay(f"weights of {method}")
    try:
        choose = codec.by_config(model, config)
        codecs = {fqn: choose(fqn.rpartition(".")[0], module) for fqn, module in _matrices(model)}
        tensors = {tensor.key: tensor for tensor in _stored(model, codecs)}
    except FSDPToolsError:
        raise
    except (DoesNotFit, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"dequantize=False: the quantization_config of {method} cannot be read ({type(error).__name__}: "
            f"{first_line(error)}). Use the config.json that belongs to the checkpoint."
        ) from error
    if not any(codecs.values()):
        raise cannot_stay(f"no weight of {type(model).__name__} ({method})")
    try:
        keep_stored(model, CheckpointIndex(name=type(model).__name__, tensors=tensors, header_bytes=0))
    except CheckpointError as error:  # such a checkpoint cannot be
        raise cannot_stay(
            f"{type(model).__name__}, into whose layers {method} as the config has it does not fit,"
        ) from error


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the fqns of weights of linear layers, and of stacks of experts, with their modules."""
    linear = (each for each in model.named_modules() if isinstance(each[1], nn.Linear))
    yield from ((f"{fqn}.weight", module) for fqn, module in linear)
    yield from ((fqn, module) for fqn, module, _ in fused_experts(model))


def _stored(model: nn.Module, codecs: Mapping[str, Codec | None]) -> Iterator[StoredTensor]:
    """Yield the tensors of the checkpoint; what is made of several parameters has the codec of either."""
    for key, tensor in map_parts(model).items():
        codec = next((own for source in tensor.sources if (own := codecs.get(source)) is not None), None)
        shape = tuple(tensor.shape)
        looks = {key: (tensor.dtype, shape)} if codec is None else codec.layout(shape).looks(key)
        for name, (dtype, stored) in looks.items():
            size = math.prod(stored) * dtype.itemsize
            yield StoredTensor(key=name, file=Path(), dtype=dtype, shape=stored, offset=0, num_bytes=size)
