"""Where shards live: on the device on which they are, whatever the mesh's device, and in memory that is made once.

A mesh of another device is played by a mesh whose device type reads "meta": what is moved to the device of the mesh
loses its values, and shows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from hf_fsdp_tools.steps import build_meta_model, load_weights, make_wrap_plan, shard_model
from tests._checkpoints import assert_same_model, plain_model
from tests._dist import run_cases, run_ranks
from tests.api import allocate, hand_over, initialize_missing, local_tensor, patched


@contextmanager
def mesh_elsewhere() -> Iterator[None]:
    """A block in which every mesh is of another device than the shards."""
    # DTensor estimates transfers by the devices of a machine, which it asks of `torch.<device type>` (torch 2.15).
    here = SimpleNamespace(device_count=lambda: 2)
    with (
        patch.object(DeviceMesh, "device_type", property(lambda mesh: "meta")),
        patch.object(torch, "meta", here, create=True),
    ):
        yield


def hsdp() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def models(folder: Path) -> None:
    model: Any = build_meta_model(folder)
    shard_model(model, make_wrap_plan(model), mesh=hsdp())
    with mesh_elsewhere():
        allocate(model, device=torch.device("cpu"))
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert {b.device.type for b in model.buffers()} == {"meta"}, "only shards are offloaded"
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
        names = {name for name, _ in model.named_parameters()}
        initialize_missing(model, missing_keys=names, seed=3)
    alone = build_meta_model(folder)
    allocate(alone, device=torch.device("cpu"))
    initialize_missing(alone, missing_keys=names, seed=3)
    assert_same_model(model, alone)

    plain = plain_model("llama", folder)
    for assign in (False, True):
        with mesh_elsewhere():
            model.load_state_dict({k: v.clone() for k, v in plain.state_dict().items()}, assign=assign)
        assert_same_model(model, plain)
        parameter = model.lm_head.weight
        held = local_tensor(parameter).untyped_storage().nbytes()
        assert held <= parameter.nbytes // 2 + parameter[0].nbytes, "not a view of the whole tensor"
        torch.nn.init.zeros_(parameter)

    state = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
    whole = torch.nn.Parameter(torch.zeros_like(state))
    optimizer = torch.optim.Adagrad([whole])
    optimizer.state[whole]["sum"].copy_(state)
    with mesh_elsewhere():
        hand_over(optimizer, {whole: model.lm_head.weight})
    assert torch.equal(optimizer.state[model.lm_head.weight]["sum"].full_tensor(), state)


def pinned_once(folder: Path) -> None:
    """FSDP2 finds each shard in pinned memory of the length that it gathers from, and copies none."""
    made: list[torch.Tensor] = []

    def pinned_empty(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty(tuple(shape), dtype=dtype))
        return made[-1]

    def is_pinned(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in made}

    def new_zeros(tensor: torch.Tensor, *shape: Any) -> torch.Tensor:
        assert tensor.is_meta, "a shard is copied to be padded"
        return torch.zeros(*shape, dtype=tensor.dtype, device="meta")

    with (
        patched(pinned_empty=pinned_empty),
        patch.object(torch.Tensor, "is_pinned", is_pinned),
        patch.object(torch.Tensor, "pin_memory", lambda tensor: pytest.fail("a shard is copied into pinned memory")),
        patch.object(torch.Tensor, "new_zeros", new_zeros),
    ):
        model: Any = build_meta_model(folder)
        policy = CPUOffloadPolicy(pin_memory=True)
        for layer in model.model.layers:
            fully_shard(layer, offload_policy=policy)
        fully_shard(model, offload_policy=policy)
        load_weights(model, folder, progress=False)
        kept = {name: local_tensor(p).data_ptr() for name, p in model.named_parameters()}
        model._get_fsdp_state()._lazy_init()
        assert {name: local_tensor(p).data_ptr() for name, p in model.named_parameters()} == kept
    assert all(is_pinned(local_tensor(p)) for p in model.parameters())
    assert len(made) == len(list(model.parameters())), "each shard once"
    assert sum(t.nbytes for t in made) == sum(-(-p.shape[0] // 2) * p.nbytes // p.shape[0] for p in model.parameters())
    assert_same_model(model, plain_model("llama", folder))


def test_shards_stay_where_they_are_and_their_memory_is_made_once(folders: dict[str, Path]) -> None:
    run_ranks(run_cases, 2, (models, pinned_once), folders["llama"])
