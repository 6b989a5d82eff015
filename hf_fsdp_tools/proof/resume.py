"""A training that is stopped, and goes on from the state that its Accelerator saved, beside one that is not stopped."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch.utils.data import DataLoader
from transformers import set_seed

from hf_fsdp_tools import FSDPPlugin, make_accelerator
from hf_fsdp_tools.distributed.shards import local_tensor
from hf_fsdp_tools.proof.compare import TOLERANCE, Sharded, apart, load_sharded, unequal, worst
from hf_fsdp_tools.proof.plain import Case, Figures, Tensors, scheduled, tensors_of


def resume(case: Case, model: Any, plain: Figures) -> dict[str, Any]:
    """What each check of a stopped training says on this rank, of a model that `examine` has stepped; every rank must
    call. The base model alone runs between the steps."""
    folder = str(case.folder.with_name("state"))
    run, accelerator, optimizer, schedule, loader = _begin(case, model, plain, 1)
    _step(run, optimizer, schedule)
    rows = iter([*loader] and loader)  # of the second epoch
    next(rows)
    accelerator.save_state(folder)
    saved = _state(run, optimizer, schedule, rows)
    run, accelerator, optimizer, schedule, loader = _begin(case, load_sharded(case, "fp32"), plain, 2)
    accelerator.load_state(folder)
    found = _state(run, optimizer, schedule, accelerator.skip_first_batches(loader, 1))
    losses = torch.stack([_step(run, optimizer, schedule) for _ in range(2)])
    whole = torch.stack([each[run.group] for each in plain.continued[1:]])
    seen: dict[str, Any] = {check: unequal(found[check], expected) for check, expected in saved.items()}
    return seen | {"continued": worst(apart({"loss": losses}, {"loss": whole}, [], 10 * TOLERANCE["fp32"]))}


def _begin(case: Case, model: Any, plain: Figures, seed: int) -> tuple[Sharded, Any, Any, Any, Any]:
    """A training that is about to begin; its optimizer is made late."""
    sizes = {name: size for name, size in vars(case.dims).items() if name != "ep_size"}
    plugin, config = FSDPPlugin(ep_size=case.dims.ep_size), ParallelismConfig(**sizes)
    accelerator = make_accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    run = Sharded(case, accelerator.prepare(model), plain, "fp32", dist.get_rank() // case.dims.ranks_per_row)
    run.look()
    set_seed(10 * seed + dist.get_rank())
    loader = DataLoader(range(4 * dist.get_world_size()), shuffle=True)  # type: ignore[arg-type]
    return run, accelerator, *accelerator.prepare(*scheduled(model), loader)


def _step(run: Sharded, optimizer: Any, schedule: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = run.backward(next(iter(run.case.batches)))[1].detach()
    optimizer.step()
    schedule.step()
    run.look()
    return loss


def _state(run: Sharded, optimizer: Any, schedule: Any, rows: Iterable[Any]) -> dict[str, Tensors]:
    """What a state brings back, by check; random numbers and the rest of the epoch are drawn."""
    parts = {name: optimizer.state.get(parameter, {}) for name, parameter in run.model.named_parameters()}
    moments = {f"{name} {key}": part for name, each in parts.items() for key, part in each.items()}
    rates = {"learning rates": [group["lr"] for group in optimizer.param_groups]}
    drawn = {"torch": torch.rand(1), "random": random.random(), "numpy": np.random.rand()}
    values = {"weights": tensors_of(run.model), "moments": moments, "schedule": schedule.state_dict() | rates}
    values |= {"random": drawn, "rows": {"rows": [int(row) for row in rows]}}
    return {
        check: {name: local_tensor(torch.as_tensor(value)).detach().clone() for name, value in each.items()}
        for check, each in values.items()
    }
