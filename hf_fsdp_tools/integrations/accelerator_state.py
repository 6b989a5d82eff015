"""The state of an Accelerator, as `save_state` writes and `load_state` reads it."""

from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from accelerate.checkpointing import save_accelerator_state, save_custom_state
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME, RNG_STATE_NAME, SCALER_NAME, SCHEDULER_NAME
from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from accelerate.utils.other import TORCH_SAFE_GLOBALS
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.errors import CheckpointError, ConfigError, library_errors, storage_errors
from hf_fsdp_tools.integrations.resume import awaiting_state, beginning, check_parts, files_of, using_format
from hf_fsdp_tools.integrations.states import StateSave
from hf_fsdp_tools.integrations.streams import LOADERS, write_positions
from hf_fsdp_tools.integrations.version1 import is_version1
from hf_fsdp_tools.loading.formats.dcp import METADATA, check_dcp
from hf_fsdp_tools.modeling.module_tree import own_class, plain_name
from hf_fsdp_tools.modeling.pickles import load_pickled
from hf_fsdp_tools.modeling.tree_copy import base_of, is_adapted
from hf_fsdp_tools.saving.durable import UNCHANGED, sync
from hf_fsdp_tools.saving.save_adapter import adapter_tensors, gather_tensors, own_tensors
from hf_fsdp_tools.sharding.adapters import ADAPTER_CONFIG
from hf_fsdp_tools.sharding.injection import changes_base
from hf_fsdp_tools.sharding.shard import warn_of_drift
from hf_fsdp_tools.stores import fetch_whole, stub_of
from hf_fsdp_tools.text import listed, quoted

STATE_GLOBS = (
    *(f"{name}{end}" for name in (FSDP_MODEL_NAME, OPTIMIZER_NAME) for end in ("[_.]*", "_*/*")),
    f"{SCHEDULER_NAME}[_.]*", "sampler[_.]*", "dl_state_dict[_.]*", LOADERS, SCALER_NAME, f"{RNG_STATE_NAME}_*.pkl",
    "custom_checkpoint_*.pkl", ADAPTER_CONFIG,
)  # fmt: skip
"""Files of a state for its manifest; source: accelerate 1.15, checkpointing.py and utils/fsdp_utils.py. The epochs of
loaders and the config of an adapter are ours."""


def owner_of(optimizer: Any, models: Sequence[nn.Module]) -> nn.Module:
    """The prepared model that holds all parameters of an optimizer, or several of them as one `nn.ModuleList`.

    Accelerate takes the model of the same number, which is another one where a model has no optimizer, or two.
    """
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    owned = [held & set(model.parameters()) for model in models]
    for model, part in zip(models, owned, strict=True):
        if part == held:
            return model
    if set().union(*owned) != held:
        raise ConfigError(
            f"{len(held - set().union(*owned))} of the {len(held)} parameters of the optimizer belong to no prepared "
            "model, so that nobody could say what their saved state is of. Prepare their model too."
        )
    several = [model for model, part in zip(models, owned, strict=True) if part]
    if any(map(is_version1, several)):
        raise ConfigError(
            "Version 1 of FSDP cannot save an optimizer of several models. Make one optimizer for each, or use FSDP2."
        )
    return nn.ModuleList(several)


def write_state(accelerator: Any, state: StateSave) -> None:
    """Write all that `Accelerator.save_state` writes, and name the files of which a state must have all.

    Optimizers are written under the names that their parameters have in their models. Every rank must call.
    """
    folder, rank = state.staging, accelerator.process_index
    pairs = [(optimizer, owner_of(optimizer, accelerator._models)) for optimizer in accelerator._optimizers]
    for i, model in enumerate(accelerator._models):
        write_part(accelerator, model, None, state, i)
        if is_adapted(model):
            _write_adapter_config(model, state, i)
    for i, (optimizer, model) in enumerate(pairs):
        with beginning(model, getattr(optimizer, "optimizer", optimizer)):
            write_part(accelerator, model, optimizer, state, i)
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, [], str(folder))
    on_each_node = accelerator.project_configuration.save_on_each_node
    with agreed("saving schedulers and random states", folder), storage_errors("save to", folder):
        save_accelerator_state(
            str(folder), [], [], accelerator._schedulers, [], rank, accelerator.step, accelerator.scaler,
            save_on_each_node=on_each_node,
        )  # fmt: skip
        for i, registered in enumerate(accelerator._custom_objects):
            if any(isinstance(value, DTensor) for value in tree_leaves(registered.state_dict())):
                raise ConfigError(
                    f"{type(registered).__name__}, which is registered for checkpointing, has shards, and Accelerate "
                    "pickles rank 0's alone. Save it next to the state: dcp.save({'ema': it}, checkpoint_id=folder), "
                    "of torch.distributed.checkpoint."
                )
            save_custom_state(registered, str(folder), i, save_on_each_node=on_each_node)
        sync(folder / f"{RNG_STATE_NAME}_{rank}.pkl")
        state.needed += write_positions(accelerator, folder)
    state.needed += [f"{RNG_STATE_NAME}_{i}.pkl" for i in range(accelerator.num_processes)]
    state.needed += [files_of(SCHEDULER_NAME, i)[1] for i in range(len(accelerator._schedulers))]


