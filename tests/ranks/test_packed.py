"""Bases that stay quantised: losses and gradients of adapters bit for bit those of the dequantised base."""

import copy
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from hf_fsdp_tools import ParallelDims, from_config, from_pretrained, save_pretrained
from hf_fsdp_tools.modeling.packed import packed_parameters
from hf_fsdp_tools.modeling.packed_weight import PackedForm
from tests._checkpoints import ORDERED, QUANTIZED, make_every_quantized, refusal, with_order
from tests._dist import run_cases, run_ranks

KINDS = list(QUANTIZED)
EXPERTS = [kind for kind in QUANTIZED if "experts" in kind or kind == "mxfp4"]
LORA = {"r": 4, "target_modules": ["q_proj", "o_proj", "q_a_proj"], "init_lora_weights": False}
OF_EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
PRECISIONS: list[dict[str, Any]] = [
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float32, "mp_policy": "bf16"},
]


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


def parities(kinds: list[str], precisions: list[dict[str, Any]], folder: Path) -> None:
    for kind in kinds:
        for options in precisions:
            is_grouped = kind in EXPERTS and options["dtype"] == torch.bfloat16
            options = options | ({"experts_implementation": "grouped_mm"} if is_grouped else {})
            ours, theirs = (loaded(kind, folder, dequantize=dequantize, **options) for dequantize in (False, True))
            assert packed_parameters(ours), kind
            for train in (True, False):
                assert_equal(one_pass(ours, train=train), one_pass(theirs, train=train), (kind, options, train))


SAMPLE = ["fp8 and fp4 experts", "mxfp4", "compressed int4", "gptq experts"]


@pytest.mark.parametrize(
    ("ranks", "kinds", "precisions"),
    [
        (1, SAMPLE, PRECISIONS[2:]),
        (2, KINDS, PRECISIONS[:2]),
        (3, SAMPLE, PRECISIONS[2:]),
        (4, SAMPLE, PRECISIONS[1:2]),
    ],
)
@pytest.mark.shows("bf16", "losses of one process", "stays quantised")
def test_losses_and_gradients_are_those_of_the_dequantised_base(checkpoints, ranks, kinds, precisions):
    run_ranks(partial(parities, kinds, precisions), ranks, checkpoints, timeout_s=240)


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
    ours, theirs = (
        loaded("fp8", folder, dequantize=dequantize, compile={"backend": "aot_eager"}) for dequantize in (False, True)
    )
    found, expected = one_pass(ours), one_pass(theirs)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


# ---- bytes ----


@contextmanager
def dequantised_at_once() -> Iterator[list[int]]:
    """Values that are dequantised and alive together, each time a weight is dequantised."""
    alive: list[int] = []
    made: list[Any] = []
    plain = PackedForm.floats

    def floats(*args: Any) -> torch.Tensor:
        result = plain(*args)
        made.append(weakref.ref(result.untyped_storage()))
        alive.append(sum(1 for each in made if each() is not None))
        return result

    PackedForm.floats = floats  # type: ignore[method-assign]
    try:
        yield alive
    finally:
        PackedForm.floats = plain  # type: ignore[method-assign]


def bytes_of_a_unit(folder: Path, tmp: Path) -> None:
    """Gathered are the stored bytes, and one weight at a time is dequantised, in the backward pass too."""
    for kind in ("fp8 of 128 x 128", "compressed nvfp4", "compressed int4 experts", "gptq experts"):
        model = loaded(kind, folder, dequantize=False, peft_config=None)
        forms = packed_parameters(model)
        stored = sum(
            tensor.nbytes
            for file in (folder / kind).glob("*.safetensors")
            for key, tensor in load_file(file).items()
            if key.endswith(("_packed", "_scale_inv", "_scale", "qweight", "qzeros", "scales"))
            or tensor.dtype == torch.float8_e4m3fn
        )
        parts = [model.get_parameter(name) for key, form in forms.items() for name in form.parts(key)]
        assert all(isinstance(part, DTensor) and part.dtype == torch.uint8 for part in parts)
        gathered = sum(
            -(-part.shape[part.placements[-1].dim] // dist.get_world_size())
            * dist.get_world_size()
            * (part.numel() // part.shape[part.placements[-1].dim])
            for part in parts
        )
        assert gathered <= 1.02 * stored, (kind, gathered, stored)
        model = loaded(kind, folder, dequantize=False)
        with dequantised_at_once() as alive:
            one_pass(model)
        assert max(alive) == 1 and len(alive) > len(forms), (kind, alive)


# ---- out ----


def stored_bytes(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    tensors = {key: t for file in sorted(folder.glob("*.safetensors")) for key, t in load_file(file).items()}
    return {
        key: (t.dtype, tuple(t.shape), bytes(t.reshape(-1).view(torch.uint8).tolist())) for key, t in tensors.items()
    }


def saved_as_stored(folder: Path, tmp: Path) -> None:
    for kind in KINDS:
        model = loaded(kind, folder, dequantize=False, peft_config=None)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        save_pretrained(model, tmp / kind)
        before, after = stored_bytes(folder / kind), stored_bytes(tmp / kind)
        after = {key: each for key, each in after.items() if "correction_bias" not in key}  # transformers makes it fp32
        assert after == {key: each for key, each in before.items() if "correction_bias" not in key}, kind
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


CASES = [
    recomputed_offloaded_and_copied,
    generated_and_copied,
    compiled,
    bytes_of_a_unit,
    saved_as_stored,
    a_new_model_is_plain,
    refused,
]


@pytest.mark.shows("activation checkpointing", "generate", "save_pretrained", "stays quantised")
@pytest.mark.shows("stays quantised", "HSDP", "offload", "compile")
def test_packed_bases_do_what_plain_ones_do(checkpoints, tmp_path):
    cases = {case.__name__: partial(case, checkpoints) for case in CASES}
    run_ranks(run_cases, 2, cases, tmp_path, timeout_s=240)
