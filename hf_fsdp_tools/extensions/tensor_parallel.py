"""Tensor and expert parallelism: transformers' own plans, applied to a model before its units are made.

    layers    a group of ranks shares each layer and has the same rows; each rank holds a part of a layer's weights
    experts   a group of ranks shares the experts, each whole on one of them; tokens travel to their experts

Weights become DTensors over such a group, and FSDP2 shards them further: a rank's part is cut twice. What the plans
leave whole is whole on every rank of a group, where its gradients are equal. An expert's gradient holds the tokens of
all ranks of its group, so the mean over ranks is that of all ranks, not of those that share its weights.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_fsdp_tools.distributed.mesh import Axes, rank_on_node
from hf_fsdp_tools.errors import ConfigError, warn
from hf_fsdp_tools.extensions.divided_adapters import divide_adapters, refuse_adapters
from hf_fsdp_tools.extensions.divided_head import DividedHead
from hf_fsdp_tools.extensions.float8 import Float8Layer
from hf_fsdp_tools.modeling.configs import config_of_layer
from hf_fsdp_tools.modeling.meta import copy_on_meta, run_on_meta
from hf_fsdp_tools.modeling.module_tree import ModuleTree, reads_child, replaced, slots
from hf_fsdp_tools.modeling.notes import Divided, install_style
from hf_fsdp_tools.modeling.packed import (
    Packed,
    listed_as_parameters,
    packed_parameters,
    packed_parts,
    plain_parameters,
)
from hf_fsdp_tools.modeling.packed_weight import PackedForm
from hf_fsdp_tools.modeling.tree_copy import is_wrapper
from hf_fsdp_tools.sharding.hf_interface import override_method
from hf_fsdp_tools.sharding.patches import BOXES, replace_in_process
from hf_fsdp_tools.sharding.phases import Hook, Phase, Undo
from hf_fsdp_tools.sharding.placement import placeholder
from hf_fsdp_tools.sharding.sharding import Feature, Sharding
from hf_fsdp_tools.sharding.zero_grads import with_zero_grads
from hf_fsdp_tools.text import did_you_mean, first_line, grouped, listed

try:
    from transformers.distributed.expert_parallel import EPImplementationInterface
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, _AllReduceBackward
except ImportError:  # before transformers 5.21
    ALL_PARALLEL_STYLES = None

DISPATCH = "ep_dispatch_experts"
"""transformers' name of the style that brings tokens to experts."""

_SUMMED = "replicated_with_grad_allreduce"
"""Its name of that of whole weights whose gradients each rank has a part of."""

_OF_GPUS = ("deepgemm", "sonicmoe")
"""How transformers' names of implementations of experts begin that have kernels for GPUs alone."""

_MISFITS = {
    "gemma3n_text": "statistics of the units of an MLP are taken of a part of them",
    "inkling2_text": "gates and values of fused experts are cut as one",
    "inkling2_loop_text": "gates and values of fused experts are cut as one",
    "glm5_next_text": "a projection of its attention gets a part of its input",
}
"""Types whose tensor-parallel plans compute something else or fail, of transformers 5.23 and 5.24 (`tests/census`)."""


class Rule(NamedTuple):
    """How a module or a parameter is divided."""

    axis: str
    """"tp" or "ep"."""
    style: str
    """transformers' name."""

    @property
    def runs(self) -> int:
        """How many runs of indices a rank has: two of a fused weight, of gates and of values."""
        return 1 + self.style.startswith("packed")

    def dim(self, name: str, ndim: int) -> int | None:
        """The dimension of a parameter of this name that is divided, if any."""
        if self.style in ("embedding_rowwise", "grouped_gemm"):
            return 0
        if self.style == "embedding_colwise":
            return 1
        if self.style.startswith("colwise") or self.style == "packed_colwise":
            return max(ndim - 2, 0)
        is_along_rows = self.style.startswith("rowwise") or self.style == "packed_rowwise"
        return ndim - 1 if is_along_rows and ndim > 1 and not name.endswith(".bias") else None


NO_RULE = Rule("", "")


