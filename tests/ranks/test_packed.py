"""Bases that stay quantised: losses and gradients of adapters bit for bit those of the dequantised base; users' ways:
vocabularies, heads, optimizers, resumed states, and mistakes."""

import json
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from datasets import Dataset
from peft import LNTuningConfig, LoraConfig
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer

from hf_fsdp_tools import (
    FSDPTrainerMixin,
    ParallelDims,
    from_config,
    from_pretrained,
    make_accelerator,
    save_pretrained,
)
from hf_fsdp_tools.modeling import packed_weight
from hf_fsdp_tools.modeling.packed import packed_parts
from tests._checkpoints import (
    ORDERED,
    QUANTIZED,
    Tensors,
    assert_same_tensors,
    full,
    make_every_quantized,
    make_quantized,
    refusal,
    stored_tensors,
    with_order,
    word_tokenizer,
)
from tests._dist import named, run_cases, run_ranks
from tests._grids import fast_and_nightly, in_turn
from tests._noted import calls_of
from tests._rounding import with_rounding
from tests._training import ShardedTrainer, arguments, batches_of, logged, make_rows, train
from tests.api import PackedForm, local_tensor, packed_parameters

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


def packed_and_floats(kind: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    return loaded(kind, folder, dequantize=False, **options), loaded(kind, folder, dequantize=True, **options)


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
        ours, theirs = packed_and_floats(kind, folder, **options)
        assert packed_parameters(ours), kind
        for mode in (True, False):
            found, run = one_pass(ours, is_training=mode), partial(one_pass, theirs, is_training=mode)
            is_rounded = kind in EXPERTS and precision != "fp32" and mode
            expected, allowed = with_rounding(run) if is_rounded else (run(), None)
            assert_equal(found, expected, (kind, options, mode), allowed)


@fast_and_nightly(lambda kinds, precisions: in_turn(kinds[::3], precisions), KINDS, list(PRECISIONS))
def test_losses_and_gradients_are_those_of_the_dequantised_base(checkpoints, combinations):
    run_ranks(partial(parities, combinations), 2, checkpoints)


SAMPLE = ("compressed nvfp4", "gptq experts")
LARGE_SAMPLE = ("fp8 and fp4 experts", "mxfp4", "compressed int4", "gptq experts")


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(3, SAMPLE), *(pytest.param(ranks, LARGE_SAMPLE, marks=pytest.mark.nightly) for ranks in (1, 3, 4))],
)
def test_uneven_shards_give_the_same(checkpoints, ranks, kinds):
    run_ranks(partial(parities, [(kind, "mixed") for kind in kinds]), ranks, checkpoints)


# ---- what works on plain shards ----


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
SHARED_RARELY = [(kind, dims) for kind in KINDS for dims in ((TP, EP) if kind in EXPERTS else (TP,))]
SHARED_RARELY = [each for each in SHARED_RARELY if each not in SHARED and each[0] != "fp8 and fp4 experts"]


def even(kind: str) -> Any:
    """A model of that kind of checkpoint whose blocks two ranks can share."""
    model = QUANTIZED[kind][0]()
    return type(model)(type(model.config)(**EVEN, **(MOE if kind in EXPERTS else {})))


def shared_by_ranks(cases: Sequence[tuple[str, ParallelDims]], folder: Path, tmp: Path) -> None:
    """Weights as stored, of which each rank has whole blocks, give what floats on one axis give; adapters are saved
    alike, and the base as it was."""
    for kind, dims in cases:
        sharers = dims.ranks_per_row
        ours = loaded(kind, folder, dequantize=False, mesh=dims, dtype=torch.float32)
        theirs = loaded(kind, folder, dequantize=True, mesh=ParallelDims(), dtype=torch.float32)
        for is_training in (True, False):
            found, expected = (one_pass(each, is_training=is_training, sharers=sharers) for each in (ours, theirs))
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                apart = float((full(found[name]) - tensor).abs().max())  # logits of a divided head are in parts
                assert apart <= 1e-5 * float(tensor.abs().max()), (kind, dims, is_training, name)
        forms = packed_parameters(ours)
        divided = [name for key, form in forms.items() for name in list(form.parts(key))[:1]]
        for name in divided if dims == TP and kind != "mxfp4" else ():  # gpt-oss's plan divides its head alone
            held = local_tensor(ours.get_parameter(name)).nbytes
            assert held == ours.get_parameter(name).nbytes // dist.get_world_size(), (kind, name)
        for model, name in ((ours, "ours"), (theirs, "theirs")):
            save_pretrained(model, tmp / f"{kind} {name}")
        assert_same_tensors(stored_tensors(tmp / f"{kind} ours"), stored_tensors(tmp / f"{kind} theirs"), kind)
        base = loaded(kind, folder, dequantize=False, mesh=dims, peft_config=None)
        save_pretrained(base, tmp / f"{kind} base")
        assert_same_tensors(stored_tensors(tmp / f"{kind} base"), stored_tensors(folder / kind), kind)


