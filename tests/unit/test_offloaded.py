"""Values on the CPU (offloaded shards) and on the device meet only where both have arrived."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from tests.api import ShardedScaler


class OnDevice(torch.Tensor):
    """A number on a GPU. A copy to the CPU that nobody waits for has not arrived when it is read."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def to(self, device: Any, non_blocking: bool = False, copy: bool = False) -> torch.Tensor:  # type: ignore[override]
        number = self.as_subclass(torch.Tensor).clone()
        return number.fill_(float("nan")) if non_blocking else number


def number(value: float) -> torch.Tensor:
    return torch.tensor(value).as_subclass(OnDevice)


@pytest.mark.parametrize("infinite", [False, True])
def test_the_scale_has_arrived_before_offloaded_gradients_are_divided_by_it(infinite: bool) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([8.0, 16.0, float("inf") if infinite else 4.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    found = ShardedScaler("cpu")._unscale_grads_(optimizer, number(0.25), number(0.0), False)
    assert found == {torch.device("cpu"): torch.tensor(float(infinite))}
    assert parameter.grad[:2].tolist() == [2.0, 4.0]


def test_a_fused_step_is_not_called_on_infinite_gradients_and_a_saved_scale_is_read() -> None:
    """It would look at the gradients itself, after a copy that it does not wait for."""
    scaler, parameter = ShardedScaler("cpu"), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=1.0, fused=True)
    optimizer.step = Mock(wraps=optimizer.step)  # type: ignore[method-assign]
    for gradient, calls in ((float("inf"), 0), (2.0, 1)):
        scaler.scale(parameter.sum())  # the scale is made by its first use
        parameter.grad = torch.full((3,), gradient)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.step.call_count == calls
    assert parameter.detach().lt(1).all()
    saved = ShardedScaler("cpu", init_scale=8.0)
    saved._lazy_init_scale_growth_tracker(torch.device("cpu"))
    used = ShardedScaler("cpu")
    used.scale(torch.ones(()))
    used.load_state_dict(saved.state_dict())
    used._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert used.get_scale() == 8.0
