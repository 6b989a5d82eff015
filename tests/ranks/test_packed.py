"""Bases that stay quantised: losses and gradients of adapters bit for bit those of the dequantised base; users' ways:
vocabularies, heads, optimizers, resumed states, and mistakes."""

import json
import shutil
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import LNTuningConfig, LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import BitsAndBytesConfig
from transformers.integrations import compressed_tensors

from hf_fsdp_tools import (
    CheckpointError,
    ParallelDims,
    from_config,
    from_pretrained,
    save_pretrained,
)
from hf_fsdp_tools.modeling import packed_weight
from hf_fsdp_tools.modeling.packed import packed_parts
from hf_fsdp_tools.steps import build_meta_model, load_weights, make_wrap_plan, shard_model
from tests._checkpoints import (
    ORDERED,
    QUANTIZED,
    Tensors,
    assert_same_tensors,
    dequantized_by_transformers,
    full,
    full_state,
    make_every_quantized,
    make_quantized,
    refusal,
    stored_tensors,
    with_order,
)
from tests._dist import named, run_cases, run_ranks
from tests._grids import fast_and_nightly, in_turn
from tests._noted import calls_of
from tests._rounding import with_rounding
from tests._training import batches_of, make_rows, train
from tests.api import Held, PackedForm, beside_4bit, packed_parameters, weights_4bit

KINDS = list(QUANTIZED)
EXPERTS = [kind for kind in QUANTIZED if "experts" in kind or kind == "mxfp4"]
LORA = {"r": 4, "target_modules": ["q_proj", "o_proj", "q_a_proj"], "init_lora_weights": False}
ADAPTER = {"r": 4, "target_modules": ["q_proj", "o_proj"]}
QUIET = {"load_kwargs": {"progress": False, "seed": 1}}
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
    return from_pretrained(folder / kind, dequantize=dequantize, **QUIET, **{"peft_config": lora, **options})


def one_pass(model: Any, *, is_training: bool = True, sharers: int = 1) -> dict[str, torch.Tensor]:
    """Loss, logits, and the whole gradient of each adapter; so many ranks have the same rows."""
    ids = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(dist.get_rank() // sharers))
    with torch.set_grad_enabled(is_training):
        output = model.train(is_training)(input_ids=ids, labels=ids, use_cache=False)
    found = {"loss": output.loss.detach(), "logits": output.logits.detach()}
    if is_training:
        output.loss.backward()
        found |= {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
    return found


def assert_equal(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: object, allowed: Any = None
) -> None:
    """Bit for bit; but where experts run one by one, the product of a stack of gradients may round the last bit: in
    fp32 of the largest value, below as `allowed`."""
    assert ours.keys() == theirs.keys(), what
    for name, tensor in theirs.items():
        rounded = allowed[name] if allowed else 1e-6 * float(tensor.abs().max())
        rounded *= ".experts." in name and "grouped_mm" not in str(what)
        assert float((ours[name] - tensor).abs().max()) <= rounded, (what, name)


def parities(combinations: list[tuple[str, str]], folder: Path) -> None:
    for kind, precision in combinations:
        is_grouped = kind in EXPERTS and precision == "bf16"
        options = PRECISIONS[precision] | ({"experts_implementation": "grouped_mm"} if is_grouped else {})
        ours, theirs = (loaded(kind, folder, dequantize=dequantize, **options) for dequantize in (False, True))
        assert packed_parameters(ours), kind
        for mode in (True, False):
            found, run = one_pass(ours, is_training=mode), partial(one_pass, theirs, is_training=mode)
            is_rounded = kind in EXPERTS and precision != "fp32" and mode
            expected, allowed = with_rounding(run) if is_rounded else (run(), None)
            assert_equal(found, expected, (kind, options, mode), allowed)


@fast_and_nightly(lambda kinds, precisions: in_turn(kinds[::3], precisions), KINDS, list(PRECISIONS))
def test_losses_and_gradients_are_those_of_the_dequantised_base(checkpoints, combinations):
    run_ranks(partial(parities, combinations), 2, checkpoints)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (1, 4))])
def test_uneven_shards_give_the_same(checkpoints, ranks):
    run_ranks(partial(parities, [(kind, "mixed") for kind in ("compressed nvfp4", "gptq experts")]), ranks, checkpoints)


