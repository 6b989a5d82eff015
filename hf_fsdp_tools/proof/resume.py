"""A training that is stopped, and goes on from the state that its Accelerator saved, compared with one that is not."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch.utils.data import DataLoader
from transformers import set_seed

from hf_fsdp_tools import FSDPPlugin, make_accelerator
from hf_fsdp_tools.axes import size_names
from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.proof.compare import TOLERANCE, Sharded, apart, load_sharded, unequal, worst
from hf_fsdp_tools.proof.plain import Tensors, optimizer_of, schedule_of, tensors_of


def resume(run: Sharded) -> dict[str, Any]:
    """What each check of a stopped training says on this rank, of a model that `examine` has stepped; every rank must
    call. The base model alone runs before the optimizer is made, and between the steps."""
    folder = str(run.case.folder.with_name("state"))
    accelerator, loader, *parts = _begin(run, 1)
    _step(run, *parts)
    rows = iter([*loader] and loader)  # of the second epoch
    next(rows)
    accelerator.save_state(folder)
    saved = _state(run, rows, *parts)
    again = replace(run, model=load_sharded(run.case, "fp32"))
    accelerator, loader, *parts = _begin(again, 2)
    accelerator.load_state(folder)
    found = _state(again, accelerator.skip_first_batches(loader, 1), *parts)
    losses = torch.stack([_step(again, *parts) for _ in range(2)])
    whole = torch.stack([each[run.group] for each in run.plain.continued[1:]])
    seen: dict[str, Any] = {check: unequal(found[check], expected) for check, expected in saved.items()}
    return seen | {"continued": worst(apart({"loss": losses}, {"loss": whole}, [], 10 * TOLERANCE["fp32"]))}


def _begin(run: Sharded, seed: int) -> tuple[Any, ...]:
    """Accelerator, loader, optimizer and schedule of a training."""
    dims = run.case.dims.resolve(dist.get_world_size())
    sizes = {name: size for name in size_names(of_rows=True) if (size := getattr(dims, name)) > 1}
    sizes |= {"dp_replicate_size": dims.num_copies, "dp_shard_size": dims.dp_shard_size}
    plugin = FSDPPlugin(ep_size=dims.ep_size, sequence_parallel=run.case.sequence_parallel)
    accelerator = make_accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**sizes))
    model = accelerator.prepare(run.model)
    run.look()
    set_seed(10 * seed + dist.get_rank())
    loader: Any = DataLoader(range(4 * dist.get_world_size()), shuffle=True)  # type: ignore[arg-type]
    optimizer = optimizer_of(model)
    return accelerator, *accelerator.prepare(loader, optimizer, schedule_of(optimizer))


def _step(run: Sharded, optimizer: Any, schedule: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = run.backward(next(iter(run.case.batches)))[1].detach()
    optimizer.step()
    schedule.step()
    run.look()
    return loss


def _state(run: Sharded, rows: Iterable[Any], optimizer: Any, schedule: Any) -> dict[str, Tensors]:
    """What a state brings back, by check; random numbers and the rest of the epoch are drawn."""
    held = {name: optimizer.state.get(parameter, {}) for name, parameter in run.model.named_parameters()}
    rates = {"learning rates": [group["lr"] for group in optimizer.param_groups]}
    values = {
        "weights": tensors_of(run.model),
        "moments": {f"{name} {key}": part for name, parts in held.items() for key, part in parts.items()},
        "schedule": schedule.state_dict() | rates,
        "random": {"torch": torch.rand(1), "random": random.random(), "numpy": np.random.rand()},
        "rows": {"rows": [int(row) for row in rows]},
    }
    return {
        check: {name: Held.of(torch.as_tensor(value)).memory.detach().clone() for name, value in each.items()}
        for check, each in values.items()
    }
