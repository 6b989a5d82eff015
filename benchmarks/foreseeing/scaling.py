"""The two results that started FSDP's fame over the number of GPUs: `benchmarks/results/scaling.json`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.foreseeing.rows import Row, read_rows, teraflops
from benchmarks.foreseeing.throughput import forecast_of
from hf_fsdp_tools.foresight.events import Work
from hf_fsdp_tools.foresight.memory import MemoryEstimate, memory_of
from hf_fsdp_tools.foresight.throughput import throughput_of

__all__ = ["write_scaling"]

_NUM_GPUS = (8, 16, 32, 64, 128, 256, 512)

_SETTING = (
    "fp16, SGD, activation checkpointing, parameters (GPT-1T: checkpoints too) in host memory, linear layers as units, "
    "8 GPUs and 400 Gbit/s per machine; per GPU 20 x 512 tokens (GPT-175B) and 4 x 2,048 (GPT-1T)"
)

_HOST_BYTES = 1152e9
"""Memory of one machine (AWS p4d.24xlarge, on which PyTorch's post of 2022 measured)."""


def write_scaling(output: Path) -> None:
    """Write the curves of GPT-175B and GPT-1T on A100 GPUs of 40 and 80 GB as JSON.

    Batch, sequence, precision, optimizer, offload, network and units are those of PyTorch's post of March 2022.

    Args:
        output: the file.
    """
    rows = [row for row in read_rows() if row.source.startswith("PyTorch blog 2022")]
    curves = []
    for model in ("gpt-175b", "gpt-1t"):
        of_model = [row for row in rows if row.model == model]
        for gpu in ("a100-40gb", "a100-80gb"):
            published = [row for row in of_model if row.setup.gpu == gpu]
            curves.append(_curve(of_model[0], gpu, published))
    content = {
        "setting": _SETTING,
        "quantity": "TFLOP/s per GPU, recomputation counted",
        "curves": curves,
    }
    output.write_text(json.dumps(content, indent=1) + "\n")


def _curve(row: Row, gpu: str, published: list[Row]) -> dict[str, Any]:
    values: list[float | None] = []
    for num_gpus in _NUM_GPUS:
        setup = replace(row.setup, gpu=gpu, num_gpus=num_gpus)
        memory = memory_of(forecast_of(row, setup))
        if memory.is_full or _host_bytes(row, memory) > _HOST_BYTES:
            values.append(None)
        else:
            estimate = throughput_of(memory, era=row.era)
            values.append(round(teraflops(row.model, estimate.tokens_per_second_per_gpu, setup.seq_len), 1))
    return {
        "name": f"{row.model.upper()}, A100 {gpu[5:7]} GB",
        "num_gpus": list(_NUM_GPUS),
        "values": values,
        "published": [
            [each.setup.num_gpus, round(teraflops(each.model, each.tokens_per_second, each.setup.seq_len), 1)]
            for each in published
        ],
    }


def _host_bytes(row: Row, memory: MemoryEstimate) -> float:
    """Host memory of one machine."""
    setup = memory.setup
    checkpoints = 0
    if row.keeps_checkpoints_on_host:
        trace = memory.forecast.trace
        checkpoints = sum(
            int(event.num_bytes)
            for event in trace.events
            if isinstance(event, Work) and event.operation == "device_to_host"
        )
    return setup.gpus_per_node * (memory.host_bytes + checkpoints)
