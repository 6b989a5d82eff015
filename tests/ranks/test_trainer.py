"""The Trainer and Accelerate with own optimizers, mixed groups, crowded memory, a device map, FSDP1."""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import dispatch_model
from torch import nn, optim
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, Trainer

from hf_fsdp_tools import ConfigError, ParallelDims, WrapPolicy, from_pretrained, make_accelerator
from tests._checkpoints import full
from tests._dist import named, needs_gpus, run_cases, run_ranks
from tests._noted import calls_of
from tests._training import (
    ShardedTrainer,
    apart,
    arguments,
    batches_of,
    full_gradients,
    full_parameters,
    logged,
    make_rows,
)
from tests.api import WholeGradient, local_device

ROWS = make_rows(40)
WHOLE = WrapPolicy(replicate=("model.norm.weight", "model.layers.1.input_layernorm.weight"))
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).to(local_device()).train()


def sharded(folder: Path, **options: Any) -> Any:
    return from_pretrained(folder, accelerator=make_accelerator(cpu=True), **options)


def own_optimizer(model: Any) -> Any:
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    rest = [p for name, p in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW([{"params": norms, "lr": 3e-2, "weight_decay": 0.0}, {"params": rest}], lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def trained(kind: type[Trainer], model: Any, folder: Path, optimizers: Any = None, **settings: Any) -> list[float]:
    args = arguments(folder / "out", max_steps=2, **settings)
    more = {} if optimizers is None else {"optimizers": optimizers}
    trainer: Any = kind(model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS[:8], **more)
    trainer.train()
    return [*logged(trainer), trainer.evaluate()["eval_loss"]]


def alone(folder: Path, own: bool = False, **settings: Any) -> list[float]:
    model = plain_model(folder)
    optimizers = own_optimizer(model) if own else None
    return trained(Trainer, model, folder, optimizers, per_device_train_batch_size=4, **settings)


def an_optimizer_of_ones_own_is_taken(folder: Path) -> list[list[float]]:
    found = []
    for model in (sharded(folder), plain_model(folder)):
        found.append(trained(ShardedTrainer, model, folder, own_optimizer(model)))
        assert isinstance(model, FSDPModule)
    model = sharded(folder)
    with pytest.raises(ConfigError, match=r"21 of the 21 parameters of \w+ belong to no prepared model"):
        trained(ShardedTrainer, model, folder, own_optimizer(plain_model(folder)))
    return found


def groups_are_parted_for_a_step_only(folder: Path) -> None:
    accelerator = make_accelerator(cpu=True)
    model: Any = from_pretrained(folder, accelerator=accelerator, policy=WHOLE)
    made, schedule = own_optimizer(model)
    keys = [list(map(id, group["params"])) for group in made.param_groups]
    model, optimizer, schedule = accelerator.prepare(model, made, schedule)
    accelerator.prepare(optimizer)
    plain = plain_model(folder)
    batch = batches_of(ROWS[:2], 2)[0]
    for each in (model, plain):
        each(**batch).loss.backward()
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    assert apart(full_gradients(model), full_gradients(plain)) < 1e-7
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert [list(map(id, group["params"])) for group in made.param_groups] == keys
    assert [group["lr"] for group in made.param_groups] == [3e-2 / 8, 1e-2 / 8], "Accelerate steps for each rank"
    assert len(made.state) == 21 and made.state_dict()["param_groups"][0]["params"] == list(range(5))


def optimizers_that_cannot_step_shards_are_refused(folder: Path) -> None:
    accelerator = make_accelerator(cpu=True)
    model = from_pretrained(folder, accelerator=accelerator)
    with pytest.raises(ConfigError, match=r"Rprop of torch\.optim\.rprop cannot step sharded.*AdamW"):
        accelerator.prepare(model, torch.optim.Rprop(model.parameters()))
    with pytest.raises(ConfigError, match=r"\(fused=True\) cannot step sharded.*Leave fused out"):
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), fused=True))
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), foreach=True))


