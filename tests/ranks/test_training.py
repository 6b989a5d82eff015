"""Training under Accelerate and the Trainer gives the numbers of one process: in every precision, however a batch is
split."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_fsdp_tools import ConfigError, FSDPPlugin, ParallelDims, WrapPolicy, from_pretrained
from hf_fsdp_tools.steps import build_meta_model, load_weights, make_wrap_plan, shard_model
from tests._dist import run_cases, run_ranks
from tests._rounding import assert_near, with_rounding
from tests._training import (
    Run,
    ShardedTrainer,
    apart,
    arguments,
    batches_of,
    by_hand,
    full_gradients,
    full_parameters,
    logged,
    make_rows,
    new_accelerator,
    train,
)
from tests.api import adopt, local_device, patched, sharding_of

STEPS, ROWS = 3, 2  # optimizer steps, and rows of one micro-batch
CLIP = 0.5
BF16 = torch.bfloat16

in_order = partial(arguments, max_steps=STEPS, train_sampling_strategy="sequential", optim="adamw_torch")
same = partial(torch.testing.assert_close, rtol=0, atol=0)
# fp32: ranks add the same numbers in another order; AdamW steps make at most 1e-5 of it (measured over ten: 2e-6).
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


# ---- steps in every precision ----


def _by_hand(
    folder: Path, masters: Any = torch.float32, compute: Any = torch.float32, *, ranks: int = 2, scale: float = 1.0
) -> Run:
    batches = batches_of(make_rows(STEPS * ranks * ROWS), ROWS)
    steps = [batches[i : i + ranks] for i in range(0, len(batches), ranks)]
    return by_hand(folder, steps, masters, compute, clip=CLIP, scale=scale)


PRECISIONS = {  # Accelerate's mixed precision, the dtype asked of from_pretrained, masters, computation
    "fp32": ("no", None, torch.float32, torch.float32),
    "bf16 over fp32 masters": ("bf16", None, torch.float32, BF16),
    "bf16 throughout": ("no", BF16, BF16, BF16),
}


def _loop(folder: Path, mixed: str = "no", dtype: torch.dtype | None = None, mesh: Any = None, **settings: Any) -> Run:
    accelerator = new_accelerator(mixed_precision=mixed, **settings)
    model = from_pretrained(folder, accelerator=accelerator, dtype=dtype, mesh=mesh)
    assert sharding_of(model).mp_policy.reduce_dtype == torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    loader = DataLoader(make_rows(STEPS * dist.get_world_size() * ROWS), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    losses, first = [], {}
    for batch in loader:
        loss = model(**batch).loss
        assert loss.dtype == torch.float32, "outputs are not rounded"
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        first = first or full_parameters(model)
    return losses, first, full_parameters(model)


def _trainer(folder: Path, out: Path, mixed: str, dtype: torch.dtype | None) -> tuple[list[float], dict]:
    model = from_pretrained(folder, accelerator=new_accelerator(mixed_precision=mixed), dtype=dtype)
    args = in_order(out, bf16=mixed == "bf16")
    trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(STEPS * dist.get_world_size() * ROWS))
    trainer.train()
    return logged(trainer), full_parameters(trainer.model)


def _both_hosts(mixed: str, dtype: torch.dtype | None, folder: Path, out: Path) -> Any:
    return _loop(folder, mixed, dtype), _trainer(folder, out, mixed, dtype)


def test_three_steps_under_both_hosts_equal_one_process_in_every_precision(folders, tmp_path):
    dtypes = {name: (masters, compute) for name, (_, _, masters, compute) in PRECISIONS.items()}
    alone = {name: with_rounding(partial(_by_hand, folders["llama"], *each)) for name, each in dtypes.items()}
    (exact, *_), _ = alone["fp32"]
    assert exact[-1] < exact[0] - 0.05, "the run learns, so a wrong gradient would show"
    cases = {name: partial(_both_hosts, mixed, dtype) for name, (mixed, dtype, *_) in PRECISIONS.items()}
    for found in run_ranks(run_cases, 2, cases, folders["llama"], tmp_path):
        for name, ((losses, first, weights), (allowed, *_)) in alone.items():
            loop, trainer = found[name]
            same(torch.tensor(trainer[0]), torch.tensor(loop[0]))
            assert apart(trainer[1], loop[2]) == 0, "both hosts, to the last bit"
            if name == "fp32":
                # The same numbers added in another order, over AdamW steps (measured over ten: 5e-6).
                close(torch.tensor(loop[0]), torch.tensor(losses))
                assert apart(loop[2], weights) < 5e-5
                continue
            # One step: fp32 masters agree to the last bit or two; bf16 ones to one rounding of the weight and of the
            # step (1e-2), as the clip's coefficient may round to its neighbour. From then on a weight may round to its
            # neighbour (2^-8 of it), and Adam divides by small numbers: losses agree as
            # rounding explains, and weights do not.
            rtol, atol = (2**-7, 2**-6 * 1e-2) if name.startswith("bf16 throughout") else (1e-6, 1e-7)
            for key, value in first.items():
                torch.testing.assert_close(loop[1][key], value, rtol=rtol, atol=atol, msg=f"{name} {key}")
            assert_near(loop[0], losses, allowed, name)


def fp16_without_a_scaler(folder: Path) -> None:
    if local_device().type != "cpu":
        return
    accelerator = new_accelerator(mixed_precision="fp16")
    with pytest.raises(ConfigError, match=r"fp16.*needs a scaled loss.*not for cpu.*Use 'bf16'"):
        accelerator.prepare(from_pretrained(folder, accelerator=accelerator))
    accelerator.prepare(from_pretrained(folder, accelerator=accelerator).requires_grad_(False))  # evaluation is fine


def fp16_with_a_scaler(folder: Path) -> list[float]:
    accelerator = new_accelerator(mixed_precision="fp16")
    if local_device().type == "cpu":
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu"), True  # what Accelerate has on GPUs
        adopt(accelerator, sync_each_batch=True)
    model = from_pretrained(folder, accelerator=accelerator, policy=WrapPolicy(replicate=("model.norm",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    part = slice(dist.get_rank() * ROWS, (dist.get_rank() + 1) * ROWS)
    batches = [{k: v[part] for k, v in batch.items()} for batch in batches_of(make_rows(STEPS * 2 * ROWS), 2 * ROWS)]
    losses = train(model, optimizer, batches, accelerator=accelerator, clip=CLIP)
    assert not optimizer.step_was_skipped and accelerator.scaler.get_scale() == 2.0**16
    # one rank alone overflows: all skip the step, and all scale less
    before = full_parameters(model)
    (model(**batches[-1]).loss * (float("inf") if dist.get_rank() == 0 else 1.0)).backward()
    accelerator.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    assert optimizer.step_was_skipped and accelerator.scaler.get_scale() == 2.0**15
    assert apart(full_parameters(model), before) == 0
    return losses


def test_fp16_scales_the_loss_where_a_scaler_is_and_is_refused_where_none_is(folders):
    alone = with_rounding(lambda: _by_hand(folders["llama"], torch.float32, torch.float16, scale=2.0**16)[0])
    for found in run_ranks(run_cases, 2, [fp16_without_a_scaler, fp16_with_a_scaler], folders["llama"]):
        assert_near(found["fp16 with a scaler"], *alone)


# ---- clipping: one norm over plain and sharded parameters ----


CLIPPED = WrapPolicy(replicate=("model.norm", "model.layers.0.input_layernorm"))


def _clipping_by_the_trainer(folder: Path, out: Path) -> float:
    args = in_order(out, max_steps=1)
    new_accelerator(fsdp_plugin=FSDPPlugin(policy=CLIPPED))
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(4 * ROWS))
    unscale = trainer.accelerator.unscale_gradients = Mock(wraps=trainer.accelerator.unscale_gradients)
    trainer.train()
    assert unscale.call_count == 1, "under fp16 the gradients are divided by the loss scale before they are clipped"
    assert sum(not isinstance(p, DTensor) for p in trainer.model.parameters()) == 2
    return float(logged(trainer, "grad_norm")[0])


def _is_clipped_by_one_norm_over_plain_and_sharded_gradients(folder: Path, found: dict[str, Any]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder).train()
    plain(**batches_of(make_rows(2 * ROWS), 2 * ROWS)[0]).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP).item()
    assert norm > CLIP, "there is something to clip"
    assert found["clipped"] == pytest.approx(norm, rel=1e-4)


# ---- accumulation ----


SPLITS = ([[1, 3], [2, 2]], [[1, 1, 1], [1, 2, 2]])
"""Rows of each micro-batch of each rank."""
SIZES = (4, 1)
"""Rows of each micro-batch of each rank of the Trainer."""


def _split_in_a_loop(split: list[list[int]], folder: Path, out: Path) -> tuple[float, dict[str, torch.Tensor]]:
    rank, rows = dist.get_rank(), make_rows(8, ragged=True)
    accelerator = new_accelerator()
    model = accelerator.prepare(from_pretrained(folder, accelerator=accelerator).train())
    mine = rows[: sum(split[0])] if rank == 0 else rows[sum(split[0]) :]
    batches, start = [], 0
    for size in split[rank]:
        batches.append(batches_of(mine[start : start + size], size)[0])
        start += size
    trained_tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    items = accelerator.reduce(trained_tokens.float(), "mean")
    losses = []
    for batch in batches:
        loss = model(**batch, num_items_in_batch=items).loss
        accelerator.backward(loss)
        losses.append(loss.detach())
    return accelerator.reduce(torch.stack(losses).sum(), "mean").item(), full_gradients(model)


def _split_by_the_trainer(size: int, steps: int, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    args = in_order(
        out, max_steps=1, max_grad_norm=0, optim="sgd", learning_rate=1.0, weight_decay=0.0,
        per_device_train_batch_size=size, gradient_accumulation_steps=steps,
    )  # fmt: skip
    model = from_pretrained(folder, accelerator=new_accelerator())
    trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(8, ragged=True))
    trainer.train()
    return full_parameters(trainer.model)


def _splits_give_the_same_gradients(folder: Path, found: dict[str, Any]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder).train()
    start = full_parameters(plain)
    loss = plain(**batches_of(make_rows(8, ragged=True), 8)[0]).loss
    loss.backward()
    mean, gradients = found["split"]
    assert mean == pytest.approx(loss.item(), rel=1e-6)
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-4, atol=1e-7, msg=f"loop {key}")
        # a step of 1 by SGD is the gradient, rounded at the size of the weight
        step = start[key] - found["split by the Trainer"][key]
        torch.testing.assert_close(step, parameter.grad, rtol=1e-4, atol=2e-7, msg=f"Trainer {key}")


def _kept(model: nn.Module) -> tuple[int, int]:
    """Elements of whole gradients that FSDP keeps for one backward pass more, and of sharded ones."""
    states = {module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}
    groups = [state._fsdp_param_group for state in states]
    parameters = [p for group in groups if group is not None for p in group.fsdp_params]
    whole = [p.unsharded_accumulated_grad for p in parameters]
    whole += [p._unsharded_param.grad for p in parameters if hasattr(p, "_unsharded_param")]
    sharded = [p.sharded_param.grad for p in parameters]
    return tuple(  # since torch 2.14 both names of a whole gradient are one
        sum((g.to_local() if isinstance(g, DTensor) else g).numel() for g in set(each) - {None})
        for each in (whole, sharded)
    )


class _Watch(TrainerCallback):
    def on_substep_end(self, args, state, control, model=None, **kwargs):
        self.kept = _kept(model)


def _between_micro_batches(settings: dict[str, Any], folder: Path, out: Path) -> tuple[Any, ...]:
    batch = batches_of(make_rows(ROWS), ROWS)[0]
    accelerator = new_accelerator(mixed_precision="bf16", **settings)
    model = accelerator.prepare(from_pretrained(folder, accelerator=accelerator).train())
    kept = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
        kept.append(_kept(model))
    return *kept, full_gradients(model)


def _between_micro_batches_of_the_trainer(config: dict[str, Any], folder: Path, out: Path) -> tuple[int, int]:
    args = in_order(out, max_steps=1, gradient_accumulation_steps=2, accelerator_config=config)
    watch = _Watch()
    model = from_pretrained(folder, accelerator=new_accelerator())
    ShardedTrainer(model=model, args=args, train_dataset=make_rows(8 * ROWS), callbacks=[watch]).train()
    return watch.kept


def _gathers_of_a_step(model: nn.Module, steps: Callable[[], Any]) -> tuple[int, Any]:
    """Gathers for each unit of a model while `steps` runs, and what `steps` gives; afterwards all is sharded."""
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", wraps=foreach_all_gather) as gather:
        found = steps()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    units = sum(isinstance(module, FSDPModule) and bool(list(module.parameters())) for module in model.modules())
    assert gather.call_count % units == 0
    return gather.call_count // units, found


def _accumulated(reshard: bool, is_kept: bool, folder: Path, out: Path) -> tuple[int, Any]:
    """Two steps of two micro-batches each in a loop: gathers of each unit, losses, and the gradients of the last."""
    plugin = FSDPPlugin(policy=WrapPolicy(group_tail=False, reshard_after_forward={"*": reshard}))
    accelerator = new_accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model = from_pretrained(folder, accelerator=accelerator).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def steps() -> list[Any]:
        losses = []
        for batch in batches_of(make_rows(4 * ROWS), ROWS):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with nullcontext() if is_kept else patched(keep_after_backward=Mock()):
        count, losses = _gathers_of_a_step(model, steps)
    return count, (losses, full_parameters(model))


def _kept_units_are_gathered_once_in_a_step(found: dict[str, Any]) -> None:
    (kept, ours), (each, plain), (resharded, _) = (found[name] for name in ("kept", "as FSDP2 does it", "resharded"))
    assert (kept, each, resharded) == (2, 4, 8)
    assert ours[0] == plain[0] and all(torch.equal(ours[1][name], value) for name, value in plain[1].items())


def _no_whole_gradients_are_kept_unless_asked(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    count = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    for name, one, other in (
        ("default", first["default"][0], second["default"][0]),
        ("default at the end", first["default"][1], second["default"][1]),
        ("asked at the end", first["asked"][1], second["asked"][1]),
        ("Trainer", first["Trainer"], second["Trainer"]),
    ):
        assert one[0] == other[0] == 0, name
        assert one[1] + other[1] == count, f"{name}: every gradient, in shards"
    assert first["asked"][0] == second["asked"][0] == (count, 0), "each rank keeps all of them whole"
    assert first["Trainer asked"] == second["Trainer asked"] == (count, 0), "by the Trainer too"
    for key, gradient in first["asked"][2].items():
        # Averaged twice and added in fp32, or added in fp32 and averaged once.
        torch.testing.assert_close(first["default"][2][key], gradient, rtol=1e-5, atol=1e-7)


ACCUMULATED: dict[str, Any] = {
    "clipped": _clipping_by_the_trainer,
    "kept": partial(_accumulated, False, True),
    "as FSDP2 does it": partial(_accumulated, False, False),
    "resharded": partial(_accumulated, True, True),
    "default": partial(_between_micro_batches, {"gradient_accumulation_steps": 2}),
    "asked": partial(_between_micro_batches, {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)}),
    "Trainer": partial(_between_micro_batches_of_the_trainer, {}),
    "Trainer asked": partial(
        _between_micro_batches_of_the_trainer, {"gradient_accumulation_kwargs": {"sync_each_batch": False}}
    ),
}


@pytest.mark.parametrize("which", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_gradients_are_clipped_and_accumulated_as_on_one_process(folders, tmp_path, which):
    folder = folders["llama"]
    splits = {
        "split": partial(_split_in_a_loop, SPLITS[which]),
        "split by the Trainer": partial(_split_by_the_trainer, SIZES[which], 4 // SIZES[which]),
    }
    ranks = run_ranks(run_cases, 2, ACCUMULATED | splits, folder, tmp_path)
    for found in ranks:
        _is_clipped_by_one_norm_over_plain_and_sharded_gradients(folder, found)
        _splits_give_the_same_gradients(folder, found)
        _kept_units_are_gathered_once_in_a_step(found)
    _no_whole_gradients_are_kept_unless_asked(folder, *ranks)


# ---- activation checkpointing and compilation ----


def _calls(model: nn.Module) -> list[int]:
    calls: list[int] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def _checkpointed_trainer(fsdp: bool, own: bool, folder: Path, out: Path) -> tuple[ShardedTrainer, list[int]]:
    config = {"version": 2, "activation_checkpointing": fsdp}
    args = in_order(out, max_steps=1, fsdp="full_shard", fsdp_config=config, gradient_checkpointing=own)
    model = AutoModelForCausalLM.from_pretrained(folder)
    calls = _calls(model)
    return ShardedTrainer(model=model, args=args, train_dataset=make_rows(4 * ROWS)), calls


def _checkpointed_by_the_trainer(fsdp: bool, own: bool, folder: Path, out: Path) -> tuple[int, dict[str, torch.Tensor]]:
    trainer, calls = _checkpointed_trainer(fsdp, own, folder, out)
    trainer.train()
    return len(calls), full_parameters(trainer.model)


def _losses_in_a_loop(compiled: bool, folder: Path, out: Path) -> list[float]:
    settings = {"dynamo_backend": "aot_eager"} if compiled else {}
    accelerator = new_accelerator(fsdp_plugin=FSDPPlugin(activation_checkpointing=True), **settings)
    model = from_pretrained(folder, accelerator=accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_rows(3 * 2 * ROWS), batch_size=ROWS)
    model, optimizer, batches = accelerator.prepare(model.train(), optimizer, loader)
    assert (sharding_of(model).compile is not None) == compiled
    losses = train(model, optimizer, batches, accelerator=accelerator)
    if not compiled:
        return losses
    assert [n for n, m in model.named_modules() if m._compiled_call_impl] == ["model.layers.0", "model.layers.1"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "both layers share one graph"
    prompt = batches_of(make_rows(1), 1)[0]["input_ids"][:, : 3 + dist.get_rank()]
    model.eval().generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "generation is not compiled"
    accelerator.save_model(model, out)
    assert apart(full_parameters(AutoModelForCausalLM.from_pretrained(out)), full_parameters(model)) == 0
    return losses


def _compiled_as_a_whole(folder: Path, out: Path) -> None:
    accelerator = new_accelerator(dynamo_backend="aot_eager")
    with pytest.raises(ConfigError, match=r"compiled as a whole.*dynamo_backend"):
        accelerator.prepare(torch.compile(AutoModelForCausalLM.from_pretrained(folder)))


def test_activations_are_recomputed_once_by_one_switch_and_blocks_are_compiled_in_place(folders, tmp_path):
    cases = {
        "Trainer, FSDP's": partial(_checkpointed_by_the_trainer, True, False),
        "Trainer, its own": partial(_checkpointed_by_the_trainer, False, True),
        "Trainer, both": partial(_checkpointed_by_the_trainer, True, True),
        "eager": partial(_losses_in_a_loop, False),
        "compiled": partial(_losses_in_a_loop, True),
        "as a whole": _compiled_as_a_whole,
    }
    for found in run_ranks(run_cases, 2, cases, folders["llama"], tmp_path):
        for name in ("Trainer, FSDP's", "Trainer, its own", "Trainer, both"):
            assert found[name][0] == 2, f"{name}: forward, and once more in backward"
            assert apart(found["Trainer, FSDP's"][1], found[name][1]) == 0
        close(torch.tensor(found["compiled"]), torch.tensor(found["eager"]))


# ---- offload, evaluation, generation and callbacks between steps ----


def _evaluate_and_generate(model: Any, batch: dict[str, torch.Tensor]) -> None:
    model.eval()
    with torch.no_grad():
        model(**batch)
    seen: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    _generate(model, batch)
    hook.remove()
    assert seen[1] == 1, "generation keeps its cache, though training has none"
    model.train()


def _generate(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    rank = dist.get_rank()
    return model.generate(batch["input_ids"][:1, : 2 + 3 * rank], max_new_tokens=3 + rank, do_sample=False)


def _steps(busy: bool, offload: bool, folder: Path, out: Path) -> tuple[Any, ...]:
    accelerator = new_accelerator(fsdp_plugin=FSDPPlugin(cpu_offload=offload))
    model = from_pretrained(folder, accelerator=accelerator)
    assert isinstance(sharding_of(model).offload_policy, CPUOffloadPolicy) == offload
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    loader = DataLoader(make_rows(STEPS * 2 * ROWS), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    assert model.config.use_cache is False, "a model that is trained keeps no cache"
    losses = []
    for step, batch in enumerate(loader):
        losses += train(model, optimizer, [batch], accelerator=accelerator, clip=CLIP)
        if busy and step % 4 == 0:
            _evaluate_and_generate(model, batch)
    weights = full_parameters(model)
    accelerator.save_model(model, out)
    reopened = AutoModelForCausalLM.from_pretrained(out).to(local_device())
    assert apart(full_parameters(reopened), weights) == 0
    assert torch.equal(_generate(reopened, batch), _generate(model.eval(), batch))
    return losses, weights


def test_what_reads_a_model_between_steps_changes_nothing(folders, tmp_path):
    losses, _, weights = _by_hand(folders["tied"])
    kinds = {"quiet": (False, False), "busy": (True, False), "busy, offloaded": (True, True)}
    cases = {name: partial(_steps, *kind) for name, kind in kinds.items()}
    for found in run_ranks(run_cases, 2, cases, folders["tied"], tmp_path):
        for name in ("quiet", "busy, offloaded"):
            close(torch.tensor(found[name][0]), torch.tensor(losses))
            assert apart(found[name][1], weights) < 5e-5
        same(found["busy"][0], found["quiet"][0])
        assert apart(found["busy"][1], found["quiet"][1]) == 0


# ---- replicas, and what would train wrongly ----


def _replicas(folder, shards):
    if shards > 1:
        os.environ |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2"
        run, accelerator = _loop(folder), new_accelerator()
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        assert sharding_of(from_pretrained(folder, accelerator=accelerator)).mesh.shape == (2, 2), "Accelerate's plugin"
        return run
    for sizes, message in (
        ({"dp_replicate_size": 2}, r"dp_shard_size 1 shard nothing: each process would hold a whole model"),
        ({"sp_size": 2}, r"sp_size=2: only dp_replicate_size.*Leave sp_size out"),
    ):
        with pytest.raises(ConfigError, match=message):
            new_accelerator(parallelism_config=ParallelismConfig(**sizes, dp_shard_size=1))
    return _loop(folder, mesh=ParallelDims(dp_replicate_size=2).build_mesh(local_device().type))  # replicas alone


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_three_steps_of_hybrid_sharding_equal_one_process(folders, shards):
    losses, _, weights = _by_hand(folders["tied"], ranks=2 * shards)
    for found in run_ranks(_replicas, 2 * shards, folders["tied"], shards):
        close(torch.tensor(found[0]), torch.tensor(losses))
        assert apart(found[2], weights) < 5e-5


def never_loaded(folder: Path) -> None:
    accelerator = new_accelerator()
    meta = build_meta_model(folder)
    optimizer = torch.optim.AdamW(meta.parameters())
    shard_model(meta, make_wrap_plan(meta), mesh=ParallelDims().build_mesh(local_device().type))
    with pytest.raises(ConfigError, match=r"21 parameters of .* are on meta .*never loaded.*load_weights"):
        accelerator.prepare(meta)
    load_weights(meta, folder)
    with pytest.raises(ConfigError, match=r"21 of the 21 parameters of AdamW belong to no prepared model"):
        accelerator.prepare(meta, optimizer)


def a_unit_beside_the_plan(folder: Path) -> None:
    accelerator = new_accelerator()
    model = from_pretrained(folder, accelerator=accelerator)
    mesh = ParallelDims().build_mesh(local_device().type)
    model.add_module("extra", fully_shard(nn.Linear(2, 2, device=local_device()), mesh=mesh))
    units = len(sharding_of(model).plan.units)
    with pytest.raises(ConfigError, match=rf"{units + 1} FSDP units and a plan of {units}.*outside the plan"):
        accelerator.prepare(model)


def layers_taken_out(folder: Path) -> None:
    accelerator = new_accelerator()
    model = from_pretrained(folder, accelerator=accelerator)
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ConfigError, match=r"taken out.*: model\.layers\.1\. Load fewer layers.*num_hidden_layers=N"):
        accelerator.prepare(model)


def sharded_in_part(folder: Path) -> None:
    whole, mesh = AutoModelForCausalLM.from_pretrained(folder), ParallelDims().build_mesh(local_device().type)
    fully_shard(whole.model.layers[0], mesh=mesh)
    with pytest.raises(ConfigError, match=r"sharded already"):
        shard_model(whole, make_wrap_plan(whole), mesh=mesh)


def test_models_that_would_train_wrongly_are_refused_on_every_rank(folders):
    run_ranks(run_cases, 2, [never_loaded, a_unit_beside_the_plan, layers_taken_out, sharded_in_part], folders["llama"])
