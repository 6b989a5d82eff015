"""Language models as a user trains them: `finetune`, `pretrain` and the loop without a Trainer, on two ranks."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from hf_fsdp_tools import ConfigError, scripting
from tests._dist import LIMIT_S
from tests._hub import fake_hub
from tests.api import make_demo_model
from tests.recipes import _launch
from tests.recipes._launch import ROOT, Series, launch_series, two_runs, write_lines, write_split

TURNS = [[{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}] for n in range(40)]
CHATS = [{"messages": turns} for turns in TURNS]
TEXT = [{"text": f"{n} and then {n + 1}. " * (1 + n % 5)} for n in range(60)]
EIGHT = [{"text": f"{n} and then {n + 1}. " * (1 + n % 4)} for n in range(8)]
"""Rows of 4 to 20 tokens: as many as two ranks take in a step, in two micro-batches of two rows each."""

EVERY = ["--lora_target_modules", "all-linear"]

STEPS = 2


def test_the_quick_start_trains_and_leaves_a_normal_checkpoint(tmp_path):
    options = ["--max_steps", "4", "--per_device_train_batch_size", "2", "--max_length", "64", "--save_steps", "2"]
    options += ["--logging_steps", "2", "--learning_rate", "1e-2", "--warmup_steps", "0", "--eval_strategy", "no"]
    options += ["--push_to_hub", "true", "--hub_model_id", "me/tuned"]
    with fake_hub({}, root=tmp_path / "hub") as hub:
        reached = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "secret", "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
        reached |= {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", _launch.CONFIG]
        words = [*launcher, ROOT / "recipes" / "finetune.py", *options]
        told = {"capture_output": True, "text": True, "timeout": LIMIT_S}
        done = subprocess.run(words, cwd=tmp_path, env=os.environ | reached, **told)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
        uploaded = hub.files("me/tuned")
    for shown in ("model.layers.{0..", "LlamaDecoderLayer", "dp_shard 2 on cpu", "rank 0 read"):
        assert shown in done.stdout, shown
    assert re.search(r"step 2 of 4: loss \d\.\d+, [\d,]+ tokens/s, learning rate \S+, \d\.\d GB", done.stdout)
    assert not re.search(r"(it|examples)/s", done.stderr), "no bars where standard error is no terminal"
    output = tmp_path / "outputs" / "finetune"
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    step = next(entry for entry in log if "loss" in entry)
    assert {"loss", "tokens_per_second", "peak_memory_gb", "learning_rate", "num_tokens"} <= set(step)
    assert (output / "checkpoint-2").is_dir() and not list(output.glob("*demo*"))
    assert (output / "loss.png").is_file() == (importlib.util.find_spec("matplotlib") is not None)
    assert f"uploaded         {hub.url}/me/tuned\n" in done.stdout and b"SFT" in uploaded["README.md"]
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert uploaded[name] == (output / name).read_bytes(), name
    start, trained = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "outputs/demo/model", output))
    text = AutoTokenizer.from_pretrained(output)("The assert statement is a convenient way", return_tensors="pt")
    before, after = (model(**text, labels=text["input_ids"]).loss.item() for model in (start, trained))
    assert after < before - 0.3, "what was saved is what was trained"


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("series")
    model = make_demo_model(folder / "demo", hidden_size=64, num_layers=2)
    ours = ["--model_name_or_path", str(model), "--per_device_train_batch_size", "2", "--logging_steps", "1"]
    tuned = ["finetune", *ours, "--max_length", "64", "--lr_scheduler_type", "constant", "--eval_strategy", "steps"]
    adapter = [*tuned, *_launch.ONCE, "--use_peft", "--max_steps", "3", "--learning_rate", "1e-2"]
    chats = ["--dataset_name", write_lines(folder / "chats.jsonl", CHATS), "--assistant_only_loss"]
    runs = {"stopped": [*tuned, *chats, "--max_steps", "8", "--learning_rate", "0", "--early_stopping_patience", "1"]}
    runs["stopped"] += ["--eval_steps", "1"]
    runs["tried"] = ["finetune", *ours, *_launch.ONCE, "--max_steps", "1"]
    runs["lora"] = [*adapter, *EVERY, *chats, "--merge_adapters"]

    documents = folder / "documents"  # three files: rows are divided among two ranks
    documents.mkdir()
    for number in range(3):
        rows = [{"text": f"{n} and then {n + number}. " * (1 + n % 9)} for n in range(30)]
        write_lines(documents / f"train-{number}.jsonl", rows)
    write_lines(documents / "test.jsonl", [{"text": f"{n} and then {n}. " * 3} for n in range(100, 108)])
    packed = ["pretrain", *ours, "--dataset_name", str(documents), "--max_length", "48"]
    muon = ["--optim", "muon"]
    stream = [*packed, "--dataset_streaming", "--lr_scheduler_type", "constant", *muon]
    stream += ["--optim_args", "momentum=0.9,adamw_lr=5e-3"]
    runs |= two_runs(folder, "stream", 4, *stream, learning_rate=1e-2)

    loop = ["accelerate_loop", *ours, "--gradient_accumulation_steps", "2", "--dataset_name"]
    # epochs of three steps, of which four are done: the middle lies within an epoch, and the end in the next
    many = write_split(folder / "many", TEXT[:24], TEXT[40:43])
    runs |= two_runs(folder, "loop", 4, *loop, many, *muon, learning_rate=2e-2)
    steps = ["--max_steps", str(STEPS), "--learning_rate", "1e-2"]
    runs["compared"] = [*loop, write_split(folder / "eight", EIGHT), *steps]
    return launch_series(folder, runs)


def test_a_model_is_tried_on_the_data_of_the_demo(series):
    said = series.of("tried")
    assert "Quick start: data (text), made on the spot" in said and "Give --dataset_name for your own" in said
    before, now = (re.search(rf"^{word} +'(.*)'$", said, re.MULTILINE)[1] for word in ("said before", "says now"))
    assert before[:20] == now[:20], "one prompt"
    assert (series.folder / "tried" / "adapter_model.safetensors").is_file()


def late() -> None:
    """A recipe with an error to which the first rank comes two seconds after the other."""

    def main() -> None:
        time.sleep(2 * (os.environ["RANK"] == "0"))
        raise ConfigError("the dataset has no column 'text'")

    scripting.run(main, "finetune")


def test_an_error_is_one_line_which_the_first_rank_says_though_it_comes_to_it_last(tmp_path):
    """The launcher of torch, which is Accelerate's, ends all processes a moment after one of them has ended."""
    logs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ALL)
    where = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "start_method": "forkserver"}
    with pytest.raises(ChildFailedError) as ended:
        elastic_launch(LaunchConfig(1, 1, 2, **where, max_restarts=0, monitor_interval=0.1, logs_specs=logs), late)()
    assert ended.value.get_first_failure()[1].exitcode == 1
    said = {file.parent.name: file.read_text() for file in tmp_path.rglob("stderr.log")}
    errors = {rank: re.findall("^finetune: error: .*$", text, re.MULTILINE) for rank, text in said.items()}
    assert errors == {"0": ["finetune: error: the dataset has no column 'text'"], "1": []}, said
    assert not any("Traceback" in text for text in said.values()), said


