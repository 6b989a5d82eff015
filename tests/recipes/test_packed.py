"""Recipes on bases that stay quantised: what they train is what they train on the dequantised base, and opens on it."""

import pytest
import torch
from peft import PeftModel

from tests._checkpoints import RELEASE, dequantized_by_transformers, make_checkpoint, make_quantized, word_tokenizer
from tests.recipes._launch import Series, launch_series, write_split

pytest.importorskip("trl")

KINDS = {"fp8": "fp8", "head": "compressed per channel", "dpo": "compressed int4"}
"""Runs, and the kinds of their bases; `tests/ranks/test_packed.py` has passes of every kind."""


def texts(count: int, length: int, seed: int) -> list[str]:
    ids = torch.randint(3, 9, (count, length), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{n}" for n in row) for row in ids.tolist()]


@pytest.fixture(scope="module")
def series(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("packed")
    for kind in KINDS.values():
        word_tokenizer().save_pretrained(make_quantized(kind, folder / "bases" / kind))
    word_tokenizer().save_pretrained(make_checkpoint("llama", folder / "bases" / "plain"))
    pairs = zip(texts(8, 4, 1), texts(8, 5, 2), texts(8, 5, 3), strict=True)
    rows = {"text": [{"text": text} for text in texts(16, 9, 0)]}
    rows["pairs"] = [{"prompt": each, "chosen": f" {one}", "rejected": f" {other}"} for each, one, other in pairs]
    data = {name: ["--dataset_name", write_split(folder / f"{name}_rows", part)] for name, part in rows.items()}
    ours = ["--per_device_train_batch_size", "2", "--logging_steps", "1", "--max_length", "16", "--use_peft"]
    ours += ["--lora_r", "4", "--learning_rate", "1e-2", "--lr_scheduler_type", "constant", "--dtype", "float32"]
    ours += ["--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no"]
    ours += ["--lora_target_modules", "all-linear", "--model_name_or_path"]
    evaluated = ["--eval_strategy", "steps", "--eval_steps", "1"]
    head = ["--lora_modules_to_save", "lm_head", "--gradient_accumulation_steps", "2", *evaluated]
    head += ["--gradient_checkpointing", "true", "--bf16", "true"]
    floats = {"head": ["finetune", *ours, f"{folder}/bases/{KINDS['head']}", *data["text"], *head]}
    floats["dpo"] = ["dpo", *ours, f"{folder}/bases/{KINDS['dpo']}", *data["pairs"], *evaluated]
    stored = floats | {"fp8": ["finetune", *ours, f"{folder}/bases/fp8", *data["text"]]}
    runs = {name: [*words, "--dequantize", "false"] for name, words in stored.items()}
    runs |= {f"{name}-floats": words for name, words in floats.items()}
    refused = {"plain": ["finetune", *ours, f"{folder}/bases/plain", *data["text"], "--dequantize", "false"]}
    return launch_series(folder, runs, refused=refused)


@pytest.mark.parametrize("name", ["head", "dpo"])
def test_a_base_that_stays_quantised_trains_as_its_floats_bit_for_bit(series, name):
    for key in ("loss", "grad_norm", "eval_loss"):
        assert series.log(name, key) == series.log(f"{name}-floats", key), key
    ours, theirs = series.weights(name), series.weights(f"{name}-floats")
    assert ours.keys() == theirs.keys() and any("lora_" in key for key in ours)
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    whole = {key.rpartition("model.")[2] for key in ours if "lora_" not in key}
    assert whole == {"head": {"lm_head.weight"}, "dpo": set()}[name]
    before, after = series.log(name, "eval_loss")[:2]
    assert after != before, "all is trained; two steps need not lower the loss of random labels"
    assert name != "dpo" or before == pytest.approx(0.6931, abs=1e-4), "the adapter off is the reference"


@pytest.mark.parametrize("name", ["fp8", "dpo"])
def test_transformers_and_peft_open_the_adapter_on_the_same_base(series, name):
    """The trained model computed its logits on packed shards; the adapter is plain, and they are the same."""
    assert all("lora_" in key for key in series.weights(name))
    if "compressed" in KINDS[name] and RELEASE <= (5, 17):
        pytest.skip("this transformers leaves these to a package that rounds otherwise")
    base = dequantized_by_transformers(KINDS[name], series.folder / "bases" / KINDS[name], torch.float32).float()
    series.check_opened(name, PeftModel.from_pretrained(base, series.folder / name))


def test_a_plain_base_cannot_stay_quantised(series):
    assert "holds no quantised weights" in series.error("plain")
