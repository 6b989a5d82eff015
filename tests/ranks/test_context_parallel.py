"""Ranks that share rows compute what one process does on whole rows: losses, gradients, a step, evaluation, outputs."""

import copy
import sys
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from hf_fsdp_tools import ConfigError, ParallelDims
from hf_fsdp_tools.extensions import context_parallel
from hf_fsdp_tools.steps import make_wrap_plan, parallelize_model, shard_model
from tests._checkpoints import full, randomize, tiny_config
from tests._dist import run_cases, run_ranks
from tests._grids import fast_and_nightly, in_turn
from tests._noted import calls_of

KINDS = {  # with what attention is beside full causal attention
    "llama": "",
    "gemma3_text": "sliding windows",
    "gpt_oss": "sinks and windows",
    "qwen3_moe": "experts, and a loss that balances them",
    "deepseek_v3": "latent attention (MLA)",
    "cohere2": "layers without rotary angles",
    "gemma2": "soft caps",
    "llama4_text": "chunks",
    "three heads": "keys and values gathered, as the ranks do not divide the heads",
    "one group": "keys and values repeated, as there are fewer heads of them than ranks",
}
READERS = {  # in addition to attention that exchanges heads
    "qwen3_next": "a convolution and a delta rule, whose heads are exchanged",
    "mamba2": "a state space of one group of heads",
    "mamba": "a state space of channels",
    "deepseek_v32": "an indexer, whose keys are gathered as those of the attention around it",
    "bloom": "attention that is not in transformers' registry",
    "gpt2": "a decoder that needs whole rows after its blocks",
}
READERS = {kind: what for kind, what in READERS.items() if kind in CONFIG_MAPPING}  # transformers 5.17 lacks some
OPTIONS = {
    "qwen3_moe": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    "one group": {"num_key_value_heads": 1},
    "three heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 16},
}
LENGTH = 21  # which neither 2 nor 4 divides


@cache
def plain(kind: str) -> Any:
    """A model in which every parameter matters, without randomness."""
    config = tiny_config("llama" if kind in ("three heads", "one group") else kind)
    config.update(OPTIONS.get(kind, {}))
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if kind == "gpt_oss" else None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def rows_of(kind: str, replica: int) -> dict[str, torch.Tensor]:
    """A batch for the ranks of a group: right padding, packed documents, labels that are left out."""
    generator = torch.Generator().manual_seed(replica)
    ids = torch.randint(3, 60, (2, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, : 4 + replica] = -100
    rows = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        documents = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)])
        return rows | {"position_ids": documents.expand(2, -1).contiguous()}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[1, 15:] = 0
        labels[1, 15:] = -100
        return rows | {"attention_mask": mask}
    return rows


