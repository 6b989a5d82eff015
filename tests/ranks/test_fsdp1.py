"""FSDP1 by plan: what it computes equals the plain model, meta models start from the same values on any number of
ranks."""

import hashlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from transformers import AutoModelForSeq2SeqLM

from hf_fsdp_tools import ConfigError, WrapPolicy, live_weights, save_pretrained
from hf_fsdp_tools.steps import build_meta_model, make_wrap_plan
from tests._checkpoints import KINDS as CHECKPOINTS
from tests._checkpoints import assert_same_tensors, make_model
from tests._dist import run_cases, run_ranks
from tests.api import (
    all_ranks,
    allocate,
    hybrid_auto_wrap_policy,
    initialize_missing,
    load_weights_fsdp1,
    plain_view,
    wrap_fsdp1,
)

pytestmark = pytest.mark.filterwarnings("ignore:FSDP1:FutureWarning")


def _batches(ranks: int) -> torch.Tensor:
    """One batch of token ids per rank, the same on every rank."""
    return torch.randint(3, 131, (ranks, 2, 9), generator=torch.Generator().manual_seed(1))


def _model(kind: str, **options) -> nn.Module:
    model = make_model(kind, **options)
    model.config._experts_implementation = "eager"  # the grouped matrix product refuses these awkward sizes
    if kind == "t5":
        model.config.decoder_start_token_id = 0
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor) -> float:
    """One step on the mean loss of some batches; that loss. FSDP averages over ranks, so each rank gives its own
    batch."""
    losses = [model(input_ids=batch, labels=batch).loss for batch in batches]
    (sum(losses) / len(losses)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return sum(loss.item() for loss in losses) / len(losses)


def _train_alike(plain: nn.Module, wrapped: FSDP) -> None:
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.3) for m in (plain, wrapped)]
    for _ in range(2):
        expected = _step(plain, optimizers[0], _batches(2))
        loss = torch.tensor(_step(wrapped, optimizers[1], _batches(2)[dist.get_rank()][None]))
        dist.all_reduce(loss)
        assert abs(loss.item() / 2 - expected) < 1e-4


def _whole(wrapped: FSDP) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(wrapped):
        return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in wrapped.named_parameters()}


def _assert_whole_equals(wrapped: FSDP, plain: nn.Module) -> dict[str, torch.Tensor]:
    """The gathered parameters, which equal the plain model's to the last bit, as the buffers do."""
    whole, expected = _whole(wrapped), dict(plain.named_parameters())
    assert whole.keys() == expected.keys(), "tied parameters are one parameter"
    assert not [name for name in whole if not torch.equal(whole[name], expected[name])]
    buffers = {n.replace("_fsdp_wrapped_module.", ""): b for n, b in wrapped.named_buffers()}
    assert all(torch.equal(buffers[name], buffer) for name, buffer in plain.named_buffers())
    return whole


def trains_as_the_plain_model(kinds, use_orig_params):
    for kind in kinds:
        plain, model = _model(kind), _model(kind)
        policy = hybrid_auto_wrap_policy(model)
        wrapped = wrap_fsdp1(model, make_wrap_plan(model), use_orig_params=use_orig_params)
        assert sum(isinstance(module, FSDP) for module in wrapped.modules()) == len(policy.units) + 1
        _train_alike(plain, wrapped)
        for name, value in _whole(wrapped).items():
            torch.testing.assert_close(value, plain.get_parameter(name), rtol=1e-3, atol=2e-5, msg=f"{kind} {name}")


def _initial_values(kinds, use_orig_params):
    digests = {}
    for kind in kinds:
        auto_class = {"auto_class": AutoModelForSeq2SeqLM} if kind == "t5" else {}
        config = make_model(kind).config
        model = build_meta_model(config, **auto_class)
        wrapped = wrap_fsdp1(model, make_wrap_plan(model), use_orig_params=use_orig_params, seed=3)
        plain = build_meta_model(config, **auto_class)
        keys = {name for name, _ in plain.named_parameters()}  # each tied one once
        keys |= {name for name in plain.state_dict() if name in dict(plain.named_buffers())}
        allocate(plain, device=torch.device("cpu"))
        initialize_missing(plain, missing_keys=keys, seed=3)
        whole = _assert_whole_equals(wrapped, plain)
        everything = b"".join(whole[name].numpy().tobytes() for name in sorted(whole))
        digests[kind] = hashlib.sha256(everything).hexdigest()
    return digests


def test_meta_models_start_equal_on_any_number_of_ranks():
    alone = run_ranks(_initial_values, 1, ("tied", "t5"), True)
    three = run_ranks(_initial_values, 3, ("tied", "t5"), False)
    assert alone[0] == three[0] == three[2]