def hooks_on_parameters_that_nobody_calls_are_named_with_what_is_called(folder: Path) -> None:
    """Those of `register_hook`; the cure masks rows of a gradient, as scripts do that train new tokens alone."""
    plain, late = plain_model(folder).train(), plain_model(folder)
    mask = torch.zeros_like(plain.lm_head.weight)
    mask[-3:] = 1.0
    for each in (plain, late):
        each.lm_head.weight.register_hook(lambda gradient: gradient * mask)
    accelerator = make_accelerator(cpu=True)
    model = accelerator.prepare(sharded(folder)).train()
    weight = model.lm_head.weight
    silent = weight.register_hook(lambda gradient: gradient * 0)
    batch = batches_of(ROWS[:2], 2)[0]
    is_first = dist.get_rank() == 0
    for call in (partial(model, **batch), partial(accelerator.prepare, late)):
        with pytest.warns(match=r"never calls: lm_head\.weight.*post_accumulate") if is_first else nullcontext():
            call()
    silent.remove()
    part = distribute_tensor(mask, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(part))
    for each in (model, plain):
        each(**batch).loss.backward()
    close(full(weight.grad), plain.lm_head.weight.grad)


OPTIMIZERS = (
    hooks_on_parameters_that_nobody_calls_are_named_with_what_is_called, an_optimizer_of_ones_own_is_taken,
    groups_are_parted_for_a_step_only, optimizers_that_cannot_step_shards_are_refused,
)  # fmt: skip


