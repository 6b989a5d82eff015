"""TRL's trainers that generate, on shards: they train as TRL alone does, and a reward function that fails stops all."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from pathlib import Path
from queue import Queue
from threading import current_thread, main_thread
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.async_distillation import (
    AsyncDistillationConfig,
    AsyncDistillationTrainer,
    async_distillation_trainer,
)
from trl.experimental.async_distillation import weight_transfer as of_distillation
from trl.experimental.async_distillation.async_rollout_worker import RolloutSample as Lesson
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing, weight_transfer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from hf_fsdp_tools import ConfigError, FSDPTrainerMixin, from_pretrained, make_accelerator, save_pretrained
from tests._checkpoints import assert_same_tensors, lora, make_quantized, stored_tensors, word_tokenizer
from tests._consumers import AsyncVLLMServer
from tests._dist import run_cases, run_ranks
from tests._training import arguments, full_parameters, logged, num_units

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
    own = None if mixed and task == "grpo" else AutoModelForCausalLM.from_pretrained
    with patch.object(AutoModelForCausalLM, "from_pretrained", own):  # a reference that each rank loads whole
        trainer = trainer_of(task, model, folder / task.replace(" ", "_"), mixed=mixed, extra=extra, max_steps=2)
    set_seed(dist.get_rank())
    trainer.train()
    if mixed:
        frozen = [getattr(trainer, name, None) for name in ("ref_model", "teacher_model")]
        assert any(each is not None for each in frozen)
        assert all(num_units(each) == num_units(trainer.model) > 2 for each in frozen if each is not None)
    return logged(trainer)


@pytest.mark.parametrize("tasks", [[*TRAINERS][:1], pytest.param([*TRAINERS][1:], marks=pytest.mark.nightly)])
def test_trainers_that_generate_train_on_shards_as_under_ddp(folders, tmp_path, tasks):
    cases = {task: partial(one_trainer, task) for task in tasks}
    ours, theirs = (
        run_ranks(run_cases, 2, cases, folders["llama"], tmp_path / str(mixed), mixed) for mixed in (True, False)
    )
    for task in tasks:
        for one, other in zip(ours, theirs, strict=True):
            assert len(one[task]) == 2 and one[task] == pytest.approx(other[task], rel=1e-5, abs=1e-5), task


def on_a_base_as_stored(folder: Path, tmp: Path) -> None:
    """It generates with the model that it trains, whose adapter is turned off to be its own reference."""
    losses = []
    for dequantize in (False, True):
        options = {"dequantize": dequantize, "dtype": torch.float32}
        model = from_pretrained(folder, accelerator=make_accelerator(cpu=True), **options)
        trainer = trainer_of("grpo", model, tmp, mixed=True, extra={"peft_config": lora()}, max_steps=2, seed=0)
        set_seed(0)
        trainer.train()
        losses.append([logged(trainer, key) for key in ("loss", "kl")])
    assert losses[0] == losses[1] and losses[0][1][0] == 0 != losses[0][1][1]


@pytest.mark.nightly
def test_grpo_on_a_base_as_stored_is_that_on_floats(tmp_path):
    make_quantized("compressed int4", tmp_path / "base")
    run_ranks(on_a_base_as_stored, 2, tmp_path / "base", tmp_path / "run")


def on_rank_1(reward: Any) -> Any:
    return reward if dist.get_rank() == 1 else length_and_threes


def raises(completions: list[str], **_: Any) -> list[float]:
    raise KeyError("no answer")


def gives_nan(completions: list[str], **_: Any) -> list[float]:
    return [float("nan"), *([0.5] * (len(completions) - 1))]


async def raises_later(completions: list[str], **_: Any) -> list[float]:
    raise TimeoutError("the judge is silent")


async def judges_one_later(completions: list[str], **_: Any) -> list[float | None]:
    return [1.0, *([None] * (len(completions) - 1))]


FAILURES = {
    raises: "The reward function raises raised KeyError: 'no answer' (test_online.py:",
    gives_nan: "The reward function gives_nan returned nan for completion 1 of 2",
    raises_later: "The reward function raises_later raised TimeoutError: the judge is silent",
}


def one_error_on_all_ranks(source: Path, folder: Path) -> None:
    model = model_of(source, mixed=True)
    with pytest.raises(ConfigError, match=r"use_transformers_continuous_batching=True casts"):
        trainer_of("grpo", model, folder, mixed=True, use_transformers_continuous_batching=True)
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


def test_a_reward_function_that_fails_is_one_error(folders, tmp_path):
    run_ranks(one_error_on_all_ranks, 2, folders["llama"], tmp_path)


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
        assert_same_tensors(taken, saved if takes else {}, mode)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        generation.vllm_client.fails_at = [*saved][1] if dist.get_rank() == 0 else ""
        with pytest.raises(ConfigError, match=r"vLLM did not take the weights: ConnectionError: 500 Server Error"):
            generation.sync_weights()
        generation.vllm_client.fails_at = ""
        generation.sync_weights()  # the ranks are in step again


OF_EXPERTS = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"], init_lora_weights=False)


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


# ---- asynchronous trainers ----

STEPS = 2
ADAPTER = lora(target_modules=["q_proj", "v_proj"], init_lora_weights=False)


Sharded = type("Sharded", (FSDPTrainerMixin, AsyncGRPOTrainer), {})
Distilled = type("Distilled", (FSDPTrainerMixin, AsyncDistillationTrainer), {})


class Rollouts:
    """Stands for TRL's worker: rewarded rows of rank 0's queue, in one order."""

    def __init__(self) -> None:
        self.rollout_buffer: Queue[Any] = Queue()
        self.metrics_queue: Queue[Any] = Queue()
        self.versions: list[int] = []

    def start(self) -> None:
        draws = np.random.default_rng(1)
        for number in range(16 * STEPS):
            ids, mask = draws.integers(3, 9, 7), np.array([0, 0, 0, 1, 1, 1, 1])
            sample = RolloutSample(
                prompt=[], completion=[], input_ids=ids, completion_mask=mask, model_version=1,
                old_log_probs=np.full(7, -2.0, np.float32), advantage=(-1.0) ** number * 0.5, group_id=number // 2,
                metrics={"reward": 1.0},
            )  # fmt: skip
            self.rollout_buffer.put(sample)

    def stop(self) -> None:
        pass

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError("the queue is empty")


class Lessons(Rollouts):
    """The same with what a teacher thinks of each token."""

    def start(self) -> None:
        draws = np.random.default_rng(1)
        for number in range(16 * STEPS):
            likely = np.log(draws.dirichlet(np.ones(4), 7)[:, :3]).astype(np.float32)
            sample = Lesson(
                prompt=[], completion=[], input_ids=draws.integers(3, 9, 7), metrics={}, teacher_id="one",
                completion_mask=np.array([0, 0, 0, 1, 1, 1, 1]), model_version=1, prompt_id=number,
                teacher_topk_ids=draws.integers(3, 40, (7, 3)), teacher_topk_logprobs=likely,
            )  # fmt: skip
            self.rollout_buffer.put(sample)


def by_segments(query: Any, key: Any, value: Any, starts: Any, key_starts: Any, *_: Any, **options: Any) -> Any:
    """Stands for FlashAttention 3: each segment sees the keys of its path, whose end it is."""
    found = []
    for i in range(len(starts) - 1):
        q, (k, v) = query[starts[i] : starts[i + 1]], (t[key_starts[i] : key_starts[i + 1]] for t in (key, value))
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        scale, shared = options["softmax_scale"], {"enable_gqa": True}
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **shared)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


SHORT = {"per_device_train_batch_size": 2, "token_budget": 0, "bf16": False, "max_steps": STEPS}
SHORT |= {"gradient_checkpointing": False}


def async_grpo(source: Path, folder: Path, server: AsyncVLLMServer, *, mixed: bool, config: Any) -> Any:
    """TRL's trainer with a worker of rank 0; the model comes in shards, or by its name."""
    own = {"vllm_server_base_url": server.url, "epsilon": 10.0, "num_generations": 2}
    moe = {"experts_implementation": "batched_mm"} if "mixtral" in source.name else {}  # CPUs have no grouped one
    args = arguments(folder, AsyncGRPOConfig, model_init_kwargs=dict(moe), **own, **SHORT)
    model: Any = str(source)
    if mixed:
        model = from_pretrained(source, accelerator=make_accelerator(args), **moe)
    set_seed(0)
    rows = Dataset.from_dict({"prompt": ["w3 w4"] * 8})
    return (Sharded if mixed else AsyncGRPOTrainer)(
        model, len, args, rows, word_tokenizer(), peft_config=config, rollout_worker=Rollouts()
    )


