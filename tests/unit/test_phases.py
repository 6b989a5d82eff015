"""What runs around forward passes is in one order for all features, printed, and open for features of others."""

import ast
import copy
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from hf_fsdp_tools import ConfigError, ParallelDims
from hf_fsdp_tools.sharding import patches, phases
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from tests._checkpoints import make_model
from tests._dist import fake_ranks
from tests.api import (
    ALWAYS,
    Feature,
    Hook,
    Phase,
    Sharding,
    Step,
    Undo,
    at_steps,
    describe_hooks,
    install,
    names_in,
    refuse_without,
    remove_hooks,
)


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
  context     rows.called_instead
  context     context_parallel.own_loss
  context     autocast_mode.autocast
  context     hooks.pass
  context     skipped.pass
  rows        context_parallel.before_model
  join        skipped.end
  copy        hooks.as_no_views
  reshard     FSDP2
  output      precision.return_fp32
  whole       context_parallel.after_model
model
  stack       skipped.opened
  context     rows.called_instead
  context     hooks.pass_within
  rows        context_parallel.before_base
  join        skipped.closed
  keep        hooks.gather_head
  whole       context_parallel.after_decoder
  whole       context_parallel.after_base
model.embed_tokens
  meet        skipped.enter
  memory      hooks.prepare_unit
  gather      FSDP2
  cast        precision.cast_inputs
  context     autocast_mode.autocast
  copy        hooks.part_from_weights
  copy        hooks.as_no_views
  reshard     FSDP2
  keep        fsdp2_internals.end_alone
  keep        skipped.leave
model.layers.{0..1}
  meet        skipped.enter
  memory      hooks.prepare_unit
  gather      FSDP2
  cast        precision.cast_inputs
  context     autocast_mode.autocast
  rows        context_parallel.before_block
  copy        hooks.as_no_views
  reshard     FSDP2
  keep        fsdp2_internals.end_alone
  keep        skipped.leave
model.layers.{0..1}.self_attn
  context     rows.called_instead
