"""TRL's trainers that generate, on shards: they train as TRL alone does, and a reward function that fails stops all."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, set_seed
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from hf_fsdp_tools import ConfigError, FSDPTrainerMixin, from_pretrained, make_accelerator, save_pretrained
from tests._checkpoints import assert_same_tensors, lora, stored_tensors, word_tokenizer
from tests._dist import run_cases, run_ranks
from tests._training import arguments, full_parameters, logged, num_units
from tests.api import note_of, sharding_of

TRAINERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, GRPOConfig, {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}),
    "rloo": (RLOOTrainer, RLOOConfig, {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}),
    "online dpo": (OnlineDPOTrainer, OnlineDPOConfig, {"max_new_tokens": 6}),
    "distillation": (DistillationTrainer, DistillationConfig, {"max_completion_length": 6}),
    "gkd": (GKDTrainer, GKDConfig, {"max_new_tokens": 6, "lmbda": 1.0}),
}


def length_and_threes(completions: list[str], **_: Any) -> list[float]:
    return [text.count("w3") + 0.1 * len(text) for text in completions]


def rows(task: str) -> Dataset:
    ids = torch.randint(3, 9, (16, 4), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [" ".join(f"w{n}" for n in row) for row in ids]
    if task == "gkd":
        turns = [[{"role": "user", "content": p}, {"role": "assistant", "content": "w3 w4"}] for p in prompts]
        return Dataset.from_dict({"messages": turns})
    return Dataset.from_dict({"prompt": prompts})


def trainer_of(task: str, model: Any, folder: Path, *, mixed: bool, extra: Any = None, **settings: Any) -> Any:
    base, config, own = TRAINERS[task]
    kind = type(f"Sharded{base.__name__}", (FSDPTrainerMixin, base), {}) if mixed else base
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] + ' ' }}{% endfor %}"
    extra = {**({"reward_funcs": length_and_threes} if task in ("grpo", "rloo", "online dpo") else {}), **(extra or {})}
    one_order = {"data_seed": 0}  # Accelerate alone deals by each rank's own seed, which differ here
    args = arguments(folder, config, **{"learning_rate": 1e-3, "bf16": False, **one_order, **own, **settings})
    return kind(model=model, args=args, train_dataset=rows(task), processing_class=tokenizer, **extra)


def model_of(source: Path, *, mixed: bool) -> Any:
    if mixed:
        return from_pretrained(source, accelerator=make_accelerator(cpu=True))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return AutoModelForCausalLM.from_pretrained(source)


def one_trainer(task: str, source: Path, folder: Path, mixed: bool) -> list[float]:
    """Each rank draws its own tokens, so the reference is TRL's own trainer on as many ranks."""
    model, extra = model_of(source, mixed=mixed), {}
    if task in ("distillation", "gkd"):
        extra["teacher_model"] = model_of(source, mixed=mixed)
        with torch.no_grad():
            for parameter in extra["teacher_model"].parameters():
                parameter.mul_(1.1)
    trainer = trainer_of(task, model, folder / task.replace(" ", "_"), mixed=mixed, extra=extra, max_steps=2)
    set_seed(dist.get_rank())
    trainer.train()
    if mixed:
        frozen = [getattr(trainer, name, None) for name in ("ref_model", "teacher_model")]
        assert any(each is not None for each in frozen)
        assert all(num_units(each) == num_units(trainer.model) > 2 for each in frozen if each is not None)
    return logged(trainer)


@pytest.mark.nightly
def test_trainers_that_generate_train_on_shards_as_under_ddp(folders, tmp_path):
    """Those beside GRPO, which is compared with one process below."""
    tasks = [task for task in TRAINERS if task != "grpo"]
    cases = {task: partial(one_trainer, task) for task in tasks}
    ours, theirs = (
        run_ranks(run_cases, 2, cases, folders["llama"], tmp_path / str(mixed), mixed) for mixed in (True, False)
    )
    for task in tasks:
        for one, other in zip(ours, theirs, strict=True):
            assert len(one[task]) == 2 and one[task] == pytest.approx(other[task], rel=1e-5, abs=1e-5), task


# ---- GRPO as TRL alone on one process ----

STEPS = 2


ADAPTER = lora(target_modules=["q_proj", "v_proj"], init_lora_weights=False)


