"""A step that is composed takes, byte by byte, what a step of FSDP2 takes: real ones run on the CPU, as one rank of a
process group whose collectives do nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend "fake")
from transformers import AutoConfig, LlamaConfig
from transformers.training_args import OptimizerNames

from hf_fsdp_tools import ConfigError, TrainingSetup
from hf_fsdp_tools.foresight.fsdp2.step import OPTIMIZERS, Step, optimizer_step
from hf_fsdp_tools.steps import WrapPlan, build_meta_model
from tests.api import (
    DTYPES,
    MUON,
    Alloc,
    Axes,
    EventWriter,
    Gradient,
    Mark,
    Parameter,
    Recorder,
    Sharding,
    TensorSize,
    Trace,
    Work,
    WrapUnit,
    allocate,
    apply_sharding,
    build,
    check_kind,
    checkpoint_activations,
    compose,
    trace_model,
)
from tests.unit.test_trace import changes_of, memory_changes, memory_of

SHAPE = dict(num_processes=4, per_device_train_batch_size=2, max_length=32)


def llama(**options: Any) -> LlamaConfig:
    sizes = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=3, vocab_size=500, num_attention_heads=4)
    return LlamaConfig(**{**sizes, "num_key_value_heads": 2, "max_position_embeddings": 64, **options})


def mixtral() -> Any:
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=304, num_attention_heads=4)
    return AutoConfig.for_model("mixtral", **sizes, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2)


# ---- against FSDP2 itself ----------------------------------------------------------------------------------------


@contextmanager
def group(size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def real_step(config: Any, plan: WrapPlan, setup: TrainingSetup) -> list[int]:
    dtype = DTYPES[setup.master_dtype]
    model: Any = build_meta_model(config, attn_implementation=setup.attn_implementation, dtype=dtype)
    if setup.activation_checkpointing:
        checkpoint_activations(model, setup.recompute)
    model.config.use_cache = False
    shape = (setup.dp_replicate_size, setup.dp_shard_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    sharding = Sharding(
        plan=plan,
        axes=Axes(shards=mesh if setup.dp_replicate_size > 1 else mesh["dp_shard"]),
        mp_policy=MixedPrecisionPolicy(DTYPES[setup.mixed_precision], DTYPES[setup.reduce_dtype]),
        offload_policy=OffloadPolicy(),
        activation_checkpointing=setup.recompute,
    )
    apply_sharding(model, sharding)
    allocate(model, device=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)
    ids = torch.ones(setup.per_device_train_batch_size, setup.max_length, dtype=torch.long)
    model.train()

    def step() -> None:
        for left in reversed(range(setup.gradient_accumulation_steps)):
            model.set_requires_gradient_sync(setup.sync_each_batch or not left)
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return memory_changes(step)


def without_scratch(changes: list[int]) -> list[int]:
    """Changes without memory that is given back before any other: kernels of the CPU take some to join gradients."""
    kept: list[int] = []
    for change in changes:
        if kept and kept[-1] == -change > 0:
            kept.pop()
        else:
            kept.append(change)
    return kept


OF_FSDP = ("gathered parameters", "gather buffers", "whole gradients", "reduce buffers", "gradients")


LATE = dict(gradient_accumulation_steps=3, sync_each_batch=False)
STEPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixed precision": (llama(), {}),
    "accumulation of whole gradients": (llama(), LATE),
    "HSDP, shards in bf16": (llama(), dict(num_processes=8, dp_replicate_size=2, master_dtype="bf16")),
    "one rank": (llama(), dict(num_processes=1)),
    "one rank, tied, checkpointing, accumulation": (
        llama(tie_word_embeddings=True),
        dict(num_processes=1, activation_checkpointing=True, gradient_accumulation_steps=2),
    ),
    "checkpointing": (llama(), dict(activation_checkpointing=True)),
    "experts split along their rows": (mixtral(), dict(num_processes=8)),
}


STATES = {
    "checkpointing": 1,
    "one rank, tied, checkpointing, accumulation": 3,
}
"""Blocks whose random state of 5,056 bytes is kept at the peak: CPU checkpointing keeps it until they recompute."""


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_what_fsdp2_takes(name: str) -> None:
    config, fields = STEPS[name]
    setup = TrainingSetup(**{**SHAPE, "optimizer": "sgd", "max_grad_norm": None, **fields})
    model, plan = build(config, setup)
    step = compose(trace_model(model, plan, setup, device="cpu"), plan, setup)
    most, after = memory_of(step.events)
    # oneDNN takes scratch memory for products in bf16, which no GPU does
    with group(setup.num_processes), torch.backends.mkldnn.flags(enabled=False):
        real = real_step(config, plan, setup)
    assert after == 0
    inputs = 2 * 8 * setup.per_device_train_batch_size * setup.max_length  # they are there before the real step
    assert most - inputs == pytest.approx(max(accumulate(real)) - 5056 * STATES.get(name, 0), abs=600)
    # Each buffer of FSDP2 comes and goes in the same order, as far as its size tells it from other memory.
    composed = changes_of(step.events)
    others = {abs(change) for change, kind in composed if kind not in OF_FSDP}
    sizes = {change for change, kind in composed if kind in OF_FSDP and change > 1024} - others
    assert len(sizes) > 1 or setup.is_plain
    of_fsdp = [change for change in real if abs(change) in sizes]
    expected = [change for change, _ in composed if abs(change) in sizes]
    if config.model_type == "llama":  # of mixtral, torch's variables keep copies of gradients a moment longer
        assert without_scratch(of_fsdp) == without_scratch(expected)


# ---- what no CPU can run -----------------------------------------------------------------------------------------


def linear(fqn: str, *shape: int, **options: Any) -> Parameter:
    return Parameter(fqn=fqn, shape=shape, requires_grad=True, **{"dtype": torch.bfloat16, **options})


def hand_made(**options: Any) -> Trace:
    """A model of two units, "" and "b", of 1,000 and 2,000 elements; its blocks 1 and 2 are the gradients."""
    events = (
        *(Mark("before_forward", module) for module in ("", "b")),
        *(Mark("after_forward", module) for module in ("b", "")),
        *(Mark("before_backward", module) for module in ("", "b")),
        Alloc(2, 4000, "whole gradients", "b"),
        Gradient("b.weight", 2),
        Mark("after_backward", "b"),
        Alloc(1, 2000, "whole gradients", ""),
        Gradient("weight", 1),
    )
    parameters = (linear("weight", 1000, **options), linear("b.weight", 2000, **options))
    return Trace(events=events, parameters=parameters, buffer_bytes=0, model_flops=0.0, tokens=1)


PLAN = WrapPlan(
    units=tuple(
        WrapUnit(modules=(name,), reshard_after_forward=reshard, num_params=count, num_bytes=4 * count, reason="")
        for name, reshard, count in (("b", True, 2000), ("", None, 1000))
    ),
    replicated=(),
    model_class="HandMade",
    num_params=3000,
)


def works(step: Step, *operations: str) -> list[tuple[str, float, str, str]]:
    found = (event for event in step.events if isinstance(event, Work) and event.operation in operations)
    return [(event.operation, event.num_bytes, event.unit, event.stream) for event in found]


def test_offloaded_shards_are_copied_to_the_device_and_gradients_back() -> None:
    setup = TrainingSetup(num_processes=2, offload_params=True)
    step = compose(hand_made(), PLAN, setup)
    assert works(step, "host_to_device", "device_to_host") == [
        ("host_to_device", 2 * 500, "", "copy_in"),
        ("host_to_device", 2 * 1000, "b", "copy_in"),
        ("host_to_device", 2 * 1000, "b", "copy_in"),
        ("device_to_host", 4 * 1000, "b", "reduce_scatter"),
        ("device_to_host", 4 * 500, "", "reduce_scatter"),
    ]
    assert step.resident == () and memory_of(step.events)[1] == 0
    assert step.host_bytes == (4 * 4 + 2) * 1500, "shard, gradient and two states of fp32, and a copy in bf16"
    on_cpu = [event for event in step.events[step.optimizer_at :] if isinstance(event, Work)]
    assert [(event.stream, event.phase) for event in on_cpu] == [("offload", "clip"), ("offload", "optimizer")]


# ---- the optimizer -----------------------------------------------------------------------------------------------


MAKE: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, foreach=True),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True),
}


def moved(events: Any) -> Any:
    return pytest.approx(sum(event.num_bytes for event in events if isinstance(event, Work)), rel=0.01)


def real_optimizer(make: Any, updated: list[TensorSize]) -> tuple[list[int], Any]:
    """The state of torch's own optimizer on the device, and the bytes that clipping and a step touch."""
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(each.shape, dtype=each.dtype)) for each in updated]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = make(parameters)
        optimizer.step()
        with Recorder({"": ""}) as recorder:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            optimizer.step()
    state = [each for of in optimizer.state.values() for each in of.values() if isinstance(each, torch.Tensor)]
    return sorted(each.nbytes for each in state if each.dim()), moved(recorder.events)


