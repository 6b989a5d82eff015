"""Architectures of every kind train on 2 ranks as they do alone: a sample of the census of training.

Beside usual ones stand those on which something was wrong: a batch norm under mixed precision, buffers that enter the
computation, a table whose weight is read without a call, an embedding that is called from outside, an empty parameter,
experts of which the ranks choose different ones.
"""

from functools import partial

import pytest
from transformers import CONFIG_MAPPING

from tests._dist import run_alone, run_cases, run_ranks
from tests.api import PRECISIONS
from tests.census.trained import examine_on_ranks, examine_plain, judged, size_of

SAMPLE = {
    "llama": "dense, head apart",
    "qwen3": "dense, tied head",
    "gpt2": "weights the other way round",
    "mixtral": "experts in one tensor",
    "switch_transformers": "experts one by one, of which ranks choose different ones",
    "axk2": "experts, indexed attention, routers with buffers",
    "dots3_note_text": "rotary tables that are fp32 on purpose",
    "mamba2": "state space",
    "gemma4_text": "layers of several sizes",
    "bert": "encoder",
    "colmodernvbert": "an embedding that is called from outside the module around it",
    "t5": "encoder and decoder, one embedding for both",
    "pop2piano": "two units that the plan keeps gathered for the backward pass",
    "vit": "images",
    "dinov3_vit": "an empty parameter",
    "cvt": "batch norms",
    "detr": "frozen batch norms, whose buffers are computed with",
    "clip": "two towers, a 0-d parameter",
    "llava": "images among words",
    "qwen2_5_vl": "images of several sizes among words",
    "wav2vec2": "sound as waves, weight norm",
    "whisper": "sound as spectra",
    "audioflamingo3_encoder": "positions that are read from a table without a call",
    "roc_bert": "outputs of units that are views, and written to",
    "sam3_video": "units that look like experts of a list",
    "minimax": "decays in fp32, buffers that are multiplied with activations",
}


# transformers' router changes its own weights to fp32 while it runs, which FSDP2 refuses beside gradients in bf16.
ONLY_FP32 = ("switch_transformers",)
# transformers 5.17, which is supported too, lacks some of 5.23.
THERE = [model_type for model_type in SAMPLE if model_type in CONFIG_MAPPING]


def _plain(model_type, folder):
    precisions = ("fp32",) if model_type in ONLY_FP32 else tuple(PRECISIONS)
    assert examine_plain(model_type, folder / model_type, precisions)["verdict"] == "ready"


def _agrees(folder, model_type):
    row = judged([examine_on_ranks(folder / model_type)])
    assert row["verdict"] == "agrees", row["why"]


def _sample(folder, types):
    run_cases({name: partial(_agrees, folder, name) for name in types})


SHARED = {
    "cp2": {
        "gemma3_text": "windows",
        "gpt_oss": "sinks, windows",
        "qwen3_moe": "experts, whose router sees a part of the rows",
        "deepseek_v3": "latent attention",
        "qwen3_vl": "images whose features are added between blocks",
        "qwen3_next": "linear attention",
        "deepseek_v32": "an indexer",
    },
    "shard2xcp2": {"llama": "dense", "bert": "attention to both sides, which must not see padding"},
}


def _plain_shared(model_type, folder, mesh):
    assert examine_plain(model_type, folder / model_type, mesh=mesh)["verdict"] == "ready"


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", SHARED)
def test_a_sample_trains_on_shared_rows_as_the_plain_model_does(tmp_path, mesh):
    types = [name for name in SHARED[mesh] if name in CONFIG_MAPPING]
    run_alone(_plain_shared, types, tmp_path, mesh)
    run_ranks(_sample, size_of(mesh), tmp_path, types)


@pytest.mark.nightly
def test_a_sample_of_architectures_trains_as_the_plain_model_does(tmp_path):
    run_alone(_plain, THERE, tmp_path)
    run_ranks(_sample, 2, tmp_path, THERE)
