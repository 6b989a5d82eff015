"""A training step on one GPU asks no more of the CUDA runtime than a plain loop: kernels, copies, waits, memory.

Kernels do nothing on the stand-in.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn.attention import varlen
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from hf_fsdp_tools.modeling import packed_weight
from tests._dist import run_ranks
from tests.gpu_stand_in import counts_on, fakegpu

pytestmark = counts_on(1)

CASES: dict[str, dict[str, Any]] = {
    "all weights, fp32 masters": {"dtype": torch.float32, "mp_policy": "bf16"},
    "all weights in bf16": {"dtype": torch.bfloat16},
    "LoRA": {"dtype": torch.bfloat16, "mp_policy": "bf16", "adapter": True},
    "LoRA, checkpointed": {"dtype": torch.bfloat16, "mp_policy": "bf16", "adapter": True, "checkpointed": True},
    "LoRA on a base in FP8": {"dtype": torch.bfloat16, "mp_policy": "bf16", "adapter": True, "dequantize": False},
    "packed rows": {"dtype": torch.bfloat16, "packed": True},
}

COUNTS = ("kernel", "copy D2D", "cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamSynchronize")


def dequantised_by_one_kernel(form: Any, values: Any, scales: Any, dtype: Any) -> Any:
    """A kernel in the place of the compiled one (`tests/ranks/test_packed.py`): the stand-in has no compiler."""
    return torch.zeros(form.shape, dtype=dtype, device=values.device)


def made(folder: Path, case: str, who: str) -> Any:
    options = {key: value for key, value in CASES[case].items() if key in ("dtype", "mp_policy", "dequantize")}
    is_stored = "dequantize" in options and who == "ours"  # the plain loop has the base in bf16
    adapter = LoraConfig(r=8, target_modules="all-linear") if "adapter" in CASES[case] else None
    if who == "plain loop":
        model: Any = LlamaForCausalLM.from_pretrained(folder / "bf16", dtype=options["dtype"]).cuda()
        model = model if adapter is None else get_peft_model(model, adapter)
    else:
        from hf_fsdp_tools import from_pretrained

        packed_weight._takes_kernel = lambda values: True
        packed_weight._compiled = lambda: dequantised_by_one_kernel  # type: ignore[assignment]
        folder /= "fp8" if is_stored else "bf16"
        model = from_pretrained(folder, peft_config=adapter, load_kwargs={"progress": False}, **options)
    if "checkpointed" in CASES[case]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def step_of(model: Any, case: str, who: str, tokens: int = 64) -> Callable[[], None]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    varlen._should_use_cudnn = lambda device: False  # type: ignore[attr-defined]  # of which there is no stand-in
    with fakegpu.kernels_on_cpu():  # with other positions, rows would be packed
        batch["position_ids"] = torch.arange(tokens, device="cuda").remainder(
            16 if "packed" in CASES[case] else tokens
        )[None]
    make_mask = modeling_llama.create_causal_mask

    def computed_mask(**given: Any) -> Any:
        with fakegpu.kernels_on_cpu():
            return make_mask(**given)

    modeling_llama.create_causal_mask = computed_mask

    def step() -> None:
        by_hand = who == "plain loop" and "mp_policy" in CASES[case]
        with torch.autocast("cuda", torch.bfloat16) if by_hand else nullcontext():
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def counted(folder: Path, case: str, who: str, steps: int = 5) -> dict[str, float]:
    """Calls of one step, and MiB at its peak."""
    step = step_of(made(folder, case, who), case, who)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    gc.disable()
    fakegpu.reset()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    gc.enable()
    stats = fakegpu.stats()
    found = {name: stats.get(name, 0) / steps for name in COUNTS}
    return found | {"peak MiB": torch.cuda.max_memory_allocated() / 2**20}


def checkpoint(folder: Path, layers: int) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=1024)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "bf16")
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(folder / "fp8")
    tensors = {}
    for key, tensor in load_file(folder / "bf16" / "model.safetensors").items():
        if "_proj" in key:
            tensors[f"{key}_scale_inv"] = torch.ones(tensor.shape[0] // 128, tensor.shape[1] // 128)
            tensor = tensor.to(torch.float8_e4m3fn)
        tensors[key] = tensor
    save_file(tensors, folder / "fp8" / "model.safetensors", {"format": "pt"})
    return folder


def both(folder: Path, case: str) -> dict[str, dict[str, float]]:
    return {who: counted(folder, case, who) for who in ("plain loop", "ours")}


@pytest.mark.parametrize("case", CASES)
def test_a_step_on_one_gpu_asks_no_more_than_a_plain_loop(case: str, tmp_path: Path) -> None:
    (found,) = run_ranks(both, 1, checkpoint(tmp_path, layers=4), case, device="cuda")
    more = {"cudaStreamSynchronize": 1} if case == "packed rows" else {}  # to list the documents
    more |= {"kernel": 2 * 7 * 4} if "FP8" in case else {}  # each matrix is dequantised in both passes
    for name in (*COUNTS, "peak MiB"):
        assert found["ours"][name] <= 1.02 * found["plain loop"][name] + more.get(name, 0), (name, found)


def peaks(folder: Path) -> dict[str, float]:
    """Bytes at the peak of a step of 4,096 tokens, and kernels of attention in it, of whole and of packed rows."""
    found = {}
    for case in ("all weights in bf16", "packed rows"):
        step = step_of(made(folder, case, "ours"), case, "ours", tokens=4096)
        step()
        torch.cuda.reset_peak_memory_stats()
        fakegpu.reset()
        step()
        found[case] = torch.cuda.max_memory_allocated()
        found[f"{case}, flash"] = sum(count for name, count in fakegpu.stats("kernel ").items() if "flash" in name)
        del step
        gc.collect()
    return found


def test_packed_rows_need_no_more_memory_than_whole_ones(tmp_path: Path) -> None:
    (found,) = run_ranks(peaks, 1, checkpoint(tmp_path, layers=2), device="cuda")
    assert found["packed rows"] - found["all weights in bf16"] < 4096 * 64, "a mask has 4,096 x 4,096 bytes"
    assert found["packed rows, flash"] >= 4, found
