"""An Accelerator that prepares, saves and resumes sharded models; and its loss scaling for fp16."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import GradScalerKwargs, recursively_apply
from accelerate.utils.constants import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME
from accelerate.utils.other import load
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_fsdp_tools.axes import shared_rows
from hf_fsdp_tools.background import wait_for_saves
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, going_first, rank_and_size, wait_for_all_ranks
from hf_fsdp_tools.distributed.mesh import ranks_per_row
from hf_fsdp_tools.errors import CheckpointError, ConfigError, library_errors
from hf_fsdp_tools.extensions.fsdp1.wrap import cast_where_computed
from hf_fsdp_tools.integrations.accelerator_state import (
    STATE_GLOBS,
    check_state,
    fetch_state,
    load_models,
    load_optimizer,
    numbered_states,
    owner_of,
    write_state,
)
from hf_fsdp_tools.integrations.hooks import check_hooks
from hf_fsdp_tools.integrations.model import (
    check_managed,
    check_precision,
    hand_over,
    prepare_for_training,
    refuse_parts,
    refuse_sharded_elsewhere,
    refuse_under_version1,
    shard_in_place,
)
from hf_fsdp_tools.integrations.resume import files_of, using_format
from hf_fsdp_tools.integrations.settings import is_set, warn_on_node
from hf_fsdp_tools.integrations.states import remove_checkpoint, saving_state
from hf_fsdp_tools.integrations.streams import keep_exact, restore_positions, share_seed, skip_once
from hf_fsdp_tools.integrations.version1 import saveable
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.saving.hidden_folder import Folder
from hf_fsdp_tools.saving.save import save_pretrained
from hf_fsdp_tools.saving.states import former_of, remove_leftovers
from hf_fsdp_tools.saving.target import Target
from hf_fsdp_tools.saving.targets import target_of
from hf_fsdp_tools.sharding.added import shard_added
from hf_fsdp_tools.sharding.checks import check_optimizers
from hf_fsdp_tools.sharding.replicated import by_kind, clip_norm, clip_values, step_kinds_apart
from hf_fsdp_tools.sharding.shard import keep_after_backward
from hf_fsdp_tools.sharding.sharding import sharded_module, sharding_of
from hf_fsdp_tools.stores import as_url, local_folder, pinned


class ShardedAccelerator(Accelerator):  # type: ignore[misc]  # accelerate is not typed
    """An Accelerator whose `prepare` leaves sharded models and their optimizers alone; it has no state of its own.

    Accelerate's `prepare` re-links optimizers by the address of each local shard, which is 0 for all empty ones.
    """

    _keeps_gathered = False
    """Whether units that are kept after forward stay gathered after backward too: another micro-batch follows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make an Accelerator in the state that `start_state` has started, with our scaler where it needs one."""
        check_hooks(ShardedAccelerator, Accelerator)
        check_hooks(ShardedScaler, torch.amp.GradScaler)
        if kwargs.get("fsdp_plugin") is None and is_set("ACCELERATE_USE_FSDP"):  # or Accelerate makes another
            kwargs["fsdp_plugin"] = AcceleratorState().fsdp_plugin
        super().__init__(*args, **kwargs)
        if type(self.scaler) is torch.amp.GradScaler:  # version 1 of FSDP has another
            self.scaler = ShardedScaler(self.device.type, **(self.scaler_handler or GradScalerKwargs()).to_kwargs())
        if ranks_per_row() > 1:
            if self.dataloader_config.dispatch_batches:
                raise ConfigError(
                    f"dispatch_batches=True gives ranks that need the same rows ({shared_rows(', ')}) different ones, "
                    "or all ranks the same. Leave it out: each rank then reads its own rows."
                )
            self.dataloader_config.dispatch_batches = False  # Accelerate's default for streams is True

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Prepare as `Accelerator.prepare` does; FSDP2 also takes models without an optimizer, and several models.

        Every rank must call. Plain models are sharded; see `shard_in_place`.
        """
        if not self.is_fsdp2:
            return super().prepare(*objects, device_placement=device_placement)
        if device_placement is not None:
            raise ConfigError(
                "device_placement cannot be chosen under FSDP: shards live where the mesh is. Leave it out."
            )
        optimizers = [obj for obj in objects if isinstance(obj, torch.optim.Optimizer)]
        for model in (obj for obj in objects if isinstance(obj, nn.Module)):
            _take_up_model(self, model, optimizers)
        check_optimizers(optimizers, self._models)
        if optimizers:
            step_kinds_apart()  # where ranks share layers or experts, their shards are of several meshes
        ways: dict[type, Callable[..., Any]] = {
            torch.utils.data.DataLoader: self.prepare_data_loader,
            torch.optim.Optimizer: partial(self.prepare_optimizer, device_placement=False),
            torch.optim.lr_scheduler.LRScheduler: self.prepare_scheduler,  # last: it looks for prepared optimizers
        }
        prepared = list(objects)
        for kind, prepare in ways.items():
            prepared = [prepare(obj) if isinstance(obj, kind) else obj for obj in prepared]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepare as `Accelerator.prepare_model` does; FSDP2 also shards models for evaluation (reward models)."""
        if not self.is_fsdp2:
            refuse_under_version1(model)
            prepared = super().prepare_model(model, device_placement, evaluation_mode)
            if isinstance(prepared, FullyShardedDataParallel):
                cast_where_computed(prepared)
            return prepared
        _take_up_model(self, model, [])
        return model

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Refuse ranks with different numbers of batches, which torch's `Join` lets DDP have."""
        if self.is_fsdp2:
            raise ConfigError(
                "join_uneven_inputs is for DDP: under FSDP2 every rank takes part in each pass. Let the loader make "
                "batches even (even_batches=True, the default; drop_last=True), or end at the shortest rank's."
            )
        return super().join_uneven_inputs(joinables, even_batches)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare as `Accelerator.prepare_data_loader` does; with `use_stateful_dataloader`, `save_state` keeps the
        position of each rank, that of a stream also where rank 0 reads for all. Shuffled rows have one order for all
        ranks, by rank 0's seed; every rank must call."""
        return share_seed(keep_exact(super().prepare_data_loader(data_loader, *args, **kwargs)))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Go backward as `Accelerator.backward` does; no unit of a model with `reshard_after_forward=False` is freed
        before the last micro-batch of a step (`sync_gradients`), so that each is gathered once in a step."""
        if self.is_fsdp2 and self._keeps_gathered != (not self.sync_gradients):
            self._keeps_gathered = not self.sync_gradients
            for model in self._models:
                keep_after_backward(model, self._keeps_gathered)
        super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip as `Accelerator.clip_grad_norm_` does; return the norm of the whole model's gradients as a plain tensor.

        Every rank must call, whether its own shards have gradients or not.
        """
        if not self.is_fsdp2:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return clip_norm(tensors, max_norm, norm_type, self.device)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip as `torch.nn.utils.clip_grad_value_` does, each shard by its own rank; nothing is communicated."""
        if not self.is_fsdp2:
            super().clip_grad_value_(parameters, clip_value)
            return
        self.unscale_gradients()
        clip_values([parameters] if isinstance(parameters, torch.Tensor) else parameters, clip_value)

    # ---- saving and resuming ----

    def save_state(
        self,
        output_dir: str | PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        checksums: bool = False,
        blocking: bool = True,
        **options: Any,
    ) -> Any:
        """Save as `Accelerator.save_state` does; an interrupted save leaves an older state in the folder as it was.

        Models and optimizers may come in any number and order. A `PeftModel` (FSDP2) is saved as its adapter, with its
        config; with the base where it is not what its files hold (PiSSA, OLoRA, LoftQ, …, merged adapters). The state
        is complete with its manifest, which is written last. Every rank must call.

        To a name in a store (`s3://…`), which must hold no state, each rank writes its part to the system's place for
        temporary files and puts it from there; with `blocking=False`, in the background.
        """
        naming, plugin = self.project_configuration, self.state.fsdp_plugin
        if automatic := naming.automatic_checkpoint_naming:
            parent = local_folder(self.project_dir or "", "automatic_checkpoint_naming names folders,")
            target: Target = Folder(parent / "checkpoints" / f"checkpoint_{self.save_iteration}")
            if Path(target.where).exists():
                raise ConfigError(
                    f"save_state: {target.where!r} exists. Set ProjectConfiguration(iteration=…) to go on after it."
                )
        elif output_dir is None:
            raise ConfigError("save_state: give output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True).")
        else:
            target = target_of(output_dir)
        folder = target.folder if isinstance(target, Folder) else None
        if (folder is None or not blocking) and "SHARDED" not in str(plugin.state_dict_type):
            what, cure = ("with blocking=False", "leave blocking out") if folder else ("to a store", "save to a folder")
            raise ConfigError(
                f"save_state {what} writes each rank's shards, and the state dict type is {plugin.state_dict_type}. "
                f"Set SHARDED_STATE_DICT, or {cure}."
            )

        def delete_old() -> None:
            if automatic and folder is not None and rank_and_size()[0] == 0:
                remove_leftovers(folder.parent, "checkpoint_*")
                for old in numbered_states(folder.parent)[: -naming.total_limit] if naming.total_limit else []:
                    remove_checkpoint(old)

        place = target if folder is None else Folder(folder.resolve())
        saving = saving_state(place, STATE_GLOBS, blocking=blocking, checksums=checksums)
        with saving as state, using_format(plugin, state.staging):
            write_state(self, state)
            state.after = delete_old
        naming.iteration += 1
        return output_dir if folder is None else folder

    @pinned()
    def load_state(
        self,
        input_dir: str | PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        allow_incomplete: bool = False,
        **options: Any,
    ) -> None:
        """Load as `Accelerator.load_state` does, from the stored state dict type and on any number of ranks.

        From a store (`s3://…`), each rank reads of models and optimizers the bytes of its shards. Every rank must call.
        """
        wait_for_saves()
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = next(reversed(numbered_states(Path(self.project_dir, "checkpoints"))), None)
        with agreed("opening the saved state", input_dir or ""):
            url = as_url(input_dir or "")
            folder = fetch_state(self, url) if url else local_folder(input_dir or "", "load_state").expanduser()
            if input_dir is None or not folder.is_dir():
                former = former_of(folder.resolve())
                cure = "Give another"
                if former.is_dir():
                    cure = f"Rename {str(former)!r}, where a save that was cut off left it"
                raise CheckpointError(f"load_state: there is no folder {str(folder)!r}. {cure}.")
        absent = check_state(self, folder, allow_incomplete=allow_incomplete)
        pairs = [(optimizer, owner_of(optimizer, self._models)) for optimizer in self._optimizers]
        with using_format(self.state.fsdp_plugin, folder):
            load_models(self, folder)
            for i, (optimizer, model) in enumerate(pairs):
                if files_of(OPTIMIZER_NAME, i)[0] not in absent:
                    load_optimizer(self, optimizer, model, folder, i)
            scaler = None if SCALER_NAME in absent else self.scaler
            # all but models, optimizers and schedulers, which Accelerate would pair by their numbers
            alone = replaced(self, _models=[], _optimizers=[], _schedulers=[], scaler=scaler)
            fact = f"{folder}: an object does not take what was saved"
            cure = "Make and register the objects as in the run that saved."
            with agreed("restoring the run's objects", folder), alone, library_errors(fact, cure):
                super().load_state(str(folder), load_kwargs, **options)
        restore_positions(self, folder)
        with agreed("reading the schedulers", folder):
            for i, scheduler in enumerate(self._schedulers):
                if (name := files_of(SCHEDULER_NAME, i)[1]) not in absent:
                    scheduler.load_state_dict(load(folder / name, **(load_kwargs or {})))
        # ranks without a file of their own would accumulate out of step
        self.step = all_ranks(self.step, "loading the state")[0]

    def end_training(self) -> None:
        """End as `Accelerator.end_training` does, once no save is under way in the background; raises its error."""
        wait_for_saves()
        super().end_training()

    def wait_for_everyone(self) -> None:
        """Wait as `Accelerator.wait_for_everyone` does, for every rank, without a collective: a lost rank is named, and
        Accelerate's barrier on the device of LOCAL_RANK fails where each process sees one device of its own."""
        wait_for_all_ranks()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run a block on rank 0 before the others, as `Accelerator.main_process_first` does. See `going_first`."""
        return going_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run a block on the first rank of each machine before the others. See `going_first`."""
        return going_first(self.is_local_main_process)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip as `Accelerator.skip_first_batches` does, in the running epoch alone, with a loader whose start draws no
        random number, so that draws (dropout) go on from the state that `load_state` restored."""
        return skip_once(super().skip_first_batches(dataloader, num_batches), dataloader)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare as `Accelerator.prepare_scheduler` does; it steps once for each group of ranks with the same rows."""
        prepared = super().prepare_scheduler(scheduler)
        if ranks_per_row() > 1 and not prepared.split_batches:
            self._schedulers[-1] = prepared = RowsScheduler(
                prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, split_batches=True
            )
        return prepared

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as `Accelerator.gather_for_metrics` does, shared rows once. Every rank must call."""
        if (shared := ranks_per_row()) == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        try:
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:  # which is Accelerate's own answer for objects
            use_gather_object = True
        if use_gather_object:
            return super().gather_for_metrics([] if self.process_index % shared else input_data, use_gather_object=True)
        state = self.gradient_state
        rest = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def first_of_each(gathered: torch.Tensor) -> torch.Tensor:
            return torch.cat(gathered.chunk(self.num_processes)[::shared])[:rest]

        return recursively_apply(first_of_each, self.gather(input_data))

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Gather as `Accelerator.get_state_dict` does, whole on rank 0; every rank must call.

        Tied weights are one tensor under each name, as in `model.state_dict()`: what saves them then writes it once.
        """
        all_ranks(None, "gathering the state dict")
        state, first = super().get_state_dict(model, unwrap), dict[nn.Parameter, str]()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = state[first.setdefault(parameter, name)]
        return state

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save as `Accelerator.save` does; shards are refused, of which it would write rank 0's alone."""
        refuse_parts(obj, f)
        super().save(obj, f, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        *,
        blocking: bool = True,
        **options: Any,
    ) -> None:
        """Write a sharded model as a Hugging Face folder, by `save_pretrained`. Every rank must call."""
        if not options.pop("safe_serialization", True) or options:
            raise ConfigError("save_model: sharded models are written as safetensors. Leave out safe_serialization.")
        save_pretrained(saveable(model), save_directory, max_shard_size=max_shard_size, blocking=blocking)


