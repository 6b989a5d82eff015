"""Checkpoints of real architectures, written on the spot, and the command line that names them."""

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from benchmarks.loading.loaders import DTYPES
from benchmarks.measuring import add_page_options
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.sharding.allocate import allocate
from hf_fsdp_tools.testing import num_gpus, run_ranks

KINDS = ("dense", "moe", "tied", "gpt2", "fp8", "mxfp4", "1b", "8b")

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


# Shapes of meta-llama/Llama-3.2-1B and meta-llama/Llama-3.1-8B, from their configs on the hub.
RELEASED: dict[str, dict[str, int | bool]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
}


def config_of_size(kind: str, num_bytes: float) -> hf.PreTrainedConfig:
    """The widest model of about that many bytes in bf16 with at least 8 layers; or that of the hub."""
    if kind in RELEASED:
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
        return hf.LlamaConfig(**RELEASED[kind], **heads, tie_word_embeddings=kind == "1b")
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
        if parameter.dim() > 1:
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
    weight_map: dict[str, str] = {}
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
        return {key: values, f"{key}_scale_inv": torch.rand([-(-n // 128) for n in shape]) / 448 + 1e-6}
    experts, columns, rows = shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    return {f"{key}_blocks": blocks, f"{key}_scales": torch.randint(100, 120, blocks.shape[:3], dtype=torch.uint8)}


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


def arguments(doc: str, *, models: Sequence[str], ranks: Sequence[int], folder: str) -> argparse.Namespace:
    """The command line, with what it leaves open filled in."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    add_page_options(parser, folder)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="where shards are; GPUs where there are any")
    parser.add_argument("--ranks", type=int, nargs="+", help=f"{ranks} unless given; not more than there are GPUs")
    parser.add_argument("--models", nargs="+", choices=KINDS, default=list(models))
    parser.add_argument("--size-gb", type=float, default=3.0, help="bytes of each model in bf16; not of 1b and 8b")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cache", nargs="+", choices=["warm", "cold"], default=["warm", "cold"])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="of the shards")
    args = parser.parse_args()
    gpus = num_gpus()
    args.device = args.device or ("cuda" if gpus else "cpu")
    args.ranks = args.ranks or [n for n in ranks if args.device == "cpu" or n <= gpus]
    if args.device == "cuda" and max(args.ranks, default=1) > gpus:
        parser.error(f"--device cuda takes a GPU for each rank (there are {gpus})")
    return args


def checkpoints(args: argparse.Namespace) -> Iterator[tuple[str, Path, Path]]:
    """Name, folder, and a tiny checkpoint to begin with, of each model that was asked for."""
    for kind in args.models:
        folder = args.folder / (kind if kind in RELEASED else f"{kind}-{args.size_gb:g}GB")
        tiny = args.folder / f"{kind}-tiny"
        run_ranks(make_checkpoint, 1, "dense" if kind in RELEASED else kind, 1e6, tiny, timeout_s=900)
        run_ranks(make_checkpoint, 1, kind, args.size_gb * 1e9, folder, timeout_s=900)
        yield kind, folder, tiny
