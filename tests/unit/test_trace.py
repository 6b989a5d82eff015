"""The dry run of a model sees what a real step takes, gives back and computes; few blocks stand for many."""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import accumulate

import pytest
import torch
import transformers as hf
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, Qwen3_5TextConfig

from benchmarks.foreseeing import cases
from benchmarks.foreseeing.cases import case_named
from hf_fsdp_tools import ConfigError, TrainingSetup
from hf_fsdp_tools.foresight.tracing import dry_run, kernels
from hf_fsdp_tools.foresight.tracing.delta_rule import delta_rule_flops
from hf_fsdp_tools.foresight.tracing.images import NoImagesError, batch_of, images_of
from tests.api import Alloc, Event, Free, Gradient, Trace, Work, build, step_of, trace_model

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
    "experts": lambda layers: hf.Qwen3MoeConfig(
        **SIZES, num_hidden_layers=layers, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=22
    ),
    "local and global": lambda layers: hf.Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=layers,
        sliding_window=8,
        layer_types=(["sliding_attention", "full_attention"] * layers)[:layers],
    ),
    "encoder and decoder": lambda layers: hf.T5Config(
        vocab_size=131, d_model=48, d_kv=12, d_ff=68, num_layers=layers, num_heads=4, decoder_start_token_id=0
    ),
    "vision": lambda layers: hf.ViTConfig(
        hidden_size=48, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=68, image_size=16,
        patch_size=8,
    ),
}  # fmt: skip


@cache
def traced(kind: str, layers: int = 2, *, device: str = "cuda", **fields) -> Trace:
    setup = TrainingSetup(**{"max_length": 32, **fields})
    return trace_model(*build(CONFIGS[kind](layers), setup), setup, device=device)


def allocs(trace: Trace, *, unit: str | None = None) -> list[Alloc]:
    return [each for each in trace.events if isinstance(each, Alloc) and unit in (None, each.unit)]


def changes_of(events: Iterable[Event]) -> list[tuple[int, str]]:
    taken: dict[int, Alloc] = {}
    changes: list[tuple[int, str]] = []
    for event in events:
        if isinstance(event, Alloc):
            taken[event.block] = event
            changes.append((event.num_bytes, event.kind))
        elif isinstance(event, Free):
            freed = taken.pop(event.block)
            changes.append((-freed.num_bytes, freed.kind))
    return changes


def memory_of(events: Iterable[Event]) -> tuple[int, int]:
    totals = list(accumulate((change for change, _ in changes_of(events)), initial=0))
    return max(totals), totals[-1]


# ---- depth ----


def renumbered(trace: Trace) -> list[tuple]:
    numbers: dict[int, int] = {}
    told = []
    for event in trace.events:
        fields = {name: getattr(event, name) for name in event.__slots__}
        if "block" in fields:
            fields["block"] = numbers.setdefault(event.block, len(numbers))
        told.append((type(event).__name__, fields))
    return told


@pytest.mark.parametrize(
    ("kind", "layers", "fields"),
    [
        ("gpt2", 6, {"activation_checkpointing": True, "mixed_precision": "fp32", "wrapping": "root"}),
        ("encoder and decoder", 7, {}),
        ("llama", 13, {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 2}),
        ("llama", 6, {"activation_checkpointing": True, "activation_checkpointing_offload": True}),
    ],
)
def test_few_blocks_give_the_events_of_all_one_by_one(kind, layers, fields, monkeypatch):
    spliced = traced(kind, layers, **fields)
    assert spliced.repeated > 0
    monkeypatch.setattr(dry_run, "repeating_stacks", lambda *_: [])
    run = traced.__wrapped__(kind, layers, **fields)
    assert run.repeated == 0
    assert renumbered(spliced) == renumbered(run)
    assert spliced.parameters == run.parameters and spliced.model_flops == run.model_flops


