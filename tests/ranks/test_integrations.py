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
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_fsdp_tools import (
    ConfigError,
    FSDPTrainerMixin,
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
from tests._dist import run_ranks

STEPS = 10
# Sharded and plain runs add the same numbers in another order; over ten AdamW steps that grows to about 1e-5
# (measured).
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def _rows(count: int) -> list[dict]:
    ids = torch.randint(3, 9, (count, 12), generator=torch.Generator().manual_seed(2))  # six words are soon learned
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(kind, folder / kind) for kind in ("llama", "tied", "qwen2_moe")}


# ---- a plain loop ----


def _plain_losses(folder: Path, ranks: int, accumulate: int) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in DataLoader(_rows(STEPS * ranks * accumulate * 2), batch_size=ranks * accumulate * 2):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _sharded_losses(folders, accumulate):
    losses = {}
    accelerator = make_accelerator(gradient_accumulation_steps=accumulate, cpu=True)
    assert accelerator.distributed_type == DistributedType.FSDP
    for folder in folders:
        model = from_pretrained(folder, accelerator=accelerator, experts_implementation="eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ranks = dist.get_world_size()
        # every rank takes its part of the plain run's batch, micro-batch after micro-batch
        rows = _rows(STEPS * ranks * accumulate * 2)
        loader = DataLoader(rows, batch_size=2)
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
        losses[str(folder)] = means
    return losses


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (2, 2), (3, 1)])
def test_ten_steps_of_a_loop_equal_one_process(checkpoints, ranks, accumulate):
    folders = list(checkpoints.values())
    results = run_ranks(_sharded_losses, ranks, folders, accumulate)
    for folder in folders:
        expected = _plain_losses(folder, ranks, accumulate)
        assert expected[-1] < expected[0] - 0.05, "the run learns, so a wrong gradient would show"
        for losses in results:
            close(losses[str(folder)], expected)


# ---- prepare ----


