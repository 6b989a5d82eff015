"""Start Accelerate's shared state with FSDP in it, and make an Accelerator from it."""

import os
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DynamoBackend,
    FP8RecipeKwargs,
    InitProcessGroupKwargs,
    MSAMPRecipeKwargs,
    PrecisionType,
    TERecipeKwargs,
    TorchDynamoPlugin,
)

from hf_fsdp_tools.axes import SHARING, size_names, spread_problem
from hf_fsdp_tools.distributed.cpu_backend import default_timeout, set_timeout
from hf_fsdp_tools.distributed.mesh import (
    ParallelDims,
    dims_of,
    ensure_process_group,
    gpus_are_hidden,
    local_device,
    rank_on_node,
    set_model_parallel_size,
    world_size,
)
from hf_fsdp_tools.errors import ConfigError, MeshError
from hf_fsdp_tools.extensions.float8 import float8_config
from hf_fsdp_tools.integrations.accelerator import ShardedAccelerator, left_to_model
from hf_fsdp_tools.integrations.model import LOW_PRECISION
from hf_fsdp_tools.integrations.plugin import FSDPPlugin
from hf_fsdp_tools.integrations.settings import is_by_launcher, is_set
from hf_fsdp_tools.integrations.training_arguments import agree_with_arguments, group_options, plugin_of, precision_of
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.sharding.sharding import Float8Policy
from hf_fsdp_tools.text import did_you_mean, quoted


def make_accelerator(
    args: Any = None, *, fsdp_plugin: FSDPPlugin | None = None, **accelerate_kwargs: Any
) -> Accelerator:
    """Make an `Accelerator` that runs FSDP2 on GPUs, on one GPU, or on CPUs (gloo), launched or alone.

        accelerator = make_accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
        model = from_pretrained("Qwen/Qwen3-8B", accelerator=accelerator)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)

    `prepare` keeps the units and the optimizer of a model that `from_pretrained` made, and shards any other model by
    the plugin's policy. It takes one or several models, with or without their optimizers.

    Under gradient accumulation, the gradients of each micro-batch are reduced and sharded at once. With a
    `gradient_accumulation_plugin` of your own, `GradientAccumulationPlugin(num_steps=8)`, each rank keeps whole
    gradients (4 bytes per trainable parameter in fp32), and communicates less.

    Args:
        args: the `TrainingArguments` of the Trainer that the model is for: `fsdp_config`, precision,
            `use_cpu`, `parallelism_config` and `ddp_timeout` hold for the model that is loaded with this Accelerator.
        fsdp_plugin: None makes one from the variables that `accelerate launch` sets, and from the arguments.
        accelerate_kwargs: passed to `Accelerator`. `cpu=True` runs on the CPU of a machine with GPUs. `dynamo_backend`
            or `dynamo_plugin` compile the plan's blocks in place. Without `dataloader_config`, loaders that shuffle
            do so by seed and epoch (`use_seedable_sampler`). An `InitProcessGroupKwargs` in `kwargs_handlers` gives
            timeout, backend and init method of the process group that is started here; an `AORecipeKwargs` says
            what `mixed_precision="fp8"` converts, and how.

    Every rank must call; starts the process group if none is running.

    Raises:
        ConfigError: an Accelerator without FSDP exists already in this process, a setting cannot be honoured, or
            `accelerate launch` was given a config for GPUs on a machine without.

    Example:
        >>> accelerator = make_accelerator(cpu=True)
        >>> model = from_pretrained("checkpoint", accelerator=accelerator, load_kwargs={"progress": False})
        >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        >>> tokens = torch.arange(12).reshape(2, 6)
        >>> accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        >>> optimizer.step()
    """
    if not isinstance(fsdp_plugin, FSDPPlugin | None):
        raise ConfigError(
            f"fsdp_plugin is a {type(fsdp_plugin).__name__}; make_accelerator needs a FSDPPlugin, which takes "
            "the same arguments and a policy."
        )
    group = _group_of(accelerate_kwargs.get("kwargs_handlers") or ())
    if args is not None:
        if not hasattr(args, "fsdp_config"):
            raise ConfigError(f"args is {quoted(args)}; make_accelerator takes TrainingArguments, and names the rest.")
        settings = {"mixed_precision": precision_of(args, None), "parallelism_config": args.parallelism_config}
        accelerate_kwargs = settings | {"cpu": args.use_cpu} | accelerate_kwargs
        group = group_options(args) | group
        if fsdp_plugin is not None:
            agree_with_arguments(plugin_of(args), args, None, fsdp_plugin)
    plugin = fsdp_plugin or plugin_of(args)
    known = signature(Accelerator.__init__).parameters.keys() - {"self"}
    for name in accelerate_kwargs.keys() - known:
        raise ConfigError(f"make_accelerator has no argument {name!r}{did_you_mean(name, known)}")
    precision = accelerate_kwargs.get("mixed_precision")
    if precision is not None and str(precision) not in PrecisionType.list():
        words = {dtype: word for word, dtype in LOW_PRECISION.items()} | {torch.float32: "no"}
        precision = words.get(as_dtype(precision, "mixed_precision"), precision)
        accelerate_kwargs["mixed_precision"] = precision
    get = accelerate_kwargs.get
    dynamo = get("dynamo_plugin") or make_dynamo_plugin(get("dynamo_backend"))
    options: dict[str, Any] = {"cpu": bool(get("cpu")), "parallelism_config": get("parallelism_config"), "group": group}
    start_state(plugin, mixed_precision=precision, dynamo_plugin=dynamo, **options)
    # As the Trainer does: the order of shuffled rows follows from seed and epoch, so a resumed run gets the same one.
    accelerate_kwargs.setdefault("dataloader_config", DataLoaderConfiguration(use_seedable_sampler=True))
    accelerator = ShardedAccelerator(fsdp_plugin=plugin, **accelerate_kwargs)
    if accelerator.ao_recipe_handler is not None and accelerator.mixed_precision != "fp8":
        raise ConfigError(
            f"kwargs_handlers have AORecipeKwargs, and mixed_precision is {accelerator.mixed_precision}. Use "
            "mixed_precision='fp8'."
        )
    if "gradient_accumulation_plugin" not in accelerate_kwargs:
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
    return accelerator