def _take_up_model(accelerator: Accelerator, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    if any(model is known for known in accelerator._models):
        return
    sharded = sharding_of(model) is not None
    with agreed(f"preparing {type(model).__name__}"):
        refuse_sharded_elsewhere(model)
    if len(ranks := set(all_ranks(sharded, "preparing the model"))) > 1:
        raise ConfigError(
            f"{type(model).__name__} is sharded on some ranks and plain on others. Make it the same way on every rank."
        )
    if ranks == {False}:
        shard_in_place(model, accelerator, optimizers)
    else:
        changed = shard_added(model)  # heads that a script added, and adapters that TRL has cast
        for optimizer in optimizers:
            hand_over(optimizer, changed)
    with agreed(f"preparing {type(model).__name__}"):
        check_managed(model)
        check_precision(model, accelerator)
        prepare_for_training(model, accelerator)
    root: Any = sharded_module(model)
    if isinstance(root, FSDPModule) and getattr(accelerator.ddp_handler, "find_unused_parameters", False):
        if hasattr(root, "set_reduce_scatter_unused_params"):  # heads that each rank chooses
            root.set_reduce_scatter_unused_params(True)
        else:
            fact = f"find_unused_parameters is not seen to before torch 2.13 (this is {torch.__version__})"
            warn_on_node(f"{fact}: where ranks use different parameters, gradients go wrong or the ranks wait.")
    accelerator._models.append(model)
    for prepared in (model, root or model):  # the base, of a PEFT model
        prepared._is_accelerate_prepared = True  # Accelerate's own mark


class RowsScheduler(AcceleratedScheduler):  # type: ignore[misc]  # accelerate is not typed
    """Accelerate's scheduler where ranks have the same rows: a loader gives fewer batches, one for each such group."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step for each group of ranks with rows of its own, where Accelerate steps for each rank."""
        is_whole = self.gradient_state.sync_gradients and self.step_with_optimizer
        for _ in range(AcceleratorState().num_processes // ranks_per_row() if is_whole else 1):
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", math.inf):
                super().step(*args, **kwargs)


class ShardedScaler(torch.amp.GradScaler):
    """torch's `GradScaler` for optimizers of sharded and whole parameters, on the mesh's device or offloaded.

    torch (2.13) divides all gradients of a device in one call, which cannot mix the two kinds. Here each kind has a
    call of its own. Where any gradient is infinite on one rank, every rank skips the step: torch compares gradients of
    shards between ranks, and gradients of whole parameters are averages, equal on all ranks.
    """

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Make the scale as `GradScaler` does, once: Accelerate's `load_state` asks for it after training too."""
        if self._growth_tracker is None:
            super()._lazy_init_scale_growth_tracker(dev)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step as `GradScaler.step` does; fused optimizers too are not called where a gradient is infinite: they would
        look themselves, Accelerate would see no skipped step, and offloaded parameters would be stepped too early."""
        looks_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # torch's own
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._step_supports_amp_scaling = looks_itself  # type: ignore[attr-defined]

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        by_device: dict[torch.device, torch.Tensor] = {}
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for kind in by_kind(held):
            part: Any = SimpleNamespace(param_groups=[{"params": kind}])
            here = kind[0].device
            # torch itself copies to the device of the gradients without waiting; to the CPU, one has to wait.
            ours = super()._unscale_grads_(part, inv_scale.to(here), found_inf.to(here, copy=True), allow_fp16)
            for device, infinite in ours.items():
                by_device[device] = torch.maximum(by_device[device], infinite) if device in by_device else infinite
        return by_device


class _DoneByModel(ParallelismConfig):  # type: ignore[misc]  # accelerate is not typed
    """A config whose sizes of shared rows the sharded model carries out: Accelerate, the Trainer and TRL leave rows
    whole, where they would cut them and drop their masks (accelerate#4177, trl#6843), and look for no plan."""

    cp_enabled = property(lambda self: False)
    tp_enabled = property(lambda self: False)

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Nothing: `start_state` has compared the sizes with the processes."""


def left_to_model(config: ParallelismConfig, device_type: str) -> ParallelismConfig:
    """A config by which Accelerate leaves what ranks share to the sharded model. Every rank must call."""
    config.get_device_mesh(device_type)  # with all axes, by which loaders find the ranks with the same rows
    own: ParallelismConfig = object.__new__(_DoneByModel)
    own.__dict__.update(vars(config))
    return own
