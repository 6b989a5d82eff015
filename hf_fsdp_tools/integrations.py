"""Accelerate and the HF Trainer: the only file that imports accelerate, and the only one that reads its variables.

    make_accelerator()   an `Accelerator` that runs FSDP2 on GPUs, on one GPU, and on CPUs
    HybridFSDPPlugin     Accelerate's FSDP plugin with our wrap policy and our precision
    FSDPTrainerMixin     `class MyTrainer(FSDPTrainerMixin, Trainer)`

Accelerate is left as it is: no function of it is replaced. Three things are done around it, each in a function below:
its state is told that FSDP runs on CPUs too (`_start_state`), `prepare` passes sharded models through untouched
(`_Accelerator.prepare`), and what `accelerate launch` put into variables is translated into our policy (`_policy_of`).
"""

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.checkpoint import save_pretrained
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.fsdp1_policy import hybrid_auto_wrap_policy
from hf_fsdp_tools.mesh import ParallelDims, ensure_process_group, local_device
from hf_fsdp_tools.shard import shard_model, sharding_of
from hf_fsdp_tools.wrap import HybridPolicy, make_wrap_plan

__all__ = ["FSDPTrainerMixin", "HybridFSDPPlugin", "make_accelerator"]

_LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class HybridFSDPPlugin(FullyShardedDataParallelPlugin):  # type: ignore[misc]  # accelerate is not typed
    """Accelerate's FSDP plugin with a `HybridPolicy`, for FSDP2 and FSDP1.

    What differs from the plugin that it extends: version 2 is the default; the units are those of `policy`, on every
    model and for both versions (`TRANSFORMER_BASED_WRAP` with class names and `SIZE_BASED_WRAP` with a size are
    translated into it); mixed precision reduces gradients in fp32 and leaves outputs and buffers as they are
    (Accelerate's own reduces in low precision and rounds them); CPU offload works where there is no device to pin for;
    RAM-efficient loading is off, because `from_pretrained` reads shards and never a whole model.

    FSDP1 (`fsdp_version=1`, deprecated in PyTorch) shards plain models in `prepare`; `from_pretrained` is for FSDP2.

    Raises:
        ConfigError: a setting that torch cannot honour here, or would honour wrongly without a word.
    """

    policy: HybridPolicy | None = field(default=None, metadata={"help": "What becomes a unit."})
    """What becomes a unit; None: what the other fields and variables ask for, else `HybridPolicy()`."""

    def __post_init__(self) -> None:
        self.fsdp_version = int(self.fsdp_version or os.environ.get("FSDP_VERSION", "2"))
        if self.fsdp_version == 2 and self.reshard_after_forward is None:
            self.reshard_after_forward = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true")
        if self.cpu_ram_efficient_loading or _is_set("FSDP_CPU_RAM_EFFICIENT_LOADING"):
            warnings.warn(
                "cpu_ram_efficient_loading is off: from_pretrained reads each rank's shards and needs no full copy on rank 0.",
                stacklevel=3,
            )
        self.cpu_ram_efficient_loading = False
        on_cpu = local_device().type == "cpu"
        if self.fsdp_version == 1 and on_cpu and self.sync_module_states is None:
            self.sync_module_states = False  # torch can broadcast weights between accelerators only
        if self.fsdp_version == 1 and on_cpu and "FSDP_STATE_DICT_TYPE" not in os.environ:
            self.state_dict_type = self.state_dict_type or "SHARDED_STATE_DICT"  # the other one crashes on CPUs
        super().__post_init__()
        self.policy = self.policy or _policy_of(self)
        self.auto_wrap_policy = None  # ours decides, when it sees the model
        if self.fsdp_version == 1:
            _check_fsdp1(self, on_cpu=on_cpu)
        elif isinstance(self.cpu_offload, CPUOffloadPolicy) and on_cpu:
            self.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs an accelerator

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Accelerate calls this with the model that it is about to wrap with FSDP1; FSDP2 models are sharded by then."""
        if self.fsdp_version == 1:
            policy = hybrid_auto_wrap_policy(model, policy=self.policy)
            if policy.ignored:
                raise ConfigError(
                    f"FSDP1 cannot shard {', '.join(policy.ignored)}, and Accelerate cannot leave single parameters out. "
                    "Use fsdp_version 2, or wrap_fsdp1(model, plan) in place of prepare."
                )
            self.auto_wrap_policy = policy  # type: ignore[assignment]  # the field takes any callable

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Compute in `mixed_precision`, reduce gradients in fp32, cast neither outputs nor buffers."""
        if self.mixed_precision_policy is not None and not override:
            return
        dtype = _LOW_PRECISION.get(mixed_precision) if isinstance(mixed_precision, str) else mixed_precision
        kind = MixedPrecisionPolicy if self.fsdp_version == 2 else MixedPrecision
        self.mixed_precision_policy = kind(param_dtype=dtype, reduce_dtype=dtype and torch.float32)