@pytest.mark.parametrize(
    ("optimizer", "state", "temporary"),
    [
        ("adamw", [4 * 5000] * 4, 0),
        ("adamw_foreach", [4 * 5000] * 4, 4 * 10000),
        ("sgd", [], 0),
        ("sgd_momentum", [4 * 5000] * 2, 0),
        ("adamw_8bit", [4 * 5000] * 4, 0),  # no multiple of a block
    ],
)
def test_an_optimizer_has_its_state_and_its_temporary_memory(optimizer: str, state: list[int], temporary: int) -> None:
    updated, writer = [TensorSize(shape=(50, 100), dtype=torch.float32)] * 2, EventWriter()
    made = optimizer_step(writer, updated, TrainingSetup(optimizer=optimizer, max_grad_norm=1.0))
    assert sorted(made) == sorted(state)
    most, now = memory_of(writer.events)
    assert now == 0 and temporary <= most <= 1.1 * temporary + 100
    if optimizer in MAKE:
        assert (sorted(made), moved(writer.events)) == real_optimizer(MAKE[optimizer], updated)


def test_each_optimizer_is_an_option_of_the_trainer_that_steps_shards() -> None:
    """What is proposed as `--optim` exists in transformers, and the package does not refuse it."""
    known = {each.value for each in OptimizerNames} | {MUON}  # which a recipe's parser and the mixin take
    assert all(optim.split()[0] in known and "bnb" not in optim for optim, _ in OPTIMIZERS.values())
    for make in MAKE.values():
        check_kind(type(make([torch.nn.Parameter(torch.zeros(2))])))
    with pytest.raises(ConfigError, match=r"Adafactor .*cannot step sharded parameters.* optim='adamw_torch_8bit'"):
        optimizer_step(EventWriter(), [], TrainingSetup(optimizer="adafactor"))
