"""Bases that stay quantised: losses and gradients of adapters bit for bit those of the dequantised base."""

import copy
import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_fsdp_tools import ParallelDims, from_config, from_pretrained, save_pretrained
from hf_fsdp_tools.modeling.packed import packed_parameters
from hf_fsdp_tools.modeling.packed_weight import PackedForm
from tests._checkpoints import (
    ORDERED,
    QUANTIZED,
    assert_same_tensors,
    make_every_quantized,
    refusal,
    stored_tensors,
    with_order,
)
from tests._dist import run_cases, run_ranks
from tests._grids import fast_and_nightly, in_turn
from tests._noted import calls_of

KINDS = list(QUANTIZED)
EXPERTS = [kind for kind in QUANTIZED if "experts" in kind or kind == "mxfp4"]
LORA = {"r": 4, "target_modules": ["q_proj", "o_proj", "q_a_proj"], "init_lora_weights": False}
OF_EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "mixed": {"dtype": torch.float32, "mp_policy": "bf16"},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_every_quantized(tmp_path_factory.mktemp("quantised"))


def loaded(kind: str, folder: Path, *, dequantize: bool, **options: Any) -> Any:
    lora = LORA | (OF_EXPERTS if kind in EXPERTS else {})
    kwargs = {"progress": False, "seed": 1}
    return from_pretrained(folder / kind, dequantize=dequantize, load_kwargs=kwargs, **{"peft_config": lora, **options})


def one_pass(model: Any, *, train: bool = True) -> dict[str, torch.Tensor]:
    """Loss, logits, and the whole gradient of each adapter."""
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.set_grad_enabled(train):
        output = model.train(train)(input_ids=ids, labels=ids, use_cache=False)
    found = {"loss": output.loss.detach(), "logits": output.logits.detach()}
    if train:
        output.loss.backward()
        found |= {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
    return found


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: object) -> None:
    """Bit for bit; but where experts run one by one, the product of a stack of gradients may round the last bit."""
    assert ours.keys() == theirs.keys(), what
    for name, tensor in theirs.items():
        rounded = 1e-6 * float(tensor.abs().max()) if ".experts." in name and "grouped_mm" not in str(what) else 0.0
        assert float((ours[name] - tensor).abs().max()) <= rounded, (what, name)


def parities(combinations: list[tuple[str, str]], folder: Path) -> None:
    for kind, precision in combinations:
        is_grouped = kind in EXPERTS and precision == "bf16"
        options = PRECISIONS[precision] | ({"experts_implementation": "grouped_mm"} if is_grouped else {})
        ours, theirs = (loaded(kind, folder, dequantize=dequantize, **options) for dequantize in (False, True))
        assert packed_parameters(ours), kind
        for train in (True, False):
            assert_equal(one_pass(ours, train=train), one_pass(theirs, train=train), (kind, options, train))


SAMPLE = ["fp8 and fp4 experts", "mxfp4", "compressed int4", "gptq experts"]


@fast_and_nightly(in_turn, KINDS, list(PRECISIONS))
@pytest.mark.shows("bf16", "losses of one process", "stays quantised")
def test_losses_and_gradients_are_those_of_the_dequantised_base(checkpoints, combinations):
    run_ranks(partial(parities, combinations), 2, checkpoints)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (1, 4))])
def test_uneven_shards_give_the_same(checkpoints, ranks):
    run_ranks(partial(parities, [(kind, "mixed") for kind in SAMPLE]), ranks, checkpoints)


# ---- what works on plain shards ----


def recomputed_offloaded_and_copied(folder: Path, tmp: Path) -> None:
    for kind, options in (
        ("mxfp4", {"activation_checkpointing": True}),
        ("fp8 experts", {"activation_checkpointing": True, "experts_implementation": "grouped_mm"}),
        ("compressed int4", {"offload_policy": True}),
        ("fp8", {"mesh": ParallelDims(dp_replicate_size=2)}),
        ("compressed nvfp4", {"peft_config": LORA | {"target_modules": [], "target_parameters": ["q_proj.weight"]}}),
    ):
        ours, theirs = (loaded(kind, folder, dequantize=dequantize, **options) for dequantize in (False, True))
        assert_equal(one_pass(ours), one_pass(theirs), (kind, options))


def generated_and_copied(folder: Path, tmp: Path) -> None:
    ours, theirs = (loaded("mxfp4", folder, dequantize=dequantize).eval() for dequantize in (False, True))
    ids = torch.arange(3, 9)[None]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(ours.generate(input_ids=ids, **options), theirs.generate(input_ids=ids, **options))
    twin = copy.deepcopy(ours)
    assert_equal(one_pass(twin, train=False), one_pass(ours, train=False), "copy")


