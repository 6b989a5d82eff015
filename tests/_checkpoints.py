"""Tiny real checkpoints of many architectures, written by transformers' own `save_pretrained`.

Sizes are awkward on purpose: hidden 48, vocabulary 131, odd intermediate sizes and 4 experts, so that 2 and 3 ranks get
uneven and also empty shards. Each is split into several files, with an index.
"""

import errno
import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from packaging.version import Version
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from hf_fsdp_tools import FSDPToolsError
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests.api import all_ranks, shrink
from tests.census.defaults import build_config
from tests.census.sizes import SIZES

RELEASE = Version(hf.__version__).release[:2]
"""That of transformers, for what an older one does otherwise."""

_SIZES = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 67, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 22}
_MLA = {"kv_lora_rank": 9, "q_lora_rank": 11, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12}


def _llama(sizes: dict[str, int] = _SIZES) -> PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, tie_word_embeddings=False))


def _tied(sizes: dict[str, int] = _SIZES) -> PreTrainedModel:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, head_dim=12, tie_word_embeddings=True))


def _gpt2() -> PreTrainedModel:
    config = hf.GPT2Config(vocab_size=131, n_embd=48, n_layer=2, n_head=4, n_positions=64, n_inner=67)
    config.bos_token_id, config.eos_token_id = 1, 2
    return hf.GPT2LMHeadModel(config)


def _mixtral(sizes: dict[str, int] = _SIZES) -> PreTrainedModel:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))


def _qwen3_moe(inner: int = 67, of_experts: int = 22) -> PreTrainedModel:
    sizes = _SIZES | _MOE | {"intermediate_size": inner, "moe_intermediate_size": of_experts}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, head_dim=12, decoder_sparse_step=1))


def _qwen2_moe() -> PreTrainedModel:
    """Its `shared_expert_gate` has one row: every rank but one holds nothing of it."""
    config = hf.Qwen2MoeConfig(**_SIZES, **_MOE, shared_expert_intermediate_size=35, decoder_sparse_step=1)
    return hf.Qwen2MoeForCausalLM(config)


def _deepseek_v3(inner: int = 67, of_experts: int = 22) -> PreTrainedModel:
    """Its router has a persistent buffer, `e_score_correction_bias`."""
    sizes = _SIZES | _MLA | {"num_key_value_heads": 4, "intermediate_size": inner, "moe_intermediate_size": of_experts}
    sizes |= {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**sizes, first_k_dense_replace=1))


def _bert() -> PreTrainedModel:
    sizes = {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}
    return hf.BertForMaskedLM(hf.BertConfig(**sizes))


def _t5() -> PreTrainedModel:
    """One embedding under three names."""
    config = hf.T5Config(vocab_size=131, d_model=48, d_kv=12, d_ff=67, num_layers=2, num_heads=4)
    return hf.T5ForConditionalGeneration(config)


def _vit() -> PreTrainedModel:
    sizes = {"hidden_size": 48, "intermediate_size": 67, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5))


_MAKERS = (_llama, _tied, _gpt2, _mixtral, _qwen3_moe, _qwen2_moe, _deepseek_v3, _bert, _t5, _vit)
KINDS: dict[str, Callable[[], PreTrainedModel]] = {make.__name__[1:]: make for make in _MAKERS}


def tiny_config(model_type: str, tp_size: int = 1) -> PreTrainedConfig:
    """The default config of a model type with every size made tiny; heads and words that so many ranks divide."""
    return shrink(build_config(model_type), "tiny", tp_size, SIZES)


def randomize(model: PreTrainedModel, *, seed: int = 0) -> PreTrainedModel:
    """Make every parameter and persistent buffer random, norms around one: no value equals its initialisation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                centre = 1.0 if tensor.dim() == 1 and name.endswith("weight") else 0.0
                tensor.copy_(centre + 0.05 * torch.randn(tensor.shape, generator=generator))
    return model


def make_model(kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """The tiny model of that kind, random throughout (see `randomize`), in evaluation mode."""
    return randomize(KINDS[kind]().to(dtype).eval(), seed=seed)


def make_checkpoint(kind: str, folder: str | Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write the tiny model of that kind to `folder`, which is returned; several files and an index."""
    make_model(kind, dtype=dtype, seed=seed).save_pretrained(folder, max_shard_size="60KB")
    return Path(folder)


def plain_model(kind: str, folder: Path, **options: Any) -> PreTrainedModel:
    """What the kind's own class makes of the folder."""
    return type(make_model(kind)).from_pretrained(folder, **options)


