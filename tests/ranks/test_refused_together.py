"""What does not go together is one line on each rank, before anything is loaded or trained (`docs/support.md`)."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from accelerate import ParallelismConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_fsdp_tools import FSDPPlugin, ParallelDims, TrainerSettings, from_pretrained, make_accelerator
from tests._checkpoints import make_checkpoint, make_quantized, refusal, small_llama
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, make_rows

LORA = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def fsdp1_and_ranks_that_share(name: str, folder: Path) -> None:
    shared = ParallelismConfig(**{name: 2})
    plugin = FSDPPlugin(fsdp_version=1)
    said = refusal(lambda: make_accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=shared))
    assert f"{name} above 1 needs FSDP2" in said, said


def quantised_weights_in_parts(folder: Path) -> None:
    options = {"mesh": ParallelDims(tp_size=2), "peft_config": LORA, "load_kwargs": {"progress": False}}
    said = refusal(lambda: from_pretrained(folder / "fp8", dequantize=False, num_tokens=132, **options))
    assert "k_proj.weight is stored in blocks of 8, through which 2 parts of its 24 indices would cut" in said, said
    if find_spec("bitsandbytes") is not None:
        four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        said = refusal(lambda: from_pretrained(folder / "small", quantization_config=four, num_tokens=132, **options))
        assert "flattened before bitsandbytes packs it, so ranks cannot share it" in said, said


def averages_of_flat_parameters(folder: Path) -> None:
    class Averaging(ShardedTrainer):
        fsdp_settings = TrainerSettings(ema_decay=0.9)

    args = arguments(folder / "run", max_steps=1, fsdp=True, fsdp_config={"version": 1})
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    said = refusal(lambda: Averaging(model=model, args=args, train_dataset=make_rows(8)).train())
    assert "ema_decay needs FSDP2" in said, said


CASES = {
    "FSDP1, tp": partial(fsdp1_and_ranks_that_share, "tp_size"),
    "FSDP1, cp": partial(fsdp1_and_ranks_that_share, "cp_size"),
    "stays quantised, tp": quantised_weights_in_parts,
    "FSDP1, averages": averages_of_flat_parameters,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "llama")
    make_quantized("fp8", tmp_path / "fp8")
    small_llama(tmp_path / "small")
    run_ranks(run_cases, 2, CASES, tmp_path)
