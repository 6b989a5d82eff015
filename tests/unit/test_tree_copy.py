"""A copy of a module tree without its tensors."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hf_fsdp_tools.modeling.module_tree import plain_name, way_inside
from hf_fsdp_tools.modeling.tree_copy import copy_tree


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))
        self.notes = ["own"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def make_tree() -> nn.Sequential:
    block = Block()
    wrapped = checkpoint_wrapper(torch.compile(block, backend="eager"))
    return nn.Sequential(wrapped, nn.Linear(2, 2), block)


def test_a_copy_shares_tensors_and_leaves_wrappers_out():
    model = make_tree()
    copy = copy_tree(model, way_inside=way_inside)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert dict(copy.model.named_parameters(remove_duplicate=False)).keys() == {plain_name(name) for name in names}
    assert copy.model[0] is copy.model[2] and copy.originals[copy.model[0]] is model[2]
    assert copy.model[0].linear.weight is model[2].linear.weight and copy.model[0].scale is model[2].scale
    inside = "0._checkpoint_wrapped_module._orig_mod"
    assert copy.places["0"] == "0" and copy.names["0"] == inside and copy.names["0.linear"] == f"{inside}.linear"
    assert type(model[0]) is not Block and type(copy.model[0]) is Block
    model = make_tree()
    more = lambda module: {name: nn.Parameter(p + 1) for name, p in module._parameters.items()}  # noqa: E731
    copy = copy_tree(model, parameters=more).model
    copy[2].linear = nn.Identity()
    copy[1].register_buffer("other", torch.ones(1))
    assert isinstance(model[2].linear, nn.Linear) and not hasattr(model[1], "other")
    assert torch.equal(copy[1].weight, model[1].weight + 1) and copy[1].weight is not model[1].weight


def test_a_copy_without_hooks_is_run_and_noted_upon_by_itself():
    model, calls = make_tree(), []
    model[2].register_forward_hook(lambda *args: calls.append(args))
    x = torch.ones(1, 2)
    alone, attached = (copy_tree(model, hooks=hooks).model[2] for hooks in (False, True))
    assert torch.equal(alone(x), model[2](x)) and len(calls) == 1
    attached(x)
    assert len(calls) == 2
    alone.notes.append("copy's")
    assert model[2].notes == ["own"]
