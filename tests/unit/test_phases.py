"""What runs around forward passes is in one order for all features, printed, and open for features of others."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from tests._checkpoints import make_model
from tests._dist import fake_ranks
from tests.api import Feature, Hook, Phase, Sharding, Step, Surgery, at_steps, describe_hooks, features, install


def sharded(**options: object) -> nn.Module:
    model = make_model("llama")
    return shard_model(model, make_wrap_plan(model), **options)  # type: ignore[arg-type]


def test_functions_run_by_phase_and_a_context_ends_last_also_after_an_error() -> None:
    seen: list[str] = []

    class Context:
        def __enter__(self) -> None:
            seen.append("enter")

        def __exit__(self, *_: object) -> None:
            seen.append("leave")

    class Layer(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append("forward")
            if hidden.isnan().any():
                raise ValueError
            return super().forward(hidden)

    def note(phase: Phase) -> Hook:
        return Hook(layer, phase, lambda *_: seen.append(phase.name.lower()))

    layer = Layer(2, 2)
    others = [note(phase) for phase in reversed(Phase) if phase not in (Phase.CONTEXT, Phase.GATHER, Phase.RESHARD)]
    doubled = Hook(layer, Phase.CAST, lambda _, args, kwargs: ((2 * args[0],), kwargs))
    less = Hook(layer, Phase.WHOLE, lambda _, args, output: output - 1)
    install(layer, [*others, Hook(layer, Phase.CONTEXT, Context), doubled, less])
    install(layer, [*others, Hook(layer, Phase.CONTEXT, Context), doubled, less])  # in place of the former ones
    one = torch.ones(1, 2)
    assert torch.equal(layer(one), nn.functional.linear(2 * one, layer.weight, layer.bias) - 1)
    before = ["first_pass", "buffers", "meet", "scales", "memory", "stack", "cast", "enter", "labels", "rows"]
    assert seen == [*before, "forward", "join", "reach", "copy", "keep", "output", "words", "whole", "leave"]
    seen.clear()
    with pytest.raises(ValueError):
        layer(one * torch.nan)
    assert seen == [*before, "forward", "leave"]
    install(layer, [doubled, less])
    with patch("hf_fsdp_tools.sharding.phases.ExitStack", side_effect=AssertionError("there is no context")):
        layer(one)


class Doubled(Feature):
    """What somebody else adds: a cast before each block, and a sum after it."""

    def check(self, model: nn.Module, tree: object, sharding: Sharding) -> None:
        if sharding.offload_policy.__class__.__name__ == "CPUOffloadPolicy":
            raise ConfigError("doubled blocks are not offloaded")

    def hooks(self, model: Any, tree: object, sharding: Sharding) -> Iterator[Hook | Surgery]:
        for block in model.model.layers:
            yield Hook(block, Phase.CAST, lambda block, args, kwargs: ((2 * args[0], *args[1:]), kwargs))
            yield Hook(block, Phase.WHOLE, lambda block, args, output: output / 2)


def test_a_feature_of_somebody_else_is_one_class() -> None:
    fake_ranks(2)
    found = [*features(), Doubled()]
    with patch("hf_fsdp_tools.sharding.shard.features", lambda: found):
        with pytest.raises(ConfigError, match="doubled blocks are not offloaded"):
            sharded(offload_policy=True)
        said = describe_hooks(sharded())
    of_block = said[said.index("model.layers.{0..1}\n") : said.index("model.norm")]
    phases = [line.split()[0] for line in of_block.splitlines()[1:] if line.startswith(" ")]
    assert phases == sorted(phases, key=[phase.name.lower() for phase in Phase].index), "in one order"
    assert of_block.index("cast        test_phases.<lambda>") < of_block.index("whole       test_phases.<lambda>")


def test_steps_of_all_optimizers_run_entries_by_phase_until_they_are_taken_away() -> None:
    said: list[str] = []

    class Stepped(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            said.append("OWN")

    order = (Step.COUNT, Step.PART, Step.JOIN, Step.STOP)
    taken = [at_steps(when, lambda _, name=when.name: said.append(name)) for when in order]  # type: ignore[misc]
    optimizer = Stepped([nn.Parameter(torch.ones(1))])
    optimizer.step()
    for take_away in taken:
        take_away()
    optimizer.step()
    assert said == ["STOP", "PART", "OWN", "JOIN", "COUNT", "OWN"]