class FixedSampler:
    """Stands for `torch.multinomial`: the same token for a row of the global batch, however it is divided."""

    def __init__(self) -> None:
        self.calls = 0
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def __call__(self, probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        self.calls += 1
        count = len(probabilities)
        seeds = ((self.calls, self.rank * count + row) for row in range(count))
        drawn = [(call * 0.754877666 + row * 0.569840291) % 1.0 for call, row in seeds]
        return (
            (probabilities.double().cumsum(1) < torch.tensor(drawn)[:, None].double())
            .sum(1, keepdim=True)
            .clamp(max=probabilities.shape[1] - 1)
        )


def grpo(kind: str, source: Path, folder: Path, mixed: bool) -> dict[str, list[float]]:
    """Loss, divergence and reward of each step; the same rows, and the same number of tokens in each."""
    model, extra = model_of(source, mixed=mixed), {"peft_config": ADAPTER} if kind == "lora" else {}
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 2 if mixed else 4}
    exact = {"generation_kwargs": {"min_new_tokens": 6}, "num_generations": 4}
    is_refused = mixed and kind == "full"  # a reference model that each rank loads whole
    with patch.object(
        AutoModelForCausalLM, "from_pretrained", None if is_refused else AutoModelForCausalLM.from_pretrained
    ):
        trainer = trainer_of("grpo", model, folder / kind, mixed=mixed, extra=extra, **settings, **exact)
    with patch.object(torch, "multinomial", FixedSampler()):
        trainer.train()
    if mixed and kind == "full":
        assert num_units(trainer.ref_model) == num_units(trainer.model) == len(sharding_of(trainer.model).plan.units)
    return {key: logged(trainer, key) for key in ("loss", "kl", "reward")}


@pytest.mark.parametrize(
    "kinds", [("full",), pytest.param(("lora",), marks=pytest.mark.nightly)], ids=["usual", "rare"]
)
def test_grpo_equals_trl_on_one_process(folders, tmp_path, kinds):
    cases = {kind: partial(grpo, kind) for kind in kinds}
    (expected,) = run_ranks(run_cases, 1, cases, folders["llama"], tmp_path / "one", False)
    for result in run_ranks(run_cases, 2, cases, folders["llama"], tmp_path / "two", True):
        for kind in kinds:
            for key, values in expected[kind].items():
                assert len(values) == STEPS and len(set(values)) > STEPS // 2, (kind, key)
                assert result[kind][key] == pytest.approx(values, rel=1e-5, abs=1e-5), (kind, key)


def on_rank_1(reward: Any) -> Any:
    return reward if dist.get_rank() == 1 else length_and_threes


def raises(completions: list[str], **_: Any) -> list[float]:
    raise KeyError("no answer")


def gives_nan(completions: list[str], **_: Any) -> list[float]:
    return [float("nan"), *([0.5] * (len(completions) - 1))]


def gives_too_few(completions: list[str], **_: Any) -> list[float]:
    return [0.5]


async def raises_later(completions: list[str], **_: Any) -> list[float]:
    raise TimeoutError("the judge is silent")


async def judges_one_later(completions: list[str], **_: Any) -> list[float | None]:
    return [1.0, *([None] * (len(completions) - 1))]


FAILURES = {
    raises: "The reward function raises raised KeyError: 'no answer' (test_online.py:",
    gives_nan: "The reward function gives_nan returned nan for completion 1 of 2",
    gives_too_few: "The reward function gives_too_few returned 1 rewards for 2 completions",
    raises_later: "The reward function raises_later raised TimeoutError: the judge is silent",
}


def one_error_on_all_ranks(source: Path, folder: Path) -> None:
    model = model_of(source, mixed=True)
    before = full_parameters(model)
    for task in ("grpo", "online dpo"):
        for reward, said in FAILURES.items():
            if task == "online dpo" and reward is not raises:
                continue
            extra = {"reward_funcs": [length_and_threes, on_rank_1(reward)]}
            if reward is raises_later and dist.get_rank() == 0:
                extra["reward_funcs"][1] = judges_one_later
            trainer = trainer_of(task, model, folder, mixed=True, extra=extra, max_steps=1)
            with pytest.raises(ConfigError) as caught:
                trainer.train()
            assert said in str(caught.value) and "on 1 of 2 ranks" in str(caught.value)
    after = full_parameters(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    trainer = trainer_of("grpo", model, folder, mixed=True, extra={"reward_funcs": judges_one_later}, max_steps=1)
    trainer.train()
    assert logged(trainer, "reward") == [1.0]
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def settings_of_the_arguments(source: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"use_transformers_continuous_batching=True casts"):
        trainer_of("grpo", model_of(source, mixed=True), folder, mixed=True, use_transformers_continuous_batching=True)
    for is_gathered, expected in ((True, None), (False, False)):
        model = model_of(source, mixed=True)
        trainer_of("rloo", model, folder, mixed=True, ds3_gather_for_generation=is_gathered)
        assert note_of(model).gathered is expected


def test_a_reward_function_that_fails_is_one_error(folders, tmp_path):
    run_ranks(run_cases, 2, (one_error_on_all_ranks, settings_of_the_arguments), folders["llama"], tmp_path)


# ---- vLLM: stand-ins that look at what arrives ----


class Taking:
    """Stands for vLLM's client (server mode) and for its engine (colocate), by TRL's calls (1.16) alone."""

    def __init__(self) -> None:
        self.taken: dict[str, torch.Tensor] = {}
        self.fails_at = ""
        self.llm_engine = self.model_executor = self.driver_worker = self.model_runner = self.model = self
        self.model_config = SimpleNamespace(max_model_len=64)

    def get_server_info(self) -> Any:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list[Any], named: Iterator[tuple[str, torch.Tensor]]) -> None:
        for (name, dtype, shape), (arrived, tensor) in zip(metadata, named, strict=True):
            assert (name, dtype, shape) == (arrived, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            self.load_weights([(arrived, tensor)])

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            if name == self.fails_at:
                raise ConnectionError("500 Server Error")
            self.taken[name] = tensor.clone()

    def update_named_param(self, name: str, tensor: torch.Tensor) -> None:
        self.load_weights([(name, tensor)])

    def weight_update(self) -> Any:
        return nullcontext()

    def reset_prefix_cache(self) -> None:
        pass


class StandIn(VLLMGeneration):
    def _init_vllm(self) -> None:
        self.llm = self.vllm_client = Taking()

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None) -> Any:
        completions = [ids[: 2 + i % 2] for i, ids in enumerate(prompts)]
        return prompts, completions, [[[-1.0] for _ in ids] for ids in completions], None