def test_optimizers_of_ones_own_and_of_mixed_groups_step_as_on_one_process(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = copytree(folders["llama"], tmp_path / "llama")  # runs write into it
    own = alone(folder, own=True)
    for found in run_ranks(run_cases, 2, OPTIMIZERS, folder):
        for losses in found["an optimizer of ones own is taken"]:
            close(losses, own)


class Crowded(ShardedTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        crowded = model.training and inputs["input_ids"].shape[0] > 2
        handle = model.model.layers[1].mlp.register_forward_pre_hook(raise_full) if crowded else None
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()


def raise_full(*_: Any) -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate")


def a_batch_size_is_found_where_memory_ends(folder: Path) -> list[list[float]]:
    settings = {"auto_find_batch_size": True, "per_device_train_batch_size": 3}
    return [trained(Crowded, make(folder), folder, **settings) for make in (sharded, plain_model)]


def a_device_map_of_a_plain_model_is_forgotten(folder: Path) -> list[float]:
    """transformers puts hooks on a model that it spreads; they would move inputs away from this rank's device. A
    forgotten mixin is named."""
    trainer = Trainer(model=sharded(folder), args=arguments(folder / "out"), train_dataset=ROWS)
    with pytest.raises(ConfigError, match=r"class MyTrainer\(FSDPTrainerMixin, Trainer\)"):
        trainer.train()
    model = dispatch_model(plain_model(folder), {"": "cpu"}, force_hooks=True)
    model.hf_device_map = {"model": 0, "lm_head": 1}
    assert any(hasattr(module, "_hf_hook") for module in model.modules())
    losses = trained(ShardedTrainer, model, folder)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    return losses


def fsdp1_trains_on_cpus_by_the_launchers_variables(folder: Path) -> list[float]:
    """`accelerate launch` sets all of these for FSDP1 unless the file says otherwise."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_SYNC_MODULE_STATES": "true"}
    os.environ |= {"FSDP_USE_ORIG_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    args = arguments(folder / "fsdp1", max_steps=2, save_strategy="no")
    # one rank of each machine says it
    said = (
        pytest.warns(UserWarning, match="sync_module_states is off on CPUs") if not dist.get_rank() else nullcontext()
    )
    with said:
        trainer: Any = ShardedTrainer(model=plain_model(folder), args=args, train_dataset=ROWS, eval_dataset=ROWS[:8])
    trainer.train()
    assert isinstance(trainer.model_wrapped, FullyShardedDataParallel)
    losses = [*logged(trainer), trainer.evaluate()["eval_loss"]]
    with pytest.raises(ConfigError, match=r"optimizers=\(…\) needs FSDP2"):
        model = plain_model(folder)
        ShardedTrainer(model=model, args=args, train_dataset=ROWS, optimizers=own_optimizer(model))
    return losses


def an_evaluation_leaves_what_training_draws(folder: Path) -> None:
    """Also one that draws itself, as those of TRL's trainers, which write."""
    losses = []
    for draws in (False, True):
        model = sharded(folder, attention_dropout=0.5)
        args = arguments(folder / "out", max_steps=2, **({"eval_strategy": "steps", "eval_steps": 1} if draws else {}))
        metrics = lambda _: {"drawn": float(torch.rand(()))}  # noqa: E731
        trainer: Any = ShardedTrainer(
            model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS[:8], compute_metrics=metrics
        )
        trainer.train()
        losses.append(logged(trainer))
        assert len(logged(trainer, "eval_drawn")) == 2 * draws
    assert losses[0] == losses[1]


HOSTS = (
    an_evaluation_leaves_what_training_draws,
    a_batch_size_is_found_where_memory_ends, a_device_map_of_a_plain_model_is_forgotten,
    fsdp1_trains_on_cpus_by_the_launchers_variables,
)  # fmt: skip


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="the batch size finder needs torch 2.13")
def test_a_crowded_memory_a_forgotten_mixin_and_fsdp1_on_cpus(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copytree(folders["llama"], tmp_path / "llama")  # runs write into it
    expected = alone(folder)
    for found in run_ranks(run_cases, 2, HOSTS, folder):
        for losses in found[re.sub("_", " ", HOSTS[1].__name__)]:
            close(losses, expected)
        for case in HOSTS[-2:]:
            close(found[re.sub("_", " ", case.__name__)], expected)


# ---- parameters that every rank holds whole ----

THREE_WHOLE = WrapPolicy(replicate=("model.norm.weight", "model.layers.1.input_layernorm.weight", "model.embed_tokens"))
CLIP = 0.5


def mixed(folder: Path, **options: Any) -> Any:
    """Three of 21 parameters are whole: two in one of the optimizer's groups with shards, one alone in its group."""
    return from_pretrained(folder, policy=THREE_WHOLE, **options).train()


def batch_of_rank(rank: int | None = None, count: int = 4) -> dict[str, torch.Tensor]:
    """Rows of this rank; of all ranks together where there is but one."""
    size = count if rank is None else count // 2
    return batches_of(make_rows(count), size)[rank or 0]


def backward(model: nn.Module, rank: int | None) -> None:
    model(**batch_of_rank(rank)).loss.backward()


MADE: dict[str, Callable[..., optim.Optimizer]] = {
    "AdamW": partial(optim.AdamW, lr=1e-2),
    "Adagrad": partial(optim.Adagrad, lr=1e-2),  # makes its state before the first step
}
STEPS: dict[str, dict[str, bool]] = {
    f"{name}, {way}": {"foreach": way == "foreach"} if way != "fused" else {"foreach": False, "fused": True}
    for name in MADE
    for way in ("loop", "foreach", "fused")
    if way != "fused" or name == "AdamW"  # the fused steps that torch (2.13) has for shards
}


def own_loop(model: Any, name: str, rank: int | None) -> dict[str, torch.Tensor]:
    """Weights after two steps of a loop that uses nothing but torch; gradients stay, as zeros."""
    groups = [{"params": [model.model.embed_tokens.weight]}, {"params": [*model.parameters()][1:]}]
    optimizer = MADE[name.split(",")[0]](groups, **STEPS[name])
    for _ in range(2):
        backward(model, rank)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not full(parameter.grad).any() for parameter in model.parameters())
    kinds = {type(value) for state in optimizer.state.values() for value in state.values()}
    assert WholeGradient not in kinds, "no state is made of a class of this package"
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 20]
    return full_parameters(model)


def clipped(clip: Callable[..., Any], model: Any, rank: int | None) -> tuple[float, dict[str, torch.Tensor]]:
    backward(model, rank)
    norm = clip(model.parameters())
    return 0.0 if norm is None else full(norm).item(), full_gradients(model)


CLIPS: dict[str, Callable[[Iterable[nn.Parameter]], Any]] = {
    "norm": partial(nn.utils.clip_grad_norm_, max_norm=CLIP),
    "largest": partial(nn.utils.clip_grad_norm_, norm_type=float("inf"), max_norm=0.01, foreach=False),
    "value": partial(nn.utils.clip_grad_value_, clip_value=1e-3, foreach=True),
}


