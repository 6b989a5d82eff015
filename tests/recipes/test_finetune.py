"""The recipe as a user starts it: `accelerate launch`, two processes, from a checkpoint to a checkpoint."""

import importlib.util
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fsdp_tools.scripting.demo import make_demo_model
from tests._hub import fake_hub
from tests.recipes._launch import HAS_BITSANDBYTES, ROOT, Series, launch, launch_series, two_runs, write_lines

CHATS = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}]}
    for n in range(40)
]
SHARED = [
    {"conversations": [{"from": "human", "value": f"Say {n}."}, {"from": "gpt", "value": f"{n}!"}]} for n in range(40)
]
ALPACA = [{"instruction": "Count.", "input": f"to {n}", "output": f"{n}."} for n in range(40)]
TEXT = [{"text": f"{n} and then {n + 1}. " * (1 + n % 5)} for n in range(60)]


def test_the_quick_start_trains_and_leaves_a_normal_checkpoint(tmp_path):
    options = ["--max_steps", "14", "--per_device_train_batch_size", "4", "--max_length", "96", "--save_steps", "7"]
    options += ["--push_to_hub", "true", "--hub_model_id", "me/tuned"]
    with fake_hub({}, root=tmp_path / "hub") as hub:
        reached = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "secret", "HF_HUB_DISABLE_XET": "1"}
        done = launch(tmp_path, *options, script=ROOT / "recipes" / "finetune.py", variables=reached)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
        uploaded = hub.files("me/tuned")
    for shown in ("model.layers.{0..", "LlamaDecoderLayer", "dp_shard 2 on cpu", "rank 0 read", "sample"):
        assert shown in done.stdout, shown
    assert re.search(r"step 5 of 14: loss \d\.\d+, [\d,]+ tokens/s, learning rate \S+, \d\.\d GB", done.stdout)
    assert not re.search(r"(it|examples)/s", done.stderr), "no bars where standard error is no terminal"
    before, after = map(float, re.search(r"evaluation loss +([\d.]+) before, ([\d.]+) after", done.stdout).groups())
    assert after < before - 0.5
    output = tmp_path / "outputs" / "finetune"
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    step = next(entry for entry in log if "loss" in entry)
    assert {"loss", "tokens_per_second", "peak_memory_gb", "learning_rate", "num_tokens"} <= set(step)
    assert (output / "checkpoint-7").is_dir() and not list(output.glob("*demo*"))
    assert (output / "loss.png").is_file() == (importlib.util.find_spec("matplotlib") is not None)
    assert f"uploaded         {hub.url}/me/tuned\n" in done.stdout and b"SFT" in uploaded["README.md"]
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert uploaded[name] == (output / name).read_bytes(), name
    trained = AutoModelForCausalLM.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "outputs" / "demo" / "model")
    text = tokenizer("The assert statement is a convenient way to insert debugging", return_tensors="pt")
    loss = lambda model: model(**text, labels=text["input_ids"]).loss.item()  # noqa: E731
    assert loss(trained) < loss(start) - 0.5, "what was saved is what was trained"


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> Series:
    """Runs in several forms; the last gets a dataset that cannot be trained on."""
    folder = tmp_path_factory.mktemp("series")
    model = str(make_demo_model(folder / "demo", hidden_size=64, num_layers=2))
    files = {"chats": CHATS, "shared": SHARED, "alpaca": ALPACA, "text": TEXT}
    data = {name: write_lines(folder / f"{name}.jsonl", rows) for name, rows in files.items()}
    common = ["--model_name_or_path", model, "--per_device_train_batch_size", "2", "--logging_steps", "1"]
    common += ["--max_length", "64", "--eval_strategy", "steps", "--eval_steps", "4", "--lr_scheduler_type", "constant"]
    chats = [*common, "--dataset_name", f"{data['chats']},{data['shared']}", "--assistant_only_loss"]
    runs = two_runs(folder, 4, *chats, learning_rate=1e-2)
    runs["stopped"] = [*chats, "--max_steps", "8", "--learning_rate", "0", "--early_stopping_patience", "1"]
    runs["stopped"] += ["--eval_steps", "1"]
    adapter = ["--use_peft", "--lora_target_modules", "all-linear", "--max_steps", "4", "--learning_rate", "1e-2"]
    runs["lora"] = [*common, *adapter, "--dataset_name", data["alpaca"], "--merge_adapters"]
    runs["lora"] += ["--report_to", "noting"]
    if HAS_BITSANDBYTES:
        runs["qlora"] = [*common, *adapter, "--dataset_name", data["text"], "--load_in_4bit", "--use_bnb_nested_quant"]
        runs["qlora"] += ["--bnb_4bit_quant_storage", "float32"]
    stored = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    stored.save_pretrained(folder / "bf16")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "bf16")
    runs["stored"] = [*common, "--dataset_name", data["text"], "--use_peft", "--max_steps", "2"]
    runs["stored"] += ["--lora_modules_to_save", "lm_head,embed_tokens", "--model_name_or_path", str(folder / "bf16")]
    wrong = [*common, "--dataset_name", write_lines(folder / "wrong.jsonl", [{"question": "?", "reply": "!"}] * 8)]
    done = launch_series(folder, "finetune.py", runs, wrong=wrong)
    assert done.code == 1, done.stderr[-4000:]
    return done