def distilling(source: Path, folder: Path, server: AsyncVLLMServer, *, mixed: bool, config: Any) -> Any:
    """TRL's distillation, which takes the name of its model."""
    own = {"vllm_server_base_url": server.url, "teacher_server_urls": {"one": server.url}, "beta": 0.0}
    own |= {"model_init_kwargs": {"attn_implementation": "sdpa"}, **SHORT}
    args, rows = arguments(folder, AsyncDistillationConfig, **own), Dataset.from_dict({"prompt": ["w3 w4"] * 8})
    kind = Distilled if mixed else AsyncDistillationTrainer
    return kind(str(source), args, rows, word_tokenizer(), peft_config=config, rollout_worker=Lessons())


def served(server: AsyncVLLMServer) -> ExitStack:
    """TRL finds vLLM, and FlashAttention on CPUs, whose speed it does not ask for."""
    stack = ExitStack()
    for module in (async_grpo_trainer, async_distillation_trainer):
        for name in ("get_peak_flops_per_device", "compute_flops_per_token"):  # of a CPU, and of Mixtral (1.16)
            stack.enter_context(patch.object(module, name, lambda *_: None, create=True))
    for name, value in server.in_the_trainer().items():
        for module in (weight_transfer, of_distillation):
            stack.enter_context(patch.object(module, name, value, create=True))
    kernels = SimpleNamespace(flash_attn_varlen_func=by_segments)
    stack.enter_context(patch.object(packing, "_flash_attn", lambda: kernels))
    return stack