def four_bits_next_to_shared_experts(folder: Path, tmp: Path) -> None:
    pytest.importorskip("bitsandbytes")
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    options = {"quantization_config": four, "peft_config": {"r": 4, "init_lora_weights": False} | OF_EXPERTS, **QUIET}
    ours, theirs = (from_pretrained(folder / "plain", mesh=dims, **options) for dims in (EP, ParallelDims()))
    assert packed_parameters(ours)
    found, expected = one_pass(ours), one_pass(theirs)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, SHARED),
        pytest.param(2, SHARED_RARELY, marks=pytest.mark.nightly),
        pytest.param(4, SHARED, marks=pytest.mark.nightly),
    ],
    ids=["usual", "rare", "four"],
)
def test_bytes_are_divided_by_layers_and_experts(tmp_path, size, cases):
    for kind in {kind for kind, _ in cases}:
        make_quantized(kind, tmp_path / kind, partial(even, kind))
    even("gptq experts").save_pretrained(tmp_path / "plain")
    run_ranks(
        run_cases,
        size,
        {
            "shared": partial(shared_by_ranks, cases, tmp_path, tmp_path / "saved"),
            **({"four bits": partial(four_bits_next_to_shared_experts, tmp_path, tmp_path)} if cases is SHARED else {}),
        },
    )


# ---- bytes ----


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


# ---- out ----


def saved_as_stored(kinds: Sequence[str], folder: Path, tmp: Path) -> None:
    for kind in kinds:
        model = loaded(kind, folder, dequantize=False, peft_config=None)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        save_pretrained(model, tmp / kind)
        after, before = (  # transformers makes a bias fp32
            {key: t for key, t in stored_tensors(where / kind).items() if "correction_bias" not in key}
            for where in (tmp, folder)
        )
        assert_same_tensors(after, before, kind)
    again = loaded(kind, tmp, dequantize=False)
    assert_equal(one_pass(again), one_pass(loaded(kind, folder, dequantize=False)), kind)


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
    said = refusal(lambda: from_pretrained(tmp / "fp8 x", dequantize=False))
    assert "No such folder" in said
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


def as_on_floats(folder: Path, **options: Any) -> Any:
    """The packed model, trained; it and its twin on floats have taken the same steps, to the bit."""
    models = [
        from_pretrained(folder, dequantize=dequantize, dtype=torch.float32, **options, **QUIET)
        for dequantize in (False, True)
    ]
    assert packed_parameters(models[0])
    ours, theirs = map(trained, models)
    assert ours[0] == theirs[0]
    assert_same_tensors(ours[1], theirs[1])
    return models[0]


# ---- what is trained beside the adapter ----


ROWS = {"trainable_token_indices": [129, 130, 131, 132]}


def new_rows(kind: str, folder: Path, tmp: Path) -> None:
    """They are trained alone, in a tied table and in one apart."""
    model = as_on_floats(folder / kind, num_tokens=133, peft_config=ADAPTER | ROWS)
    assert model.config.vocab_size == 133


def new_words(folder: Path, tmp: Path) -> None:
    """Rows that are new are trained with the whole table."""
    whole = ADAPTER | {"modules_to_save": ["embed_tokens", "lm_head"]}
    model = as_on_floats(folder / "compressed int4", num_tokens=133, peft_config=whole)
    assert model.config.vocab_size == 133
    save_pretrained(model, tmp / "words")
    assert load_file(tmp / "words" / "adapter_model.safetensors")["base_model.model.lm_head.weight"].shape == (133, 48)


def prompts(kind: str, folder: Path, tmp: Path) -> None:
    """What is trained may be outside of the base, which has nothing but frozen bytes then."""
    as_on_floats(folder / "fp8", peft_config={"peft_type": kind, "task_type": "CAUSAL_LM", "num_virtual_tokens": 3})


def frozen_bytes_in_an_optimizer_are_left_alone(folder: Path, tmp: Path) -> None:
    """As frozen floats are: they get no gradient."""
    models = [from_pretrained(folder / "fp8", dequantize=False, peft_config=ADAPTER, **QUIET) for _ in range(2)]
    before = {name: full(models[0].get_parameter(name)).clone() for name in packed_parts(models[0])}
    every = trained(models[0])
    assert every[0] == trained(models[1], [p for p in models[1].parameters() if p.requires_grad])[0]
    assert before and all(torch.equal(full(models[0].get_parameter(name)), b) for name, b in before.items())


# ---- resumed ----


def train_and_save(folder: Path, tmp: Path) -> list[float]:
    """A Trainer's run of two steps, with a checkpoint between them."""
    return of_trainer(folder, tmp, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1)


def of_trainer(folder: Path, tmp: Path, resume: str | None = None, **settings: Any) -> list[float]:
    set_seed(0)
    settings = {"max_steps": 2, "bf16": True, "gradient_accumulation_steps": 2, **settings}
    args = arguments(tmp / "trainer", **settings)
    accelerator = make_accelerator(args)
    model = from_pretrained(
        folder / "compressed nvfp4", dequantize=False, accelerator=accelerator, peft_config=ADAPTER, **QUIET
    )
    rows = make_rows(16)
    trainer = ShardedTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer)


