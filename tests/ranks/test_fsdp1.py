"""FSDP1 by plan: what it computes equals the plain model, meta models start from the same values on any number of
ranks."""

import gc
import hashlib
import warnings
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    CLIPModel,
)

from hf_fsdp_tools.errors import CheckpointError, ConfigError, WrapPlanError
from hf_fsdp_tools.fsdp1 import wrap
from hf_fsdp_tools.fsdp1.flat_shards import plain_view
from hf_fsdp_tools.fsdp1.policy import hybrid_auto_wrap_policy
from hf_fsdp_tools.fsdp1.wrap import load_weights_fsdp1, wrap_fsdp1
from hf_fsdp_tools.loading.load import load_weights
from hf_fsdp_tools.modeling.initialize import initialize_missing
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.policy import HybridPolicy
from hf_fsdp_tools.saving.save import save_pretrained
from hf_fsdp_tools.sharding.allocate import allocate
from tests._checkpoints import KINDS as CHECKPOINTS
from tests._checkpoints import make_checkpoint, make_model
from tests._dist import run_ranks
from tests._training import clip_loss, tiny_clip

KINDS = ("llama", "tied", "gpt2", "mixtral", "t5")
STEPS = 3

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


def _mean(value: float) -> float:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _whole(wrapped: FSDP) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(wrapped):
        return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in wrapped.named_parameters()}


def _trains_as_the_plain_model(kinds, use_orig_params):
    ranks = dist.get_world_size()
    for kind in kinds:
        plain, model = _model(kind), _model(kind)
        policy = hybrid_auto_wrap_policy(model)
        names = [name for name, _ in model.named_modules()]
        wrapped = wrap_fsdp1(model, make_wrap_plan(model), use_orig_params=use_orig_params)
        found = [
            n.replace("_fsdp_wrapped_module.", "") for n, m in wrapped.named_modules() if isinstance(m, FSDP) and n
        ]
        found = [name.removeprefix("_fsdp_wrapped_module").removeprefix(".") for name in found]
        assert sorted(found) == sorted(policy.units) and set(found) <= set(names)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (plain, wrapped)]
        for _ in range(STEPS):
            expected = _step(plain, optimizers[0], _batches(ranks))
            loss = _mean(_step(wrapped, optimizers[1], _batches(ranks)[dist.get_rank()][None]))
            assert abs(loss - expected) < 1e-4, (kind, loss, expected)
        start, end = dict(_model(kind).named_parameters()), dict(plain.named_parameters())
        whole = _whole(wrapped)
        assert set(whole) == set(end), "tied parameters are one parameter"
        for name, value in whole.items():
            torch.testing.assert_close(value, end[name], rtol=1e-3, atol=2e-5, msg=lambda m, n=(kind, name): f"{n} {m}")
        moved = [name for name in end if not torch.equal(end[name], start[name])]
        assert len(moved) > len(end) // 2, "the comparison means something"


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_losses_and_weights_equal_the_plain_ones(use_orig_params):
    run_ranks(_trains_as_the_plain_model, 2, KINDS, use_orig_params)