def _prepare(folder):
    accelerator = make_accelerator(cpu=True)
    # a plain model and its optimizer, made before sharding, with two groups
    model = AutoModelForCausalLM.from_pretrained(folder)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in model.parameters())
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(decay), len(rest)]
    # the same model again, and alone, is fine
    assert accelerator.prepare(model) is model
    with pytest.raises(ConfigError, match=r"on meta.*from_pretrained"):
        accelerator.prepare(build_meta_model(folder))
    stray = torch.optim.SGD(AutoModelForCausalLM.from_pretrained(folder).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"21 of the 21 parameters of SGD belong to no prepared model"):
        accelerator.prepare(model, stray)
    used = AutoModelForCausalLM.from_pretrained(folder)
    adagrad = torch.optim.Adagrad(used.parameters())
    accelerator.prepare(used, adagrad)
    assert all(isinstance(adagrad.state[p]["sum"], DTensor) for p in used.parameters())
    with pytest.raises(ConfigError, match=r"device_placement"):
        accelerator.prepare(model, device_placement=[True])
    model = from_pretrained(folder, accelerator=accelerator)
    model.add_module("adapter", torch.nn.Linear(2, 2))
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, late)
    assert all(isinstance(p, DTensor) for p in model.parameters()), "what was added after sharding is sharded too"
    assert {id(p) for p in late.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    model.add_module("later", torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"not sharded.*later\.weight"):
        check_managed(model)


def test_prepare_shards_plain_models_and_refuses_what_would_train_wrongly(checkpoints):
    run_ranks(_prepare, 2, checkpoints["llama"])


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
    loss = model(**{k: v[None] for k, v in _rows(1)[0].items()}).loss
    loss.backward()
    assert seen == [torch.bfloat16] and {p.grad.dtype for p in model.parameters()} == {torch.float32}
    without = from_pretrained(folder, dtype=torch.float32, mp_policy=MixedPrecisionPolicy())
    with pytest.raises(ConfigError, match=r"computes in bf16.*Pass accelerator="):
        accelerator.prepare(without)


def test_mixed_precision_has_fp32_masters_and_reduces_in_fp32(tmp_path):
    run_ranks(_mixed_precision, 2, make_checkpoint("llama", tmp_path, dtype=torch.bfloat16))


def _settings_from_launch():
    classes = {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaMLP, LlamaAttention"}
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"} | classes
    assert HybridFSDPPlugin().policy.block_types == ("LlamaMLP", "LlamaAttention")
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "2000"}
    assert HybridFSDPPlugin().policy.min_unit_params == 2000
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    assert HybridFSDPPlugin().policy.reshard_after_forward == {"*": False}
    assert isinstance(HybridFSDPPlugin(cpu_offload=True).cpu_offload, CPUOffloadPolicy)
    os.environ |= {
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }
    with pytest.raises(
        ConfigError, match=r"HYBRID_SHARD.*stops averaging.*dp_replicate_size; .*FULL_STATE_DICT crashes"
    ):
        HybridFSDPPlugin()
    os.environ |= {"FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    assert HybridFSDPPlugin().fsdp_version == 1
    del os.environ["FSDP_VERSION"]
    Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"exists already.*before anything else"):
        make_accelerator(cpu=True)


def test_what_accelerate_launch_sets_is_translated_or_refused():
    run_ranks(_settings_from_launch, 1)


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
        return [each(**{k: v[None] for k, v in _rows(1)[0].items()}).loss.item() for each in (model, plain)]


def test_hsdp_from_accelerates_parallelism_config(checkpoints):
    plain = AutoModelForCausalLM.from_pretrained(checkpoints["llama"])
    expected = plain(**{k: v[None] for k, v in _rows(1)[0].items()}).loss.item()
    for losses in run_ranks(_hybrid, 4, checkpoints["llama"]):
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
    batch = {k: v[None] for k, v in _rows(2)[dist.get_rank()].items()}
    losses = []
    for _ in range(8):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


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
    losses = []
    for batch in accelerator.prepare(DataLoader(_rows(STEPS * 4), batch_size=2)):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def test_fsdp1_through_accelerate_has_the_plans_units_and_equals_one_process(checkpoints):
    for losses in run_ranks(_fsdp1, 2, checkpoints["llama"], False):
        close(losses, _plain_losses(checkpoints["llama"], 2, 1))


def test_fsdp1_through_accelerate_makes_no_unit_of_an_adapter(checkpoints):
    for losses in run_ranks(_fsdp1, 2, checkpoints["llama"], True):
        assert losses[-1] < losses[0] - 0.1


def _is_mlp(fqn, module):
    return fqn.endswith("layers.0.mlp")


POLICIES = {
    "types": HybridPolicy(block_types=("LlamaMLP",)),
    "size": HybridPolicy(min_unit_params=1000),
    "predicate": HybridPolicy(units=(_is_mlp,)),
}


def _every_policy(folder, version, name):
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
    batch = {key: value[None] for key, value in _rows(1)[0].items()}
    accelerator.backward(model(**batch).loss)
    return sorted(expected)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_every_kind_of_policy_reaches_both_versions(checkpoints, version, name):
    (units,) = run_ranks(_every_policy, 1, checkpoints["llama"], version, name)
    assert any(unit.endswith("layers.0.mlp") for unit in units) == (name != "size")
    assert len(units) > 3


# ---- the Trainer ----


class ShardedTrainer(FSDPTrainerMixin, Trainer):
    pass


def _arguments(folder: Path, **settings) -> TrainingArguments:
    defaults = {
        "max_steps": STEPS, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_grad_norm": 0.5,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**defaults, **settings})


def _history(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _train(source, folder, settings):
    args = _arguments(folder, **settings)
    accelerator = make_accelerator(cpu=True, mixed_precision=args.mixed_precision)
    model = from_pretrained(source, accelerator=accelerator)
    units = len(sharding_of(model).plan.units)
    rows = _rows(80)
    trainer = ShardedTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    assert len({m._get_fsdp_state() for m in trainer.model.modules() if isinstance(m, FSDPModule)}) == units
    reopened = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), reopened.get_parameter(name)), name
    trainer.model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=3, do_sample=False)
    return before, after, _history(trainer)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_on_shards_equals_the_plain_trainer(checkpoints, tmp_path, accumulate):
    settings = {"gradient_accumulation_steps": accumulate}
    results = run_ranks(_train, 2, checkpoints["tied"], tmp_path / "out", settings | {"per_device_train_batch_size": 2})
    args = _arguments(tmp_path / "plain", per_device_train_batch_size=4, **settings)
    rows = _rows(80)
    model = AutoModelForCausalLM.from_pretrained(checkpoints["tied"])
    plain = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8])
    before = plain.evaluate()["eval_loss"]
    plain.train()
    after = plain.evaluate()["eval_loss"]
    for result in results:
        close(result[0], before)
        close(result[1], after, rtol=1e-3, atol=1e-3)
        close(torch.tensor(result[2]), torch.tensor(_history(plain)), rtol=1e-3, atol=1e-3)
    assert (tmp_path / "out" / "training_args.bin").is_file()


ALONE = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainingArguments
from hf_fsdp_tools import FSDPTrainerMixin, from_pretrained, make_accelerator

class ShardedTrainer(FSDPTrainerMixin, Trainer):
    pass

source, folder, route = sys.argv[1:]
args = TrainingArguments(output_dir=folder, max_steps=2, report_to="none", save_strategy="no", disable_tqdm=True)
if route == "sharded":
    model = from_pretrained(source, accelerator=make_accelerator())
else:
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(source)
row = torch.arange(3, 15)
trainer = ShardedTrainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row}] * 8)
trainer.train()
trainer.save_model()
step = trainer.state.global_step
print("RESULT", dist.get_world_size(), args.world_size, isinstance(trainer.model, FSDPModule), step)
"""


@pytest.mark.parametrize("route", ["sharded", "plain"])
def test_a_script_that_nobody_launched_runs_in_a_world_of_one(checkpoints, tmp_path, route):
    (tmp_path / "alone.py").write_text(ALONE)
    command = [sys.executable, str(tmp_path / "alone.py"), str(checkpoints["llama"]), str(tmp_path / "out"), route]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert "RESULT 1 1 True 2" in done.stdout, done.stderr[-3000:]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