full_tensor = DTensor.full_tensor


def gathers_nothing_to_send(tensor: DTensor, **options: Any) -> torch.Tensor:
    """Refuse what makes TRL wait forever, gathers by the thread that sends. Merging alone gathers, module by module."""
    assert current_thread() is main_thread()
    callers = {frame.f_code.co_name for frame, _ in walk_stack(None)}
    assert "_sync_weight" not in callers or "_merge" in callers
    return full_tensor(tensor, **options)


def trained(name: str, folders: dict[str, Path], tmp: Path, mixed: bool) -> list[float]:
    """Losses; on shards, each update is what `save_pretrained` writes at that moment."""
    kind, config, max_loras = WAYS[name]
    server, saved = AsyncVLLMServer("float32", max_loras=max_loras), []
    with served(server):
        make = distilling if "distilled" in name else async_grpo
        trainer = make(folders[kind], tmp / name, server, mixed=mixed, config=config)
        if mixed:
            trainer.add_callback(Saving(trainer, tmp / name, saved, merges=config is not None and not max_loras))
        with patch.object(DTensor, "full_tensor", gathers_nothing_to_send) if mixed else nullcontext():
            trainer.train()
    server.stop()
    if dist.get_rank() == 0:
        assert len(server.updates) == STEPS + 1 and not server._is_paused
        assert trainer.rollout_worker.versions == [1, 2, 3]
    for update, expected in zip(server.updates[1:], saved, strict=False) if mixed else ():
        assert_same_tensors(update, expected, name)
    assert not mixed or (len(saved) == STEPS and all(isinstance(p, DTensor) for p in trainer.model.parameters()))
    return logged(trainer)