def make_accelerator(*, fsdp_plugin: HybridFSDPPlugin | None = None, **accelerate_kwargs: Any) -> Accelerator:
    """Make an `Accelerator` that runs FSDP2: on GPUs, on one GPU, and on CPUs (gloo), launched or alone.

        accelerator = make_accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
        model = from_pretrained("Qwen/Qwen3-8B", accelerator=accelerator)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)

    Its `prepare` keeps the units and the optimizer of a model that `from_pretrained` made, and shards any other model by
    the plugin's policy. It takes models with or without their optimizer, several of them too.

    Args:
        fsdp_plugin: None makes one from the variables that `accelerate launch` sets.
        accelerate_kwargs: passed to `Accelerator`. `cpu=True` runs on the CPU of a machine with GPUs.

    Every rank must call; starts the process group.

    Raises:
        ConfigError: an Accelerator without FSDP exists already in this process, or a setting cannot be honoured.
    """
    plugin = fsdp_plugin or HybridFSDPPlugin()
    if not isinstance(plugin, HybridFSDPPlugin):
        raise ConfigError(
            f"fsdp_plugin is a {type(plugin).__name__}; make_accelerator needs a HybridFSDPPlugin, which takes the same "
            "arguments and a policy."
        )
    _start_state(
        plugin,
        mixed_precision=accelerate_kwargs.get("mixed_precision"),
        cpu=bool(accelerate_kwargs.get("cpu")),
        parallelism_config=accelerate_kwargs.get("parallelism_config"),
    )
    return _Accelerator(fsdp_plugin=plugin, **accelerate_kwargs)


