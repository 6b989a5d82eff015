"""`prepare` under Accelerate: what it shards and refuses, and values that come through it unchanged."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import ConfigError, ParallelDims, from_pretrained, make_accelerator
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from tests._checkpoints import make_checkpoint, randomize
from tests._dist import run_cases, run_ranks
from tests._rounding import assert_within
from tests.api import check_managed, local_device

# ---- prepare ----


def a_plain_model_with_two_groups(folder):
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
    with pytest.raises(ConfigError, match=r"device_placement"):
        accelerator.prepare(model, device_placement=[True])


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


def an_accelerator_that_exists(folder):
    Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"exists already.*before anything else"):
        make_accelerator(cpu=True)


def ranks_with_other_numbers_of_batches(folder):
    with pytest.raises(ConfigError, match="join_uneven_inputs is for DDP"):
        make_accelerator(cpu=True).join_uneven_inputs([from_pretrained(folder)])


PREPARED = (
    ranks_with_other_numbers_of_batches,
    a_model_of_another_precision,
    a_plain_model_with_two_groups,
    what_was_added_after_sharding,
    an_accelerator_that_exists,
)


def test_prepare_shards_plain_models_and_refuses_what_would_train_wrongly(folders):
    run_ranks(run_cases, 2, PREPARED, folders["llama"])


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
    plain, model = (
        randomize(transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes))).to(local_device()).train()
        for _ in range(2)
    )
    mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = ParallelDims().build_mesh(local_device().type)
    shard_model(model, make_wrap_plan(model), mesh=mesh, mp_policy=mp_policy)
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()
    loss = _loss(model, 0)
    loss.backward()
    assert_within(loss.item(), lambda: _loss(plain, 0).item())


def test_buffers_and_frequencies_come_through_and_nothing_is_broadcast(tmp_path):
    folders = {kind: make_checkpoint(kind, tmp_path / kind) for kind in ("deepseek_v3", "llama")}
    bf16 = make_checkpoint("llama", tmp_path / "bf16", dtype=torch.bfloat16)
    cases = {
        "buffers": partial(_persistent_buffers, folders["deepseek_v3"]),
        "traffic": partial(_traffic, folders["llama"]),
        "rotary": partial(_rotary, bf16),
        "shared states": _shared_states,
    }
    first, second = run_ranks(run_cases, 2, cases)
    for found in (first, second):
        calls, num_bytes, forward, model_bytes = found["traffic"]
        assert forward > model_bytes, "what travels is seen"
        assert calls == num_bytes == 0, f"{calls} messages of {num_bytes} bytes; agreement takes the store"
    for one, other in zip(first["rotary"], second["rotary"], strict=True):
        assert torch.equal(one, other) and one.isfinite().all()
