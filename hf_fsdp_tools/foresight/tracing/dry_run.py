"""One micro-batch of a model on tensors without data, recorded: the model's own code, without FSDP, whose places are
imitated by its own means, so that memory lives as long: hooks on modules and outputs, a function on inputs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_map_only
from transformers import masking_utils

from hf_fsdp_tools.axes import AXES
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError
from hf_fsdp_tools.extensions.context_parallel import check_rows, follow_rows
from hf_fsdp_tools.extensions.muon.matrices import sizes_of_matrices
from hf_fsdp_tools.extensions.sequence_parallel import Tokens, hooks_of_tokens
from hf_fsdp_tools.foresight.events import Event, Gradient, Parameter, Trace, Work
from hf_fsdp_tools.foresight.setup import DTYPES, TrainingSetup
from hf_fsdp_tools.foresight.tracing.delta_rule import as_kernels
from hf_fsdp_tools.foresight.tracing.images import Images, NoImagesError, Values, batch_of, give_memory, images_of
from hf_fsdp_tools.foresight.tracing.kernels import AsOnCuda, chunk_loss, notes_of, tensors_in
from hf_fsdp_tools.foresight.tracing.parts import follow_parts, ranks_of_parts
from hf_fsdp_tools.foresight.tracing.recorder import Recorder
from hf_fsdp_tools.foresight.tracing.repeats import Stack, configs_of, cut_plan, expand, repeating_stacks, short_copy
from hf_fsdp_tools.modeling.configs import beyond_positions, max_positions
from hf_fsdp_tools.modeling.module_tree import ModuleTree, replaced
from hf_fsdp_tools.modeling.packed import floats_held
from hf_fsdp_tools.modeling.tree_copy import base_of
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.planning.stacks import find_blocks
from hf_fsdp_tools.sharding.hooks import hooks_of_experts
from hf_fsdp_tools.sharding.phases import Hook, Phase, install
from hf_fsdp_tools.sharding.precision import CastWeights, dtypes_of, hooks_of_dtypes, hooks_of_weights
from hf_fsdp_tools.sharding.recompute import Link, check_checkpointing, checkpoint_activations
from hf_fsdp_tools.text import first_line, grouped, show_count

_KEPT = 4
"""Periods of blocks that are run: one at each end, whose neighbours are other modules, and two to compare between them.
One more where the blocks share what the encoder made: gradients of it add up from the last but one on."""
Device = Literal["cuda", "cpu"]  # Whose kernels are assumed: what they save for the backward pass, and their scratch


def trace_model(model: nn.Module, plan: WrapPlan, setup: TrainingSetup, *, device: Device = "cuda") -> Trace:
    """The events of one micro-batch of a model on meta, found by running the model's code without data; text alone
    where images cannot be followed. A model that needs values of weights or activations is a `ConfigError`."""
    if setup.activation_checkpointing:
        check_checkpointing(model, setup.recompute)
    if setup.cp_size > 1:
        check_rows(base_of(model), setup.cp_size)
    run = partial(_followed, model, plan, setup, device)
    try:
        if (images := images_of(model, setup)) is not None:
            return run(images, f"Images in each sequence: {images.count}, of {images.tokens:,} tokens each.")
    except (NoImagesError, _CannotFollowError) as error:
        return run(None, f"Of text alone, without images, which take memory too: {str(error).rstrip('.')}.")
    return run(None)


class _CannotFollowError(ConfigError):
    """The model's code needs values, or a kernel without a rule for shapes."""


def _followed(
    model: nn.Module, plan: WrapPlan, setup: TrainingSetup, device: Device, images: Images | None, *said: str
) -> Trace:
    """The trace by a dry run, of few blocks where they stand for all. Those of a vision tower are all run: some choose
    hidden states of images by the number of the block."""
    find: Any = getattr(model, "get_encoder", None)
    tower = None if images is None or find is None else find(modality="image")
    shares = images is not None or getattr(model.config, "is_encoder_decoder", False)
    stacks = repeating_stacks(model, _KEPT + shares, setup.activation_checkpointing_every_n_layers, tower)
    events = expand(_dry_run(model, plan, setup, device, stacks, images), stacks) if stacks else None
    if events is None:
        stacks, events = [], _dry_run(model, plan, setup, device, [], images)
    parameters, notes = tuple(_parameters(model, plan, setup)), [*said, *notes_of(model)]
    config = getattr(model, "config", None)
    if config is not None and setup.max_length > (limit := max_positions(config) or setup.max_length):
        notes.append(f"The configuration {beyond_positions(limit)}")
    reached = {event.parameter for event in events if isinstance(event, Gradient)}
    if missed := [each for each in parameters if each.requires_grad and each.fqn not in reached]:
        count, first = sum(each.numel for each in missed), ".".join(missed[0].fqn.split(".")[:-1][:2])
        notes.append(f"{show_count(count)} parameters get no gradient from the batch, among them those of {first!r}.")
    return Trace(
        events=tuple(events),
        parameters=parameters,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        model_flops=sum(event.model_flops for event in events if isinstance(event, Work)),
        tokens=setup.per_device_train_batch_size * setup.max_length // setup.dims.ranks_per_row,
        repeated=sum(stack.left_out for stack in stacks),
        notes=tuple(notes),
    )