def _tensors_of_adapter(model: Any) -> dict[str, torch.Tensor]:
    """What is saved of a `PeftModel`: the adapter, and buffers that steps may change, as those of batch norms; of
    prompt methods none: their states would seem whole."""
    is_prompt = any(config.is_prompt_learning for config in model.peft_config.values())
    names = {name for name, _ in model.named_buffers() if not is_prompt}
    return adapter_tensors(model) | {name: t for name, t in model.state_dict().items() if name in names}


def write_part(accelerator: Any, model: Any, optimizer: Any, state: StateSave, index: int) -> None:
    """Write a model, or an optimizer of it, as Accelerate does; of a `PeftModel` the adapter, without the frozen base.

    Every rank must call. Errors of a rank before and after the collectives are exchanged, so that no rank enters
    collectives to which another does not come.
    """
    plugin, doing = accelerator.state.fsdp_plugin, f"saving {'a model' if optimizer is None else 'an optimizer'}"
    optimizer = getattr(optimizer, "optimizer", optimizer)  # torch may step it to make its state
    is_whole = optimizer is not None or not _leaves_base_out(model)
    chosen: dict[str, torch.Tensor] = {}
    if optimizer is None:
        warn_of_drift(model)
    if not is_whole:
        with agreed("preparing the adapter", state.place.where):
            chosen = _tensors_of_adapter(model)
    kind, name = ("model", FSDP_MODEL_NAME) if optimizer is None else ("optimizer", OPTIMIZER_NAME)
    folder, file = (state.staging / each for each in files_of(name, index))
    how = str(plugin.state_dict_type)
    if plugin.fsdp_version == 1 or "SHARDED" not in how:
        if "LOCAL" not in how:
            state.needed.append(f"{folder.name}/{METADATA}" if "SHARDED" in how else file.name)
        if not is_whole:
            whole = gather_tensors(chosen, None)
            with agreed(doing, state.staging), storage_errors("save to", state.staging):
                if rank_and_size()[0] == 0:
                    torch.save({plain_name(key): tensor for key, tensor in whole.items()}, file)
        elif optimizer is None:
            save_fsdp_model(plugin, accelerator, model, str(state.staging), index)
        else:
            save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(state.staging), index)
        all_ranks(None, doing)  # rank 0 writes alone
        return
    with agreed(doing, folder), storage_errors("save to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        options = StateDictOptions(cpu_offload=getattr(plugin.state_dict_config, "offload_to_cpu", False))
        values: dict[str, Any] = (
            get_model_state_dict(model, options=options if is_whole else None)
            if optimizer is None
            else get_optimizer_state_dict(model, optimizer, options=options)
        )
    state.write_dcp({kind: values if is_whole else {key: values[key] for key in map(plain_name, chosen)}}, folder)


def _leaves_base_out(model: Any) -> bool:
    """Whether the base of a `PeftModel` is what its files hold, so that a state needs the adapter alone."""
    if not is_adapted(model) or is_version1(model):
        return False
    is_merged = any(getattr(module, "merged", False) is True for module in model.modules())
    return not is_merged and not any(map(changes_base, model.peft_config.values()))


def _write_adapter_config(model: Any, state: StateSave, index: int) -> None:
    """Write PEFT's config of the active adapter, with which the state opens as an adapter, on rank 0."""
    folder = state.staging / f"{FSDP_MODEL_NAME}_{index}" if index else state.staging
    with agreed("saving the config of the adapter", folder), storage_errors("save to", folder):
        if rank_and_size()[0] == 0 and folder.is_dir():
            config, base = copy(model.peft_config[model.active_adapter]), own_class(base_of(model))
            config.inference_mode = True
            made_on = {"base_model_class": base.__name__, "parent_library": base.__module__}
            with library_errors("Cannot save the config of the adapter", UNCHANGED):
                config.save_pretrained(str(folder), auto_mapping_dict=None if config.task_type else made_on)


def load_models(accelerator: Any, folder: Path) -> None:
    """Load the models of a state, as Accelerate does; into a `PeftModel` also an adapter that was saved without a base.

    Every rank must call.
    """
    plugin = accelerator.state.fsdp_plugin
    for i, model in enumerate(accelerator._models):
        names: list[str] = []
        if is_adapted(model):
            doing = "matching the state with the adapter"
            with agreed(doing, folder):
                if rank_and_size()[0] == 0 or is_version1(model):  # whose state is gathered
                    names = _names_of_adapter(model, folder, i)
                names = all_ranks(names, doing)[0]
        if not names:
            load_fsdp_model(plugin, accelerator, model, str(folder), i)
        elif "SHARDED" in str(plugin.state_dict_type):
            home: Any = torch.distributed.checkpoint
            values = get_model_state_dict(model)
            part = {name: values[name] for name in names}
            reader = home.FileSystemReader(folder / files_of(FSDP_MODEL_NAME, i)[0])  # or that of a store
            load({"model": part}, storage_reader=reader)
            set_model_state_dict(model, part, options=StateDictOptions(strict=False))
        else:
            load_fsdp_model(plugin, accelerator, model, str(folder), i, adapter_only=True)


def load_optimizer(accelerator: Any, optimizer: Any, model: nn.Module, folder: Path, index: int = 0) -> None:
    """Load the state of an optimizer of a model, as Accelerate does, in the stored format. Every rank must call."""
    plugin, optimizer = accelerator.state.fsdp_plugin, getattr(optimizer, "optimizer", optimizer)
    with awaiting_state(model, optimizer, folder, index), using_format(plugin, folder):
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder), index)


