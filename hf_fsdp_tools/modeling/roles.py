"""What parts of a model are: linear layers, experts and their routers, adapters, and the ends around blocks.

Each is decided here alone, by classes, names and shapes.
"""

import re
from collections.abc import Collection, Iterator
from itertools import pairwise

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_fsdp_tools.modeling.module_tree import ADAPTED, ModuleNode, Weight, class_name, has_forward
from hf_fsdp_tools.modeling.tree_copy import is_wrapper


def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by its weight; quantised and parallel layers are called Linear too."""
    return isinstance(module, nn.Linear | Conv1D) or class_name(module).endswith("Linear")


_ENDS = re.compile(r"(^|_)(heads?|embed|embedder|embeddings?|classifiers?)$")
"""Names of modules around blocks whose lists are of heads and embeddings: DETR's `bbox_embed`, Bark's `lm_heads`."""


def is_end(block: ModuleNode) -> bool:
    """Whether a member of a stack is a layer of a head or of an embedding, or a bare linear layer."""
    return is_linear(block.module) or any(_ENDS.search(each.name) for each in (block, *block.ancestors()))


def is_adapter(node: ModuleNode, *, wrapped: Collection[str] = ADAPTED) -> bool:
    """Whether PEFT added a module, and does not wrap it in an attribute of one of these names."""
    way = [node, *node.ancestors()]
    return hasattr(type(node.module), "adapter_layer_names") or any(
        hasattr(type(above.module), "adapter_layer_names") and not (is_wrapper(above.module) and below.name in wrapped)
        for below, above in pairwise(way)
    )


# ---- experts ----


def is_named_expert(node: ModuleNode) -> bool:
    """Whether the name or the class of a module says that it is of experts."""
    return any("expert" in name.lower() for name in (node.name, class_name(node.module)))


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield the stacks of weights of experts that are one parameter: fqn, module, parameter."""
    for fqn, module in model.named_modules():
        for name, weight in module._parameters.items() if fqn.endswith("experts") else ():
            if weight is not None and weight.dim() == 3:
                yield f"{fqn}.{name}", module, weight


def lists_of_experts(block: ModuleNode) -> list[ModuleNode]:
    """Containers inside a block of experts, which may run on some ranks only because a router chooses them.

    A container holds experts if a router is next to it (a matrix with one row per member), or if "expert" is in a name:
    a missed list of experts would hang a run, and a false one costs little.
    """
    # of some models, a list of experts has a forward of its own
    lists = (
        n for n in block.walk() if isinstance(n.module, nn.ModuleList | nn.ModuleDict) or not has_forward(n.module)
    )
    return [node for node in lists if len(node.children) > 1 and holds_experts(node)]


def holds_experts(container: ModuleNode) -> bool:
    """Whether a container is named after experts, or has a router next to it."""
    names = [container.name, *(class_name(child.module) for child in container.children[:1])]
    if any("expert" in name.lower() for name in names):
        return True
    parent = container.parent
    if parent is None:
        return False
    small = [child for child in parent.children if child is not container and len(child.children) < 4]
    weights = [*parent.own, *(weight for child in small for below in child.walk() for weight in below.own)]
    return any(weight.ndim == 2 and weight.shape[0] == len(container.children) for weight in weights)


def routers(block: ModuleNode) -> Iterator[Weight]:
    """Yield the weights in a block that choose experts: the only matrix of its module, or of the one that has the
    experts, with a row for each of these; and those of modules called routers."""
    lists = {node: len(node.children) for node in lists_of_experts(block)}
    named = [node for node in block.walk() if is_named_expert(node)]
    stacks = {node: weight.shape[0] for node in named for weight in node.own if weight.ndim == 3}
    for experts, count in (lists | stacks).items():
        home = experts.parent if experts is not block else None
        beside = [] if home is None else [child.walk() for child in home.children if child is not experts]
        for nodes in ([] if home is None else [home], *beside):
            matrices = [weight for node in nodes for weight in node.own if weight.ndim == 2]
            if len(matrices) == 1 and matrices[0].shape[0] == count:
                yield matrices[0]
    for node in block.walk():
        if "router" in node.name.lower() or "router" in class_name(node.module).lower():
            yield from (weight for below in node.walk() for weight in below.own)
