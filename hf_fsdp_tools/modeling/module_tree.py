"""Read a model as a tree of modules with every parameter counted once; blocks and plans are made from it.

Words used here and in `planning`:

    node     one place of a module in the tree; a module registered twice has two nodes
    weight   one parameter after tying, under all names that are, or will be, the same tensor
    owner    a node whose module registers a weight directly
    size     parameters below a node, each weight counted at its first owner only (sizes sum to the whole model)
    extent   parameters below a node, each weight counted at every owner (a block would gather so many)
"""

import inspect
import re
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools.errors import BlockDetectionError

WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""Attributes in which torch's wrappers (checkpoint wrappers, `torch.compile`, FSDP) keep the wrapped module. A wrapper
counts as the module inside it."""

ADAPTED = ("base_layer", "original_module", "token_adapter")
"""Attributes in which PEFT's wrappers (0.21) keep the wrapped module; a wrapper may hold another wrapper."""


@dataclass(eq=False, slots=True)
class Weight:
    """One parameter after tying."""

    names: list[str]
    """Every parameter name of this weight in the model, in registration order; the first is the canonical one."""
    owners: "list[ModuleNode]"
    """The nodes that register it, in the order of `names`."""
    numel: int
    """Number of elements."""
    nbytes: int
    """Bytes at the present dtype."""
    ndim: int
    """Number of dimensions; FSDP2 refuses 0."""
    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    """Present dtype."""
    requires_grad: bool
    """Whether any of the tied parameters is trainable."""
    is_declared_tie: bool = False
    """Whether the model declares a tie of parameters that are still separate tensors."""


@dataclass(eq=False, slots=True)
class ModuleNode:
    """One place of a module in the tree."""

    fqn: str
    """Fully qualified name in the model passed in; "" for the root."""
    module: nn.Module
    """The live module."""
    parent: "ModuleNode | None"
    """The node above; None for the root."""
    children: "list[ModuleNode]" = field(default_factory=list)
    """The nodes below, in registration order."""
    own: list[Weight] = field(default_factory=list)
    """Weights registered on this very module."""
    size: int = 0
    """Parameters below, each weight counted at its first owner in the model."""
    extent: int = 0
    """Parameters below, counted at every owner."""

    @property
    def name(self) -> str:
        """The last part of the fqn."""
        return self.fqn.rpartition(".")[2]

    def walk(self) -> "Iterator[ModuleNode]":
        """Yield this node and all below it, parents first, in registration order."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def ancestors(self) -> "Iterator[ModuleNode]":
        """Yield the nodes above this one, nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


class ModuleTree:
    """The nodes and weights of one model, read once; reads shapes only, so it works on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self.root = ModuleNode(fqn="", module=model, parent=None)
        self.by_fqn: dict[str, ModuleNode] = {}
        self._weight_of: dict[str, Weight] = {}
        self._read_modules(self.root, on_path=set(), by_id={})
        if not self._weight_of:
            raise BlockDetectionError(
                f"{type(model).__name__} has no parameters, so there is nothing to shard. "
                "Pass the model itself (for a wrapper or a container, the module that holds the weights)."
            )
        self.nodes: list[ModuleNode] = list(self.by_fqn.values())  # parents first, in registration order
        self._join_declared_ties()
        self.weights: list[Weight] = list({id(w): w for w in self._weight_of.values()}.values())
        self.num_params = sum(weight.numel for weight in self.weights)
        self._sum_sizes()

    def __iter__(self) -> Iterator[ModuleNode]:
        return iter(self.nodes)

    def weight(self, parameter_fqn: str) -> Weight:
        """The weight with a parameter name."""
        return self._weight_of[parameter_fqn]

    def has_weight(self, parameter_fqn: str) -> bool:
        """Whether the model has a parameter of this name."""
        return parameter_fqn in self._weight_of

    def _read_modules(self, node: ModuleNode, on_path: set[int], by_id: dict[int, Weight]) -> None:
        self.by_fqn[node.fqn] = node
        prefix = f"{node.fqn}." if node.fqn else ""
        for name, parameter in node.module._parameters.items():
            if parameter is not None:
                self._read_parameter(node, prefix + name, parameter, by_id)
        on_path.add(id(node.module))
        for name, module in node.module._modules.items():
            if module is not None and id(module) not in on_path:  # a module may register its own parent
                child = ModuleNode(fqn=prefix + name, module=module, parent=node)
                node.children.append(child)
                self._read_modules(child, on_path, by_id)
        on_path.discard(id(node.module))

    def _read_parameter(self, node: ModuleNode, fqn: str, parameter: nn.Parameter, by_id: dict[int, Weight]) -> None:
        if nn.parameter.is_lazy(parameter):
            raise BlockDetectionError(
                f"Parameter {fqn!r} is lazy and has no shape yet. Run one forward pass with the model before planning."
            )
        weight = by_id.get(id(parameter))
        if weight is None:
            weight = by_id[id(parameter)] = Weight(
                names=[],
                owners=[],
                numel=parameter.numel(),
                nbytes=parameter.numel() * parameter.element_size(),
                ndim=parameter.ndim,
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                requires_grad=parameter.requires_grad,
            )
        weight.names.append(fqn)
        weight.owners.append(node)
        node.own.append(weight)
        self._weight_of[fqn] = weight

    def _join_declared_ties(self) -> None:
        """Join weights that the model will tie when it is loaded, although they are separate tensors now."""
        plain_names = {plain_name(name, adapters=True): name for name in self._weight_of}
        for node in self:
            declared = getattr(node.module, "all_tied_weights_keys", None)
            if not isinstance(declared, dict):
                continue
            home = plain_name(node.fqn, adapters=True)
            for target, source in declared.items():
                names = [plain_names.get(f"{home}.{key}" if home else key) for key in (source, target)]
                if names[0] is not None and names[1] is not None:
                    self._join(self._weight_of[names[0]], self._weight_of[names[1]])

    def _join(self, first: Weight, second: Weight) -> None:
        if first is second or first.shape != second.shape:
            return
        for name, owner in zip(second.names, second.owners, strict=True):
            first.names.append(name)
            first.owners.append(owner)
            owner.own[owner.own.index(second)] = first
            self._weight_of[name] = first
        first.requires_grad |= second.requires_grad
        first.is_declared_tie = True

    def _sum_sizes(self) -> None:
        for node in reversed(self.nodes):  # children before parents
            for weight in {id(w): w for w in node.own}.values():
                node.size += weight.numel if weight.owners[0] is node else 0
                node.extent += weight.numel
            if node.parent is not None:
                node.parent.size += node.size
                node.parent.extent += node.extent


def slots(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield each place of a parameter or buffer: the dictionary of its module, its name in it, and the tensor."""
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is not None:
                    yield store, name, tensor


