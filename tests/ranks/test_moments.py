"""What users do in another order than most: each act gives what it gives on one plain model, at any moment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import CheckpointError, ConfigError, ParallelDims, WrapPolicy, from_pretrained, save_pretrained
from hf_fsdp_tools.testing import run_ranks
from tests._checkpoints import KINDS, RELEASE, full, randomize, refusal, tiny_config
from tests._dist import named, run_cases
from tests._training import apart, full_gradients, full_parameters

KEPT = {"policy": WrapPolicy(reshard_after_forward={"*": False})}
LAYOUTS: dict[str, dict[str, Any]] = {
    "usual": {"mesh": ParallelDims()},
    "kept": {"mesh": ParallelDims(), **KEPT},
    "post-forward mesh": {"mesh": ParallelDims(), "policy": WrapPolicy(reshard_after_forward={"*": 2})},
    "rows": {"mesh": ParallelDims(cp_size=2)},
    "layers": {"mesh": ParallelDims(tp_size=2)},
    "offload": {"mesh": ParallelDims(), "offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


if RELEASE < (5, 21):  # which have no tensor parallelism
    del LAYOUTS["layers"]


def rows(seed: int = 0) -> dict[str, torch.Tensor]:
    """The same two rows on each rank, so that a mean over ranks is what one process has."""
    ids = torch.randint(9, 60, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def both(folder: Path, **options: Any) -> tuple[Any, Any]:
    """A sharded model and a plain one, in training mode."""
    options = {"mesh": ParallelDims(), "load_kwargs": {"progress": False}, **options}
    return from_pretrained(folder, **options).train(), AutoModelForCausalLM.from_pretrained(folder).train()


def stepped(model: Any, optimizer: Any, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        loss = model(**rows(seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- an optimizer that is made late, and changes in place ----


def whole_pass(model: Any) -> Any:
    return model(**rows()).loss


def pass_of_the_base(model: Any) -> Any:
    return model.base_model(rows()["input_ids"]).last_hidden_state


@torch.no_grad()
def evaluation(model: Any) -> Any:
    return model(**rows()).loss


LOOKS: tuple[Callable[[Any], Any], ...] = (whole_pass, pass_of_the_base, evaluation)


def an_optimizer_may_be_made_after_any_pass(folders: dict[str, Path]) -> None:
    cases = [("llama", name, look) for name in LAYOUTS for look in LOOKS] + [("tied", "usual", look) for look in LOOKS]
    for kind, name, look in cases:
        if dist.get_world_size() == 1 and name in ("rows", "layers", "post-forward mesh"):
            continue
        model, plain = both(folders[kind], **LAYOUTS[name])
        kept = look(model)  # what it returns, and with it the graph, lives on
        assert dist.get_world_size() == 1 or all(isinstance(each, DTensor) for each in model.parameters())
        found, expected = (
            stepped(each, torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3), range(2)) for each in (model, plain)
        )
        assert found == pytest.approx(expected, rel=1e-5), (kind, name, look.__name__)
        assert apart(full_parameters(model), full_parameters(plain)) < 2e-4, (kind, name, look.__name__)
        del kept


def what_is_changed_between_passes_is_computed_with(folders: dict[str, Path]) -> None:
    for name in ("usual", "kept"):
        model, plain = both(folders["llama"], **LAYOUTS[name])
        for each in (model, plain):
            whole_pass(each)
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(0.9)
            whole_pass(each)
            for parameter in each.parameters():
                parameter.data.mul_(0.9)
            each.requires_grad_(False)
            each.lm_head.requires_grad_(True)
        assert whole_pass(model).item() == pytest.approx(whole_pass(plain).item(), rel=1e-5)
        assert apart(full_parameters(model), full_parameters(plain)) < 1e-6
        for each in (model, plain):
            whole_pass(each).backward()
        assert full_gradients(model).keys() == full_gradients(plain).keys() == {"lm_head.weight"}
        assert apart(full_gradients(model), full_gradients(plain)) < 1e-5


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
    for name in ("usual", "kept", "offload"):
        model, plain = both(folders["llama"], **LAYOUTS[name])
        with torch.no_grad():
            model.lm_head(model.model(rows()["input_ids"]).last_hidden_state)
        assert all(isinstance(each, DTensor) for each in model.parameters())
        for each in (model, plain):
            for seed in range(2):
                words = rows(seed)["input_ids"]
                logits = each.lm_head(each.model(words).last_hidden_state)
                nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten()).backward()
        assert apart(full_gradients(model), full_gradients(plain)) < 1e-5
        found, expected = (
            stepped(each, torch.optim.SGD(each.parameters(), lr=0.1), range(2)) for each in (model, plain)
        )
        assert found == pytest.approx(expected, rel=1e-5)


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


def an_optimizer_of_gathered_copies_is_refused(folders: dict[str, Path]) -> None:
    model, _ = both(folders["llama"])
    kept = whole_pass(model)
    optimizer = torch.optim.AdamW([model.lm_head.weight], lr=1e-2)
    kept.backward()
    assert "1 of the 1 parameters of AdamW are gathered copies" in refusal(optimizer.step, ConfigError)


# ---- one rank ----


def after_a_pass_of_the_base_weights_are_what_they_were(folders: dict[str, Path]) -> None:
    for kind in ("llama", "tied"):
        for act in ACTS:
            model, plain = both(folders[kind], mp_policy="bf16")
            hidden = pass_of_the_base(model)
            assert {p.dtype for p in model.state_dict().values()} == {torch.float32}
            assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in model.parameters())
            act(model, folders)
            act(plain, folders)
            assert apart(full_parameters(model), full_parameters(plain)) == 0.0, act
            assert {n for n, p in model.named_parameters() if p.requires_grad} == {
                n for n, p in plain.named_parameters() if p.requires_grad
            }
            whole_pass(model)
            assert hidden.requires_grad


@torch.no_grad()
def halve(model: Any, folders: dict[str, Path]) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def freeze(model: Any, folders: dict[str, Path]) -> None:
    model.requires_grad_(False)


def make_optimizer(model: Any, folders: dict[str, Path]) -> None:
    torch.optim.AdamW(model.parameters())


def save(model: Any, folders: dict[str, Path]) -> None:
    save_pretrained(model, folders["out"])
    saved = AutoModelForCausalLM.from_pretrained(folders["out"])
    assert apart(full_parameters(saved), full_parameters(model)) == 0.0


ACTS = (halve, freeze, make_optimizer, save)


# ---- parameters that are frozen when the model is sharded ----


class Scaled(nn.Module):
    """A head of which logits are scaled by a number, as CLIP's."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head, self.scale = head, nn.Parameter(torch.tensor(1.0))

    @property
    def weight(self) -> Any:
        return self.head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden) * self.scale