def four_bits(storage: torch.dtype = torch.bfloat16, **options: Any) -> hf.BitsAndBytesConfig:
    """4-bit weights as QLoRA has them, computed in fp32; each setting may be another."""
    given = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    return hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=storage, **(given | options))


def lora(**options: Any) -> LoraConfig:
    """A small adapter of a language model; each setting may be another."""
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options})


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the 131 words that these models know."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{n}": n for n in range(3, 131)}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens, padding_side="left")


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's safetensors files."""
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def pickled_copy(folder: Path, target: Path, *, files: int, transpose: bool = False) -> Path:
    """The same checkpoint as legacy `pytorch_model*.bin` in so many files; tensors that are equal share memory.

    With `transpose`, matrices are saved as transposed views, which is another order of the same bytes in the file.
    """
    tensors = stored_tensors(folder)
    if transpose:
        tensors = {key: t.t().contiguous().t() if t.dim() == 2 else t for key, t in tensors.items()}
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    if files == 1:
        torch.save(tensors, target / "pytorch_model.bin")
        return target
    weight_map = {}
    for i in range(files):
        part = {key: tensors[key] for key in sorted(tensors)[i::files]}
        name = f"pytorch_model-{i + 1:05d}-of-{files:05d}.bin"
        torch.save(part, target / name)
        weight_map |= dict.fromkeys(part, name)
    (target / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def add_heads(folder: Path, heads: dict[str, torch.Tensor], **config: Any) -> dict[str, torch.Tensor]:
    """Add tensors for which the model has no module to a checkpoint of several files, as a file; and to its config."""
    save_file(heads, folder / "heads.safetensors", metadata={"format": "pt"})
    listing = folder / "model.safetensors.index.json"
    content = json.loads(listing.read_text())
    content["weight_map"] |= dict.fromkeys(heads, "heads.safetensors")
    listing.write_text(json.dumps(content))
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | config))
    return heads


