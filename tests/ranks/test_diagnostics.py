"""`diagnose` names what is really wrong on real ranks, alike on every rank, and leaves a healthy model in peace."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools.diagnostics.diagnosis import diagnose
from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.errors import FSDPToolsError, WrapPlanError
from hf_fsdp_tools.fsdp1.wrap import wrap_fsdp1
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.policy import HybridPolicy
from hf_fsdp_tools.sharding.allocate import allocate
from hf_fsdp_tools.sharding.shard import shard_model
from tests._checkpoints import KINDS, make_model
from tests._dist import run_ranks

BATCH = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(1))


def _mesh():
    return ParallelDims().build_mesh("cpu")


def _sharded(kind="llama", model=None, **settings):
    model = model if model is not None else make_model(kind)
    return shard_model(model, make_wrap_plan(model), mesh=_mesh(), **settings)


def _deep_llama():
    sizes = {"hidden_size": 48, "intermediate_size": 67, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=131, num_hidden_layers=6))


def _tied_on_meta():
    model = make_model("tied").to("meta")
    model.tie_weights()  # moving parts them
    return model


def _codes(diagnosis, *severities):
    return [f.code for f in diagnosis.findings if f.severity in (severities or ("error", "warning"))]


def _expect(diagnosis, code, severity, fact, cure):
    """The one finding of this code; every rank has the same ones."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, diagnosis)
    assert all(other == diagnosis for other in everyone)
    (finding,) = [f for f in diagnosis.findings if f.code == code] or [None]
    assert finding, f"no {code} in {diagnosis}"
    assert finding.severity == severity
    assert re.search(fact, finding.fact), finding.fact
    assert re.search(cure, finding.cure), finding.cure
    return finding


# ---- nothing wrong
# ----------------------------------------------------------------------------------------------------


def _healthy(kinds):
    trees = {}
    for kind in kinds:
        model = _sharded(kind)
        diagnosis = diagnose(model, values=True)
        assert not _codes(diagnosis), f"{kind}: {diagnosis}"
        if kind in ("llama", "tied"):  # between forward and backward the root is gathered: still nothing is wrong
            loss = model(input_ids=BATCH, labels=BATCH).loss
            assert not _codes(diagnose(model)), kind
            loss.backward()
            assert not _codes(diagnose(nn.Sequential(model))), f"{kind}: below a wrapper"
        trees[kind] = diagnosis.units
    model = make_model("vit")
    # one row and one bias, beside the class token and the positions: rank 1 has nothing of them
    model.classifier = nn.Linear(48, 1)
    diagnosis = diagnose(_sharded(model=model))
    _expect(diagnosis, "empty-shards", "info", r"^4 of \d+ shards are empty, most on rank 1 \(4\)", r"Nothing")
    return trees


def test_healthy_models_of_every_kind_have_no_error_and_no_warning():
    first, second = run_ranks(_healthy, 2, tuple(KINDS))
    assert first == second
    assert re.search(r"LlamaForCausalLM: [\d.]+ K parameters in \d units \(FSDP2\)", first["llama"])
    assert re.search(r"\(root\)  LlamaForCausalLM", first["llama"])
    assert re.search(r"[├└]─ model\.layers\.\{0\.\.1\}  LlamaDecoderLayer  2 × [\d.]+ K parameters, ", first["llama"])