def what_is_unfrozen_later_is_averaged(folders: dict[str, Path]) -> None:
    from hf_fsdp_tools.steps import make_wrap_plan, shard_model

    models = []
    for is_sharded in (True, False):
        model = AutoModelForCausalLM.from_pretrained(folders["llama"]).train()
        model.lm_head = Scaled(model.lm_head)  # type: ignore[assignment]
        model.requires_grad_(False)
        if is_sharded:
            model = shard_model(model, make_wrap_plan(model))
        model.requires_grad_(True)
        models.append(model)
    own, rank = rows(dist.get_rank()), dist.get_rank()
    models[0](**own).loss.backward()
    for seed in range(dist.get_world_size()):
        (models[1](**rows(seed)).loss / dist.get_world_size()).backward()
    assert apart(full_gradients(models[0]), full_gradients(models[1])) < 1e-5, rank


# ---- states, saves and doors ----


def a_state_is_read_before_the_first_pass(folders: dict[str, Path]) -> None:
    """As `torch.distributed.checkpoint` documents it: a fresh model and optimizer, and their state."""
    for options in LAYOUTS["offload"], {**LAYOUTS["offload"], "mp_policy": "bf16"}, LAYOUTS["usual"]:
        model, _ = both(folders["llama"], **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        stepped(model, optimizer, range(2))
        state = tree_map_only(torch.Tensor, torch.clone, get_state_dict(model, optimizer))
        again, _ = both(folders["llama"], **options)
        fresh = torch.optim.AdamW(again.parameters(), lr=1e-2)
        get_state_dict(again, fresh)
        set_state_dict(again, fresh, model_state_dict=state[0], optim_state_dict=state[1])
        assert stepped(again, fresh, range(2, 4)) == stepped(model, optimizer, range(2, 4))


def gradients_of_others_may_be_asked_for(folders: dict[str, Path]) -> None:
    model, _ = both(folders["llama"])
    mesh = ParallelDims().build_mesh("cpu")
    other = nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    (found,) = torch.autograd.grad((other * other).sum(), other)
    assert full(found).tolist() == [0.0, 2.0, 4.0, 6.0]
    loss = whole_pass(model)
    said = refusal(lambda: torch.autograd.grad(loss, list(model.parameters())), ConfigError)
    assert said.startswith("Gradients are asked for by ")


def a_save_that_wrote_too_little_is_an_error(folders: dict[str, Path]) -> None:
    from tests.api import Layout

    model, _ = both(folders["llama"])
    with patch.object(Layout, "num_bytes", property(lambda self: 1)):
        assert "of 1 bytes" in refusal(lambda: save_pretrained(model, folders["out"] / "short"), CheckpointError)
    assert not (folders["out"] / "short" / "config.json").exists()


# ---- ranks that share rows or layers ----


def hidden_states_are_those_of_whole_rows(folders: dict[str, Path]) -> None:
    for length in (12, 11):
        model, plain = both(folders["llama"], **LAYOUTS["rows"])
        ids = rows()["input_ids"][:, :length]
        for labels in (None, ids):
            found, expected = (m(input_ids=ids, labels=labels, output_hidden_states=True) for m in (model, plain))
            for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
                assert (one - other).abs().max() < 1e-5


def inputs_of_blocks_of_parts_of_rows_are_offloaded(folders: dict[str, Path]) -> None:
    from hf_fsdp_tools.sharding import recompute

    recomputed = {"activation_checkpointing": {"offload": True}}
    with kept_on_host(recompute) as kept:
        model, plain = both(folders["llama"], **LAYOUTS["rows"], **recomputed)
        for each in (model, plain):
            whole_pass(each).backward()
    assert len(kept) == model.config.num_hidden_layers
    assert sorted(each.shape[1] for each in kept)[:-1] == [6] * (len(kept) - 1)  # of 12 words
    assert apart(full_gradients(model), full_gradients(plain)) < 1e-5


@contextmanager
def kept_on_host(recompute: Any) -> Iterator[list[torch.Tensor]]:
    """The hidden states that go to host memory meanwhile."""
    kept: list[torch.Tensor] = []
    make = recompute._Kept.__init__

    def noted(self: Any, tensor: torch.Tensor, *args: Any) -> None:
        kept.append(tensor)
        make(self, tensor, *args)

    with patch.object(recompute._Kept, "__init__", noted):
        yield kept


def a_copy_of_the_head_is_trained(folders: dict[str, Path]) -> None:
    """Of models whose head is a unit of its own, and of those whose root holds it."""
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights="gaussian")
    for kind in ("llama", "mixtral"):
        torch.manual_seed(0)
        model = from_pretrained(folders[kind], **LAYOUTS["layers"], peft_config=config).train()
        plain = get_peft_model(AutoModelForCausalLM.from_pretrained(folders[kind]), config).train()
        for each in (model, plain):
            each(**rows()).loss.backward()
        name = "base_model.model.lm_head.modules_to_save.default.weight"
        found, expected = full_gradients(model)[name], full_gradients(plain)[name]
        assert (found - expected).abs().max() < 1e-5, kind


