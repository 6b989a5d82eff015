"""Settings as they reach real ranks: RAM-efficient loading, layer classes, a user's own Accelerator, a launch file."""

import os
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import AutoModelForSequenceClassification

from hf_fsdp_tools import ConfigError, FSDPPlugin, from_pretrained, make_accelerator
from hf_fsdp_tools.steps import build_meta_model
from tests._checkpoints import make_model
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, num_units
from tests.api import start_state

close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


@pytest.fixture
def checkpoint(folders: dict[str, Path]) -> Path:
    return folders["tied"]


def _row() -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 15)
    return {"input_ids": ids, "labels": ids}


# ---- RAM-efficient loading, weights that differ ----


def loaded_on_rank_0_alone(folder, out):
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_VERSION": "2"}
    args = arguments(out, max_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # before any Accelerator, as most scripts do; transformers 5.23 leaves only what is in no file to rank 0
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=0)
        head = model.score.weight
        heads = [None, None]
        dist.all_gather_object(heads, None if head.is_meta else head.detach().clone())
        assert heads[1] is None or not torch.equal(*heads), (
            "rank 1 lacks it (transformers 5.23), or drew another (5.17)"
        )
        if dist.get_rank():  # and 5.17 all else too
            model = model.to("meta")
        trainer = ShardedTrainer(model=model, args=args, train_dataset=[_row() | {"labels": torch.tensor(1)}] * 4)
        assert trainer.accelerator.is_fsdp2 and os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
        trainer.accelerator.prepare(model)
    with torch.no_grad():
        loss = model(input_ids=_row()["input_ids"][None], labels=torch.tensor([1])).loss.item()
    plain = make_model("tied").state_dict() | {"score.weight": heads[0]}
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), plain[name]), name
    trainer.train()
    return heads[0], loss


def each_rank_draws_its_own_head(folder, out):
    torch.manual_seed(dist.get_rank())  # the mistake
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    head = model.score.weight.detach().clone()
    heads = [torch.empty_like(head) for _ in range(2)]
    dist.all_gather(heads, head)
    assert not torch.equal(*heads)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        make_accelerator(cpu=True).prepare(model)
    assert torch.equal(model.score.weight.full_tensor(), heads[0])
    return [str(w.message) for w in seen if "differ between ranks" in str(w.message)]


def on_meta_on_all_ranks(folder, out):
    with pytest.raises(ConfigError, match=r"parameters of Qwen3ForCausalLM are on meta.*from_pretrained") as stopped:
        make_accelerator(cpu=True).prepare(build_meta_model(folder))
    return str(stopped.value)


def sharded_on_rank_1_and_loaded_on_rank_0(folder, out):
    accelerator, rank = make_accelerator(cpu=True), dist.get_rank()
    half = from_pretrained(folder, accelerator=accelerator)
    with pytest.raises(ConfigError, match=r"sharded on some ranks and plain on others"):
        accelerator.prepare(half if rank else make_model("tied"))
    if rank:
        half.model.norm.to("meta")
    with pytest.raises(ConfigError, match=r"failed on 1 of 2 ranks.\nrank 1: .* on meta"):
        accelerator.prepare(half)


DIFFERING = (
    loaded_on_rank_0_alone,
    each_rank_draws_its_own_head,
    on_meta_on_all_ranks,
    sharded_on_rank_1_and_loaded_on_rank_0,
)


def test_weights_that_differ_between_ranks_become_rank_0s_and_what_cannot_stops_all(checkpoint, tmp_path):
    first, second = run_ranks(run_cases, 2, DIFFERING, checkpoint, tmp_path)
    (drawn, loss0), (_, loss1) = (found["loaded on rank 0 alone"] for found in (first, second))
    plain = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=3, pad_token_id=0)
    plain.score.weight.data.copy_(drawn)
    expected = plain(input_ids=_row()["input_ids"][None], labels=torch.tensor([1])).loss.item()
    close([loss0, loss1], [expected, expected])
    (said,), silent = (found["each rank draws its own head"] for found in (first, second))
    assert not silent and "score.weight" in said and "Set the same seed" in said
    assert first["on meta on all ranks"] == second["on meta on all ranks"]


# ---- a user's own Accelerator ----


def _as_on_accelerators(plugin) -> Accelerator:
    """An Accelerator with its state as Accelerate leaves it on GPUs: distributed, FSDP, with the plugin."""
    start_state(FSDPPlugin(), mixed_precision=None, cpu=True, parallelism_config=None)
    AcceleratorState().fsdp_plugin = plugin
    return Accelerator(fsdp_plugin=plugin)


def our_plugin_and_a_plain_model(folder):
    accelerator = _as_on_accelerators(FSDPPlugin())
    assert type(accelerator) is Accelerator and accelerator.is_fsdp2
    plain = make_model("tied")
    with pytest.raises(ConfigError, match=r"is about to wrap \w+ by its own rules.*make_accelerator"):
        accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))


def our_plugin_and_a_model_that_would_be_sharded(folder):
    with pytest.raises(ConfigError, match=r"This Accelerator would .*Make it with make_accelerator\(fsdp_plugin="):
        from_pretrained(folder, accelerator=_as_on_accelerators(FSDPPlugin()))


def accelerates_plugin_with_class_names(folder):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    with pytest.raises(ConfigError, match=r"class names that sharding changes.*no_wrap"):
        from_pretrained(folder, accelerator=_as_on_accelerators(plugin))


def accelerates_plugin_without(folder):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = _as_on_accelerators(plugin)
    model = from_pretrained(folder, accelerator=accelerator)
    units = num_units(model)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(**{key: value[None] for key, value in _row().items()}).loss)
    assert type(accelerator) is Accelerator and num_units(model) == units


def an_accelerator_for_cpus(folder):
    accelerator = Accelerator(cpu=True, fsdp_plugin=FSDPPlugin())
    with pytest.raises(ConfigError, match=r"does not run FSDP2.*make_accelerator\(\)"):
        from_pretrained(folder, accelerator=accelerator)


def an_accelerator_that_runs_fsdp1(folder):
    """As a config file without `fsdp_version` makes it."""
    accelerator = make_accelerator(fsdp_plugin=FSDPPlugin(fsdp_version=1), cpu=True)
    with pytest.raises(ConfigError, match=r"runs FSDP1.*Write `fsdp_version: 2`"):
        from_pretrained(folder, accelerator=accelerator)


OWN_ACCELERATORS = (
    our_plugin_and_a_plain_model,
    our_plugin_and_a_model_that_would_be_sharded,
    accelerates_plugin_with_class_names,
    accelerates_plugin_without,
    an_accelerator_for_cpus,
    an_accelerator_that_runs_fsdp1,
)


def test_a_users_own_accelerator_runs_our_plugin_or_says_what_to_use(checkpoint):
    run_ranks(run_cases, 2, OWN_ACCELERATORS, checkpoint)
