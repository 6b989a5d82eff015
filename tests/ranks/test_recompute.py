"""Which blocks compute their activations again, what they keep and where: values are a plain run's, to the bit."""

from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

from hf_fsdp_tools import ConfigError, ParallelDims, describe_sharding, from_pretrained
from hf_fsdp_tools.sharding import recompute
from hf_fsdp_tools.steps import make_wrap_plan, parallelize_model, shard_model
from tests._checkpoints import assert_same_tensors, refusal, tiny_config
from tests._dist import run_cases, run_ranks
from tests._noted import Operators, calls_of
from tests._training import (
    ShardedTrainer,
    apart,
    arguments,
    full_gradients,
    full_parameters,
    logged,
    make_rows,
    train,
)
from tests.api import patched

LAYERS, WIDTH, ROWS, STEPS = 4, 32, 2, 2
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES |= {"num_hidden_layers": LAYERS, "vocab_size": 98}

WAYS: dict[str, Any] = {
    "every second": {"every_n_layers": 2},
    "every third, offloaded": {"every_n_layers": 3, "offload": True},
    "products kept": {"save_ops": ["matmul", "attention"]},
    "products kept, offloaded": {"save_ops": "aten::mm", "offload": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": "bf16"},
    "LoRA": {"peft_config": {"r": 4, "target_modules": ["q_proj", "up_proj"]}},
    "compiled": {"compile": "aot_eager"},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = hf.LlamaConfig(**SIZES, tie_word_embeddings=False)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("recompute") / "llama"
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def rows_of_rank(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    ids = torch.randint(3, 90, (ROWS, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def runs_of_blocks(model: nn.Module) -> Counter[int]:
    runs: Counter[int] = Counter()
    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    for index, attention in enumerate(layers):
        attention.register_forward_pre_hook(lambda *_, index=index: runs.update([index]))
    return runs


def load(folder: Path, way: Any, **options: Any) -> Any:
    return from_pretrained(folder, activation_checkpointing=way, load_kwargs={"progress": False}, **options).train()


def same_as_plain(name: str, way: str, folder: Path, **options: Any) -> None:
    found = []
    for each in (False, WAYS[way]):
        torch.manual_seed(0)
        model = load(folder, each, **OPTIONS[name], **options)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        found.append((train(model, optimizer, map(rows_of_rank, range(STEPS))), full_parameters(model)))
    (losses, weights), (own, own_weights) = found
    assert own == losses and apart(own_weights, weights) == 0


EVERY = [*product(OPTIONS, WAYS)]
FAST = [("fp32", "every third, offloaded"), ("bf16", "products kept"), ("LoRA", "every second")]


@pytest.mark.parametrize("combinations", [FAST, pytest.param(EVERY, marks=pytest.mark.nightly)], ids=["fast", "every"])
def test_values_are_those_of_a_plain_run(llama, combinations):
    run_ranks(run_cases, 2, {", ".join(each): partial(same_as_plain, *each) for each in combinations}, llama)


def kept_where_they_are_written_to(*_: Any) -> None:
    """The experts of gpt-oss add to a product in place; FSDP2 runs operators of its own around experts of one shard."""
    for kind, dims in (("gpt_oss", ParallelDims()), ("glm4_moe", ParallelDims(ep_size=2))):
        found, ids = [], torch.arange(6, 24).view(2, 9)
        for way in (False, WAYS["products kept"]):
            torch.manual_seed(0)
            model = hf.AutoModelForCausalLM.from_config(tiny_config(kind, 2))
            mesh = dims.build_mesh("cpu")
            if dims.ep_size > 1:
                parallelize_model(model, mesh)
            shard_model(model.train(), make_wrap_plan(model), mesh=mesh, activation_checkpointing=way)
            with Operators(lambda func, *_: func.overloadpacket in PRODUCTS) as products:
                model(input_ids=ids, labels=ids).loss.backward()
            found.append((products.sum, full_gradients(model)))
        (count, gradients), (own_count, own) = found
        assert_same_tensors(own, gradients, kind)
        assert own_count == count, kind


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
COUNTS = {  # inputs that are kept on the host, and one in how many blocks is computed again
    "every second": (0, 2),
    "every third, offloaded": (2, 3),
    "products kept": (0, 1),
    "products kept, offloaded": (LAYERS, 1),
}


def blocks_run_again_and_bytes_on_the_host_are_counted(folder: Path, out: Path) -> None:
    found = {}
    for name, way in {"plain": False, **WAYS}.items():
        kept = calls_of(recompute.Link, "keep", lambda result, *_: result[0].nbytes)
        model = load(folder, way)
        runs = runs_of_blocks(model)
        with kept as sizes, Operators(lambda func, *_: func.overloadpacket in PRODUCTS) as products:
            model(**rows_of_rank(0)).loss.backward()
        found[name] = runs, sizes, products.sum
        if name == "every third, offloaded":
            said = "recomputed block by block (every 3rd block of each stack), the blocks' inputs on the host"
            assert said in describe_sharding(model)
    assert found["plain"][:2] == (dict.fromkeys(range(LAYERS), 1), [])
    of_block = 4 + 3  # queries, keys, values and output; gate, up and down
    for name, (kept, step) in COUNTS.items():
        runs, sizes, count = found[name]
        assert runs == {index: 1 + (index % step == 0) for index in range(LAYERS)}, name
        assert sizes == [ROWS * 16 * WIDTH * 4] * kept, name
        # the last product of a block is not needed again: torch stops before it
        expected = 0 if "kept" in name else len(range(0, LAYERS, step)) * (of_block - 1)
        assert count - found["plain"][2] == expected, name


def acts_where_ranks_share(dims: ParallelDims, options: dict[str, Any], folder: Path) -> None:
    """Each way runs the blocks again that it says, keeps on the host what it says, and changes no number."""
    group = dist.get_rank() // dims.ranks_per_row
    ids = torch.randint(3, 90, (ROWS, 16), generator=torch.Generator().manual_seed(group))
    found = {}
    for name, way in {"plain": False, **WAYS}.items():
        torch.manual_seed(0)
        model = load(folder, way, mesh=dims.build_mesh("cpu"), **options)
        runs, kept = runs_of_blocks(model), calls_of(recompute.Link, "keep", lambda result, *_: result[0].nbytes)
        with kept as sizes:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        found[name] = loss.detach(), full_gradients(model)
        for index, step in ((index, COUNTS.get(name, (0, 0))[1]) for index in range(LAYERS)):
            assert runs[index] == 1 + (step > 0 and index % step == 0), (name, runs)
        assert sizes == [ROWS * 16 // dims.cp_size * WIDTH * 4] * COUNTS.get(name, (0, 0))[0], (name, sizes)
        allowed = (
            {"rtol": 1e-5, "atol": 1e-7} if options else {"rtol": 0, "atol": 0}
        )  # compiled graphs add in other orders
        torch.testing.assert_close(
            found[name], found["plain"], **allowed, msg=lambda text, name=name: f"{name}: {text}"
        )


SHARED = {  # by the number of ranks
    2: [ParallelDims(cp_size=2), ParallelDims(tp_size=2), ParallelDims(ep_size=2)],
    4: [ParallelDims(cp_size=2, tp_size=2), ParallelDims(cp_size=2, ep_size=4), ParallelDims(tp_size=2, ep_size=4)],
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_way_acts_where_ranks_share_rows_layers_or_experts(llama, tmp_path, ranks):
    torch.manual_seed(0)
    hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **EXPERTS)).save_pretrained(tmp_path)
    cases = {}
    for dims in SHARED[ranks]:
        for name, options in {"eager": {}, "compiled": OPTIONS["compiled"]}.items():
            folder = llama if dims.ep_size == 1 else tmp_path
            if name == "eager" or dims.ep_size == 1:
                cases[f"{dims}, {name}"] = partial(acts_where_ranks_share, dims, options, folder)
    run_ranks(run_cases, ranks, cases)


def a_host_without_memory_is_one_error_on_every_rank(folder: Path, out: Path) -> None:
    """Where one of them alone sees too little; before a block has run."""
    model = load(folder, {"offload": True})
    needed = 2 * LAYERS * ROWS * 16 * WIDTH * 4
    with patched(available_bytes=lambda: needed if dist.get_rank() else 10 * needed):
        runs = runs_of_blocks(model)
        with torch.no_grad():
            model(**rows_of_rank(0))
        runs.clear()
        said = refusal(lambda: model(**rows_of_rank(0)), ConfigError)
    assert "32.8 kB of host memory for the 2 ranks on" in said and "where 32.8 kB are available. Take a smaller" in said
    assert not runs
    for way, said in (
        ({"every_n_layers": "2"}, "whole number"),
        ({"save_ops": ["mmm"]}, "no operator 'mmm'"),
        ({"offload": bool(dist.get_rank())}, "activation_checkpointing"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(folder, way)


def the_same_experts_are_chosen_again(folder: Path, out: Path) -> None:
    """In bf16, where the numbers of two experts are often the same, and in one layer those of all."""
    for way in ("every second", "products kept, offloaded"):
        torch.manual_seed(0)
        plain = hf.AutoModelForCausalLM.from_config(tiny_config("mixtral"))
        plan, options = make_wrap_plan(plain), {"mp_policy": "bf16", "activation_checkpointing": WAYS[way]}
        model: Any = shard_model(plain, plan, **options).train()
        chosen: dict[nn.Module, list[torch.Tensor]] = {block.mlp.gate: [] for block in model.model.layers}
        next(iter(chosen)).weight.data.zero_()
        for router, of_passes in chosen.items():
            router.register_forward_hook(lambda _, __, output, of_passes=of_passes: of_passes.append(output[2]))
        model(**rows_of_rank(0)).loss.backward()
        for first, *again in chosen.values():
            assert all(torch.equal(first, each) for each in again)


def a_trainer_trains_as_without(folder: Path, out: Path) -> None:
    """In bf16: a Trainer of `fsdp_config`, plain and with all three settings; twice is once."""
    prefix = "activation_checkpointing"
    more = {prefix: True, f"{prefix}_offload": True, f"{prefix}_every_n_layers": 2, f"{prefix}_save_ops": "matmul"}
    found = []
    for settings in ({}, more):
        own = {"fsdp": True, "fsdp_config": {"version": 2, **settings}, "gradient_checkpointing": bool(settings)}
        args = arguments(out, max_steps=STEPS, bf16=True, **own)
        model = hf.AutoModelForCausalLM.from_pretrained(folder)
        runs = runs_of_blocks(model)
        trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(2 * STEPS * ROWS))
        trainer.train()
        found.append((logged(trainer), full_parameters(trainer.model), runs))
    (losses, weights, plain), (own, own_weights, again) = found
    assert own == losses and apart(own_weights, weights) == 0
    assert plain == dict.fromkeys(range(LAYERS), STEPS)
    assert again == {index: STEPS * (1 + (index % 2 == 0)) for index in range(LAYERS)}


CASES = (
    blocks_run_again_and_bytes_on_the_host_are_counted, a_host_without_memory_is_one_error_on_every_rank,
    kept_where_they_are_written_to, a_trainer_trains_as_without, the_same_experts_are_chosen_again,
)  # fmt: skip


def test_what_blocks_keep_and_run_again(llama, tmp_path):
    run_ranks(run_cases, 2, CASES, llama, tmp_path)