class FSDPTrainerMixin:
    """Puts our sharding, precision and saving under a `Trainer` or a subclass of it.

        class MyTrainer(FSDPTrainerMixin, Trainer): ...

        accelerator = make_accelerator()
        trainer = MyTrainer(model=from_pretrained(name, accelerator=accelerator), args=TrainingArguments(...), ...)
        trainer.train()
        trainer.save_model()

    The model may also be plain, equal on every rank: it is sharded by the same policy when training starts. Settings come
    from `TrainingArguments(fsdp=True, fsdp_config=…)` where given, else from `accelerate launch`. `save_model` writes a
    normal Hugging Face checkpoint from all ranks at once, whatever the state dict type; no rank gathers the model.
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Called by `Trainer.__init__`. Starts FSDP before the Trainer makes its own Accelerator, which then finds it."""
        args = self.args  # type: ignore[attr-defined]  # the Trainer's
        plugin = HybridFSDPPlugin(**(args.fsdp_plugin_args or {}))
        _start_state(
            plugin,
            mixed_precision=args.mixed_precision,
            cpu=args.use_cpu,
            parallelism_config=args.parallelism_config,
        )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # the Trainer's
        self.accelerator = _adopt(self.accelerator)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write model, tokenizer and training arguments as a normal Hugging Face folder. Every rank must call."""
        if not self.accelerator.is_fsdp2:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]  # the Trainer's; gathers on rank 0
            return
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)  # type: ignore[attr-defined]
        save_pretrained(self.model, folder, tokenizer=self.processing_class)  # type: ignore[attr-defined]
        if self.args.should_save:  # type: ignore[attr-defined]
            torch.save(self.args, folder / "training_args.bin")  # type: ignore[attr-defined]
        if self.args.push_to_hub and not _internal_call:  # type: ignore[attr-defined]
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]


class _Accelerator(Accelerator):  # type: ignore[misc]  # accelerate is not typed
    """An Accelerator without state of its own whose `prepare` leaves sharded models and their optimizers alone.

    Accelerate's `prepare` re-links optimizers by the address of each local shard. Empty shards (fewer rows than ranks)
    all have address 0, so their parameters collapse into one. A model that is sharded before needs no re-linking.
    """

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """As `Accelerator.prepare`; under FSDP2 models may come without an optimizer, and several at once."""
        if not self.is_fsdp2:
            return super().prepare(*objects, device_placement=device_placement)
        if device_placement is not None:
            raise ConfigError(
                "device_placement cannot be chosen under FSDP: shards live where the mesh is. Leave it out."
            )
        optimizers = [obj for obj in objects if isinstance(obj, torch.optim.Optimizer)]
        for model in (obj for obj in objects if isinstance(obj, nn.Module)):
            self._take_model(model, optimizers)
        schedulers = torch.optim.lr_scheduler.LRScheduler
        _check_optimizers(optimizers, self._models)
        first = [obj if isinstance(obj, schedulers) else self._prepare_object(obj) for obj in objects]
        prepared = [self._prepare_object(obj) if isinstance(obj, schedulers) else obj for obj in first]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare_object(self, obj: Any) -> Any:
        if isinstance(obj, torch.utils.data.DataLoader):
            return self.prepare_data_loader(obj)
        if isinstance(obj, torch.optim.Optimizer):
            return self.prepare_optimizer(obj, device_placement=False)
        if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
            return self.prepare_scheduler(obj)
        return obj

    def _take_model(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        if any(model is known for known in self._models):
            return
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            _shard_in_place(model, self, optimizers)
        _check_managed(model)
        _check_precision(model, self.mixed_precision)
        self._models.append(model)
        model._is_accelerate_prepared = True  # type: ignore[assignment]  # Accelerate's own mark


def _adopt(accelerator: Accelerator) -> Accelerator:
    """Give an Accelerator that someone else made our `prepare`, in place. `_Accelerator` adds no state, so this is whole."""
    accelerator.__class__ = _Accelerator
    return accelerator


def _start_state(plugin: HybridFSDPPlugin, *, mixed_precision: str | None, cpu: bool, parallelism_config: Any) -> None:
    """Bring Accelerate's shared state up with FSDP in it, before an Accelerator is made.

    Accelerate 1.15 promotes only GPU-like process groups to FSDP: on CPUs, or in a world of 1, it drops the plugin without
    a word, and with `use_cpu` under `accelerate launch` each process trains alone. Its state is one dictionary shared by all
    its instances, and an Accelerator takes it as it finds it, so it is enough to fill it first.
    """
    cpu = cpu or local_device().type == "cpu"
    if AcceleratorState._shared_state:
        state = AcceleratorState()
        if state.distributed_type != DistributedType.FSDP or not isinstance(state.fsdp_plugin, HybridFSDPPlugin):
            raise ConfigError(
                f"An Accelerator of distributed type {state.distributed_type} exists already in this process. "
                "Call make_accelerator() before anything else makes one."
            )
        return
    if PartialState._shared_state and PartialState().distributed_type == DistributedType.NO and _launched():
        PartialState._reset_state()  # TrainingArguments without use_cpu made it, where each process would train alone
    PartialState(cpu=cpu)
    if PartialState().distributed_type == DistributedType.NO:
        ensure_process_group("cpu" if cpu else local_device().type)
    if parallelism_config is None and _is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        parallelism_config = ParallelismConfig()  # fills itself from the variables beside that one
    state = AcceleratorState(
        mixed_precision=mixed_precision,
        cpu=cpu,
        dynamo_plugin=TorchDynamoPlugin(),
        fsdp_plugin=plugin,
        parallelism_config=parallelism_config,
        _from_accelerator=True,
    )
    if state.distributed_type in (DistributedType.MULTI_CPU, DistributedType.NO):
        plugin.set_mixed_precision(state.mixed_precision)
        for shared in (state, PartialState()):
            shared.distributed_type = DistributedType.FSDP
            if cpu:
                shared.device = torch.device("cpu")  # FSDP1 takes cpu:0 for another device
        state.fsdp_plugin = plugin
    _check_state(plugin)
    _check_axes(state.parallelism_config)


def _check_axes(config: Any) -> None:
    """Tensor, context and sequence parallelism change the model or its batches before it is sharded; we do neither yet."""
    asked = [name for name in ("tp_size", "cp_size", "sp_size") if config is not None and getattr(config, name, 1) > 1]
    if asked:
        raise ConfigError(
            f"{', '.join(f'{name}={getattr(config, name)}' for name in asked)}: only dp_replicate_size and dp_shard_size can be "
            "above 1 here. Leave the others out of the parallelism config."
        )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")


def _launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _check_state(plugin: HybridFSDPPlugin) -> None:
    """Stop where an Accelerate that keeps its state otherwise would train without FSDP."""
    state = AcceleratorState()
    found = (state.distributed_type, getattr(state, "fsdp_plugin", None), state.num_processes)
    if found != (DistributedType.FSDP, plugin, dist.get_world_size()):
        raise ConfigError(
            f"Accelerate {accelerate.__version__} did not take up FSDP: distributed type {found[0]}, {found[2]} process(es) of "
            f"{dist.get_world_size()}. hf_fsdp_tools knows Accelerate 1.15; install it, or report this version."
        )


def _check_fsdp1(plugin: FullyShardedDataParallelPlugin, *, on_cpu: bool) -> None:
    """Refuse what FSDP1 does wrongly without a word, or dies of. Sources: pytorch issue 154888; the rest measured."""
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    problems = []
    if getattr(strategy, "name", "").upper().startswith(("HYBRID", "_HYBRID")) and (on_cpu or _is_alone_on_node()):
        problems.append(
            f"sharding strategy {strategy.name} with one device per node stops averaging gradients. Use FULL_SHARD, or FSDP2 "
            "with dp_replicate_size"
        )
    if on_cpu and "FULL" in str(plugin.state_dict_type):
        problems.append("state_dict_type FULL_STATE_DICT crashes the process on CPUs. Use SHARDED_STATE_DICT, or FSDP2")
    if on_cpu and plugin.sync_module_states:
        problems.append(
            "sync_module_states needs accelerators. Set it to False: every rank has the same weights already"
        )
    if on_cpu and getattr(plugin.cpu_offload, "offload_params", False):
        problems.append("CPU offload needs an accelerator to offload from. Set it to False")
    if problems:
        raise ConfigError("FSDP1: " + "; ".join(problems) + ".")


def _is_alone_on_node() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 == int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _policy_of(plugin: FullyShardedDataParallelPlugin) -> HybridPolicy:
    """What Accelerate's own fields and variables ask for, as a HybridPolicy."""
    settings: dict[str, Any] = {}
    wrap = getattr(plugin.auto_wrap_policy, "__name__", None)
    if wrap == "transformer_auto_wrap_policy" and plugin.transformer_cls_names_to_wrap:
        settings["block_types"] = tuple(name.strip() for name in plugin.transformer_cls_names_to_wrap)
    elif wrap == "size_based_auto_wrap_policy" and plugin.min_num_params:
        settings["min_unit_params"] = plugin.min_num_params
    elif plugin.auto_wrap_policy is not None and wrap not in (
        "transformer_auto_wrap_policy",
        "size_based_auto_wrap_policy",
    ):
        raise ConfigError(
            f"auto_wrap_policy is {plugin.auto_wrap_policy!r}, which this plugin would not use. Give a HybridPolicy as "
            "`policy`: it takes classes, class names, patterns, sizes and predicates."
        )
    if plugin.reshard_after_forward is False:
        settings["reshard_after_forward"] = {"*": False}
    return HybridPolicy(**settings)


