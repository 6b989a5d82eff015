"""Published throughputs of FSDP trainings (`published_throughput.csv`), each as a model and a `TrainingSetup`.

What a publication leaves open is settled by these rules, none of which looks at a throughput:

- MPT (llm-foundry) runs as GPT-2: the same sizes, learned positions, biases and tied head, with transformers' SDPA;
  transformers' own MPT has eager attention only, and llm-foundry ran flash kernels. Its parameter counts agree exactly.
- `checkpointing` "1/2" means every second block (torchtitan's "selective layer"). fms-fsdp's "selective" is 1/2 for 13B
  (its HFU over its MFU says so) and 34B, and 3/4 for 70B: the smallest usual share with which its batch fits.
- `checkpointing` "selective-op" is torchtitan's rule: attention and every second matmul of a block are kept, what is
  left is computed again.
- `precision` "PURE" of llm-foundry reduces in bf16, "DEFAULT" in fp32 (Composer); fms-fsdp reduces in bf16.
- The network is the usual one of the GPU where a publication names none.
- The FSDP paper's 175B rows hold for 128 to 512 GPUs; 256 are taken.
- llm-foundry and TinyLlama run a fused cross entropy; that of transformers makes copies of the logits in fp32, so the
  memory of these rows is less than foreseen, and no row of theirs is taken to wait for a full GPU.
- TinyLlama's fused kernels and FlashAttention-2 count as compiled, of 2024.
- PyTorch's post of 2022 wrapped the linear layers of the decoder one by one.
- The teraflop/s of PyTorch's post of 2022 and of the FSDP paper count the recomputation, 96 B s l h^2 (1 + s/6h +
  V/16lh) per step, as in the script that measured them (`calc_flop` in github.com/mrshenli/ptd_benchmark, trainer.py).
"""

import csv
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.planning.policy import HybridPolicy

__all__ = ["Row", "model_config", "read_rows", "teraflops"]

_TABLE = Path(__file__).with_name("published_throughput.csv")