@pytest.mark.parametrize(("name", "fall"), [("lora", 0.0), ("stream", 0.5), ("loop", 0.2)])
def test_the_loss_falls_and_plain_transformers_opens_what_was_trained(series, name, fall):
    before, after = series.losses(name)
    assert after < before - fall
    opened = AutoModelForCausalLM.from_pretrained(series.folder / name)  # an adapter with its base, by PEFT
    series.check_opened(name, opened)
    if name == "stream":
        assert re.search(r"AdamW  embeddings +model\.embed_tokens", series.of(name))
        assert re.search(r"Muon: lr .*, momentum 0\.9, .*; 14 matrices", series.of(name))
    if name == "lora":
        assert re.search(r"trained +float32, .*% of the parameters", series.of(name))
        series.check_opened(name, AutoModelForCausalLM.from_pretrained(series.folder / name / "merged"))
    assert len(AutoTokenizer.from_pretrained(series.folder / name)) == opened.config.vocab_size


def test_a_run_resumed_in_its_middle_ends_as_the_one_that_was_not_stopped(series):
    series.check_resumed("stream")
    assert re.search(r"^step 2 of 4: goes on from .*checkpoint-2$", series.of("stream-resumed"), flags=re.M)
    assert "is read again" not in series.of("stream-resumed")
    assert len(list((series.folder / "stream").glob("checkpoint-2/dl_state_dict_0_of_rank_*"))) == 2
    card = (series.folder / "stream-resumed" / "README.md").read_text()
    assert "None" not in card and "licence" not in card, "the base is a folder"


def test_a_run_that_no_longer_gets_better_is_stopped(series):
    before, after = series.losses("stopped")
    assert after == before and series.log("stopped", "step")[-1] < 8
    assert "after, which is no better" in series.of("stopped")
    assert re.search(r"stopped early at step \d: no lower .*; kept ", series.of("stopped"))


def plain_loss(model, tokenizer, rows: list[dict[str, str]]) -> torch.Tensor:
    batch = tokenizer([row["text"] + tokenizer.eos_token for row in rows], padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)[:, 1:]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_the_loop_trains_as_plain_pytorch_does_on_all_rows_at_once(series):
    """Rows of unequal lengths in micro-batches on two ranks: the gradient of the mean over all of their tokens."""
    model = AutoModelForCausalLM.from_pretrained(series.folder / "demo").train()
    tokenizer = AutoTokenizer.from_pretrained(series.folder / "demo")
    with torch.no_grad():  # rows that fill up the last batch count once
        assert series.losses("loop")[0] == pytest.approx(plain_loss(model, tokenizer, TEXT[40:43]).item(), abs=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = get_scheduler("cosine", optimizer, 10, STEPS)
    losses, norms = [], []
    for _ in range(STEPS):
        loss = plain_loss(model, tokenizer, EIGHT)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    printed = re.findall(r"loss (\S+)  grad_norm (\S+)  tokens_per_second [\d.]+", series.of("compared"))
    assert [float(loss) for loss, _ in printed] == pytest.approx(losses, rel=1e-4)
    assert [float(norm) for _, norm in printed] == pytest.approx(norms, rel=1e-3), "which AdamW would not show"
    series.check_opened("compared", model)


def test_a_loop_resumed_within_an_epoch_ends_as_the_one_that_was_not_stopped(series):
    torch.testing.assert_close(series.logits("loop-resumed"), series.logits("loop"), rtol=1e-5, atol=1e-6)
    losses = {run: re.findall(r"^(\d)/4  loss (\S+)", series.of(run), re.MULTILINE) for run in ("loop", "loop-resumed")}
    assert losses["loop-resumed"] == losses["loop"][2:], "the same rows in each step"