def _shard_in_place(model: nn.Module, accelerator: Accelerator, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Shard a plain model, equal on every rank, and hand its new parameters to the optimizers that hold the old ones."""
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise ConfigError(
            f"{len(on_meta)} parameters of {type(model).__name__} are on meta (first: {on_meta[0]}): it was never loaded. "
            "Load it with from_pretrained(..., accelerator=accelerator), or call load_weights after shard_model."
        )
    plugin = accelerator.state.fsdp_plugin
    if accelerator.mixed_precision in _LOW_PRECISION:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()  # master weights, as Accelerate keeps them
    names = {parameter: name for name, parameter in model.named_parameters()}
    config = accelerator.parallelism_config
    shard_model(
        model,
        make_wrap_plan(model, policy=plugin.policy),
        mesh=(
            accelerator.torch_device_mesh[tuple(config.fsdp_dim_names)]
            if config is not None
            else ParallelDims().build_mesh(accelerator.device.type)
        ),
        mp_policy=plugin.mixed_precision_policy,
        offload_policy=plugin.cpu_offload,
        activation_checkpointing=plugin.activation_checkpointing,
    )
    sharded = dict(model.named_parameters())
    for optimizer in optimizers:
        if optimizer.state and any(parameter in names for parameter in optimizer.state):
            raise ConfigError(
                f"{type(optimizer).__name__} has state for the model's whole parameters, which sharding replaces. "
                "Make the optimizer after the model is sharded: from_pretrained first, or prepare(model) first."
            )
        for group in optimizer.param_groups:
            group["params"] = [sharded[names[p]] if p in names else p for p in group["params"]]


def _check_optimizers(optimizers: Iterable[torch.optim.Optimizer], models: Iterable[nn.Module]) -> None:
    """An optimizer of other tensors than the models' parameters would step without any effect."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(parameter) not in known for parameter in held)
        if strange:
            raise ConfigError(
                f"{strange} of the {len(held)} parameters of {type(optimizer).__name__} belong to no prepared model: it was made "
                "before the model was sharded, or between a forward and its backward pass. Make it from "
                "model.parameters() right before prepare(model, optimizer)."
            )


def _check_managed(model: nn.Module) -> None:
    """A trainable parameter outside FSDP's care would be trained by each rank for itself, without a word."""
    sharding = sharding_of(model)
    if sharding is None:
        return  # sharded by someone else, who answers for it
    averaged = {id(p) for p in model.parameters() if p._post_accumulate_grad_hooks}
    alone = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and not isinstance(p, DTensor) and id(p) not in averaged
    ]
    if alone:
        raise ConfigError(
            f"{len(alone)} trainable parameter(s) are not sharded and their gradients would not be averaged: "
            f"{', '.join(alone[:4])}{', …' if len(alone) > 4 else ''}. They were added after sharding. Add adapters or heads to "
            "the plain model, and let prepare() shard the whole."
        )


def _check_precision(model: nn.Module, mixed_precision: str) -> None:
    """A model sharded without a precision policy would compute in fp32 however the Accelerator is set."""
    sharding = sharding_of(model)
    wanted = _LOW_PRECISION.get(mixed_precision)
    if sharding is None or wanted is None or sharding.mp_policy.param_dtype == wanted:
        return
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if sharding.mp_policy.param_dtype is None and dtypes == {wanted}:
        return  # pure low precision, on purpose
    raise ConfigError(
        f"The Accelerator computes in {mixed_precision}, but the model was sharded to compute in "
        f"{sharding.mp_policy.param_dtype or 'the dtype of its weights'}. Pass accelerator= (or the same mp_policy) to "
        "from_pretrained, made with the same mixed_precision as the Trainer's arguments."
    )
