"""`prepare` under Accelerate: what it shards and refuses, and values that come through it unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM

from hf_fsdp_tools import ConfigError, from_pretrained, make_accelerator
from hf_fsdp_tools.testing import forget_accelerate
from tests._checkpoints import full
from tests._dist import run_cases, run_ranks
from tests.api import check_managed

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


def a_criterion_with_parameters(folder: Path) -> None:
    """ClassyVision#394."""
    rows, target = torch.arange(3, 15)[None] + dist.get_rank(), torch.tensor([dist.get_rank()])
    for is_prepared in (False, True):
        forget_accelerate()
        accelerator = make_accelerator(cpu=True)
        torch.manual_seed(0)
        model: Any = from_pretrained(
            folder, accelerator=accelerator, auto_class=AutoModel, load_kwargs={"progress": False}
        )
        criterion: Any = nn.Linear(model.config.hidden_size, 2)
        optimizer: Any = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        if not is_prepared:
            with pytest.raises(ConfigError, match=r"prepare\(model, criterion, optimizer\)"):
                accelerator.prepare(model, optimizer)
            continue
        plain, head = AutoModel.from_pretrained(folder), nn.Linear(model.config.hidden_size, 2)
        head.load_state_dict(criterion.state_dict())
        model, criterion, optimizer = accelerator.prepare(model, criterion, optimizer)
        accelerator.backward(nn.functional.cross_entropy(criterion(model(rows).last_hidden_state.mean(1)), target))
        both = torch.stack([torch.arange(3, 15), torch.arange(4, 16)])
        hidden = plain(both).last_hidden_state.mean(1)
        nn.functional.cross_entropy(head(hidden), torch.arange(2)).backward()
        torch.testing.assert_close(full(criterion.weight.grad), head.weight.grad)
        name = "layers.0.mlp.up_proj.weight"
        torch.testing.assert_close(full(model.get_parameter(name).grad), plain.get_parameter(name).grad)


PREPARED = (
    a_criterion_with_parameters,
    ranks_with_other_numbers_of_batches,
    a_model_of_another_precision,
    a_plain_model_with_two_groups,
    what_was_added_after_sharding,
    an_accelerator_that_exists,
)


def test_prepare_shards_plain_models_and_refuses_what_would_train_wrongly(folders):
    run_ranks(run_cases, 2, PREPARED, folders["llama"])