def _names_of_adapter(model: nn.Module, folder: Path, index: int) -> list[str]:
    """The names of what a state holds of a `PeftModel`, if that is the adapter alone; none where it holds the base."""
    sharded, pickled = (folder / name for name in files_of(FSDP_MODEL_NAME, index))
    if sharded.is_dir():
        stored = {key.removeprefix("model."): shape for key, shape in check_dcp(sharded).items()}
    else:
        content = load_pickled(pickled, safe=TORCH_SAFE_GLOBALS).content
        stored = {name: tuple(tensor.shape) for name, tensor in content.items()}
    state: dict[str, torch.Tensor] = {plain_name(n): t for n, t in model.state_dict(keep_vars=True).items()}
    if not state.keys() - stored.keys():
        return []
    needed = set(map(plain_name, own_tensors(model, model.state_dict(keep_vars=True))))
    facts = {
        "lacks": sorted(needed - stored.keys()),
        "holds, and this model does not have,": sorted(stored.keys() - state.keys()),
        "holds in another shape": sorted(n for n in stored.keys() & state.keys() if stored[n] != tuple(state[n].shape)),
    }
    if found := [f"{fact} {listed(map(quoted, names))}" for fact, names in facts.items() if names]:
        raise CheckpointError(
            f"{str(folder)!r} is the state of an adapter without its base, and {'; '.join(found)}. Make base and "
            "adapter as in the run that saved it."
        )
    return list(stored)


def numbered_states(folder: Path) -> list[Path]:
    """The states that Accelerate named automatically, oldest first."""
    states = [path for path in folder.glob("checkpoint_*") if path.name.removeprefix("checkpoint_").isdigit()]
    return sorted(states, key=lambda path: int(path.name.removeprefix("checkpoint_")))


def fetch_state(accelerator: Any, url: str) -> Path:
    """The stub of a state in a store, with the files whole that this rank reads whole: all small ones but the random
    states of other ranks; with a user's hooks, which may read any, all that are no models or optimizers."""
    folder, own = stub_of(url), f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl"
    files = [path for path in folder.iterdir() if path.is_file()]
    if full := [path.name for path in files if path.match("pytorch_model_fsdp*.bin") or path.match("optimizer*.bin")]:
        raise CheckpointError(
            f"{url!r} is no SHARDED_STATE_DICT: {listed(full)} would be read whole by every rank. Copy it to a folder "
            "(fsspec's get), and load that."
        )
    if not accelerator._load_model_state_pre_hook:
        files = [path for path in files if any(path.match(pattern) for pattern in STATE_GLOBS)]
    fetch_whole(path for path in files if path.name == own or not path.match(f"{RNG_STATE_NAME}_*.pkl"))
    return folder


def check_state(accelerator: Any, folder: Path, *, allow_incomplete: bool) -> set[str]:
    """Refuse a state that is damaged or lacks what this run needs; return the files that it lacks and may lack.

    Every rank must call.
    """

    def parts() -> Iterator[tuple[Sequence[str], str]]:
        there = {path.name for path in folder.iterdir()}
        is_local = any("_rank" in name for name in there)  # LOCAL_STATE_DICT, in which each rank has its files
        models = [files_of(FSDP_MODEL_NAME, i) for i in range(len(accelerator._models))]
        if lost := [names for names in models if not is_local and not there.intersection(names)]:
            raise CheckpointError(
                f"{str(folder)!r} holds {len(models) - len(lost)} of the {len(models)} models that are prepared now: "
                f"{' or '.join(lost[0])} is absent. Prepare what was prepared when it was saved, or use another folder."
            )
        yield from ((files_of(OPTIMIZER_NAME, i), "an optimizer") for i in range(len(accelerator._optimizers)))
        yield from ((files_of(SCHEDULER_NAME, i)[1:], "a scheduler") for i in range(len(accelerator._schedulers)))
        yield from [((SCALER_NAME,), "the loss scale")] * (accelerator.scaler is not None)
        yield (f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl",), "random states"

    rest = (f"{OPTIMIZER_NAME}*", f"{SCHEDULER_NAME}*", SCALER_NAME, f"{RNG_STATE_NAME}_*")
    option = "load_state(…, allow_incomplete=True)"
    return check_parts(folder, parts(), rest, allowed=allow_incomplete, option=option)
