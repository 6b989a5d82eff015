"""Checkpoints of every kind of architecture, in every form in which they are found, go through shards unchanged.

What is saved again is, to the bit, what transformers saves of its own plain model, and opens without a missing key.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel

from tests._dist import run_alone, run_cases, run_ranks
from tests._round_trip import differences, loads_as_stored, resave, write_as_found
from tests.api import build_case, shrink
from tests.census.defaults import build_config

KINDS = {
    "MixtralForCausalLM": ("mixtral", "experts one by one on the hub"),
    "GptOssForCausalLM": ("gpt_oss", "experts fused on the hub"),
    "JambaForCausalLM": ("jamba", "state space and attention, with fp32 parameters"),
    "Wav2Vec2ForCTC": ("wav2vec2", "weight norm, by its older names"),
    "CLIPModel": ("clip", "two towers, a 0-d parameter"),
    "CvtForImageClassification": ("cvt", "batch norms, with integer buffers"),
    "LlavaForConditionalGeneration": ("llava", "the same, of two models"),
    "MusicgenForConditionalGeneration": ("musicgen", "three models, two of them with text"),
}


def save_by_transformers(name: str, folder: Path, only: dict[str, str]) -> dict[str, Path]:
    """A tiny model of that class, in the forms in which it is found, and what transformers saves of each again."""
    model_type, _ = KINDS[name]
    model: PreTrainedModel = build_case(getattr(transformers, name), shrink(build_config(model_type), "tiny"))
    found = write_as_found(model, folder / "found" / name)
    found = {form: path for form, path in found.items() if form == only.get(name, form)}
    for form, path in found.items():
        loads_as_stored(type(model), path)[0].save_pretrained(folder / "theirs" / name / form)
    return found


def resave_and_compare(name: str, found: dict[str, Path], folder: Path) -> None:
    """Every form of a kind through shards; each rank compares every second one with what transformers saves."""
    model_class = getattr(transformers, name)
    for form, path in found.items():
        resave(model_class, path, folder / "ours" / name / form, max_shard_size="40KB")
    for form in list(found)[dist.get_rank() :: 2]:
        ours, theirs = (folder / whose / name / form for whose in ("ours", "theirs"))
        assert differences(ours, theirs) == [], (name, form)
        assert loads_as_stored(model_class, ours)[1] == "", (name, form)


def resave_kinds(kinds: dict[str, dict[str, Path]], folder: Path) -> None:
    run_cases({name: partial(resave_and_compare, name, found, folder) for name, found in kinds.items()})


FORMS = {"Wav2Vec2ForCTC": "older", "MixtralForCausalLM": "model", "LlavaForConditionalGeneration": "model"}
FEW = {name: FORMS[name] for name in ("Wav2Vec2ForCTC", "MixtralForCausalLM")}
FEW["JambaForCausalLM"] = "bf16"
"""Kinds of which one form is tried in each commit."""


@pytest.mark.parametrize(
    ("names", "only"), [([*FEW], FEW), pytest.param([*KINDS], {}, marks=pytest.mark.nightly)], ids=["few", "all"]
)
def test_every_kind_is_saved_again_as_transformers_saves_it(names: list[str], only: Any, tmp_path: Path) -> None:
    kinds = dict(zip(names, run_alone(save_by_transformers, names, tmp_path, only), strict=True))
    assert all((only or FORMS)[name] in kinds[name] for name in (only or FORMS).keys() & kinds.keys())
    run_ranks(resave_kinds, 2, kinds, tmp_path)
