"""The recipe as a user starts it: `accelerate launch`, two processes, from a checkpoint to a checkpoint.

Starting takes 8 s, nearly all of it imports. What differs in options and data only is run in a series after one start.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fsdp_tools.scripting.demo import make_demo_model

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "accelerate_configs" / "fsdp2_cpu_2.yaml"
RECIPE = ROOT / "recipes" / "finetune.py"

SERIES = """
import os, runpy, sys
from json import loads
from accelerate.state import AcceleratorState, GradientState, PartialState

recipe, *series, wrong = sys.argv[1:]
names = runpy.run_path(recipe)
environment = dict(os.environ)
PartialState.destroy_process_group = lambda *_: None  # one group for the series: torch's launcher has a store for one
for name, arguments in map(loads, series):
    sys.argv = [recipe, *arguments]
    if os.environ["RANK"] == "0":
        print(f"=== {name}", flush=True)
    names["main"]()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    if os.environ["RANK"] == "0":
        print("=== done", flush=True)
sys.argv = [recipe, *loads(wrong)]
runpy.run_path(recipe, run_name="__main__")
"""


def launch(folder: Path, *arguments: str, script: Path = RECIPE) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--config_file", CONFIG, script]
    return subprocess.run(
        [*map(str, command), *arguments],
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
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "outputs" / "demo" / "model")
    assert not torch.equal(trained.lm_head.weight, start.lm_head.weight)
    text = tokenizer("The assert statement is a convenient way to insert debugging", return_tensors="pt")
    loss = lambda model: model(**text, labels=text["input_ids"]).loss.item()  # noqa: E731
    assert loss(trained) < loss(start) - 0.5, "what was saved is what was trained"


# ---- a series after one start ----

MESSAGES = [
    {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}]}
    for n in range(40)
]
PAIRS = [{"prompt": f"Count to {n}:", "completion": f" {n}."} for n in range(40)]

has_bitsandbytes = importlib.util.find_spec("bitsandbytes") is not None


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> tuple[Path, dict[str, str], str]:
    """The folder with an output of each name, what was printed under each that ended well, and all of standard error;
    the last run gets a dataset that cannot be trained on."""
    folder = tmp_path_factory.mktemp("series")
    model = str(make_demo_model(folder / "demo"))
    runs = {}
    for name, rows in (("messages", MESSAGES), ("prompt-completion", PAIRS)):
        data = lines(folder / f"{name}.jsonl", rows)
        runs[name] = ["--model_name_or_path", model, "--dataset_name", data, "--max_steps", "2"]
    peft = ["--use_peft", "--lora_target_modules", "all-linear", "--max_steps", "4", "--max_length", "64"]
    runs["lora"] = [*peft, "--merge_adapters"]
    if has_bitsandbytes:
        runs["qlora"] = [*peft, "--load_in_4bit", "--use_bnb_nested_quant", "--bnb_4bit_quant_storage", "float32"]
    for name, arguments in runs.items():
        arguments += ["--per_device_train_batch_size", "2", "--output_dir", str(folder / name)]
    script = folder / "series.py"
    script.write_text(SERIES)
    data = lines(folder / "wrong.jsonl", [{"question": "?", "answer": "!"}] * 8)
    wrong = ["--model_name_or_path", model, "--dataset_name", data]
    done = launch(folder, str(RECIPE), *map(json.dumps, [*runs.items(), wrong]), script=script)
    printed = dict(re.findall(r"^=== (\S+)\n(.*?)^=== done$", done.stdout, re.DOTALL | re.MULTILINE))
    assert done.returncode == 1, done.stderr[-4000:]
    return folder, printed, done.stderr


def test_bad_input_gets_one_clear_line(series):
    _, _, said = series
    errors = [line for line in said.splitlines() if line.startswith("finetune: error:")]
    assert len(errors) == 1
    assert "columns answer, question" in errors[0] and "--dataset_text_field" in errors[0]
    assert 'finetune.py", line' not in said, "no traceback of ours"


@pytest.mark.parametrize("rows", ["messages", "prompt-completion"])
def test_other_dataset_forms_on_a_local_model(series, rows):
    folder, printed, said = series
    assert rows in printed, said[-4000:]
    assert AutoModelForCausalLM.from_pretrained(folder / rows).config.vocab_size > 0


def test_lora_in_one_command(series):
    folder, printed, said = series
    assert "lora" in printed, said[-4000:]
    assert re.search(r"trained +float32, .*% of the parameters", printed["lora"])
    adapted = AutoModelForCausalLM.from_pretrained(folder / "lora")  # base and adapter, by PEFT
    merged = AutoModelForCausalLM.from_pretrained(folder / "lora" / "merged")
    ids = torch.arange(3, 19).reshape(1, 16)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not has_bitsandbytes, reason="bitsandbytes is not installed (pip install bitsandbytes)")
def test_qlora_in_one_command(series):
    folder, printed, said = series
    assert "qlora" in printed, said[-4000:]
    assert re.search(r"trained +float32, .*% of the parameters", printed["qlora"])
    losses = re.search(r"evaluation loss +([\d.]+) before, ([\d.]+) after", printed["qlora"])
    before, after = map(float, losses.groups())
    assert after < before
    AutoModelForCausalLM.from_pretrained(folder / "qlora")  # the plain base and the adapter, by PEFT