_GPT = {  # width, blocks, heads, vocabulary
    "mpt-125m": (768, 12, 12, 50368),
    "mpt-350m": (1024, 24, 16, 50368),
    "mpt-760m": (1536, 24, 12, 50368),
    "mpt-1b": (2048, 24, 16, 50368),
    "mpt-3b": (2560, 32, 20, 50368),
    "mpt-7b": (4096, 32, 32, 50368),
    "mpt-13b": (5120, 40, 40, 50368),
    "mpt-30b": (7168, 48, 56, 50368),
    "mpt-70b": (8192, 80, 64, 50368),
    "gpt-175b": (12288, 96, 96, 50000),
    "gpt-1t": (25600, 128, 160, 50000),
}
_LLAMA = {  # width, blocks, heads, heads of keys, width of the MLP, vocabulary
    "tinyllama-1.1b": (2048, 22, 32, 4, 5632, 32000),
    "llama2-7b": (4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": (5120, 40, 40, 40, 13824, 32000),
    "llama2-34b": (8192, 48, 64, 8, 22016, 32000),
    "llama2-70b": (8192, 80, 64, 8, 28672, 32000),
    "llama3.1-8b": (4096, 32, 32, 8, 14336, 128256),
    "llama3.1-70b": (8192, 80, 64, 8, 28672, 128256),
    "kempner-13b": (5120, 40, 40, 8, 18432, 128256),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published throughput."""

    source: str
    """Who published it, and when."""
    model: str
    """A name that `model_config` knows."""
    era: str
    """Year of the software, as in the table of efficiencies."""
    setup: TrainingSetup
    """The training."""
    recomputed: Fraction | Literal["selective-op"]
    """Share of the blocks that activation checkpointing computes again, or torchtitan's rule for operations."""
    keeps_checkpoints_on_host: bool
    """Whether the inputs of checkpointed blocks are kept in host memory."""
    tokens_per_second: float
    """Published, per GPU."""
    reserved_gib: float | None
    """Published memory, where there is one."""
    is_held_out: bool
    """Whether the row is in no fit and was evaluated at the end only."""

    @property
    def publisher(self) -> str:
        """Who measured: fms-fsdp's team wrote its README and two posts of PyTorch's blog."""
        return "fms-fsdp" if "fms-fsdp" in self.source else re.split("[ #]", self.source)[0]

    @property
    def is_loss_fused(self) -> bool:
        """Whether logits have no copies in fp32: such a training needs less memory than is foreseen, and how full the
        GPU is says nothing about it."""
        return self.publisher in ("llm-foundry", "TinyLlama")

    @property
    def name(self) -> str:
        """A short description."""
        setup = self.setup
        words = [self.model, setup.gpu, f"x{setup.num_gpus}", f"seq {setup.seq_len}", f"batch {setup.batch_size}"]
        if setup.gradient_accumulation_steps > 1:
            words.append(f"x{setup.gradient_accumulation_steps}")
        if self.recomputed:
            words.append(f"AC {self.recomputed}" if self.recomputed != 1 else "AC")
        words += [word for word, holds in (("HSDP", setup.dp_replicate_size > 1), ("compile", setup.compile)) if holds]
        return " ".join(words)


@cache
def model_config(name: str, seq_len: int) -> PreTrainedConfig:
    """transformers' configuration of a published model, with positions for a sequence."""
    if name in _GPT:
        width, blocks, heads, vocabulary = _GPT[name]
        return GPT2Config(
            vocab_size=vocabulary,
            n_positions=seq_len,
            n_embd=width,
            n_layer=blocks,
            n_head=heads,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=name.startswith("mpt"),
            architectures=["GPT2LMHeadModel"],
        )
    width, blocks, heads, key_heads, inner, vocabulary = _LLAMA[name]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=inner,
        max_position_embeddings=seq_len,
        architectures=["LlamaForCausalLM"],
    )


@cache
def read_rows() -> tuple[Row, ...]:
    """All published rows but those in fp8, which the library does not train in."""
    with _TABLE.open(newline="") as file:
        return tuple(_row(entry) for entry in csv.DictReader(file) if entry["precision"] != "fp8")


def _row(entry: dict[str, str]) -> Row:
    checkpointing = entry["checkpointing"]
    network = entry["network_gbit_s"]
    setup = TrainingSetup(
        num_gpus=int(entry["gpus"]),
        gpu=entry["gpu"],
        gpus_per_node=int(entry["gpus_per_node"]),
        network_gbit_s=float(network) if network else None,
        dp_replicate_size=int(entry["replicas"]),
        batch_size=int(entry["batch_size"]),
        seq_len=int(entry["seq_len"]),
        gradient_accumulation_steps=int(entry["accumulation"]),
        precision=cast(Any, entry["precision"]),
        master_dtype=cast(Any, entry["master"]),
        reduce_dtype=cast(Any, entry["reduce"]),
        optimizer=entry["optimizer"],
        activation_checkpointing=checkpointing != "none",
        reshard_after_forward=entry["reshard"] == "yes",
        offload=entry["offload"] != "no",
        compile=entry["compile"] == "yes",
        loss="full",
        attn_implementation="eager" if entry["era"] == "2022" else "sdpa",
        policy=HybridPolicy(block_types=("Conv1D",)) if entry["offload"] != "no" else HybridPolicy(),
    )
    published = entry["tokens_s_gpu"]
    rate = float(published) if published else float(entry["tflops_gpu"]) / teraflops(entry["model"], 1.0, setup.seq_len)
    return Row(
        source=entry["source"],
        model=entry["model"],
        era=entry["era"],
        setup=setup,
        recomputed=_recomputed(checkpointing),
        keeps_checkpoints_on_host=entry["offload"] == "all",
        tokens_per_second=rate,
        reserved_gib=float(entry["reserved_gib"]) if entry["reserved_gib"] else None,
        is_held_out=entry["held_out"] == "yes",
    )


def _recomputed(checkpointing: str) -> Fraction | Literal["selective-op"]:
    if checkpointing == "selective-op":
        return "selective-op"
    return Fraction({"none": "0", "full": "1"}.get(checkpointing, checkpointing))


def teraflops(model: str, tokens_per_second: float, seq_len: int) -> float:
    """Teraflop/s as the publications of 2022 and 2023 count them, with recomputation (see above).

    Args:
        model: a GPT.
        tokens_per_second: of one GPU.
        seq_len: tokens of a sequence.
    """
    width, blocks, _, vocabulary = _GPT[model]
    attention = seq_len / (6 * width)
    head = vocabulary / (16 * blocks * width)
    return tokens_per_second * 96 * blocks * width**2 * (1 + attention + head) / 1e12