def _dry_run(
    model: nn.Module, plan: WrapPlan, setup: TrainingSetup, device: Device, stacks: list[Stack], images: Images | None
) -> list[Event]:
    """The events of a micro-batch of a model without the blocks that the stacks leave out."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        twin = short_copy(model, stacks)
        plan = cut_plan(plan, stacks)
        give_memory(twin, {each.fqn: each.dtype for each in _parameters(twin, plan, setup)})
        units = {name: unit.modules[0] for unit in plan.units for name in unit.modules}
        degrees = {axis.name: getattr(setup, axis.size) for axis in AXES}
        recorder = Recorder(units, on_cuda=device == "cuda", compiled=setup.compile, sizes=degrees)
        recorder.of_gradients = "gradients" if setup.is_plain else "whole gradients"
        recorder.ignore([*twin.parameters(), *twin.buffers()])
        _prepare(twin, plan, setup, recorder)
        with ExitStack() as stack:
            stack.enter_context(Values())  # type: ignore[no-untyped-call]  # torch's own
            batch = batch_of(twin, setup, images)
            for tensor in batch.values():
                recorder.take(tensor, "inputs")
            # transformers would make a mask for fake tensors; the temporary memory is that of a real run
            find: Any = masking_utils.find_packed_sequence_indices
            unpacked = partial(lambda find, ids: (find(ids), None)[1], find)
            stack.enter_context(replaced(masking_utils, find_packed_sequence_indices=unpacked))
            if setup.attn_implementation == "flash_attention_2":  # no mask is made, also not for windows
                masks: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
                stack.callback(masks.__setitem__, "sdpa", masks["sdpa"])
                masks["sdpa"] = lambda *_, **__: None
            if device == "cuda":
                for context in (AsOnCuda(), *as_kernels(twin)):
                    stack.enter_context(context)
            for context in (recorder.chunks_once(), recorder, _failures_named(twin, recorder, is_all=images is None)):
                stack.enter_context(context)
            loss = twin(**batch)["loss"]  # the logits are dropped before the backward pass, as by a Trainer
            recorder.phase = "backward"
            # by autograd's engine itself: `loss.backward()` suspends modes that see functions
            engine: Any = torch.autograd.Variable._execution_engine
            gradient = torch.ones_like(loss, memory_format=torch.preserve_format)
            engine.run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
            del gradient, loss
        recorder.close()
    return recorder.events


def _parameters(model: nn.Module, plan: WrapPlan, setup: TrainingSetup) -> Iterator[Parameter]:
    """Yield every parameter, tied ones once."""
    names = grouped((parameter, name) for name, parameter in model.named_parameters(remove_duplicate=False))
    held, matrices, shared = floats_held(model), sizes_of_matrices(model), ranks_of_parts(model)
    for parameter, (name, *other_names) in names.items():
        dtype = parameter.dtype
        if dtype.is_floating_point:
            dtype = DTYPES[setup.master_dtype if name in plan.replicated else setup.mixed_precision]
            dtype = setup.dtype_in_memory(is_trained=parameter.requires_grad) if setup.is_plain else dtype
        yield Parameter(
            fqn=name,
            other_names=tuple(other_names),
            shape=tuple(parameter.shape),
            dtype=dtype,
            requires_grad=parameter.requires_grad,
            is_whole=setup.is_plain or name in plan.replicated,
            matrices=matrices.get(name),
            num_floats=held[parameter][0] * shared.get(parameter, 1) if parameter in held else None,
        )


def _prepare(model: nn.Module, plan: WrapPlan, setup: TrainingSetup, recorder: Recorder) -> None:
    """Bring a copied model into the state in which it is trained, with marks at the plan's modules."""
    model.train()
    for config in configs_of(model):  # a copy's own
        if hasattr(config, "use_cache"):
            config.use_cache = False
    follow_parts(model)
    if setup.activation_checkpointing:
        copy_input: Any = recorder.copy_input
        link: Any = SimpleNamespace(
            keep=lambda source: (copy_input("device_to_host", source.nbytes), None),
            fetch=lambda host, to: copy_input("host_to_device", to.nbytes),
            wait=lambda mark: None,  # the copy was asked for a block before
        )
        # on CPUs, copies are memory and work like all else
        checkpoint_activations(model, setup.recompute, link_of=lambda _: link if recorder.on_cuda else Link(None))
    modules = dict(model.named_modules(remove_duplicate=False))
    grouped_names = {name for unit in plan.units for name in unit.modules if len(unit.modules) > 1}
    blocks = (block.fqn for stack in find_blocks(ModuleTree(model)) for block in stack)
    for name in dict.fromkeys([*(name for unit in plan.units for name in unit.modules), *blocks]):
        _mark(modules[name], name, recorder, is_grouped=name in grouped_names)
    whole = {parameter for name, parameter in model.named_parameters() if name in plan.replicated}
    units = {modules[name]: None for name in sorted(name for unit in plan.units for name in unit.modules)}
    hooks: list[Any] = []
    if setup.mixed_precision != "fp32":
        if setup.is_plain:
            hooks += casts_of_weights(model, units, setup)
        hooks += hooks_of_dtypes(dtypes_of(model, DTYPES[setup.mixed_precision], units=units, replicated=whole))
    hooks += hooks_of_experts(ModuleTree(model))
    if setup.loss == "chunked":
        chunk_loss(model, recorder)
    if setup.cp_size > 1:
        hooks += follow_rows(base_of(model), setup.cp_size, setup.tp_size if setup.sequence_parallel else 1)
    if setup.sequence_parallel:
        hooks += hooks_of_tokens(base_of(model), Tokens(0, setup.tp_size), whole_layers=setup.compile)
    install(model, hooks)
    if (head := getattr(model, "get_output_embeddings", lambda: None)()) is not None:  # where logits are made …
        head.register_forward_pre_hook(lambda *_: setattr(recorder, "in_loss", True))
        head.register_forward_hook(partial(_until_gradient, lambda _: setattr(recorder, "in_loss", False)))  # … and end
    for name, module in model.named_modules():  # so that memory has a name
        module.register_forward_pre_hook(partial(recorder.enter, name), prepend=True)
        # also where checkpointing has computed all that it needs
        module.register_forward_hook(recorder.leave, always_call=True)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hook = partial(recorder.keep_gradient, name)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's own


