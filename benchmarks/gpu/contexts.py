"""On which GPUs each rank has a context (half a gigabyte each) after loading, a step and saving; as JSON.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.gpu.contexts CHECKPOINT RESULT
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from hf_fsdp_tools import from_pretrained, save_pretrained


def contexts() -> list[int]:
    """Devices on which this process has a context; asking makes none."""
    return [index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)]


def main() -> None:
    checkpoint, result = sys.argv[1:]
    found = {}
    model = from_pretrained(checkpoint)
    found["from_pretrained"] = contexts()
    ids = torch.arange(16, device="cuda").view(2, 8)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    found["a step"] = contexts()
    with tempfile.TemporaryDirectory(dir=Path(result).parent) as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        save_pretrained(model, Path(shared[0], "saved"))
        found["save_pretrained"] = contexts()
        every: list[dict[str, list[int]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({"ranks": every}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
