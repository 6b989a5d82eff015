"""Detect the repeated blocks of a model, its embeddings, final norm, head and tied weights, from its module tree alone.

Hints that a model gives about itself (`_no_split_modules`, `get_input_embeddings`) do not count: in many models they
name absent classes, attention layers or other towers.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import takewhile

from torch import nn

from hf_fsdp_tools.modeling.module_tree import ModuleNode, ModuleTree, class_name
from hf_fsdp_tools.planning.stacks import MAJOR_SHARE, find_blocks
from hf_fsdp_tools.text import listed, listed_lines, show_count, table


@dataclass(frozen=True, kw_only=True)
class BlockStack:
    """Blocks that repeat."""

    fqn: str
    """Place of the stack; `*` stands for the indices of stages ("encoder.layers.*.blocks")."""
    blocks: tuple[str, ...]
    """The fqn of each block, in registration order."""
    class_names: tuple[str, ...]
    """Classes of the blocks, most frequent first."""
    num_params: int
    """Parameters of all blocks together, tied ones once."""
    largest_block_params: int
    """Parameters of the largest block, tied ones included."""
    share: float
    """`num_params` as a share of the model, 0 to 1."""

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    @property
    def is_major(self) -> bool:
        """Whether the stack holds at least 10 % of the parameters."""
        return self.share >= MAJOR_SHARE


@dataclass(frozen=True, kw_only=True)
class ModulePart:
    """A module with a role: an embedding, the final norm, the head."""

    fqn: str
    """Fully qualified name."""
    class_name: str
    """Its class."""
    num_params: int
    """Parameters below it."""


@dataclass(frozen=True, kw_only=True)
class ModelBlocks:
    """The stacks of blocks of a model and the modules around them, as data; the same on every rank."""

    model_class: str
    """Class of the model."""
    num_params: int
    """Parameters of the model, tied ones once."""
    stacks: tuple[BlockStack, ...]
    """Every stack, major ones first, then by registration order; empty where nothing repeats."""
    embeddings: tuple[ModulePart, ...]
    """Embedding tables outside blocks, largest first."""
    final_norm: ModulePart | None
    """The normalisation after the last block, if it is a module of its own."""
    head: ModulePart | None
    """The output projection, if there is one outside blocks."""
    ties: tuple[tuple[str, ...], ...]
    """Parameter names that are one tensor, now or after loading, the canonical one first."""
    scalars: tuple[str, ...]
    """Names of 0-d parameters, which FSDP cannot shard."""

    @property
    def major_stacks(self) -> tuple[BlockStack, ...]:
        """The stacks that hold at least 10 % of the parameters each."""
        return tuple(stack for stack in self.stacks if stack.is_major)

    def to_json(self) -> str:
        """This value as JSON text (a stable order of keys)."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        rows: list[tuple[str, str]] = []
        for stack in self.stacks:
            about = (
                f"{stack.fqn}  {stack.count} × {' | '.join(stack.class_names)}  "
                f"largest {show_count(stack.largest_block_params)}, {stack.share:.1%} of the model"
            )
            rows.append(("blocks" if stack.is_major else "blocks (minor)", about))
        parts = [("embedding", part) for part in self.embeddings]
        parts += [(role, part) for role, part in (("final norm", self.final_norm), ("head", self.head)) if part]
        rows += [(role, f"{part.fqn}  {part.class_name}  {show_count(part.num_params)}") for role, part in parts]
        ties = [listed(names, separator=" = ") for names in self.ties]
        for name, texts in {"tied": ties, "0-d parameter": self.scalars}.items():
            rows += [(name, line) for line in listed_lines(texts, 8, head="").splitlines()]
        head = f"{self.model_class}: {show_count(self.num_params)} parameters"
        return "\n".join([head, *table(rows, indent="  ")])


def detect_blocks(model: nn.Module) -> ModelBlocks:
    """Find the repeated blocks of `model`, and the embeddings, final norm, head and ties around them.

    Only names, classes and shapes are read. Any rank may call; nothing is communicated, and every rank gets the same
    result.

    Args:
        model: any module, on any device, meta included: of transformers or plain, also wrapped by PEFT,
            `torch.compile`, checkpoint wrappers or DDP, also sharded. Names in the result are names in this model.

    Example:
        >>> print(detect_blocks(build_meta_model("checkpoint")))
        LlamaForCausalLM: 45.9 K parameters
          blocks      model.layers  2 × LlamaDecoderLayer  largest 16.7 K, ...
          embedding   model.embed_tokens  Embedding  6.3 K
          final norm  model.norm  LlamaRMSNorm  48
          head        lm_head  Linear  6.3 K
    """
    tree = ModuleTree(model)
    return describe_blocks(tree, find_blocks(tree))


