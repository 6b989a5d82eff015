"""Quantised weights by themselves: any part of any view equals that part of the whole weight, dequantised by the
libraries' own functions; bounded memory; what does not fit is refused by its headers."""

import json
import math
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_fsdp_tools import CheckpointError, ConfigError, from_pretrained
from hf_fsdp_tools.loading.fill import read_into
from hf_fsdp_tools.loading.quantized import dequantize, keep
from hf_fsdp_tools.loading.quantized.dequantize import RULES
from hf_fsdp_tools.loading.quantized.recognize import with_floats
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import QUANTIZED, make_quantized, stored_tensors
from tests._transfers import Windows
from tests.api import Box, CheckpointIndex, PieceTensor, Reader

Tensors = dict[str, torch.Tensor]


def bytes_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def fp8_of(*shape: int) -> torch.Tensor:
    return (bytes_of(*shape) & 0x7E).view(torch.float8_e4m3fn)  # no NaN


def scales_of(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.01


def in_fp32(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return Fp8Dequantize(None)._dequantize_one(values, scales, dtype)


def on_short_blocks(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The format's own rule, for which transformers has none: blocks of 8 x 16, of which the last ones are short."""
    rows, columns = values.shape
    each = scales.repeat_interleave(8, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
    return (values.float() * each).to(dtype)


def on_blocks_of_16(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The last block has 8 rows of 24, where even blocks would have 12."""
    rows, columns = values.shape
    return (values.float() * scales.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns]).to(dtype)


def as_gpt_oss(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return convert_moe_packed_tensors(blocks, scales, dtype=dtype)


def integers_less_zero_points(bits: int, words: torch.Tensor, scales: torch.Tensor, *rest: Any) -> torch.Tensor:
    """What compressed-tensors computes: in the dtype of the scales."""
    *zero_points, dtype = rest
    values = integers_of(words, bits).unflatten(-1, (scales.shape[-1], -1)).to(scales.dtype)
    for zero in zero_points:
        values = values - integers_of(zero.t(), bits).t()[: len(scales)].to(scales.dtype).unsqueeze(-1)
    return (values * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def as_nvfp4(values: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What compressed-tensors computes: in float32, rounded to bfloat16."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack([values % 16, values // 16], -1).flatten(-2).long()
    floats = table[codes % 8] * (1 - 2 * (codes // 8))
    each = (scales.float() / whole).repeat_interleave(16, -1)
    return (floats * each).bfloat16().to(dtype)


def as_gptq(bits: int, plus: int, words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, *rest: Any) -> Any:
    """What GPTQModel computes: the zero points of its older format are stored less 1, which it adds to whole words."""
    *g_idx, dtype = rest
    group = (g_idx[0] if g_idx else torch.arange(len(words) * 32 // bits) // 64).long()
    shifts, most = torch.arange(0, 32, bits), 2**bits - 1
    points = (((zeros + plus).unsqueeze(2) >> shifts) & most).reshape(scales.shape)
    integers = ((words.unsqueeze(1) >> shifts.unsqueeze(1)) & most).reshape(-1, words.shape[1])
    return (scales[group] * (integers - points[group])).t().to(dtype)


def as_awq(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What AutoAWQ computes: unpack, put into order, mask, subtract, multiply."""
    integers, points = (t.unsqueeze(2).bitwise_right_shift(torch.arange(0, 32, 4)).flatten(1) for t in (words, zeros))
    order = torch.arange(integers.shape[1]).view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].flatten()
    size = len(words) // len(scales)
    points, each = ((points[:, order] & 15).repeat_interleave(size, 0), scales.repeat_interleave(size, 0))
    return (((integers[:, order] & 15).to(torch.int8) - points.to(torch.int8)) * each).t().to(dtype)


def integers_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    data = words.contiguous().view(torch.uint8)
    codes = torch.stack([data % 16, data // 16], -1).flatten(-2) if bits == 4 else data
    return codes.to(torch.int16) - 2 ** (bits - 1)


def pack_quantized(bits: int) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": bits}}}
    return COMPRESSED | {"format": "pack-quantized", "config_groups": groups}


def words_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return bytes_of(*shape[:-1], 4 * shape[-1], seed=seed).view(torch.int32)


def gptq(bits: int, **more: torch.Tensor | None) -> Tensors:
    parts = {
        "a.qweight": words_of(96 * bits // 32, 40),
        "a.qzeros": words_of(2, 40 * bits // 32, seed=2),
        "a.scales": scales_of(2, 40).half(),
        "a.g_idx": torch.arange(96, dtype=torch.int32) // 64,
    }
    given = {f"a.{name}": tensor for name, tensor in more.items()}
    return {key: tensor for key, tensor in (parts | given).items() if tensor is not None}


FP8: dict[str, Any] = {"quant_method": "fp8"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "group_size": 64, "checkpoint_format": "gptq", "desc_act": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM"}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors"}
WEIGHTS_IN_BLOCKS = {"weights": {"strategy": "block", "block_structure": [16, 16]}}
BLOCKS_8_16 = FP8 | {"weight_block_size": [8, 16]}
EXPONENTS = bytes_of(24, 6) % 20 + 117
FP4_EXPONENTS = EXPONENTS.view(torch.float8_e8m0fnu)


WORDS = bytes_of(25, 48).view(torch.int32)

STORED: dict[str, tuple[Tensors, dict[str, Any] | None, Callable[..., torch.Tensor]]] = {
    "blocks": ({"a.weight": fp8_of(24, 96), "a.weight_scale_inv": scales_of(3, 6)}, FP8, in_fp32),
    "one scale": ({"a.weight": fp8_of(24, 96), "a.weight_scale_inv": scales_of()}, FP8, in_fp32),
    "a scale per expert": ({"a.up": fp8_of(3, 8, 96), "a.up_scale_inv": scales_of(3)}, FP8, in_fp32),
    "short blocks": ({"a.weight": fp8_of(25, 70), "a.weight_scale_inv": scales_of(4, 5)}, BLOCKS_8_16, on_short_blocks),
    "4 bits": ({"a.weight": bytes_of(24, 48).view(torch.int8), "a.qscale_weight": FP4_EXPONENTS}, FP8, in_fp32),
    "fused experts": ({"a.up": fp8_of(3, 8, 96), "a.up_scale_inv": scales_of(3, 2, 6)}, FP8, in_fp32),
    "mxfp4": ({"a.up_blocks": bytes_of(3, 8, 6, 4), "a.up_scales": EXPONENTS.view(3, 8, 6)}, None, as_gpt_oss),
    "short blocks of compressed-tensors": (
        {"a.weight": fp8_of(24, 96), "a.weight_scale": scales_of(2, 6)},
        COMPRESSED | {"config_groups": {"group_0": WEIGHTS_IN_BLOCKS}},
        on_blocks_of_16,
    ),
    "int4 with zero points": (
        {"a.weight_packed": WORDS, "a.weight_scale": scales_of(25, 3), "a.weight_zero_point": words_of(4, 3, seed=1)},
        pack_quantized(4),
        partial(integers_less_zero_points, 4),
    ),
    "packed int8 per channel": (
        {"a.weight_packed": WORDS, "a.weight_scale": scales_of(25, 1).bfloat16()},
        pack_quantized(8),
        partial(integers_less_zero_points, 8),
    ),
    "nvfp4": (
        {"a.weight_packed": bytes_of(25, 48), "a.weight_scale": fp8_of(25, 6), "a.weight_global_scale": scales_of(1)},
        COMPRESSED,
        as_nvfp4,
    ),
    "gptq of 8 bits": (gptq(8), GPTQ, partial(as_gptq, 8, 0x01010101)),
    "gptq of one group": (
        gptq(4, qzeros=words_of(1, 5), scales=scales_of(1, 40).half(), g_idx=torch.zeros(96, dtype=torch.int32)),
        GPTQ | {"group_size": -1, "desc_act": True},
        partial(as_gptq, 4, 0x11111111),
    ),
    "awq": (
        {"a.qweight": words_of(96, 5), "a.qzeros": words_of(3, 5), "a.scales": scales_of(3, 40).half()},
        AWQ,
        as_awq,
    ),
}
"""Tensors, quantization_config, and the rule for the whole weight: of values, scales and dtype."""


def opened(folder: Path, tensors: Tensors, config: dict[str, Any] | None) -> CheckpointIndex:
    save_file(tensors, folder / "model.safetensors")
    return with_floats(CheckpointIndex.open(folder), config, [])[0]


@pytest.mark.parametrize("name", STORED)
def test_any_part_of_any_view_is_that_part_of_the_whole(tmp_path, name):
    """Moved about as conversions do it: transposed, reshaped (also within rows), cut; and boxes of what comes out."""
    tensors, config, rule = STORED[name]
    index = opened(tmp_path, tensors, config)
    (key,) = index.tensors
    rng = random.Random(0)
    with Reader(staging_bytes=2**17, side=None) as reader:
        for dtype in (torch.bfloat16, torch.float32):
            whole = rule(*tensors.values(), dtype)
            assert index.tensors[key].shape == whole.shape
            assert index.num_bytes == sum(t.nbytes for t in tensors.values())
            for _ in range(10):
                symbol, expected = PieceTensor.stored(index.tensors[key], dtype), whole
                for _ in range(rng.randrange(4)):
                    seed = rng.random()
                    symbol, expected = (moved(t, random.Random(seed)) for t in (symbol, expected))
                start = [rng.randrange(n) for n in expected.shape]
                length = [rng.randint(1, n - s) for n, s in zip(expected.shape, start, strict=True)]
                memory = torch.full([2 * n for n in length], 7, dtype=dtype)
                memory = memory[tuple(slice(None, None, 2) for _ in length)]
                box = Box(start=tuple(start), length=tuple(length))
                read_into([(memory, symbol, box)], index, reader, staging_bytes=2**17)
                part = expected[tuple(slice(s, s + n) for s, n in zip(start, length, strict=True))]
                assert torch.equal(memory, part), (dtype, box)


def moved(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
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


class Alive(TorchDispatchMode):
    """The most bytes of tensors made in a block that are alive at a time, without those of memory that was there."""

    def __init__(self, *there: torch.Tensor) -> None:
        super().__init__()
        self._there = {tensor.untyped_storage()._cdata for tensor in there}
        self._alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._alive.keys() | self._there:
                self._alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.most = max(self.most, sum(self._alive.values()))
        return result


@pytest.mark.parametrize("name", STORED)
def test_packed_bytes_become_the_same_floats_in_bounded_memory(tmp_path, patch_inner, name):
    """Above the weight, 16 bytes of each value that is dequantised at a time; of rows, and of whole matrices."""
    tensors, config, rule = STORED[name]
    (stored,) = opened(tmp_path, tensors, config).tensors.values()
    parts = [keep._as_bytes(stored, part) for part in stored.stored]
    values, *scales = [tensors[part.key].contiguous().view(-1).view(torch.uint8).view(part.shape) for part in parts]
    for dtype in (torch.bfloat16, torch.float32):
        form = replace(stored.form, dtype=dtype)
        expected = rule(*tensors.values(), dtype)
        for many in (100, 1600, 2**20):
            patch_inner(VALUES_AT_A_TIME=many)
            with Alive(values, *scales) as alive:
                floats = form.floats(values, scales, dtype)
            assert floats.is_contiguous() and torch.equal(floats, expected), (dtype, many)
            assert alive.most - floats.nbytes <= 16 * min(many, math.prod(stored.shape)) + 1024, (dtype, many)


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"fp4", "nf4"}))  # by kernels that take a whole weight
def test_rows_by_themselves_give_the_bits_that_they_give_within_a_weight(rule):
    """For every exponent, whether a loop takes it in a vector or alone."""
    exponents = torch.arange(255, dtype=torch.uint8).view(-1, 1).repeat(1, 3)
    has_floats = rule == "scaled" or "int" in rule
    scales = (exponents.float() - 127).exp2() if has_floats else exponents
    values = bytes_of(255, 48) if rule == "mxfp4" else fp8_of(255, 48)
    values = values.view(torch.int32) if "int" in rule else values.view(torch.uint8) if rule == "nvfp4" else values
    beside = {"scale": scales} | ({"global scale": torch.full((255, 1), 0.3)} if rule == "nvfp4" else {})
    for dtype in (torch.bfloat16, torch.float32):
        whole = RULES[rule](values, beside, dtype)
        for start, stop in ((0, 1), (3, 4), (7, 24), (200, 255)):
            part = RULES[rule](values[start:stop], {key: t[start:stop] for key, t in beside.items()}, dtype)
            assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (part, whole[start:stop])))


def test_memory_is_bounded_and_reads_are_few(tmp_path, monkeypatch):
    """A weight of 2 MB at 1 MiB of staging: no part that is dequantised and no window that is read is larger than its
    share of that; one window is read while the one before is dequantised."""
    sizes = {"hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.Qwen3Config(vocab_size=131, num_key_value_heads=4, head_dim=64, **sizes)
    monkeypatch.setitem(QUANTIZED, "large", (lambda: hf.Qwen3ForCausalLM(config), *QUANTIZED["fp8 of 128 x 128"][1:]))
    folder = make_quantized("large", tmp_path / "large")
    seen = Windows(monkeypatch)
    dequantizing = seen.computing(RULES["scaled in fp32"])
    monkeypatch.setattr(dequantize, "RULES", dict(RULES) | {"scaled in fp32": dequantizing})
    model = build_meta_model(folder)
    report = load_weights(model, folder, staging_bytes=2**20)
    stored = stored_tensors(folder)
    # scales are read again for the next rows of their blocks
    assert sum(t.nbytes for t in stored.values()) == report.share_bytes <= report.bytes_read
    assert report.read_ratio <= 1.05
    assert sum(seen.parts) == sum(t.numel() for t in stored.values() if t.dtype == torch.float8_e4m3fn)
    seen.are_bounded(1, int(1.05 * 2**16))
    seen.parts.clear()
    report = load_weights(build_meta_model(folder), folder)
    assert len(seen.parts) < 60 and report.read_calls <= len(seen.parts) + len(stored), "few calls for scales"
    assert report.read_ratio <= 1.001


def test_experts_of_nvfp4_are_as_compressed_tensors_makes_them(tmp_path, monkeypatch):
    """Not as transformers does, which leaves the scale of the whole weight of experts out (5.23)."""
    reason = "compressed-tensors is not installed (pip install compressed-tensors)"
    compressors = pytest.importorskip("compressed_tensors.compressors", reason=reason)
    from compressed_tensors.quantization import QuantizationScheme

    config = QUANTIZED["compressed nvfp4"][2]
    made = QUANTIZED["compressed experts"][0], QUANTIZED["compressed nvfp4"][1], config
    monkeypatch.setitem(QUANTIZED, "experts", made)
    folder = make_quantized("experts", tmp_path / "experts")
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
    stored = stored_tensors(folder)
    model = build_meta_model(folder)
    load_weights(model, folder)
    found = model.state_dict()
    for layer in range(2):
        theirs: dict[str, list[torch.Tensor]] = {"w1": [], "w2": [], "w3": []}
        for expert, name in ((expert, name) for expert in range(4) for name in theirs):
            module = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}."
            parts = {key.removeprefix(module): tensor for key, tensor in stored.items() if key.startswith(module)}
            theirs[name].append(compressor.decompress(parts, scheme)["weight"])
        w1, w2, w3 = map(torch.stack, theirs.values())
        assert torch.equal(found[f"model.layers.{layer}.mlp.experts.down_proj"], w2)
        assert torch.equal(found[f"model.layers.{layer}.mlp.experts.gate_up_proj"], torch.cat([w1, w3], 1))


GOOD = {"a.weight": fp8_of(32, 64), "a.weight_scale_inv": scales_of(2, 2), "b.weight": torch.ones(4)}


def good_but(**changed: torch.Tensor | None) -> Tensors:
    named = {name.replace("__", "."): tensor for name, tensor in changed.items()}
    return {key: tensor for key, tensor in (GOOD | named).items() if tensor is not None}


BAD: dict[str, tuple[Tensors, dict[str, Any] | None, str]] = {
    "no scales": (good_but(c__weight=fp8_of(8, 8)), None, r"'c\.weight' \(float8_e4m3fn \[8, 8\]\) has no scales"),
    "another shape": (
        good_but(a__weight_scale_inv=scales_of(3, 2)),
        FP8 | {"weight_block_size": [16, 32]},
        r"its scales 'a\.weight_scale_inv' \[3, 2\] lie on no blocks of it, nor on blocks of 16 x 32 as the config",
    ),
    "another dtype": (
        good_but(a__weight_scale_inv=torch.ones(2, 2, dtype=torch.int64)),
        FP8,
        r"'a\.weight_scale_inv' next to it holds int64, expected float32 or bfloat16",
    ),
    "blocks of another number": (
        {"a.up_blocks": bytes_of(6, 16, 5, 16), "a.up_scales": bytes_of(6, 16, 4)},
        None,
        r"expected blocks \[experts, rows, blocks, bytes\] with scales .* found scales \[6, 16, 4\]",
    ),
    "zero points of another number": (
        {"a.weight_packed": WORDS, "a.weight_scale": scales_of(25, 3), "a.weight_zero_point": torch.ones(3, 3).int()},
        pack_quantized(4),
        r"its zero points 'a\.weight_zero_point' are \[3, 3\], .* one word for each 8 rows",
    ),
    "columns ordered by activation": (
        {"a.weight_packed": WORDS, "a.weight_scale": scales_of(25, 3), "a.weight_g_idx": torch.ones(96).int()},
        pack_quantized(4),
        r"'a\.weight_g_idx' orders its columns by activation, so that no block .* model\.dequantize\(\)",
    ),
    "no scale of the weight": (
        {"a.weight_packed": bytes_of(25, 48), "a.weight_scale": fp8_of(25, 6)},
        COMPRESSED,
        r"it has no 'a\.weight_global_scale' next to it",
    ),
    "gptq of 3 bits": (
        gptq(3, qweight=words_of(9, 32), qzeros=words_of(2, 3), scales=scales_of(2, 32).half()),
        GPTQ,
        r"mean integers of 3 bits, expected 4 or 8; make a plain .* model\.dequantize\(\)",
    ),
    "gptq for marlin": (
        gptq(4),
        GPTQ | {"checkpoint_format": "marlin"},
        r"format is 'marlin', expected gptq or gptq_v2; make a plain .* model\.dequantize\(\)",
    ),
    "gptq without values": (gptq(4, qweight=None), GPTQ, r"'a\.qzeros' .* what it scales, 'a\.qweight', is no such"),
    "awq packed as gptq": (gptq(4), AWQ, r"'a\.qweight': \[12, 40\], .* not of one matrix of \[12, 320\] integers"),
    "gptq of no matrix": (gptq(4, scales=scales_of(40).half()), GPTQ, r"three matrices, .*'a\.scales': \[40\]"),
    "gptq of groups of words": (gptq(4), GPTQ | {"group_size": "64"}, r"group_size is '64', expected -1 or a number"),
    "gptq of other groups": (
        gptq(4, g_idx=torch.zeros(48, dtype=torch.int32)),
        GPTQ,
        r"'a\.g_idx': \[48\]\} are not of one matrix of \[96, 40\] integers of 4 bits",
    ),
    "gptq ordered by activation": (
        gptq(4),
        GPTQ | {"desc_act": True},
        r"desc_act orders its columns by activation, so that no block .* model\.dequantize\(\)",
    ),
    "blocks of no size": (
        good_but(),
        FP8 | {"weight_block_size": [0, 0]},
        r"weight_block_size is \[0, 0\], expected two n",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_by_its_headers(tmp_path, name):
    tensors, config, message = BAD[name]
    with pytest.raises(CheckpointError, match=message) as error:
        opened(tmp_path, tensors, config)
    assert "model.safetensors: 'a." in str(error.value) or "'c." in str(error.value)
    assert "Download or quantise the checkpoint again" in str(error.value)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_quantized("fp8", tmp_path_factory.mktemp("fp8"))


@pytest.mark.parametrize(("method", "reason"), [("auto-round", "packs values with zero points"), (7, "no rule is")])
def test_a_method_without_a_rule_per_block_is_refused_with_the_reason(fp8, method, reason):
    """Whatever the files hold; and the script that makes a plain checkpoint is there."""
    config = json.loads((fp8 / "config.json").read_text())
    model = build_meta_model(hf.Qwen3Config(**config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(CheckpointError, match=rf"quantised \({method}\); .*{reason}(.|\n)*model\.dequantize\(\)"):
        load_weights(model, fp8)


def test_rotated_weights_are_refused_and_warnings_say_what_was_dequantised(fp8, tmp_path, monkeypatch):
    config = json.loads((fp8 / "config.json").read_text())
    for transform in ({"config_groups": {"R4": {"type": "hadamard"}}}, {"config_groups": {}}, {}):
        quantization = config["quantization_config"] | {"transform_config": transform}
        model = build_meta_model(hf.Qwen3Config(**config | {"quantization_config": quantization}))
        with pytest.raises(CheckpointError, match="has transform_config") if any(transform.values()) else nullcontext():
            load_weights(model, fp8)
    # transformers spreads the scales evenly; weights whose size is no multiple of the block size come out otherwise
    # than they were quantised.
    for file in fp8.glob("*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [8, 17]  # 48 columns are 3 blocks of them, the last one short
    (tmp_path / "config.json").write_text(json.dumps(config))
    said: list[str] = []
    monkeypatch.setattr(hf.logging.get_logger("transformers.modeling_utils"), "warning", said.append)
    from_pretrained(tmp_path)
    assert len(said) == 2 and "its weights were dequantised while they were read. fp8: 38.0 kB as stored" in said[0]
    assert "14 weights have scales on other blocks than weight_block_size says (model.layers.0.mlp.down" in said[1]


@pytest.mark.parametrize("given", [hf.FineGrainedFP8Config(dequantize=True), None])
def test_what_transformers_needs_to_be_told_may_be_said(fp8, given):
    options = {} if given is None else {"quantization_config": given}
    model, report = from_pretrained(fp8, output_loading_info=True, **options)
    assert report.dequantized_from == "fp8" and "fp8: 38.0 kB as stored, with scales, became" in str(report)
    assert not hasattr(model.config, "quantization_config") and not getattr(model, "is_quantized", False)
    with pytest.raises(ConfigError, match="only 4-bit weights of bitsandbytes"):
        from_pretrained(fp8, quantization_config=hf.FineGrainedFP8Config())