def _gradients_equal():
    plain, model = _model("tied"), _model("tied")
    wrapped = wrap_fsdp1(model, make_wrap_plan(model))
    for batch in _batches(2):
        (plain(input_ids=batch, labels=batch).loss / 2).backward()
    batch = _batches(2)[dist.get_rank()]
    wrapped(input_ids=batch, labels=batch).loss.backward()
    with FSDP.summon_full_params(wrapped, with_grads=True):
        gradients = {n.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for n, p in wrapped.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    return len(gradients)


def test_gradients_equal_the_plain_ones():
    assert run_ranks(_gradients_equal, 2) == [24, 24]


def _bf16():
    model = _model("llama")
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    wrapped = wrap_fsdp1(model, make_wrap_plan(model), mixed_precision=policy)
    dtypes = []
    wrapped.module.lm_head.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    batch = _batches(2)[dist.get_rank()]
    loss = wrapped(input_ids=batch, labels=batch).loss
    loss.backward()
    assert dtypes == [torch.bfloat16], "computed in bf16"
    assert {p.grad.dtype for p in wrapped.parameters() if p.grad is not None} == {torch.float32}
    assert {p.dtype for p in wrapped.parameters()} == {torch.float32}
    plain = _model("llama")(input_ids=batch, labels=batch).loss
    return abs(loss.item() - plain.item())


def test_mixed_precision_computes_in_bf16_and_keeps_fp32_weights():
    assert all(0 < gap < 0.05 for gap in run_ranks(_bf16, 2))


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
        whole = _whole(wrapped)
        assert set(whole) == {name for name, _ in plain.named_parameters()}
        for name, parameter in plain.named_parameters():
            assert torch.equal(whole[name], parameter), (kind, name)
        buffers = {n.replace("_fsdp_wrapped_module.", ""): b for n, b in wrapped.named_buffers()}
        for name, buffer in plain.named_buffers():
            assert torch.equal(buffers[name], buffer), (kind, name)
        everything = b"".join(whole[name].numpy().tobytes() for name in sorted(whole))
        digests[kind] = hashlib.sha256(everything).hexdigest()
    return digests


def test_meta_models_start_equal_on_any_number_of_ranks():
    alone = run_ranks(_initial_values, 1, KINDS, True)
    two = run_ranks(_initial_values, 2, KINDS, True)
    three = run_ranks(_initial_values, 3, KINDS, False)
    assert alone[0] == two[0] == two[1] == three[0] == three[2]
    assert len(set(alone[0].values())) == len(KINDS)


def _live_bytes() -> int:
    """Bytes of all CPU tensors that are alive, each storage once."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gc meets deprecated lazy modules
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        tensors = [t for t in tensors if t.device.type == "cpu" and type(t).__name__ != "FlatShare"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _memory(use_orig_params):
    """What is alive of the parameters while units get their storage (at most) and of everything afterwards, as shares
    of the whole model; and the share of the largest unit."""
    config = make_model("llama").config
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 96, 256, 8
    model = build_meta_model(config)
    plan = make_wrap_plan(model)
    size, before, made, peak = 4 * plan.num_params, _live_bytes(), [], 0

    def watching(tensor, *, device):
        nonlocal peak
        given = with_storage(tensor, device=device)
        made.append(weakref.ref(given))
        alive = [t.untyped_storage() for ref in made if (t := ref()) is not None]
        peak = max(peak, sum({storage.data_ptr(): storage.nbytes() for storage in alive}.values()))
        return given

    with_storage = wrap.with_storage
    with patch.object(wrap, "with_storage", watching):
        wrapped = wrap_fsdp1(model, plan, use_orig_params=use_orig_params)
    assert len(made) > 70, "watched every allocation"
    after = _live_bytes() - before
    return peak / size, after / size, plan.largest_unit.num_params / plan.num_params, wrapped.rank


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_rank_holds_its_shards_and_one_unit(use_orig_params):
    for peak, after, unit, _ in run_ranks(_memory, 2, use_orig_params):
        assert 0.5 <= after < 0.52
        assert peak < 0.5 + unit < 0.7


def _lora():
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
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.3) for m in (plain, wrapped)]
    for _ in range(STEPS):
        expected = _step(plain, optimizers[0], _batches(2))
        loss = _mean(_step(wrapped, optimizers[1], _batches(2)[dist.get_rank()][None]))
        assert abs(loss - expected) < 1e-4
    whole = _whole(wrapped)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole[name], parameter, rtol=1e-3, atol=2e-5)
        assert torch.equal(whole[name], start[name]) != parameter.requires_grad, name


def test_lora_trains_adapters_beside_frozen_weights():
    run_ranks(_lora, 2)


def _separate_units_without_original_parameters():
    model = _model("llama")
    model.model.layers[0].requires_grad_(False)
    wrapped = wrap_fsdp1(model, make_wrap_plan(model), use_orig_params=False)
    batch = _batches(2)[dist.get_rank()]
    wrapped(input_ids=batch, labels=batch).loss.backward()
    return sorted(parameter.requires_grad for parameter in wrapped.parameters())


def test_units_frozen_as_a_whole_need_no_original_parameters():
    assert run_ranks(_separate_units_without_original_parameters, 2)[0] == [False, True, True, True, True]


def _scalars_are_averaged(hybrid):
    ranks = dist.get_world_size()
    plain, model = tiny_clip(), tiny_clip()
    for rank in range(ranks):
        (clip_loss(plain, rank) / ranks).backward()
    options = {}
    if hybrid:
        shard = [dist.new_group(pair) for pair in ((0, 1), (2, 3))][dist.get_rank() // 2]
        replicate = [dist.new_group(pair) for pair in ((0, 2), (1, 3))][dist.get_rank() % 2]
        options = {"process_group": (shard, replicate), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    wrapped = wrap_fsdp1(model, make_wrap_plan(model), **options)
    clip_loss(wrapped, dist.get_rank()).backward()
    torch.testing.assert_close(wrapped.module.logit_scale.grad, plain.logit_scale.grad)
    with FSDP.summon_full_params(wrapped, with_grads=True):
        for name, parameter in wrapped.named_parameters():
            expected = plain.get_parameter(name.replace("_fsdp_wrapped_module.", "")).grad
            if expected is not None:
                torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)
    return float(wrapped.module.logit_scale.grad)


@pytest.mark.parametrize(("ranks", "hybrid"), [(2, False), (4, True)])
def test_scalar_parameters_stay_whole_and_their_gradients_are_averaged(ranks, hybrid):
    values = run_ranks(_scalars_are_averaged, ranks, hybrid)
    assert len(set(values)) == 1 and values[0] != 0


def _scalars_of_meta_models():
    model = build_meta_model(tiny_clip().config, auto_class=CLIPModel)
    wrapped = wrap_fsdp1(model, make_wrap_plan(model), initialize=False)
    scale = wrapped.module.logit_scale
    assert plain_view(wrapped).logit_scale is scale
    with pytest.raises(CheckpointError, match=r"not initialised by the model's own code: logit_scale"):
        other = build_meta_model(tiny_clip().config, auto_class=CLIPModel)
        wrap_fsdp1(other, make_wrap_plan(other))
    return scale.device.type, scale.requires_grad


def test_scalar_parameters_of_meta_models_get_storage():
    assert run_ranks(_scalars_of_meta_models, 2) == [("cpu", True)] * 2


def _refusals():
    model = _model("llama")
    plan = make_wrap_plan(model)
    messages = []

    def refuse(error, match, target=model, plan=plan, **options):
        with pytest.raises(error, match=match) as caught:
            wrap_fsdp1(target, plan, **options)
        messages.append(str(caught.value))

    hybrid = ShardingStrategy.HYBRID_SHARD
    refuse(ConfigError, r"HYBRID_SHARD with a shard group of 1.*154888.*FULL_SHARD", sharding_strategy=hybrid)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    pair = (alone, dist.new_group([0, 1]))
    refuse(ConfigError, r"shard group of 1", sharding_strategy=hybrid, process_group=pair)
    offload = CPUOffload(offload_params=True)
    both = r"(?s)sync_module_states needs an accelerator.*CPU offload needs an accelerator"
    refuse(ConfigError, both, sync_module_states=True, cpu_offload=offload)
    refuse(WrapPlanError, r"does not fit GPT2LMHeadModel", target=make_model("gpt2"))
    odd = plan if dist.get_rank() == 0 else make_wrap_plan(model, policy=HybridPolicy(group_tail=False))
    refuse(ConfigError, r"different arguments: plan.digest is .* on rank 1. Give the same", plan=odd)
    some = model if dist.get_rank() == 0 else build_meta_model(model.config)
    refuse(ConfigError, r"is_on_meta is false on rank 0, true on rank 1", target=some)
    with pytest.raises(ConfigError, match=r"Wrap it with wrap_fsdp1 first"):
        plain_view(model)
    assert not any(isinstance(module, FSDP) for module in model.modules()), "nothing was wrapped before the refusal"
    return messages


def test_refusals_name_the_cure_on_every_rank_alike():
    first, second = run_ranks(_refusals, 2)
    assert first == second and len(first) == 6


def _deprecation():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model = _model("llama")
            wrap_fsdp1(model, make_wrap_plan(model))
    ours = [w for w in caught if "shard_model" in str(w.message)]
    return [(w.category, w.filename) for w in ours]


def test_deprecation_is_said_once():
    assert run_ranks(_deprecation, 1) == [[(FutureWarning, __file__)]]


def _gathered():
    model = _model("llama")
    wrapped = wrap_fsdp1(model, make_wrap_plan(model))
    with (
        FSDP.summon_full_params(wrapped),
        pytest.raises(ConfigError, match=r"gathered at the moment.*summon_full_params"),
    ):
        plain_view(wrapped)
    view = plain_view(wrapped)
    assert list(view.state_dict(keep_vars=True)) == list(_model("llama").state_dict())
    with pytest.raises(ConfigError, match=r"needs whole parameters.*summon_full_params"):
        _ = view.model.layers[0].mlp.up_proj.weight + 1


def test_a_gathered_model_is_not_viewed_and_a_view_does_not_compute():
    run_ranks(_gathered, 2)


AUTO = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM, "vit": AutoModelForImageClassification}


def _loads_and_saves(folder, use_orig_params):
    ratios = {}
    for kind in sorted(CHECKPOINTS):
        auto_class = AUTO.get(kind, AutoModelForCausalLM)
        model = build_meta_model(f"{folder}/{kind}", auto_class=auto_class)
        wrapped = wrap_fsdp1(model, make_wrap_plan(model), use_orig_params=use_orig_params, initialize=False)
        report = load_weights_fsdp1(wrapped, f"{folder}/{kind}")
        assert report.missing_keys == report.unexpected_keys == ()
        expected, whole = make_model(kind), _whole(wrapped)
        assert set(whole) == {name for name, _ in expected.named_parameters()}
        for name, parameter in expected.named_parameters():
            assert torch.equal(whole[name], parameter), (kind, name)
        buffers = {n.replace("_fsdp_wrapped_module.", ""): b for n, b in wrapped.named_buffers()}
        assert all(torch.equal(buffers[name], buffer) for name, buffer in expected.named_buffers())
        ratios[kind] = report.read_ratio, sum(report.bytes_read_per_rank)
        save_pretrained(plain_view(wrapped), f"{folder}/{kind}-saved")
    return ratios


@pytest.mark.parametrize(("ranks", "use_orig_params"), [(2, True), (3, False)])
def test_checkpoints_go_straight_into_flat_shards_and_back(folders, tmp_path, ranks, use_orig_params):
    for kind, folder in folders.items():
        (tmp_path / kind).symlink_to(folder)
    for ratios in run_ranks(_loads_and_saves, ranks, str(tmp_path), use_orig_params):
        assert {kind: ratio for kind, (ratio, _) in ratios.items()} == dict.fromkeys(CHECKPOINTS, 1.0)
    for kind in CHECKPOINTS:
        model = make_model(kind)
        again, info = type(model).from_pretrained(tmp_path / f"{kind}-saved", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        for (name, parameter), (_, saved) in zip(model.named_parameters(), again.named_parameters(), strict=True):
            assert torch.equal(parameter, saved), (kind, name)


def _trains_after_loading(folder):
    model = build_meta_model(f"{folder}/llama")
    shard = [dist.new_group(pair) for pair in ((0, 1), (2, 3))][dist.get_rank() // 2]
    replicate = [dist.new_group(pair) for pair in ((0, 2), (1, 3))][dist.get_rank() % 2]
    hybrid = {"process_group": (shard, replicate), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    wrapped = wrap_fsdp1(model, make_wrap_plan(model), initialize=False, **hybrid)
    report = load_weights_fsdp1(wrapped, f"{folder}/llama")
    plain = _model("llama")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (plain, wrapped)]
    for _ in range(STEPS):
        expected = _step(plain, optimizers[0], _batches(4))
        assert abs(_mean(_step(wrapped, optimizers[1], _batches(4)[dist.get_rank()][None])) - expected) < 1e-4
    written = save_pretrained(plain_view(wrapped), f"{folder}/trained")
    with pytest.raises(ConfigError, match=r"dtype cannot be changed.*build_meta_model\(dtype"):
        load_weights_fsdp1(wrapped, f"{folder}/llama", dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"No such folder|no-such-folder"):
        load_weights_fsdp1(wrapped, f"{folder}/no-such-folder")
    return report.bytes_read, written.bytes_written, written.total_bytes


def test_hybrid_shards_load_train_and_save(tmp_path):
    make_checkpoint("llama", tmp_path / "llama")
    figures = run_ranks(_trains_after_loading, 4, str(tmp_path))
    total = figures[0][2]
    assert sum(read for read, _, _ in figures) == 2 * total, "each replica reads the model once"
    assert sum(written for _, written, _ in figures) == total and figures[2][1] == figures[3][1] == 0


def _missing_keys(folder):
    report = {}
    for use_orig_params in (True, False):
        plain, model = (
            build_meta_model(f"{folder}/llama", auto_class=AutoModelForSequenceClassification, num_labels=7)
            for _ in "12"
        )
        load_weights(plain, f"{folder}/llama", seed=5)
        wrapped = wrap_fsdp1(model, make_wrap_plan(model), use_orig_params=use_orig_params, initialize=False)
        report = load_weights_fsdp1(wrapped, f"{folder}/llama", seed=5)
        whole = _whole(wrapped)
        for name, parameter in plain.named_parameters():
            assert torch.equal(whole[name], parameter), name
    return report.initialized_keys


def test_what_is_in_no_file_is_initialised_as_everywhere(tmp_path):
    make_checkpoint("llama", tmp_path / "llama")
    assert run_ranks(_missing_keys, 2, str(tmp_path)) == [("score.weight",)] * 2