def sharded_copy(kind: str, dims: ParallelDims, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_config(
        plain(kind).config, attn_implementation=plain(kind).config._attn_implementation
    )
    model.load_state_dict(plain(kind).state_dict())
    return shard_model(model, make_wrap_plan(model), mesh=dims.build_mesh("cpu"), **options)


def rows_are_shared(kind, rows, dims, **options):
    """Loss and gradients; evaluation, and outputs without labels."""
    replicas = dist.get_world_size() // dims.cp_size
    own = dist.get_rank() // dims.cp_size
    model = sharded_copy(kind, dims, **options).train()
    one = plain(kind).train()
    one.zero_grad()
    losses = [one(**rows_of(rows, replica), use_cache=False).loss for replica in range(replicas)]
    (sum(losses) / replicas).backward()
    loss = model(**rows_of(rows, own)).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), losses[own].detach())
    expected = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name in expected:
            torch.testing.assert_close(full(parameter.grad), expected[name], rtol=1e-4, atol=1e-6, msg=name)
    with torch.no_grad():
        batch = rows_of(rows, own)
        torch.testing.assert_close(model.eval()(**batch).loss, one.eval()(**batch, use_cache=False).loss)
        del batch["labels"]
        torch.testing.assert_close(model(**batch).logits, one(**batch, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def packed_recurrences_keep_documents_apart():
    """A CPU has no kernels for packed rows of a hybrid: transformers' own functions run document by document."""
    lengths = [8, 2, LENGTH - 10]
    starts = torch.tensor([0, 8, 10, LENGTH], dtype=torch.int32)
    files = sys.modules[type(plain("qwen3_next")).__module__]
    convolve, rule = files.causal_conv1d_fn, files.torch_chunk_gated_delta_rule

    def convolved(hidden, *args, seq_idx=None, **kwargs):
        counts = [hidden.shape[2]] if seq_idx is None else torch.unique_consecutive(seq_idx, return_counts=True)[1]
        return torch.cat([convolve(part, *args, **_own(kwargs)) for part in hidden.split([*counts], 2)], 2)

    def ruled(query, key, value, g, beta, cu_seqlens=None, **kwargs):
        counts = [query.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        assert sum(counts) == query.shape[1]
        parts = zip(*(each.split(counts, 1) for each in (query, key, value, g, beta)), strict=True)
        found = [rule(q, k, v, g=g, beta=b, **_own(kwargs))[0] for q, k, v, g, b in parts]
        return torch.cat(found, 1), None

    ids = torch.randint(3, 60, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    batch["labels"][0, starts[:-1]] = -100
    batch["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    batch |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 11, "max_length_k": 11}
    batch["seq_idx"] = torch.repeat_interleave(torch.arange(3), starts.diff())[None].to(torch.int32)
    one = plain("qwen3_next").train()
    one.zero_grad()
    alone = [one(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    expected = one.loss_function(torch.cat(alone, 1), batch["labels"], vocab_size=one.config.vocab_size)
    expected.backward()
    with patch.multiple(files, causal_conv1d_fn=convolved, torch_chunk_gated_delta_rule=ruled):
        model = sharded_copy("qwen3_next", ParallelDims(cp_size=2)).train()
        loss = model(**batch).loss
        loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    for (name, parameter), other in zip(model.named_parameters(), one.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(full(parameter.grad), other.grad, rtol=1e-4, atol=1e-6, msg=name)


def _own(kwargs):
    return {name: value for name, value in kwargs.items() if not name.startswith(("cu_seq", "max_length", "seq_idx"))}


def bytes_follow_the_formula():
    """4 all-to-alls per attention and direction, of this rank's part of queries, keys, values and outputs."""
    model = sharded_copy("llama", ParallelDims(cp_size=2))
    config = model.config
    with calls_of(context_parallel.Rows, "exchange", lambda _, rows, tensor: tensor.numel()) as sent:
        model(**rows_of("whole", 0)).loss.backward()
    tokens, width = 2 * -(-LENGTH // 2), config.hidden_size // config.num_attention_heads
    groups = max(config.num_key_value_heads, 2)
    assert sum(sent) == config.num_hidden_layers * tokens * width * 2 * (config.num_attention_heads + groups)


def what_cannot_share_rows_is_refused():
    mesh = ParallelDims(cp_size=2).build_mesh("cpu")
    next_words = AutoModelForCausalLM
    for kind, auto, match in (
        ("xlnet", next_words, "not that of its words alone"),
        ("xlm", next_words, r"attentions.0 .MultiHeadAttention. reads other tokens in its own code"),
        ("qwen3", AutoModelForSequenceClassification, r"ForSequenceClassification. is not that of the next token"),
    ):
        model = auto.from_config(tiny_config(kind))
        with pytest.raises(ConfigError, match=match):
            shard_model(model, make_wrap_plan(model), mesh=mesh)
    with pytest.raises(ConfigError, match=r"has 3 attention heads, .* the largest cp_size that goes is 3.$"):
        context_parallel.check_rows(plain("three heads"), 4)
    model = sharded_copy("llama", ParallelDims(cp_size=2))
    with pytest.raises(ConfigError, match="have different rows"):
        model(**rows_of("whole", dist.get_rank()))


def memory_falls_with_the_ranks():
    """What is kept for the backward pass, logits among it, of 2 ranks: half of each token's, beside what comes before
    the first block."""
    ids = torch.arange(2 * 64).reshape(2, 64) % 90

    def kept(model: Any, tokens: int) -> tuple[int, int]:
        """Bytes of activations, and of the largest tensor with a value for each word."""
        found: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() and tensor.shape[0] in (2, 2 * tokens) and tensor.is_floating_point():
                found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=ids, labels=ids, use_cache=False)
        words = [each.nbytes for each in found.values() if each.shape[-1] == model.config.vocab_size]
        return sum(each.untyped_storage().nbytes() for each in found.values()), max(words)

    whole, logits = kept(plain("llama"), 64)
    part, own_logits = kept(sharded_copy("llama", ParallelDims(cp_size=2)), 32)
    assert own_logits * 2 == logits
    assert part < 0.55 * whole, (part, whole)


LAYOUTS = [ParallelDims(cp_size=2), ParallelDims(cp_size=4), ParallelDims(cp_size=2, dp_replicate_size=2)]


ROWS = ["whole", "packed", "padded"]


def few(kinds, rows, layouts, are_recomputed):
    """Every kind of rows with full causal attention; of other attention those that have a mask of their own."""
    others = in_turn(["gpt_oss", "deepseek_v3"], rows[2:0:-1], layouts[:1], are_recomputed)
    others.append(("three heads", "whole", layouts[0], False))  # for which the mask of a part is made
    others.append(("one group", "packed", layouts[1], False))
    others += in_turn([kind for kind in kinds if kind in READERS], rows, layouts[:1], are_recomputed)
    return [
        *in_turn(kinds[:1], rows, layouts[:1], are_recomputed),
        *others,
        ("gemma3_text", "packed", layouts[1], True),
    ]


@fast_and_nightly(few, [*KINDS, *READERS], ROWS, LAYOUTS, [False, True])
def test_ranks_that_share_rows_compute_what_one_process_does(combinations):
    cases: dict[int, dict[str, Any]] = {2: {}, 4: {}}
    for kind, rows, dims, recomputed in combinations:
        if kind == "three heads" and dims.cp_size > 3:  # is refused
            continue
        run = partial(rows_are_shared, kind, rows, dims, activation_checkpointing=recomputed)
        cases[2 if dims == LAYOUTS[0] else 4][f"{kind}, {rows} rows, {dims}, {recomputed}"] = run
    for ranks in cases:
        run_ranks(run_cases, ranks, cases[ranks])


# ---- what the usual rows and calls do not show ----

CP, TP = ParallelDims(cp_size=2), ParallelDims(tp_size=2)
SIZES = {"vocab_size": 132, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5], "original_max_position_embeddings": 11}
ANGLES = {
    "dynamic": transformers.LlamaConfig(
        **SIZES,
        max_position_embeddings=8,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    ),
    "longrope": transformers.Phi3Config(
        **SIZES,
        original_max_position_embeddings=11,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS},
    ),
}


@cache
def whole(kind: str) -> Any:
    config = ANGLES.get(kind) or tiny_config(kind, 2)
    if kind.startswith("qwen3_omni"):
        return randomize(transformers.Qwen3OmniMoeThinkerForConditionalGeneration._from_config(config)).eval()
    return randomize(AutoModelForCausalLM.from_config(config)).eval()


def shared(kind: str, dims: ParallelDims) -> Any:
    """The same model with real weights, made by the public steps."""
    model, mesh = copy.deepcopy(whole(kind)), dims.build_mesh("cpu")
    parallelize_model(model, mesh)
    return shard_model(model, make_wrap_plan(model), mesh=mesh)


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(1))


def same_gradients(model: Any, one: Any, times: int = 1, **batch: Any) -> None:
    """After so many passes."""
    losses = []
    for each in (model, one):
        each.zero_grad()
        for _ in range(times):
            losses.append(each(**batch, use_cache=False).loss)
            losses[-1].backward()
    losses = losses[::times]
    torch.testing.assert_close(losses[0].detach(), losses[1].detach())
    for name, parameter in model.named_parameters():
        found, expected = parameter.grad, one.get_parameter(name).grad  # towers of images have none
        assert (found is None) == (expected is None), name
        if found is not None:
            torch.testing.assert_close(full(found), expected, rtol=1e-4, atol=1e-6, msg=name)


def angles_that_follow_the_length() -> None:
    for kind in ANGLES:
        model = shared(kind, CP)
        for length in (11, 12):  # of 11 ids_of, longrope takes short angles, and of 12 long ones
            same_gradients(model, whole(kind), input_ids=ids_of(length), labels=ids_of(length))


def logits_of_some_tokens() -> None:
    model, ids = shared("llama", CP), ids_of(9)
    for kept in (1, 3, 6, torch.tensor([2, 5])):
        found, expected = (
            m(input_ids=ids, use_cache=False, logits_to_keep=kept).logits for m in (model, whole("llama"))
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="logits_to_keep is for passes without labels"):
        model(input_ids=ids, labels=ids, logits_to_keep=2)


def masks_of_ones_own() -> None:
    """Masks have four dimensions, in both dtypes: two documents in an odd row, and a count, as every Trainer sends."""
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    seen[4:, :4] = False
    batch = {"input_ids": ids_of(9), "labels": ids_of(9), "num_items_in_batch": torch.tensor(7)}
    for mask in (seen, torch.where(seen, 0.0, torch.finfo(torch.float32).min)):
        own = mask.expand(2, 1, 9, 9)
        same_gradients(shared("llama", CP), whole("llama"), **batch, attention_mask=own)


def routers_of_padded_rows() -> None:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 7:] = 0
    options = {"attention_mask": mask, "output_router_logits": True, "use_cache": False}
    found, expected = (m(input_ids=ids_of(9), **options) for m in (shared("qwen3_moe", CP), whole("qwen3_moe")))
    torch.testing.assert_close(found.router_logits, expected.router_logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)


def labels_that_are_no_words() -> None:
    labels = ids_of(9)
    labels[0, 3] = whole("llama").config.vocab_size + 5
    with pytest.raises(RuntimeError, match="a label is none of the"):
        shared("llama", TP).train()(input_ids=ids_of(9), labels=labels)


def real_weights_that_see_a_part() -> None:
    """The activation function of Apertus, and norms of queries and keys of Qwen3-Omni, of which no rule of their plans
    speaks."""
    for kind in ("apertus", "qwen3_omni_moe_thinker"):
        model = shared(kind, TP)
        for times in (1, 2):  # what has accumulated is not summed again
            same_gradients(model, whole(kind), times, input_ids=ids_of(9), labels=ids_of(9))


def test_what_else_is_done_with_a_model_whose_rows_are_shared() -> None:
    cases = (
        packed_recurrences_keep_documents_apart, bytes_follow_the_formula, what_cannot_share_rows_is_refused,
        memory_falls_with_the_ranks, angles_that_follow_the_length, logits_of_some_tokens, masks_of_ones_own,
        routers_of_padded_rows, labels_that_are_no_words, real_weights_that_see_a_part,
    )  # fmt: skip
    run_ranks(run_cases, 2, cases)
