"""A vision-language model as a user trains it on questions about images, with the tower frozen, trained, adapted."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_fsdp_tools.scripting.demo import image_features
from tests.api import demo_rows, make_demo_model
from tests.recipes._launch import ONCE, Series, launch_series

pytest.importorskip("trl")

TOWER = "vision_tower."


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Series:
    pixels = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    probe = {"input_ids": [[1, *[1023] * 16, *range(20, 36)]], "pixel_values": pixels.tolist()}
    folder = tmp_path_factory.mktemp("vision_language")
    model = make_demo_model(folder / "model", "vision_model", hidden_size=32, num_layers=2)
    rows = demo_rows("images")[:32]
    splits = {name: Dataset.from_list(part, image_features()) for name, part in (("train", rows), ("test", rows[:8]))}
    DatasetDict(splits).save_to_disk(folder / "pictures")
    some = [row if number % 2 else {**row, "images": []} for number, row in enumerate(rows)]
    Dataset.from_list(some, image_features()).to_parquet(folder / "some.parquet")
    blind = Path(shutil.copytree(model, folder / "blind"))
    for name in ("processor_config.json", "preprocessor_config.json"):
        (blind / name).unlink(missing_ok=True)
    bare = ["vision_language", "--per_device_train_batch_size", "2", "--logging_steps", "1", "--learning_rate", "1e-2"]
    bare += ["--lr_scheduler_type", "constant", "--max_length", "64", *ONCE, "--model_name_or_path"]
    common = [*bare, str(model), "--dataset_name"]
    pictures = [*common, str(folder / "pictures")]
    short = ["--max_steps", "2", "--eval_strategy", "no"]
    lora = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear", "--merge_adapters"]
    one_each = ["--per_device_train_batch_size", "1", "--per_device_eval_batch_size", "1"]
    runs = {
        "trained": [*pictures, "--max_steps", "5"],
        "lora": [*pictures, *short, *lora],
        "some": [*common, str(folder / "some.parquet"), "--max_steps", "4", *one_each],
    }
    refused = {
        "blind": [*bare, str(blind), "--dataset_name", str(folder / "pictures")],
        "cut": [*pictures, "--max_length", "12"],
        "unanswered": [*pictures, "--max_length", "30"],
        "packed": [*pictures, "--packing"],
    }
    return launch_series(folder, runs, refused=refused, probe=probe)


@pytest.mark.parametrize("name", ["trained", "some"])
def test_the_loss_falls_and_the_result_opens_in_plain_transformers(runs, name):
    """Rows of "some" have images on one rank and none on the other."""
    before, after = runs.losses(name)
    assert after < before - (1.0 if name == "trained" else 0.5)
    runs.check_opened(name, AutoModelForImageTextToText.from_pretrained(runs.folder / name))
    assert AutoProcessor.from_pretrained(runs.folder / name).image_processor.crop_size["height"] == 32


def test_the_sample_is_what_plain_transformers_generates(runs, name="lora"):
    from trl.data_utils import prepare_multimodal_messages

    model = AutoModelForImageTextToText.from_pretrained(runs.folder / name)  # an adapter with its base, by PEFT
    processor = AutoProcessor.from_pretrained(runs.folder / name)
    row = demo_rows("images")[0]
    turns = prepare_multimodal_messages(row["prompt"], images=row["images"])
    given = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(turns, add_generation_prompt=True, **given)
    made = model.generate(**inputs, max_new_tokens=24, do_sample=False, suppress_tokens=[1023])
    text = processor.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert re.search(r"^sample +(.*)$", runs.of(name), re.MULTILINE)[1] == repr(text)


def test_a_frozen_tower_is_as_it_was_and_all_else_is_not(runs):
    start = load_file(runs.folder / "model" / "model.safetensors")
    tower = [name for name in start if name.startswith(TOWER)]
    assert tower and all(torch.equal(runs.weights("trained")[name], start[name]) for name in tower)
    others = [name for name in start if not name.startswith(TOWER)]
    assert not any(torch.equal(runs.weights("trained")[name], start[name]) for name in others)


def test_an_adapter_opens_in_peft_and_merged_without(runs):
    base = AutoModelForImageTextToText.from_pretrained(runs.folder / "model")
    runs.check_opened("lora", PeftModel.from_pretrained(base, runs.folder / "lora"))
    runs.check_opened("lora", AutoModelForImageTextToText.from_pretrained(runs.folder / "lora" / "merged"))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("blind", "no processor of images"),
        ("cut", "16 of them for 1 image(s), which may not be cut"),
        ("unanswered", "none of its answer is within"),
        ("packed", "TRL packs no rows with images"),
    ],
)
def test_errors_come_before_the_model(runs, run, message):
    assert message in runs.error(run)
