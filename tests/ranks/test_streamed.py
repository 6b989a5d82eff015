"""Offloaded shards whose optimizer steps on a thread: numbers are those of shards that stay, whatever is done between.

The thread is held up in most cases, so that what does not wait for it computes with old values.
"""

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import ConfigError, TrainerSettings, add_adapter, clip_grad_norm_, from_config
from hf_fsdp_tools.extensions import streamed
from hf_fsdp_tools.extensions.streamed import steps_in_backward
from tests._dist import run_cases, run_ranks
from tests._noted import calls_of
from tests._training import ShardedTrainer, arguments, logged
from tests.api import Held, replaced

IDS = torch.randint(3, 131, (4, 12), generator=torch.Generator().manual_seed(1))
CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 131}


@contextmanager
def held_up() -> Iterator[None]:
    """Let the thread begin each piece of work late."""
    own = streamed._run

    def late(calls: list[Callable[[], None]]) -> None:
        time.sleep(0.01)
        own(calls)

    with replaced(streamed, _run=late):
        yield


def built(offload: bool, dtype: str | None, lora: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG, num_hidden_layers=3)
    model = from_config(config, offload_policy=offload, mp_policy=dtype, **options)
    return add_adapter(model, LoraConfig(r=4, target_modules="all-linear")) if lora else model