class Saving(TrainerCallback):
    """Keeps what is saved after each step."""

    def __init__(self, trainer: Any, folder: Path, saved: list[dict[str, torch.Tensor]], *, merges: bool) -> None:
        self.trainer, self.folder, self.saved, self.merges = trainer, folder, saved, merges

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = self.folder / f"after {state.global_step}"
        save_pretrained(self.trainer.model, folder, merge_adapters=self.merges)
        dist.barrier()
        self.saved.append(stored_tensors(folder))


WAYS: dict[str, tuple[str, Any, int]] = {
    "merged experts": ("mixtral", OF_EXPERTS, 0),
    "adapter": ("llama", ADAPTER, 8),
    "distilled": ("llama", None, 0),
}
AS_TRL = ("adapter", "distilled")
"""TRL (1.16) sends stacked experts under names of its own, and fails where they have adapters."""


ON_RANKS = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])


@pytest.fixture(scope="module")
def on_shards(folders, tmp_path_factory):
    """The losses of all ways on so many ranks, where each update is looked at."""
    cases = {name: partial(trained, name) for name in WAYS}
    return cache(lambda ranks: run_ranks(run_cases, ranks, cases, folders, tmp_path_factory.mktemp("ours"), True)[0])


@ON_RANKS
def test_async_trainers_send_what_is_saved(ranks, on_shards):
    assert {len(set(losses)) for losses in on_shards(ranks).values()} == {STEPS}


@ON_RANKS
def test_async_trainers_train_as_trl_alone(ranks, on_shards, folders, tmp_path):
    cases = {name: partial(trained, name) for name in AS_TRL}
    for name, losses in run_ranks(run_cases, ranks, cases, folders, tmp_path, False)[0].items():
        assert on_shards(ranks)[name] == pytest.approx(losses, rel=1e-5, abs=1e-6), name


REQUESTS = (("pause", "resume", "update_weights"), ("the third tensor",))
"""What fails after the first step, and after the second."""


class Failing(TrainerCallback):
    """Lets the server fail at each request in turn, and then take an update again."""

    def __init__(self, trainer: Any, server: AsyncVLLMServer) -> None:
        self.trainer, self.server = trainer, server

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for request in REQUESTS[state.global_step - 1]:
            self.server.fails_at, before = request, len(self.server.updates)
            with pytest.raises(ConfigError, match="vLLM did not take the weights") as caught:
                self.trainer._sync_weight()
            assert "on 1 of 2 ranks" in str(caught.value), request
            self.server.fails_at = ""
            if state.global_step == 1:
                self.trainer._sync_weight()
                assert len(self.server.updates) >= before + (dist.get_rank() == 0), request


def failures_of_the_server(folders: dict[str, Path], tmp: Path) -> None:
    """The server is at work on rank 0 alone: each of its errors is one on both ranks, and the next update arrives.

    An update that breaks off leaves TRL's connection with bytes of it, so that it comes last.
    """
    server, silent = AsyncVLLMServer("float32"), AsyncVLLMServer("float32")
    with served(server):
        trainer = async_grpo(folders["llama"], tmp / "run", server, mixed=True, config=None)
        trainer.add_callback(Failing(trainer, server))
        trainer.train()
    assert len(server.updates) == (7 if dist.get_rank() == 0 else 0)
    silent.fails_at = "init_weight_transfer_engine"
    with served(silent), pytest.raises(ConfigError, match="vLLM did not take the weights"):
        async_grpo(folders["llama"], tmp / "again", silent, mixed=True, config=None).train()
    server.stop()
    silent.stop()


def test_a_server_that_fails_is_one_error(folders, tmp_path):
    run_ranks(failures_of_the_server, 2, folders, tmp_path)
