"""`diagnose` names what is really wrong on real ranks, alike on every rank, and leaves a healthy model in peace."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import FSDPToolsError, ParallelDims, WrapPolicy, diagnose
from hf_fsdp_tools.errors import WrapPlanError
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from tests._checkpoints import make_model
from tests._dist import run_cases, run_ranks

BATCH = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(1))


def _mesh():
    return ParallelDims().build_mesh("cpu")


def _sharded(kind="llama", model=None, **settings):
    model = model if model is not None else make_model(kind)
    return shard_model(model, make_wrap_plan(model), mesh=_mesh(), **settings)


def _codes(diagnosis, *severities):
    return [f.code for f in diagnosis.findings if f.severity in (severities or ("error", "warning"))]


def _expect(diagnosis, code, severity, fact, cure):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, diagnosis)
    assert all(other == diagnosis for other in everyone)
    (finding,) = [f for f in diagnosis.findings if f.code == code] or [None]
    assert finding, f"no {code} in {diagnosis}"
    assert finding.severity == severity
    assert re.search(fact, finding.problem), finding.problem
    assert re.search(cure, finding.fix), finding.fix
    return finding


def _healthy(kind: str) -> str:
    model = _sharded(kind)
    diagnosis = diagnose(model, values=True)
    assert not _codes(diagnosis), diagnosis
    if kind == "tied":  # between forward and backward the root is gathered: still nothing is wrong
        loss = model(input_ids=BATCH, labels=BATCH).loss
        assert not _codes(diagnose(model))
        loss.backward()
        assert not _codes(diagnose(nn.Sequential(model))), "below a wrapper"
    return str(diagnosis.units)


def test_healthy_models_of_every_kind_have_no_error_and_no_warning():
    cases = {kind: partial(_healthy, kind) for kind in ("llama", "tied", "deepseek_v3", "t5")}
    first, second = run_ranks(run_cases, 2, cases)
    assert first == second
    assert re.search(r"LlamaForCausalLM: [\d.]+ K parameters in \d units \(FSDP2\)", first["llama"])
    assert re.search(r"\(root\)  LlamaForCausalLM", first["llama"])
    assert re.search(r"[├└]─ model\.layers\.\{0\.\.1\}  LlamaDecoderLayer  2 × [\d.]+ K parameters, ", first["llama"])


def wrapped_for_checkpointing_or_compiled() -> None:
    wrapped = make_model("llama")
    for index, block in enumerate(wrapped.model.layers):
        wrapped.model.layers[index] = checkpoint_wrapper(block)
    assert not _codes(diagnose(_sharded(model=wrapped)))
    assert not _codes(diagnose(_sharded(activation_checkpointing=True)))
    assert not _codes(diagnose(_sharded(model=torch.compile(make_model("llama")))))


def no_unit_or_the_root_alone() -> None:
    fact = r"each of 2 ranks holds all 183\.7 kB"
    _expect(diagnose(make_model("llama")), "not-sharded", "error", fact, r"shard_model\(model")
    diagnosis = diagnose(fully_shard(make_model("llama"), mesh=_mesh()))
    fact = r"gathers 45\.9 K of 45\.9 K parameters"
    finding = _expect(diagnosis, "root-only", "error", fact, r"FSDPPlugin")
    assert "at once, in (root)" in finding.problem
    assert _codes(diagnosis) == ["root-only"], "what follows from it is not repeated"


def blocks_are_missed_and_a_unit_is_too_large() -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 67, "num_attention_heads": 4, "num_key_value_heads": 2}
    deep = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=131, num_hidden_layers=6))
    for module in (deep.model.layers[0], deep.model.layers[3], deep.model):
        fully_shard(module, mesh=_mesh())
    diagnosis = diagnose(fully_shard(deep, mesh=_mesh()))
    fact = r"4 of 6 blocks .*: model\.layers\.1, model\.layers\.2, model\.layers\.4, model\.layers\.5"
    _expect(diagnosis, "missed-blocks", "warning", fact, r"wrap policy")
    fact = r"1 of 4 units .*The largest is model with 7\d\.\d K"
    _expect(diagnosis, "oversize-unit", "warning", fact, r"min_unit_params")


def a_given_plan_is_compared_unit_by_unit() -> None:
    model = _sharded()
    plan = make_wrap_plan(make_model("llama"), policy=WrapPolicy(block_types=("LlamaMLP", "LlamaAttention")))
    fact = r"4 of its 8 units are not there \(model\.layers\.0\.self_attn"
    _expect(diagnose(model, plan=plan), "plan-mismatch", "warning", fact, r"shard_model\(model, plan\)")
    found = _codes(diagnose(model, policy=WrapPolicy(block_types=("LlamaMLP",))))
    assert not found, "a policy asks for no exact units"
    with pytest.raises(WrapPlanError, match="NoSuchLayer"):
        diagnose(model, policy=WrapPolicy(block_types=("NoSuchLayer",)))


def added_after_sharding_or_nan() -> None:
    with torch.device("meta"):
        adapter = nn.Linear(48, 48)
    model = _sharded()
    model.model.layers[0].self_attn.q_proj.adapter = adapter
    diagnosis = diagnose(model)
    _expect(diagnosis, "meta-parameters", "error", r"2 of \d+ parameters .*q_proj\.adapter\.weight", r"load_weights")
    _expect(diagnosis, "unmanaged-parameters", "error", r"2 trainable .*q_proj\.adapter\.weight", r"shard the whole")
    spoiled = _sharded()
    with torch.no_grad():
        spoiled.model.norm.weight.to_local()[:3] = float("nan")
    assert not _codes(diagnose(spoiled)), "values are read when asked"
    fact = r"model\.norm\.weight \(6 elements\)"
    _expect(diagnose(spoiled, values=True), "non-finite-values", "error", fact, r"load_weights")


def ties_that_came_apart() -> None:
    emptied = make_model("tied").to("meta").to_empty(device="cpu")
    for parameter in emptied.parameters():
        nn.init.constant_(parameter, 0.5)
    nn.init.zeros_(emptied.lm_head.weight)
    fact = r"1 tied .* 1 of them .*model\.embed_tokens\.weight = lm_head"
    _expect(diagnose(emptied), "tie-broken", "error", fact, r"load_weights, which keeps ties")
    again = make_model("tied")
    for module in (*again.model.layers, again.model.embed_tokens, again.lm_head, again):
        fully_shard(module, mesh=_mesh())
    again.tie_weights()
    fact = r"in lm_head and in model\.embed_tokens"
    finding = _expect(diagnose(again), "managed-twice", "error", fact, r"before sharding")
    assert "model.embed_tokens.weight = lm_head.weight" in finding.problem


ONE_MODEL = r"same model with the same policy"


def policies_buffers_or_models_differ() -> None:
    """Nothing is sharded yet, so nothing can hang."""
    policy = WrapPolicy() if dist.get_rank() == 0 else WrapPolicy(block_types=("LlamaMLP",))
    fact = r"rank 1: \d+ differences from rank 0: unit model\.layers\.0\.mlp \(9648 parameters\) is not on rank 0"
    _expect(diagnose(make_model("llama"), policy=policy), "plans-differ", "error", fact, ONE_MODEL)
    rotary = _sharded()
    rotary.model.rotary_emb.inv_freq += dist.get_rank()
    fact = r"rank 1: 1 differences from rank 0: model\.rotary_emb\.inv_freq is \(6,\) float32 crc32 "
    _expect(diagnose(rotary), "buffers-differ", "error", fact, r"initialize_missing")
    rank = dist.get_rank()
    with pytest.raises(FSDPToolsError, match="no parameters"):
        diagnose(make_model("llama") if rank == 0 else nn.Identity())


def a_module_on_one_rank() -> None:
    one = _sharded()
    if dist.get_rank() == 1:
        one.model.extra = nn.Linear(2, 2)
    diagnosis = diagnose(one)
    _expect(diagnosis, "unmanaged-parameters", "error", r"^On rank 1: 2 trainable", r"shard the whole")
    _expect(diagnosis, "plans-differ", "error", r"parameter model\.extra\.weight .* is not on rank 0", ONE_MODEL)


def test_what_is_wrong_is_named_and_other_ways_to_shard_are_read_too():
    cases = (
        wrapped_for_checkpointing_or_compiled,
        no_unit_or_the_root_alone,
        blocks_are_missed_and_a_unit_is_too_large,
        a_given_plan_is_compared_unit_by_unit,
        added_after_sharding_or_nan,
        ties_that_came_apart,
        policies_buffers_or_models_differ,
        a_module_on_one_rank,
    )
    run_ranks(run_cases, 2, cases)
