"""Checkpoints of real architectures, written on the spot, and whether they are in the page cache."""

import ctypes
import json
import math
import mmap
import os
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.sharding.allocate import allocate

KINDS = ("dense", "moe", "tied", "gpt2", "fp8", "mxfp4", "1b", "4b", "8b")

QUANTIZED = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
}
"""The quantization_config of models whose linear layers, or experts, are stored in 8 or 4 bits."""


def config_of(kind: str, width: int, layers: int) -> hf.PreTrainedConfig:
    """A real architecture of that width; its vocabulary shrinks with widths below 1024."""
    heads = max(width // 64, 2)
    common = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    common |= {"num_key_value_heads": heads // 2, "max_position_embeddings": 4096}
    vocab = {"tied": 151936, "gpt2": 50257}.get(kind, 32000) * min(width, 1024) // 1024
    if kind in ("dense", "fp8"):
        size = width * 3 if kind == "fp8" else width * 11 // 4  # whole blocks of 128
        return hf.LlamaConfig(**common, vocab_size=vocab, intermediate_size=size, tie_word_embeddings=False)
    if kind == "tied":
        sizes = {"vocab_size": vocab, "intermediate_size": width * 3, "head_dim": 64}
        return hf.Qwen3Config(**common, **sizes, tie_word_embeddings=True)
    if kind == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocab}
        return hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    if kind == "mxfp4":
        sizes = {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": width // 2, "head_dim": 64}
        return hf.GptOssConfig(**common, **sizes, vocab_size=vocab)
    experts = {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": width * 3 // 8, "head_dim": 64}
    return hf.Qwen3MoeConfig(**common, **experts, vocab_size=vocab, tie_word_embeddings=False)


# Shapes of meta-llama/Llama-3.2-1B, Qwen/Qwen3-4B and meta-llama/Llama-3.1-8B, from their configs on the hub.
RELEASED: dict[str, dict[str, int | bool]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "vocab_size": 151936},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
}


def released(kind: str) -> hf.PreTrainedConfig:
    """A model of the hub."""
    sizes = RELEASED[kind] | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    sizes |= {"head_dim": 64 if kind == "1b" else 128, "tie_word_embeddings": kind != "8b"}
    return (hf.Qwen3Config if kind == "4b" else hf.LlamaConfig)(**sizes)


def config_of_size(kind: str, num_bytes: float) -> hf.PreTrainedConfig:
    """The widest model of about that many bytes in bf16 with at least 8 layers; or that of the hub."""
    if kind in RELEASED:
        return released(kind)
    for width in (2048, 1536, 1024, 768, 512, 256, 128):
        one, two = (build_meta_model(config_of(kind, width, n)).num_parameters() * 2 for n in (1, 2))
        layers = round((num_bytes - (2 * one - two)) / (two - one))
        if layers >= 8:
            break
    return config_of(kind, width, max(layers, 2))


def make_checkpoint(kind: str, num_bytes: float, folder: Path) -> None:
    """Unless it is there, write the model in the hub's layout: experts apart, GPT-2 without its head's prefix.

    The whole model is in memory while it is written.
    """
    if folder.exists():
        return
    model = build_meta_model(config_of_size(kind, num_bytes), dtype=torch.bfloat16)
    allocate(model, device=torch.device("cpu"))
    for parameter in model.parameters():
        if kind not in RELEASED:
            fill_at_random(parameter)
        elif parameter.dim() > 1:
            parameter.detach().normal_(0.0, 0.02)
        else:  # norms: `benchmarks/training.py` trains these models
            parameter.detach().fill_(1.0)
    part = folder.with_name(f"{folder.name}.part")
    saved = model.base_model if kind == "gpt2" else model
    saved.save_pretrained(part, max_shard_size=math.ceil(model.num_parameters() * 2 / 6 * 1.05))  # about six files
    if kind in QUANTIZED:
        quantize(kind, part)
    part.rename(folder)


def quantize(kind: str, folder: Path) -> None:
    """Put random values of 8 or 4 bits, with scales, in the place of the weights that the method quantises."""
    weight_map = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for key in list(tensors):
            if key.endswith("proj.weight") if kind == "fp8" else key.endswith(("gate_up_proj", "down_proj")):
                tensors |= quantized(kind, key, tensors.pop(key).shape)
        save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED[kind]}))


def quantized(kind: str, key: str, shape: torch.Size) -> dict[str, torch.Tensor]:
    """The stored tensors of a weight."""
    if kind == "fp8":
        values = torch.randint(0, 127, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        blocks = [-(-n // 128) for n in shape]
        return {key: values, f"{key}_scale_inv": torch.rand(blocks) / 448 + 1e-6}
    experts, columns, rows = shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    return {f"{key}_blocks": blocks, f"{key}_scales": torch.randint(100, 120, blocks.shape[:3], dtype=torch.uint8)}


def fill_at_random(parameter: nn.Parameter) -> None:
    """Random bytes, but no NaN: the highest bit of the exponent is 0, so that values are below 2."""
    bits = parameter.detach().view(-1).view(torch.int16)
    whole = bits[: bits.numel() // 4 * 4].view(torch.int64)
    whole.random_(-(2**63), None)  # four numbers at a time; all 64 bits
    bits[whole.numel() * 4 :].random_(-(2**15), 2**15)
    bits &= ~0x4000


def set_cache(folder: Path, cache: str) -> None:
    """Bring the files into the page cache, or ask the system to forget them."""
    for file in folder.iterdir():
        with open(file, "rb") as stream:
            if cache == "warm":
                while stream.read(2**24):
                    pass
                continue
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if cached := cached_bytes(stream.fileno()):
                raise RuntimeError(
                    f"{file}: {cached} bytes stay in the page cache. Another process maps them: end that one; or the "
                    "file system lives in memory (tmpfs): put the checkpoint on a disk."
                )


def cached_bytes(descriptor: int) -> int:
    """How much of a file is in the page cache, asked without touching it."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) as mapping:  # writable, which ctypes wants
        pages = (ctypes.c_ubyte * -(-len(mapping) // mmap.PAGESIZE))()
        begin = ctypes.c_ubyte.from_buffer(mapping)
        asked = ctypes.CDLL(None, use_errno=True).mincore
        asked.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        status = asked(ctypes.addressof(begin), len(mapping), pages)
        del begin  # or the mapping cannot be closed
    if status:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