def compiled(folder: Path, tmp: Path) -> None:
    """Compiled blocks compute the same up to rounding."""
    found = one_pass(loaded("fp8", folder, dequantize=False, compile={"backend": "aot_eager"}))
    torch.testing.assert_close(found, one_pass(loaded("fp8", folder, dequantize=True)))


def one_kernel_for_a_matrix(folder: Path, tmp: Path) -> None:
    """The function that GPUs compile gives the values of the operators, to the last bit; here a CPU compiles it."""
    by_operators = PackedForm._floats
    for kind in (
        "fp8",
        "mxfp4",
        "compressed int8",
        "compressed int4",
        "compressed nvfp4",
        "compressed mxfp8",
        "gptq",
        "awq",
    ):
        seen: dict[Any, tuple[Any, ...]] = {}

        def noted(form: Any, values: Any, scales: Any, dtype: Any, seen: Any = seen) -> Any:
            seen.setdefault(form.shape, (form, values.clone(), [each.clone() for each in scales], dtype))
            return by_operators(form, values, scales, dtype)

        with patch.object(PackedForm, "_floats", noted):
            one_pass(loaded(kind, folder, dequantize=False, dtype=torch.bfloat16), is_training=False)
        assert seen, kind
        for call in seen.values() if dist.get_rank() == 0 else ():
            assert torch.equal(packed_weight._compiled()(*call), by_operators(*call)), kind
        torch.compiler.reset()
        packed_weight._compiled.cache_clear()


# ---- layers and experts that ranks share ----