def test_bad_input_gets_one_clear_line(series):
    errors = [line for line in series.stderr.splitlines() if line.startswith("finetune: error:")]
    assert len(errors) == 1
    assert "columns question, reply" in errors[0] and "--dataset_text_field" in errors[0]
    assert 'finetune.py", line' not in series.stderr, "no traceback of ours"


def test_the_loss_falls(series):
    before, after = series.losses("trained")
    assert after < before - 0.5


def test_a_run_that_no_longer_gets_better_is_stopped(series):
    before, after = series.losses("stopped")
    assert after == before and series.state("stopped")["global_step"] < 8
    assert "after, which is no better" in series.of("stopped")
    assert re.search(r"stopped early at step \d: no lower .*; kept ", series.of("stopped"))


def test_a_run_resumed_in_its_middle_ends_as_the_one_that_was_not_stopped(series):
    series.check_resumed()
    assert re.search(r"^step 2 of 4: goes on from .*checkpoint-2$", series.of("resumed"), flags=re.M)
    card = (series.folder / "resumed" / "README.md").read_text()
    assert "`demo`" in card and "None" not in card and "licence" not in card, "the base is a folder"
    steps = [entry["step"] for entry in series.state("resumed")["log_history"] if "loss" in entry]
    assert steps == [1, 2, 3, 4], "the log goes on where it was"


def test_copies_in_fp32_are_trained_on_a_base_in_bf16_without_mixed_precision(series):
    assert re.search(r"frozen +bfloat16.*\ntrained +float32", series.of("stored"))
    assert series.logits("stored").dtype == torch.bfloat16 and "sample" in series.of("stored")
    before, after = series.losses("stored")
    assert after < before + 0.1


@pytest.mark.parametrize("name", ["trained", "lora"])
def test_what_was_saved_opens_in_plain_transformers_and_is_what_was_trained(series, name):
    # an adapter with its base, by PEFT
    series.check_opened(name, AutoModelForCausalLM.from_pretrained(series.folder / name))
    if name == "lora":
        assert re.search(r"trained +float32, .*% of the parameters", series.of(name))
        series.check_opened(name, AutoModelForCausalLM.from_pretrained(series.folder / name / "merged"))


@pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed (pip install bitsandbytes)")
def test_qlora_in_one_command(series):
    assert re.search(r"trained +float32, .*% of the parameters", series.of("qlora"))
    before, after = series.losses("qlora")
    assert after < before
    AutoModelForCausalLM.from_pretrained(series.folder / "qlora")  # the plain base and the adapter, by PEFT


def test_who_is_reported_to_gets_all_figures(series):
    noted = [json.loads(line) for line in (series.folder / "lora" / "noted.jsonl").read_text().splitlines()]
    steps = [line for line in noted if "loss" in line]
    assert [line["loss"] for line in steps] == series.log("lora", "loss") and len(steps) == 4
    assert all({"learning_rate", "peak_memory_gb", "num_tokens"} <= set(line) for line in steps)
    assert "tokens_per_second" in steps[-1] and any("eval_loss" in line for line in noted)
