"""Memory of a real training on a CUDA device, as PyTorch's caching allocator counts it; a program for one case.

    python -m benchmarks.foreseeing.cuda "dense" middle --gpus 8 --result FILE

This process is rank 0 of a process group of any size whose collectives do nothing, so one device is enough. Sizes are
real, whether the device is a GPU or a stand-in for the CUDA runtime on which kernels do nothing. There, what the host
reads back from the device says nothing; of what transformers reads, the test for packed sequences would come out wrong.
"""

import argparse
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

from benchmarks.foreseeing.cases import CASES, SIZES
from benchmarks.foreseeing.training import Training

_STEPS = 4
"""The last one is measured: by then the allocator has all its segments."""


@contextmanager
def _known_not_to_be_packed() -> Iterator[None]:
    """A block in which no batch is taken for packed sequences, on a device that computes nothing to tell by."""
    if torch.ones(1, device="cuda").item() == 1:
        yield
        return
    found = masking_utils.find_packed_sequence_indices

    def none_are(position_ids: torch.Tensor) -> None:
        found(position_ids)  # takes the same memory

    with patch.object(masking_utils, "find_packed_sequence_indices", none_are):
        yield


def measure(name: str, size: str, num_gpus: int) -> dict[str, Any]:
    """What the allocator counts for the last step of a case, in bytes."""
    torch.cuda.set_device(0)
    dist.init_process_group("fake", rank=0, world_size=num_gpus, store=FakeStore())
    case = next(case for case in CASES if case.name == name)
    training = Training(case, size, num_gpus=num_gpus, device=torch.device("cuda", 0))
    for step in range(_STEPS):
        gc.collect()
        torch.cuda.synchronize()
        if step == _STEPS - 1:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        with _known_not_to_be_packed():
            training.step(lambda phase: nullcontext())
    torch.cuda.synchronize()
    result = {
        "held": held,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "segments": len(torch.cuda.memory_snapshot()),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", choices=[case.name for case in CASES])
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("--gpus", type=int, default=1, help="of the process group of which this process is rank 0")
    parser.add_argument("--result", type=Path, required=True, help="JSON")
    args = parser.parse_args()
    args.result.write_text(json.dumps(measure(args.case, args.size, args.gpus)))


if __name__ == "__main__":
    main()
