"""Which modules of a block read other tokens, and around which functions ranks that share rows exchange heads there."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.doge import modeling_doge

from tests._checkpoints import tiny_config
from tests.api import KEYS, check_rows, find_readers, mixes_tokens_itself

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