def goes_on(folder: Path, tmp: Path) -> list[float]:
    """From the middle on one process, which sees the rows of both."""
    options = {"per_device_train_batch_size": 4, "ignore_data_skip": False}
    return of_trainer(folder, tmp, str(tmp / "trainer" / "checkpoint-1"), **options)


# ---- mistakes ----


def nothing_to_train(folder: Path, tmp: Path) -> None:
    model = from_pretrained(folder / "fp8", dequantize=False, **QUIET)
    batch = batches_of(make_rows(2), 2)[0]
    said = refusal(lambda: model.train()(**batch))
    assert "are quantised as stored" in said and "peft_config" in said and "dequantize" in said
    with torch.no_grad():
        model(**batch)
    said = refusal(lambda: model.requires_grad_(True))
    assert "q_proj.weight" in said and "peft_config" in said
    trainer = ShardedTrainer(model=model, args=arguments(tmp / "x"), train_dataset=make_rows(4))
    assert "are quantised as stored" in refusal(trainer.train)
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
    scales = torch.ones(131, 1, dtype=torch.bfloat16)
    cases: tuple[tuple[str, str, Tensors, dict[str, Any]], ...] = (
        (
            f"its scales '{proj}_scale_inv' [7, 3] lie on no blocks of it",
            "fp8", {f"{proj}_scale_inv": torch.ones(7, 3)}, {},
        ),
        (
            "lm_head.weight cannot be resized while it is quantised as stored", "compressed per channel",
            {"lm_head.weight": head, "lm_head.weight_scale": scales}, {"num_tokens": 133},
        ),
        (
            "layers.0.mlp.experts.gate_up_proj of MixtralForCausalLM cannot be kept as stored (fp8)",
            "fp8 experts", {of_one: torch.ones(1, 1)}, {},
        ),
    )  # fmt: skip
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


class ShardedGRPO(FSDPTrainerMixin, GRPOTrainer):
    """TRL's trainer as the README has it."""


def grpo(folder: Path, tmp: Path) -> None:
    """It generates with the model that it trains, whose adapter is turned off to be its own reference."""
    losses = []
    for dequantize in (False, True):
        options = {"dequantize": dequantize, "dtype": torch.float32, **QUIET}
        model = from_pretrained(folder / "compressed int4", accelerator=make_accelerator(cpu=True), **options)
        settings = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1, "max_steps": 2, "seed": 0}
        trainer = ShardedGRPO(
            model=model,
            reward_funcs=lambda completions, **_: [text.count("w3") + 0.1 * len(text) for text in completions],
            args=arguments(tmp / "grpo", GRPOConfig, bf16=False, **settings),
            train_dataset=Dataset.from_dict({"prompt": [f"w{n} w4 w5" for n in range(3, 11)]}),
            processing_class=word_tokenizer(),
            peft_config=LoraConfig(**ADAPTER),
        )
        set_seed(0)
        trainer.train()
        losses.append([(entry["loss"], entry["kl"]) for entry in trainer.state.log_history if "kl" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 2 and losses[0][0][1] == 0 != losses[0][1][1]


def adapters_do_not_go_into_bytes(folder: Path, tmp: Path) -> None:
    model = from_pretrained(folder / "fp8", dequantize=False, peft_config=ADAPTER, **QUIET)
    for merge in (model.merge_adapter, model.merge_and_unload):
        assert "is quantised as stored, and nothing can be added to it" in refusal(merge)


SAVED = ("fp8 experts", "compressed int4", "compressed nvfp4", "gptq experts")
CASES = named(
    a_new_model_is_plain, refused, frozen_bytes_in_an_optimizer_are_left_alone,
    train_and_save, nothing_to_train, checkpoints_that_do_not_fit, adapters_do_not_go_into_bytes,
)  # fmt: skip
CASES |= {"bytes": partial(bytes_of_a_unit, SAVED[2:3]), "saved": partial(saved_as_stored, SAVED[1:3])}
CASES |= {"rows": partial(new_rows, "fp8"), "prompts": partial(prompts, "PREFIX_TUNING")}
RARE = named(
    compiled, one_kernel_for_a_matrix, new_words, grpo,
)  # fmt: skip
RARE["saved"] = partial(saved_as_stored, [*(kind for kind in KINDS if kind not in SAVED[1:3]), "mxfp4"])
RARE["bytes"] = partial(bytes_of_a_unit, ["fp8 of 128 x 128", "gptq experts"])
RARE |= {"rows": partial(new_rows, "compressed int4"), "prompts": partial(prompts, "PROMPT_TUNING")}


@pytest.mark.parametrize("cases", [CASES, pytest.param(RARE, marks=pytest.mark.nightly)], ids=["usual", "rare"])
def test_packed_bases_do_what_plain_ones_do(checkpoints, tmp_path, cases):
    found = run_ranks(run_cases, 2, cases, checkpoints, tmp_path)[0]
    if "train_and_save" in found:
        again = run_ranks(goes_on, 1, checkpoints, tmp_path)[0]
        torch.testing.assert_close(again, found["train_and_save"], rtol=1e-3, atol=1e-3)