def swap(model: nn.Module, new: Mapping[Any, torch.Tensor]) -> None:
    """Put tensors in the place of others, under all names of these."""
    for store, name, tensor in slots(model):
        if tensor in new:
            store[name] = new[tensor]


def class_name(module: nn.Module) -> str:
    """The name of a module's own class, inside wrappers and without the `FSDP` prefix of FSDP2's class."""
    return own_class(module.get_submodule(way_inside(module))).__name__


def way_inside(module: nn.Module) -> str:
    """The name of the module inside torch's wrappers, relative to the outermost; "" for a module that is no wrapper."""
    for attribute in WRAPPED:
        wrapped = module._modules.get(attribute)
        if wrapped is not None:
            return ".".join(filter(None, (attribute, way_inside(wrapped))))
    return ""


def plain_name(fqn: str, *, adapters: bool = False) -> str:
    """A name of a module or a tensor without the parts that torch's wrappers insert."""
    inserted = (*WRAPPED, *ADAPTED) if adapters else WRAPPED
    return ".".join(part for part in fqn.split(".") if part not in inserted)


def has_forward(module: nn.Module) -> bool:
    """Whether the module can run; containers such as `ModuleList` and plain holders of modules cannot."""
    forward = getattr(type(module), "forward", None)
    return forward is not nn.Module.forward or "forward" in vars(module)


def reads_weight(module: nn.Module, child: nn.Module, name: str) -> bool:
    """Whether a module's code reads the weight of an embedding or convolution below it without calling that.

    Position embeddings of encoders are read like this, and convolutions of linear attention. Judged by the source of
    the module's class; where there is no source, the answer is False.
    """
    if not isinstance(child, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    return reads_child(module, name)


def reads_child(module: nn.Module, name: str) -> bool:
    """Whether a module's code reads the weight of a module below it, of any kind, judged as in `reads_weight`."""
    read = rf"(?<!isinstance\()\bself\.{re.escape(name)}\.weight\b(?!\.(dtype|device|shape|data|requires_grad))"
    code = _code_that_runs(own_class(module))  # type: ignore[arg-type]  # classes have a hash
    return re.search(read, code) is not None


def reads_given_table(module: nn.Module) -> bool:
    """Whether a module's code reads the weight of an embedding that it is given, as Perceiver's head does."""
    code = _code_that_runs(own_class(module))  # type: ignore[arg-type]  # classes have a hash
    return re.search(r"(?<![\w.])embed\w*\.weight\b", code) is not None


def takes_fp32(module: nn.Module) -> bool:
    """Whether a module's code takes hidden states in fp32 next to weights in bf16: a model's own RMS norm, and a block
    that casts for its norm alone (Mamba's and Zaya's, whose residual stream stays in fp32)."""
    cls = own_class(module)
    code = _code_that_runs(cls)  # type: ignore[arg-type]  # classes have a hash
    is_norm = cls.__name__.endswith("RMSNorm") and bool(code)
    return is_norm or re.search(r"\.to\((dtype=)?self\.\w*norm\w*\.weight\.dtype\)", code) is not None


@cache
def _code_that_runs(cls: Hashable) -> str:
    """The source of a class's own methods, without those that make, tie, save or exchange modules; of torch's, none."""
    sources: list[str] = []
    methods = {} if getattr(cls, "__module__", "").startswith("torch.") else vars(cls)
    for name, method in methods.items():
        if inspect.isfunction(method) and not re.match(
            r"__init__|_?(init|tie|set|resize|save)_|get_(input|output)_embeddings", name
        ):
            try:
                sources.append(inspect.getsource(method))
            except (OSError, TypeError):  # a class made in an interpreter has no source
                continue
    return "".join(sources)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before `fully_shard`, which gives it a class that extends (FSDPModule, own class)."""
    cls = type(module)
    return cls.__mro__[cls.__mro__.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else cls


@contextmanager
def replaced(*owners: Any, **values: Any) -> Iterator[None]:
    """Give attributes of objects, classes or Python modules other values for a block."""
    former = [(owner, name, getattr(owner, name)) for owner in owners for name in values]
    try:
        for owner, name, _ in former:
            setattr(owner, name, values[name])
        yield
    finally:
        for owner, name, value in former:
            setattr(owner, name, value)


@contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Give the modules of a model their own classes for a block.

    FSDP2 gives each module of a unit a new class, and transformers treats classes outside its own package as a user's
    code.
    """
    units: dict[nn.Module, type] = {m: type(m) for m in model.modules() if isinstance(m, FSDPModule)}
    try:
        for module in units:
            module.__class__ = own_class(module)
        yield
    finally:
        for module, cls in units.items():
            module.__class__ = cls