def small_llama(folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Weights of 32 x 64 to 192 x 64 values, whose blocks three ranks cannot share evenly.

    Their rows are whole blocks: on CPUs bitsandbytes 0.50 dequantises others wrongly (off by 75 %).
    """
    config = hf.LlamaConfig(**_SIZES | {"hidden_size": 64, "intermediate_size": 192}, attention_bias=True)
    randomize(hf.LlamaForCausalLM(config).to(dtype)).save_pretrained(folder, max_shard_size="30KB")
    return folder


_EVEN = _SIZES | {"intermediate_size": 80}
Tensors = dict[str, torch.Tensor]


def _in_blocks(weight: torch.Tensor, block: tuple[int, int], most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight divided by a scale for each block, as float32 of the block grid; and the scales. Blocks are made
    smaller until they divide it."""
    rows, columns = weight.shape
    high, wide = math.gcd(rows, block[0]), math.gcd(columns, block[1])
    grid = weight.float().view(rows // high, high, columns // wide, wide)
    scales = grid.abs().amax((1, 3)) / most
    return grid / scales[:, None, :, None], scales


def _fp8(key: str, weight: torch.Tensor, block: tuple[int, int] = (8, 16)) -> Tensors:
    """Values of 8 bits with a float32 scale for each block."""
    values, scales = _in_blocks(weight, block, 448)
    return {key: values.view(weight.shape).to(torch.float8_e4m3fn), f"{key}_scale_inv": scales}


def _fp8_and_exponents(key: str, weight: torch.Tensor) -> Tensors:
    """Experts of 4 bits, two to a byte, in blocks of at most 32; other weights of 8 bits. Scales are exponents, of both
    dtypes."""
    is_expert = ".experts." in key
    values, scales = _in_blocks(weight, (1, 32) if is_expert else (8, 16), 6 if is_expert else 448)
    exponents = scales.log2().ceil()
    values = (values * (scales / exponents.exp2())[:, None, :, None]).view(weight.shape)
    stored = (exponents + 127).to(torch.uint8)
    scale = f"{key.removesuffix('weight')}scale" if is_expert else f"{key}_scale_inv"
    if not is_expert:
        return {key: values.to(torch.float8_e4m3fn), scale: stored}
    return {key: _two_to_a_byte(values).view(torch.int8), scale: stored.view(torch.float8_e8m0fnu)}


def _two_to_a_byte(values: torch.Tensor) -> torch.Tensor:
    """The nearest 4-bit floats (e2m1) of values up to 6, the first of each pair in the low bits."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (values.abs().unsqueeze(-1) - table).abs().argmin(-1) + 8 * (values < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def _mxfp4(key: str, weight: torch.Tensor, *, block: int = 32) -> Tensors:
    """Experts as gpt-oss stores them: transposed, in blocks along the rows then."""
    weight = weight.transpose(1, 2)
    values, scales = _in_blocks(weight.flatten(0, 1), (1, block), 6)
    exponents = scales.log2().ceil()
    codes = _two_to_a_byte((values * (scales / exponents.exp2())[:, None, :, None]).view(*weight.shape[:2], -1, block))
    return {f"{key}_blocks": codes, f"{key}_scales": (exponents + 127).to(torch.uint8).view(codes.shape[:3])}


def _per_channel(key: str, weight: torch.Tensor, *, is_int: bool = False) -> Tensors:
    """8 bits with a scale per row, as compressed-tensors stores them; and a scale of activations."""
    scales = (weight.float().abs().amax(1, keepdim=True) / (127 if is_int else 448)).bfloat16()
    values = weight.float() / scales.float()
    values = values.round().clamp(-128, 127).to(torch.int8) if is_int else values.to(torch.float8_e4m3fn)
    module = key.removesuffix("weight")
    return {key: values, f"{key}_scale": scales, f"{module}input_scale": torch.ones(1)}


def _per_tensor(key: str, weight: torch.Tensor) -> Tensors:
    """8 bits with one scale for all."""
    scale = (weight.float().abs().max() / 448).view(1)
    values = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {key: values, f"{key}_scale": scale, key.replace("proj.weight", "proj.k_scale"): torch.ones(1)}


def _in_words(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Integers side by side in int32 words, the first one in the lowest bits; the last word is filled up."""
    codes = nn.functional.pad(codes, (0, -codes.shape[-1] % (32 // bits))).unflatten(-1, (-1, 32 // bits)).long()
    words = (codes << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def _packed(key: str, weight: torch.Tensor, *, is_symmetric: bool, group: int = 16, bits: int = 4) -> Tensors:
    """Integers in words, with a scale for each group of columns (0: all), and zero points packed along the rows."""
    grid, most = weight.float().unflatten(1, (-1, group or weight.shape[1])), 2**bits - 1
    low, high = grid.amin(2), grid.amax(2)
    scales = (grid.abs().amax(2) / (most // 2) if is_symmetric else (high - low) / most).bfloat16()
    middle = torch.full(scales.shape, most / 2 + 0.5)
    zero = middle if is_symmetric else (-low / scales.float()).round().clamp(0, most)
    codes = (grid / scales.float().unsqueeze(2) + zero.unsqueeze(2)).round().clamp(0, most).flatten(1)
    stored = {f"{key}_packed": _in_words(codes, bits), f"{key}_scale": scales}
    stored |= {f"{key}_shape": torch.tensor(weight.shape)}
    return stored if is_symmetric else stored | {f"{key}_zero_point": _in_words(zero.t(), bits).t()}


def _nvfp4(key: str, weight: torch.Tensor) -> Tensors:
    """4-bit floats two to a byte, in groups of 16 whose scales have 8 bits; they are over a scale of the weight."""
    values, scales = _in_blocks(weight, (1, 16), 6)
    whole = 448 / scales.max().view(1)
    rounded = (scales * whole).to(torch.float8_e4m3fn)
    values = (values * (scales * whole / rounded.float())[:, None, :, None]).clamp(-6, 6).view(weight.shape)
    stored = {f"{key}_packed": _two_to_a_byte(values), f"{key}_scale": rounded, f"{key}_global_scale": whole}
    return stored | {f"{key.removesuffix('weight')}input_global_scale": torch.ones(1)}


def _mxfp8(key: str, weight: torch.Tensor) -> Tensors:
    """8-bit floats, of which 32 in a row share an exponent, by ModelOpt's rule."""
    grid = weight.float().unflatten(-1, (-1, 32))
    exponents = (grid.abs().amax(-1).double() / 448).log2().ceil()
    values = (grid / exponents.exp2().unsqueeze(-1)).to(torch.float8_e4m3fn)
    return {key: values.view(weight.shape), f"{key}_scale": (exponents + 127).to(torch.uint8)}


def of_mxfp8(parts: Tensors, config: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """What ModelOpt computes of it (`MXFP8QTensor.dequantize`)."""
    powers = torch.exp2(parts["weight_scale"].float() - 127).repeat_interleave(32, -1)
    return (parts["weight"].float() * powers).to(dtype)


def _zero_points(weight: torch.Tensor, group: int, bits: int = 4) -> tuple[torch.Tensor, ...]:
    """Integers of the transposed weight, zero points and float16 scales of groups of its rows, and the groups."""
    matrix, groups = weight.float().t(), torch.arange(weight.shape[1], dtype=torch.int32) // group
    low, high = (torch.stack([getattr(part, name)(0) for part in matrix.split(group)]) for name in ("amin", "amax"))
    scales, most = ((high - low) / (2**bits - 1)).half(), 2**bits - 1
    zeros = (-low / scales.float()).round().clamp(1, most)
    return (matrix / scales.float()[groups] + zeros[groups]).round().clamp(0, most), zeros, scales, groups


def _gptq(key: str, weight: torch.Tensor, *, is_v2: bool = False, bits: int = 4, group: int = 32) -> Tensors:
    """Integers packed along the rows of the transposed weight, zero points along its columns: in v1 less 1."""
    integers, zeros, scales, groups = _zero_points(weight, group, bits)
    stored = {"qweight": _in_words(integers.t(), bits).t(), "qzeros": _in_words(zeros if is_v2 else zeros - 1, bits)}
    stored |= {"scales": scales} | ({} if is_v2 else {"g_idx": groups})
    return {key.replace("weight", name): tensor for name, tensor in stored.items()}


def _awq(key: str, weight: torch.Tensor) -> Tensors:
    """Integers and zero points packed along the columns of the transposed weight, those of even places first."""
    integers, zeros, scales, _ = _zero_points(weight, 16)
    order = torch.arange(len(weight)).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    stored = {"qweight": _in_words(integers[:, order]), "qzeros": _in_words(zeros[:, order]), "scales": scales}
    return {key.replace("weight", name): tensor for name, tensor in stored.items()}


def of_linear(parts: Tensors, config: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """A weight of GPTQ or AWQ by the last names of its tensors: what GPTQModel computes, which adds 1 to the zero
    points of its older format in whole words; or AutoAWQ."""
    words, zeros, scales = (parts[name] for name in ("qweight", "qzeros", "scales"))
    bits, is_awq = 32 * zeros.shape[1] // scales.shape[1], config["quant_method"] == "awq"
    shifts, most = torch.arange(0, 32, bits)[[0, 4, 1, 5, 2, 6, 3, 7] if is_awq else slice(None)], 2**bits - 1
    zeros = zeros + (2**32 - 1) // most if config.get("checkpoint_format") == "gptq" else zeros
    points = ((zeros.unsqueeze(2) >> shifts) & most).flatten(1)
    across, down = words.unsqueeze(2) >> shifts, words.unsqueeze(1) >> shifts.unsqueeze(1)
    integers = (across.flatten(1) if is_awq else down.flatten(0, 1)) & most
    size = config["group_size"]
    group = torch.arange(len(integers)) // (size if size > 0 else len(integers))
    return (scales[group] * (integers - points[group])).t().to(dtype)


def _plain_of(stored: Tensors, config: dict[str, Any], dtype: torch.dtype) -> Tensors:
    """The tensors of a checkpoint of GPTQ, AWQ or ModelOpt with whole weights."""
    if config["quant_method"] == "modelopt":
        plain = {key: tensor for key, tensor in stored.items() if not key.endswith("_scale")}
        for key in (key for key in plain if f"{key}_scale" in stored):
            plain[key] = of_mxfp8({"weight": stored[key], "weight_scale": stored[f"{key}_scale"]}, config, dtype)
        return plain
    names = ("qweight", "qzeros", "scales", "g_idx")
    plain = {key: t for key, t in stored.items() if not key.endswith(names)}
    for module in (key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")):
        parts = {name: stored[f"{module}.{name}"] for name in names[:3]}
        plain[f"{module}.weight"] = of_linear(parts, config, dtype)
    return plain


def gpt_oss(experts: int = 5) -> PreTrainedModel:
    sizes = _EVEN | {"hidden_size": 64, "intermediate_size": 96, "num_experts_per_tok": 2}
    sizes |= {"num_local_experts": experts}
    config = hf.GptOssConfig(**sizes, head_dim=16, layer_types=["sliding_attention", "full_attention"])
    return hf.GptOssForCausalLM(config)


WHOLE = (128, 128)


def _qwen3_large() -> PreTrainedModel:
    sizes = _EVEN | {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "num_key_value_heads": 4}
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, head_dim=96))


_even_llama, _even_mixtral = partial(_llama, _EVEN), partial(_mixtral, _EVEN)
_even_qwen3_moe = partial(_qwen3_moe, 80, 32)
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def _compressed(strategy: str, kind: str = "float") -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": weights | {"strategy": "tensor"}}
    return {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


def _in_groups(format: str, **weights: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "group_size": 16, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": given | weights}
    return _compressed("group") | {"format": format, "config_groups": {"group_0": group}}


_IN_WORDS = partial(_in_groups, "pack-quantized", type="int", strategy="group")
_MXFP8 = _in_groups("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype="uint8")
_BY_32 = {"hidden_size": 64, "intermediate_size": 96}

QUANTIZED: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[str, torch.Tensor], Tensors], dict[str, Any]]] = {
    "fp8": (partial(_tied, _EVEN), _fp8, _FP8_CONFIG | {"weight_block_size": [8, 16]}),
    "fp8 of 128 x 128": (_qwen3_large, partial(_fp8, block=WHOLE), _FP8_CONFIG | {"weight_block_size": [*WHOLE]}),
    "fp8 and fp4 experts": (partial(_deepseek_v3, 80, 32), _fp8_and_exponents, _FP8_CONFIG | {"scale_fmt": "ue8m0"}),
    "fp8 experts": (_even_mixtral, _fp8, _FP8_CONFIG | {"weight_block_size": [8, 16]}),
    "mxfp4": (gpt_oss, _mxfp4, {"quant_method": "mxfp4"}),
    "compressed per channel": (_even_llama, _per_channel, _compressed("channel")),
    "compressed per tensor": (_even_llama, _per_tensor, _compressed("tensor")),
    "compressed int8": (_even_llama, partial(_per_channel, is_int=True), _compressed("channel", "int")),
    "compressed experts": (_even_mixtral, _per_channel, _compressed("channel")),
    "compressed int4": (_even_llama, partial(_packed, is_symmetric=False), _IN_WORDS(symmetric=False)),
    "compressed int4 experts": (_even_mixtral, partial(_packed, is_symmetric=True), _IN_WORDS()),
    "compressed nvfp4": (
        _even_llama,
        _nvfp4,
        _in_groups("nvfp4-pack-quantized", type="float", strategy="tensor_group"),
    ),
    "compressed mxfp8": (partial(_llama, _EVEN | _BY_32), _mxfp8, _MXFP8),
    "mxfp8 experts": (
        partial(_mixtral, _EVEN | _BY_32),
        _mxfp8,
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", "*.gate"]},
    ),
    "gptq": (_even_llama, _gptq, _GPTQ | {"checkpoint_format": "gptq"}),
    "gptq experts": (_even_qwen3_moe, partial(_gptq, is_v2=True), _GPTQ | {"checkpoint_format": "gptq_v2"}),
    "awq": (_even_llama, _awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "awq experts": (_even_qwen3_moe, _awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
}
"""Model, how a weight is stored, and quantization_config. All linear layers but the head are quantised, or the experts
alone (mxfp4)."""


def make_quantized(kind: str, folder: Path, other: Callable[[], PreTrainedModel] | None = None) -> Path:
    """Write the quantised checkpoint of that kind, or of another model, in bf16 where it is not quantised; several
    files and an index."""
    make, store, config = QUANTIZED[kind]
    randomize((other or make)().to(torch.bfloat16)).save_pretrained(folder, max_shard_size="60KB")
    linear = r"(proj|proj_with_mqa|[qk]v?_[ab]_proj|w[123])\.weight$"
    names = r"experts\.(gate_up|down)_proj$" if kind == "mxfp4" else linear
    weight_map = {}
    for file in folder.glob("*.safetensors"):
        tensors: Tensors = {}
        for key, tensor in load_file(file).items():
            tensors |= store(key, tensor) if re.search(names, key) else {key: tensor}
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    if len(list(folder.glob("*.safetensors"))) > 1:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": config}))
    return folder


def make_every_quantized(folder: Path) -> Path:
    """A checkpoint of each kind, in a folder of its name."""
    for kind in QUANTIZED:
        make_quantized(kind, folder / kind)
    return folder


ORDERED = "model.layers.1.mlp.down_proj.g_idx"


def with_order(folder: Path, target: Path) -> Path:
    """A copy of a GPTQ checkpoint with two columns of another group, of which the config does not tell."""
    shutil.copytree(folder, target)
    file = next(f for f in target.glob("*.safetensors") if ORDERED in load_file(f))
    tensors = load_file(file)
    tensors[ORDERED][[0, -1]] = tensors[ORDERED][[-1, 0]]
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def dequantized_by_transformers(
    kind: str, folder: Path, dtype: torch.dtype, auto_class: Any = hf.AutoModelForCausalLM
) -> PreTrainedModel:
    """What transformers makes of it with `dequantize=True`, on the CPU.

    It leaves tensors that are stored plain in their stored dtype, whatever dtype was asked for (5.23). Scales that 5.17
    leaves in the model beside the weights are taken away. For GPTQ, AWQ and ModelOpt, which it does not dequantise, the
    plain checkpoint of the weights that their libraries compute with.
    """
    method = QUANTIZED[kind][2]["quant_method"]
    if method in ("gptq", "awq", "modelopt"):
        plain = _plain_of(stored_tensors(folder), QUANTIZED[kind][2], dtype)
        config = hf.AutoConfig.from_pretrained(folder)
        del config.quantization_config
        return type(QUANTIZED[kind][0]()).from_pretrained(None, config=config, state_dict=plain, dtype=dtype)
    asked = {"fp8": hf.FineGrainedFP8Config, "mxfp4": hf.Mxfp4Config, "compressed-tensors": hf.CompressedTensorsConfig}
    config = asked[method](dequantize=True)
    with patch.object(torch.distributed, "is_initialized", lambda: False):  # compressed-tensors would ask other ranks
        model = auto_class.from_pretrained(folder, dtype=dtype, quantization_config=config, device_map="cpu")
    for key in model.state_dict().keys() - build_meta_model(folder).state_dict().keys():
        owner, _, name = key.rpartition(".")
        delattr(model.get_submodule(owner), name)
    return model


def sharded_meta_model(kind: str, folder: Path, *, dtype: torch.dtype | None = None, **sharding: Any) -> Any:
    """The kind's model on meta, every member of a ModuleList a unit, then the root."""
    model = build_meta_model(folder, auto_class=type(make_model(kind)), dtype=dtype)
    for module in reversed([m for m in model.modules() if isinstance(m, nn.ModuleList)]):  # inner lists first
        for block in module:
            fully_shard(block, **sharding)
    fully_shard(model, **sharding)
    return model


def loaded(kind: str, folder: Path, **sharding: Any) -> PreTrainedModel:
    """That model with the weights of the folder."""
    model = sharded_meta_model(kind, folder, **sharding)
    load_weights(model, folder, progress=False)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered if it is sharded, on the CPU."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, every tensor whole."""
    return {key: full(tensor) for key, tensor in model.state_dict().items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_tensors(found: Tensors, expected: Tensors, what: object = "") -> None:
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys(), what
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), (what, key)
        assert torch.equal(bits(found[key]), bits(tensor)), (what, key)


def assert_same_model(model: nn.Module, reference: nn.Module, what: str = "") -> None:
    """Every parameter and buffer, gathered, equals the plain model's: values, dtypes, names, ties."""
    expected, found = reference.state_dict(keep_vars=True), model.state_dict(keep_vars=True)
    assert list(found) == list(expected), what
    for key, tensor in expected.items():
        whole = full(found[key])
        assert whole.dtype == tensor.dtype, (what, key)
        assert torch.equal(whole, tensor.detach()), (what, key)
    for (key, a), (other, b) in zip(reference.named_buffers(), model.named_buffers(), strict=True):
        assert key == other and a.dtype == b.dtype and torch.equal(a, b.cpu()), (what, key)
    ties = {(a, b) for a in expected for b in expected if expected[a] is expected[b]}
    assert ties == {(a, b) for a in found for b in found if found[a] is found[b]}, what


class Runs:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def refusal(call: Callable[[], object], kind: type[Exception] = FSDPToolsError) -> str:
    """The message of the error that the call raises on every rank: the same kind and text on all."""
    with pytest.raises(kind) as caught:
        call()
    raised = all_ranks((type(caught.value).__name__, str(caught.value)))
    assert len(set(raised)) == 1, raised
    return str(caught.value)


def no_space(*_: Any, **__: Any) -> None:
    """What a call of the file system says where the disk is full."""
    raise OSError(errno.ENOSPC, "No space left on device")
