"""One rank: trainings beside the plain loops that others write, in turn in one process; files and states; CUDA graphs.

Steps of a user of the package and of a plain loop (transformers, PEFT and autocast; FSDP2 by hand where shards are
offloaded) are timed three times each. Peaks are those of a step while no other model is there.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.measuring import share_cores
from hf_fsdp_tools import estimate_memory
from hf_fsdp_tools.distributed.mesh import local_device
from hf_fsdp_tools.foresight.throughput import throughput_of
from hf_fsdp_tools.testing import forget_accelerate, run_ranks

LENGTH, SHORT = 4096, 128
GPU = "h200-141gb"
"""The one whose estimates stand beside the figures."""
_WARM_UP, _ROUNDS = 3, 3
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
    steps: int = 20
    is_packed: bool = False
    has_graphs: bool = False
    """Whether the blocks of both models are compiled with CUDA graphs, which the package refuses to do by itself."""

    @property
    def is_lora(self) -> bool:
        return "lora_r" in self.setup

    @property
    def is_stored(self) -> bool:
        return not self.setup.get("dequantize", True)

    @property
    def is_offloaded(self) -> bool:
        return self.setup.get("offload_params", False)

    @property
    def length(self) -> int:
        return self.setup.get("max_length", LENGTH)


_LORA, _FULL = {"lora_r": 16, "per_device_train_batch_size": 1}, {"per_device_train_batch_size": 2}
_BF16 = {"master_dtype": "bf16", "activation_checkpointing": True, "per_device_train_batch_size": 1}
_SHORT = {"max_length": SHORT, "per_device_train_batch_size": 1}
CASES = {
    "8B LoRA": Case("8b", 110, _LORA),
    "1B full": Case("1b", 80, _FULL),
    "8B LoRA, 128 tokens": Case("8b", 80, _LORA | _SHORT),
    "1B full, 128 tokens": Case("1b", 60, _FULL | _SHORT),
    "8B LoRA, compiled": Case("8b", 150, _LORA | {"compile": True}),
    "8B LoRA, FP8 as stored": Case("8b", 120, _LORA | {"dequantize": False}, steps=10),
    "8B full, offloaded": Case("8b", 200, _BF16 | {"offload_params": True}, steps=3),
    "1B full, compiled": Case("1b", 110, _FULL | {"compile": True}),
    "8B LoRA, checkpointed": Case("8b", 110, _LORA | {"activation_checkpointing": True}, steps=10),
    "8B LoRA, packed": Case("8b", 100, _LORA, is_packed=True, steps=10),
    "8B LoRA, 128 tokens, CUDA graphs": Case("8b", 120, _LORA | _SHORT | {"compile": True}, has_graphs=True),
}
FILES = {"files of the 8B": 90, "state of the 1B": 90}
STEPS = {name: case.limit_s for name, case in CASES.items()}
STEPS = {name: (STEPS | FILES)[name] for name in (*[*STEPS][:5], *FILES, *[*STEPS][5:])}
"""Seconds that each step may take: the weightiest first."""


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
    model: Any = from_pretrained(
        folder,
        mesh=ParallelDims().build_mesh(device.type),
        dtype=torch.bfloat16 if is_lower else torch.float32,
        mp_policy="bf16",
        peft_config=_adapter() if case.is_lora else None,
        dequantize=not case.is_stored,
        offload_policy=case.is_offloaded,
        activation_checkpointing=case.setup.get("activation_checkpointing", False),
        compile=not case.has_graphs and _compiled(case, tiny=tiny),
        load_kwargs={"progress": False},
    )
    for layer in _layers(model) if case.has_graphs else ():  # by hand, as `from_pretrained` refuses to
        layer.compile(**_compiled(case, tiny=tiny))
    return model


def plain(folder: Path, case: Case, device: torch.device, *, tiny: bool) -> Any:
    """transformers' model, with PEFT's adapter; the base that is stored in FP8 in bf16; offloaded in units of FSDP2."""
    dtype = torch.bfloat16 if case.is_lora or "master_dtype" in case.setup else torch.float32
    place = {} if case.is_offloaded else {"device_map": {"": device}}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **place)
    if case.is_lora:
        model = get_peft_model(model, _adapter())
    if case.setup.get("activation_checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.is_lora:
            model.enable_input_require_grads()
    if options := _compiled(case, tiny=tiny):
        for layer in _layers(model):
            layer.compile(**(options if isinstance(options, dict) else {}))
    if case.is_offloaded:
        mesh, policy = init_device_mesh(device.type, (1,)), CPUOffloadPolicy(pin_memory=device.type != "cpu")
        for part in (*_layers(model), model):
            fully_shard(part, mesh=mesh, offload_policy=policy)
    return model


def _layers(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("layers"))


def _compiled(case: Case, *, tiny: bool) -> Any:
    if not case.setup.get("compile"):
        return False
    return {"backend": "eager"} if tiny else {"mode": "reduce-overhead"} if case.has_graphs else True


def rows_of(case: Case, config: LlamaConfig, device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """One batch of random words."""
    length = 64 if tiny else case.length
    generator = torch.Generator().manual_seed(1)
    shape = (case.setup["per_device_train_batch_size"], length)
    ids = torch.randint(3, config.vocab_size, shape, generator=generator).to(device)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    if case.is_packed:
        batch["position_ids"] = torch.arange(length, device=device).remainder(length // _DOCUMENTS).expand(shape)
    return batch


class Contestant:
    """A model with its optimizer, and the loop that a user writes."""

    def __init__(self, make: Any, above: Path, case: Case, device: torch.device, *, tiny: bool) -> None:
        folder = write_checkpoint(above, case, device, tiny=tiny, as_stored=make is ours)
        self.case, self.device = case, device
        self.by_hand = make is plain and not case.setup.get("master_dtype")
        began = time.perf_counter()
        self.model = make(folder, case, device, tiny=tiny).train()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        self.batch = rows_of(case, config_of(case, tiny=tiny), device, tiny=tiny)
        self.losses = [self.step().item() for _ in range(1 if tiny else _WARM_UP)]
        self.ready_s, self.seconds = time.perf_counter() - began, list[float]()

    def step(self) -> torch.Tensor:
        if self.case.has_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device.type, torch.bfloat16) if self.by_hand else nullcontext():
            loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def time(self, steps: int) -> None:
        """Add the seconds of a step, of so many in a row."""
        _wait(self.device)
        began = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        self.losses.append(loss.item())
        _wait(self.device)
        self.seconds.append((time.perf_counter() - began) / steps)

    def figures(self) -> dict[str, Any]:
        step_s = statistics.median(self.seconds)
        found = {"tokens_s": round(self.batch["input_ids"].numel() / step_s), "ready_s": round(self.ready_s, 1)}
        return found | {"step_s": [round(each, 4) for each in self.seconds], "losses": self.losses}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _peaks(contestant: Contestant, others: int) -> dict[str, float]:
    """GB of one more step, allocated above what others hold, and reserved."""
    if contestant.device.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats()
    contestant.step()
    _wait(contestant.device)
    alloc, reserved = torch.cuda.max_memory_allocated() - others, torch.cuda.max_memory_reserved()
    return {"alloc_gb": round(alloc / 1e9, 3)} | ({} if others else {"reserved_gb": round(reserved / 1e9, 3)})


def trained(name: str, above: Path, tiny: bool, names: Sequence[str]) -> dict[str, Any]:
    """Figures of the named ones of the package and the plain loop, in turn; a function for `run_ranks`."""
    share_cores()
    device, case = local_device(), CASES[name]
    found: dict[str, Any] = {}
    there: dict[str, Contestant] = {}
    for who in names:
        make: Any = {"ours": ours, "plain": plain}[who]
        held = torch.cuda.memory_allocated() if there and device.type == "cuda" else 0
        try:
            there[who] = one = Contestant(make, above, case, device, tiny=tiny)
            found[who] = _peaks(one, held)
        except Exception as error:  # the other one may train
            found[who] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    for _ in range(_ROUNDS):
        for one in there.values():
            one.time(1 if tiny else case.steps)
    return found | {who: found[who] | one.figures() for who, one in there.items()}


def kept(name: str, above: Path, tiny: bool) -> dict[str, Any]:
    """Seconds to load and save, in turn with transformers, or a training state; a function for `run_ranks`."""
    from hf_fsdp_tools import from_pretrained, make_accelerator, save_pretrained

    share_cores()
    device, found = local_device(), dict[str, list[float]]()
    case = Case("8b" if "8B" in name else "1b", 0)
    folder, out = write_checkpoint(above, case, device, tiny=tiny, as_stored=False), above / "out"

    def timed(what: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        _wait(device)
        found.setdefault(what, []).append(round(time.perf_counter() - began, 2))
        return result

    for _ in range(_ROUNDS):
        if "files" in name:
            own = partial(from_pretrained, folder, dtype=torch.bfloat16, load_kwargs={"progress": False})
            model = timed("load", own)
            timed("save", partial(save_pretrained, model, out))
            del model
            other = partial(AutoModelForCausalLM.from_pretrained, folder, dtype="auto", device_map={"": device})
            model = timed("plain load", other)
            timed("plain save", partial(model.save_pretrained, above / "plain"))
            del model
        else:
            forget_accelerate()
            accelerator = make_accelerator(cpu=device.type == "cpu", mixed_precision="bf16")
            model = from_pretrained(folder, accelerator=accelerator, load_kwargs={"progress": False}).train()
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))
            ids = rows_of(Case("1b", 0, _FULL | _SHORT), model.config, device, tiny=tiny)
            accelerator.backward(model(**ids).loss)
            optimizer.step()
            timed("save_state", partial(accelerator.save_state, out))
            timed("load_state", partial(accelerator.load_state, out))
            del model, optimizer
        for place in (out, above / "plain"):
            shutil.rmtree(place, ignore_errors=True)
    return dict(found)


# ---- for run.py ----

HEADS = ("hf_fsdp_tools", "foreseen", "plain loop", "ours over plain")


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    given = (1, name, options.folder, options.tiny)
    if name not in CASES:
        return dict(run_ranks(kept, *given, device=options.device, timeout_s=STEPS[name])[0])
    found, sides = dict[str, Any](), [["ours", "plain"]]
    if CASES[name].is_offloaded:  # the host holds one
        sides = [["ours"], ["plain"]]
    for side in sides:
        found |= run_ranks(trained, *given, side, device=options.device, timeout_s=STEPS[name] / len(sides))[0]
    return found


def foresee(name: str, *, tiny: bool) -> dict[str, Any]:
    if name not in CASES or CASES[name].has_graphs:
        return {}
    case = CASES[name]
    setup: dict[str, Any] = {"max_length": LENGTH, "num_processes": 1, "gpu": GPU, "loss": "full"}
    memory = estimate_memory(config_of(case, tiny=tiny), **setup | case.setup | {"max_grad_norm": None})
    peaks = {"alloc_gb": memory.peak_allocated / 1e9, "reserved_gb": memory.peak_reserved / 1e9}
    values = {"tokens_s": round(throughput_of(memory).tokens_per_second_per_gpu)}
    return values | {key: round(value, 3) for key, value in peaks.items()}


def cells(row: dict[str, Any], foreseen: dict[str, Any]) -> list[str]:
    def cell(found: dict[str, Any]) -> str:
        if "failed" in found:
            return str(found["failed"])[:80]
        peaks = ", ".join(f"{found[key]:.2f} GB" for key in ("alloc_gb", "reserved_gb") if key in found)
        return f"{found['tokens_s']:,} tokens/s{', ' * bool(peaks)}{peaks}" if found else ""

    if "ours" not in row:
        return ["; ".join(f"{what} {seconds} s" for what, seconds in row.items() if what != "seconds")]
    both = [row[who].get("tokens_s") for who in ("ours", "plain")]
    return [cell(row["ours"]), cell(foreseen), cell(row["plain"]), f"{both[0] / both[1]:.2f}" if all(both) else ""]