def casts_of_weights(model: nn.Module, units: Iterable[nn.Module], setup: TrainingSetup) -> Iterator[Hook]:
    """Yield the hooks that cast the weights of a plain model; without FSDP, autocast's cache keeps all in a pass."""
    dtype = DTYPES[setup.mixed_precision]
    if setup.wrapping == "none":
        all_weights = [(module, name) for module in model.modules() for name in module._parameters]
        yield Hook(model, Phase.CONTEXT, CastWeights(all_weights, dtype).in_pass)
    yield from hooks_of_weights(model, units, dtype)


def _mark(module: nn.Module, name: str, recorder: Recorder, *, is_grouped: bool) -> None:
    """Tell the recorder of the passes of one of the plan's modules, as FSDP2 would learn of them."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder.begin(name)
        inputs = _needing_gradients((args, kwargs)) if torch.is_grad_enabled() else []
        if not inputs:
            return args, kwargs
        watched = iter(_AfterBackward.apply(recorder, name, *inputs))  # type: ignore[no-untyped-call]
        return tree_map_only(torch.Tensor, lambda one: next(watched) if one.requires_grad else one, (args, kwargs))

    def after(_: nn.Module, args: object, output: Any) -> None:
        recorder.end(name)
        if torch.is_grad_enabled():
            _until_gradient(lambda _: recorder.begin_backward(name), module, None, output)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after, always_call=is_grouped)


class _AfterBackward(torch.autograd.Function):
    """The identity, which marks the end of a module's backward pass: FSDP2's `RegisterPostBackwardFunction`."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, name: str, *inputs: torch.Tensor) -> Any:
        ctx.recorder, ctx.name = recorder, name
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.recorder.end_backward(ctx.name)
        return (None, None, *grads)


def _until_gradient(call: Callable[[torch.Tensor], None], _: nn.Module, __: object, output: Any) -> None:
    """Call where the gradient of a module's output is complete."""
    for tensor in _needing_gradients(output):
        tensor.register_hook(call)  # type: ignore[no-untyped-call]


def _needing_gradients(value: Any) -> list[torch.Tensor]:
    return [each for each in tensors_in(value) if each.requires_grad]


@contextmanager
def _failures_named(model: nn.Module, recorder: Recorder, *, is_all: bool) -> Iterator[None]:
    """Turn an exception of the model's code into one that names the module and the operation."""
    try:
        yield
    except FSDPToolsError:
        raise
    except Exception as error:
        names = {module: name for name, module in model.named_modules()}
        frames = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
        inside = [names[each] for each in frames if isinstance(each, nn.Module) and each in names]
        where = f"{type(model).__name__}, module {inside[-1] or 'root'!r}" if inside else type(model).__name__
        place = f"{where}: {type(error).__name__} after {recorder.last_operation}: {first_line(error)}"
        # torch raises the first two where code needs values of tensors, and the last for lack of a rule.
        unfollowed = (DataDependentOutputException, DynamicOutputShapeException, RuntimeError, ImportError)
        if isinstance(error, unfollowed) or not is_all:
            raise _CannotFollowError(f"A step cannot be estimated without data: {place}") from error
        raise ConfigError(f"A step of training fails in {place}. Correct configuration or arguments.") from error