def _group_of(handlers: Iterable[Any]) -> dict[str, Any]:
    """What Accelerate's handlers ask of the process group; those of another FP8 than torchao's are refused."""
    group: dict[str, Any] = {}
    for handler in handlers:
        if isinstance(handler, InitProcessGroupKwargs):
            group = group or handler.to_kwargs()
        if isinstance(handler, (TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs)):
            raise ConfigError(
                f"FP8 is torchao's here, and kwargs_handlers have a {type(handler).__name__}. Give AORecipeKwargs(), "
                "or leave it out."
            )
    return group


def start_state(
    plugin: FSDPPlugin,
    *,
    mixed_precision: str | None,
    cpu: bool,
    parallelism_config: Any,
    dynamo_plugin: TorchDynamoPlugin | None = None,
    group: Mapping[str, Any] | None = None,
) -> None:
    """Start Accelerate's shared state with FSDP in it, before an Accelerator is made, which uses the state it finds.

    Accelerate 1.15 runs FSDP on process groups of GPUs and the like only: on CPUs, or in a world of 1, it silently
    drops the plugin. Every rank must call; starts the process group if none is running, with the timeout, backend and
    init method of `group`. Without a `parallelism_config` the launcher's variables are read.
    """
    _check_gpus(cpu=cpu)
    device = torch.device("cpu") if cpu else local_device()
    cpu = device.type == "cpu"
    _check_float8(plugin, mixed_precision, device.type)
    if is_joined := bool(AcceleratorState._shared_state):
        _join_state(plugin, mixed_precision, parallelism_config, dynamo_plugin)
    else:
        _start_ranks(device, group or {})
    if group and "timeout" in group:
        set_timeout(group["timeout"])  # of a group that runs already, too
    if is_joined:
        return
    if parallelism_config is None and is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        parallelism_config = ParallelismConfig()  # fills itself from the variables next to that one
    parallelism_config = parallelism_config or plugin.copies
    dims = _check_axes(parallelism_config, plugin)
    set_model_parallel_size(dims.ranks_per_row)
    if dims.ranks_per_row > 1:
        parallelism_config = left_to_model(parallelism_config, device.type)
    own = {"fsdp_plugin": plugin, "dynamo_plugin": dynamo_plugin or TorchDynamoPlugin(), "_from_accelerator": True}
    state = AcceleratorState(mixed_precision, cpu, parallelism_config=parallelism_config, **own)
    if state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO):
        plugin.set_mixed_precision(state.mixed_precision)
        for shared in (state, PartialState()):
            shared.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = plugin
    for shared in (state, PartialState()):
        # version 1 of FSDP takes cpu:0 for another device; alone, Accelerate knows no index, and takes MPS
        shared.device = device
    _check_state(plugin)


