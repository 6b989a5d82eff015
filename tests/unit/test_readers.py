"""Which modules of a block read other tokens, and around which functions ranks that share rows exchange heads there."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.doge import modeling_doge

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.extensions.context_parallel import _padded as padded
from hf_fsdp_tools.extensions.readers import _of_part_of_heads_in as of_part_of_heads_in
from tests._checkpoints import tiny_config
from tests.api import KEYS, Rows, check_rows, find_readers, mixes_tokens_itself, of_tokens

modeling_beam = pytest.importorskip("transformers.models.beam.modeling_beam", reason="transformers 5.23 has it")
ATTENTION, CONVOLUTION = "ALL_ATTENTION_FUNCTIONS", "causal_conv1d_fn"


def readers_of(kind: str, attn_implementation: str | None = None, **options: int) -> dict[str, set[str]]:
    config = tiny_config(kind)
    config.update(options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    check_rows(model, 2)
    blocks = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    found = [reader for block in blocks for reader in find_readers(block, 2)]
    return {type(module).__name__: set(functions) for module, functions in found}


def test_heads_are_exchanged_around_the_functions_that_are_known():
    assert readers_of("qwen3_next") == {
        "Qwen3NextGatedDeltaNet": {CONVOLUTION, "torch_chunk_gated_delta_rule"},
        "Qwen3NextAttention": {ATTENTION},
    }
    assert readers_of("bert") == {"BertSelfAttention": {ATTENTION}}, "and not the module around it"


def test_whole_rows_are_for_what_is_not_known_and_for_the_readers_around_it():
    assert readers_of("bloom") == {"BloomAttention": set()}
    assert readers_of("zaya") == {"ZayaAttention": set()}, "what makes its queries has convolutions"


def test_attention_that_does_not_run_on_a_part_of_a_row_is_given_keys_of_whole_rows():
    assert readers_of("deepseek_v32") == {"DeepseekV32Attention": KEYS}, "it has an indexer"
    assert readers_of("doge") == {"DogeAttention": KEYS}, "its mask is made of values"
    assert readers_of("beam") == {"BeamAttention": set()}, "it was seen not to run with them"
    for file in (modeling_doge, modeling_beam):
        assert isinstance(file.ALL_ATTENTION_FUNCTIONS, AttentionInterface), (
            "a pass that failed left its own in the file"
        )


def test_heads_that_ranks_do_not_divide_need_any_mask_or_whole_rows():
    three = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 16}
    assert readers_of("llama", "sdpa", **three) == {"LlamaAttention": {ATTENTION}}
    assert readers_of("llama", "flex_attention", **three) == {"LlamaAttention": set()}


def test_a_kernel_in_place_of_a_module_is_given_whole_rows():
    with torch.device("meta"):
        block = AutoModelForCausalLM.from_config(tiny_config("llama")).model.layers[0]
    assert list(find_readers(block, 2)) == [(block.self_attn, frozenset({ATTENTION}))]
    block.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    assert list(find_readers(block, 2)) == [(block.self_attn, frozenset())]


class Smoothing(nn.Module):
    """Mixes tokens by a convolution, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 3)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(hidden_states.mT)).mT


def test_a_convolution_reads_other_tokens():
    smoothing = Smoothing()
    assert list(find_readers(nn.Sequential(nn.Linear(4, 4), smoothing), 2)) == [(smoothing, frozenset())]
    assert mixes_tokens_itself(smoothing)
    smoothing.wide = smoothing.narrow
    assert not mixes_tokens_itself(smoothing) and not list(find_readers(nn.Sequential(smoothing), 2))


def test_only_what_belongs_to_tokens_is_changed():
    hidden, angles, filled = torch.zeros(2, 6, 4), torch.zeros(1, 1, 6, 4), {"layer": torch.zeros(2, 4, 6)}

    def half(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.narrow(dim, 0, 3)

    assert of_tokens("hidden_states", (hidden, None), 6, half)[0].shape == (2, 3, 4)
    assert of_tokens("hidden_states", torch.zeros(4, 2, 6, 8), 6, half).shape == (4, 2, 3, 8)
    assert of_tokens("position_embeddings", [angles], 6, half)[0].shape == (1, 1, 3, 4)
    assert of_tokens("shared_kv_states", filled, 6, half) is filled, "the model fills it while it runs"


def test_a_scan_gets_whole_rows_of_a_part_of_the_heads_and_the_boundaries_of_whole_rows():
    """Without a group, what the others send is what this rank has."""
    rows, given = Rows(None, 1, 2, is_cut=True, length=6), {}
    states, rates, groups = torch.zeros(1, 3, 4, 8), torch.zeros(1, 3, 4), torch.zeros(1, 3, 1, 5)
    per_head, documents, boundaries = torch.arange(4.0), torch.tensor([[0, 0, 1]]), torch.tensor([0, 2, 4, 6])

    def scan(hidden_states: torch.Tensor, *args: torch.Tensor, **kwargs: torch.Tensor) -> tuple[torch.Tensor, None]:
        given.update(kwargs, args=args)
        return hidden_states, None

    known = of_part_of_heads_in({"mamba2_chunk_scan": scan}, rows)
    options = {"D": per_head, "seq_idx": documents, "cu_seqlens": boundaries}
    output, state = known["mamba2_chunk_scan"](states, rates, groups, **options)
    assert output.shape == states.shape and state is None
    assert [tuple(each.shape) for each in given["args"]] == [(1, 6, 2), (1, 6, 1, 5)]
    assert given["D"].tolist() == [2, 3] and given["seq_idx"].shape == (1, 6) and given["cu_seqlens"] is boundaries
    with pytest.raises(ConfigError, match="3 heads cannot be divided among 2 ranks"):
        known["mamba2_chunk_scan"](states[:, :, :3])


def test_the_padding_of_a_packed_row_is_a_document_of_its_own():
    rows = Rows(None, 0, 4, is_cut=True, length=6)
    assert padded("cu_seq_lens_q", torch.tensor([0, 4, 6]), rows).tolist() == [0, 4, 6, 8]
