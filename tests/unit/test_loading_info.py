"""Missing, unexpected and mismatched keys are those that transformers reports of the same model and checkpoint."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from hf_fsdp_tools import CheckpointError
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import make_model

Tensors = dict[str, torch.Tensor]
MISMATCHED = {"ignore_mismatched_sizes": True}


class Quiet(hf.LlamaForCausalLM):
    _keys_to_ignore_on_load_missing: ClassVar = [r"q_proj"]
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"adapter"]


def drop(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: t for key, t in tensors.items() if not any(part in key for part in parts)}


def add(*keys: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {key: torch.ones(3) for key in keys}


def same(tensors: Tensors) -> Tensors:
    return tensors


CASES: dict[str, tuple[str, Callable[[Tensors], Tensors], Any, dict[str, Any]]] = {
    # name: (kind of checkpoint, what is changed, class that loads it, arguments)
    "nothing wrong": ("llama", same, hf.AutoModelForCausalLM, {}),
    "head to base": ("llama", same, hf.AutoModel, {}),
    "base to head": ("base", same, hf.AutoModelForCausalLM, {}),
    "tied, embedding missing": ("tied", drop("embed_tokens"), hf.AutoModelForCausalLM, {}),
    "a layer missing, keys too many": ("deepseek_v3",
         lambda t: add("model.layers.7.mlp.up_proj.weight", "junk")(drop("layers.1.")(t)),
         hf.AutoModelForSequenceClassification, {"num_labels": 5}),
    "a whole expert layer missing": ("mixtral", drop("1.mlp", "1.block_sparse_moe"), hf.AutoModelForCausalLM, {}),
    "ignored keys": ("llama", lambda t: add("adapter.x", "model.other.x")(drop("q_proj", "k_proj")(t)), Quiet, {}),
    "half of T5": ("t5", same, hf.T5EncoderModel, {}),
    "other shapes": ("llama", drop("layers.0.mlp"), hf.AutoModelForCausalLM, {"vocab_size": 77, **MISMATCHED}),
    "old names of norms": ("bert",
         lambda t: {key.replace("LayerNorm.weight", "LayerNorm.gamma"): value for key, value in t.items()},
         hf.BertForSequenceClassification, {}),
}  # fmt: skip


def checkpoint(kind: str, change: Callable[[Tensors], Tensors], folder: Path) -> Path:
    model = make_model("llama").model if kind == "base" else make_model(kind)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


@contextmanager
def warnings_of_transformers() -> Iterator[list[str]]:
    """What transformers' models log while the block runs."""
    logger = logging.getLogger("transformers.modeling_utils")
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("name", CASES)
def test_the_same_keys_as_transformers(tmp_path: Path, name: str) -> None:
    kind, change, auto_class, arguments = CASES[name]
    folder = checkpoint(kind, change, tmp_path)
    with warnings_of_transformers() as expected_warnings:
        reference, expected = auto_class.from_pretrained(folder, output_loading_info=True, **arguments)
    ignore = arguments.get("ignore_mismatched_sizes", False)
    config = {key: value for key, value in arguments.items() if key != "ignore_mismatched_sizes"}
    model = build_meta_model(folder, auto_class=auto_class, **config)
    with warnings_of_transformers() as found_warnings:
        report = load_weights(model, folder, ignore_mismatched_sizes=ignore)
    tables, shown = (
        # its rows come from sets; ours leaves a terminal's codes out where no terminal is
        [sorted(re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()) for text in texts if "LOAD REPORT" in text]
        for texts in (expected_warnings, found_warnings)
    )
    assert shown == tables
    info = report.loading_info()
    assert set(json.loads(report.to_json())["missing_keys"]) == info["missing_keys"]
    assert bool(tables) == any(info.values())
    mismatched = {(key, tuple(a), tuple(b)) for key, a, b in expected["mismatched_keys"]}
    assert info == {**expected, "mismatched_keys": mismatched}
    state, values = model.state_dict(keep_vars=True), reference.state_dict()
    drawn = {id(state[key]) for key in report.initialized_keys}  # tied tensors have several keys
    assert all(id(tensor) in drawn or torch.equal(tensor, values[key]) for key, tensor in state.items())
    # strict: whatever is reported is refused
    again = build_meta_model(folder, auto_class=auto_class, **config)
    if info["missing_keys"] or info["unexpected_keys"]:
        with pytest.raises(CheckpointError, match="does not hold exactly what the model needs") as caught:
            load_weights(again, folder, strict=True, ignore_mismatched_sizes=ignore)
        assert all(key in str(caught.value) for key in info["missing_keys"] | info["unexpected_keys"])
    else:
        load_weights(again, folder, strict=True)