def _join_state(plugin: FSDPPlugin, mixed_precision: Any, parallelism_config: Any, dynamo_plugin: Any) -> None:
    """Bring a plugin into the state that a former Accelerator has started; refuse what no second one can change."""
    state = AcceleratorState()
    if state.distributed_type != DistributedType.FSDP or not isinstance(state.fsdp_plugin, FSDPPlugin):
        raise ConfigError(
            f"An Accelerator of distributed type {state.distributed_type} exists already in this process. "
            "Call make_accelerator() before anything else makes one."
        )
    configs = (parallelism_config, state.parallelism_config)
    every = (*size_names("copy"), "dp_shard_size", *size_names(*SHARING))
    names = [name for name in every if any(hasattr(config, name) for config in configs)]  # Accelerate has some
    wanted, former = ([getattr(config, name, 1) for name in names] for config in configs)
    late = []
    if mixed_precision not in (None, state.mixed_precision):
        late.append(f"mixed_precision is {mixed_precision!r} and was {state.mixed_precision!r}")
    if parallelism_config is not None and wanted != former:
        late.append(f"{', '.join(names)} are {wanted} and were {former}")
    if late:
        raise ConfigError(
            f"An Accelerator exists already in this process, with other settings: {'; '.join(late)}. Give both the "
            "same, or make the first one of the arguments: make_accelerator(arguments)."
        )
    if dynamo_plugin is not None and dynamo_plugin.backend != DynamoBackend.NO:
        state.dynamo_plugin = dynamo_plugin
    if plugin.is_explicit or not state.fsdp_plugin.is_explicit:
        plugin.set_mixed_precision(state.mixed_precision)
        state.fsdp_plugin = plugin


