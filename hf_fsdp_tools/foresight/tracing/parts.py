"""Layers and experts that ranks share (`tp_size`, `ep_size`), on tensors without data: this rank's part of each weight,
and what it exchanges, as transformers' styles do it (5.23). Each rank's experts get as many tokens as any other's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.divided_adapters import matrices_divided_with
from hf_fsdp_tools.extensions.tensor_parallel import DISPATCH, bytes_along, checked_rules, part_of_form
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.modeling.notes import Divided, install_style
from hf_fsdp_tools.modeling.packed import Packed, packed_parameters, plain_parameters

_STYLES = {
    "take whole": ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "moe_tp_experts"),
    "give sums": ("rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise", "moe_tp_experts", "all_reduce"),
    "gather": ("colwise_rep", "colwise_gather_output", "embedding_colwise"),
}
"""Styles whose input is whole, so that each rank has a part of its gradient; whose output is a sum over ranks, or is
gathered. The others exchange next to nothing."""


def mark_parts(model: nn.Module, setup: TrainingSetup) -> None:
    """Note on the modules of a model on meta which of them ranks share, and how. A model without a plan, and sizes that
    do not divide, are a `ConfigError`."""
    sizes = {"tp": setup.tp_size, "ep": setup.ep_size}
    rules = checked_rules(model, setup.tp_size, setup.ep_size)
    modules, forms, plain = dict(model.named_modules()), packed_parameters(model), plain_parameters(model)
    for name, rule in rules.items():
        kind, style = rule
        if name in modules:
            if style == "sequence_parallel":
                raise ConfigError(f"{type(model).__name__} is not estimated with tp_size: {name} divides rows.")
            way = partial(_follow, style=style, setup=setup)
            Divided.put(modules[name], style=way, is_dispatched=style == DISPATCH)
            continue
        owner, _, own = name.rpartition(".")
        weight: Any = plain.get(name, modules[owner]._parameters.get(own))
        if (dim := rule.dim(name, weight.dim())) is not None:
            cut = {own: dim} | (bytes_along(forms[name], own, dim, sizes[kind] * rule.runs) if name in forms else {})
            parallel = {each: (along, sizes[kind]) for each, along in cut.items()}
            Divided.put(modules[owner], parallel={**Divided.of(modules[owner]).parallel, **parallel})


def cut_parts(model: nn.Module) -> None:
    """Give a marked model on meta this rank's parts of its parameters, and of LoRA's on divided layers."""
    for wrapper in model.modules():  # as `extensions.tensor_parallel` does it
        if hasattr(wrapper, "parameter_name"):
            _cut_factors(wrapper)
            continue
        for matrix, dim, way in matrices_divided_with(wrapper):
            Divided.put(matrix, parallel={"weight": (dim, way.keywords["setup"].tp_size)})
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, (dim, size) in Divided.of(module).parallel.items():
            note = Packed.of(module)
            if name in note.forms:
                Packed.put(module, parts={**note.parts, name: part_of_form(note.forms[name], dim, size)})
            if (whole := module._parameters.get(name)) is None:
                continue
            if whole not in parts:
                part = torch.empty_like(whole.chunk(size, dim)[0], memory_format=torch.contiguous_format)
                parts[whole] = nn.Parameter(part, requires_grad=whole.requires_grad)
            module._parameters[name] = parts[whole]
            if Divided.of(module).is_dispatched:
                module.num_experts = parts[whole].shape[0]  # type: ignore[assignment]


def ranks_of_parts(model: nn.Module) -> dict[nn.Parameter, int]:
    """How many ranks share each parameter of floats of a cut model."""
    ways = (
        (module, name, size) for module in model.modules() for name, (_, size) in Divided.of(module).parallel.items()
    )
    found = {module._parameters.get(name): size for module, name, size in ways}
    return {part: size for part, size in found.items() if part is not None and part.is_floating_point()}


def _cut_factors(wrapper: Any) -> None:
    """LoRA on fused experts follows them: whole experts have their own, and of a part of each a rank uses a part."""
    dim, size = Divided.of(wrapper.get_base_layer()).parallel.get(wrapper.parameter_name, (0, 1))
    if dim:
        Divided.put(wrapper, style=partial(_use_part_of_factors, dim=dim, size=size))
        return
    wrapper.num_experts //= size
    for matrices, along in ((wrapper.lora_A, 0), (wrapper.lora_B, 1)):
        for matrix in matrices.values():
            Divided.put(matrix, parallel={"weight": (along, size)})


def _use_part_of_factors(wrapper: Any, dim: int, size: int) -> None:
    def factors(adapter: str) -> tuple[Any, Any, float]:
        left, right, scaling = type(wrapper).get_delta_factors(wrapper, adapter)
        left, right = map(_summed_back, (left, right))
        return left.chunk(size, 1)[0] if dim == 1 else left, right.chunk(size, 2)[0] if dim == 2 else right, scaling

    wrapper.get_delta_factors = factors


def follow_parts(model: Any) -> None:
    """Let a copy of a cut model compute as on a rank that has these parts."""
    for module in model.modules():
        install_style(module)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module) and Divided.of(head).style is not None and hasattr(model, "loss_function"):
        # `extensions.tensor_parallel` computes the loss of this rank's words
        inner, loss = head.__dict__.pop("forward").args[0], model.loss_function
        head.forward = lambda hidden: inner(_summed_back(hidden))
        model.loss_function = lambda logits, labels, vocab_size, **more: loss(logits, labels, logits.shape[-1], **more)


def _follow(module: Any, *, style: str, setup: TrainingSetup) -> None:
    if style == DISPATCH:
        module.forward = partial(_dispatched, module.forward, setup=setup)
    elif ways := {way for way, styles in _STYLES.items() if style in styles}:
        size = setup.tp_size

        def exchanging(inner: Callable[..., Any], first: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
            first = first.chunk(size, -1)[0] if style == "rowwise_split_input" else first
            if "take whole" in ways:
                needs = [isinstance(each, torch.Tensor) and each.requires_grad for each in rest]
                first = _summed_back(first)
                rest = tuple(_summed_back(each) if need else each for each, need in zip(rest, needs, strict=True))
            output = inner(first, *rest, **kwargs)
            output = _exchange(output, _all_reduce, torch.Tensor.detach) if "give sums" in ways else output
            there, back = (partial(way, dim=-1, size=size) for way in (_all_gather, _chunk))
            return _exchange(output, there, back) if "gather" in ways else output

        module.forward = partial(exchanging, module.forward)


def _dispatched(inner: Callable[..., Any], hidden: Any, index: Any, weights: Any, *, setup: TrainingSetup) -> Any:
    """Experts of this rank on tokens of all ranks of the group: as `AllReduceEP` where the group is the one that shares
    layers, of as many routes as reach this rank; otherwise as `AllToAllEP`."""
    tp_size = setup.tp_size
    if setup.ep_size == tp_size:
        tokens, chosen = index.shape
        routes = -(-chosen // setup.ep_size)
        rows = max(1, tokens * chosen // (setup.ep_size * routes))
        whole, weights = _summed_back(hidden), _summed_back(weights)
        output = inner(whole[:rows], index[:rows, :routes], weights[:rows, :routes])
        return _exchange(functional.pad(output, (0, 0, 0, tokens - rows)), _all_reduce, torch.Tensor.detach)
    own, whole_again = partial(_chunk, dim=0, size=tp_size), partial(_all_gather, dim=0, size=tp_size)
    if tp_size > 1:
        hidden, index, weights = (_exchange(each, own, whole_again) for each in (hidden, index, weights))
    tokens, routes = index.shape
    order = index.reshape(-1).argsort()
    received = _sent(hidden[order // routes], setup.ep_size)
    output = inner(received, order.new_zeros((tokens * routes, 1)), weights.new_ones((tokens * routes, 1)))
    returned = _sent(output, setup.ep_size)
    sorted_back = torch.empty_like(returned)
    sorted_back[order] = returned
    result = (sorted_back.view(tokens, routes, -1) * weights.unsqueeze(-1)).sum(dim=1)
    return _exchange(result, whole_again, own) if tp_size > 1 else result


def _sent(rows: torch.Tensor, size: int) -> torch.Tensor:
    counts = [rows.shape[0] // size + (rank < rows.shape[0] % size) for rank in range(size)]
    exchanged: torch.Tensor = torch.ops._c10d_functional_autograd.all_to_all_single(rows, counts, counts, "ep")
    return exchanged


class _Exchange(torch.autograd.Function):
    """What ranks exchange of a tensor in the forward pass, and of its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Any, back: Any) -> torch.Tensor:
        ctx.back = back
        made: torch.Tensor = there(tensor)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.back(gradient), None, None


_exchange: Callable[..., Any] = _Exchange.apply


def _summed_back(tensor: torch.Tensor) -> Any:
    """A tensor whose gradient is summed over ranks."""
    return _exchange(tensor, torch.Tensor.detach, _all_reduce)


def _chunk(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return tensor.chunk(size, dim)[0].contiguous()


def _all_reduce(tensor: torch.Tensor) -> Any:
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor.contiguous(), "sum", "tp"))


def _all_gather(tensor: torch.Tensor, dim: int, size: int) -> Any:
    ops: Any = torch.ops._c10d_functional
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(tensor.contiguous(), size, "tp"))
    return gathered if dim == 0 else torch.cat(gathered.chunk(size, 0), dim)
