"""The trainings of a plan: what is trained, how a user of the package and a plain loop write it, and one step of it."""

import gc
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

LENGTH = 4096
_WARM_UP, _STEPS = 3, 5
_BLOCK = (128, 128)
_DOCUMENTS = 8
"""In a packed row, of equal length."""

_ONE_B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
_ONE_B |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True}
_EIGHT_B = _ONE_B | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}
_TINY = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024, "tie_word_embeddings": False}
SHAPES = {"1b": _ONE_B, "8b": _EIGHT_B | {"tie_word_embeddings": False}}
"""Sizes of Llama 3.2 1B and Llama 3.1 8B; weights are random."""


@dataclass(frozen=True)
class Case:
    """One training. `setup` has the fields of `TrainingSetup` that describe it."""

    shape: str
    limit_s: int
    setup: dict[str, Any] = field(default_factory=dict)
    published: str = ""  # Tokens/s of others on one H100, and who says so
    is_packed: bool = False

    @property
    def is_lora(self) -> bool:
        return "lora_r" in self.setup

    @property
    def is_stored(self) -> bool:
        return not self.setup.get("dequantize", True)


_LORA = {"lora_r": 16, "per_device_train_batch_size": 1}
_AUTOMODEL = "12,473: NeMo Automodel, 2 x 4,096 tokens, docs/performance-summary.mdx of June 2026"
_BF16 = {"master_dtype": "bf16", "activation_checkpointing": True, "per_device_train_batch_size": 1}
CASES = {
    "8B LoRA": Case("8b", 120, _LORA | {"compile": True}, _AUTOMODEL),
    "8B LoRA, eager": Case("8b", 45, _LORA, _AUTOMODEL),
    "8B LoRA, packed": Case("8b", 75, _LORA, is_packed=True),
    "8B LoRA, FP8 as stored": Case(
        "8b", 100, _LORA | {"dequantize": False}, "9,600: Surogate, Qwen3-8B, docs/reference/benchmarks.md of May 2026"
    ),
    "1B full": Case("1b", 90, {"per_device_train_batch_size": 2, "compile": True}),
    "8B full, offloaded": Case("8b", 120, _BF16 | {"offload_params": True}),
}
PLANS = {
    "ten": ("8B LoRA", "8B LoRA, FP8 as stored", "8B LoRA, packed", "1B full", "8B full, offloaded", "8B LoRA, eager"),
    "three": ("8B LoRA, packed", "1B full"),
}
"""The weightiest first: a plan of ten minutes and one of three."""


def config_of(case: Case, *, tiny: bool, as_stored: bool = True) -> LlamaConfig:
    """The configuration of a case's model, also for its estimate."""
    config = LlamaConfig(**(_TINY if tiny else SHAPES[case.shape]), max_position_embeddings=8192, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    if case.is_stored and as_stored:
        how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(_BLOCK)}
        config.quantization_config = how | {"modules_to_not_convert": ["lm_head"]}
    return config


def write_checkpoint(above: Path, case: Case, device: torch.device, *, tiny: bool, as_stored: bool) -> Path:
    """A folder with random weights, drawn on the device and written by threads, unless they are there."""
    is_fp8 = as_stored and case.is_stored
    folder = above / f"{case.shape}{'-fp8' * is_fp8}"
    if (folder / "model.safetensors.index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(case, tiny=tiny, as_stored=as_stored)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(case, tiny=tiny, as_stored=False))
    names = {name: weight.shape for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        del names["lm_head.weight"]
    parts = [list(names)[first::8] for first in range(8)]
    index: dict[str, str] = {}

    def write(number: int) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name in parts[number]:
            drawn = torch.randn(names[name], device=device, dtype=torch.bfloat16)
            if is_fp8 and "_proj" in name:
                tensors[name] = (drawn * 100).to(torch.float8_e4m3fn).cpu()
                blocks = [-(-size // block) for size, block in zip(drawn.shape, _BLOCK, strict=True)]
                tensors[f"{name}_scale_inv"] = torch.full(blocks, 2e-4)
            else:
                tensors[name] = (torch.ones_like(drawn) if drawn.dim() == 1 else drawn * 0.02).cpu()
        file = f"model-{number + 1:05}-of-00008.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def _adapter() -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def ours(folder: Path, case: Case, device: torch.device, *, tiny: bool) -> Any:
    """The model of a user of the package."""
    from hf_fsdp_tools import ParallelDims, from_pretrained

    is_lower = case.is_lora or case.setup.get("master_dtype") == "bf16"
    return from_pretrained(
        folder,
        mesh=ParallelDims().build_mesh(device.type),
        dtype=torch.bfloat16 if is_lower else torch.float32,
        mp_policy="bf16",
        peft_config=_adapter() if case.is_lora else None,
        dequantize=not case.is_stored,
        offload_policy=case.setup.get("offload_params", False),
        activation_checkpointing=case.setup.get("activation_checkpointing", False),
        compile=_compiled(case, tiny=tiny),
        load_kwargs={"progress": False},
    )


def plain(folder: Path, case: Case, device: torch.device, *, tiny: bool) -> Any:
    """transformers' model, with PEFT's adapter; the base that is stored in FP8 in bf16, and nothing offloaded."""
    dtype = torch.bfloat16 if case.is_lora or "master_dtype" in case.setup else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": device})
    if case.is_lora:
        model = get_peft_model(model, _adapter())
    if case.setup.get("activation_checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options := _compiled(case, tiny=tiny):
        layers = next(module for name, module in model.named_modules() if name.endswith("layers"))
        for layer in layers:
            layer.compile(**(options if isinstance(options, dict) else {}))
    return model


def _compiled(case: Case, *, tiny: bool) -> Any:
    return ({"backend": "eager"} if tiny else True) if case.setup.get("compile") else False


def rows_of(case: Case, config: LlamaConfig, device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """One batch of random words."""
    length = 64 if tiny else LENGTH
    generator = torch.Generator().manual_seed(1)
    shape = (case.setup["per_device_train_batch_size"], length)
    ids = torch.randint(3, config.vocab_size, shape, generator=generator).to(device)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    if case.is_packed:
        batch["position_ids"] = torch.arange(length, device=device).remainder(length // _DOCUMENTS).expand(shape)
    return batch


def trained(make: Callable[..., Any], above: Path, case: Case, device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Figures of a loop that a user writes: tokens per second, peaks, seconds until it trains, first and last loss."""
    folder = write_checkpoint(above, case, device, tiny=tiny, as_stored=make is ours)
    began = time.perf_counter()
    model = make(folder, case, device, tiny=tiny).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    batch = rows_of(case, config_of(case, tiny=tiny), device, tiny=tiny)
    by_hand = make is plain and not case.setup.get("master_dtype")

    def steps(count: int) -> Iterator[torch.Tensor]:
        for _ in range(count):
            with torch.autocast(device.type, torch.bfloat16) if by_hand else nullcontext():
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()

    losses = [*steps(1 if tiny else _WARM_UP)]
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    ready, count = time.perf_counter(), 1 if tiny else _STEPS
    losses += steps(count)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - ready) / count
    found = {"tokens_s": round(batch["input_ids"].numel() / seconds), "step_s": round(seconds, 4)}
    found |= {"ready_s": round(ready - began, 1), "losses": [round(losses[at].item(), 4) for at in (0, -1)]}
    if on_gpu:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found |= {"alloc_gb": round(peaks[0] / 1e9, 3), "reserved_gb": round(peaks[1] / 1e9, 3)}
    return found


def forget() -> None:
    """Free what the last training took."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