class DividedLayers(Feature):
    """Layers and experts are divided among ranks, by transformers' styles."""

    def divide(self, model: Any, axes: Axes, rules: Mapping[str, Any]) -> None:
        """Each rank keeps its part of the weights."""
        layers, experts = axes.dims.tp_size, axes.dims.ep_size
        styles = checked_rules(model, layers, experts, **rules)
        implementation = getattr(model.config, "_experts_implementation", None) or ""
        if experts > 1 and axes.shards.device_type == "cpu" and implementation.startswith(_OF_GPUS):
            raise ConfigError(
                f"experts_implementation {implementation!r} has no kernels for CPUs. Use 'grouped_mm' or 'batched_mm'."
            )
        if dist.get_rank() == 0 and (processes := rank_on_node()[1]) % layers:
            warn(
                f"tp_size {layers} does not divide the {processes} process(es) of this machine (LOCAL_WORLD_SIZE): the "
                "exchanges of each layer go between machines. Use a divisor, and dp_shard_size for the rest."
            )
        divide = partial(_divide, rules=styles, axes=axes, by=rules["ep_implementation"])
        summed = _seen_in_part(model, divide, layers)
        divide(model)
        for name in summed:
            _add_style(model, name, _SUMMED, axes.groups["tp"], axes.groups["tp"], "")
        replace_in_process(BOXES)
        for module in model.modules():
            held = {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
            if held:
                Divided.put(module, parallel={name: (p.device_mesh, p.placements) for name, p in held.items()})

    def check(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """A mesh with these axes needs a model that was divided."""
        if not _is_divided(model):
            raise ConfigError(
                f"The mesh is {sharding.axes.dims}, and {type(model).__name__} is not divided. Call "
                "parallelize_model(model, mesh) before make_wrap_plan."
            )

    def added(self, model: nn.Module) -> None:
        """LoRA on a divided layer is divided with it."""
        refuse_adapters(model)
        divide_adapters(model)
        for wrapper in model.modules():  # copies that PEFT trains (`modules_to_save`), which ran their originals
            for copy in getattr(wrapper._modules.get("modules_to_save"), "modules", lambda: ())():
                install_style(copy)
        tuner: Any = getattr(model, "base_model", None)
        for name in ("merge_adapter", "merge_and_unload"):
            if hasattr(type(tuner), name):
                override_method(tuner, name, _refuse_merge)

    def hooks(self, model: Any, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook | Undo]:
        """The loss of a divided head is computed of parts of the logits.

        A head that an adapter wraps, and a loss other than that of the next word, take full logits.
        """
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        style = Divided.of(head).style if isinstance(head, nn.Linear) else None
        group = sharding.axes.groups.get("tp")
        if group is None or style is None or style.keywords["style"] != "colwise_gather_output":
            return
        is_usual = LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss) is ForCausalLMLoss
        if is_usual and "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names:
            divided = DividedHead(model, head, group, ALL_PARALLEL_STYLES["colwise"].install_forward)
            yield divided
            yield Hook(model, Phase.LABELS, divided.before)
            yield Hook(model, Phase.WORDS, divided.after)


FEATURE = DividedLayers()


def _refuse_merge(tuner: nn.Module, plain: Any, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "PEFT cannot merge adapters into layers or experts that ranks share (tp_size, ep_size). On every rank, "
        "save_pretrained(model, folder, merge_adapters=True) writes the merged model."
    )


def _divide(model: nn.Module, rules: Mapping[str, Rule], axes: Axes, by: str) -> None:
    """Give each rank its part of the weights that the rules name, and let their modules compute with it."""
    parameters, packed = dict(model.named_parameters(remove_duplicate=False)), packed_parameters(model)
    with _ties_kept(model):
        for name, rule in rules.items():
            kind, style = rule
            group = axes.groups[kind]
            owner, _, own = name.rpartition(".")
            try:
                if name in packed:
                    _divide_bytes(model.get_submodule(owner), own, packed[name], rule, group)
                elif name in parameters:
                    ALL_PARALLEL_STYLES[style].shard_param(model.get_submodule(owner), own, group)
                else:
                    _add_style(model, name, style, group, axes.groups.get("tp"), by)
            except ValueError as error:
                raise ConfigError(
                    f"{kind}_plan gives {name} the style {style!r}, which it cannot have: {first_line(error)}. Use "
                    f"another style, or 'replicate': {kind}_plan={{{generic_name(name)!r}: 'replicate', …}}."
                ) from None


def _divide_bytes(module: Any, name: str, form: PackedForm, rule: Rule, group: DeviceMesh) -> None:
    """Give each rank its part of a weight that is quantised as stored: whole blocks of it, and what belongs to them."""
    if (dim := rule.dim(name, len(form.shape))) is None:
        return
    for part, along in bytes_along(form, name, dim, group.size() * rule.runs).items():
        if rule.style == "grouped_gemm":  # it also counts the experts
            ALL_PARALLEL_STYLES[rule.style].shard_param(module, part, group)
        else:
            place = _StridedShard(along, split_factor=rule.runs) if rule.runs > 1 else Shard(along)
            own = placeholder(module._parameters[part], (group, [place]))
            module._parameters[part] = nn.Parameter(own, requires_grad=False)
    Packed.put(module, parts={**Packed.of(module).parts, name: part_of_form(form, dim, group.size())})
    module._hf_quantized_needs_local_tp = True  # transformers' word for linear layers that take no DTensors


def part_of_form(form: PackedForm, dim: int, size: int) -> PackedForm:
    """The form of one of so many equal parts of a weight along a dimension."""
    return replace(form, shape=tuple(length // size if dim == i else length for i, length in enumerate(form.shape)))


def bytes_along(form: PackedForm, name: str, dim: int, pieces: int) -> dict[str, int]:
    """Along which dimension the bytes of a weight are cut, by their names, where it is cut along `dim`; without what
    every rank needs whole. A cut through a block is a `ConfigError`."""
    last, parts = len(form.shape) - 2, form.parts(name)
    if dim < last:
        return dict.fromkeys(parts, dim)
    if form.flat_block:
        raise ConfigError(
            f"{name} is flattened before bitsandbytes packs it, so ranks cannot share it (tp_size). Leave "
            "quantization_config out, or use FSDP2 alone, or a base stored in FP8, MXFP4 or int4."
        )
    axis = (dim - last) ^ form.is_transposed
    length = form.matrix()[axis]
    blocks = {own: part.block[axis] for own, part in parts.items() if part.block[axis] < length}
    if cut := [block for block in blocks.values() if length // pieces % block]:
        raise ConfigError(
            f"{name} is stored in blocks of {cut[0]}, through which {pieces} parts of its {length} indices would cut. "
            "Use a smaller tp_size, dequantize=True, or FSDP2 alone."
        )
    return dict.fromkeys(blocks, last + axis)


def _is_divided(model: nn.Module) -> bool:
    """Whether layers or experts of a model are divided among ranks."""
    return any(Divided.of(module).parallel for module in model.modules())


def checked_rules(
    model: Any,
    tp_size: int,
    ep_size: int,
    tp_plan: Mapping[str, str] | None = None,
    ep_plan: Mapping[str, str] | None = None,
    ep_implementation: str = "auto",
) -> dict[str, Rule]:
    """The rule of each module and parameter that is divided, by its name; refuse what cannot be. Pure."""
    kinds = {kind: size for kind, size in (("tp", tp_size), ("ep", ep_size)) if size > 1}
    _refuse_undividable(model, " and ".join(f"{kind}_size {size}" for kind, size in kinds.items()))
    rules: dict[str, Rule] = {}
    given, of_bytes = {"tp": tp_plan, "ep": ep_plan}, packed_parts(model)
    for kind, size in kinds.items():
        with listed_as_parameters(model):  # weights that are bytes have the rules of floats
            styles = model._expand_parallel_plan(_plan_of(model, kind, size, given[kind]))
        styles = {name: style for name, style in styles.items() if name not in of_bytes}
        if kind == "ep":  # some plans divide dense layers among the same ranks, which have other rows
            experts = [name for name, style in styles.items() if style == DISPATCH]
            below = tuple(f"{name}." for name in experts)
            styles = {name: style for name, style in styles.items() if name in experts or name.startswith(below)}
            rules = {name: rule for name, rule in rules.items() if name not in experts and not name.startswith(below)}
        rules |= {name: Rule(kind, style) for name, style in styles.items()}
    modules = dict(model.named_modules())
    for name in [name for name, (_, style) in rules.items() if style.startswith("embedding")]:
        if _is_read_whole(modules, name):
            del rules[name]
    _drop_half_tied(model, rules)
    for kind, size in kinds.items():
        if not any(axis == kind for axis, _ in rules.values()) and not (given[kind] == {} and rules):
            raise ConfigError(
                f"The {kind}_plan of {type(model).__name__} names no module that this model has ({kind}_size {size}). "
                f"Leave {kind}_size out, or give rules: {kind}_plan={{…}}."
            )
    kind = getattr(model.config.get_text_config(), "model_type", "")
    if tp_size > 1 and kind in _MISFITS and tp_plan is None:
        raise ConfigError(
            f"The tp_plan of {type(model).__name__} computes something else than one process: {_MISFITS[kind]}. Leave "
            "tp_size out, or give rules: tp_plan={…}."
        )
    if ep_size > 1:
        _check_implementation(ep_implementation, tp_size, ep_size)
        if getattr(model.config, "_experts_implementation", None) == "deepgemm_megamoe":
            raise ConfigError(
                "experts_implementation 'deepgemm_megamoe' has no backward pass. Use 'grouped_mm' to train."
            )
    _check_heads(model, rules, tp_size)
    _check_sizes(model, rules, kinds)
    return rules


def _refuse_undividable(model: Any, what: str) -> None:
    """Refuse a model whose layers cannot be divided any more, or by this transformers."""
    if ALL_PARALLEL_STYLES is None:
        raise ConfigError(f"{what} needs transformers 5.21 or newer, whose plans divide layers by themselves.")
    if any(isinstance(module, FSDPModule) for module in model.modules()) or _is_divided(model):
        raise ConfigError(f"{type(model).__name__} is sharded already. Call parallelize_model before shard_model.")
    if wrapped := [name for name, module in model.named_modules() if is_wrapper(module)]:
        raise ConfigError(
            f"{what}: {type(model).__name__} has adapters already ({listed(wrapped)}), and its layers must be divided "
            "first. Give peft_config to from_pretrained, or make the adapter on a model of from_pretrained."
        )


def _plan_of(model: Any, kind: str, size: int, given: Mapping[str, str] | None) -> dict[str, str]:
    """The model's own rules of one kind, with those that are given laid over them; an empty `tp_plan` gives none."""
    names = {generic_name(name) for name, _ in (*model.named_modules(), *model.named_parameters())}
    names |= {generic_name(name) for name in packed_parameters(model)}
    own = dict(getattr(model, f"{kind}_plan", None) or {})
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"{kind}_plan is {given!r}: it must be a dict of rules, or left out.")
    if absent := [rule for rule in given or () if rule not in names and rule not in own]:
        raise ConfigError(
            f"{kind}_plan names {listed(absent)}, which {type(model).__name__} does not have"
            f"{did_you_mean(absent[0], names | own.keys())}"
        )
    rule_of = {} if given == {} and kind == "tp" else {**own, **(given or {})}
    if not rule_of and given is None:
        raise ConfigError(
            f"{type(model).__name__} has no {kind}_plan for {kind}_size {size}. Leave {kind}_size out, or give rules: "
            f"{kind}_plan={{…}}."
        )
    for rule, style in rule_of.items():
        if style not in ALL_PARALLEL_STYLES:
            raise ConfigError(
                f"{kind}_plan gives {rule!r} the style {style!r}, which transformers lacks"
                f"{did_you_mean(style, list(ALL_PARALLEL_STYLES))}"
            )
    return rule_of


def generic_name(name: str) -> str:
    """A name with `*` for the number of a layer, as plans have it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _check_implementation(name: str, tp_size: int, ep_size: int) -> None:
    known = list(EPImplementationInterface())
    if name not in known:
        raise ConfigError(f"ep_implementation is {name!r}, which transformers lacks{did_you_mean(name, known)}")
    if name == "all_reduce" and tp_size != ep_size:
        raise ConfigError(
            f"ep_implementation 'all_reduce' needs ranks with the same rows: ep_size {ep_size} equal to tp_size "
            f"{tp_size}. Use 'all_to_all'."
        )
    if name == "deepgemm_megamoe":
        raise ConfigError("ep_implementation 'deepgemm_megamoe' has no backward pass. Use 'all_to_all' to train.")


def _check_heads(model: nn.Module, rules: Mapping[str, Rule], size: int) -> None:
    """Refuse attention whose heads the ranks cannot divide."""
    divided = {name.rpartition(".")[0] for name, rule in rules.items() if rule == Rule("tp", "colwise")}
    for name, module in model.named_modules():
        config = config_of_layer(module)
        if name not in divided or config is None or not hasattr(module, "head_dim"):
            continue
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, key, None)
            if isinstance(heads, int) and heads % size:
                raise ConfigError(
                    f"{key} {heads} of {name} cannot be divided by tp_size {size}. Use a divisor of {heads}, or leave "
                    'these layers whole: tp_plan={"' + generic_name(name) + '.q_proj": "replicate", …}.'
                )


def _check_sizes(model: nn.Module, rules: Mapping[str, Rule], kinds: Mapping[str, int]) -> None:
    """Refuse parameters that the ranks cannot divide evenly, of which FSDP2 would shard uneven parts."""
    forms = packed_parameters(model)
    for name, parameter in (*model.named_parameters(remove_duplicate=False), *plain_parameters(model).items()):
        rule = rules.get(name, NO_RULE)
        dim = rule.dim(name, parameter.dim())
        if dim is None or dim >= parameter.dim():
            continue
        size, runs = kinds[rule.axis], rule.runs if parameter.dim() > 1 else 1
        if parameter.shape[dim] % (size * runs):
            cure = f"Use another {rule.axis}_size."
            if rule.style.startswith("embedding") or "gather" in rule.style:
                cure = f"Add rows: from_pretrained(…, pad_to_multiple_of={size})."
            shape = tuple(parameter.shape)
            raise ConfigError(f"{name} of shape {shape} cannot be divided by {rule.axis}_size {size}. {cure}")
        if name in forms:
            bytes_along(forms[name], name, dim, size * runs)


def _is_read_whole(modules: Mapping[str, nn.Module], fqn: str) -> bool:
    """Whether an embedding computes more than sums of rows, with other modules or parameters (Inkling's norm), or a
    module further out than its holder reads its weight (Gemma 4 with images): such a one stays whole."""
    owner = fqn if fqn in modules else fqn.rpartition(".")[0]
    parts = owner.split(".")
    around = ((".".join(parts[:i]), ".".join(parts[i:])) for i in range(len(parts) - 1))
    has_more = len([*modules[owner].modules(), *modules[owner].parameters()]) > 2  # than itself and its weight
    return has_more or any(reads_child(modules[outer], inner) for outer, inner in around)


def _drop_half_tied(model: nn.Module, rules: dict[str, Rule]) -> None:
    """Leave tied parameters whole, with their modules, unless all their modules divide them alike."""
    places = grouped((parameter, name) for name, parameter in model.named_parameters(remove_duplicate=False))
    for parameter, names in places.items():
        of_names = [(name, rules.get(name, NO_RULE)) for name in names]
        if len({(rule.axis, rule.dim(name, parameter.dim())) for name, rule in of_names}) > 1:
            for name in names:
                owner = name.rpartition(".")[0]
                for gone in [each for each in rules if each == owner or each.startswith(f"{owner}.")]:
                    del rules[gone]


@contextmanager
def _ties_kept(model: nn.Module) -> Iterator[None]:
    """Tie again what was tied before the block."""
    places = grouped((each, (store, name)) for store, name, each in slots(model) if isinstance(each, nn.Parameter))
    yield
    for where in places.values():
        first = where[0][0][where[0][1]]
        for store, name in where[1:]:
            store[name] = first


# ---- styles ----


def _add_style(
    model: nn.Module, name: str, style: str, group: DeviceMesh, layers: DeviceMesh | None, implementation: str
) -> None:
    module = model.get_submodule(name)
    if style == "mla_kv_a_proj":
        module.config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    install = partial(_install, style=style, group=group, layers=layers, by=implementation)
    Divided.put(module, style=install, is_dispatched=style == DISPATCH)
    install(module)


def _install(module: nn.Module, *, style: str, group: DeviceMesh, layers: DeviceMesh | None, by: str) -> None:
    if style == DISPATCH:
        ALL_PARALLEL_STYLES[style].install_forward(module, ep_mesh=group, tp_mesh=layers, ep_implementation=by)
    elif style == _SUMMED:
        module.forward = partial(
            with_summed_gradients,
            module.forward,
            module=module,
            summed=lambda weight: _AllReduceBackward.apply(weight, group.get_group()),
        )
    else:
        # layers in FP8 take DTensors, by which torchao finds scales that ranks share; linear ones would not always
        seen: Any = SimpleNamespace(**vars(module), forward=module.forward) if Float8Layer.of(module).config else module
        ALL_PARALLEL_STYLES[style].install_forward(seen, group)
        module.forward = seen.forward
    module.forward = partial(_run, module.forward)
    if style in (DISPATCH, _SUMMED):  # torch's compiler (2.13) follows neither tokens nor parameters that are exchanged
        module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]  # torch's own


def _run(inner: Any, *args: Any, **kwargs: Any) -> Any:
    output = inner(*args, **kwargs)
    is_view = isinstance(output, torch.Tensor) and not isinstance(output, DTensor) and output._is_view()
    # What styles give are views of DTensors, to which nothing may be written (Llama 4 does).
    return with_zero_grads(output) if is_view and output.requires_grad else output


def with_summed_gradients(inner: Any, *args: Any, module: nn.Module, summed: Callable[..., Any], **kwargs: Any) -> Any:
    """Run a module whose whole weights see this rank's heads alone: their gradients are summed over the group.

    transformers (5.23) sums what a parameter has accumulated instead, which is wrong from the second micro-batch on.
    """
    own = dict(module._parameters)
    module._parameters.update({name: summed(parameter) for name, parameter in own.items() if parameter is not None})
    try:
        return inner(*args, **kwargs)
    finally:
        module._parameters.update(own)


# ---- weights that the plans leave whole ----


def _seen_in_part(model: nn.Module, divide: Callable[[nn.Module], None], tp_size: int) -> list[str]:
    """The modules whose whole weights see a part of what they see in one process, and of which no rule speaks: each
    rank would train its own (transformers 5.23: the activation function of Apertus). The model is tried on meta."""
    if tp_size == 1:
        return []
    twin = copy_on_meta(model)
    try:
        whole = _shapes_taken(twin, tp_size)
    except Exception as error:  # values decide what the plain model computes (experts, images)
        if dist.get_rank() == 0:
            warn(
                f"Whether whole weights of {type(model).__name__} see a part alone (tp_size {tp_size}) is not known, "
                f"as it does not run without data ({first_line(error)}). hf-fsdp verify compares it with one process."
            )
        return []
    twin = copy_on_meta(model)
    divide(twin)
    try:
        taken = _shapes_taken(twin, tp_size)
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} does not run with tp_size {tp_size} ({first_line(error)}). Leave tp_size out, or "
            "give rules that fit: tp_plan={…}."
        ) from error
    changed = [name for name, shape in taken.items() if shape != whole.get(name, shape)]
    return [name for name in changed if Divided.of(twin.get_submodule(name)).style is None]


def _shapes_taken(twin: nn.Module, tp_size: int) -> dict[str, torch.Size]:
    """The shapes of what modules with whole weights take, by name."""
    taken: dict[str, torch.Size] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, name: str) -> None:
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        if first is not None:
            taken.setdefault(name, first.shape)

    for name, module in twin.named_modules():
        if any(p is not None and not isinstance(p, DTensor) for p in module._parameters.values()):
            module.register_forward_pre_hook(partial(note, name=name), with_kwargs=True)
    run_divided_on_meta(twin, 4 * tp_size)
    return taken


def run_divided_on_meta(twin: nn.Module, length: int) -> None:
    """Run a copy on meta whose layers and experts are divided, as `run_on_meta` runs one that is not."""
    for module in twin.modules():
        if Divided.of(module).is_dispatched:  # where tokens go depends on values; they come back in the same shape
            module.forward = lambda hidden, *routing: hidden
    with replaced(dist, all_reduce=lambda tensor, *args, **kwargs: None):  # tensors on meta have no values
        run_on_meta(twin, length)
