"""What runs around forward passes is in one order for all features, printed, and open for features of others."""

import copy
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from hf_fsdp_tools import ConfigError, ParallelDims, make_wrap_plan, shard_model
from hf_fsdp_tools.sharding.fsdp2_internals import names_of_fsdp2, refuse_without
from hf_fsdp_tools.sharding.phases import Hook, Phase, Surgery, describe_hooks, install, remove_hooks
from hf_fsdp_tools.sharding.shard import FEATURES
from hf_fsdp_tools.sharding.sharding import Feature, Sharding
from tests._checkpoints import make_model
from tests._dist import fake_ranks


def sharded(**options: object) -> nn.Module:
    model = make_model("llama")
    return shard_model(model, make_wrap_plan(model), **options)  # type: ignore[arg-type]


EXPECTED = """\
LlamaForCausalLM
  first_pass  checks.check
  first_pass  recompute.check
  meet        skipped.begin
  memory      hooks.prepare_unit
  gather      FSDP2
  context     context_parallel.own_loss
  context     autocast_mode.autocast
  context     skipped.pass
  rows        context_parallel.before_model
  join        skipped.end
  reshard     FSDP2
  output      hooks.return_fp32
  output      hooks.reshard_after_evaluation
  whole       context_parallel.after_model
model
  stack       skipped.opened
  join        skipped.closed
  keep        hooks.gather_head
  whole       context_parallel.after_decoder
model.embed_tokens
  meet        skipped.enter
  memory      hooks.prepare_unit
  gather      FSDP2
  cast        hooks.cast_inputs
  context     autocast_mode.autocast
  copy        hooks.part_from_weights
  reshard     FSDP2
  keep        skipped.leave
model.layers.{0..1}
  meet        skipped.enter
  memory      hooks.prepare_unit
  gather      FSDP2
  cast        hooks.cast_inputs
  context     autocast_mode.autocast
  rows        context_parallel.before_block
  reshard     FSDP2
  keep        skipped.leave
model.norm lm_head
  meet        skipped.enter
  memory      hooks.prepare_unit
  gather      FSDP2
  cast        hooks.cast_inputs
  context     autocast_mode.autocast
  copy        hooks.part_from_weights
  reshard     FSDP2
  keep        fsdp2_internals.gather_for_backward
  keep        skipped.leave"""


def test_the_order_of_all_features_is_printed_and_copies_have_it_once() -> None:
    fake_ranks(2)
    dims = ParallelDims(cp_size=2).build_mesh("cpu")
    model = sharded(mesh=dims, mp_policy="bf16", activation_checkpointing={"offload": True})
    assert describe_hooks(model) == EXPECTED
    twin = copy.deepcopy(model)
    assert describe_hooks(twin) == EXPECTED
    for module, copied in zip(model.modules(), twin.modules(), strict=True):
        assert len(copied._forward_pre_hooks) == len(module._forward_pre_hooks) <= 3, "FSDP2's among them"
        assert len(copied._forward_hooks) <= len(module._forward_hooks) <= 5, "transformers' among them"
    remove_hooks(twin)
    assert {line.split()[-1] for line in describe_hooks(twin).splitlines() if line[:1] == " "} == {"FSDP2"}


def test_a_torch_whose_names_are_others_is_refused_by_name() -> None:
    code = "class FSDPParam:\n    def init_dtype_attrs(self): ...\n"
    refuse_without({"init_dtype_attrs"}, code)
    with pytest.raises(ConfigError, match=r"FSDP2 of torch .* has no fsdp_params, which"):
        refuse_without({"init_dtype_attrs", "fsdp_params"}, code)
    assert {"_lazy_init", "fsdp_params", "_post_forward", "sharded_param"} <= names_of_fsdp2()


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
    with patch("hf_fsdp_tools.sharding.shard.FEATURES", [*FEATURES, Doubled()]):
        with pytest.raises(ConfigError, match="doubled blocks are not offloaded"):
            sharded(offload_policy=True)
        said = describe_hooks(sharded())
    assert "model.layers.{0..1}\n" in said and "  cast        test_phases.<lambda>\n" in said
    assert said.index("  cast        test_phases") < said.index("  whole       test_phases")