# ---- a real step ----


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_memory_and_products_are_those_of_a_real_step(kind):
    """Without FSDP, in fp32, with attention of plain operations, whose kernels take no memory of their own; experts are
    estimated in grouped products, and run here one by one."""
    setup = TrainingSetup(max_length=32, mixed_precision="fp32", wrapping="root", attn_implementation="eager")
    estimated = trace_model(*build(CONFIGS[kind](2), setup), setup, device="cpu")
    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
    real = hf.AutoModelForCausalLM.from_config(CONFIGS[kind](2), **ways).train()
    ids = torch.zeros(1, 32, dtype=torch.int64)

    def step() -> None:
        real(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        real.zero_grad()

    step()
    with FlopCounterMode(display=False) as counter:
        step()
    assert estimated.model_flops == counter.get_total_flops()
    if kind == "tied":
        highest = max(accumulate(memory_changes(step)))
        inputs = sum(each.num_bytes for each in allocs(estimated) if each.kind == "inputs")
        own = memory_of(estimated.events)[0] - inputs
        assert 0 <= highest - own <= 64, "but for numbers that a CPU's kernels keep as tensors"


def test_what_is_computed_again_counts_in_no_model_flops(monkeypatch):
    """Also inside autograd functions, which see no gradients: 4-bit layers, and a loss in pieces, whose logits are made
    twice; of several pieces one stands for all."""
    monkeypatch.setattr(kernels, "TOKENS", 8)
    full, pieces = (traced.__wrapped__("llama", loss=loss) for loss in ("full", "chunked"))
    assert pieces.model_flops == pytest.approx(full.model_flops, rel=0.02)
    assert [work for work in pieces.events if isinstance(work, Work) and work.again and not work.model_flops]
    again = {"activation_checkpointing": True}
    lora, qlora = (traced("llama", lora_r=4, load_in_4bit=four_bits, **again) for four_bits in (False, True))
    assert qlora.model_flops == pytest.approx(lora.model_flops, rel=1e-3)
    assert lora.model_flops < 2.9 * forward_flops(lora) and qlora.model_flops < 2.9 * forward_flops(qlora)


def forward_flops(trace: Trace) -> float:
    return sum(work.model_flops for work in trace.events if isinstance(work, Work) and work.phase != "backward")


def memory_changes(run) -> list[int]:
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with torch.backends.mkldnn.flags(enabled=False), recording as profiler:  # its scratch differs by processor
        run()
    return [each.nbytes() for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]


def test_what_is_taken_is_given_back_once_but_for_gradients_and_the_batch():
    kinds = {"tied": {"activation_checkpointing": True}, "encoder and decoder": {"lora_r": 4}, "vision": {}}
    for kind, fields in kinds.items():
        trace = traced(kind, **fields)
        taken = {each.block: each for each in allocs(trace)}
        freed = Counter(event.block for event in trace.events if isinstance(event, Free))
        assert set(freed.values()) == {1} and set(freed) < set(taken)
        left = [taken[block] for block in taken if block not in freed]
        assert {each.kind for each in left} <= {"gradients", "inputs"}, (kind, left)
        blocks = {event.parameter: event.block for event in trace.events if isinstance(event, Gradient)}
        trained = {each.fqn: each for each in trace.parameters if each.requires_grad}
        assert set(blocks) == set(trained), kind
        for name, block in blocks.items():
            assert taken[block].num_bytes == trained[name].num_bytes, name
            assert taken[block].kind == "gradients"


# ---- kinds of training ----


def test_a_base_that_stays_quantised_is_gathered_as_stored_and_dequantised_for_each_product():
    """FP8: a byte is read and a float32 written, multiplied by its scale, rounded, and put into the whole weight."""
    config = CONFIGS["llama"](2)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [12, 16]}
    setup = TrainingSetup(max_length=32, lora_r=4, dequantize=False)
    trace, plain = trace_model(*build(config, setup), setup), traced("llama", lora_r=4)
    stored = {each.fqn: each for each in trace.parameters}
    of_up = "model.layers.0.mlp.up_proj.base_layer.weight"
    assert stored[f"{of_up}_packed"].num_bytes == 48 * 68 and stored[f"{of_up}_packed"].dtype == torch.uint8
    assert stored[f"{of_up}_scale"].shape == (6, 3 * 4) and not stored[f"{of_up}_scale"].requires_grad
    assert trace.num_params == plain.num_params, "values are counted, not the bytes that hold them"
    assert trace.model_flops == pytest.approx(plain.model_flops, rel=1e-3)
    moved, before = (sum(w.num_bytes for w in each.events if isinstance(w, Work)) for each in (trace, plain))
    values = 2 * (3 * 48 * 68 + 2 * 48 * 48 + 2 * 48 * 24)
    in_both_passes = 2 * values * ((1 + 4) + (4 + 4) + (4 + 2) + (2 + 2))
    assert moved - before == pytest.approx(in_both_passes, rel=0.2), "and scales, copied for the rows of small blocks"
    whole = [each for each in allocs(trace, unit="model.layers.0") if each.num_bytes == 4 * 48 * 68]
    assert len(whole) == 2 * 2 * 2, "of gate and up; the short last blocks of down are filled up"
    assert {each.kind for each in whole} == {"temporaries"}


def test_a_loss_in_chunks_never_holds_all_logits():
    full, chunked = (traced("llama", max_length=64, loss=loss, device="cuda") for loss in ("full", "chunked"))
    assert max(each.num_bytes for each in allocs(full) if each.kind == "logits and loss") == 4 * 64 * 131
    tile = 63 * 32768 * 2
    large = [each for each in allocs(chunked) if each.kind == "logits and loss" and each.num_bytes >= 4 * 64 * 131]
    assert [each.num_bytes for each in large] == [tile, tile]
    assert 4 * 131 * 48 in {each.num_bytes for each in allocs(chunked)}, "the head's gradient is summed in fp32"
    with pytest.raises(ConfigError, match=r"T5For.*no decoder with a head.*loss=\"full\""):
        traced("encoder and decoder", loss="chunked")


