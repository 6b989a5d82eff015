"""Training under Accelerate and the Trainer gives the numbers of one process: in every precision, however a batch is
split."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import ConfigError, FSDPPlugin, ParallelDims, WrapPolicy, from_pretrained
from hf_fsdp_tools.steps import build_meta_model, load_weights, make_wrap_plan, shard_model
from tests._dist import run_cases, run_ranks
from tests._noted import calls_of
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
    num_units,
    train,
)
from tests.api import ShardedScaler, local_device, sharding_of

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


def _both_hosts(mixed: str, dtype: torch.dtype | None, folder: Path, out: Path) -> Any:
    model = from_pretrained(folder, accelerator=new_accelerator(mixed_precision=mixed), dtype=dtype)
    args = in_order(out, bf16=mixed == "bf16")
    trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(STEPS * dist.get_world_size() * ROWS))
    trainer.train()
    return _loop(folder, mixed, dtype), (logged(trainer), full_parameters(trainer.model))


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
        accelerator.scaler, accelerator.native_amp = ShardedScaler("cpu"), True  # what Accelerate has on GPUs
    model = from_pretrained(folder, accelerator=accelerator, policy=WrapPolicy(replicate=("model.norm",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    part = slice(dist.get_rank() * ROWS, (dist.get_rank() + 1) * ROWS)
    batches = [{k: v[part] for k, v in batch.items()} for batch in batches_of(make_rows(STEPS * 2 * ROWS), 2 * ROWS)]
    losses = train(model, optimizer, batches, accelerator=accelerator, clip=CLIP)
    assert not optimizer.step_was_skipped and accelerator.scaler.get_scale() == 2.0**16
    # one shard on one rank alone overflows, and no whole parameter: all skip the step, and all scale less
    before = full_parameters(model)
    model(**batches[-1]).loss.backward()
    if dist.get_rank() == 0:
        model.lm_head.weight.grad.to_local()[0, 0] = float("inf")
    accelerator.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    assert optimizer.step_was_skipped and accelerator.scaler.get_scale() == 2.0**15
    assert apart(full_parameters(model), before) == 0
    return losses


def test_fp16_scales_the_loss_where_a_scaler_is_and_is_refused_where_none_is(folders):
    alone = with_rounding(lambda: _by_hand(folders["llama"], torch.float32, torch.float16, scale=2.0**16)[0])
    for found in run_ranks(run_cases, 2, [fp16_without_a_scaler, fp16_with_a_scaler], folders["llama"]):
        assert_near(found["fp16 with a scaler"], *alone)


# ---- accumulation ----


def _split_by_the_trainer(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    args = in_order(
        out, max_steps=1, max_grad_norm=0, optim="sgd", learning_rate=1.0, weight_decay=0.0,
        per_device_train_batch_size=1, gradient_accumulation_steps=4,
    )  # fmt: skip
    model = from_pretrained(folder, accelerator=new_accelerator())
    trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(8, ragged=True))
    trainer.train()
    return full_parameters(trainer.model)


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


def _accumulated(reshard: bool, folder: Path, out: Path) -> tuple[int, Any]:
    """Two steps of two micro-batches each in a loop: gathers of each unit, losses, and weights."""
    plugin = FSDPPlugin(policy=WrapPolicy(group_tail=False, reshard_after_forward={"*": reshard}))
    accelerator = new_accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=plugin)
    model = from_pretrained(folder, accelerator=accelerator).train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    with calls_of(_fsdp_param_group, "foreach_all_gather") as gathers:
        for batch in batches_of(make_rows(4 * ROWS), ROWS):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return len(gathers) // num_units(model), losses, full_parameters(model)


ACCUMULATED: dict[str, Any] = {
    "kept": partial(_accumulated, False),
    "resharded": partial(_accumulated, True),
    "default": partial(_between_micro_batches, {"gradient_accumulation_steps": 2}),
    "asked": partial(_between_micro_batches, {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)}),
    "split by the Trainer": _split_by_the_trainer,
}


def test_gradients_are_accumulated_as_on_one_process(folders, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(folders["llama"]).train()
    start = full_parameters(plain)
    plain(**batches_of(make_rows(8, ragged=True), 8)[0]).loss.backward()
    for found in run_ranks(run_cases, 2, ACCUMULATED, folders["llama"], tmp_path):
        for key, parameter in plain.named_parameters():
            # a step of 1 by SGD is the gradient, rounded at the size of the weight
            step = start[key] - found["split by the Trainer"][key]
            torch.testing.assert_close(step, parameter.grad, rtol=1e-4, atol=2e-7, msg=f"Trainer {key}")
        (kept, *ours), (resharded, *others) = found["kept"], found["resharded"]
        assert (kept, resharded) == (2, 8), "kept units are gathered once in a step"
        assert ours[0] == others[0] and apart(ours[1], others[1]) == 0
        # Averaged twice and added in fp32, or added in fp32 and averaged once.
        torch.testing.assert_close(found["default"][2], found["asked"][2], rtol=1e-5, atol=1e-7)
        assert found["asked"][0] == (sum(whole.numel() for whole in start.values()), 0), "each rank keeps all, asked"
        assert found["default"][0][0] == found["default"][1][0] == found["asked"][1][0] == 0, "else none is kept whole"


# ---- compilation ----


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
    prompt = batches_of(make_rows(1), 1)[0]["input_ids"][:, : 3 + dist.get_rank()]
    model.eval().generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "layers share it, and generation has none"
    with pytest.raises(ConfigError, match=r"compiled as a whole.*dynamo_backend"):
        accelerator.prepare(torch.compile(AutoModelForCausalLM.from_pretrained(folder)))
    return losses


def test_blocks_are_compiled_in_place(folders, tmp_path):
    cases = {"eager": partial(_losses_in_a_loop, False), "compiled": partial(_losses_in_a_loop, True)}
    for found in run_ranks(run_cases, 2, cases, folders["llama"], tmp_path):
        close(torch.tensor(found["compiled"]), torch.tensor(found["eager"]))


# ---- what would train wrongly ----


def models_and_layouts(folder: Path) -> None:
    for sizes, message in (
        ({"dp_replicate_size": 2}, r"dp_shard_size 1 shard nothing"),
        ({"sp_size": 2}, r"sp_size=2: only dp_replicate_size.*Leave sp_size out"),
    ):
        with pytest.raises(ConfigError, match=message):
            new_accelerator(parallelism_config=ParallelismConfig(**sizes, dp_shard_size=1))
    accelerator = new_accelerator()
    meta = build_meta_model(folder)
    optimizer = torch.optim.AdamW(meta.parameters())
    shard_model(meta, make_wrap_plan(meta), mesh=ParallelDims().build_mesh(local_device().type))
    with pytest.raises(ConfigError, match=r"21 parameters of .* are on meta .*never loaded.*load_weights"):
        accelerator.prepare(meta)
    load_weights(meta, folder)
    with pytest.raises(ConfigError, match=r"21 of the 21 parameters of AdamW belong to no prepared model"):
        accelerator.prepare(meta, optimizer)
    accelerator = new_accelerator()
    model = from_pretrained(folder, accelerator=accelerator)
    mesh = ParallelDims().build_mesh(local_device().type)
    model.add_module("extra", fully_shard(nn.Linear(2, 2, device=local_device()), mesh=mesh))
    units = len(sharding_of(model).plan.units)
    with pytest.raises(ConfigError, match=rf"{units + 1} FSDP units and a plan of {units}.*outside the plan"):
        accelerator.prepare(model)
    model = from_pretrained(folder, accelerator=accelerator)
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ConfigError, match=r"taken out.*: model\.layers\.1\. Load fewer layers.*num_hidden_layers=N"):
        accelerator.prepare(model)
    whole, mesh = AutoModelForCausalLM.from_pretrained(folder), ParallelDims().build_mesh(local_device().type)
    fully_shard(whole.model.layers[0], mesh=mesh)
    with pytest.raises(ConfigError, match=r"sharded already"):
        shard_model(whole, make_wrap_plan(whole), mesh=mesh)


def test_models_that_would_train_wrongly_are_refused_on_every_rank(folders):
    run_ranks(models_and_layouts, 2, folders["llama"])
