"""Recipes on bases that stay quantised: what they train is what they train on the dequantised base, and opens on it."""

from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests._checkpoints import RELEASE, dequantized_by_transformers, make_checkpoint, make_quantized, word_tokenizer
from tests.recipes._launch import Series, launch_series, write_split

pytest.importorskip("trl")

LINEAR = ["--lora_target_modules", "all-linear"]
EXPERTS = ["--lora_dropout", "0", "--lora_target_modules", "q_proj,o_proj", "--lora_target_parameters"]
EXPERTS += ["mlp.experts.gate_up_proj,mlp.experts.down_proj"]
KINDS = {
    "fp8": LINEAR,  # per block, with a tied head
    "mxfp4": EXPERTS,
    "awq": LINEAR,
}

ON_FLOATS = ["mxfp4"]
"""Kinds of which the same run is made on floats; `tests/ranks/test_packed.py` has passes of every kind."""

OTHERS = {"head": "compressed per channel", "dpo": "compressed int4", "classes": "fp8"}
"""Runs of which the same is made on floats, and the kinds of their bases."""

NIGHTLY = ("mxfp4", "awq", "classes")


def runs_of(names: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in names]


def texts(count: int, length: int, seed: int) -> list[str]:
    ids = torch.randint(3, 9, (count, length), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{n}" for n in row) for row in ids.tolist()]


@pytest.fixture
def series(name: str, tmp_path_factory: pytest.TempPathFactory) -> Series:
    """The series that has the run of the test."""
    return launched(tmp_path_factory.mktemp, name in NIGHTLY)


@cache
def launched(make_folder: Callable[[str], Path], is_nightly: bool) -> Series:
    folder = make_folder("packed")
    names = [name for name in (*KINDS, *OTHERS) if (name in NIGHTLY) == is_nightly]
    for kind in {OTHERS.get(name, name) for name in names}:
        word_tokenizer().save_pretrained(make_quantized(kind, folder / "bases" / kind))
    pairs = {"prompt": texts(8, 4, 1), "chosen": texts(8, 5, 2), "rejected": texts(8, 5, 3)}
    pairs["chosen"], pairs["rejected"] = ([f" {text}" for text in pairs[name]] for name in ("chosen", "rejected"))
    data = {
        "text": [{"text": text} for text in texts(16, 9, 0)],
        "pairs": [dict(zip(pairs, row, strict=True)) for row in zip(*pairs.values(), strict=True)],
        "classes": [{"text": text, "label": n % 3} for n, text in enumerate(texts(16, 9, 0))],
    }
    data = {name: ["--dataset_name", write_split(folder / f"{name}_rows", rows)] for name, rows in data.items()}
    ours = ["--per_device_train_batch_size", "2", "--logging_steps", "1", "--max_length", "16", "--use_peft"]
    ours += ["--lora_r", "4", "--learning_rate", "1e-2", "--lr_scheduler_type", "constant", "--dtype", "float32"]
    ours += ["--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no"]

    def both(name: str, recipe: str, *options: str, kind: str | None = None) -> dict[str, list[str]]:
        base = folder / "bases" / (kind or OTHERS[name])
        given = [recipe, "--model_name_or_path", str(base), *ours, *options]
        return {name: [*given, "--dequantize", "false"], f"{name}-floats": given}

    runs: dict[str, list[str]] = {}
    for kind, options in KINDS.items():
        made = both(kind, "finetune", *data["text"], *options, kind=kind)
        runs |= made if kind in ON_FLOATS else dict([*made.items()][:1])
    evaluated = ["--eval_strategy", "steps", "--eval_steps", "1"]
    accumulated = ["--gradient_accumulation_steps", "2", "--gradient_checkpointing", "true", "--bf16", "true"]
    head = [*data["text"], *LINEAR, "--lora_modules_to_save", "lm_head"]
    runs |= both("head", "finetune", *head, *accumulated, *evaluated)
    runs |= both("dpo", "dpo", *data["pairs"], *LINEAR, *evaluated)
    runs |= both("classes", "classify", *data["classes"], *LINEAR, *evaluated)
    plain = str(make_plain(folder / "bases" / "plain"))
    refused = {"plain": ["finetune", "--model_name_or_path", plain, *ours, *data["text"], "--dequantize", "false"]}
    runs = {name: words for name, words in runs.items() if name.removesuffix("-floats") in names}
    return launch_series(folder, runs, refused=refused)


def make_plain(folder: Path) -> Path:
    word_tokenizer().save_pretrained(make_checkpoint("llama", folder))
    return folder


@pytest.mark.parametrize("name", runs_of([*ON_FLOATS, *OTHERS]))
def test_a_base_that_stays_quantised_trains_as_its_floats(series, name):
    """Bit for bit; gradients of adapters on experts that run one by one may round the last bit, which AdamW divides."""
    rounded = 1e-4 if name == "mxfp4" else 0.0
    for key in ("loss", "grad_norm", "eval_loss"):
        assert series.log(name, key) == pytest.approx(series.log(f"{name}-floats", key), rel=rounded, abs=0.0), key
    ours, theirs = series.weights(name), series.weights(f"{name}-floats")
    assert ours.keys() == theirs.keys() and any("lora_" in key for key in ours)
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=rounded)


@pytest.mark.parametrize("name", runs_of(OTHERS))
def test_what_is_trained_beside_a_base_that_stays_quantised(series, name):
    whole = {key.rpartition("model.")[2] for key in series.weights(name) if "lora_" not in key}
    assert whole == {"head": {"lm_head.weight"}, "classes": {"score.weight"}, "dpo": set()}[name]
    before, after = series.log(name, "eval_loss")[:2]
    assert after != before, "all is trained; two steps need not lower the loss of random labels"
    assert name != "dpo" or before == pytest.approx(0.6931, abs=1e-4), "the adapter off is the reference"


@pytest.mark.parametrize("name", runs_of([*KINDS, "dpo"]))
def test_transformers_and_peft_open_the_adapter_on_the_same_base(series, name):
    """transformers dequantises all of these bases on a CPU, but AWQ: of that, what its library computes with is plain.

    The trained model computed its logits on packed shards; the adapter is plain, and they are the same.
    """
    assert all("lora_" in key for key in series.weights(name))
    kind = OTHERS.get(name, name)
    if "compressed" in kind and RELEASE <= (5, 17):
        pytest.skip("this transformers leaves these to a package that rounds otherwise")
    base = dequantized_by_transformers(kind, series.folder / "bases" / kind, torch.float32).float()
    series.check_opened(name, PeftModel.from_pretrained(base, series.folder / name))


@pytest.mark.parametrize("name", ["dpo"])
def test_a_plain_base_cannot_stay_quantised(series):
    assert "holds no quantised weights" in series.error("plain")
