"""Find the blocks that repeat in a module tree, from its structure alone.

Words used here and in the other files of this room:

    stack   children that repeat: a list, a Sequential, a dict, or attributes `layer0 ... layerN`
    stage   a member of a stack that is mostly a stack itself (Swin, ResNet); its members count in its place
    block   a member of a stack that is not a stage; FSDP gathers one block at a time
    major   a stack that holds at least 10 % of the parameters
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from hf_fsdp_tools.modeling.module_tree import ModuleNode, ModuleTree, class_name, has_forward
from hf_fsdp_tools.modeling.notes import Chosen
from hf_fsdp_tools.modeling.roles import holds_experts
from hf_fsdp_tools.text import grouped

MAJOR_SHARE = 0.10
"""Share of the model's parameters from which a stack is major. (assumed; a part of the definition of a correct plan)"""

_STAGE_SHARE = 0.60
"""Share of a member's parameters from which its own stacks make it a stage. It lies between Swin's first stage (0.75)
and the feed-forwards of MobileBERT's layers (0.47), both computed from their default configurations."""

_NUMBERED = re.compile(r"^(.*?)_?(\d+)$")
_MIN_NUMBERED = 3
"""Numbered attributes from which they are a stack; `fc1, fc2` and `attn1, attn2` are parts of a block. (assumed)"""


def find_blocks(tree: ModuleTree) -> list[list[ModuleNode]]:
    """The blocks of every stack of the tree, stack by stack in registration order; then, of a sharded model, those that
    the user chose next to stacks (`block_types`), by their parents."""
    stacks = _stacks_below(tree.root, nested=False)
    known = {node for stack in stacks for block in stack for node in block.walk()}
    chosen: dict[ModuleNode | None, list[ModuleNode]] = {}
    for node in tree:
        if Chosen.of(node.module).is_block and node not in known:
            chosen.setdefault(node.parent, []).append(node)
            known.update(node.walk())
    return [*stacks, *chosen.values()]


def is_major(tree: ModuleTree, stack: list[ModuleNode]) -> bool:
    """Whether the stack holds at least 10 % of the parameters of the model."""
    return sum(block.size for block in stack) >= MAJOR_SHARE * tree.num_params


def major_blocks(tree: ModuleTree, stacks: list[list[ModuleNode]]) -> list[ModuleNode]:
    """The blocks of the major stacks."""
    return [block for stack in stacks if is_major(tree, stack) for block in stack]


def _stacks_below(root: ModuleNode, *, nested: bool) -> list[list[ModuleNode]]:
    """The outermost stacks below `root`, stages opened, each as its blocks."""
    stacks: list[list[ModuleNode]] = []
    seen: set[nn.Module] = set()

    def visit(node: ModuleNode) -> None:
        if node.module in seen or not node.extent:  # a module registered twice is one stack
            return
        seen.add(node.module)
        members = _members(node, nested=nested)
        if members:
            stacks.append(_open_stages(members))
        for member in members:  # of lists of lists, the lists in between were opened with this one
            seen.update(above.module for above in (member, *member.ancestors()))
        for child in node.children:
            visit(child)

    visit(root)
    return stacks


def _members(node: ModuleNode, *, nested: bool) -> list[ModuleNode]:
    """The children of `node` that form a stack; empty when they do not repeat."""
    children = _distinct(child for child in node.children if child.extent)
    if isinstance(node.module, nn.ModuleList | nn.ModuleDict | nn.Sequential) or (
        children and all(child.name.isdigit() for child in children)
    ):
        if nested and holds_experts(node):
            return []
        children = _distinct(_opened(children))
        is_plain_list = not isinstance(node.module, nn.Sequential)
        return _repeating(children, nested=nested, keep_all=is_plain_list, allow_one=is_plain_list)
    families = grouped((match[1], child) for child in children if (match := _NUMBERED.match(child.name)))
    numbered = [child for family in families.values() if len(family) >= _MIN_NUMBERED for child in family]
    return _repeating(numbered, nested=True, keep_all=False, allow_one=False)


def _opened(children: Iterable[ModuleNode]) -> Iterator[ModuleNode]:
    """The children, with containers that cannot run (lists of lists) replaced by what they hold."""
    for child in children:
        if isinstance(child.module, nn.ModuleList | nn.ModuleDict) and not has_forward(child.module):
            yield from _opened(grandchild for grandchild in child.children if grandchild.extent)
        else:
            yield child


def _repeating(members: list[ModuleNode], *, nested: bool, keep_all: bool, allow_one: bool) -> list[ModuleNode]:
    """The members whose classes occur more than once; only those of several matrices count, if they hold the most."""
    composite = [m for m in members if sum(any(weight.ndim > 1 for weight in below.own) for below in m.walk()) > 1]
    if sum(m.extent for m in composite) * 2 >= sum(m.extent for m in members):
        members = composite
    elif nested:
        return []  # inside a block, single convolutions and projections are layers of the block
    if len(members) == 1:
        return members if allow_one and composite else []
    counts = Counter(class_name(member.module) for member in members)
    repeated = [member for member in members if counts[class_name(member.module)] > 1]
    if sum(m.extent for m in repeated) * 2 < sum(m.extent for m in members) and not (keep_all and repeated):
        return []
    return members if keep_all else repeated


def _open_stages(members: list[ModuleNode]) -> list[ModuleNode]:
    """The blocks of a stack: its members, with stages replaced by their own blocks."""
    inner = {member: [b for stack in _stacks_below(member, nested=True) for b in stack] for member in members}
    whole, held = Counter[str](), Counter[str]()
    for member in members:
        whole[class_name(member.module)] += member.extent
        held[class_name(member.module)] += sum(block.extent for block in inner[member])
    stages = {name for name in whole if held[name] >= _STAGE_SHARE * whole[name]}
    blocks: list[ModuleNode] = []
    for member in members:
        is_stage = class_name(member.module) in stages and inner[member]
        blocks += inner[member] if is_stage else [member]
    return blocks


def _distinct(nodes: Iterable[ModuleNode]) -> list[ModuleNode]:
    """The first node of each module."""
    first: dict[nn.Module, ModuleNode] = {}
    for node in nodes:
        first.setdefault(node.module, node)
    return list(first.values())
