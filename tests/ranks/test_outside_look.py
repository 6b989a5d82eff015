"""What an outside look found wrong: each case failed before it was mended."""

import os
import shutil
import sys
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, set_seed

from hf_fsdp_tools import (
    ConfigError,
    HybridPolicy,
    from_pretrained,
    make_accelerator,
    make_wrap_plan,
    save_pretrained,
    shard_model,
)
from tests._checkpoints import make_checkpoint, make_model
from tests._dist import run_cases, run_ranks

IDS = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---- four ranks ----


def added_rows_are_equal_in_all_replicas(folder):
    """Each rank drew the rows of added tokens by its own seed; they are the last 1/64 of the embedding, and less."""
    torch.manual_seed(dist.get_rank())
    accelerator = make_accelerator(cpu=True)
    accelerator.state.fsdp_plugin.policy = HybridPolicy()
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(132, mean_resizing=False)
    mine = model.lm_head.weight.detach()[-1].clone()
    drawn = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(drawn, mine)
    assert not torch.equal(drawn[0], drawn[1])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = accelerator.prepare(model)
    assert any("differ between ranks" in str(w.message) for w in told) == (dist.get_rank() == 0)
    assert torch.equal(_whole(model.lm_head.weight)[-1], drawn[0])


def half_of_the_ranks_can_shard_a_model(folder):
    """Two models on two halves of the ranks, with different plans; and plans that differ within a half."""
    rank = dist.get_rank()
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))
    model = make_model("llama")
    plan = make_wrap_plan(model, policy=HybridPolicy(group_tail=rank < 2))
    shard_model(model, plan, mesh=halves["shard"])
    assert torch.equal(_whole(model.lm_head.weight), make_model("llama").lm_head.weight)
    if rank < 2:  # the others are in no call
        other = make_model("llama")
        with pytest.raises(ConfigError, match=r"plan\.digest is .* on rank 1\. Give the same"):
            shard_model(other, make_wrap_plan(other, policy=HybridPolicy(group_tail=rank == 0)), mesh=halves["shard"])


def _four(folder):
    os.environ |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    os.environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = "2"
    run_cases({
        case.__name__: lambda case=case: case(folder)
        for case in (added_rows_are_equal_in_all_replicas, half_of_the_ranks_can_shard_a_model)
    })  # fmt: skip


def test_what_four_ranks_show(tmp_path):
    run_ranks(_four, 4, make_checkpoint("llama", tmp_path))


# ---- two ranks ----


def a_new_head_follows_the_seed(folder):
    heads = {}
    for seed in (1, 2, 1):
        set_seed(seed)
        before = torch.get_rng_state()
        model = from_pretrained(folder, auto_class=AutoModelForSequenceClassification, num_labels=5)
        assert torch.equal(before, torch.get_rng_state()), "loading draws nothing of the user's"
        head = _whole(model.score.weight).detach()
        assert torch.equal(heads.setdefault(seed, head), head)
    assert not torch.equal(heads[1], heads[2])
    torch.manual_seed(dist.get_rank())  # rank 0's counts
    model = from_pretrained(folder, auto_class=AutoModelForSequenceClassification, num_labels=5)
    seen = [torch.empty(5, 48) for _ in range(2)]
    dist.all_gather(seen, _whole(model.score.weight).detach())
    assert torch.equal(*seen)


def kept_units_stay_gathered_between_tokens(folder):
    """ZeRO-2, as it is asked for to generate: only what is gathered anew in each pass costs."""
    gathered = []

    for reshard in (False, True):
        model = from_pretrained(folder, policy=HybridPolicy(reshard_after_forward={"*": reshard}))
        with torch.no_grad():
            model(IDS)
            units = [module for module in model.modules() if isinstance(module, FSDPModule)]
            gathered.append(sum(not isinstance(p, DTensor) for unit in units for p in unit.parameters()))
    assert gathered[0] > 0 and gathered[1] == 0


def of_units_that_are_kept_only_the_users_stay_gathered(folder):
    """Whatever word the reason begins with; the tail is kept for a backward pass, which does not come."""
    for reason in ("backward begins here", "head of the stack"):

        def first(fqn, module, reason=reason):
            return {"reshard_after_forward": False, "reason": reason} if fqn == "model.layers.0" else None

        model = from_pretrained(folder, policy=HybridPolicy(units=(first,)))
        with torch.no_grad():
            model(IDS)
        gathered = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
        assert gathered and all(name.startswith("model.layers.0.") for name in gathered), (reason, gathered)


CODE = """
from transformers import LlamaForCausalLM
class ToyForCausalLM(LlamaForCausalLM):
    pass
"""


def code_of_the_user_is_saved_with_the_model(folder):
    """The saved folder opens with plain transformers, by the code that came with the checkpoint."""
    config = LlamaConfig.from_pretrained(folder)
    config.auto_map = {"AutoModelForCausalLM": "modeling_toy.ToyForCausalLM"}
    custom = folder.with_name("custom")
    if dist.get_rank() == 0:
        shutil.copytree(folder, custom)
        config.save_pretrained(custom)
        (custom / "modeling_toy.py").write_text(CODE)
    dist.barrier()
    model = from_pretrained(custom, trust_remote_code=True)
    assert type(model).__mro__[2].__name__ == "ToyForCausalLM"
    saved = folder.with_name("saved")
    save_pretrained(model, saved)
    assert (saved / "modeling_toy.py").read_text().strip() == CODE.strip()
    assert not list(saved.glob("_fsdp*.py"))
    sys.modules.pop("transformers_modules", None)
    again = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    assert type(again).__name__ == "ToyForCausalLM"
    assert torch.equal(again.lm_head.weight, _whole(model.lm_head.weight))


CASES = (
    a_new_head_follows_the_seed,
    kept_units_stay_gathered_between_tokens,
    of_units_that_are_kept_only_the_users_stay_gathered,
    code_of_the_user_is_saved_with_the_model,
)


def _two(folder):
    with patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder.with_name("modules"))):
        run_cases({case.__name__: lambda case=case: case(folder) for case in CASES})


def test_what_two_ranks_show(tmp_path):
    run_ranks(_two, 2, make_checkpoint("llama", tmp_path / "model"))
