"""TRL's AsyncGRPO and AsyncDistillation on shards, with a stand-in for `vllm serve`: the server gets the checkpoint's
tensors after each step, training goes as TRL alone does, and what fails on rank 0 is one error on all."""

from contextlib import ExitStack, nullcontext
from functools import partial
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
from transformers import TrainerCallback, set_seed
from trl.experimental.async_distillation import (
    AsyncDistillationConfig,
    AsyncDistillationTrainer,
    async_distillation_trainer,
)
from trl.experimental.async_distillation import weight_transfer as of_distillation
from trl.experimental.async_distillation.async_rollout_worker import RolloutSample as Lesson
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing, weight_transfer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from hf_fsdp_tools import ConfigError, FSDPTrainerMixin, from_pretrained, make_accelerator, save_pretrained
from tests._checkpoints import assert_same_tensors, lora, stored_tensors, word_tokenizer
from tests._consumers import AsyncVLLMServer
from tests._dist import run_cases, run_ranks
from tests._training import arguments, logged

STEPS = 2
ADAPTER = lora(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
OF_EXPERTS = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"], init_lora_weights=False)


class Sharded(FSDPTrainerMixin, AsyncGRPOTrainer):
    pass


class Distilled(FSDPTrainerMixin, AsyncDistillationTrainer):
    pass


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
    """Stands for FlashAttention 3 on CPUs: each segment sees the keys of its path, whose end it is."""
    found = []
    for i in range(len(starts) - 1):
        q, (k, v) = query[starts[i] : starts[i + 1]], (t[key_starts[i] : key_starts[i + 1]] for t in (key, value))
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        scale, shared = options["softmax_scale"], {"enable_gqa": True}
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **shared)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


SHORT = {"per_device_train_batch_size": 2, "token_budget": 0, "bf16": False, "max_steps": STEPS}
SHORT |= {"gradient_checkpointing": False}


def trainer_of(source: Path, folder: Path, server: AsyncVLLMServer, *, mixed: bool, config: Any) -> Any:
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
        make = distilling if "distilled" in name else trainer_of
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


def test_async_trainers_send_what_is_saved_and_train_as_trl_alone(folders, tmp_path):
    cases = {name: partial(trained, name) for name in WAYS}
    ours = run_ranks(run_cases, 2, cases, folders, tmp_path / "ours", True)
    theirs = run_ranks(run_cases, 2, {name: cases[name] for name in AS_TRL}, folders, tmp_path / "theirs", False)
    for name, losses in theirs[0].items():
        assert len(set(losses)) == STEPS and ours[0][name] == pytest.approx(losses, rel=1e-5, abs=1e-6), name


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
        trainer = trainer_of(folders["llama"], tmp / "run", server, mixed=True, config=None)
        trainer.add_callback(Failing(trainer, server))
        trainer.train()
    assert len(server.updates) == (7 if dist.get_rank() == 0 else 0)
    silent.fails_at = "init_weight_transfer_engine"
    with served(silent), pytest.raises(ConfigError, match="vLLM did not take the weights"):
        trainer_of(folders["llama"], tmp / "again", silent, mixed=True, config=None).train()
    server.stop()
    silent.stop()


def test_a_server_that_fails_is_one_error(folders, tmp_path):
    run_ranks(failures_of_the_server, 2, folders, tmp_path)