def weights_arrive(ways: list[tuple[str, str, Any]], folders: dict[str, Path], tmp: Path) -> None:
    """They equal `save_pretrained`'s file after a step: fused experts apart, adapters merged, in order."""
    for kind, mode, config in ways:
        accelerator = make_accelerator(cpu=True)
        moe = {"experts_implementation": "batched_mm"} if kind == "mixtral" else {}
        model = from_pretrained(folders[kind], accelerator=accelerator, peft_config=config, **moe)
        with patch.object(grpo_trainer, "VLLMGeneration", StandIn):
            trainer = trainer_of(
                "grpo", model, tmp / "run", mixed=True, use_vllm=True, vllm_mode=mode, max_steps=1, beta=0.0
            )
        trainer.train()
        generation, takes = trainer.vllm_generation, mode == "colocate" or dist.get_rank() == 0
        generation.sync_weights()
        folder = tmp / f"{kind} {mode} {config is not None}"
        save_pretrained(model, folder, merge_adapters=config is not None)
        dist.barrier()
        saved, taken = stored_tensors(folder), generation.vllm_client.taken
        assert list(taken) == ([name for name, _, _ in generation._weight_metadata] if takes else [])
        assert not takes or taken.keys() == saved.keys()
        for name, tensor in taken.items():
            assert tensor.dtype == saved[name].dtype and torch.equal(tensor, saved[name]), (kind, mode, name)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

        generation.vllm_client.fails_at = [*saved][1] if dist.get_rank() == 0 else ""
        with pytest.raises(ConfigError, match=r"vLLM did not take the weights: ConnectionError: 500 Server Error"):
            generation.sync_weights()
        generation.vllm_client.fails_at = ""
        generation.sync_weights()  # the ranks are in step again


OF_EXPERTS = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"])


def one_by_one(folders: dict[str, Path], tmp: Path) -> None:
    """OnlineDPO gives vLLM one tensor after the other, the experts apart."""
    moe, tmp = {"experts_implementation": "batched_mm"}, tmp / "one by one"
    model = from_pretrained(folders["mixtral"], accelerator=make_accelerator(cpu=True), **moe)
    trainer = trainer_of("online dpo", model, tmp / "run", mixed=True, max_steps=1)
    trainer.train()
    save_pretrained(model, tmp / "saved")
    dist.barrier()
    saved = stored_tensors(tmp / "saved")
    for trainer.vllm_mode in ("server", "colocate"):
        trainer.llm = trainer.vllm_client = client = Taking()
        trainer._move_model_to_vllm()
        takes = trainer.vllm_mode == "colocate" or dist.get_rank() == 0
        assert_same_tensors(client.taken, saved if takes else {}, trainer.vllm_mode)
        client.fails_at = [*saved][1] if dist.get_rank() == 0 else ""
        with pytest.raises(ConfigError, match=r"vLLM did not take the weights: ConnectionError: 500 Server Error"):
            trainer._move_model_to_vllm()


def test_weights_arrive_at_vllm_as_the_checkpoint_has_them(folders, tmp_path):
    ways = [("llama", "server", None), ("mixtral", "colocate", OF_EXPERTS)]
    run_ranks(run_cases, 2, {"all": partial(weights_arrive, ways), "one by one": one_by_one}, folders, tmp_path)
