"""Imported by the fork server before it forks: a tiny model is loaded and trained on torch's fake process group, so
that ranks inherit what the first call of everything costs (about half a second each). No thread, group or file is left,
and torch's caches about sharding are emptied, whose keys hold the mesh."""

import gc
import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import tqdm
from torch.distributed.tensor import DTensor, _redistribute
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_tools import ParallelDims, from_pretrained
from hf_fsdp_tools.extensions import tensor_parallel
from tests._shardings import share_shardings
from tests.api import clip_norm, step_kinds_apart

SIZES = {"vocab_size": 132, "hidden_size": 48, "intermediate_size": 68, "num_hidden_layers": 2}


def _train(folder: str, tp_size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = from_pretrained(folder, mesh=ParallelDims(tp_size=tp_size), load_kwargs={"progress": False}).train()
    tokens = torch.randint(3, 9, (2, 12))
    for fused in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        model(input_ids=tokens, labels=tokens).loss.backward()
        clip_norm(model.parameters(), 0.5, 2.0, torch.device("cpu"))
        optimizer.step()
    dist.destroy_process_group()


def _warm() -> None:
    # A first backward pass on shards starts threads for devices in builds of torch for GPUs, which survive no fork.
    torch.ones(1, requires_grad=True).sum().backward()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    step_kinds_apart()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, torch.random.fork_rng():
        LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4)).save_pretrained(folder)
        for tp_size in (1, 2) if tensor_parallel.ALL_PARALLEL_STYLES is not None else (1,):
            _train(folder, tp_size)
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    type(DTensor._op_dispatcher.sharding_propagator)._propagate_tensor_meta_cached.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    torch._C._clear_DTensor_sharding_propagator_cache()
    torch.set_num_threads(threads)
    gc.collect()


if "SHARDINGS_OF_RUN" in os.environ:
    share_shardings(Path(os.environ["SHARDINGS_OF_RUN"]))
with patch.dict(os.environ), patch.object(tqdm.tqdm, "monitor_interval", 0):  # which starts a thread
    _warm()
