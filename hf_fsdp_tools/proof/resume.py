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
from hf_fsdp_tools.proof.compare import TOLERANCE, Sharded, apart, load_sharded, shards_of, unequal, worst
from hf_fsdp_tools.proof.plain import Case, Figures, Tensors, forward, scheduled, tensors_of

_ROWS = 4
"""Rows of each rank in an epoch."""


def resume(case: Case, model: Any, plain: Figures) -> dict[str, Any]:
    """What each check of a stopped training says on this rank, of the model that `examine` has stepped; every rank must
    call."""
    kind, bound = next(iter(case.batches)), 10 * TOLERANCE["fp32"]
    run, accelerator, optimizer, schedule, loader = _begin(case, model, plain, 1)
    run.backward(kind)
    optimizer.step()
    schedule.step()
    seen: dict[str, Any] = {"late": worst(apart(shards_of(model), plain.late, [], bound, is_part=True))}
    rows = iter([*loader] and loader)  # of the second epoch
    next(rows)
    accelerator.save_state(folder := str(case.folder.with_name("state")))
    saved = _state(run, optimizer, schedule, rows)
    run, accelerator, optimizer, schedule, loader = _begin(case, load_sharded(case, "fp32"), plain, 2)
    accelerator.load_state(folder)
    found = _state(run, optimizer, schedule, accelerator.skip_first_batches(loader, 1))
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(run.backward(kind)[1].detach())
        optimizer.step()
        schedule.step()
        if any(plain.base):
            run.of_base()
    whole = torch.tensor([each[run.group] for each in plain.continued[1:]])
    seen |= {check: unequal(found[check], expected) for check, expected in saved.items()}
    return seen | {"continued": worst(apart({"loss": torch.stack(losses)}, {"loss": whole}, [], bound))}


def _begin(case: Case, model: Any, plain: Figures, seed: int) -> tuple[Sharded, Any, Any, Any, Any]:
    """A training that is about to begin; its optimizer is made late, after passes without and with gradients."""
    sizes = {name: size for name, size in vars(case.dims).items() if name != "ep_size"}
    plugin, config = FSDPPlugin(ep_size=case.dims.ep_size), ParallelismConfig(**sizes)
    accelerator = make_accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    kind, group = next(iter(case.batches)), dist.get_rank() // case.dims.ranks_per_row
    run = Sharded(case, accelerator.prepare(model), plain, "fp32", group)
    run.outputs(kind)
    forward(model.train(case.is_training), case.batches_of(kind, "fp32")[group])
    optimizer, schedule = scheduled(model)
    model.zero_grad(set_to_none=True)
    set_seed(10 * seed + dist.get_rank())
    loader = DataLoader(range(_ROWS * dist.get_world_size()), shuffle=True)  # type: ignore[arg-type]
    return run, accelerator, *accelerator.prepare(optimizer, schedule, loader)


def _state(run: Sharded, optimizer: Any, schedule: Any, rows: Iterable[Any]) -> dict[str, Tensors]:
    """What a state brings back, by check: on this rank, with random numbers and the rest of the epoch drawn."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in run.model.named_parameters()}
    rates = {"learning rates": [group["lr"] for group in optimizer.param_groups]}
    return {
        "weights": {name: local_tensor(each.detach()).clone() for name, each in tensors_of(run.model).items()},
        "moments": {
            f"{name} {key}": local_tensor(value).clone() for name, each in states.items() for key, value in each.items()
        },
        "schedule": {name: torch.tensor(value) for name, value in (schedule.state_dict() | rates).items()},
        "random": {
            "torch": torch.rand(1),
            "random": torch.tensor(random.random()),
            "numpy": torch.tensor(np.random.rand()),
        },
        "rows": {"rows": torch.tensor([int(row) for row in rows])},
    }
