"""Quantised checkpoints on real ranks: shards bit for bit what transformers' `dequantize=True` gives, each rank reading
its own part of values and scales."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import BitsAndBytesConfig
from transformers.integrations import compressed_tensors

from hf_fsdp_tools import CheckpointError, from_pretrained, save_pretrained
from hf_fsdp_tools.steps import build_meta_model, load_weights, make_wrap_plan, shard_model
from tests._checkpoints import (
    ORDERED,
    QUANTIZED,
    assert_same_tensors,
    dequantized_by_transformers,
    full_state,
    make_every_quantized,
    refusal,
    with_order,
)
from tests._dist import run_cases, run_ranks
from tests._grids import in_turn
from tests.api import beside_4bit, weights_4bit

KINDS = [kind for kind in QUANTIZED if "compressed" not in kind or find_spec("compressed_tensors")]
"""Those of compressed-tensors where its package is there, which transformers needs."""

TRANSPOSED = tuple(kind for kind in KINDS if "gptq" in kind or "awq" in kind)
"""Those that store a weight transposed, so that ranks have runs of each row: here with gaps below a page, which are
read too."""

ROUNDED = 0.0 if hasattr(compressed_tensors, "CompressedTensorsDequantize") else 2**-7
"""How far a weight of compressed-tensors may be off, relatively: transformers 5.17 leaves these to that package, which
rounds to bf16 once more or once less."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_every_quantized(tmp_path_factory.mktemp("quantised"))