def compiled(folder: Path, tmp: Path) -> None:
    """Compiled blocks compute the same up to rounding."""
    found = one_pass(loaded("fp8", folder, dequantize=False, compile={"backend": "aot_eager"}))
    torch.testing.assert_close(found, one_pass(loaded("fp8", folder, dequantize=True)))


# ---- bytes ----


def bytes_of_a_unit(folder: Path, tmp: Path) -> None:
    """Gathered are the stored bytes, and one weight at a time is dequantised, in the backward pass too."""
    for kind in ("fp8 of 128 x 128", "compressed nvfp4", "gptq experts"):
        model = loaded(kind, folder, dequantize=False, peft_config=None)
        forms = packed_parameters(model)
        names = ("_packed", "_scale_inv", "_scale", "qweight", "qzeros", "scales")
        tensors = stored_tensors(folder / kind).items()
        stored = sum(t.nbytes for key, t in tensors if key.endswith(names) or t.dtype == torch.float8_e4m3fn)
        parts = [model.get_parameter(name) for key, form in forms.items() for name in form.parts(key)]
        assert all(isinstance(part, DTensor) and part.dtype == torch.uint8 for part in parts)
        ranks, gathered = dist.get_world_size(), 0
        for part in parts:
            rows = part.shape[part.placements[-1].dim]
            gathered += -(-rows // ranks) * ranks * (part.numel() // rows)
        assert gathered <= 1.02 * stored, (kind, gathered, stored)
        made: list[Any] = []
        model = loaded(kind, folder, dequantize=False)
        with calls_of(PackedForm, "floats", partial(alive_with, made)) as alive:
            one_pass(model)
        assert max(alive) == 1 and len(alive) > len(forms), (kind, alive)


def alive_with(made: list[Any], values: torch.Tensor, *_: Any) -> int:
    """How many of the values that were dequantised are alive together."""
    made.append(weakref.ref(values.untyped_storage()))
    return sum(1 for each in made if each() is not None)


# ---- out ----


def saved_as_stored(folder: Path, tmp: Path) -> None:
    for kind in KINDS:
        model = loaded(kind, folder, dequantize=False, peft_config=None)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        save_pretrained(model, tmp / kind)
        after, before = (  # transformers makes a bias fp32
            {key: t for key, t in stored_tensors(where / kind).items() if "correction_bias" not in key}
            for where in (tmp, folder)
        )
        assert_same_tensors(after, before, kind)
    for kind in SAMPLE:
        again = loaded(kind, tmp, dequantize=False)
        assert_equal(one_pass(again), one_pass(loaded(kind, folder, dequantize=False)), kind)


def a_new_model_is_plain(folder: Path, tmp: Path) -> None:
    """Of the configuration of a quantised checkpoint: saved without the quantisation, which its floats do not have."""
    save_pretrained(from_config(folder / "fp8", seed=0), tmp / "new")
    assert "quantization_config" not in json.loads((tmp / "new" / "config.json").read_text())
    assert "quantization_config" in json.loads((folder / "fp8" / "config.json").read_text())


def refused(folder: Path, tmp: Path) -> None:
    said = refusal(lambda: loaded("fp8 experts", folder, dequantize=False, experts_implementation="batched_mm"))
    assert "experts_implementation 'batched_mm' cannot compute with experts that stay quantised" in said
    ordered = tmp / "ordered" / "gptq"
    if dist.get_rank() == 0:
        with_order(folder / "gptq", ordered)
    dist.barrier()
    said = refusal(lambda: loaded("gptq", ordered.parent, dequantize=False))
    assert f"{ORDERED!r} orders its columns by activation" in said and "failed on 1 of 2 ranks" in said
    said = refusal(lambda: from_pretrained(tmp / "fp8 x", dequantize=False))
    assert "No such folder" in said
    said = refusal(lambda: loaded("fp8", folder, dequantize=False, peft_config=LORA | {"use_dora": True}))
    assert "DoRA takes norms over whole rows of the base" in said
    model = loaded("fp8", folder, dequantize=False, peft_config=None)
    said = refusal(lambda: save_pretrained(model, tmp / "x", dtype=torch.bfloat16))
    assert "holds quantised values, which a cast destroys" in said


CASES = (
    recomputed_offloaded_and_copied, generated_and_copied, compiled, bytes_of_a_unit, saved_as_stored,
    a_new_model_is_plain, refused,
)  # fmt: skip


@pytest.mark.shows("activation checkpointing", "generate", "save_pretrained", "stays quantised")
@pytest.mark.shows("stays quantised", "HSDP", "offload", "compile")
def test_packed_bases_do_what_plain_ones_do(checkpoints, tmp_path):
    run_ranks(run_cases, 2, CASES, checkpoints, tmp_path)
