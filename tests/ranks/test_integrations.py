"""Accelerate and the Trainer train our shards, on CPUs, as one process would train the plain model."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, DistributedType, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer

from hf_fsdp_tools import (
    ConfigError,
    HybridFSDPPlugin,
    build_meta_model,
    from_pretrained,
    make_accelerator,
    make_wrap_plan,
    save_pretrained,
    shard_model,
)
from hf_fsdp_tools.distributed.mesh import ParallelDims, local_device
from hf_fsdp_tools.fsdp1.policy import hybrid_auto_wrap_policy
from hf_fsdp_tools.integrations.model import check_managed
from hf_fsdp_tools.sharding.shard import sharding_of
from tests._checkpoints import make_checkpoint, randomize
from tests._dist import run_cases, run_ranks
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


def test_ten_steps_of_a_loop_equal_one_process(folders):
    ranks, accumulate = 3, 2
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


def a_model_of_another_precision(folder):
    accelerator = make_accelerator(cpu=True, mixed_precision="bf16")
    without = from_pretrained(folder, dtype=torch.float32, mp_policy=MixedPrecisionPolicy())
    with pytest.raises(ConfigError, match=r"computes in bf16.*Pass accelerator="):
        accelerator.prepare(without)


PREPARED = (
    a_model_of_another_precision,
    a_plain_model_with_two_groups,
    a_model_on_meta,
    an_optimizer_with_state_from_its_construction,
    what_was_added_after_sharding,
)


def test_prepare_shards_plain_models_and_refuses_what_would_train_wrongly(folders):
    run_ranks(run_cases, 2, PREPARED, folders["llama"])


def an_accelerator_that_exists():
    Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"exists already.*before anything else"):
        make_accelerator(cpu=True)


def test_an_accelerator_without_fsdp_that_exists_already_is_refused():
    run_ranks(an_accelerator_that_exists, 1)


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
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    assert sharding_of(from_pretrained(folder, accelerator=accelerator)).mesh.shape == (2, 2), "Accelerate's own plugin"
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
    cases = {"plain": partial(_fsdp1, adapted=False), "adapted": partial(_fsdp1, adapted=True)}
    for losses in run_ranks(run_cases, 2, cases, folders["llama"]):
        close(losses["plain"], _plain_losses(folders["llama"], 2, 1))
        assert losses["adapted"][-1] < losses["adapted"][0] - 0.1, "an adapter is no unit"


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


def test_the_trainer_on_shards_equals_the_plain_trainer(folders, tmp_path):
    settings = {"gradient_accumulation_steps": 2}
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


# ---- values on their way into shards ----


def _ids(seed: int) -> torch.Tensor:
    return torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(seed))


def _loss(model: torch.nn.Module, seed: int) -> torch.Tensor:
    ids = _ids(seed).to(local_device())
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _persistent_buffers(folder):
    accelerator = make_accelerator(cpu=local_device().type == "cpu")
    plain = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").to(local_device())
    expected = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    loss = _loss(plain, 0).item()
    biases = [name for name in expected if name.endswith("e_score_correction_bias")]
    assert biases and expected[biases[0]].any()
    for model in (
        accelerator.prepare(plain),
        accelerator.prepare(from_pretrained(folder, accelerator=accelerator, experts_implementation="eager")),
    ):
        for name, buffer in model.named_buffers():
            assert not isinstance(buffer, DTensor) and torch.equal(buffer, expected[name]), name
        assert _loss(model, 0).item() == pytest.approx(loss, rel=1e-5)


class _Traffic(TorchDispatchMode):
    """The bytes that collectives of this rank send or receive."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self.calls = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls += 1
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            self.num_bytes += sum(x.numel() * x.element_size() for x in leaves if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


def _traffic(folder):
    accelerator = make_accelerator(cpu=local_device().type == "cpu")
    with _Traffic() as traffic:
        model = from_pretrained(folder, accelerator=accelerator)
        optimizer = torch.optim.AdamW(model.parameters())
        accelerator.prepare(model, optimizer)
    with _Traffic() as forward:
        _loss(model, 0)
    return (
        traffic.calls,
        traffic.num_bytes,
        forward.num_bytes,
        sum(p.numel() * p.element_size() for p in model.parameters()),
    )


def _ties(folder, out):
    plain = AutoModelForCausalLM.from_pretrained(folder).to(local_device())
    for rank in range(dist.get_world_size()):
        (_loss(plain, rank) / dist.get_world_size()).backward()
    expected = plain.get_input_embeddings().weight.grad
    accelerator = make_accelerator(cpu=local_device().type == "cpu")
    model = from_pretrained(folder, accelerator=accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.backward(_loss(model, dist.get_rank()))
    weight = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is weight
    torch.testing.assert_close(weight.grad.full_tensor(), expected, rtol=1e-4, atol=1e-7)
    optimizer.step()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight is weight
    save_pretrained(model, out)
    reopened = AutoModelForCausalLM.from_pretrained(out)
    assert reopened.get_output_embeddings().weight is reopened.get_input_embeddings().weight
    assert torch.equal(reopened.get_input_embeddings().weight, weight.full_tensor().cpu())


def _rotary(folder):
    accelerator = make_accelerator(cpu=local_device().type == "cpu", mixed_precision="bf16")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    models = [
        accelerator.prepare(from_pretrained(folder, accelerator=accelerator)),
        accelerator.prepare(from_pretrained(folder, accelerator=accelerator, dtype=torch.bfloat16)),
        accelerator.prepare(AutoModelForCausalLM.from_pretrained(folder).to(local_device())),
    ]
    for model in models:
        _loss(model, 0).backward()
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer.cpu(), plain.get_buffer(name)), name
    return [model.model.rotary_emb.inv_freq.cpu() for model in models]


def _shared_states():
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "vocab_size": 131,
             "vocab_size_per_layer_input": 131, "hidden_size_per_layer_input": 8, "max_position_embeddings": 64,
             "sliding_window": 8, "num_kv_shared_layers": 2, "pad_token_id": 0,
             "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
    losses = []
    for sharded in (False, True):
        model = randomize(transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes))).to(local_device())
        model = model.train()
        if sharded:
            mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            mesh = ParallelDims().build_mesh(local_device().type)
            shard_model(model, make_wrap_plan(model), mesh=mesh, mp_policy=mp_policy)
        loss = _loss(model, 0)
        loss.backward()
        losses.append(loss.item())
    return losses


