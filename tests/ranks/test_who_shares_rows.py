"""One value says which ranks share rows and layers: model, loader, Trainer and the names of a mesh agree with it."""

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import ParallelismConfig
from torch.distributed.device_mesh import init_device_mesh

from hf_fsdp_tools import (
    ParallelDims,
    ParameterEMA,
    clip_grad_norm_,
    from_pretrained,
    save_pretrained,
)
from hf_fsdp_tools.errors import MeshError
from tests._checkpoints import full, refusal
from tests._dist import named, run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, make_rows, new_accelerator
from tests.api import all_ranks
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


def draws_of_ranks_that_share_layers(parent: Path) -> None:
    """Each rank has a seed of its own: dropout and samples are those of the first rank of a group on all."""
    folder, ids = folder_of("llama", parent), torch.arange(3, 15)[None]
    model = from_pretrained(folder, mesh=TP, attention_dropout=0.5, **QUIET).train()
    torch.manual_seed(dist.get_rank())
    model(input_ids=ids, labels=ids).loss.backward()
    norm = model.model.norm.weight.grad.to_local()  # whole on both ranks, which have computed it apart
    assert len({str(each) for each in all_ranks(norm.tolist())}) == 1
    torch.manual_seed(dist.get_rank())
    texts = [model.eval().generate(ids, max_new_tokens=8, do_sample=True) for _ in range(2)]
    assert len({str(each) for each in all_ranks(texts[0].tolist())}) == 1 and not torch.equal(*texts)
    said = refusal(lambda: model(input_ids=ids + dist.get_rank(), labels=ids))
    assert "2 ranks that share layers (tp_size) have different rows" in said
    for dims in (TP, ParallelDims(cp_size=2)):
        model = from_pretrained(folder, mesh=dims, **QUIET)
        assert "have different rows" in refusal(lambda m=model: m.generate(ids + dist.get_rank(), max_new_tokens=2))


def weights_that_have_drifted_apart(parent: Path) -> None:
    model = from_pretrained(folder_of("llama", parent), mesh=TP, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_pretrained(model, parent / "alike")
    if dist.get_rank() == 1:
        model.model.norm.weight.data.add_(1e-3)
    said = pytest.warns(UserWarning, match=r"1 weights .* differ: .*model\.norm\.weight")
    with said if dist.get_rank() == 0 else nullcontext():
        save_pretrained(model, parent / "drifted")


def trainers_that_count_completions(parent: Path) -> None:
    new_accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model = from_pretrained(folder_of("llama", parent), mesh=TP, **QUIET)
    options = {"parallelism_config": ParallelismConfig(tp_size=2), "fsdp": True}
    trainer = ShardedTrainer(model=model, args=arguments(parent / "grpo", **options), train_dataset=make_rows(8))
    trainer._calculate_rewards = None  # as GRPOTrainer and RLOOTrainer have it
    assert "counts the completions of each process for itself" in refusal(trainer.train)


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


SHARED = {"cp": {"cp_size": 2}, "tp": {"tp_size": 2}}


def rates_and_rows_of_a_loop(sizes: dict[str, int], parent: Path) -> None:
    """The scheduler ends with the loader, each row is a metric's once, and the norm is that of the Accelerator."""
    accelerator = new_accelerator(parallelism_config=ParallelismConfig(**sizes))
    model = from_pretrained(folder_of("llama", parent), accelerator=accelerator, **QUIET).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
    loader = torch.utils.data.DataLoader(range(7), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert len(loader) == 4
    rates, seen, named = [], [], []
    for batch in loader:
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        seen += accelerator.gather_for_metrics(batch).tolist()
        named += accelerator.gather_for_metrics([f"row {row}" for row in batch.tolist()])
    assert rates == [1.0, 0.75, 0.5, 0.25]
    assert seen == [*range(7)] and named == [f"row {row}" for row in range(7)]
    ids = torch.arange(3, 15)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1e9)
    assert norm > 0 and torch.equal(norm, accelerator.clip_grad_norm_(model.parameters(), 1e9))


def averages_by_dcp(parent: Path) -> None:
    """Fused gates, which a layer's ranks hold in two ranges, are written in one layout and read in the other."""
    folder = folder_of("qwen3_moe", parent)
    models = {name: from_pretrained(folder, mesh=dims, **QUIET) for name, dims in (("one", None), ("two", TP))}
    for written, read in (("one", "two"), ("two", "one")):
        source, target = ParameterEMA(models[written]), ParameterEMA(models[read])
        for average in target._averages.values():
            average.zero_()
        dcp.save({"ema": source}, checkpoint_id=parent / written)
        dcp.load({"ema": target}, checkpoint_id=parent / written)
        expected = source.state_dict()
        for name, average in target.state_dict().items():
            assert torch.equal(full(average), full(expected[name])), (written, name)


def test_all_agree_on_who_shares_rows(tmp_path: Path) -> None:
    cases = named(
        a_loader_that_does_not_know_of_it, draws_of_ranks_that_share_layers, weights_that_have_drifted_apart,
        trainers_that_count_completions, rules_beside_a_mesh, axes_by_their_names, averages_by_dcp,
    )  # fmt: skip
    cases |= {f"loop, {name}": partial(rates_and_rows_of_a_loop, sizes) for name, sizes in SHARED.items()}
    run_ranks(run_cases, 2, cases, tmp_path)
