"""The throughput of real models: from one dry run, over micro-steps, networks and full memory; and as published in
`benchmarks/results/foresight_fit.md`."""

import dataclasses
import math

import pytest
from transformers import LlamaConfig

from benchmarks.foreseeing.published import read_rows
from hf_fsdp_tools import TrainingSetup, estimate_throughput
from hf_fsdp_tools.foresight.forecast import Forecast
from hf_fsdp_tools.foresight.memory import memory_of
from tests.api import ThroughputEstimate, compose, efficiency_of, gpu_named, step_of, step_time, throughput_of

CONFIG = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=6,
    num_attention_heads=16,
    vocab_size=32000,
    max_position_embeddings=4096,
)
FIELDS = {"gpu": "a100-80gb", "per_device_train_batch_size": 2, "max_length": 2048, "loss": "full"}


def forecast(**fields: object) -> Forecast:
    return step_of(CONFIG, TrainingSetup(**FIELDS | {"num_processes": 8} | fields))  # type: ignore[arg-type]


def estimate(**fields: object) -> ThroughputEstimate:
    return throughput_of(memory_of(forecast(**fields)))


def test_an_estimate_by_name_is_that_of_the_forecast() -> None:
    result = estimate_throughput(CONFIG, num_processes=8, **FIELDS)
    assert result == estimate()
    assert result.name == "LlamaForCausalLM with 533.8 M parameters"
    # PaLM, appendix B: 6 per parameter that is multiplied with, 12 x layers x width x length for attention
    multiplied = sum(2048 * width for width in (4 * 2048, 3 * 8192)) * 6 + 2048 * 32000
    per_token = 6 * multiplied + 12 * 6 * 2048 * 2048
    assert result.model_flops == pytest.approx(per_token * 2 * 2048, rel=1e-3)
    assert 0.2 < result.mfu == result.hfu < 0.9


@pytest.mark.parametrize("fields", [{"num_processes": 2}, {"num_processes": 1, "wrapping": "none"}])
def test_many_micro_steps_are_like_the_second(fields: dict[str, object]) -> None:
    # two GPUs at most, so that the optimizer, which runs once, counts
    many = forecast(gradient_accumulation_steps=5, **fields)
    result, trace = throughput_of(memory_of(many)), many.trace
    events = compose(trace, many.plan, many.setup).events
    efficiency = efficiency_of(gpu_named("a100-80gb"))
    one = dataclasses.replace(many.setup, gradient_accumulation_steps=1)  # so that nothing is repeated
    seconds = step_time(events, one, efficiency=efficiency).seconds
    seconds *= 1 + efficiency.straggler * math.sqrt(2 * math.log(many.setup.num_processes))
    assert result.step_seconds == pytest.approx(seconds, rel=1e-3)
    assert sum(result.parts.values()) == pytest.approx(result.step_seconds)
    assert result.tokens_per_step == 5 * 2 * 2048
    assert result.hardware_flops == result.model_flops == 5 * trace.model_flops


# ---- as published ----


def test_a_published_training_runs_as_fast_as_estimated() -> None:
    (published,) = (each for each in read_rows("throughput") if each.name.startswith("mpt-1b a100-40gb x128"))
    estimated = throughput_of(published.estimate(), efficiency=published.efficiency).tokens_per_second_per_gpu
    assert estimated == pytest.approx(published.tokens_per_second, rel=0.08)
