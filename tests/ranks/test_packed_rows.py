"""Documents of packed rows attend by a kernel for lengths that vary. A CPU has none: a loop stands in for it."""

import sys
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import MethodType, ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, TrainingArguments, masking_utils
from transformers.integrations import liger as by_transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_fsdp_tools import ConfigError, ParallelDims, add_adapter, from_config, from_pretrained, save_pretrained
from hf_fsdp_tools.extensions import liger, packed_rows
from hf_fsdp_tools.extensions.packed_rows import Documents, attend
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from tests._checkpoints import RELEASE, full, lora, tiny_config
from tests._dist import run_cases, run_ranks
from tests._noted import calls_of
from tests._rounding import assert_near, with_rounding
from tests._training import ShardedTrainer
from tests.api import patched, sharding_of

LENGTHS = [[5, 1, 10], [16], [9, 7]]
"""Tokens of the documents in each row."""


def positions(lengths: list[list[int]] = LENGTHS) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def varlen(query: Any, key: Any, value: Any, starts: Any, of_keys: Any, longest: int, longest_keys: int, **given: Any):
    """As `torch.nn.attention.varlen.varlen_attn`: document after document."""
    assert starts.dtype == torch.int32 and starts is of_keys and longest == longest_keys
    assert query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    before, after = given["window_size"]
    assert after == 0 and longest == starts.diff().max() and starts[-1] == len(query)
    parts = []
    for first, last in pairwise(starts.tolist()):
        own = [each[first:last].transpose(0, 1)[None] for each in (query, key, value)]
        sees = torch.ones(last - first, last - first, dtype=torch.bool).tril()
        sees = sees if before < 0 else sees & ~sees.tril(-before - 1)
        part = scaled_dot_product_attention(*own, attn_mask=sees, scale=given["scale"], enable_gqa=True)
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


def described(kind: str, name: str, **given: Any) -> Any:
    config = tiny_config(kind)
    config._attn_implementation = name
    for key in ("sliding_window", "attention_chunk_size"):
        if hasattr(config, key):
            setattr(config, key, 4)
    make = {
        "llama": masking_utils.create_causal_mask,
        "mistral": masking_utils.create_sliding_window_causal_mask,
        "llama4_text": masking_utils.create_chunked_causal_mask,
    }[kind]
    rows = torch.zeros(len(LENGTHS), 16, config.hidden_size)
    return make(config=config, inputs_embeds=rows, **{"attention_mask": None, "past_key_values": None, **given})


CHUNKS = [0, 4, 5, 6, 10, 14, 16, 20, 24, 28, 32, 36, 40, 41, 45, 48]
if RELEASE <= (5, 17):  # chunks are those of rows, and not of documents
    CHUNKS = [0, 4, 5, 6, 8, 12, 16, 20, 24, 28, 32, 36, 40, 41, 44, 48]


@pytest.mark.parametrize(
    ("kind", "starts", "window"),
    [
        ("llama", [0, 5, 6, 16, 32, 41, 48], None),
        ("mistral", [0, 5, 6, 16, 32, 41, 48], 4),
        ("llama4_text", CHUNKS, None),
    ],
)
def test_a_mask_is_a_list_of_documents(kind, starts, window):
    made = described(kind, "sdpa|documents", position_ids=positions())
    assert isinstance(made, Documents) and made.starts.tolist() == starts and made.window == window
    assert made.longest == max(last - first for first, last in pairwise(starts))
    again = masking_utils.sdpa_mask(3, 16, 16, mask_function=made.mask_function(3, 16), allow_is_causal_skip=False)
    assert torch.equal(again, described(kind, "sdpa", position_ids=positions()))


def test_what_is_no_list_of_documents_stays_a_mask():
    blocks = torch.full((3, 16), -1)
    blocks[1, 3:7] = 0  # tokens of an image see each other
    padding = torch.ones(3, 16)
    padding[1, 12:] = 0
    sees_more = {"or_mask_function": lambda row, head, q, kv: (q < 3) & (kv < 3)}
    whole = positions([[16]] * 3)
    others = [{"attention_mask": padding}, {"block_sequence_ids": blocks}, sees_more, {"position_ids": whole}]
    for given in others:
        made = described("llama", "sdpa|documents", **given)
        expected = described("llama", "sdpa", **given)
        assert made is expected is None or torch.equal(made, expected), given
    assert described("llama", "sdpa|documents") is None, "rows of one document are causal without a mask"
    with torch.device("meta"):
        assert described("mistral", "sdpa|documents").is_meta, "no value can be read"