def _other_ways_to_shard():
    model = make_model("llama")
    for block in model.model.layers:
        fully_shard(block, mesh=_mesh())
    fully_shard(model, mesh=_mesh())
    assert not _codes(diagnose(model))
    wrapped = make_model("llama")
    for index, block in enumerate(wrapped.model.layers):
        wrapped.model.layers[index] = checkpoint_wrapper(block)
    assert not _codes(diagnose(_sharded(model=wrapped)))
    assert not _codes(diagnose(_sharded(activation_checkpointing=True)))
    compiled = torch.compile(make_model("llama"))
    assert not _codes(diagnose(_sharded(model=compiled)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated upstream
        for original in (True, False):
            old = make_model("llama")
            for index, block in enumerate(old.model.layers):
                old.model.layers[index] = _fsdp1(block, use_orig_params=original)
            old = _fsdp1(old, use_orig_params=original)
            diagnosis = diagnose(old, values=True)
            assert not diagnosis.findings, diagnosis
            assert re.search(r"LlamaDecoderLayer  2 × 16\.7 K parameters", diagnosis.units), diagnosis.units
            assert diagnosis.units.startswith("LlamaForCausalLM: 45.9 K parameters in 3 units (FSDP1)")
            plan = make_wrap_plan(make_model("llama"))
            assert _codes(diagnose(old, plan=plan)) == ["plan-mismatch"], "the embedding has no unit"
            diagnosis = diagnose(wrap_fsdp1(make_model("llama"), plan, use_orig_params=original), plan=plan)
            assert not diagnosis.findings, diagnosis


def _fsdp1(module, **settings):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **{"use_orig_params": True, **settings})


def test_other_ways_to_shard_are_read_too():
    run_ranks(_other_ways_to_shard, 2)


# ---- units
# ------------------------------------------------------------------------------------------------------------


def _wrong_units():
    plain = make_model("llama")
    _expect(diagnose(plain), "not-sharded", "error", r"each of 2 ranks holds all 183\.7 kB", r"shard_model\(model")
    root = fully_shard(make_model("llama"), mesh=_mesh())
    finding = _expect(
        diagnose(root), "root-only", "error", r"gathers 45\.9 K of 45\.9 K parameters", r"HybridFSDPPlugin"
    )
    assert "at once, in (root)" in finding.fact
    assert _codes(diagnose(root)) == ["root-only"], "what follows from it is not repeated"

    half = make_model("llama")
    fully_shard(half.model.layers[1], mesh=_mesh())
    diagnosis = diagnose(fully_shard(half, mesh=_mesh()))
    _expect(
        diagnosis,
        "missed-blocks",
        "warning",
        r"1 of 2 blocks .*: model\.layers\.0 \(LlamaDecoderLayer\)",
        r"LlamaDecoderLayer.*make_wrap_plan",
    )

    deep = _deep_llama()
    for module in (deep.model.layers[0], deep.model.layers[3], deep.model):
        fully_shard(module, mesh=_mesh())
    diagnosis = diagnose(fully_shard(deep, mesh=_mesh()))
    _expect(
        diagnosis,
        "missed-blocks",
        "warning",
        r"4 of 6 blocks .*: model\.layers\.1, model\.layers\.2, model\.layers\.4, model\.layers\.5",
        r"wrap policy",
    )
    _expect(
        diagnosis,
        "oversize-unit",
        "warning",
        r"1 of 4 units .*The largest is model with 7\d\.\d K",
        r"min_unit_params",
    )

    fine = make_model("llama")
    for block in fine.model.layers:
        for part in (*block.children(), block):
            fully_shard(part, mesh=_mesh())
    diagnosis = diagnose(fully_shard(fine, mesh=_mesh()))
    _expect(
        diagnosis, "empty-unit", "info", r"2 of 11 units hold no parameter: model\.layers\.0, model", r"Leave them out"
    )
    assert not _codes(diagnosis)


def test_wrong_units_are_named():
    run_ranks(_wrong_units, 2)


def _against_a_plan():
    model = _sharded()
    plan = make_wrap_plan(make_model("llama"), policy=HybridPolicy(block_types=("LlamaMLP", "LlamaAttention")))
    diagnosis = diagnose(model, plan=plan)
    _expect(
        diagnosis,
        "plan-mismatch",
        "warning",
        r"4 of its 8 units are not there \(model\.layers\.0\.self_attn",
        r"shard_model\(model, plan\)",
    )
    assert not _codes(diagnose(model, policy=HybridPolicy(block_types=("LlamaMLP",)))), (
        "a policy asks for no exact units"
    )
    with pytest.raises(WrapPlanError, match="NoSuchLayer"):
        diagnose(model, policy=HybridPolicy(block_types=("NoSuchLayer",)))


def test_a_given_plan_is_compared_unit_by_unit():
    run_ranks(_against_a_plan, 2)


# ---- parameters
# -------------------------------------------------------------------------------------------------------


def _wrong_parameters():
    with torch.device("meta"):
        adapter = nn.Linear(48, 48)
    model = _sharded()
    model.model.layers[0].self_attn.q_proj.adapter = adapter
    diagnosis = diagnose(model)
    _expect(diagnosis, "meta-parameters", "error", r"2 of \d+ parameters .*q_proj\.adapter\.weight", r"load_weights")
    _expect(diagnosis, "unmanaged-parameters", "error", r"2 trainable .*q_proj\.adapter\.weight", r"shard the whole")
    adapter.to_empty(device="cpu").requires_grad_(False)
    _expect(diagnose(model), "replicated-frozen", "info", r"2 frozen .* 9\.4 kB", r"quantised")

    meta = make_model("llama").to("meta")
    _expect(
        diagnose(_sharded(model=meta)), "meta-parameters", "info", r"All \d+ parameters are on meta", r"load_weights"
    )

    no_root = make_model("llama")
    for block in no_root.model.layers:
        fully_shard(block, mesh=_mesh())
    _expect(diagnose(no_root), "unmanaged-parameters", "error", r"3 trainable .*embed_tokens", r"root included")

    mixed = make_model("llama")
    mixed.model.layers[0].input_layernorm.bfloat16()
    fully_shard(mixed.model.layers[0], mesh=_mesh())
    fully_shard(mixed.model.layers[1], mesh=_mesh())
    diagnosis = diagnose(fully_shard(mixed, mesh=_mesh()))
    _expect(diagnosis, "mixed-dtypes", "error", r"model\.layers\.0 \(8 float32, 1 bfloat16\)", r"one dtype")
    with pytest.raises(AssertionError, match="uniform original parameter dtype"):
        mixed(input_ids=BATCH)
    _expect(diagnosis, "low-precision-masters", "info", r"^48 of .* are kept in bfloat16", r"dtype=torch\.float32")
    low = diagnose(_sharded(model=make_model("llama").bfloat16()))
    assert _codes(low, "info", "warning", "error") == ["low-precision-masters"]

    spoiled = _sharded()
    with torch.no_grad():
        spoiled.model.norm.weight.to_local()[:3] = float("nan")
    assert not _codes(diagnose(spoiled)), "values are read when asked"
    _expect(
        diagnose(spoiled, values=True),
        "non-finite-values",
        "error",
        r"model\.norm\.weight \(6 elements\)",
        r"load_weights",
    )


def test_wrong_parameters_are_named():
    run_ranks(_wrong_parameters, 2)


def _ties():
    emptied = make_model("tied").to("meta").to_empty(device="cpu")
    for parameter in emptied.parameters():
        nn.init.constant_(parameter, 0.5)
    nn.init.zeros_(emptied.lm_head.weight)
    cure = r"load_weights, which keeps ties"
    _expect(
        diagnose(emptied), "tie-broken", "error", r"1 tied .* 1 of them .*model\.embed_tokens\.weight = lm_head", cure
    )

    parted = make_model("tied")
    for module in (*parted.model.layers, parted.model.embed_tokens, parted.lm_head, parted):
        fully_shard(module, mesh=_mesh())
    _expect(diagnose(parted), "tie-broken", "error", r"separate parameters now, 0 of them", cure)

    again = make_model("tied")
    for module in (*again.model.layers, again.model.embed_tokens, again.lm_head, again):
        fully_shard(module, mesh=_mesh())
    again.tie_weights()
    finding = _expect(
        diagnose(again), "managed-twice", "error", r"in lm_head and in model\.embed_tokens", r"before sharding"
    )
    assert "model.embed_tokens.weight = lm_head.weight" in finding.fact

    kept = _sharded(model=_tied_on_meta())
    allocate(kept, device=torch.device("cpu"))
    assert not {"tie-broken", "managed-twice"} & set(_codes(diagnose(kept))), "allocate keeps ties"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated upstream
        old = make_model("tied")
        old.model.embed_tokens = _fsdp1(old.model.embed_tokens)
        _expect(
            diagnose(_fsdp1(old)), "managed-twice", "error", r"in model\.embed_tokens and in no unit", r"each tied set"
        )


def test_ties_that_came_apart_are_named():
    run_ranks(_ties, 2)


def _frozen_under_fsdp1():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated upstream
        model = make_model("llama")
        model.model.layers[0].mlp.requires_grad_(False)
        for index, block in enumerate(model.model.layers):
            model.model.layers[index] = _fsdp1(block)
        diagnosis = diagnose(_fsdp1(model))
    _expect(
        diagnosis, "mixed-requires-grad", "warning", r"1 of 3 FSDP1 units .*model\.layers\.0\): 38\.6 kB", r"Use FSDP2"
    )


def test_frozen_parameters_in_a_unit_of_fsdp1_cost_gradient_memory():
    run_ranks(_frozen_under_fsdp1, 2)


# ---- activation checkpointing
# -----------------------------------------------------------------------------------------


def _checkpointing():
    twice = make_model("llama")
    twice.gradient_checkpointing_enable({"use_reentrant": False})
    for index, block in enumerate(twice.model.layers):
        twice.model.layers[index] = checkpoint_wrapper(block)
    _expect(
        diagnose(_sharded(model=twice)),
        "checkpointing-twice",
        "warning",
        r"2 modules .*: model\.layers\.0, model\.layers\.1",
        r"Switch one off",
    )
    nested = make_model("llama")
    nested.model.layers[1] = checkpoint_wrapper(checkpoint_wrapper(nested.model.layers[1]))
    _expect(
        diagnose(_sharded(model=nested)), "checkpointing-twice", "warning", r"1 modules .*model\.layers\.1", r"Switch"
    )

    outside = _sharded()
    outside.model.layers[0] = checkpoint_wrapper(outside.model.layers[0])
    cure = r"fully_shard\(checkpoint_wrapper\(block\)\)"
    diagnosis = diagnose(outside)
    _expect(
        diagnosis,
        "checkpointing-outside-unit",
        "info",
        r"1 checkpoint wrappers .*: model\.layers\.0\. It gathers no",
        cure,
    )
    assert not _codes(diagnosis)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated upstream
        old = make_model("llama")
        for index, block in enumerate(old.model.layers):
            old.model.layers[index] = checkpoint_wrapper(_fsdp1(block), checkpoint_impl=CheckpointImpl.REENTRANT)
        diagnosis = diagnose(_fsdp1(old))
    _expect(diagnosis, "checkpointing-outside-unit", "warning", r"2 .* gathers its unit once more", cure)


def test_checkpointing_twice_or_outside_its_unit_is_named():
    run_ranks(_checkpointing, 2)


# ---- between ranks
# ----------------------------------------------------------------------------------------------------


def _ranks_differ():
    rank = dist.get_rank()
    policy = HybridPolicy() if rank == 0 else HybridPolicy(block_types=("LlamaMLP",))
    cure = r"same model with the same policy"
    before = diagnose(make_model("llama"), policy=policy)  # nothing is sharded yet, so nothing can hang
    _expect(
        before,
        "plans-differ",
        "error",
        r"rank 1: \d+ differences from rank 0: unit model\.layers\.0\.mlp \(9648 parameters\) is not on rank 0",
        cure,
    )

    frozen = make_model("llama")
    frozen.model.norm.requires_grad_(rank == 0)
    fact = r"rank 1: 1 differences.*model\.norm\.weight is \(48,\) float32 frozen in \S.*, on rank 0 .* trainable"
    _expect(diagnose(_sharded(model=frozen)), "plans-differ", "error", fact, cure)

    rotary = _sharded()
    rotary.model.rotary_emb.inv_freq += rank
    fact = r"rank 1: 1 differences from rank 0: model\.rotary_emb\.inv_freq is \(6,\) float32 crc32 "
    _expect(diagnose(rotary), "buffers-differ", "error", fact, r"initialize_missing")

    one = _sharded()
    if rank == 1:
        one.model.extra = nn.Linear(2, 2)
    diagnosis = diagnose(one)
    _expect(diagnosis, "unmanaged-parameters", "error", r"^On rank 1: 2 trainable", r"shard the whole")
    _expect(diagnosis, "plans-differ", "error", r"parameter model\.extra\.weight .* is not on rank 0", cure)

    broken = make_model("llama") if rank == 0 else nn.Identity()
    with pytest.raises(
        FSDPToolsError, match=r"Rank 1 could not look.*Cure that rank" if rank == 0 else r"no parameters"
    ):
        diagnose(broken)


def test_ranks_that_differ_get_the_difference_in_words():
    run_ranks(_ranks_differ, 2)


# ---- Accelerate
# -------------------------------------------------------------------------------------------------------


def _under_accelerate(wrapped):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap" if wrapped else "no_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"] if wrapped else None,
        cpu_ram_efficient_loading=False,
    )
    model = make_model("llama")
    from accelerate.utils import fsdp2_prepare_model

    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = plugin  # Accelerate 1.15 takes no FSDP on CPUs; its own sharding runs there
    model = fsdp2_prepare_model(accelerator, model)
    diagnosis = diagnose(model)
    if wrapped:
        assert not _codes(diagnosis), diagnosis
    else:
        _expect(diagnosis, "root-only", "error", r"No block has a unit: .* in \(root\)", r"NO_WRAP")


@pytest.mark.parametrize("wrapped", [True, False])
def test_what_accelerate_sharded_is_read_too(wrapped):
    run_ranks(_under_accelerate, 2, wrapped)
