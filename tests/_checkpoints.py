"""Tiny real checkpoints of many architectures, written by transformers' own `save_pretrained`.

Sizes are awkward on purpose: hidden 48, vocabulary 131, odd intermediate sizes and 4 experts, so that 2 and 3 ranks get
uneven and also empty shards. Each is split into several files, with an index.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_fsdp_tools.modeling.meta import build_meta_model

__all__ = [
    "KINDS",
    "assert_same_model",
    "full",
    "full_state",
    "make_checkpoint",
    "make_model",
    "pickled_copy",
    "plain_model",
    "randomize",
    "sharded_meta_model",
    "stored_tensors",
    "tiny_config",
]

_SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 67,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 22}


def _llama() -> PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES, tie_word_embeddings=False))


def _tied() -> PreTrainedModel:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_SIZES, head_dim=12, tie_word_embeddings=True))


def _gpt2() -> PreTrainedModel:
    config = hf.GPT2Config(vocab_size=131, n_embd=48, n_layer=2, n_head=4, n_positions=64, n_inner=67)
    config.bos_token_id, config.eos_token_id = 1, 2
    return hf.GPT2LMHeadModel(config)


def _mixtral() -> PreTrainedModel:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2))


def _qwen3_moe() -> PreTrainedModel:
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_SIZES, **_MOE, head_dim=12, decoder_sparse_step=1))


def _qwen2_moe() -> PreTrainedModel:
    """Its `shared_expert_gate` has one row: every rank but one holds nothing of it."""
    config = hf.Qwen2MoeConfig(**_SIZES, **_MOE, shared_expert_intermediate_size=35, decoder_sparse_step=1)
    return hf.Qwen2MoeForCausalLM(config)


def _deepseek_v3() -> PreTrainedModel:
    """Its router has a persistent buffer, `e_score_correction_bias`."""
    sizes = _SIZES | {"num_key_value_heads": 4}
    config = hf.DeepseekV3Config(
        **sizes,
        moe_intermediate_size=22,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=9,
        q_lora_rank=11,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=12,
    )
    return hf.DeepseekV3ForCausalLM(config)


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


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "tied": _tied,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "deepseek_v3": _deepseek_v3,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
}


_TINY = _SIZES | {
    "head_dim": 12,
    "num_layers": 2,
    "num_heads": 4,
    "depth": 2,
    "embed_dim": 48,
    "d_model": 48,
    "image_size": 16,
    "patch_size": 4,
    "out_hidden_size": 48,
    "ffn_hidden_size": 67,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 67,
    "decoder_ffn_dim": 67,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 22,
    "expert_ffn_hidden_size": 22,
    "shared_expert_intermediate_size": 35,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 9,
    "q_lora_rank": 11,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default config of a model type with every size that it has made tiny, in its sub-configs too."""
    config = hf.AutoConfig.for_model(model_type)
    config = hf.AutoConfig.for_model(model_type, **_tiny_sizes(config))  # again, for what follows from the sizes
    _shrink(config)
    return config


def _tiny_sizes(config: PreTrainedConfig) -> dict[str, int]:
    """The sizes that this config has, save those that it computes from others."""
    own = {name for name in _TINY if not isinstance(getattr(type(config), name, None), property)}
    return {name: value for name, value in _TINY.items() if name in own and type(getattr(config, name, None)) is int}


def _shrink(config: PreTrainedConfig) -> None:
    for name, value in _tiny_sizes(config).items():
        setattr(config, name, value)
    for name in ("layer_types", "mlp_layer_types"):  # one entry per layer; the last ones are the sparse ones
        if isinstance(vars(config).get(name), list):
            setattr(config, name, getattr(config, name)[-2:])
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            _shrink(value)


def randomize(model: PreTrainedModel, *, seed: int = 0) -> PreTrainedModel:
    """Make every parameter and persistent buffer random, norms around one, so that no value equals its
    initialisation."""
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


# ---- sharded models ----


def sharded_meta_model(
    kind: str, folder: Path, *, dtype: torch.dtype | None = None, **sharding: Any
) -> PreTrainedModel:
    """The kind's model on meta, every member of a ModuleList a unit, then the root."""
    model = build_meta_model(folder, auto_class=type(make_model(kind)), dtype=dtype)
    for module in reversed([m for m in model.modules() if isinstance(m, nn.ModuleList)]):  # inner lists first
        for block in module:
            fully_shard(block, **sharding)
    fully_shard(model, **sharding)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered if it is sharded, on the CPU."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, every tensor whole."""
    return {key: full(tensor) for key, tensor in model.state_dict().items()}


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