@pytest.mark.parametrize("case", ["fp32", "wide heads", "dropout"])
def test_what_the_kernel_lacks_is_computed_by_others(case):
    width = 264 if case == "wide heads" else 8
    query, key, value = (torch.randn(3, heads, 16, width) for heads in (4, 2, 2))
    dtypes = (torch.bfloat16,) if case == "fp32" else (torch.float32,)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    documents = described("mistral", "sdpa|documents", position_ids=positions())
    mask = described("mistral", "sdpa", position_ids=positions())
    found = []
    with patch.multiple(packed_rows, varlen_attn=None, _DTYPES=dtypes, runs_documents=lambda _: True):
        for given in (documents, mask):
            torch.manual_seed(0)
            dropout = 0.5 * (case == "dropout")
            found.append(attend(module, query, key, value, given, dropout=dropout, scaling=0.3)[0])
    torch.testing.assert_close(*found)


def plain(kind: str, dtype: torch.dtype) -> Any:
    config = tiny_config(kind)
    for key in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, 4)
    config.attention_dropout = 0.0
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def gradients_are_those_of_masks(kind, dtype=torch.float32, cp_size=1, has_kernel=True, **options):
    """Loss and gradients beside the same model's with masks, which is not sharded."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (3, 16), generator=generator)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions(), "use_cache": False}
    one = plain(kind, dtype)

    def passed(model):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return {"loss": loss.detach(), **{name: full(p.grad) for name, p in model.named_parameters()}}

    expected, allowed = with_rounding(partial(passed, one))
    mesh, model = ParallelDims(cp_size=cp_size).build_mesh("cpu"), plain(kind, dtype)
    dtypes = (torch.float32, torch.bfloat16)
    with (
        patched(runs_documents=lambda device_type: has_kernel),
        patch.multiple(packed_rows, varlen_attn=varlen, _DTYPES=dtypes, runs_documents=lambda _: has_kernel),
        calls_of(packed_rows, "varlen_attn" if has_kernel else "_one_by_one") as calls,
    ):
        shard_model(model, make_wrap_plan(model), mesh=mesh, **options)
        found = passed(model)
    assert len(calls) == model.config.num_hidden_layers * (1 + ("activation_checkpointing" in options))
    if dtype == torch.bfloat16:
        assert_near(found, expected, allowed)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def others_stay_as_they_are():
    with patched(runs_documents=lambda device_type: True):
        for kind, given, name in (
            ("llama", {}, "sdpa|documents"),
            ("llama", {"attn_implementation": "sdpa"}, "sdpa"),
            ("llama", {"attn_implementation": "eager"}, "eager"),
            ("gpt_oss", {}, "eager"),
            ("bert", {}, "sdpa"),
        ):
            model = from_config(tiny_config(kind), seed=0, **given)
            assert model.config._attn_implementation == name, (kind, given, model.config._attn_implementation)
        assert "sdpa" not in from_config(tiny_config("llama"), seed=0).config.to_json_string()
        heads = plain("llama", torch.float32)
        heads.config.num_attention_heads = 3  # which two ranks of a row cannot divide
        assert not packed_rows.configs_of_documents(heads, 2)
    assert from_config(tiny_config("llama"), seed=0).config._attn_implementation == "sdpa"


def test_gradients_are_those_of_masks():
    cases = {kind: partial(gradients_are_those_of_masks, kind) for kind in ("deepseek_v3", "llama4_text")}
    cases["bf16"] = partial(gradients_are_those_of_masks, "llama", torch.bfloat16)
    cases["cp"] = partial(gradients_are_those_of_masks, "gemma3_text", cp_size=2, activation_checkpointing=True)
    cases["cp, without the kernel"] = partial(gradients_are_those_of_masks, "gemma3_text", cp_size=2, has_kernel=False)
    run_ranks(run_cases, 2, cases | {"others": others_stay_as_they_are})


# ---- Liger's kernels ----


def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (hidden.float() * scale).to(hidden.dtype)


def gated(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def fused_loss(self: Any, input_ids: Any = None, labels: Any = None, **given: Any) -> CausalLMOutputWithPast:
    hidden = self.model(input_ids=input_ids, **given)[0]
    if labels is None:
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
    logits = functional.linear(hidden[:, :-1], self.lm_head.weight).float()
    return CausalLMOutputWithPast(loss=functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


def put_in(model: Any, **options: bool) -> None:
    assert not options.keys() - {"rms_norm"}
    model.forward = MethodType(fused_loss, model)
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(gated, layer.mlp)
        for module in (layer.input_layernorm, layer.post_attention_layernorm) if options.get("rms_norm", True) else ():
            module.forward = MethodType(norm, module)


@contextmanager
def imitated() -> Any:
    found = {name: ModuleType(name) for name in ("", ".transformers", ".transformers.monkey_patch")}
    modules: Any = {f"liger_kernel{name}": module for name, module in found.items()}
    modules["liger_kernel"].__spec__ = ModuleSpec("liger_kernel", None)
    modules["liger_kernel.transformers"]._apply_liger_kernel_to_instance = put_in
    modules["liger_kernel.transformers.monkey_patch"].MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": put_in}
    with patch.dict(sys.modules, modules), patch.object(by_transformers, "is_liger_kernel_available", lambda: True):
        yield


def losses(model: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    rows = torch.arange(3, 35).view(2, 16)
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def are_those_of_the_plain_model(tied: bool, folder: str) -> None:
    config, found = tiny_config("llama"), {}
    config.tie_word_embeddings = tied
    with imitated(), patch.object(liger, "refuse_liger", lambda device_type, **shares: None):
        for fused in (False, True, {"rms_norm": False}):
            model = from_config(config, seed=0, use_liger_kernel=fused, activation_checkpointing=True).train()
            assert ("forward" in vars(model.model.layers[0].mlp)) == bool(fused)
            found[str(fused)] = (*losses(model), str(sharding_of(model).plan))
            for loss, gradients in ((one[0], one[1]) for one in found.values()):
                torch.testing.assert_close((loss, gradients), found["False"][:2])
        assert len({plan for _, _, plan in found.values()}) == 1, "the same units"
        save_pretrained(model, folder)
        adapted = add_adapter(from_pretrained(folder, use_liger_kernel=True), lora(), seed=0).train()
        plain = add_adapter(from_pretrained(folder), lora(), seed=0).train()
        torch.testing.assert_close(losses(adapted), losses(plain))


def what_cannot_be_is_one_error(folder: str) -> None:
    config = tiny_config("llama")
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        from_config(config, seed=0, use_liger_kernel=True)
    with imitated():
        with pytest.raises(ConfigError, match="no kernels for gpt2"):
            from_config(tiny_config("gpt2"), seed=0, use_liger_kernel=True)
        with pytest.raises(ConfigError, match="need a GPU"):
            args = TrainingArguments(folder, use_cpu=True, use_liger_kernel=True, report_to="none")
            ShardedTrainer(from_config(config, seed=0), args, train_dataset=[{"input_ids": [3, 4]}]).train()
        mesh = ParallelDims(cp_size=2).build_mesh("cpu")
        refuse = liger.refuse_liger
        with (
            patch.object(liger, "refuse_liger", lambda device_type, shares: refuse("cuda", shares=shares)),
            pytest.raises(ConfigError, match="with cp_size or tp_size each rank has a part"),
        ):
            from_config(config, seed=0, mesh=mesh, use_liger_kernel=True)


def test_a_model_with_fused_kernels_is_planned_trained_adapted_and_saved_as_without(tmp_path: Any) -> None:
    cases: dict[str, Any] = {"refused": partial(what_cannot_be_is_one_error, str(tmp_path / "args"))}
    for tied in (False, True):
        cases[f"tied {tied}"] = partial(are_those_of_the_plain_model, tied, str(tmp_path / f"{tied}"))
    run_ranks(run_cases, 2, cases)
