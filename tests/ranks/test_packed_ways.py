"""Users' ways with bases that stay quantised: vocabularies, heads, optimizers, resumed states, and mistakes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from datasets import Dataset
from peft import LNTuningConfig, LoraConfig
from safetensors.torch import load_file, save_file

from hf_fsdp_tools import FSDPTrainerMixin, from_pretrained, make_accelerator, save_pretrained
from hf_fsdp_tools.modeling.packed import packed_parameters, packed_parts
from tests._checkpoints import (
    Tensors,
    assert_same_tensors,
    full,
    make_quantized,
    refusal,
    stored_tensors,
    word_tokenizer,
)
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, batches_of, logged, make_rows, train

trl = pytest.importorskip("trl")


class ShardedGRPO(FSDPTrainerMixin, trl.GRPOTrainer):
    """TRL's trainer as the README has it."""


KINDS = ("fp8", "fp8 experts", "mxfp4", "compressed int4", "compressed nvfp4", "compressed per channel")
LORA = {"r": 4, "target_modules": ["q_proj", "o_proj"]}
QUIET = {"load_kwargs": {"progress": False, "seed": 1}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    for kind in KINDS:
        make_quantized(kind, folder / kind)
    return folder


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


def new_words(folder: Path, tmp: Path) -> None:
    """Of a tied table and of one apart, rows that are new are trained alone or with the whole table."""
    rows = LORA | {"trainable_token_indices": [129, 130, 131, 132]}
    for kind, lora in (("fp8", rows), ("compressed int4", rows), ("compressed int4", LORA)):
        whole = {} if "trainable_token_indices" in lora else {"modules_to_save": ["embed_tokens", "lm_head"]}
        model = as_on_floats(folder / kind, num_tokens=133, peft_config=lora | whole)
        assert model.config.vocab_size == 133
    save_pretrained(model, tmp / "words")
    assert load_file(tmp / "words" / "adapter_model.safetensors")["base_model.model.lm_head.weight"].shape == (133, 48)


def prompts(folder: Path, tmp: Path) -> None:
    """What is trained may be outside of the base, which has nothing but frozen bytes then."""
    for kind in ("PROMPT_TUNING", "PREFIX_TUNING"):
        config = {"peft_type": kind, "task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
        as_on_floats(folder / "fp8", peft_config=config)


def generates_between_steps(folder: Path, tmp: Path) -> None:
    ids = torch.arange(3, 9)[None]
    model = from_pretrained(folder / "mxfp4", dequantize=False, peft_config=LORA, **QUIET)
    undisturbed = from_pretrained(folder / "mxfp4", dequantize=False, peft_config=LORA, **QUIET)
    trained(model, steps=1)
    model.eval().generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    trained(undisturbed, steps=1)
    assert trained(model)[0] == trained(undisturbed)[0]


def frozen_bytes_in_an_optimizer_are_left_alone(folder: Path, tmp: Path) -> None:
    """As frozen floats are: they get no gradient."""
    models = [from_pretrained(folder / "fp8", dequantize=False, peft_config=LORA, **QUIET) for _ in range(2)]
    before = {name: full(models[0].get_parameter(name)).clone() for name in packed_parts(models[0])}
    every = trained(models[0])
    assert every[0] == trained(models[1], [p for p in models[1].parameters() if p.requires_grad])[0]
    assert before and all(torch.equal(full(models[0].get_parameter(name)), b) for name, b in before.items())


# ---- resumed ----


def train_and_save(folder: Path, tmp: Path) -> list[float]:
    """A Trainer's run of four steps, with a checkpoint after two."""
    return of_trainer(folder, tmp, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)


def of_trainer(folder: Path, tmp: Path, resume: str | None = None, **settings: Any) -> list[float]:
    set_seed(0)
    settings = {"max_steps": 4, "bf16": True, "gradient_accumulation_steps": 2, **settings}
    args = arguments(tmp / "trainer", **settings)
    accelerator = make_accelerator(args)
    model = from_pretrained(
        folder / "compressed nvfp4", dequantize=False, accelerator=accelerator, peft_config=LORA, **QUIET
    )
    rows = make_rows(32)
    trainer = ShardedTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer)


def goes_on(folder: Path, tmp: Path) -> list[float]:
    """From the middle on one process, which sees the rows of both."""
    options = {"per_device_train_batch_size": 4, "ignore_data_skip": False}
    return of_trainer(folder, tmp, str(tmp / "trainer" / "checkpoint-2"), **options)


# ---- mistakes ----


def nothing_to_train(folder: Path, tmp: Path) -> None:
    model = from_pretrained(folder / "fp8", dequantize=False, **QUIET)
    batch = batches_of(make_rows(2), 2)[0]
    said = refusal(lambda: model.train()(**batch))
    assert "stay quantised" in said and "peft_config" in said and "dequantize" in said
    with torch.no_grad():
        model(**batch)
    said = refusal(lambda: model.requires_grad_(True))
    assert "q_proj.weight" in said and "peft_config" in said
    trainer = ShardedTrainer(model=model, args=arguments(tmp / "x"), train_dataset=make_rows(4))
    assert "stay quantised" in refusal(trainer.train)
    saved = "modules_to_save would train model.layers.0"
    for expected, config in (
        (f"{saved}.self_attn.v_proj.weight", LoraConfig(**LORA, modules_to_save=["v_proj"])),
        (f"{saved}.mlp.gate_proj.weight", LoraConfig(**LORA, modules_to_save=["mlp"])),
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
            "lm_head.weight cannot be resized while it stays quantised", "compressed per channel",
            {"lm_head.weight": head, "lm_head.weight_scale": scales}, {"num_tokens": 133},
        ),
        (
            "layers.0.mlp.experts.gate_up_proj of MixtralForCausalLM cannot stay quantised (fp8)",
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
        said = refusal(partial(from_pretrained, target, dequantize=False, peft_config=LORA, **QUIET, **options))
        assert expected in said, (expected, said)


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
            args=arguments(tmp / "grpo", trl.GRPOConfig, bf16=False, **settings),
            train_dataset=Dataset.from_dict({"prompt": [f"w{n} w4 w5" for n in range(3, 11)]}),
            processing_class=word_tokenizer(),
            peft_config=LoraConfig(**LORA),
        )
        set_seed(0)
        trainer.train()
        losses.append([(entry["loss"], entry["kl"]) for entry in trainer.state.log_history if "kl" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 2 and losses[0][0][1] == 0 != losses[0][1][1]


def adapters_do_not_go_into_bytes(folder: Path, tmp: Path) -> None:
    model = from_pretrained(folder / "fp8", dequantize=False, peft_config=LORA, **QUIET)
    for merge in (model.merge_adapter, model.merge_and_unload):
        assert "stays quantised, and nothing can be added to it" in refusal(merge)


CASES = (
    new_words, prompts, generates_between_steps, frozen_bytes_in_an_optimizer_are_left_alone, train_and_save, grpo,
    nothing_to_train, checkpoints_that_do_not_fit, adapters_do_not_go_into_bytes,
)  # fmt: skip


@pytest.mark.shows("GRPO", "stays quantised")
def test_users_ways_with_packed_bases(checkpoints, tmp_path):
    found = run_ranks(run_cases, 2, CASES, checkpoints, tmp_path)[0]
    again = run_ranks(goes_on, 1, checkpoints, tmp_path)[0]
    torch.testing.assert_close(again, found["train and save"], rtol=1e-3, atol=1e-3)
