"""Accelerate and the Trainer train our shards, on CPUs, as one process would train the plain model."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, ParallelismConfig
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer

from hf_fsdp_tools import (
    ConfigError,
    HybridFSDPPlugin,
    HybridPolicy,
    build_meta_model,
    from_pretrained,
    make_accelerator,
    make_wrap_plan,
    sharding_of,
)
from hf_fsdp_tools.fsdp1.policy import hybrid_auto_wrap_policy
from hf_fsdp_tools.integrations.model import check_managed
from tests._checkpoints import make_checkpoint
from tests._dist import LIMIT_S, run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, batches_of, logged, make_rows, num_units, train

STEPS = 10
# Sharded and plain runs add the same numbers in another order; over ten AdamW steps that grows to about 1e-5
# (measured).
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


# ---- a plain loop ----


def _plain_losses(folder: Path, ranks: int, accumulate: int) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").train()
    size = ranks * accumulate * 2
    batches = batches_of(make_rows(STEPS * size), size)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches, clip=0.5)


def _sharded_losses(folder, accumulate):
    accelerator = make_accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    assert accelerator.distributed_type == DistributedType.FSDP
    model = from_pretrained(folder, accelerator=accelerator, experts_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # every rank takes its part of the plain run's batch, micro-batch after micro-batch
    loader = DataLoader(make_rows(STEPS * dist.get_world_size() * accumulate * 2), batch_size=2)
    before = [id(p) for p in optimizer.param_groups[0]["params"]]
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == before, "each parameter is still itself"
    means, pending = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            pending.append(loss.detach())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                means.append(accelerator.reduce(torch.stack(pending).mean(), "mean").item())
                pending = []
            optimizer.step()
            optimizer.zero_grad()
    return means


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 2), (3, 1)])
def test_ten_steps_of_a_loop_equal_one_process(folders, ranks, accumulate):
    cases = {kind: partial(_sharded_losses, folders[kind]) for kind in ("llama", "tied", "qwen2_moe")}
    results = run_ranks(run_cases, ranks, cases, accumulate)
    for kind in cases:
        expected = _plain_losses(folders[kind], ranks, accumulate)
        assert expected[-1] < expected[0] - 0.05, "the run learns, so a wrong gradient would show"
        for losses in results:
            close(losses[kind], expected)


# ---- prepare ----


def a_plain_model_with_two_groups(folder):
    """Its optimizer was made before sharding."""
    accelerator = make_accelerator(cpu=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in model.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(decay), len(rest)]
    assert accelerator.prepare(model) is model, "the same model again, and alone, is fine"
    stray = torch.optim.SGD(AutoModelForCausalLM.from_pretrained(folder).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"21 of the 21 parameters of SGD belong to no prepared model"):
        accelerator.prepare(model, stray)
    with pytest.raises(ConfigError, match=r"device_placement"):
        accelerator.prepare(model, device_placement=[True])


def a_model_on_meta(folder):
    with pytest.raises(ConfigError, match=r"on meta.*from_pretrained"):
        make_accelerator(cpu=True).prepare(build_meta_model(folder))


def an_optimizer_with_state_from_its_construction(folder):
    used = AutoModelForCausalLM.from_pretrained(folder)
    adagrad = torch.optim.Adagrad(used.parameters())
    make_accelerator(cpu=True).prepare(used, adagrad)
    assert all(isinstance(adagrad.state[p]["sum"], DTensor) for p in used.parameters())


def what_was_added_after_sharding(folder):
    accelerator = make_accelerator(cpu=True)
    model = from_pretrained(folder, accelerator=accelerator)
    model.add_module("adapter", torch.nn.Linear(2, 2))
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, late)
    assert all(isinstance(p, DTensor) for p in model.parameters()), "it is sharded too"
    assert {id(p) for p in late.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    model.add_module("later", torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"not sharded.*later\.weight"):
        check_managed(model)


PREPARED = (
    a_plain_model_with_two_groups,
    a_model_on_meta,
    an_optimizer_with_state_from_its_construction,
    what_was_added_after_sharding,
)


def test_prepare_shards_plain_models_and_refuses_what_would_train_wrongly(folders):
    run_ranks(run_cases, 2, PREPARED, folders["llama"])


def _mixed_precision(folder):
    accelerator = make_accelerator(cpu=True, mixed_precision="bf16")
    model = from_pretrained(folder, accelerator=accelerator)
    policy = sharding_of(model).mp_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "master weights"
    pure = from_pretrained(folder, accelerator=accelerator, dtype=torch.bfloat16)
    assert {p.dtype for p in pure.parameters()} == {torch.bfloat16}, "an explicit dtype wins"
    plain = AutoModelForCausalLM.from_pretrained(folder)
    accelerator.prepare(model, plain)
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    seen = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    loss = model(**{k: v[None] for k, v in make_rows(1)[0].items()}).loss
    loss.backward()
    assert seen == [torch.bfloat16] and {p.grad.dtype for p in model.parameters()} == {torch.float32}
    without = from_pretrained(folder, dtype=torch.float32, mp_policy=MixedPrecisionPolicy())
    with pytest.raises(ConfigError, match=r"computes in bf16.*Pass accelerator="):
        accelerator.prepare(without)


def test_mixed_precision_has_fp32_masters_and_reduces_in_fp32(tmp_path):
    run_ranks(_mixed_precision, 2, make_checkpoint("llama", tmp_path, dtype=torch.bfloat16))


def policies():
    classes = {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaMLP, LlamaAttention"}
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"} | classes
    assert HybridFSDPPlugin().policy.block_types == ("LlamaMLP", "LlamaAttention")
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "2000"}
    assert HybridFSDPPlugin().policy.min_unit_params == 2000
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    assert HybridFSDPPlugin().policy.reshard_after_forward == {"*": False}
    assert isinstance(HybridFSDPPlugin(cpu_offload=True).cpu_offload, CPUOffloadPolicy)


def fsdp1():
    os.environ |= {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}
    os.environ |= {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    said = r"HYBRID_SHARD.*stops averaging.*dp_replicate_size\.\n.*FULL_STATE_DICT crashes"
    with pytest.raises(ConfigError, match=said):
        HybridFSDPPlugin()
    os.environ |= {"FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    assert HybridFSDPPlugin().fsdp_version == 1


def an_accelerator_that_exists():
    Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"exists already.*before anything else"):
        make_accelerator(cpu=True)


def test_what_accelerate_launch_sets_is_translated_or_refused():
    run_ranks(run_cases, 1, [policies, fsdp1, an_accelerator_that_exists])


def _hybrid(folder):
    os.environ |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}
    os.environ |= {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    accelerator = make_accelerator(cpu=True)
    model = from_pretrained(folder, accelerator=accelerator)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    model, plain = accelerator.prepare(model, plain)
    for each in (model, plain):
        assert sharding_of(each).mesh.shape == (2, 2)
        assert sharding_of(each).mesh.mesh_dim_names[0] == "dp_replicate"
    with torch.no_grad():
        return [each(**{k: v[None] for k, v in make_rows(1)[0].items()}).loss.item() for each in (model, plain)]


def test_hsdp_from_accelerates_parallelism_config(folders):
    plain = AutoModelForCausalLM.from_pretrained(folders["llama"])
    expected = plain(**{k: v[None] for k, v in make_rows(1)[0].items()}).loss.item()
    for losses in run_ranks(_hybrid, 4, folders["llama"]):
        close(losses, [expected, expected])


def _other_axes():
    with pytest.raises(ConfigError, match=r"tp_size=2: only dp_replicate_size.*Leave the others out"):
        make_accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=1))


def test_parallelism_that_is_not_supported_is_refused():
    run_ranks(_other_axes, 2)


def _lora(folder):
    accelerator = make_accelerator(cpu=True, mixed_precision="bf16")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trainable, lr=1e-2))
    units = sharding_of(model).plan.units
    assert [u.modules for u in units if u.modules[0].endswith("layers.1")], "PEFT's own policy leaves no layer its unit"
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert dtypes == {(False, torch.bfloat16), (True, torch.float32)}
    batch = {k: v[None] for k, v in make_rows(2)[dist.get_rank()].items()}
    return train(model, optimizer, [batch] * 8, accelerator=accelerator, clip=1.0)


def test_a_lora_model_keeps_a_unit_per_layer_and_learns(tmp_path):
    for losses in run_ranks(_lora, 2, make_checkpoint("llama", tmp_path, dtype=torch.bfloat16)):
        assert losses[-1] < losses[0] - 0.3


def _fsdp1(folder, adapted):
    plugin = HybridFSDPPlugin(fsdp_version=1, use_orig_params=True)
    accelerator = make_accelerator(cpu=True, fsdp_plugin=plugin)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    if adapted:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    expected = hybrid_auto_wrap_policy(model).units
    model = accelerator.prepare(model)
    wrapped = {name for name, module in model.named_modules() if isinstance(module, FullyShardedDataParallel)}
    assert {name.replace("_fsdp_wrapped_module.", "").removesuffix("_fsdp_wrapped_module") for name in wrapped} == {
        "",
        *expected,
    }
    optimizer = accelerator.prepare(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    loader = accelerator.prepare(DataLoader(make_rows(STEPS * 4), batch_size=2))
    return train(model, optimizer, loader, accelerator=accelerator, clip=0.5)


def test_fsdp1_through_accelerate_has_the_plans_units_and_equals_one_process(folders):
    for losses in run_ranks(_fsdp1, 2, folders["llama"], False):
        close(losses, _plain_losses(folders["llama"], 2, 1))


def test_fsdp1_through_accelerate_makes_no_unit_of_an_adapter(folders):
    for losses in run_ranks(_fsdp1, 2, folders["llama"], True):
        assert losses[-1] < losses[0] - 0.1


def _is_mlp(fqn, module):
    return fqn.endswith("layers.0.mlp")


POLICIES = {
    "types": HybridPolicy(block_types=("LlamaMLP",)),
    "size": HybridPolicy(min_unit_params=1000),
    "predicate": HybridPolicy(units=(_is_mlp,)),
}


def _every_policy(name, folder, version):
    plugin = HybridFSDPPlugin(
        fsdp_version=version, policy=POLICIES[name], use_orig_params=True if version == 1 else None
    )
    accelerator = make_accelerator(cpu=True, fsdp_plugin=plugin)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = {name for unit in make_wrap_plan(model, policy=POLICIES[name]).units for name in unit.modules}
    if version == 1:
        expected = {"", *hybrid_auto_wrap_policy(model, policy=POLICIES[name]).units}
    kind = FSDPModule if version == 2 else FullyShardedDataParallel
    model = accelerator.prepare(model)
    wrapped = {name for name, module in model.named_modules() if isinstance(module, kind)}
    assert {re.sub(r"_fsdp_wrapped_module\.?", "", name).rstrip(".") for name in wrapped} == expected
    batch = {key: value[None] for key, value in make_rows(1)[0].items()}
    accelerator.backward(model(**batch).loss)
    assert any(unit.endswith("layers.0.mlp") for unit in expected) == (name != "size")
    assert len(expected) > 3


@pytest.mark.parametrize("version", [1, 2])
def test_every_kind_of_policy_reaches_both_versions(folders, version):
    run_ranks(run_cases, 1, {name: partial(_every_policy, name) for name in POLICIES}, folders["llama"], version)


# ---- the Trainer ----


def _train(source, folder, settings):
    args = arguments(folder, **settings)
    accelerator = make_accelerator(cpu=True, mixed_precision=args.mixed_precision)
    model = from_pretrained(source, accelerator=accelerator)
    units = len(sharding_of(model).plan.units)
    rows = make_rows(80)
    trainer = ShardedTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    assert num_units(trainer.model) == units
    reopened = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), reopened.get_parameter(name)), name
    trainer.model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=3, do_sample=False)
    return before, after, logged(trainer)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_on_shards_equals_the_plain_trainer(folders, tmp_path, accumulate):
    settings = {"gradient_accumulation_steps": accumulate}
    results = run_ranks(_train, 2, folders["tied"], tmp_path / "out", settings)
    args = arguments(tmp_path / "plain", per_device_train_batch_size=4, **settings)
    rows = make_rows(80)
    model = AutoModelForCausalLM.from_pretrained(folders["tied"])
    plain = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8])
    before = plain.evaluate()["eval_loss"]
    plain.train()
    after = plain.evaluate()["eval_loss"]
    for result in results:
        close(result[0], before)
        close(result[1], after, rtol=1e-3, atol=1e-3)
        close(torch.tensor(result[2]), torch.tensor(logged(plain)), rtol=1e-3, atol=1e-3)
    assert (tmp_path / "out" / "training_args.bin").is_file()


ALONE = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainingArguments
from hf_fsdp_tools import FSDPTrainerMixin, from_pretrained, make_accelerator

class ShardedTrainer(FSDPTrainerMixin, Trainer):
    pass

source, folder = sys.argv[1:]
args = TrainingArguments(output_dir=folder, max_steps=2, report_to="none", save_strategy="no", disable_tqdm=True)
model = from_pretrained(source, accelerator=make_accelerator())
row = torch.arange(3, 15)
trainer = ShardedTrainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row}] * 8)
trainer.train()
trainer.save_model()
step = trainer.state.global_step
print("RESULT", dist.get_world_size(), args.world_size, isinstance(trainer.model, FSDPModule), step)
"""


def test_a_script_that_nobody_launched_runs_in_a_world_of_one(folders, tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    command = [sys.executable, str(tmp_path / "alone.py"), str(folders["llama"]), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "RESULT 1 1 True 2" in done.stdout, done.stderr[-3000:]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
