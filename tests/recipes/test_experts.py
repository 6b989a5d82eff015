"""LoRA on the experts of a mixture by one option of the recipes: PEFT opens what is saved, and vLLM's reader does."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests._checkpoints import stored_tensors, tiny_config, word_tokenizer
from tests._consumers import expert_deltas_of_vllm
from tests.recipes._launch import Series, launch_series, refused_runs, write_split

pytest.importorskip("trl")

R, ALPHA = 4, 8
STACK = "model.layers.{}.mlp.experts.gate_up_proj"
KINDS = ("gpt_oss", "qwen3_moe")
"""PEFT (0.21) finds the experts of the second by itself, not those of the first."""

REFUSED = {
    "dense": ("dense", "--use_peft --lora_experts true", "--lora_experts: LlamaForCausalLM has no stacked experts."),
    "no-adapter": ("dense", "--lora_experts true", "--lora_experts is for an adapter: add --use_peft."),
}


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("experts")
    rows = [{"text": " ".join(f"w{3 + (n + i) % 6}" for i in range(9))} for n in range(16)]
    data = ["--dataset_name", write_split(folder / "rows", rows), "--max_length", "16", "--max_steps", "2"]
    ours = ["--per_device_train_batch_size", "2", "--learning_rate", "1e-2", "--lr_scheduler_type", "constant"]
    ours += ["--eval_strategy", "no", "--save_strategy", "no"]
    starts = {}
    for kind in (*KINDS, "llama"):
        config = tiny_config(kind)
        config.moe_intermediate_size = config.hidden_size = 32  # CPUs multiply groups of such widths
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
        word_tokenizer().save_pretrained(folder / kind)
        starts[kind] = ["finetune", "--model_name_or_path", str(folder / kind), *data, *ours]
    adapter = ["--use_peft", "--lora_r", str(R), "--lora_alpha", str(ALPHA)]
    runs = {f"experts-{kind}": [*starts[kind], *adapter, "--lora_experts", "true"] for kind in KINDS}
    refused = refused_runs(REFUSED, {"dense": starts["llama"]})
    return launch_series(folder, runs, refused=refused, probe={"input_ids": [[3, 4, 5, 6, 7]]})


@pytest.mark.parametrize("run", REFUSED)
def test_what_has_no_experts_is_refused(series, run):
    assert REFUSED[run][-1] in series.error(run)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_opens_adapters_of_experts_and_vllm_reads_what_peft_merges(series, kind):
    base, folder = series.folder / kind, series.folder / f"experts-{kind}"
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    series.check_opened(folder.name, opened)
    plain = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    merged = dict(opened.merge_and_unload().named_parameters())
    deltas = expert_deltas_of_vllm(stored_tensors(folder), len(plain[STACK.format(0)]), ALPHA / R)
    assert deltas.keys() == {name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    for name, delta in deltas.items():
        expected = (merged[name] - plain[name]).detach()
        assert expected.abs().max() > 0
        delta = delta if kind == "qwen3_moe" else delta.mT  # inputs first in the base
        torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-6)
