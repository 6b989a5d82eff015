"""Ten loads over the same shards, with Python's garbage collection off: what stays pinned and reserved; as JSON.

python -m benchmarks.gpu.repeated CHECKPOINT RESULT
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from hf_fsdp_tools import from_pretrained, load_weights

LOADS = 10


def main() -> None:
    checkpoint, result = sys.argv[1:]
    gc.disable()
    pinned, reserved = [], []
    model = None
    for _ in range(LOADS):
        if model is None:
            model = from_pretrained(checkpoint)
        else:
            load_weights(model, checkpoint)
        torch.cuda.synchronize()
        host = torch.cuda.host_memory_stats()
        pinned.append(host.get("active_bytes.current", 0))
        reserved.append(torch.cuda.memory_reserved())
    figures = {"pinned": pinned, "reserved": reserved, "shards": torch.cuda.memory_allocated()}
    figures["pinned_allocated"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    Path(result).write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
