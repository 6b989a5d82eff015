"""The dry run of a model sees what a real step takes, gives back and computes; few blocks stand for many."""

import pytest
import torch
import transformers as hf

from hf_fsdp_tools.foresight import dry_run
from hf_fsdp_tools.foresight.build import build
from hf_fsdp_tools.foresight.dry_run import trace_model
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.trace import Trace

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 68,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": lambda layers: hf.LlamaConfig(**SIZES, num_hidden_layers=layers),
    "tied": lambda layers: hf.Qwen3Config(**SIZES, num_hidden_layers=layers, tie_word_embeddings=True),
    "gpt2": lambda layers: hf.GPT2Config(vocab_size=131, n_embd=48, n_layer=layers, n_head=4, n_positions=64),
    "mpt": lambda layers: hf.MptConfig(vocab_size=131, d_model=64, n_layers=layers, n_heads=4),
    "local and global": lambda layers: hf.Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=layers,
        sliding_window=8,
        layer_types=(["sliding_attention", "full_attention"] * layers)[:layers],
    ),
}


def traced(kind: str, layers: int = 2, **fields) -> Trace:
    setup = TrainingSetup(**{"seq_len": 32, **fields})
    return trace_model(*build(CONFIGS[kind](layers), setup), setup)


def renumbered(trace: Trace) -> list[tuple]:
    """Events with memory numbered in the order in which it is taken."""
    numbers: dict[int, int] = {}
    told = []
    for event in trace.events:
        fields = {name: getattr(event, name) for name in event.__slots__}
        if "block" in fields:
            fields["block"] = numbers.setdefault(event.block, len(numbers))
        told.append((type(event).__name__, fields))
    return told


@pytest.mark.parametrize("fields", [{}, {"activation_checkpointing": True, "precision": "fp32", "wrapping": "root"}])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "local and global"])
def test_few_blocks_give_the_events_of_all_one_by_one(kind, fields, monkeypatch):
    layers = 11 if kind == "local and global" else 6
    spliced = traced(kind, layers, **fields)
    assert spliced.blocks + spliced.repeated == layers and spliced.repeated >= 2
    monkeypatch.setattr(dry_run, "repeating_stacks", lambda model, kept: [])
    run = traced(kind, layers, **fields)
    assert run.repeated == 0
    assert renumbered(spliced) == renumbered(run)
    assert spliced.parameters == run.parameters and spliced.model_flops == run.model_flops


def test_blocks_that_differ_are_all_run():
    config = CONFIGS["llama"](6)
    setup = TrainingSetup(seq_len=32)
    model, plan = build(config, setup)
    model.model.layers[3].mlp.act_fn = torch.nn.ReLU()
    assert trace_model(model, plan, setup).repeated == 0
