"""What users do in another order than most: each act gives what it gives on one plain model, at any moment."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hf_fsdp_tools import ConfigError, ParallelDims, WrapPolicy, from_pretrained, unsharded
from hf_fsdp_tools.sharding import recompute
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from tests._checkpoints import RELEASE, full, randomize, refusal, tiny_config
from tests._dist import run_cases, run_ranks
from tests._noted import calls_of
from tests._training import apart, full_gradients

CP = {"mesh": ParallelDims(cp_size=2)}


def rows(seed: int = 0) -> dict[str, torch.Tensor]:
    """The same two rows on each rank, so that a mean over ranks is what one process has."""
    ids = torch.randint(9, 60, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def both(folder: Path, **options: Any) -> tuple[Any, Any]:
    """A sharded model and a plain one, in training mode."""
    options = {"mesh": ParallelDims(), "load_kwargs": {"progress": False}, **options}
    return from_pretrained(folder, **options).train(), AutoModelForCausalLM.from_pretrained(folder).train()


def whole_pass(model: Any) -> Any:
    return model(**rows()).loss


def pass_of_the_base(model: Any) -> Any:
    return model.base_model(rows()["input_ids"]).last_hidden_state


def a_head_is_read_between_passes(folders: dict[str, Path]) -> None:
    """As chunked losses read it; what modules register are shards all the time."""
    for options in ({}, {"mp_policy": "bf16"}):
        model, plain = both(folders["llama"], **options)
        for each in (model, plain):
            hidden = pass_of_the_base(each)
            (hidden.float() @ each.lm_head.weight.float().T).square().mean().backward()
        bound = 1e-6 if not options else 2e-3
        assert apart(full_gradients(model), full_gradients(plain)) < bound
        assert {p.dtype for p in model.state_dict().values()} == {torch.float32}


def base_and_head_may_be_called_apart(folders: dict[str, Path]) -> None:
    kept = {"policy": WrapPolicy(reshard_after_forward={"*": False})}
    for options in ({}, kept, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model, plain = both(folders["llama"], **options)
        with torch.no_grad():
            model.lm_head(model.model(rows()["input_ids"]).last_hidden_state)
        assert all(isinstance(each, DTensor) for each in model.parameters())
        for each in (model, plain):
            for seed in range(2):
                words = rows(seed)["input_ids"]
                logits = each.lm_head(each.model(words).last_hidden_state)
                nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten()).backward()
        assert apart(full_gradients(model), full_gradients(plain)) < 1e-5


def a_head_is_read_while_another_loss_waits(folders: dict[str, Path]) -> None:
    """The backward pass of an earlier pass takes nothing from a later one of the base."""
    model, plain = both(folders["llama"], mp_policy="bf16")
    for each in (model, plain):
        loss = whole_pass(each)
        hidden = pass_of_the_base(each)
        loss.backward()
        assert each is plain or each.lm_head.weight.dtype == torch.bfloat16, "still lent"
        (hidden.float() @ each.lm_head.weight.float().T).square().mean().backward()
    assert apart(full_gradients(model), full_gradients(plain)) < 1e-2


def gathered_copies_are_nobody_elses(folders: dict[str, Path]) -> None:
    model, _ = both(folders["llama"])
    kept = whole_pass(model)
    optimizer = torch.optim.AdamW([model.lm_head.weight], lr=1e-2)
    kept.backward()
    assert "1 of the 1 parameters of AdamW are gathered copies" in refusal(optimizer.step, ConfigError)
    mesh = ParallelDims().build_mesh("cpu")
    other = nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    (found,) = torch.autograd.grad((other * other).sum(), other)
    assert full(found).tolist() == [0.0, 2.0, 4.0, 6.0]
    loss = whole_pass(model)
    said = refusal(lambda: torch.autograd.grad(loss, list(model.parameters())), ConfigError)
    assert said.startswith("Gradients are asked for by ")


def hidden_states_are_those_of_whole_rows(folders: dict[str, Path]) -> None:
    for length in (12, 11):
        model, plain = both(folders["llama"], **CP)
        ids = rows()["input_ids"][:, :length]
        for labels in (None, ids):
            found, expected = (m(input_ids=ids, labels=labels, output_hidden_states=True) for m in (model, plain))
            for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
                assert (one - other).abs().max() < 1e-5


def inputs_of_blocks_of_parts_of_rows_are_offloaded(folders: dict[str, Path]) -> None:
    recomputed = {"activation_checkpointing": {"offload": True}}
    with calls_of(recompute.Link, "keep", lambda result, *_: result[0].numel()) as kept:
        model, plain = both(folders["llama"], **CP, **recomputed)
        for each in (model, plain):
            whole_pass(each).backward()
    assert len(kept) == model.config.num_hidden_layers
    assert sorted(kept)[:-1] == [2 * 6 * model.config.hidden_size] * (len(kept) - 1)  # of two rows of 12 words
    assert apart(full_gradients(model), full_gradients(plain)) < 1e-5


def a_copy_of_the_head_is_trained(folders: dict[str, Path]) -> None:
    """Of models whose head is a unit of its own, and of those whose root holds it."""
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights="gaussian")
    for kind in ("llama", "mixtral"):
        torch.manual_seed(0)
        model = from_pretrained(folders[kind], mesh=ParallelDims(tp_size=2), peft_config=config).train()
        plain = get_peft_model(AutoModelForCausalLM.from_pretrained(folders[kind]), config).train()
        for each in (model, plain):
            each(**rows()).loss.backward()
        name = "base_model.model.lm_head.modules_to_save.default.weight"
        found, expected = full_gradients(model)[name], full_gradients(plain)[name]
        assert (found - expected).abs().max() < 1e-5, kind


ONE = (a_head_is_read_while_another_loss_waits, a_head_is_read_between_passes)
TWO = (
    base_and_head_may_be_called_apart, a_head_is_read_between_passes, gathered_copies_are_nobody_elses,
    hidden_states_are_those_of_whole_rows, inputs_of_blocks_of_parts_of_rows_are_offloaded,
    *([a_copy_of_the_head_is_trained] if RELEASE >= (5, 21) else []),  # older ones have no tensor parallelism
)  # fmt: skip


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in ("llama", "mixtral")}
    for kind in made:
        randomize(AutoModelForCausalLM.from_config(tiny_config(kind, 2))).save_pretrained(made[kind])
    return made


@pytest.mark.parametrize(("ranks", "cases"), [(1, ONE), (2, TWO)])
def test_each_act_is_that_of_one_plain_model(ranks: int, cases: Any, even: dict[str, Path]) -> None:
    run_ranks(run_cases, ranks, cases, even)


def draw_by_own_seeds(folder: Path) -> list[torch.Tensor]:
    """What each rank has of a weight that was drawn with a seed of its own, and of noise like it."""
    mesh = ParallelDims(dp_replicate_size=2).build_mesh("cpu")
    model = from_pretrained(folder, mesh=mesh, load_kwargs={"progress": False})
    torch.manual_seed(100 + dist.get_rank())
    nn.init.normal_(model.lm_head.weight)
    return [model.lm_head.weight.to_local().detach(), torch.randn_like(model.lm_head.weight).to_local().detach()]


def test_replicas_draw_alike_with_seeds_of_their_own(folders: dict[str, Path]) -> None:
    ranks = run_ranks(draw_by_own_seeds, 4, folders["llama"])
    for one, other in ((0, 2), (1, 3)):
        assert all(map(torch.equal, ranks[one], ranks[other]))
    assert not torch.equal(ranks[0][0], ranks[1][0][: len(ranks[0][0])])


def use_caches() -> tuple[list[bool], int]:
    """`use_cache` of a model's configs while it is trained compiled, and how often a block's compiled code ran."""
    calls = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        return graph.forward

    model: Any = AutoModelForImageTextToText.from_config(tiny_config("llava"))
    model = shard_model(model, make_wrap_plan(model), compile={"backend": backend}).train()
    model(input_ids=rows()["input_ids"][:, :8])
    configs = (model.config, model.config.get_text_config())
    return [bool(getattr(config, "use_cache", False)) for config in configs], calls


def test_blocks_of_a_nested_config_are_compiled() -> None:
    ((caches, calls),) = run_ranks(use_caches, 1)
    assert caches == [False, False] and calls > 0


# ---- texts generated on shards ----

PROMPTS = torch.arange(3, 23).reshape(4, 5)
GREEDY = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}


def gathers_counted() -> Any:
    """Notes each unit that is gathered from other ranks in a block."""
    return calls_of(_fsdp_param_group, "foreach_all_gather")


def gathers_of_one_pass(model: Any) -> int:
    with gathers_counted() as gathers, torch.no_grad():
        model(input_ids=PROMPTS)
    return len(gathers)


def is_sharded(model: torch.nn.Module) -> bool:
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return all(isinstance(parameter, DTensor) for unit in units for parameter in unit.parameters())


def mine(made: torch.Tensor) -> torch.Tensor:
    return made.split(2)[dist.get_rank()]


def unlike_lengths(plain: Any) -> dict[str, Any]:
    """Options with which all rows of rank 0 end by a token that no row of rank 1 has in so few."""
    made = plain.generate(PROMPTS, **GREEDY)[:, PROMPTS.shape[1] :]
    for length in range(1, made.shape[1]):
        for token in set(made[0, :length].tolist()) & set(made[1, :length].tolist()):
            if not (made[2:] == token).any():
                return {**GREEDY, "eos_token_id": token}
    raise AssertionError(f"these greedy texts cannot end at other lengths: {made.tolist()}")


def a_rank_whose_rows_end_early_keeps_no_other_waiting(folder: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    asked = unlike_lengths(plain)
    model: Any = from_pretrained(folder)
    passes: dict[bool, int] = {}
    for gathered in (True, False):
        run: list[None] = []
        hook = model.register_forward_hook(lambda *_, run=run: run.append(None))
        with unsharded(model, gathered):
            made = model.generate(input_ids=mine(PROMPTS), **asked)
        hook.remove()
        assert torch.equal(made, plain.generate(mine(PROMPTS), **asked)) and is_sharded(model)
        passes[gathered] = len(run)
    length = made.shape[1] - PROMPTS.shape[1]
    assert length < 7 if dist.get_rank() == 0 else length == 7
    assert passes == {True: length, False: 7}, "unit by unit, all ranks go on until the last has finished"


def one_rank_generates_alone_while_weights_are_gathered(folder: Path) -> None:
    model: Any = from_pretrained(folder)
    with gathers_counted() as gathers, unsharded(model):
        if dist.get_rank() == 0:
            for length in (1, 3):
                assert model.generate(PROMPTS[:1], **{**GREEDY, "max_new_tokens": length}).shape == (1, 5 + length)
        with pytest.raises(ValueError, match="nonsense"):
            model.generate(PROMPTS, nonsense=1)
        assert model.generate(PROMPTS, **GREEDY).shape == (4, 12)
    assert is_sharded(model) and len(gathers) == gathers_of_one_pass(model)
    with unsharded(model):
        model.state_dict()  # which shards the units, as a save does
        assert model.generate(PROMPTS[: dist.get_rank() + 1], **GREEDY).shape[0] == dist.get_rank() + 1


def test_generation_on_shards(folders):
    cases = (a_rank_whose_rows_end_early_keeps_no_other_waiting, one_rank_generates_alone_while_weights_are_gathered)
    run_ranks(run_cases, 2, cases, folders["llama"])
