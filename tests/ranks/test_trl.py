"""TRL's trainers, and transformers' for classification, on our shards train as they do alone on one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from datasets import Dataset, load_from_disk
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from hf_fsdp_tools import ConfigError, FSDPTrainerMixin, from_config, from_pretrained, make_accelerator
from tests._checkpoints import lora, tiny_config, word_tokenizer
from tests._dist import run_cases, run_ranks
from tests._training import arguments, logged, num_units
from tests.api import all_ranks, sharding_of

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

STEPS = 2
ROWS = STEPS * 4
# The same numbers added in another order, over two AdamW steps (measured over four: 1e-6 apart).
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


def _texts(words: int, seed: int) -> list[str]:
    ids = torch.randint(3, 9, (ROWS, words), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{n}" for n in row) for row in ids.tolist()]


def _rows(task: str) -> Dataset:
    prompts, good, bad = _texts(4, 1), [" " + text for text in _texts(6, 2)], [" " + text for text in _texts(6, 3)]
    if task == "sft":
        return Dataset.from_dict({"text": [prompt + text for prompt, text in zip(prompts, good, strict=True)]})
    if task == "kto":
        return Dataset.from_dict({"prompt": prompts, "completion": good, "label": [True, False] * (ROWS // 2)})
    if task == "grpo":
        return Dataset.from_dict({"prompt": prompts})
    return Dataset.from_dict({"prompt": prompts, "chosen": good, "rejected": bad})


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [text.count("w3") + 0.1 * len(text) for text in completions]


TRAINERS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, {}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {}),
    # the one loss of KTO whose value does not depend on how many rows a process has (no estimate of the divergence)
    "kto": (trl.KTOTrainer, trl.KTOConfig, {"loss_type": "apo_zero_unpaired"}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {}),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}),
}

LABELS = {"reward": 1}
"""Outputs of the heads that score a sequence."""


def _model(task: str, source: Path, accelerator: Any = None) -> Any:
    kwargs = {"num_labels": LABELS[task]} if task in LABELS else {}
    auto = AutoModelForSequenceClassification if kwargs else AutoModelForCausalLM
    if accelerator is None:
        return auto.from_pretrained(source, **kwargs)
    return from_pretrained(source, accelerator=accelerator, auto_class=auto, **kwargs)


def _trainer(task: str, model: Any, folder: Path, *, mixed: bool, extra: Any = None, **settings: Any) -> Any:
    base, config, own = TRAINERS[task]
    kind = type(f"Sharded{base.__name__}", (FSDPTrainerMixin, base), {}) if mixed else base
    extra = ({"reward_funcs": _reward} if task == "grpo" else {}) | (extra or {})
    rows = load_from_disk(settings.pop("rows")) if "rows" in settings else _rows(task)
    own = {"max_steps": STEPS, "learning_rate": 1e-3, "bf16": False, **own, **settings}
    args = arguments(folder, config, **own)
    return kind(model=model, args=args, train_dataset=rows, processing_class=word_tokenizer(), **extra)


def _one_process(task: str, source: Path, folder: Path, extra: Any = None, **settings: Any) -> list[float]:
    model = _model(task, source)
    trainer = _trainer(task, model, folder, mixed=False, extra=extra, per_device_train_batch_size=4, **settings)
    trainer.train()
    return logged(trainer)


ADAPTED = {"peft_config": lora(target_modules=["q_proj", "v_proj"])}


@pytest.fixture(scope="module")
def checkpoints(folders, tmp_path_factory) -> dict[str, Path]:
    torch.manual_seed(0)
    heads = {task: tmp_path_factory.mktemp(task) for task in LABELS}
    for task, folder in heads.items():
        _model(task, folders["llama"]).save_pretrained(folder)
    return {"llama": folders["llama"], "tied": folders["tied"], **heads}


ROUTES = ("plain", "sharded", "shared rows")
FAST = ("sft, shared rows", "dpo, sharded", "reward, sharded")  # and a plain one below: `given_plain`
ADAPTED_FAST = {"sft, adapted": "sharded", "sft, adapted by prepare": "plain"}
"""TRL adds the adapter, to shards or to a plain model."""
SOURCES = {"sft": "tied", "dpo": "tied", "kto": "llama", "reward": "reward"}


def _one_trainer(task, route, sources, folder, extra=None):
    kind, settings, accelerator = SOURCES[task], {}, None
    if route == "shared rows":  # both ranks have the batch of one process
        shared = ParallelismConfig(cp_size=2)
        settings = {"parallelism_config": shared, "per_device_train_batch_size": 4}
        accelerator = make_accelerator(parallelism_config=shared)
    elif route == "sharded":
        accelerator = make_accelerator()
    model = _model(task, sources[kind], accelerator)
    trainer = _trainer(task, model, folder / task / route, mixed=True, extra=extra, **settings)
    trainer.train()
    plan = sharding_of(trainer.model).plan
    assert num_units(trainer.model) == len(plan.units) > 2
    if task in ("dpo", "kto"):
        reference = trainer.ref_model
        assert sharding_of(reference).plan.digest == plan.digest, "policy and reference have one plan"
        assert num_units(reference) == len(plan.units)
        assert not any(p.requires_grad for p in reference.parameters()) and not reference.training
    return logged(trainer)


def tokens_are_counted_once(sources, folder):
    """Two ranks share layers, and with them their rows: the count is that of one process."""
    shared = ParallelismConfig(tp_size=2)
    accelerator = make_accelerator(parallelism_config=shared)
    model = from_config(tiny_config("llama", 2), accelerator=accelerator)
    settings = {"parallelism_config": shared, "per_device_train_batch_size": 4, "max_steps": 1}
    trainer = _trainer("sft", model, folder / "counted", mixed=True, **settings)
    trainer.train()
    assert logged(trainer, "num_tokens") == [4 * 11], "rows of 10 words and an end"


@pytest.fixture(scope="module")
def dpo_alone(checkpoints, tmp_path_factory) -> list[float]:
    return _one_process("dpo", checkpoints["tied"], tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["fast", "others"])
def test_a_trl_trainer_equals_its_own_one_process_run(checkpoints, dpo_alone, tmp_path, fast):
    every = ((task, route) for task in SOURCES for route in ROUTES[: 2 if task in LABELS else 3])
    pairs = [pair for pair in every if (", ".join(pair) in FAST) == fast]
    cases = {f"{task}, {route}": partial(_one_trainer, task, route) for task, route in pairs}
    others = {task for task, _ in pairs} - {"dpo"}
    expected = {task: _one_process(task, checkpoints[SOURCES[task]], tmp_path / task) for task in others}
    expected["dpo"] = dpo_alone
    more: dict[str, Any] = {"counted": tokens_are_counted_once} if fast else {}
    for name, route in ADAPTED_FAST.items() if fast else ():
        more[name] = partial(_one_trainer, "sft", route, extra=ADAPTED)
        expected[name] = _one_process("sft", checkpoints[SOURCES["sft"]], tmp_path / name, ADAPTED)
    found = run_ranks(run_cases, 2, cases | more, checkpoints, tmp_path)
    for rank in found:
        for name in rank.keys() - {"counted"}:
            task = name if name in expected else name.split(",")[0]
            assert len(expected[task]) == STEPS
            close(rank[name], expected[task], msg=name)


def _short_run(folder, model, extra=None, **settings):
    trainer = _trainer("dpo", model, folder / "run", mixed=True, extra=extra, max_steps=2, **settings)
    trainer.train()
    return trainer


def given_plain(sources, folder):
    reference = _model("dpo", sources["tied"])
    trainer = _short_run(folder, _model("dpo", sources["tied"]), {"ref_model": reference})
    # TRL would load a reference of its own onto GPU 0 from each rank.
    assert trainer.args.model_init_kwargs["device_map"] is None
    assert num_units(trainer.ref_model) == len(sharding_of(trainer.model).plan.units)
    return logged(trainer)


def precomputed_by_shards(sources, folder):
    """TRL hashes a digest of all shards, the same on every rank, and finds the values again under it."""
    accelerator = make_accelerator()
    policy, reference = (_model("dpo", sources["tied"], accelerator) for _ in range(2))
    rows = {"rows": sources["rows"], "precompute_ref_log_probs": True}
    trainer = _short_run(folder, policy, {"ref_model": reference}, **rows)
    hashes = all_ranks(trainer._precompute_model_hash)
    assert len(set(hashes)) == 1
    with torch.no_grad():
        next(reference.parameters()).mul_(2)
    assert "digest" not in reference.state_dict(), "the state dict holds weights again"
    other = _trainer("dpo", policy, folder, mixed=True, extra={"ref_model": reference}, **rows)
    assert other._precompute_model_hash != hashes[0]
    return logged(trainer)


def synced(sources, folder):
    sync = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    trainer = _short_run(folder, _model("dpo", sources["tied"], make_accelerator()), **sync)
    for mine, theirs in zip(trainer.model.parameters(), trainer.ref_model.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local()), "the reference follows the policy, shard by shard"
    return logged(trainer)


def sharded_as_one_unit(sources, folder):
    alone = fully_shard(_model("dpo", sources["tied"]))
    model = _model("dpo", sources["tied"], make_accelerator())
    with pytest.raises(ConfigError, match=r"ref_model is sharded as 1 unit.*from_pretrained"):
        _short_run(folder, model, {"ref_model": alone})


@pytest.fixture
def sources(checkpoints, tmp_path):
    """With rows, beside which the cache of precomputed values lies, one for all ranks."""
    _rows("dpo").save_to_disk(tmp_path / "rows")
    return checkpoints | {"rows": tmp_path / "rows"}


def test_reference_models_given_loaded_synced_or_precomputed(sources, dpo_alone, tmp_path):
    cases = (given_plain, precomputed_by_shards, synced, sharded_as_one_unit)
    results = run_ranks(run_cases, 2, cases, sources, tmp_path)
    for losses in results:
        for name in ("given plain", "precomputed by shards"):
            close(losses[name], dpo_alone)
        assert losses["synced"][0] == pytest.approx(dpo_alone[0]) and losses["synced"][1] != pytest.approx(dpo_alone[1])


class Distiller(FSDPTrainerMixin, Trainer):
    """Sets its teacher before there is an Accelerator, as some trainers do, and looks at it on rank 0 alone."""

    def __init__(self, *args: Any, teacher: Any, **kwargs: Any) -> None:
        self.teacher_model = teacher
        assert dist.get_rank() or isinstance(self.teacher_model, torch.nn.Module)
        super().__init__(*args, **kwargs)
        assert dist.get_rank() or isinstance(self.teacher_model, torch.nn.Module)


def _rank_0_reads(sources, folder):
    args = arguments(folder, max_steps=1)
    model, teacher, reference = (_model("dpo", sources["tied"]) for _ in range(3))
    row = {"input_ids": torch.arange(3, 15), "labels": torch.arange(3, 15)}
    trainer = Distiller(model, args, train_dataset=[row] * 4, teacher=teacher.bfloat16())
    assert num_units(teacher) > 2 and not num_units(model), "a teacher is sharded where it is set, a model in training"
    trainer.ref_model = reference
    assert dist.get_rank() or not trainer.ref_model.training
    trainer.train()
    plan = sharding_of(model).plan
    for frozen in (trainer.teacher_model, trainer.ref_model):
        assert sharding_of(frozen).plan.digest == plan.digest
        assert num_units(frozen) == num_units(model) == len(plan.units)
        assert not any(p.requires_grad for p in frozen.parameters()) and not frozen.training
        with torch.no_grad():
            frozen(row["input_ids"][None])
    assert {p.dtype for p in teacher.parameters()} == {torch.bfloat16}, "no masters for what is not trained"
    trainer.teacher_model = trainer.model
    assert any(p.requires_grad for p in trainer.model.parameters()), "the trained model as its teacher is not frozen"


def _scored_by_a_model(sources, folder):
    scorer = _model("reward", sources["reward"])
    rewards = {"reward_funcs": [_reward, scorer], "reward_processing_classes": [None, word_tokenizer()]}
    trainer = _trainer("grpo", _model("grpo", sources["llama"], make_accelerator()), folder, mixed=True, extra=rewards)
    trainer.train()
    assert num_units(trainer.reward_funcs[1]) == len(sharding_of(trainer.reward_funcs[1]).plan.units) > 2
    assert len(logged(trainer, "reward")) == STEPS


def test_grpo_is_scored_by_a_sharded_model_and_any_rank_reads_frozen_models(checkpoints, tmp_path):
    run_ranks(run_cases, 2, (_scored_by_a_model, _rank_0_reads), checkpoints, tmp_path)


# ---- a mixture's auxiliary loss ----

ROW = [3, 9, 4, 30, 5, 81, 7, 12]
"""All rows are this one: the auxiliary loss of tokens together is no mean of those of parts, unless they are alike."""

LARGE = {"output_router_logits": True, "router_aux_loss_coef": 2.0, "experts_implementation": "batched_mm"}


class Sharded(FSDPTrainerMixin, Trainer):
    pass


class ShardedSFT(FSDPTrainerMixin, SFTTrainer):
    pass


def run(source: Path, folder: Path, kind: Any, rows: int, steps: int) -> dict[str, list[float]]:
    """Losses, norms and evaluations of a trainer, with so many rows in each of so many micro-batches."""
    mixed = issubclass(kind, FSDPTrainerMixin)
    own: dict[str, Any] = {"optim": "sgd", "eval_strategy": "steps", "eval_steps": 1, "max_grad_norm": 100.0}
    own |= {"per_device_train_batch_size": rows, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": steps}
    data, config, more = Dataset.from_list([{"input_ids": ROW, "labels": ROW}] * 16), TrainingArguments, {}
    if issubclass(kind, SFTTrainer):
        config, more = SFTConfig, {"processing_class": word_tokenizer()}
    args = arguments(folder, config, max_steps=2, bf16=False, **own)
    if mixed:
        model = from_pretrained(source, accelerator=make_accelerator(args), **LARGE)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, **LARGE)
    trainer = kind(model, args=args, train_dataset=data, eval_dataset=data, **more)
    trainer.train()
    return {key: logged(trainer, key) for key in ("loss", "grad_norm", "eval_loss")}


def together(source: Path, folder: Path, kinds: dict[str, tuple[Any, int, int]]) -> dict[str, Any]:
    return run_cases({name: partial(run, source, folder / name, *each) for name, each in kinds.items()})


def test_an_auxiliary_loss_does_not_depend_on_the_number_of_micro_batches(folders, tmp_path):
    alone = {"plain": (Trainer, 4, 1), "plain, 4 parts": (Trainer, 1, 4)}
    (expected,) = run_ranks(together, 1, folders["mixtral"], tmp_path / "one", alone)
    parted, expected = expected["plain, 4 parts"], expected["plain"]
    assert parted["loss"][0] > expected["loss"][0] + 2, "transformers takes the mean: compute_loss is no longer needed"
    ours = {"1 part": (Sharded, 2, 1), "2 parts": (Sharded, 1, 2), "TRL, 2 parts": (ShardedSFT, 1, 2)}
    for result in run_ranks(together, 2, folders["mixtral"], tmp_path / "two", ours):
        for name, found in result.items():
            for key, values in found.items():
                assert values == pytest.approx(expected[key], rel=1e-5), (name, key)