def describe_blocks(tree: ModuleTree, stacks: list[list[ModuleNode]]) -> ModelBlocks:
    """`detect_blocks` for a tree and its stacks."""
    described = [_describe_stack(tree, blocks) for blocks in stacks]
    in_blocks = {node for blocks in stacks for block in blocks for node in block.walk()}
    outside = [node for node in tree if node not in in_blocks]
    largest = max(stacks, key=lambda blocks: sum(block.size for block in blocks), default=[])
    embeddings = _embeddings(outside)
    head = _head(tree, outside, largest, embeddings)
    return ModelBlocks(
        model_class=class_name(tree.root.module),
        num_params=tree.num_params,
        stacks=tuple(sorted(described, key=lambda stack: not stack.is_major)),
        embeddings=embeddings,
        final_norm=_final_norm(outside, _stack_before(head, stacks, largest)),
        head=head,
        ties=tuple(tuple(weight.names) for weight in tree.weights if len(set(weight.names)) > 1),
        scalars=tuple(weight.names[0] for weight in tree.weights if weight.ndim == 0),
    )


# ---- the modules around the stacks ----


def _embeddings(outside: list[ModuleNode]) -> tuple[ModulePart, ...]:
    """The embedding tables outside blocks, largest first."""
    parts: dict[nn.Module, ModulePart] = {}
    for node in outside:
        is_table = isinstance(node.module, nn.Embedding | nn.EmbeddingBag) or hasattr(node.module, "num_embeddings")
        if is_table and any(weight.ndim == 2 for weight in node.own):
            parts.setdefault(node.module, _part(node))
    return tuple(sorted(parts.values(), key=lambda part: -part.num_params))


def _head(
    tree: ModuleTree, outside: list[ModuleNode], blocks: list[ModuleNode], embeddings: tuple[ModulePart, ...]
) -> ModulePart | None:
    """The output projection: a matrix outside blocks that is tied to an embedding, else the last after the blocks."""
    tables = {part.fqn for part in embeddings}
    order = {node: index for index, node in enumerate(tree)}
    last_block = max((order[block] for block in blocks), default=-1)
    candidates = []
    for node in outside:
        if node.fqn in tables or isinstance(node.module, nn.Embedding) or not any(w.ndim == 2 for w in node.own):
            continue
        tied = any(owner.fqn in tables for weight in node.own for owner in weight.owners)
        if tied or (order[node] > last_block and not node.children):
            candidates.append((tied, order[node], node))
    return _part(max(candidates, key=lambda candidate: candidate[:2])[2]) if candidates else None


def _stack_before(
    head: ModulePart | None, stacks: list[list[ModuleNode]], largest: list[ModuleNode]
) -> list[ModuleNode]:
    """The stack whose output the head takes: of several towers, the one nearest to the head by name, or the largest."""
    if head is None:
        return largest
    path = head.fqn.split(".")[:-1]

    def nearness(blocks: list[ModuleNode]) -> tuple[int, bool]:
        shared = zip(path, blocks[0].fqn.split("."), strict=False)
        return sum(1 for _ in takewhile(lambda parts: parts[0] == parts[1], shared)), blocks is largest

    return max(stacks, key=nearness, default=[])


def _final_norm(outside: list[ModuleNode], blocks: list[ModuleNode]) -> ModulePart | None:
    """The first module after the last block, next to the stack or what holds it, whose weights are all vectors."""
    if not blocks:
        return None
    last = blocks[-1]
    candidates = set(outside)
    for above in [last, *last.ancestors()]:
        if above.parent is None:
            return None
        siblings = above.parent.children
        for node in siblings[siblings.index(above) + 1 :]:
            if node in candidates and node.own and not node.children and all(w.ndim == 1 for w in node.own):
                return _part(node)
            if any(weight.ndim > 1 for below in node.walk() for weight in below.own):
                return None
    return None


def _part(node: ModuleNode) -> ModulePart:
    return ModulePart(fqn=node.fqn, class_name=class_name(node.module), num_params=node.extent)


def _place(blocks: list[ModuleNode]) -> str:
    """The fqn that the parents of the blocks share, with `*` where they differ."""
    parents = [block.fqn.split(".")[:-1] for block in blocks]
    if len({len(parts) for parts in parents}) == 1:
        return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*parents, strict=True))
    common = [parts[0] for parts in zip(*parents, strict=False) if len(set(parts)) == 1]
    return ".".join([*common, "*"])


def _describe_stack(tree: ModuleTree, blocks: list[ModuleNode]) -> BlockStack:
    names = Counter(class_name(block.module) for block in blocks)
    params = sum(block.size for block in blocks)
    return BlockStack(
        fqn=_place(blocks),
        blocks=tuple(block.fqn for block in blocks),
        class_names=tuple(name for name, _ in names.most_common()),
        num_params=params,
        largest_block_params=max(block.extent for block in blocks),
        share=params / tree.num_params,
    )