def lora_trains_adapters_beside_frozen_weights():
    def adapted():
        torch.manual_seed(0)
        targets = ["q_proj", "v_proj", "up_proj"]
        model = get_peft_model(_model("llama"), LoraConfig(r=4, target_modules=targets, lora_dropout=0.0))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return model

    plain, model = adapted(), adapted()
    start = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    plan = make_wrap_plan(model)
    with pytest.raises(ValueError, match=r"uniform `requires_grad` when `use_orig_params=False`"):  # torch's own
        wrap_fsdp1(adapted(), plan, use_orig_params=False)
    wrapped = wrap_fsdp1(model, plan)
    _train_alike(plain, wrapped)
    whole = _whole(wrapped)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole[name], parameter, rtol=1e-3, atol=2e-5)
        assert torch.equal(whole[name], start[name]) != parameter.requires_grad, name
    plain.load_state_dict(whole)
    merged = live_weights(wrapped, merge_adapters=True).buckets(to=None)
    found = {k: t.clone() for bucket in merged for k, t in bucket.items()}
    assert_same_tensors(found, plain.merge_and_unload().state_dict())


def refusals_name_the_cure_on_every_rank_alike():
    model = _model("llama")
    plan, messages = make_wrap_plan(model), list[str]()

    def refuse(error, match, target=model, plan=plan, **options):
        with pytest.raises(error, match=match) as caught:
            wrap_fsdp1(target, plan, **options)
        messages.append(str(caught.value))

    hybrid = ShardingStrategy.HYBRID_SHARD
    refuse(ConfigError, r"HYBRID_SHARD with a shard group of 1.*154888.*FULL_SHARD", sharding_strategy=hybrid)
    odd = plan if dist.get_rank() == 0 else make_wrap_plan(model, policy=WrapPolicy(group_tail=False))
    refuse(ConfigError, r"different arguments: plan.digest is .* on rank 1. Give the same", plan=odd)
    some = model if dist.get_rank() == 0 else build_meta_model(model.config)
    refuse(ConfigError, r"is_on_meta is false on rank 0, true on rank 1", target=some)
    with pytest.raises(ConfigError, match=r"Wrap it with wrap_fsdp1 first"):
        plain_view(model)
    wrapped = wrap_fsdp1(_model("llama"), plan)
    with FSDP.summon_full_params(wrapped), pytest.raises(ConfigError, match=r"gathered at the moment"):
        plain_view(wrapped)
    assert not any(isinstance(module, FSDP) for module in model.modules()), "nothing was wrapped before the refusal"
    assert all_ranks(messages) == [messages] * 2


def _loads_and_saves(folder, kinds, use_orig_params):
    ratios = {}
    for kind in kinds:
        model = build_meta_model(f"{folder}/{kind}", auto_class=type(make_model(kind)))
        wrapped = wrap_fsdp1(model, make_wrap_plan(model), use_orig_params=use_orig_params, initialize=False)
        report = load_weights_fsdp1(wrapped, f"{folder}/{kind}")
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in wrapped.parameters()}
        assert sum(held.values()) < 1.1 * report.share_bytes
        assert report.missing_keys == report.unexpected_keys == ()
        _assert_whole_equals(wrapped, make_model(kind))
        ratios[kind] = report.read_ratio
        save_pretrained(plain_view(wrapped), f"{folder}/{kind}-saved")
    return ratios


@pytest.mark.parametrize(
    ("ranks", "original", "kinds"),
    [
        (2, True, ["bert"]),
        (3, False, ["mixtral"]),
        *(pytest.param(n, n == 2, sorted(CHECKPOINTS), marks=pytest.mark.nightly) for n in (2, 3)),
    ],
)
def test_checkpoints_go_straight_into_flat_shards_and_back(folders, tmp_path, ranks, original, kinds):
    for kind, folder in folders.items():
        (tmp_path / kind).symlink_to(folder)
    for ratios in run_ranks(_loads_and_saves, ranks, str(tmp_path), kinds, original):
        assert ratios == dict.fromkeys(kinds, 1.0)
    for kind in kinds:
        model = make_model(kind)
        again, info = type(model).from_pretrained(tmp_path / f"{kind}-saved", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert_same_tensors(dict(again.named_parameters()), dict(model.named_parameters()), kind)


def test_two_ranks_compute_as_the_plain_model_and_refuse_alike():
    ways = ((("gpt2", "t5"), True), (("tied", "mixtral"), False))
    cases = {f"{original}": partial(trains_as_the_plain_model, kinds, original) for kinds, original in ways}
    cases["lora"] = lora_trains_adapters_beside_frozen_weights
    cases["refusals"] = refusals_name_the_cure_on_every_rank_alike
    run_ranks(run_cases, 2, cases)
