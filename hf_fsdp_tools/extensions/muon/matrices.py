"""Which parameters of a model are hidden matrices, that Muon steps, and why the others are not."""

from dataclasses import dataclass

from torch import nn

from hf_fsdp_tools.modeling.module_tree import ADAPTED, ModuleNode, ModuleTree, Weight
from hf_fsdp_tools.modeling.roles import is_adapter, is_end, is_linear, is_named_expert, routers
from hf_fsdp_tools.modeling.tree_copy import base_of
from hf_fsdp_tools.planning.stacks import find_blocks
from hf_fsdp_tools.text import listed, merge_alike, show_count, table


@dataclass(frozen=True, kw_only=True)
class MatrixPlan:
    """Which trained parameters of a model are hidden matrices; the same on every rank."""

    matrices: tuple[str, ...]
    """Names of the parameters that are matrices of blocks, or stacks of them (experts), in the model's order."""
    others: tuple[tuple[str, str], ...]
    """(name, reason) of every other trained parameter; AdamW steps it."""
    numels: tuple[int, int]
    """Elements of the matrices, and of the others."""

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        if self.matrices:
            rows.append(("Muon", "matrices of blocks", listed(merge_alike(self.matrices), 12)))
        reasons = dict.fromkeys(reason for _, reason in self.others)
        for reason in reasons:
            names = merge_alike([name for name, why in self.others if why == reason])
            rows.append(("AdamW", reason, listed(names, 4)))
        matrices, others = map(show_count, self.numels)
        return "\n".join([f"Muon {matrices} elements, AdamW {others}", *table(rows, indent="  ")])


def find_matrices(model: nn.Module) -> MatrixPlan:
    """The trained parameters of a model that are hidden matrices, from its module tree alone.

    A hidden matrix is the weight of a linear layer (`nn.Linear` and its kind, transformers' `Conv1D`) inside a block
    (`detect_blocks`), or a stack of such weights in a module of experts. All else goes to AdamW: embeddings, heads and
    projections outside blocks, also where a tie makes them a weight of a block; routers; adapters, whose factors are no
    layers of their own; norms, biases and other vectors; convolutions; tables that no linear layer multiplies.

    Names are those of `named_parameters` of the base of a PEFT model. Any module, on any device, also sharded. Any rank
    may call; nothing is communicated.
    """
    tree = ModuleTree(base_of(model))
    blocks = dict.fromkeys(block for stack in find_blocks(tree) for block in stack if not is_end(block))
    within = {node: block for block in blocks for node in block.walk()}
    of_routers = {weight for block in blocks for weight in routers(block)}
    matrices: list[Weight] = []
    others: list[tuple[Weight, str]] = []
    for weight in tree.weights:
        if not weight.requires_grad:
            continue
        reason = _reason(weight, within, of_routers)
        if reason:
            others.append((weight, reason))
        else:
            matrices.append(weight)
    return MatrixPlan(
        matrices=tuple(weight.names[0] for weight in matrices),
        others=tuple((weight.names[0], reason) for weight, reason in others),
        numels=(sum(weight.numel for weight in matrices), sum(weight.numel for weight, _ in others)),
    )


def _reason(weight: Weight, within: dict[ModuleNode, ModuleNode], of_routers: set[Weight]) -> str:
    """Why a weight is no hidden matrix; empty where it is one."""
    if weight.ndim < 2:
        return "vectors and scalars"
    if any(is_adapter(owner, wrapped=(*ADAPTED, "modules_to_save")) for owner in weight.owners):
        return "adapters"
    if any(isinstance(owner.module, nn.Embedding | nn.EmbeddingBag) for owner in weight.owners):
        return "embeddings"
    if any(owner not in within for owner in weight.owners):
        return "outside blocks"
    if weight in of_routers:
        return "routers"
    if any(isinstance(owner.module, nn.modules.conv._ConvNd) for owner in weight.owners):
        return "convolutions"
    if not weight.dtype.is_floating_point:
        return "no floats"
    if min(weight.shape[-2:]) < 2:
        return "vectors and scalars"
    owner = weight.owners[0]
    if weight.ndim == 2 and weight.names[0].endswith(".weight") and is_linear(owner.module):
        return ""
    if weight.ndim == 3 and any(map(is_named_expert, (owner, *(each for each in owner.ancestors() if each in within)))):
        return ""
    return "tables, no weights of linear layers"


# ---- what a step of Muon costs ----

BUCKET_BYTES = 64 * 2**20
"""Bytes of matrices that a rank gets in one exchange, or one larger matrix. (assumed)"""

NEWTON_SCHULZ_STEPS = 5
"""Steps of the iteration that torch.optim.Muon makes if nothing else is said."""


def newton_schulz_flops(rows: int, columns: int, steps: int = NEWTON_SCHULZ_STEPS) -> int:
    """Floating-point operations of orthogonalising a matrix: in each step its Gram matrix (of the shorter side), the
    square of that, and their product with the matrix."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


def sizes_of_matrices(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """(number, rows, columns) of the matrices that each parameter of matrices is made of, by its name.

    For forecasts, which know no checkpoint: of experts, gate and up are taken apart by their name. `Muon` itself takes
    apart what the conversions of transformers put together.
    """
    found: dict[str, tuple[int, int, int]] = {}
    for name in find_matrices(model).matrices:
        parameter = model.get_parameter(name)
        module = model.get_submodule(name.rpartition(".")[0])
        rows, columns = parameter.shape[-2:]
        count = parameter.numel() // (rows * columns)
        down = getattr(module, "down_proj", None) if name.endswith("gate_up_proj") and parameter.ndim == 3 else None
        is_fused = down is not None and 2 * down.shape[-1] == rows and not getattr(module, "is_transposed", False)
        found[name] = (2 * count, rows // 2, columns) if is_fused else (count, rows, columns)
    return found
