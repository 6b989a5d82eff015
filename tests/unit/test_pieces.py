"""Where the elements of a tensor come from: chunks, strided views and their parts in shards, against torch itself;
conversions on tensors without data, against transformers on real ones, for each operation and whole architectures."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_fsdp_tools import save_pretrained
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import randomize, stored_tensors, tiny_config
from tests.api import (
    Box,
    PieceTensor,
    View,
    local_boxes,
    slice_view,
)


@given(rows=st.integers(1, 24), outer=st.integers(1, 4), inner=st.integers(1, 4), last=st.booleans())
def test_fsdp_over_tensor_parallel_holds_what_dtensor_splits(rows: int, outer: int, inner: int, last: bool) -> None:
    """`_StridedShard` leaves a rank with several ranges; its own way to split a tensor is the reference."""
    placements: list[Placement] = [_StridedShard(0, split_factor=inner), *([Shard(0)] if last else [])]
    mesh_shape = [outer, inner][: len(placements)]
    tensor = torch.arange(rows)
    for i in range(outer):
        for j in range(inner if last else 1):
            expected = placements[0]._split_tensor(tensor, outer, with_padding=False, contiguous=True)[0][i]
            if last:
                parts = placements[1]._split_tensor(expected, inner, with_padding=False, contiguous=True)[0]
                expected = parts[j] if j < len(parts) else expected[:0]
            boxes = local_boxes([rows], placements, mesh_shape, [i, j][: len(placements)])
            found = torch.full_like(expected, -1)
            for box, (start,) in boxes:
                found[start : start + box.length[0]] = tensor[box.start[0] : box.start[0] + box.length[0]]
            assert torch.equal(found, expected)


@st.composite
def strided_views(draw: Callable[..., int]) -> tuple[torch.Tensor, torch.Tensor]:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    base = torch.arange(math.prod(shape)).reshape(shape)
    view = base
    for _ in range(draw(st.integers(0, 3))):
        step = draw(st.sampled_from(["permute", "slice", "split", "flatten"]))
        dim = draw(st.integers(0, view.dim() - 1))
        size = view.shape[dim]
        if step == "permute":
            view = view.permute(draw(st.permutations(range(view.dim()))))
        elif step == "slice":
            start = draw(st.integers(0, size - 1))
            stop = draw(st.integers(start + 1, size))
            view = view[(slice(None),) * dim + (slice(start, stop, draw(st.sampled_from([1, 2]))),)]
        elif step == "split":
            part = draw(st.sampled_from([k for k in range(1, size + 1) if size % k == 0]))
            view = view.unflatten(dim, (part, size // part))
        elif view.is_contiguous():
            view = view.view(-1)
    return base, view


@settings(max_examples=150)
@given(tensors=strided_views(), data=st.data())
def test_the_part_of_a_view_in_a_box_is_found(tensors: tuple[torch.Tensor, torch.Tensor], data: st.DataObject) -> None:
    base, tensor = tensors
    start = tuple(data.draw(st.integers(0, n - 1)) for n in base.shape)
    length = tuple(data.draw(st.integers(0, n - s)) for s, n in zip(start, base.shape, strict=True))
    inside = base[tuple(slice(s, s + n) for s, n in zip(start, length, strict=True))].clone()
    view = View(offset=tensor.storage_offset(), length=tuple(tensor.shape), strides=tensor.stride())
    found: list[int] = []
    for part, local in slice_view(view, base.shape, Box(start=start, length=length)):
        wanted = tensor[part.slices]
        assert torch.equal(inside.as_strided(local.length, local.strides, local.offset), wanted)
        found += wanted.flatten().tolist()
    assert sorted(found) == sorted(set(inside.flatten().tolist()) & set(tensor.flatten().tolist()))


# fmt: off
CONVERTED = [  # stored in another layout than the model has
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "phimoe",
    "jamba", "minimax", "minimax_m2", "nemotron_h", "olmoe", "glm4_moe", "glm4v_moe",
    "flex_olmo", "ernie4_5_moe", "exaone_moe", "longcat_flash", "afmoe", "hy_v3", "kimi_k25",
    "qwen3_vl_moe", "olmo_hybrid", "nomic_bert", "gte", "dinov2", "sapiens2",
]
RENAMED = [  # stored as the model has it, some keys renamed
    "gpt2", "gpt_oss", "llama4_text", "qwen2_vl", "gemma3", "llava", "clip", "whisper", "t5", "vit", "bloom", "mllama",
    "bert", "wav2vec2", "deberta-v2",
]
# fmt: on


def filled(symbol: PieceTensor, sources: dict[str, torch.Tensor]) -> torch.Tensor:
    """The real tensor that a symbolic one stands for; fails if its pieces overlap or leave something out."""
    assert symbol.pieces is not None, symbol
    result = torch.zeros(symbol.shape, dtype=symbol.dtype)
    count = torch.zeros(symbol.shape, dtype=torch.int64)
    for piece in symbol.pieces:
        box = piece.box.slices
        source = sources[piece.source].contiguous()
        result[box] = source.as_strided(piece.view.length, piece.view.strides, piece.view.offset)
        count[box] += 1
    assert (count == 1).all()
    return result


@st.composite
def movements(draw: Callable[..., Any]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    names = draw(st.lists(st.sampled_from(["permute", "split", "flatten", "reverse", "narrow", "halve"]), max_size=5))
    join = draw(st.sampled_from([torch.cat, torch.stack]))
    seeds = draw(st.lists(st.integers(0, 1000), min_size=len(names) + 1, max_size=len(names) + 1))

    def run(tensors: list[torch.Tensor]) -> torch.Tensor:
        t = join(tensors, dim=seeds[-1] % tensors[0].dim())
        for name, seed in zip(names, seeds, strict=False):
            dim = seed % t.dim()
            size = t.shape[dim]
            if name == "permute":
                t = t.transpose(dim, -1)
            elif name == "split":
                factor = next(k for k in (3, 2, 1) if size % k == 0)
                t = t.unflatten(dim, (factor, size // factor))
            elif name == "flatten":
                t = t.flatten(dim).contiguous()
            elif name == "reverse":
                t = torch.stack(t.unbind(dim)[::-1], dim)
            elif name == "narrow":
                t = t.narrow(dim, 0, (size + 1) // 2)
            else:
                t = torch.cat([part.reshape(-1) for part in t.chunk(2, dim)])
        return t

    return run


@settings(max_examples=80)
@given(movement=movements(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_any_chain_of_movements_is_followed(movement: Callable[..., torch.Tensor], shape: list[int]) -> None:
    size = math.prod(shape)
    real = {str(i): torch.arange(i * size, (i + 1) * size).reshape(shape) for i in range(3)}
    symbols = [PieceTensor.named(k, shape, torch.int64) for k in real]
    expected, found = movement(list(real.values())), movement(list(symbols))
    assert isinstance(found, PieceTensor)
    assert torch.equal(filled(found, real), expected)


def model_class(config: Any) -> type[transformers.PreTrainedModel]:
    """The class that a user would load: with a head where transformers has one."""
    for auto_class in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel):
        if type(config) in auto_class._model_mapping:
            found = auto_class._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise AssertionError(f"no auto class for {type(config).__name__}")


FEW = ("mixtral", "deepseek_v3", "jamba", "minimax_m2", "nemotron_h", "ernie4_5_moe", "olmo_hybrid", "gte", "t5")
TYPES = [pytest.param(t, marks=[] if t in FEW else [pytest.mark.nightly]) for t in CONVERTED + RENAMED]


@pytest.mark.parametrize("model_type", TYPES)
def test_an_architecture_loads_and_saves_as_transformers_does(model_type: str, tmp_path: Path) -> None:
    """One process, no shards: the same values and reports, every byte read in place, and the same files written."""
    if model_type not in transformers.CONFIG_MAPPING:  # 5.17, which is supported too, lacks some of 5.23
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config = tiny_config(model_type)
    cls = model_class(config)
    randomize(cls(config)).save_pretrained(tmp_path / "stored", max_shard_size="200KB")
    reference, info = cls.from_pretrained(tmp_path / "stored", output_loading_info=True)
    model = build_meta_model(tmp_path / "stored", auto_class=cls)
    report = load_weights(model, tmp_path / "stored")

    expected, found = reference.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key
    for (key, tensor), (_, ours) in zip(reference.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(ours, tensor), key
    assert set(report.missing_keys) == set(info["missing_keys"])
    assert set(report.unexpected_keys) == set(info["unexpected_keys"])
    assert report.converted_bytes == 0 and report.read_ratio == 1.0

    reference.save_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours", max_shard_size="200KB")
    theirs, ours_ = stored_tensors(tmp_path / "theirs"), stored_tensors(tmp_path / "ours")
    assert theirs.keys() == ours_.keys()
    assert all(torch.equal(ours_[k], t) and ours_[k].dtype == t.dtype for k, t in theirs.items())
