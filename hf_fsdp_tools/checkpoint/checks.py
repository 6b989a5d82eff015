"""What is wrong with the values of a checkpoint although its files are whole: packed where floats belong, NaN."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.quantization import packed_linears

from .conversion import LoadMap, persistent_tensors
from .index import CheckpointIndex
from .shares import local_boxes_of, local_tensor, memory_view
from .stored import ChunkedTensor, StoredTensor

__all__ = ["refuse_not_finite", "refuse_quantized"]

_SLAB_ELEMENTS = 2**22  # looked at in one go, so that the check needs a few MiB whatever the model (assumed)
_CURE = "Dequantise it once: load it with from_pretrained, call model.dequantize(), save it, and remove quantization_config."


def refuse_quantized(model: nn.Module, load_map: LoadMap, index: CheckpointIndex) -> None:
    """Refuse packed values, from which no shard of a parameter can be cut, and a config that does not fit the files.

    The files decide: a tensor is packed if it fills a floating-point parameter with integers, or if it stands beside the
    parameter of the same module as a key that the model does not know (``qweight``, ``weight_packed``, and the scales of
    an 8-bit ``weight``), whatever the method is called.

    Raises:
        CheckpointError: The same on every rank; nothing has been read.
    """
    layers = packed_linears(model)  # 4-bit layers of bitsandbytes, whose own weights `part_packed` looked at
    packed = _packed_tensors(model, load_map, index.tensors, layers)
    method = None if layers else _quantization_method(model)
    if not packed and method is None:
        return
    if not packed:
        found = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in index.tensors.values()}))
        raise CheckpointError(
            f"{index.name!r}: the config says that it is quantised ({method}), but its files hold plain values ({found}). "
            "Remove quantization_config from the config to load these."
        )
    rows = [
        f"{t.file}: {t.key!r} holds {str(t.dtype).removeprefix('torch.')}, expected floating-point values for {target!r}"
        for t, target in packed[:3]
    ]
    more = [f"… and {len(packed) - 3} more"] if len(packed) > 3 else []
    says = f"quantised ({method})" if method else "quantised, although its config has no quantization_config"
    raise CheckpointError(
        f"The checkpoint {index.name!r} is {says}; only floating-point checkpoints, and 4-bit ones of bitsandbytes, can be read "
        "into shards.\n" + "\n".join(rows + more) + f"\n{_CURE}"
    )


def refuse_not_finite(model: nn.Module, keys: Iterable[str]) -> None:
    """Refuse NaN and infinity in what was loaded; each rank looks at its own shards, and of 4-bit weights at the scales.

    Raises:
        CheckpointError: Names every such key, with a count; of this rank's part only.
    """
    state = persistent_tensors(model)
    layers = packed_linears(model)
    counts = {
        key: _num_bad_scales(layers[key]) if key in layers else _num_not_finite(state[key]) for key in sorted(keys)
    }
    found = [(key, count) for key, count in counts.items() if count]
    if found:
        rows = "\n".join(f"- {key}: {count} of its values here" for key, count in found[:20])
        more = f"\n… and {len(found) - 20} more" if len(found) > 20 else ""
        raise CheckpointError(
            f"{len(found)} tensors hold values that are not finite:\n{rows}{more}\nThe training that wrote the checkpoint "
            "diverged, or the values do not fit the dtype they are loaded in. Use another checkpoint or dtype, or "
            "check_finite=False to load it as it is."
        )


def _packed_tensors(
    model: nn.Module,
    load_map: LoadMap,
    stored: Mapping[str, StoredTensor | ChunkedTensor],
    layers: Collection[str],
) -> list[tuple[StoredTensor | ChunkedTensor, str]]:
    """(stored tensor, key of the parameter it stands for) wherever packed values take the place of floating-point ones."""
    parameters = model.named_parameters(remove_duplicate=False)
    floats = {key for key, parameter in parameters if parameter.is_floating_point() and key not in layers}
    of_source = {source: tensor for tensor in stored.values() for source in tensor.sources}
    packed = []
    beside: dict[str, str] = {}  # module of a parameter that is missing, or 8 bits wide -> its key
    for key in sorted(floats):
        made_of = (
            [of_source[source] for source in sorted(load_map.tensors[key].sources)] if key in load_map.tensors else []
        )
        packed += [(t, key) for t in made_of if not t.dtype.is_floating_point]
        if all(t.dtype.itemsize == 1 for t in made_of):
            beside[key.rpartition(".")[0]] = key
    used = {source for tensor in load_map.tensors.values() for source in tensor.sources}
    for t in (t for t in stored.values() if used.isdisjoint(t.sources) and t.shape):
        module = t.key.rpartition(".")[0]
        target = next((key for name, key in beside.items() if _is_same_module(name, module)), None)
        if target is not None and (
            target in load_map.tensors or t.dtype.itemsize == 1 or not t.dtype.is_floating_point
        ):
            packed.append((t, target))
    return packed


def _is_same_module(name: str, stored: str) -> bool:
    """Whether two module names are one, but for the prefix of a base model."""
    return bool(stored) and (name == stored or name.endswith(f".{stored}") or stored.endswith(f".{name}"))


def _quantization_method(model: nn.Module) -> str | None:
    """The quantisation that the model's config names."""
    config: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is None:
        return None
    return str(config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None))


def _num_not_finite(tensor: torch.Tensor) -> int:
    """How many values of this rank's part are NaN or infinite."""
    if not tensor.is_floating_point():
        return 0
    local = local_tensor(tensor)
    parts = (memory_view(local, start, box.length) for box, start in local_boxes_of(tensor))
    return sum(slab.numel() - int(torch.isfinite(slab).sum()) for part in parts for slab in _slabs(part))


def _num_bad_scales(layer: Any) -> int:
    """How many scales of a 4-bit weight are not finite; of quantised ones, those that they are made with."""
    state = layer.quant_state
    scales = [state.absmax] if state.state2 is None else [state.offset, state.state2.absmax]
    return sum(tensor.numel() - int(torch.isfinite(tensor).sum()) for tensor in scales)


def _slabs(part: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in parts of bounded size: runs of memory where it is contiguous, rows otherwise."""
    if part.is_contiguous():
        yield from torch.split(part.view(-1), _SLAB_ELEMENTS)
    else:
        yield from torch.split(part, max(1, _SLAB_ELEMENTS * part.shape[0] // max(1, part.numel())))