def every_optimizer_and_clip(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    stepped = {name: own_loop(mixed(folder), name, dist.get_rank()) for name in STEPS}
    return stepped, {name: clipped(clip, mixed(folder), dist.get_rank()) for name, clip in CLIPS.items()}


def reductions() -> Any:
    """Size and dtype of each all-reduce of this package in a block."""
    return calls_of(dist, "all_reduce", lambda _, tensor, *__: (tensor.numel(), tensor.dtype))


def gradients_are_sent_together(folder: Path) -> None:
    """Accumulated over two micro-batches."""
    rank, plain = dist.get_rank(), plain_model(folder)
    for _ in range(2):
        backward(plain, None)
    model = mixed(folder)
    size = sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor))
    for number in range(2):
        with reductions() as sent:
            backward(model, rank)
        assert [count for count, _ in sent] == [size], f"one call for micro-batch {number}"
    assert apart(full_gradients(model), full_gradients(plain)) < 1e-6
    assert type(model.model.norm.weight.grad) is WholeGradient


def gradients_in_bf16_are_summed_in_fp32(folder: Path) -> None:
    weight, rank = mixed(folder, dtype=torch.bfloat16).model.norm.weight, dist.get_rank()
    with reductions() as sent:
        (weight.float() * (1.0 + rank)).sum().backward()
    assert {dtype for _, dtype in sent} == {torch.float32}
    assert torch.equal(full(weight.grad), torch.full(weight.shape, 1.5, dtype=torch.bfloat16))


def replicas_of_shards_are_clipped_and_stepped(folder: Path) -> None:
    """Gradients are averaged over both axes of the mesh, and clipped on it."""
    mesh = ParallelDims(dp_replicate_size=2).build_mesh(local_device().type)
    ours = own_loop(mixed(folder, mesh=mesh), "AdamW, foreach", dist.get_rank())
    assert apart(ours, own_loop(plain_model(folder), "AdamW, foreach", None)) < 5e-5


def an_infinite_gradient_on_one_rank_stops_all_of_them(folder: Path) -> None:
    """With torch's own scaler; of a shard, while the first gradient is that of a whole parameter."""
    for fused in (False, True):
        model, scaler = mixed(folder), torch.amp.GradScaler(local_device().type)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        assert not isinstance(optimizer.param_groups[0]["params"][0], DTensor)
        scaler.scale(model(**batch_of_rank(dist.get_rank())).loss).backward()
        shard = model.lm_head.weight.grad.to_local()
        if dist.get_rank() == 0:
            shard[0, 0] = float("inf")
        before = full_parameters(model)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**15 and apart(full_parameters(model), before) == 0


CASES = (
    an_infinite_gradient_on_one_rank_stops_all_of_them, replicas_of_shards_are_clipped_and_stepped,
    gradients_are_sent_together, gradients_in_bf16_are_summed_in_fp32, every_optimizer_and_clip,
)  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpus(2))])
def test_whole_parameters_train_beside_shards_in_a_loop_that_uses_nothing_but_torch(
    folders: dict[str, Path], device: Any
) -> None:
    folder = folders["llama"]
    weights = {kind: own_loop(plain_model(folder), f"{kind}, loop", None) for kind in MADE}
    plain_clips = {name: clipped(clip, plain_model(folder), None) for name, clip in CLIPS.items()}
    assert plain_clips["norm"][0] > CLIP, "there is something to clip"
    for found in run_ranks(run_cases, 2, named(*CASES), folder, device=device):
        optimizers, clips = found["every_optimizer_and_clip"]
        for name, stepped in optimizers.items():
            kind, way = name.split(", ")
            # torch computes the same in another order: fused steps (measured: 5e-7).
            bound = 2e-6 if device == "cuda" or way == "fused" else 0
            assert apart(stepped, optimizers[f"{kind}, loop"]) <= bound, name
            # Gradients of two ranks are added in another order, over three steps (measured: 6e-6, RMSprop's).
            assert apart(stepped, weights[kind]) < 5e-5, name
        for name, (norm, gradients) in clips.items():
            assert norm == pytest.approx(plain_clips[name][0], rel=1e-6), name
            assert apart(gradients, plain_clips[name][1]) < 1e-7, name
