"""One value says which ranks share rows and layers: model, loader, Trainer and the names of a mesh agree with it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh

from hf_fsdp_tools import (
    ConfigError,
    ParallelDims,
    ParameterEMA,
    from_pretrained,
    resize_token_embeddings,
)
from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.errors import MeshError
from tests._checkpoints import refusal
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, make_rows, new_accelerator
from tests.ranks.test_parallel import folder_of

TP = ParallelDims(tp_size=2)
QUIET = {"load_kwargs": {"progress": False}}


def a_loader_that_does_not_know_of_it(parent: Path) -> None:
    """The two ranks of a layer would add their partial products of different rows, without a word."""
    folder = folder_of("llama", parent)
    accelerator = new_accelerator()
    for layout in ({"mesh": TP}, {"distributed_config": {"tp_size": 2}}):
        model = from_pretrained(folder, accelerator=accelerator, **layout, **QUIET)
        said = refusal(lambda model=model: accelerator.prepare(model, torch.optim.SGD(model.parameters())))
        assert "sharded with tp_size 2, so that 2 neighbouring process(es) need the same rows" in said
        assert "gives the same rows to 1" in said and "\n" not in said
    trainer = ShardedTrainer(model=model, args=arguments(parent / "out", max_steps=1), train_dataset=make_rows(8))
    assert "need the same rows" in refusal(trainer.train)


def a_loop_of_ones_own(parent: Path) -> None:
    model = from_pretrained(folder_of("llama", parent), mesh=TP, **QUIET).train()
    rows = torch.arange(3, 15)[None] + dist.get_rank()
    with pytest.raises(ConfigError, match=r"2 ranks that share layers \(tp_size\) have different rows"):
        model(input_ids=rows, labels=rows)


def rules_beside_a_mesh(parent: Path) -> None:
    folder, names = folder_of("llama", parent), ("q_proj", "k_proj", "v_proj", "o_proj")
    rules = {"tp_plan": {f"model.layers.*.self_attn.{name}": "replicate" for name in names}}
    shared = new_accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    for given in ({"mesh": TP}, {"accelerator": shared}):
        model = from_pretrained(folder, distributed_config=rules, **given, **QUIET)
        block = model.model.layers[0]
        assert block.mlp.up_proj.weight.to_local().shape[0] * 2 == block.mlp.up_proj.weight.shape[0]
        assert block.self_attn.q_proj.weight.device_mesh.size() == 1, "whole on both ranks, by the rule"
    said = refusal(lambda: from_pretrained(folder, mesh=TP, distributed_config={"tp_size": 2, **rules}, **QUIET))
    assert "distributed_config gives tp_size, and mesh another layout" in said


def axes_by_their_names(parent: Path) -> None:
    folder = folder_of("llama", parent)
    for names in (("dp_shard", "ep"), ("data", "model"), ("dp_shard", "dp_replicate")):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        with pytest.raises(MeshError, match="does not say what each is for"):
            from_pretrained(folder, mesh=mesh, **QUIET)
    model = from_pretrained(folder, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp")), **QUIET)
    assert model.lm_head.weight.to_local().shape[0] * 2 == model.lm_head.weight.shape[0]


class OnesOwnError(ConfigError):
    """Of a user's code."""


def an_error_of_a_class_of_ones_own(parent: Path) -> None:
    with pytest.raises(ConfigError, match="rank 1: the sentence"), agreed("trying"):
        if dist.get_rank() == 1:
            raise OnesOwnError("the sentence")


def averages_of_what_was_resized(parent: Path) -> None:
    model = from_pretrained(folder_of("llama", parent), **QUIET)
    averages = ParameterEMA(model)
    averages.step()
    resize_token_embeddings(model, 140)
    with pytest.raises(ConfigError, match=r"embed_tokens.weight.* of the averages are no parameters of Llama.*any more"):
        averages.step()


def test_all_agree_on_who_shares_rows(tmp_path: Path) -> None:
    cases = [
        a_loader_that_does_not_know_of_it, a_loop_of_ones_own, rules_beside_a_mesh, axes_by_their_names,
        an_error_of_a_class_of_ones_own, averages_of_what_was_resized,
    ]  # fmt: skip
    run_ranks(run_cases, 2, cases, tmp_path)
