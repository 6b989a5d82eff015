"""Stored formats of weights, one row each: what is stored of a weight becomes it again within the format's rounding,
and bit for bit what the format's own library makes of the same bytes, in whatever part and whatever memory; layouts
that a config promises are those of the files; what does not fit is one error by its headers."""

import math
import random
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BitsAndBytesConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_fsdp_tools import CheckpointError
from hf_fsdp_tools.loading.quantized import keep
from hf_fsdp_tools.steps import build_meta_model
from tests._checkpoints import QUANTIZED, Tensors, of_linear, of_mxfp8
from tests.api import (
    CODECS,
    Box,
    CheckpointIndex,
    PieceTensor,
    Reader,
    StoredTensor,
    read_into,
    weights_4bit,
    with_floats,
)

Shape = tuple[int, ...]
Config = dict[str, Any]
DTYPES = (torch.bfloat16, torch.float32)


# ---- what their libraries compute: of tensors by the last parts of their names ----


def by_transformers(parts: Tensors, config: Config, dtype: torch.dtype) -> torch.Tensor:
    values, scales = parts.values()
    return Fp8Dequantize(None)._dequantize_one(values, scales, dtype)


def on_short_blocks(parts: Tensors, config: Config, dtype: torch.dtype) -> torch.Tensor:
    """The format's own rule for blocks of which the last ones are short: transformers has none."""
    (values, scales), (high, wide), (rows, columns) = parts.values(), config["weight_block_size"], parts["weight"].shape
    return (values.float() * scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]).to(dtype)


def as_gpt_oss(parts: Tensors, config: Config, dtype: torch.dtype) -> torch.Tensor:
    return convert_moe_packed_tensors(*parts.values(), dtype=dtype)


def by_compressed_tensors(parts: Tensors, config: Config, dtype: torch.dtype) -> torch.Tensor:
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
    return compressor.decompress(dict(parts), scheme)["weight"].to(dtype)


LIBRARIES = {
    "fp8": by_transformers,
    "mxfp4": as_gpt_oss,
    "compressed-tensors": by_compressed_tensors,
    "modelopt": of_mxfp8,
}
"""By the methods of configs; of GPTQ and AWQ, whose libraries need a GPU, and of ModelOpt, the formulas."""


# ---- how a weight is stored ----


def in_8_bits(
    key: str, weight: torch.Tensor, *, block: Shape = (0, 0), name: str = "_scale_inv", dims: int | None = None
) -> Tensors:
    """FP8 with a scale per block (0: as large as a matrix), of which the last ones may be short; or in so many
    dimensions."""
    rows, columns = weight.shape[-2:]
    high, wide = (size or n for size, n in zip(block, (rows, columns), strict=True))
    grid = pad(weight.float(), (0, -columns % wide, 0, -rows % high)).unflatten(-1, (-1, wide))
    scales = grid.unflatten(-3, (-1, high)).abs().amax((-3, -1)) / 448
    each = scales.repeat_interleave(high, -2)[..., :rows, :].repeat_interleave(wide, -1)[..., :columns]
    scales = scales if dims is None else scales.reshape(weight.shape[:dims])
    return {key: (weight.float() / each).to(torch.float8_e4m3fn), f"{key}{name}": scales}


def int8_with_zero_points(key: str, weight: torch.Tensor) -> Tensors:
    low, high = weight.float().aminmax(dim=1, keepdim=True)
    scales = ((high - low) / 255).bfloat16()
    zeros = (-128 - low / scales.float()).round().clamp(-128, 127)
    values = (weight.float() / scales.float() + zeros).round().clamp(-128, 127)
    return {key: values.to(torch.int8), f"{key}_scale": scales, f"{key}_zero_point": zeros.to(torch.int8)}


def by_another_name(key: str, weight: torch.Tensor) -> Tensors:
    stored = QUANTIZED["fp8 and fp4 experts"][1](key, weight)
    return {name.replace(".scale", ".qscale_weight"): tensor for name, tensor in stored.items()}