def assert_dequantized(model: nn.Module, kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    found, what = full_state(model), (kind, dtype)
    if dist.get_rank():
        return  # all have the same
    expected = dequantized_by_transformers(kind, folder / kind, dtype).state_dict()
    assert list(found) == list(expected), what
    for key, tensor in found.items():
        assert tensor.dtype == dtype or expected[key].dtype == tensor.dtype == torch.float32, (what, key)
        their, rounded = expected[key].to(tensor.dtype), ROUNDED if "compressed" in kind else 0.0
        assert tensor.shape == their.shape and torch.allclose(tensor, their, rtol=rounded, atol=0), (what, key)


def load_every_kind(folder: Path, combinations: Sequence[tuple[str, torch.dtype]]) -> list[tuple[str, float, int]]:
    rows = []
    for kind, dtype in combinations:
        model, report = from_pretrained(folder / kind, dtype=dtype, output_loading_info=True)
        assert_dequantized(model, kind, folder, dtype)
        assert not report.missing_keys and not report.unexpected_keys and not report.converted_bytes, kind
        assert report.dequantized_from == QUANTIZED[kind][2]["quant_method"]
        assert report.dequantized_bytes > 1.9 * report.quantized_bytes
        assert not hasattr(model.config, "quantization_config")
        rows.append((kind, report.read_ratio, report.share_bytes))
    return rows


DTYPES = (torch.bfloat16, torch.float32)
NEAR = ("fp8 of 128 x 128", "compressed experts", "compressed int4 experts", "awq experts")
"""Those that are read as others are."""

FAST = in_turn([kind for kind in KINDS if kind not in NEAR], DTYPES)
EVERY = [*product(KINDS, DTYPES)]


@pytest.mark.parametrize(
    ("ranks", "combinations"),
    [
        (3, FAST[::4] + FAST[1::4]),
        *(pytest.param(ranks, EVERY, marks=pytest.mark.nightly) for ranks in (1, 3)),
    ],
)
def test_every_kind_is_what_transformers_makes_of_it(checkpoints, combinations, ranks):
    for rows in zip(*run_ranks(load_every_kind, ranks, checkpoints, combinations), strict=True):
        kind = rows[0][0]
        least, most = (0.85, ranks) if kind in TRANSPOSED and ranks > 1 else (1, 1.05)
        assert all(least <= ratio <= most for _, ratio, _ in rows), rows
        stored = sum(file.stat().st_size for file in (checkpoints / kind).glob("*.safetensors"))
        assert sum(share for *_, share in rows) <= 1.05 * stored


# ---- other ways to load ----


def along(dim: int) -> Callable[[nn.Parameter], Shard]:
    """Shard along this dimension where it divides evenly (FSDP2 asks for that), else along the first."""

    def placement(parameter: nn.Parameter) -> Shard:
        fits = parameter.dim() > dim and parameter.shape[dim] % dist.get_world_size() == 0
        return Shard(dim if fits else 0)

    return placement


def along_other_dimensions(kind: str, dim: int, folder: Path, tmp: Path) -> None:
    model = build_meta_model(folder / kind)
    for layer in model.model.layers:
        fully_shard(layer, shard_placement_fn=along(dim))
    fully_shard(model, shard_placement_fn=along(dim))
    assert any(p.placements == (Shard(dim),) for p in model.parameters())
    load_weights(model, folder / kind, staging_bytes=2**20)
    assert_dequantized(model, kind, folder)


def saved_and_loaded_again(kind: str, folder: Path, tmp: Path) -> None:
    """A plain checkpoint, under the hub's plain names."""
    model = from_pretrained(folder / kind)
    out = tmp / kind
    save_pretrained(model, out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    if dist.get_rank() == 0:
        plain = QUANTIZED[kind][0]().to(torch.bfloat16)
        plain.save_pretrained(tmp / f"{kind} plain")
        names = [set().union(*(load_file(f) for f in (tmp / n).glob("*.safetensors"))) for n in (kind, f"{kind} plain")]
        assert names[0] == names[1]
    load_weights(model, out)  # nothing remembers that it was quantised
    assert_dequantized(model, kind, folder)


def packed_in_four_bits(folder: Path, tmp: Path) -> None:
    """QLoRA on a quantised checkpoint: as on the plain checkpoint of the same weights."""
    config, out = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True), tmp / "plain for qlora"
    save_pretrained(from_pretrained(folder / "fp8"), out)
    dist.barrier()
    states = []
    for source in (folder / "fp8", out):
        model = from_pretrained(source, quantization_config=config, load_kwargs={"staging_bytes": 2**20})
        states.append(full_state(model) | beside_4bit(model))
    assert_same_tensors(*states)
    assert len(weights_4bit(model)) == 14


# ---- what is wrong with values ----

BAD = "model.layers.1.mlp.up_proj.weight_scale_inv"


def refused(folder: Path) -> str:
    model = build_meta_model(folder)
    shard_model(model, make_wrap_plan(model))
    said = refusal(lambda: load_weights(model, folder), CheckpointError)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert "failed on 1 of 2 ranks" in said
    return said


def a_scale_that_is_no_number_stops_all_ranks(folder: Path, tmp: Path) -> None:
    """In the last block, which the last rank alone reads."""
    for value in (0.0, float("nan"), float("inf")):
        target = tmp / str(value)
        if dist.get_rank() == 0:
            shutil.copytree(folder / "fp8", target)
            file = next(f for f in target.glob("*.safetensors") if BAD in load_file(f))
            tensors = load_file(file)
            tensors[BAD][-1, -1] = value
            save_file(tensors, file, metadata={"format": "pt"})
        dist.barrier()
        assert f"{BAD!r} holds 1 scales that are zero, infinite or NaN" in refused(target)


def columns_ordered_by_activation_stop_all_ranks(folder: Path, tmp: Path) -> None:
    if dist.get_rank() == 0:
        with_order(folder / "gptq", tmp / "ordered")
    dist.barrier()
    said = refused(tmp / "ordered")
    assert f"{ORDERED!r} orders its columns by activation" in said and "model.dequantize()" in said


ALONG = (("mxfp4", 2), ("gptq", 1), ("fp8 and fp4 experts", 1), ("fp8 experts", 2), ("compressed int4", 1))
RARE = [f"{kind} along {dim}" for kind, dim in ALONG[2:]]
WAYS: dict[str, Callable[[Path, Path], None]] = {
    **{f"{kind} along {dim}": partial(along_other_dimensions, kind, dim) for kind, dim in ALONG if kind in KINDS},
    "mxfp4 saved": partial(saved_and_loaded_again, "mxfp4"),
    **({"4 bits": packed_in_four_bits} if find_spec("bitsandbytes") else {}),
    "no number": a_scale_that_is_no_number_stops_all_ranks,
    "ordered": columns_ordered_by_activation_stop_all_ranks,
}


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["usual", "rare"])
def test_other_ways_to_load_and_bad_values(checkpoints, tmp_path, fast):
    cases = {name: case for name, case in WAYS.items() if (name not in RARE) == fast}
    run_ranks(run_cases, 2, cases, checkpoints, tmp_path)