def test_buffers_ties_and_frequencies_come_through_and_nothing_is_broadcast(tmp_path):
    """Complaints 4, 10, 11, 13 and 34."""
    folders = {kind: make_checkpoint(kind, tmp_path / kind) for kind in ("deepseek_v3", "llama", "tied")}
    bf16 = make_checkpoint("llama", tmp_path / "bf16", dtype=torch.bfloat16)
    cases = {
        "buffers": partial(_persistent_buffers, folders["deepseek_v3"]),
        "traffic": partial(_traffic, folders["llama"]),
        "ties": partial(_ties, folders["tied"], tmp_path / "out"),
        "rotary": partial(_rotary, bf16),
        "shared states": _shared_states,
    }
    first, second = run_ranks(run_cases, 2, cases)
    for found in (first, second):
        calls, num_bytes, forward, model_bytes = found["traffic"]
        assert forward > model_bytes, "what travels is seen"
        assert calls == num_bytes == 0, f"{calls} messages of {num_bytes} bytes; agreement takes the store"
        plain, sharded = found["shared states"]
        assert sharded == pytest.approx(plain, rel=1e-2)  # bf16 keeps 8 bits
    for one, other in zip(first["rotary"], second["rotary"], strict=True):
        assert torch.equal(one, other) and one.isfinite().all()