def dora_is_refused_by_name(folders: dict[str, Path]) -> None:
    config = LoraConfig(target_modules=["q_proj"], use_dora=True)
    said = refusal(lambda: from_pretrained(folders["llama"], **LAYOUTS["layers"], peft_config=config), ConfigError)
    assert said.startswith("DoRA takes norms over whole rows of the base, which ranks share here")


ONE = named(
    a_head_is_read_while_another_loss_waits,
    an_optimizer_may_be_made_after_any_pass,
    what_is_changed_between_passes_is_computed_with,
    a_head_is_read_between_passes,
    after_a_pass_of_the_base_weights_are_what_they_were,
    a_state_is_read_before_the_first_pass,
    what_is_unfrozen_later_is_averaged,
)
TWO = named(
    base_and_head_may_be_called_apart,
    an_optimizer_may_be_made_after_any_pass,
    what_is_changed_between_passes_is_computed_with,
    a_head_is_read_between_passes,
    an_optimizer_of_gathered_copies_is_refused,
    what_is_unfrozen_later_is_averaged,
    a_state_is_read_before_the_first_pass,
    gradients_of_others_may_be_asked_for,
    a_save_that_wrote_too_little_is_an_error,
    hidden_states_are_those_of_whole_rows,
    inputs_of_blocks_of_parts_of_rows_are_offloaded,
    *([a_copy_of_the_head_is_trained, dora_is_refused_by_name] if "layers" in LAYOUTS else []),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in ("llama", "tied", "mixtral", "out")}
    for kind in ("llama", "tied", "mixtral"):
        config = tiny_config("mixtral" if kind == "mixtral" else "llama", 2)
        config.tie_word_embeddings = kind == "tied"
        randomize(AutoModelForCausalLM.from_config(config)).save_pretrained(made[kind])
    return made


def test_one_rank(folders: dict[str, Path]) -> None:
    run_ranks(run_cases, 1, ONE, folders)


def test_two_ranks(folders: dict[str, Path]) -> None:
    run_ranks(run_cases, 2, TWO, folders)


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


def use_caches(kind: str) -> tuple[list[bool], int]:
    """`use_cache` of a model's configs while it is trained compiled, and how often a block's compiled code ran."""
    calls = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        return graph.forward

    from transformers import AutoModelForImageTextToText

    from hf_fsdp_tools.steps import make_wrap_plan, shard_model

    model: Any = KINDS[kind]() if kind in KINDS else AutoModelForImageTextToText.from_config(tiny_config(kind))
    model = shard_model(model, make_wrap_plan(model), compile={"backend": backend}).train()
    model(input_ids=rows()["input_ids"][:, :8])
    configs = (model.config, model.config.get_text_config())
    return [bool(getattr(config, "use_cache", False)) for config in configs], calls


@pytest.mark.parametrize("kind", ["llama", "llava"])
def test_blocks_of_a_nested_config_are_compiled(kind: str) -> None:
    ((caches, calls),) = run_ranks(use_caches, 1, kind)
    assert caches == [False, False] and calls > 0
