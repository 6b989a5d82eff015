"""The recipe as a user starts it: `accelerate launch`, two processes, from a checkpoint to a checkpoint."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fsdp_tools.demo import make_demo_model

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "accelerate_configs" / "fsdp2_cpu_2.yaml"


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--config_file", CONFIG]
    return subprocess.run(
        [*map(str, command), str(ROOT / "recipes" / "finetune.py"), *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_demo_model(tmp_path_factory.mktemp("model") / "demo"))


def test_the_quick_start_trains_and_leaves_a_normal_checkpoint(tmp_path):
    done = launch(tmp_path, "--max_steps", "14", "--per_device_train_batch_size", "4", "--max_length", "96")
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    for shown in ("model.layers.{0..", "LlamaDecoderLayer", "dp_shard 2 on cpu", "read per rank", "sample"):
        assert shown in done.stdout, shown
    assert re.search(r"loss \d\.\d+, [\d,]+ tokens/s", done.stderr), "a progress bar with loss and tokens/s"
    before, after = map(float, re.search(r"evaluation loss +([\d.]+) before, ([\d.]+) after", done.stdout).groups())
    assert after < before - 0.5
    output = tmp_path / "outputs" / "finetune"
    trained = AutoModelForCausalLM.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    start = AutoModelForCausalLM.from_pretrained(output / "demo" / "model")
    assert not torch.equal(trained.lm_head.weight, start.lm_head.weight)
    text = tokenizer("The assert statement is a convenient way to insert debugging", return_tensors="pt")
    loss = lambda model: model(**text, labels=text["input_ids"]).loss.item()  # noqa: E731
    assert loss(trained) < loss(start) - 0.5, "what was saved is what was trained"


MESSAGES = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}]}
    for n in range(40)
]
PAIRS = [{"prompt": f"Count to {n}:", "completion": f" {n}."} for n in range(40)]


@pytest.mark.parametrize("rows", [MESSAGES, PAIRS], ids=["messages", "prompt-completion"])
def test_other_dataset_forms_on_a_local_model(tmp_path, model, rows):
    data = lines(tmp_path / "data.jsonl", rows)
    done = launch(
        tmp_path, "--model_name_or_path", model, "--dataset_name", data, "--output_dir", "out", "--max_steps", "2",
        "--per_device_train_batch_size", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size > 0


def test_bad_input_gets_one_clear_line(tmp_path, model):
    data = lines(tmp_path / "data.jsonl", [{"question": "?", "answer": "!"}] * 8)
    done = launch(tmp_path, "--model_name_or_path", model, "--dataset_name", data)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("finetune: error:")]
    assert len(errors) == 1
    assert "columns answer, question" in errors[0] and "--dataset_text_field" in errors[0]
    assert 'finetune.py", line' not in done.stderr, "no traceback of ours"


def test_qlora_in_one_command(tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install bitsandbytes)")
    done = launch(
        tmp_path, "--use_peft", "--load_in_4bit", "--use_bnb_nested_quant", "--lora_target_modules", "all-linear",
        "--bnb_4bit_quant_storage", "float32", "--max_steps", "4", "--per_device_train_batch_size", "2",
        "--max_length", "64", "--output_dir", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    assert re.search(r"trained +float32, .*% of the parameters", done.stdout)
    before, after = map(float, re.search(r"evaluation loss +([\d.]+) before, ([\d.]+) after", done.stdout).groups())
    assert after < before
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # the plain base and the adapter, by PEFT


def test_lora_in_one_command(tmp_path):
    done = launch(
        tmp_path, "--use_peft", "--merge_adapters", "--lora_target_modules", "all-linear", "--max_steps", "4",
        "--per_device_train_batch_size", "2", "--max_length", "64", "--output_dir", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    assert re.search(r"trained +float32, .*% of the parameters", done.stdout)
    adapted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # base and adapter, by PEFT
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    ids = torch.arange(3, 19).reshape(1, 16)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
