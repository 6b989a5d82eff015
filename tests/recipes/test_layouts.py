"""Layers and experts that ranks share, as a user asks for them: a launch file, a variable, and a recipe."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests._checkpoints import tiny_config
from tests.api import train_demo_tokenizer
from tests.recipes._launch import CONFIG, launch_series, write_split

pytest.importorskip("trl")
pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers 5.21 has it")

FILE = """parallelism_config:
  parallelism_config_tp_size: 2
  parallelism_config_dp_shard_size: 2
"""
PLAIN = """env: {ACCELERATE_USE_PARALLELISM_CONFIG: "false", FSDP_EP_SIZE: 1}\n"""


@pytest.mark.nightly
def test_a_run_goes_on_in_another_layout_with_the_losses_of_plain_fsdp2(tmp_path):
    """Four ranks, tp_size 2 and ep_size 2, beside plain FSDP2: from it and back to it."""
    tokenizer = train_demo_tokenizer(vocab_size=400, max_length=64)
    config = tiny_config("qwen3_moe", 2)
    config.vocab_size, config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"text": f"{n} and then {n + 1}. " * (1 + n % 4)} for n in range(32)]
    data = write_split(tmp_path / "data", rows, rows[:4])
    (tmp_path / "plain.yaml").write_text(PLAIN)
    (tmp_path / "both.yaml").write_text(CONFIG.read_text().replace("num_processes: 2", "num_processes: 4") + FILE)

    words = ["finetune", "--model_name_or_path", str(tmp_path / "model"), "--dataset_name", data, "--max_length", "64"]
    words += ["--max_steps", "4", "--save_steps", "1", "--save_total_limit", "4", "--learning_rate", "1e-3"]
    words += ["--logging_steps", "1", "--per_device_train_batch_size", "1"]  # a router's loss is of one row
    parts, resume = "--gradient_accumulation_steps", "--resume_from_checkpoint"
    plain = [*words, parts, "2", "--config", str(tmp_path / "plain.yaml")]
    runs = {
        "plain": plain,
        "both": [*words, parts, "4", resume, f"{tmp_path}/plain/checkpoint-1"],
        "back": [*plain, resume, f"{tmp_path}/both/checkpoint-3"],
    }
    done = launch_series(tmp_path, runs, config=tmp_path / "both.yaml", variables={"FSDP_EP_SIZE": "2"})
    assert "dp_shard 4 on cpu" in done.of("plain") and "dp_shard 2, tp 2, ep 2 on cpu" in done.of("both")
    for name, former in (("both", 1), ("back", 3)):
        assert f"step {former} of 4: goes on from" in done.of(name)
        assert done.log(name, "loss") == pytest.approx(done.log("plain", "loss"), rel=1e-5), name
        assert done.log(name, "grad_norm") == pytest.approx(done.log("plain", "grad_norm"), rel=1e-3), name
        weights = done.weights(name)
        for key, weight in done.weights("plain").items():
            torch.testing.assert_close(weights[key], weight, rtol=0, atol=1e-4, msg=f"{name}: {key}")
        done.check_opened(name, AutoModelForCausalLM.from_pretrained(tmp_path / name))