def trained(
    offload: bool,
    dtype: str | None = "bf16",
    *,
    lora: bool = False,
    optimizer: Any = torch.optim.AdamW,
    between: Callable[..., Any] = lambda *_: None,
    early: bool = False,
    max_norm: float | None = None,
    steps: int = 3,
) -> list[Any]:
    """Losses, what was seen between steps, and weights, of steps of two micro-batches with a schedule."""
    model, seen = built(offload, dtype, lora, activation_checkpointing=not lora), list[Any]()
    own = optimizer([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1 / (1 + step))
    for step in range(steps):
        for micro in range(2):
            ids = IDS.roll(step + micro, 0)
            loss = model(input_ids=ids, labels=ids).loss
            with steps_in_backward(own, max_norm) if early and micro else nullcontext() as clipping:
                loss.backward()
            seen.append(loss.item())
        seen.append(clipping and clipping.norm.item())
        if not early:
            clip_grad_norm_(model.parameters(), 0.5)
        own.step()
        schedule.step()
        seen.append(between(model, own))
        own.zero_grad()
    return [*seen, *(float(Held.of(each).memory.double().sum()) for each in model.parameters())]


def same(**options: Any) -> bool:
    with held_up():
        return trained(False, **options) == trained(True, **options)


def multiplied(model: Any, optimizer: Any, view: Callable[[Any], Any]) -> None:
    for parameter in model.parameters():
        with torch.no_grad():
            view(parameter).mul_(0.9)


def as_numpy(tensor: Any) -> Any:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return torch.from_numpy(local.numpy())


def moments(model: Any, optimizer: Any) -> Any:
    state = get_optimizer_state_dict(model, optimizer)["state"]
    return [[float(each["step"]), float(Held.of(each["exp_avg"]).memory.double().sum())] for each in state.values()]


def converted(model: Any, optimizer: Any) -> None:
    """torch swaps tensors, and refuses those to which weak references are held."""
    model._apply(lambda tensor: tensor.clone())


def evaluated(model: Any, optimizer: Any) -> float:
    with torch.inference_mode():
        return float(model(input_ids=IDS, labels=IDS).loss)


BETWEEN: dict[str, Callable[..., Any]] = {
    "weights are written by .data": partial(multiplied, view=lambda p: p.data),
    "weights are written": partial(multiplied, view=lambda p: p),
    "memory is written by numpy": partial(multiplied, view=as_numpy),
    "gradients are set to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "a norm is read": lambda model, _: [float(Held.of(p).memory.norm()) for p in model.parameters()],
    "moments are read": moments,
    "the model is copied": lambda model, _: float(Held.of(next(copy.deepcopy(model).parameters())).memory.sum()),
    "a state dict is loaded": lambda model, _: (
        model.load_state_dict({name: value.clone() * 0.9 for name, value in model.state_dict().items()}) and None
    ),
    "the model is evaluated": evaluated,
    "the model is converted": converted,
}

OPTIMIZERS = {
    "fused": partial(torch.optim.AdamW, fused=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "no state": torch.optim.SGD,
    "not torch's": type("Own", (torch.optim.AdamW,), {}),
}


def cases() -> dict[str, Callable[[], Any]]:
    made = {f"between: {name}": partial(same, between=call) for name, call in BETWEEN.items()}
    made |= {f"optimizer: {name}": partial(same, optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()}
    made["in the backward pass"] = partial(same, early=True)
    made["clipped by the norm of the step before"] = partial(same, early=True, max_norm=0.5, steps=4)
    made["in the backward pass, fp32, LoRA"] = partial(same, early=True, dtype=None, lora=True)
    return made


def results() -> dict[str, Any]:
    return run_cases(cases())  # which no pickle takes


def forward_passes_begin_before_later_units_are_stepped() -> None:
    """The thread steps a block only once the forward pass of the block before has begun: with whoever waits for all
    steps first, it waits for ever."""
    model = built(True, "bf16")
    own, begun = torch.optim.AdamW(model.parameters()), [threading.Event() for _ in range(3)]
    model(input_ids=IDS, labels=IDS).loss.backward()
    own.step()  # makes the moments
    steps: Iterator[int] = iter(range(100))
    run = streamed._run

    def run_late(calls: list[Callable[[], None]]) -> None:
        at = next(steps)  # the root is stepped first, then the embedding, then the blocks
        assert at < 3 or begun[at - 3].wait(30), f"{at}: the forward pass has not begun"
        run(calls)

    with replaced(streamed, _run=run_late):
        own.step()
        for block, event in zip(model.model.layers, begun, strict=True):
            block.register_forward_pre_hook(lambda *_, event=event: event.set())
        model(input_ids=IDS)
        streamed.settle()
    assert next(steps) > 3


def steps_run_while_the_backward_pass_goes_on() -> None:
    """The thread steps the last block only once the backward pass has reached the first."""
    model = built(True, "bf16")
    own, reached, waited = torch.optim.AdamW(model.parameters()), threading.Event(), list[bool]()
    model(input_ids=IDS, labels=IDS).loss.backward()
    own.step()
    own.zero_grad()
    run = streamed._run

    def run_late(calls: list[Callable[[], None]]) -> None:
        waited.append(reached.wait(30))
        run(calls)

    model.model.layers[0].register_full_backward_pre_hook(lambda *_: reached.set())
    with replaced(streamed, _run=run_late), steps_in_backward(own):
        model(input_ids=IDS, labels=IDS).loss.backward()
        assert reached.is_set()
        begun = [unit for unit in streamed._UNITS.values() if unit.stepped_by is own]
        assert len(begun) >= 3
        with pytest.raises(ConfigError, match="stepped in two backward passes"):
            model(input_ids=IDS, labels=IDS).loss.backward()
    own.step()
    streamed.settle()
    assert all(waited) and len(waited) >= 3


def gradients_are_clipped_by_the_norm_of_the_step_before() -> None:
    """As a loop clips that keeps the norm which torch's own function returned, with norms above and below the limit."""
    found = list[list[float]]()
    for is_own in (True, False):
        model, norms = built(is_own, None), list[float]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for step in range(5):
            ids, limit = IDS.roll(step, 0), (0.5, 2.0, 1e3, 1.0, 1.0)[step]
            with steps_in_backward(optimizer, limit) if is_own else nullcontext() as clipping:
                model(input_ids=ids, labels=ids).loss.backward()
            if not is_own:
                norms.append(float(clip_grad_norm_(model.parameters(), limit if step == 0 else float("inf"))))
                factor = 1.0 if step == 0 else min(1.0, limit / (norms[step - 1] + 1e-6))
                for parameter in model.parameters():
                    parameter.grad.mul_(factor)
            begun = [unit for unit in streamed._UNITS.values() if unit.stepped_by is optimizer]
            assert len(begun) == (0 if step == 0 or not is_own else 5), "root, embedding and three blocks"
            optimizer.step()
            optimizer.zero_grad()
            if is_own:
                norms.append(float(clipping.norm))
        with torch.no_grad():
            norms = norms[:1] + norms[:-1] if not is_own else norms
            found.append([*norms, float(model(input_ids=IDS, labels=IDS).loss)])
    assert found[0] == pytest.approx(found[1], rel=1e-5) and len(set(found[0])) == 5
    for own, limit, said in (
        (optimizer, 0, "max_norm is 0"),
        (torch.optim.LBFGS([torch.zeros(1)]), None, "LBFGS cannot step in the backward"),
    ):
        with pytest.raises(ConfigError, match=said), steps_in_backward(own, limit):
            raise AssertionError("it was entered")


def an_error_of_the_thread_is_raised_by_the_next_pass() -> None:
    model = built(True, "bf16")
    own = torch.optim.AdamW(model.parameters())

    def fail(calls: list[Callable[[], None]]) -> None:
        raise MemoryError("no room on the thread")

    model(input_ids=IDS, labels=IDS).loss.backward()
    with replaced(streamed, _run=fail):
        own.step()
    with pytest.raises(MemoryError, match="no room on the thread"):
        model(input_ids=IDS)
    for unit in streamed._UNITS.values():  # the next case is another model's
        with suppress(MemoryError):
            unit.wait()


def a_trainer_that_does_not_wait_for_norms_steps_in_the_backward_pass(folder: Path) -> None:
    losses = list[list[float]]()
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    for offload in (False, True):
        settings = {"max_grad_norm": 0.3, "max_steps": 3, "gradient_accumulation_steps": 2, "bf16": True}
        settings |= {"fsdp": True, "fsdp_config": {"version": 2, "offload_params": offload}, "seed": 1}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG, num_hidden_layers=2))
        own = TrainerSettings(clip_by_last_norm=True)
        trainer = ShardedTrainer(model, arguments(folder, **settings), train_dataset=rows * 8, fsdp_settings=own)
        end = calls_of(streamed.StreamedUnit, "end", lambda _, unit, *__: unit.stepped_by is not None)
        with end as begun:
            trainer.train()
        losses.append(logged(trainer))
        norms = logged(trainer, "grad_norm")
        assert len(norms) == 3 and norms[0] == norms[1] != norms[2]
    assert sum(begun) > 3, "units are stepped by passes that end the second and the third step"
    assert losses[0] == losses[1] and len(losses[0]) == 3
    trainer.args.max_grad_norm = 0.0
    with pytest.raises(ConfigError, match="clip_by_last_norm needs max_grad_norm"):
        trainer.train()


ORDERS = (
    forward_passes_begin_before_later_units_are_stepped, steps_run_while_the_backward_pass_goes_on,
    gradients_are_clipped_by_the_norm_of_the_step_before, an_error_of_the_thread_is_raised_by_the_next_pass,
)  # fmt: skip


def test_a_step_on_a_thread_equals_one_that_is_waited_for() -> None:
    assert run_ranks(results, 1) == [dict.fromkeys(cases(), True)]


def test_a_thread_steps_and_copies_while_passes_run() -> None:
    run_ranks(run_cases, 2, ORDERS)


def test_a_trainer_that_does_not_wait_for_norms_steps_in_the_backward_pass(tmp_path: Path) -> None:
    run_ranks(a_trainer_that_does_not_wait_for_norms_steps_in_the_backward_pass, 2, tmp_path)