# ---- bad input ----


def test_what_fails_in_the_models_own_code_or_needs_values_is_one_line():
    class Peeking(nn.Module):
        def forward(self, hidden):
            return hidden * int(hidden.sum().item())

    setup = TrainingSetup(max_length=32)
    config = hf.T5Config(vocab_size=131, d_model=48, d_kv=12, d_ff=68, num_layers=2, num_heads=4)
    with pytest.raises(
        ConfigError, match=r"fails in T5ForConditionalGeneration.*AttributeError.*decoder_start_token_id"
    ):
        trace_model(*build(config, setup), setup)
    model, plan = build(CONFIGS["llama"](2), setup)
    model.model.layers[1].mlp.act_fn = Peeking()
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.act_fn.*_local_scalar_dense"):
        trace_model(model, plan, setup)


PLAIN = {
    "mixed_precision": "fp32",
    "wrapping": "root",
    "attn_implementation": "eager",
    "max_length": 32,
    "image_size": (56, 84),
}


def built(name: str, **fields):
    case = case_named(name)
    setup = TrainingSetup(**(PLAIN | fields))
    config = case.config(cases.SIZES["tiny"])
    return config, case.auto_class, setup, *build(config, setup, auto_class=case.auto_class)


def traced_images(name: str, **fields) -> Trace:
    _, _, setup, model, plan = built(name, **fields)
    return trace_model(model, plan, setup, device="cpu")


def test_products_are_those_of_a_real_step_with_images(tokens=6):
    """Packed patches, positions of a grid."""
    config, auto_class, setup, model, plan = built("VLM, Qwen2.5-VL")
    try:
        images = images_of(model, setup)
    except NoImagesError as error:
        if "requires the Torchvision library" in str(error):  # which 5.17 asks for, and the extra for tests lacks
            pytest.skip("the image processor of this version of transformers needs torchvision")
        raise
    assert images.tokens == tokens
    estimated = trace_model(model, plan, setup, device="cpu")
    assert estimated.notes[0] == f"Images in each sequence: {images.count}, of {tokens} tokens each."
    real = auto_class.from_config(config, attn_implementation="eager").train()
    batch = {key: value.contiguous() for key, value in batch_of(real, setup, images).items()}
    with FlopCounterMode(display=False) as counter:
        real(**batch, use_cache=False).loss.backward()
    assert estimated.model_flops == counter.get_total_flops()


def test_a_frozen_tower_gets_no_gradient_and_its_projector_does():
    _, _, _, model, _ = built("VLM, LLaVA", freeze_vision_tower=True)
    frozen = {name.split(".")[1] for name, one in model.named_parameters() if not one.requires_grad}
    assert frozen == {"vision_tower"}
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no vision tower"):
        built("dense", freeze_vision_tower=True)


def test_images_that_do_not_fit_into_the_sequence_are_refused_only_if_they_were_asked_for():
    with pytest.raises(ConfigError, match="9 × 6 tokens of images with marks are 73, and max_length is 32"):
        traced_images("VLM, Qwen2.5-VL", images=9)
    note, *_ = traced_images("VLM, Qwen2.5-VL", image_size=(224, 224)).notes
    assert note.startswith("Of text alone, without images") and "max_length is 32" in note


LINEAR = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LINEAR |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}


def works_of(tokens: int, device: str) -> list[Work]:
    config = Qwen3_5TextConfig(**LINEAR, num_hidden_layers=4, vocab_size=256)
    setup = TrainingSetup(num_processes=2, max_length=tokens)
    model, plan = build(config, setup)
    return [each for each in trace_model(model, plan, setup, device=device).events if isinstance(each, Work)]


def test_a_long_row_takes_no_more_kernels_than_a_short_one_on_a_gpu_and_its_loop_is_followed_on_a_cpu() -> None:
    short, long = works_of(128, "cuda"), works_of(1024, "cuda")
    assert len(short) == len(long)
    rule = delta_rule_flops(torch.Size((1, 1024, 2, 16)), torch.Size((1, 1024, 4, 32)), is_backward=False)
    assert [work.flops for work in long].count(rule) == 3 and [work.flops for work in long].count(2.5 * rule) == 3
    assert len(works_of(256, "cpu")) > len(works_of(128, "cpu")) > len(short)


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "jamba"])
def test_a_long_row_of_a_mamba_takes_no_more_kernels_than_a_short_one(kind: str) -> None:
    config = CONFIG_MAPPING[kind](**LINEAR, num_hidden_layers=2, vocab_size=256)
    counts = [step_of(config, TrainingSetup(max_length=tokens)).trace.events for tokens in (64, 1024)]
    assert len(counts[0]) == len(counts[1])