def _start_ranks(device: torch.device, group: Mapping[str, Any]) -> None:
    """Start the process group, if none is running, and Accelerate's state of it."""
    is_alone = PartialState._shared_state and PartialState().distributed_type == DistributedType.NO
    if is_alone and world_size(os.environ) > 1:
        PartialState._reset_state()  # TrainingArguments without use_cpu made it, where each process would train alone
    if "RANK" in os.environ and "LOCAL_RANK" not in os.environ:  # Accelerate reads no srun, no mpirun
        rank, size = rank_on_node()
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    options = {"timeout": default_timeout(device.type), **group}
    ensure_process_group(device.type, **options)  # with gloo next to NCCL, which Accelerate does on some variables only
    PartialState(cpu=device.type == "cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)  # PartialState sets the one of LOCAL_RANK


def make_dynamo_plugin(backend: DynamoBackend | str | None, mode: str | None = None) -> TorchDynamoPlugin:
    """What Accelerate is to know of `torch.compile`; None leaves it to the launcher."""
    known = {name.lower() for name in DynamoBackend.__members__}
    name = backend.value if isinstance(backend, DynamoBackend) else backend
    if name is not None and str(name).lower() not in known:
        raise ConfigError(f"The backend of torch.compile is {name!r}: unknown{did_you_mean(str(name), known)}")
    return TorchDynamoPlugin(backend=backend, mode=mode)


def _check_gpus(*, cpu: bool) -> None:
    """Refuse to train on the CPU where `accelerate launch` was given a config for GPUs: one for the CPU hides them."""
    if cpu or not is_by_launcher() or gpus_are_hidden() or local_device().type != "cpu":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise ConfigError(
        f"The config of `accelerate launch` is for GPUs, and torch {torch.__version__} finds none on this machine "
        f"(CUDA_VISIBLE_DEVICES {'is not set' if visible is None else f'is {visible}'}). Look at nvidia-smi and the "
        "driver; or train on the CPU: launch with a file of `hf-fsdp init --cpu`, or pass cpu=True to "
        "make_accelerator, use_cpu=True to TrainingArguments."
    )


def _check_float8(plugin: FSDPPlugin, mixed_precision: str | None, device_type: str) -> None:
    """Refuse FP8 that this device, or this machine without torchao, does not have; Accelerate would take fp16."""
    precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if str(precision).lower() != "fp8":
        return
    plugin.set_mixed_precision("fp8")
    policy = plugin.mixed_precision_policy
    if not isinstance(policy, Float8Policy):
        raise ConfigError(
            "mixed_precision is 'fp8', and the plugin has a mixed_precision_policy of its own. Leave one of them out, "
            "or give a Float8Policy."
        )
    float8_config(policy, device_type)
    plugin.cpu_ram_efficient_loading = False  # next to which Accelerate refuses FP8; plain models are sent all the same


def _check_state(plugin: FSDPPlugin) -> None:
    """Refuse a version of Accelerate that does not use the filled state, and would train without FSDP."""
    state = AcceleratorState()
    outcome = (state.distributed_type, getattr(state, "fsdp_plugin", None), state.num_processes)
    if outcome != (DistributedType.FSDP, plugin, dist.get_world_size()):
        raise ConfigError(
            f"Accelerate {accelerate.__version__} did not take up FSDP: distributed type {outcome[0]}, {outcome[2]} "
            f"process(es) of {dist.get_world_size()}. hf_fsdp_tools knows Accelerate 1.15; install it, or report "
            "this version."
        )


def _check_axes(config: Any, plugin: FSDPPlugin) -> ParallelDims:
    """Refuse DeepSpeed's sequence parallelism, and sizes that do not make the processes of this job; return them."""
    if config is not None and getattr(config, "sp_size", 1) > 1:
        raise ConfigError(
            f"sp_size={config.sp_size}: only dp_replicate_size, dp_shard_size, cp_size and tp_size can be above 1 "
            "here. Leave sp_size out of the parallelism config; cp_size exchanges heads as it does."
        )
    try:
        dims = ParallelDims(ep_size=plugin.ep_size) if config is None else dims_of(config, plugin.ep_size)
        shared = [name for name in size_names(*SHARING) if getattr(dims, name) > 1]
        if shared or dims.dp_replicate_size > 1 < dist.get_world_size():
            dims = dims.resolve(dist.get_world_size())
    except MeshError as error:
        raise ConfigError(f"{error} Or leave the parallelism config out: one copy over all processes.") from None
    if plugin.sequence_parallel and (problem := spread_problem(dims)):
        raise ConfigError(f"{problem}.")
    if shared and plugin.fsdp_version == 1:
        raise ConfigError(f"{shared[0]} above 1 needs FSDP2; the plugin has fsdp_version 1. Leave one of them out.")
    if dims.dp_replicate_size > 1 and dims.dp_shard_size == 1 < dist.get_world_size() and not shared:
        raise ConfigError(
            f"dp_replicate_size {dims.dp_replicate_size} and dp_shard_size 1 shard nothing: each process would hold a "
            "whole model. Use a larger dp_shard_size, or plain Accelerate (DistributedDataParallel) with a model that "
            "fits."
        )
    return dims