model.norm lm_head
  meet        skipped.enter
  memory      hooks.prepare_unit
  gather      FSDP2
  cast        precision.cast_inputs
  context     autocast_mode.autocast
  copy        hooks.part_from_weights
  copy        hooks.as_no_views
  reshard     FSDP2
  keep        fsdp2_internals.gather_for_backward
  keep        fsdp2_internals.end_alone
  keep        skipped.leave"""


def test_the_order_of_all_features_is_printed_and_copies_have_it_once() -> None:
    fake_ranks(2)
    dims = ParallelDims(cp_size=2).build_mesh("cpu")
    model = sharded(mesh=dims, mp_policy="bf16", activation_checkpointing={"offload": True})
    expected = EXPECTED
    if not hasattr(FSDPModule, "reset_iter_state"):  # before torch 2.13
        expected = expected.replace(
            "  output      precision.return_fp32",
            "  output      precision.return_fp32\n  output      hooks.complete_units",
        )
    assert describe_hooks(model) == expected
    twin = copy.deepcopy(model)
    assert describe_hooks(twin) == expected
    for module, copied in zip(model.modules(), twin.modules(), strict=True):
        assert len(copied._forward_pre_hooks) == len(module._forward_pre_hooks) <= 3, "FSDP2's among them"
        assert len(copied._forward_hooks) <= len(module._forward_hooks) <= 5, "transformers' among them"
    remove_hooks(twin)
    assert {line.split()[-1] for line in describe_hooks(twin).splitlines() if line[:1] == " "} == {"FSDP2"}


def test_a_torch_whose_names_are_others_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"FSDP2 of torch .* has no fsdp_params, which"):
        refuse_without({"init_dtype_attrs", "fsdp_params"}, {"init_dtype_attrs"})
    assert {"FIRST_PASS", "casts", "remove_hooks", "given", "partial"} <= names_in(phases), "in a function inside, too"


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
    before = ["first_pass", "buffers", "meet", "scales", "memory", "stack", "cast", "enter", "labels"]
    before += ["tokens", "region", "rows", "own"]
    after = ["join", "reach", "copy", "keep", "output", "words", "whole_tokens", "whole", "own_again"]
    assert seen == [*before, "forward", *after, "leave"]
    seen.clear()
    with pytest.raises(ValueError):
        layer(one * torch.nan)
    assert seen == [*before, "forward", "leave"]


class Doubled(Feature):
    """What somebody else adds: a cast before each block, and a sum after it."""

    def check(self, model: nn.Module, tree: object, sharding: Sharding) -> None:
        if sharding.offload_policy.__class__.__name__ == "CPUOffloadPolicy":
            raise ConfigError("doubled blocks are not offloaded")

    def hooks(self, model: Any, tree: object, sharding: Sharding) -> Iterator[Hook | Undo]:
        for block in model.model.layers:
            yield Hook(block, Phase.CAST, lambda block, args, kwargs: ((2 * args[0], *args[1:]), kwargs))
            yield Hook(block, Phase.WHOLE, lambda block, args, output: output / 2)


def test_a_feature_of_somebody_else_is_one_class() -> None:
    fake_ranks(2)
    ALWAYS.append(own := Doubled())
    try:
        with pytest.raises(ConfigError, match="doubled blocks are not offloaded"):
            sharded(offload_policy=True)
        said = describe_hooks(sharded())
    finally:
        ALWAYS.remove(own)
    assert "model.layers.{0..1}\n" in said and "  cast        test_phases.<lambda>\n" in said
    assert said.index("  cast        test_phases") < said.index("  whole       test_phases")


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


def is_ours(value: Any) -> bool:
    package = Path(patches.__file__).parents[1]
    own = [value, vars(value).get("__wrapped__")] if isinstance(value, FunctionType) else []
    files = (Path(each.__code__.co_filename) for each in own if isinstance(each, FunctionType))
    return any(file.is_relative_to(package) for file in files)


def test_what_is_replaced_in_libraries_for_a_process_stands_in_one_table() -> None:
    patches.guard_habits(torch.nn.Module())
    patches.replace_in_process(patches.BOXES)
    libraries = ("torch", "transformers", "accelerate", "peft", "trl")
    owners = {name: vars(each) for name, each in sys.modules.items() if name.split(".")[0] in libraries}
    classes = {
        f"{name}.{key}": vars(cls)
        for name, content in owners.items()
        for key, cls in list(content.items())
        if isinstance(cls, type) and cls.__module__ == name
    }
    dispatcher: Any = DTensor._op_dispatcher
    owners |= classes | {"torch.distributed.tensor._dispatch.OpDispatcher": vars(dispatcher)}
    found = {name for name, content in owners.items() if any(map(is_ours, list(content.values())))}
    rows = [row.owner for row in (*patches.HABITS, *patches.BOXES) if not isinstance(row.owner, dict)]
    classes = {row if isinstance(row, type | ModuleType) else type(row) for row in rows}
    assert found == {getattr(each, "__module__", "") + "." * isinstance(each, type) + each.__name__ for each in classes}


OWN = {
    "extensions.context_parallel": {"joins_outputs"},
    "integrations.checkpoints": {"saving"},
    "modeling.packed_weight": {"chunks"},
    "modeling.module_tree": {"__class__"},
}
"""What is replaced for a block and of no library."""


def test_what_is_replaced_on_models_or_in_blocks_stands_in_the_table() -> None:
    package = Path(patches.__file__).parents[1]
    for path in package.rglob("*.py"):
        module, names = ".".join(path.relative_to(package).with_suffix("").parts), set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if called == "replaced":
                names |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            elif called == "override_method" and isinstance(node.args[1], ast.Constant):
                names.add(node.args[1].value)
            elif isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store):
                names.add("__class__")
        assert names <= {*re.findall(r"\w+", patches.ELSEWHERE.get(module, ""))} | OWN.get(module, set()), module


def test_torch_still_takes_several_boxes_of_a_shard_for_one() -> None:
    fake_ranks(2)
    patches.replace_in_process(patches.BOXES)
    mesh = ParallelDims(tp_size=2).build_mesh("cpu")["tp"]
    shard = DTensor.from_local(torch.ones(4, 2), mesh, [_StridedShard(0, split_factor=2)], shape=(8, 2), stride=(2, 1))
    former = inspect.getclosurevars(DTensor.__create_chunk_list__).nonlocals["own"]
    assert [len(chunks(shard)) for chunks in (former, DTensor.__create_chunk_list__)] == [1, 2]
