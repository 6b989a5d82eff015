"""The gated delta rule in an estimate: one kernel in each pass, whatever the length of a row."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from hf_fsdp_tools import ConfigError, TrainingSetup
from hf_fsdp_tools.foresight.tracing import recorder
from hf_fsdp_tools.foresight.tracing.delta_rule import CHUNK, delta_rule_flops
from tests._checkpoints import RELEASE
from tests.api import Work, build, step_of, trace_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}


def events(tokens: int, device: str) -> list[Work]:
    config = Qwen3_5TextConfig(**SIZES, num_hidden_layers=4, vocab_size=256)
    setup = TrainingSetup(num_processes=2, max_length=tokens)
    model, plan = build(config, setup)
    return [each for each in trace_model(model, plan, setup, device=device).events if isinstance(each, Work)]


@pytest.mark.skipif(RELEASE <= (5, 17), reason="its function repeats no keys")
def test_operations_are_those_of_transformers_loop_and_of_its_triangular_system() -> None:
    query = torch.randn(2, 256, 2, 16)
    value, rates = torch.randn(2, 256, 4, 32), torch.rand(2, 256, 4)
    with FlopCounterMode(display=False) as counted:
        modeling_qwen3_5.torch_chunk_gated_delta_rule(query, query, value, -rates, rates, chunk_size=CHUNK)
    solved = 2 * 256 * 4 * CHUNK * (16 + 32)
    found = delta_rule_flops(query.shape, value.shape, is_backward=False)
    assert found == counted.get_total_flops() + solved


def test_a_long_row_takes_no_more_kernels_than_a_short_one_on_a_gpu_and_its_loop_is_followed_on_a_cpu() -> None:
    short, long = events(128, "cuda"), events(1024, "cuda")
    assert len(short) == len(long)
    rule = delta_rule_flops(torch.Size((1, 1024, 2, 16)), torch.Size((1, 1024, 4, 32)), is_backward=False)
    assert [work.flops for work in long].count(rule) == 3 and [work.flops for work in long].count(2.5 * rule) == 3
    assert len(events(256, "cpu")) > len(events(128, "cpu")) > len(short)


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "jamba"])
def test_a_long_row_of_a_mamba_takes_no_more_kernels_than_a_short_one(kind: str) -> None:
    config = CONFIG_MAPPING[kind](**SIZES, num_hidden_layers=2, vocab_size=256)
    counts = [step_of(config, TrainingSetup(max_length=tokens)).trace.events for tokens in (64, 1024)]
    assert len(counts[0]) == len(counts[1])


def test_a_loop_over_tokens_that_no_kernel_replaces_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_MOST_EVENTS", 4000)
    config = CONFIG_MAPPING["rwkv"](hidden_size=64, num_hidden_layers=1, vocab_size=256)
    with pytest.raises(ConfigError, match=r"blocks\.0\.attention loops over tokens.* fewer tokens"):
        step_of(config, TrainingSetup(max_length=512))