def of_group(kind: str, **changed: Any) -> Config:
    """The config of a kind of compressed-tensors whose one group says something else of its weights."""
    config = QUANTIZED[kind][2]
    group = config["config_groups"]["group_0"]
    return config | {"config_groups": {"group_0": group | {"weights": group["weights"] | changed}}}


class Format(NamedTuple):
    """A format, as a kind of checkpoints has it where nothing else is said."""

    kind: str
    error: float
    """The most that a value is off, over the largest of all."""
    sizes: Shape = (1, 16)
    """Sizes that it takes are multiples of these."""
    given: Callable[[str, torch.Tensor], Tensors] | None = None
    """How a weight is stored."""
    more: Any = ()
    """What its config says besides."""
    says: Any = ()
    """What a config that promises the layout says besides; None: nothing promises it."""
    key: str = "a.proj.weight"
    rule: Callable[[Tensors, Config, torch.dtype], torch.Tensor] | None = None
    """What takes the place of a library."""

    @property
    def config(self) -> Config:
        return QUANTIZED[self.kind][2] | dict(self.more)

    def store(self, weight: torch.Tensor) -> Tensors:
        return (self.given or QUANTIZED[self.kind][1])(self.key, weight)

    def theirs(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        rule = self.rule or LIBRARIES.get(self.config["quant_method"], of_linear)
        return rule(parts_of(tensors, self.key), self.config, dtype)

    def weight(self, *times: int, seed: int = 0) -> torch.Tensor:
        """Values of so many times its sizes, of which the first one stays."""
        shape = [size * n for size, n in zip(self.sizes, (1, *times)[-len(self.sizes) :], strict=True)]
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


_, packed, _ = QUANTIZED["compressed int4"]
_, gptq, _ = QUANTIZED["gptq"]
_, mxfp4, _ = QUANTIZED["mxfp4"]
OF_8_BITS, NO_BLOCKS, EXPERT = (
    of_group("compressed int4", num_bits=8),
    {"weight_block_size": None},
    "a.experts.0.weight",
)
ONE_SCALE = of_group("compressed per tensor", scale_dtype="torch.float32")
IN_BLOCKS = of_group("compressed per channel", strategy="block", block_structure=[16, 16])
PER_ROW = of_group("compressed int4", num_bits=8, strategy="channel", group_size=None, symmetric=True)

FORMATS: dict[str, Format] = {
    "fp8 in blocks": Format("fp8", 0.04, (8, 16)),
    "fp8 in short blocks": Format("fp8", 0.04, (25, 35), partial(in_8_bits, block=(8, 16)), rule=on_short_blocks),
    "fp8 with one scale": Format("fp8", 0.04, (1, 16), partial(in_8_bits, dims=0), NO_BLOCKS),
    "fp8 with a scale per expert": Format("fp8", 0.04, (3, 1, 16), partial(in_8_bits, dims=1), says=None),
    "fp8 of experts": Format("fp8", 0.04, (3, 8, 32), partial(in_8_bits, block=(4, 16)), says=None),
    "fp8 by exponents": Format("fp8 and fp4 experts", 0.08, (8, 16), says=None),
    "fp4 by exponents": Format("fp8 and fp4 experts", 0.3, (1, 32), says=None, key=EXPERT),
    "fp4 by another name": Format("fp8 and fp4 experts", 0.3, (1, 32), by_another_name, says=None, key=EXPERT),
    "mxfp4": Format("mxfp4", 0.3, (3, 32, 1)),
    "mxfp4 in small blocks": Format("mxfp4", 0.3, (3, 32, 1), partial(mxfp4, block=8), says=None),
    "fp8 per row": Format("compressed per channel", 0.04),
    "fp8 per tensor": Format("compressed per tensor", 0.04, says=ONE_SCALE),
    "fp8 in short blocks of compressed-tensors": Format(
         "compressed per channel", 0.04, (24, 16), partial(in_8_bits, block=(16, 16), name="_scale"), IN_BLOCKS, None),
    "int8": Format("compressed int8", 0.01),
    "int8 with zero points": Format(
         "compressed int8", 0.01, (1, 16), int8_with_zero_points, of_group("compressed int8", symmetric=False)),
    "packed int4": Format("compressed int4 experts", 0.09),
    "packed int4 with zero points": Format("compressed int4", 0.09),
    "packed int8 with zero points": Format(
         "compressed int4", 0.01, (1, 16), partial(packed, is_symmetric=False, bits=8), OF_8_BITS),
    "packed int8 per row": Format(
         "compressed int4", 0.01, (1, 16), partial(packed, is_symmetric=True, group=0, bits=8), PER_ROW),
    "nvfp4": Format("compressed nvfp4", 0.25),
    "mxfp8": Format("compressed mxfp8", 0.13, (1, 32)),
    "mxfp8 of ModelOpt": Format("mxfp8 experts", 0.13, (1, 32)),
    "mxfp8 of stacks": Format("mxfp8 experts", 0.13, (3, 1, 32), says=None),
    "gptq": Format("gptq", 0.09, (8, 16)),
    "gptq v2": Format("gptq experts", 0.09, (8, 16)),
    "gptq of 8 bits": Format("gptq", 0.01, (8, 16), partial(gptq, bits=8), {"bits": 8}),
    "gptq of one group": Format(
         "gptq", 0.09, (8, 16), partial(gptq, group=10**6), {"group_size": -1, "desc_act": True}),
    "awq": Format("awq", 0.09, (8, 16)),
}  # fmt: skip


def with_any_codes(tensors: Tensors, seed: int) -> Tensors:
    """The same with every value of the format's among its values and zero points."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if not key.endswith((".weight", "packed", "blocks", "zero_point", "qweight", "qzeros")):
            return tensor
        codes = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
        codes = codes & 0xFE if tensor.dtype == torch.float8_e4m3fn else codes  # no NaN
        return torch.empty_like(tensor).copy_(codes.view(tensor.dtype).view(tensor.shape))

    return {key: drawn(key, tensor) for key, tensor in tensors.items()}


def opened(folder: Path, tensors: Tensors, config: Config) -> CheckpointIndex:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return with_floats(CheckpointIndex.open(folder), config, [])[0]


UNREAD = ("input_scale", "k_scale", "input_global_scale", "weight_shape")
"""Names of what belongs to activations, or repeats a shape."""


def parts_of(tensors: Tensors, key: str) -> Tensors:
    """What belongs to the weight, by the last parts of the names."""
    parts = {name.removeprefix(key.removesuffix("weight")): tensor for name, tensor in tensors.items()}
    return {name: t for name, t in parts.items() if name == "weight_shape" or not name.endswith((*UNREAD, "g_idx"))}


def part_of(tensor: Any, rng: random.Random) -> Any:
    """Moved about as conversions do it: transposed, reshaped (also within rows), cut."""
    way = rng.randrange(4)
    if way == 0:
        return tensor.transpose(0, -1)
    if way == 1:
        return tensor.contiguous().reshape(-1, rng.choice([n for n in range(1, 200) if tensor.numel() % n == 0]))
    if way == 2:
        dim = rng.randrange(tensor.dim())
        length = rng.randint(1, tensor.shape[dim])
        return tensor.narrow(dim, rng.randint(0, tensor.shape[dim] - length), length)
    return torch.stack([tensor, tensor], rng.randrange(tensor.dim() + 1))


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_of_a_weight_becomes_the_weight(tmp_path: Path, name: str) -> None:
    """Within the format's rounding, as its library has it for every code, and any part of any view as the whole."""
    row, rng = FORMATS[name], random.Random(name)
    for seed, times in enumerate([(3, 6), *[(rng.randint(1, 5), rng.randint(1, 4)) for _ in range(2)]]):
        weight = row.weight(*times, seed=seed)
        stored = row.store(weight)
        for tensors in (stored, with_any_codes(stored, seed)):
            index = opened(tmp_path, tensors, row.config)
            ((key, found),) = index.tensors.items()
            assert (key, found.shape) == (row.key, weight.shape)
            assert index.num_bytes == sum(t.nbytes for key, t in tensors.items() if not key.endswith(UNREAD))
            if row.rule is None and row.config["quant_method"] in ("fp8", "mxfp4"):  # tensors tell without a config
                silent, told = with_floats(CheckpointIndex.open(tmp_path), None, [])
                assert silent.tensors == index.tensors and told and told.method == name[: len(told.method)]
            for dtype in DTYPES:
                whole = row.theirs(tensors, dtype)
                if tensors is stored:
                    assert (whole.float() - weight.float()).abs().max() <= row.error * weight.abs().max().float()
                with Reader(staging_bytes=2**17, side=None) as reader:
                    check_parts(PieceTensor.stored(found, dtype), whole, index, reader, rng)


def check_parts(stored: Any, whole: torch.Tensor, index: Any, reader: Any, rng: random.Random) -> None:
    for number in range(4):
        symbol, expected = stored, whole
        for _ in range(rng.randrange(4) if number else 0):
            seed = rng.random()
            symbol, expected = (part_of(t, random.Random(seed)) for t in (symbol, expected))
        start = [rng.randrange(n) if number else 0 for n in expected.shape]
        length = [rng.randint(1, n - s) if number else n for n, s in zip(expected.shape, start, strict=True)]
        memory = torch.full([2 * n for n in length], 7, dtype=whole.dtype)
        memory = memory[tuple(slice(None, None, 2) for _ in length)]
        box = Box(start=tuple(start), length=tuple(length))
        read_into([(memory, symbol, box)], index, reader, staging_bytes=2**17)
        part = expected[tuple(slice(s, s + n) for s, n in zip(start, length, strict=True))]
        assert torch.equal(memory, part), (whole.dtype, box)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 of stacks"])
def test_floats_are_quantised_by_the_rule_of_modelopt(tmp_path: Path, name: str) -> None:
    """As the checkpoints here are, by another formula; of its own floats it makes these again; and of zeros, zeros."""
    row = FORMATS[name]
    weight = row.weight(5, 6)
    tensors = row.store(weight)
    (found,) = opened(tmp_path, tensors, row.config).tensors.values()

    def encoded(floats: torch.Tensor) -> Tensors:
        parts = found.form.codec.encode(floats.flatten(0, -2), *found.stored.values())
        return dict(zip(tensors, parts, strict=True))

    for floats in (weight, weight.float()):
        for part, expected in zip(encoded(floats).values(), tensors.values(), strict=True):
            assert part.dtype == expected.dtype and part.shape == expected.shape
            assert torch.equal(as_bytes(part), as_bytes(expected))
    for own in (row.theirs(tensors, torch.float32), torch.zeros(weight.shape)):
        assert torch.equal(row.theirs(encoded(own), torch.float32), own)


class Alive(TorchDispatchMode):
    """The most bytes of tensors made in a block that are alive at a time, without those of memory that was there."""

    def __init__(self, *there: torch.Tensor) -> None:
        super().__init__()
        self._there = {tensor.untyped_storage()._cdata for tensor in there}
        self._alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._alive.keys() | self._there:
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.most = max(self.most, sum(self._alive.values()))
        return result


@pytest.mark.parametrize("name", FORMATS)
def test_packed_bytes_become_the_same_floats_in_bounded_memory(tmp_path: Path, patch_inner: Any, name: str) -> None:
    """Above the weight, 16 bytes of each value that is dequantised at a time; of rows, and of whole matrices."""
    row = FORMATS[name]
    tensors = with_any_codes(row.store(row.weight(9, 7)), 0)
    (stored,) = opened(tmp_path, tensors, row.config).tensors.values()
    parts = [keep._as_bytes(stored, part) for part in stored.stored]
    values, *scales = [as_bytes(tensors[part.key]).view(part.shape) for part in parts]
    for dtype in DTYPES:
        form, expected = replace(stored.form, dtype=dtype), row.theirs(tensors, dtype)
        for many in (100, 1600, 2**20):
            patch_inner(VALUES_AT_A_TIME=many)
            with Alive(values, *scales) as alive:
                floats = form.floats(values, scales, dtype)
            assert floats.is_contiguous() and torch.equal(floats, expected), (dtype, many)
            assert alive.most - floats.nbytes <= 16 * min(max(many, form.columns), floats.numel()) + 1024, (dtype, many)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", ["fp4", "nf4"])
@pytest.mark.parametrize("nested", [False, True])
def test_4_bits_of_bitsandbytes_are_what_it_makes_of_them(kind: str, nested: bool) -> None:
    """In flat blocks of 64 values, whose scales may be bytes with scales of their own."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install bitsandbytes)")
    given = {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    sizes = {"hidden_size": 64, "intermediate_size": 320, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.LlamaConfig(**sizes, vocab_size=131)
    model = build_meta_model(config, quantization_config=BitsAndBytesConfig(load_in_4bit=True, **given))
    form = weights_4bit(model)["model.layers.0.mlp.up_proj.weight"]
    weight = torch.randn(form.shape, generator=torch.Generator().manual_seed(0))
    for dtype in DTYPES:
        packed, state = bnb.functional.quantize_4bit(
            weight.to(dtype), quant_type=kind, compress_statistics=nested, blocksize=64
        )
        inner = (state.state2.absmax, state.state2.code, state.offset) if nested else ()
        stored = [as_bytes(each) for each in (packed, state.absmax, *inner)]
        shapes = form.shapes("").values()
        values, *scales = [each.view(shape) for each, shape in zip(stored, shapes, strict=True)]
        floats = replace(form, dtype=dtype).floats(values, scales, dtype)
        assert torch.equal(floats, bnb.functional.dequantize_4bit(packed, state)), dtype
        assert (floats - weight).abs().max() <= 0.3 * weight.abs().max()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_by_themselves_give_the_bits_that_they_give_within_a_weight(tmp_path: Path, name: str) -> None:
    """For every exponent, whether a loop takes it in a vector or alone."""
    row = FORMATS[name]
    (stored,) = opened(tmp_path, row.store(row.weight(3, 6)), row.config).tensors.values()
    exponents = torch.arange(255, dtype=torch.uint8).view(-1, 1).repeat(1, 3)
    of_scales = stored.form.scales["scale"].dtype
    scales = exponents if of_scales.itemsize == 1 else (exponents.float() - 127).exp2()
    codes = torch.randint(0, 256, (255, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    is_float = stored.values.dtype.is_floating_point
    values = (codes & 0x7E if is_float else codes).view(stored.values.dtype)
    beside = {"scale": scales} | ({"global scale": torch.full((255, 1), 0.3)} if name == "nvfp4" else {})
    for dtype in DTYPES:
        whole = stored.form.codec.decode(values, beside, dtype)
        for start, stop in ((0, 1), (3, 4), (7, 24), (200, 255)):
            part = stored.form.codec.decode(values[start:stop], {k: t[start:stop] for k, t in beside.items()}, dtype)
            assert torch.equal(as_bytes(part), as_bytes(whole[start:stop]))


# ---- layouts ----


@pytest.fixture(scope="module")
def layer() -> Iterator[Any]:
    yield build_meta_model(hf.LlamaConfig(num_hidden_layers=1))


PROMISED = [name for name, row in FORMATS.items() if row.says is not None]


@pytest.mark.parametrize("name", PROMISED)
@settings(max_examples=10)
@given(times=st.tuples(st.integers(1, 9), st.integers(1, 7)))
def test_a_layout_is_found_with_its_shape_and_is_that_of_the_files(layer: Any, name: str, times: Any) -> None:
    row = FORMATS[name]
    config = row.config | dict(row.says)
    weight = row.weight(*times)
    fqn = "model.layers.0.mlp.up_proj"
    module = torch.nn.Module() if weight.dim() > 2 else layer.get_submodule(fqn)
    family = next(codec for codec in CODECS if config["quant_method"] in codec.methods)
    codec = family.by_config(layer, config)(fqn, module)
    assert codec is not None
    promised = codec.layout(tuple(weight.shape)).looks(row.key)
    stored = parts_of(row.store(weight), row.key)
    of_file = {f"{row.key.rpartition('.')[0]}.{name}": (t.dtype, tuple(t.shape)) for name, t in stored.items()}
    assert promised == {key: part for key, part in of_file.items() if not key.endswith("_shape")}
    tensors = {
        key: StoredTensor(
            key=key, file=Path(), dtype=dtype, shape=shape, offset=0, num_bytes=math.prod(shape) * dtype.itemsize
        )
        for key, (dtype, shape) in promised.items()
    }
    index, found = with_floats(CheckpointIndex(name="", tensors=tensors, header_bytes=0), config, [])
    assert {key: tensor.shape for key, tensor in index.tensors.items()} == {row.key: tuple(weight.shape)}
    assert found and found.num_values == weight.numel() and found.stored_bytes == index.num_bytes


# ---- what does not fit ----

OPTIONAL = ("weight_zero_point", "weight_shape")
UNKNOWN = {("fp4 by exponents", "scale"), ("fp4 by another name", "qscale_weight"), ("nvfp4", "weight_scale")}
UNKNOWN |= {("int8", "weight_scale"), ("int8 with zero points", "weight_scale")}
"""Values that no name tells from others without these scales: they are left as they are, and refused as what a model
is loaded from."""


def refused(folder: Path, tensors: Tensors, config: Config) -> str:
    with pytest.raises(CheckpointError, match="Download or quantise the checkpoint again") as caught:
        opened(folder, tensors, config)
    assert "model.safetensors: 'a." in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_names_dtypes_and_sizes_that_do_not_fit_are_one_error_by_their_headers(tmp_path: Path, name: str) -> None:
    row = FORMATS[name]
    good = row.store(row.weight(3, 6))
    for part in [part for part in parts_of(good, row.key) if "scale" in part or "zero" in part]:
        key = next(key for key in good if key.endswith(f".{part}"))
        absent, bytes_ = {k: t for k, t in good.items() if k != key}, good[key].reshape(-1).view(torch.uint8)
        more = bytes_.repeat(7).view(good[key].dtype).view(7 * (good[key].shape or (1,))[0], *good[key].shape[1:])
        if (name, part) in UNKNOWN:
            assert not any(tensor.parts[1:] for tensor in opened(tmp_path, absent, row.config).tensors.values())
        elif part not in OPTIONAL:
            assert part in (said := refused(tmp_path, absent, row.config)) or "no scales" in said, said
        if (name, part) != ("nvfp4", "weight_scale"):
            assert part in (said := refused(tmp_path, good | {key: good[key].to(torch.float64)}, row.config)), said
        assert "[" in refused(tmp_path, good | {key: more}, row.config)


@pytest.mark.parametrize("name", FORMATS)
def test_scales_that_no_quantisation_gives_are_one_error(tmp_path: Path, name: str) -> None:
    """NaN, which exponents have at 255, and zero where the smallest blocks are none."""
    row = FORMATS[name]
    for key, tensor in (good := row.store(row.weight(3, 6))).items():
        is_scale = "scale" in key.rpartition(".")[2] and not key.endswith(UNREAD)
        bytes_of_bad = [255] if tensor.itemsize == 1 else [255, 0]
        for bad in bytes_of_bad if is_scale else ():
            damaged = tensor.clone()
            damaged.view(-1)[-1:].view(torch.uint8).fill_(bad)
            index = opened(tmp_path, good | {key: damaged}, row.config)
            (stored,) = [PieceTensor.stored(found, torch.float32) for found in index.tensors.values()]
            whole = Box(start=(0,) * stored.dim(), length=tuple(stored.shape))
            with Reader(staging_bytes=2**17, side=None) as reader, pytest.raises(CheckpointError, match="1 scales"):
                read_into([(torch.empty(stored.shape), stored, whole)], index, reader, staging_bytes=2**17)


@pytest.mark.parametrize("name", FORMATS)
def test_values_that_a_pickle_holds_transposed_are_one_error(tmp_path: Path, name: str) -> None:
    row = FORMATS[name]
    good = row.store(row.weight(3, 6))
    key, values = next(iter(good.items()))
    torch.save(good | {key: values.transpose(0, -1).contiguous().transpose(0, -1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="stored transposed; save it as safetensors"):
        with_floats(CheckpointIndex.open(tmp_path, allow_pickle=True), row.config, [])


PLAIN_ONCE = r".* make a plain checkpoint of it once .*model\.dequantize\(\)"
REFUSED: dict[str, tuple[str, Config, Tensors, str]] = {
    "blocks of another size": ("fp8 in short blocks", {"weight_block_size": [7, 16]}, {}, "nor on blocks of 7 x 16"),
    "blocks of no size": ("fp8 in blocks", {"weight_block_size": [0, 0]}, {}, r"size is \[0, 0\], expected two n"),
    "scales without values": ("gptq", {}, {"qweight": torch.ones(0)}, "what it scales, .*qweight', is no such"),
    "ordered by activation": ("gptq", {"desc_act": True}, {}, f"desc_act orders its columns{PLAIN_ONCE}"),
    "ordered by the file": ("packed int4", {}, {"weight_g_idx": torch.ones(9)}, f"_g_idx' orders its col{PLAIN_ONCE}"),
    "bits without a rule": ("gptq", {}, {"qzeros": torch.ones(3, 3).int(), "scales": torch.ones(3, 32).half()},
         f"integers of 3 bits, expected 4 or 8;{PLAIN_ONCE}"),
    "another layout": ("gptq", {"checkpoint_format": "marlin"}, {},
         f"is 'marlin', expected gptq or gptq_v2;{PLAIN_ONCE}"),
    "another method": ("gptq", {"quant_method": "awq", "checkpoint_format": None}, {},
         r"not of one matrix of \[12, 192"),
    "no matrix": ("gptq", {}, {"scales": torch.ones(40).half()}, r"three matrices, .*scales': \[40\]"),
    "a size in words": ("gptq", {"group_size": "32"}, {}, "group_size is '32', expected -1"),
    "groups of others": ("gptq", {}, {"g_idx": torch.zeros(48).int()}, r"not of one matrix of \[96, 24\]"),
    "another algorithm": ("mxfp8 of ModelOpt", {"quant_algo": "FP8"}, {"weight_scale": torch.ones(1)},
         f"quant_algo is 'FP8', expected MXFP8;{PLAIN_ONCE}"),
    "rows of no blocks": ("mxfp8", {}, {"weight": torch.ones(3, 48).to(torch.float8_e4m3fn)}, "whole blocks of 32"),
    "a vector": ("mxfp8", {}, {"weight": torch.ones(32).to(torch.float8_e4m3fn)}, "expected a matrix, or a stack"),
}  # fmt: skip
"""The format, what else its config says, what lies in place of its tensors, and what the error says."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_config_or_other_tensors_make_wrong_is_one_error(tmp_path: Path, name: str) -> None:
    kind, says, instead, words = REFUSED[name]
    row = FORMATS[kind]
    good = row.store(row.weight(3, 6))
    tensors = good | {row.key.replace("weight", part): t for part, t in instead.items()}
    said = refused(tmp_path, {key: tensor for key, tensor in tensors.items() if tensor.numel()}, row.config | says)
    assert re.search(words, said), said