EVEN = {
    "vocab_size": 132, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TP, EP = ParallelDims(tp_size=2), ParallelDims(ep_size=2)
SHARED = [("fp8", TP), ("gptq experts", TP), ("compressed int4 experts", EP)]


def even(kind: str) -> Any:
    """A model of that kind of checkpoint whose blocks two ranks can share."""
    model = QUANTIZED[kind][0]()
    return type(model)(type(model.config)(**EVEN, **(MOE if kind in EXPERTS else {})))


def shared_by_ranks(folder: Path, tmp: Path) -> None:
    """Weights as stored, of which each rank has whole blocks, give what floats on one axis give; a base is saved as it
    was."""
    for kind, dims in SHARED:
        ours = loaded(kind, folder, dequantize=False, mesh=dims, dtype=torch.float32)
        theirs = loaded(kind, folder, dequantize=True, mesh=ParallelDims(), dtype=torch.float32)
        found, expected = (one_pass(each, sharers=dims.ranks_per_row) for each in (ours, theirs))
        for name, tensor in expected.items():
            apart = float((full(found[name]) - tensor).abs().max())  # logits of a divided head are in parts
            assert apart <= 1e-5 * float(tensor.abs().max()), (kind, dims, name)
        forms = packed_parameters(ours)
        divided = [name for key, form in forms.items() for name in list(form.parts(key))[:1]]
        for name in divided if dims == TP else ():
            held = Held.of(ours.get_parameter(name)).memory.nbytes
            assert held == ours.get_parameter(name).nbytes // dist.get_world_size(), (kind, name)
        base = loaded(kind, folder, dequantize=False, mesh=dims, peft_config=None)
        save_pretrained(base, tmp / f"{kind} base")
        assert_same_tensors(stored_tensors(tmp / f"{kind} base"), stored_tensors(folder / kind), kind)


def test_bytes_are_divided_by_layers_and_experts(tmp_path):
    for kind, _ in SHARED:
        make_quantized(kind, tmp_path / kind, partial(even, kind))
    run_ranks(shared_by_ranks, 2, tmp_path, tmp_path / "saved")


def bytes_of_a_unit(kinds: Sequence[str], folder: Path, tmp: Path) -> None:
    """Gathered are the stored bytes, and one weight at a time is dequantised, in the backward pass too."""
    for kind in kinds:
        model = loaded(kind, folder, dequantize=False)
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
        with calls_of(PackedForm, "floats", partial(alive_with, made)) as alive:
            one_pass(model)
        assert max(alive) == 1 and len(alive) > len(forms), (kind, alive)


def alive_with(made: list[Any], values: torch.Tensor, *_: Any) -> int:
    """How many of the values that were dequantised are alive together."""
    made.append(weakref.ref(values.untyped_storage()))
    return sum(1 for each in made if each() is not None)


def saved_as_stored(kinds: Sequence[str], folder: Path, tmp: Path) -> None:
    for kind in kinds:
        model = loaded(kind, folder, dequantize=False, peft_config=None)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        save_pretrained(model, tmp / kind)
        after, before = (  # transformers makes routers fp32
            {key: t for key, t in stored_tensors(where / kind).items() if ".mlp.gate." not in key}
            for where in (tmp, folder)
        )
        assert_same_tensors(after, before, kind)


def a_new_model_is_plain(folder: Path, tmp: Path) -> None:
    """A config of a quantised checkpoint is saved without the quantisation, which its floats do not have."""
    save_pretrained(from_config(folder / "fp8", seed=0), tmp / "new")
    assert "quantization_config" not in json.loads((tmp / "new" / "config.json").read_text())
    assert "quantization_config" in json.loads((folder / "fp8" / "config.json").read_text())


def refused(folder: Path, tmp: Path) -> None:
    said = refusal(lambda: loaded("fp8 experts", folder, dequantize=False, experts_implementation="batched_mm"))
    assert "experts_implementation 'batched_mm' cannot compute with experts quantised as stored" in said
    ordered = tmp / "ordered" / "gptq"
    if dist.get_rank() == 0:
        with_order(folder / "gptq", ordered)
    dist.barrier()
    said = refusal(lambda: loaded("gptq", ordered.parent, dequantize=False))
    assert f"{ORDERED!r} orders its columns by activation" in said and "failed on 1 of 2 ranks" in said
    said = refusal(lambda: loaded("fp8", folder, dequantize=False, peft_config=LORA | {"use_dora": True}))
    assert "DoRA takes norms over whole rows of the base" in said
    model = loaded("fp8", folder, dequantize=False, peft_config=None)
    said = refusal(lambda: save_pretrained(model, tmp / "x", dtype=torch.bfloat16))
    assert "holds quantised values, which a cast destroys" in said


# ---- users' ways ----


def trained(model: Any, parameters: Any = None, *, steps: int = 2) -> tuple[list[float], Tensors]:
    """Losses of a plain loop, and all that is trained, whole."""
    optimizer = torch.optim.AdamW(model.parameters() if parameters is None else parameters, lr=1e-2, weight_decay=0.1)
    losses = train(model.train(), optimizer, batches_of(make_rows(4 * steps), 4), clip=1.0)
    return losses, {name: full(p) for name, p in model.named_parameters() if p.requires_grad}


NEW_ROWS = {"num_tokens": 133, "peft_config": ADAPTER | {"trainable_token_indices": [129, 130, 131, 132]}}
NEW_WORDS = {"num_tokens": 133, "peft_config": ADAPTER | {"modules_to_save": ["embed_tokens", "lm_head"]}}
PROMPT = {"peft_config": {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3}}


def beside_the_base(kind: str, options: dict[str, Any], folder: Path, tmp: Path) -> None:
    """New rows alone, whole tables, or what is outside of the base: the steps of floats, to the bit."""
    options = {"dtype": torch.float32, **options, **QUIET}
    ours, theirs = (trained(from_pretrained(folder / kind, dequantize=each, **options)) for each in (False, True))
    assert ours[0] == theirs[0]
    assert_same_tensors(ours[1], theirs[1])


def frozen_bytes_in_an_optimizer_are_left_alone(folder: Path, tmp: Path) -> None:
    """As frozen floats are: they get no gradient."""
    models = [from_pretrained(folder / "fp8", dequantize=False, peft_config=ADAPTER, **QUIET) for _ in range(2)]
    before = {name: full(models[0].get_parameter(name)).clone() for name in packed_parts(models[0])}
    every = trained(models[0])
    assert every[0] == trained(models[1], [p for p in models[1].parameters() if p.requires_grad])[0]
    assert before and all(torch.equal(full(models[0].get_parameter(name)), b) for name, b in before.items())


def nothing_to_train(folder: Path, tmp: Path) -> None:
    model = from_pretrained(folder / "fp8", dequantize=False, **QUIET)
    batch = batches_of(make_rows(2), 2)[0]
    said = refusal(lambda: model.train()(**batch))
    assert "are quantised as stored" in said and "peft_config" in said and "dequantize" in said
    with torch.no_grad():
        model(**batch)
    saved = "modules_to_save would train model.layers.0"
    for expected, config in (
        (f"{saved}.self_attn.v_proj.weight", LoraConfig(**ADAPTER, modules_to_save=["v_proj"])),
        (f"{saved}.mlp.gate_proj.weight", LoraConfig(**ADAPTER, modules_to_save=["mlp"])),
        ("a LN_TUNING adapter on this model (only Tensors of floating", LNTuningConfig(target_modules=["v_proj"])),
    ):
        load = partial(from_pretrained, folder / "fp8", dequantize=False, peft_config=config, **QUIET)
        assert expected in refusal(load)


def checkpoints_that_do_not_fit(folder: Path, tmp: Path) -> None:
    """Each is refused by its headers, with the tensor and what to do."""
    proj, head = "model.layers.0.self_attn.q_proj.weight", torch.zeros(131, 48, dtype=torch.float8_e4m3fn)
    of_one = "model.layers.0.block_sparse_moe.experts.1.w1.weight_scale_inv"
    own_head = {"lm_head.weight": head, "lm_head.weight_scale": torch.ones(131, 1, dtype=torch.bfloat16)}
    cases: tuple[tuple[str, str, Tensors, dict[str, Any]], ...] = (
        (f"'{proj}_scale_inv' [7, 3] lie on no blocks of it", "fp8", {f"{proj}_scale_inv": torch.ones(7, 3)}, {}),
        ("lm_head.weight cannot be resized", "compressed per channel", own_head, {"num_tokens": 133}),
        ("experts.gate_up_proj of MixtralForCausalLM cannot", "fp8 experts", {of_one: torch.ones(1, 1)}, {}),
    )
    for number, (expected, kind, tensors, options) in enumerate(cases):
        target = tmp / str(number)
        if dist.get_rank() == 0:
            target.mkdir()
            save_file(stored_tensors(folder / kind) | tensors, target / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((folder / kind / "config.json").read_text())
            config["quantization_config"] |= {"ignore": []}
            (target / "config.json").write_text(json.dumps(config))
        dist.barrier()
        said = refusal(partial(from_pretrained, target, dequantize=False, peft_config=ADAPTER, **QUIET, **options))
        assert expected in said, (expected, said)


SAVED = ("fp8 experts", "compressed int4", "compressed nvfp4", "gptq experts")
CASES = named(
    a_new_model_is_plain, refused, frozen_bytes_in_an_optimizer_are_left_alone, nothing_to_train,
    checkpoints_that_do_not_fit,
)  # fmt: skip
CASES |= {"bytes": partial(bytes_of_a_unit, SAVED[2:3]), "saved": partial(saved_as_stored, SAVED[1:3])}
CASES |= {"rows": partial(beside_the_base, "fp8", NEW_ROWS), "prompts": partial(beside_the_base, "fp8", PROMPT)}
RARE = named(compiled, one_kernel_for_a_matrix)
RARE["saved"] = partial(saved_as_stored, [*(kind for kind in KINDS if kind not in SAVED[1:3]), "mxfp4"])
RARE["bytes"] = partial(bytes_of_a_unit, ["fp8 of 128 x 128", "gptq experts"])
RARE |= {"words": partial(beside_the_base, "compressed int4", NEW_WORDS)}


@pytest.mark.parametrize("cases", [CASES, pytest.param(RARE, marks=pytest.mark.nightly)], ids=["usual", "rare"])
def test_packed_bases_do_what_plain_ones_do(checkpoints, tmp_path, cases):
    run_ranks(run_cases, 2, cases, checkpoints, tmp_path)


# ---- dequantised ----

READABLE = [kind for kind in QUANTIZED if "compressed" not in kind or find_spec("compressed_tensors")]
"""Those of compressed-tensors where its package is there, which transformers needs."""

TRANSPOSED = tuple(kind for kind in READABLE if "gptq" in kind or "awq" in kind)
"""Those that store a weight transposed, so that ranks have runs of each row: here with gaps below a page, which are
read too."""

ROUNDED = 0.0 if hasattr(compressed_tensors, "CompressedTensorsDequantize") else 2**-7
"""How far a weight of compressed-tensors may be off, relatively: transformers 5.17 leaves these to that package, which
rounds to bf16 once more or once less."""


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

FAST = in_turn([kind for kind in READABLE if kind not in NEAR], DTYPES)
EVERY = [*product(READABLE, DTYPES)]


@pytest.mark.parametrize(
    ("ranks", "combinations"),
    [(3, FAST[::4] + FAST[1::4]), *(pytest.param(ranks, EVERY, marks=pytest.mark.nightly) for ranks in (1, 3))],
)
def test_every_kind_is_what_transformers_makes_of_it(checkpoints, combinations, ranks):
    for rows in zip(*run_ranks(load_every_kind, ranks, checkpoints, combinations), strict=True):
        kind = rows[0][0]
        least, most = (0.85, ranks) if kind in TRANSPOSED and ranks > 1 else (1, 1.05)
        assert all(least <= ratio <= most for _, ratio, _ in rows), rows
        stored = sum(file.stat().st_size for file in (checkpoints / kind).glob("*.safetensors"))
        assert sum(share for *_, share in rows) <= 1.05 * stored


def along(dim: int) -> Callable[[nn.Parameter], Shard]:
    """Shard along this dimension where it divides evenly (FSDP2 asks for that), else along the first."""

    def placement(parameter: nn.Parameter) -> Shard:
        fits = parameter.dim() > dim and parameter.shape[dim] % dist.get_world_size() == 0
        return Shard(dim if fits else 0)

    return placement


def along_other_dimensions(folder: Path, tmp: Path) -> None:
    for kind, dim in (("mxfp4", 2), ("gptq", 1)):
        model = build_meta_model(folder / kind)
        for layer in model.model.layers:
            fully_shard(layer, shard_placement_fn=along(dim))
        fully_shard(model, shard_placement_fn=along(dim))
        assert any(p.placements == (Shard(dim),) for p in model.parameters())
        load_weights(model, folder / kind, staging_bytes=2**20)
        assert_dequantized(model, kind, folder)


def saved_and_loaded_again(folder: Path, tmp: Path) -> None:
    """A plain checkpoint, under the hub's plain names."""
    kind, out, model = "mxfp4", tmp / "mxfp4", from_pretrained(folder / "mxfp4")
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


BAD = "model.layers.1.mlp.up_proj.weight_scale_inv"


def refused_for(folder: Path) -> str:
    model = build_meta_model(folder)
    shard_model(model, make_wrap_plan(model))
    said = refusal(lambda: load_weights(model, folder), CheckpointError)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert "failed on 1 of 2 ranks" in said
    return said


def values_that_are_wrong_stop_all_ranks(folder: Path, tmp: Path) -> None:
    """A scale that is no number, in the last block, which the last rank alone reads; columns ordered by activation."""
    for value in (0.0, float("nan"), float("inf")):
        target = tmp / str(value)
        if dist.get_rank() == 0:
            shutil.copytree(folder / "fp8", target)
            file = next(f for f in target.glob("*.safetensors") if BAD in load_file(f))
            tensors = load_file(file)
            tensors[BAD][-1, -1] = value
            save_file(tensors, file, metadata={"format": "pt"})
        dist.barrier()
        assert f"{BAD!r} holds 1 scales that are zero, infinite or NaN" in refused_for(target)
    if dist.get_rank() == 0:
        with_order(folder / "gptq", tmp / "ordered")
    dist.barrier()
    said = refused_for(tmp / "ordered")
    assert f"{ORDERED!r} orders its columns by activation" in said and "model.dequantize()" in said


def test_other_ways_to_load_and_bad_values(checkpoints, tmp_path):
    cases = named(along_other_dimensions, saved_and_loaded_again, values_that_are_wrong_stop_all_ranks)
    cases |= named(packed_in_four_bits) if find_spec("bitsandbytes") else {}
    run_ranks(run_cases, 2, cases, checkpoints, tmp_path)
