"""A real training of a case: the package's own sharding by its public names, random weights, a plain PyTorch loop."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from benchmarks.foreseeing.cases import SIZES, Case, Size
from hf_fsdp_tools import add_adapter
from hf_fsdp_tools.distributed.mesh import axes_of
from hf_fsdp_tools.foresight.forecast import build
from hf_fsdp_tools.foresight.setup import DTYPES, TrainingSetup
from hf_fsdp_tools.foresight.tracing.images import Images, batch_of, images_of
from hf_fsdp_tools.loading.quantized.by_config import keep_by_config
from hf_fsdp_tools.planning.plan import WrapUnit
from hf_fsdp_tools.sharding.allocate import allocate
from hf_fsdp_tools.sharding.replicated import clip_norm, step_kinds_apart
from hf_fsdp_tools.sharding.shard import apply_sharding
from hf_fsdp_tools.sharding.sharding import Sharding
from hf_fsdp_tools.steps import build_meta_model, make_wrap_plan, parallelize_model, shard_model


class Training:
    """One model of a case, sharded and with its optimizer, on this rank."""

    def __init__(self, case: Case, size: str, *, num_processes: int, device: torch.device) -> None:
        self.setup = case.sized(size, num_processes)
        self.device = device
        self.model: Any = _model(case, SIZES[size], self.setup, device)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        step_kinds_apart()
        self.optimizer = _optimizer(self.setup, self.trained)
        base = self.model.get_base_model() if self.setup.lora_r else self.model
        plain, _ = build(case.config(SIZES[size]), self.setup, auto_class=case.auto_class)
        self.batch = _batch(base, self.setup, images_of(plain, self.setup), device)

    def step(self) -> None:
        """One optimizer step."""
        count = self.setup.gradient_accumulation_steps
        for _ in range(count):
            (self.model(**self.batch).loss / count).backward()
        if self.setup.max_grad_norm is not None:
            if self.setup.tp_size == self.setup.ep_size == 1:
                torch.nn.utils.clip_grad_norm_(self.trained, self.setup.max_grad_norm)
            else:  # gradients of several meshes, as the Accelerator clips them
                clip_norm(self.trained, self.setup.max_grad_norm, 2.0, self.device)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _model(case: Case, size: Size, setup: TrainingSetup, device: torch.device) -> nn.Module:
    config = case.config(size)
    own = DTYPES[setup.mixed_precision if setup.lora_r else setup.master_dtype]
    model: Any = build_meta_model(
        config, auto_class=case.auto_class, dtype=own, attn_implementation=setup.attn_implementation
    )
    for part in (model.config, model.config.get_text_config()):
        part.use_cache = False  # as the Trainer does
    if setup.freeze_vision_tower:
        model.get_encoder(modality="image").requires_grad_(False)
    if not setup.dequantize:
        keep_by_config(model)
    model = _sharded(model, setup, device)
    allocate(model, device=torch.device("cpu") if setup.offload_params else device)
    _fill(model)
    if setup.lora_r:
        from peft import LoraConfig

        targets = setup.lora_target_modules
        lora = LoraConfig(r=setup.lora_r, target_modules=targets if isinstance(targets, str) else list(targets or ()))
        model = add_adapter(model, lora)
    return model.train()


def _sharded(model: nn.Module, setup: TrainingSetup, device: torch.device) -> nn.Module:
    mesh, policy = setup.dims.build_mesh(device.type), setup.policy
    model = parallelize_model(model, mesh)
    if not setup.reshard_after_forward:
        policy = replace(policy, reshard_after_forward={"*": False})
    plan = make_wrap_plan(model, policy=policy)
    how: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[setup.mixed_precision], reduce_dtype=DTYPES[setup.reduce_dtype]
        ),
        "offload_policy": CPUOffloadPolicy() if setup.offload_params else OffloadPolicy(),
        "activation_checkpointing": setup.recompute,
    }
    if setup.wrapping == "plan":
        return shard_model(model, plan, mesh=mesh, **how)
    # One unit for the whole model breaks the rules of a plan, so `shard_model` refuses it.
    sizes = {name: sum(getattr(unit, name) for unit in plan.units) for name in ("num_params", "num_bytes")}
    root = WrapUnit(modules=("",), reshard_after_forward=None, reason="one unit for the model", **sizes)
    if setup.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_sharding(model, Sharding(plan=replace(plan, units=(root,)), axes=axes_of(mesh), **how))
    return model


def _fill(model: nn.Module) -> None:
    """Small random values everywhere, so that nothing is infinite."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.is_floating_point():
                local.normal_(0.0, 0.02)
            else:
                local.fill_(60 if local.dtype == torch.uint8 else 0)  # of scales, a small number in most dtypes


def _optimizer(setup: TrainingSetup, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if setup.optimizer in ("adamw", "adamw_foreach"):
        is_fused = setup.optimizer == "adamw"
        return torch.optim.AdamW(parameters, lr=1e-4, fused=is_fused, foreach=not is_fused)
    assert setup.optimizer == "sgd", f"no case runs {setup.optimizer}"
    return torch.optim.SGD(parameters, lr=1e-4, foreach=True)


def _batch(model: nn.Module, setup: TrainingSetup, images: Images | None, device: torch.device) -> dict[str, Any]:
    """The batch of which the dry run assumes the shapes, with random words."""
    batch = batch_of(model, setup, images)
    torch.manual_seed(0)  # ranks that share rows have the same
    for name in {"input_ids", "labels"} & batch.keys():
        if batch[name].dim() > 1:
            words = torch.randint(20, 200, batch[name].shape)
            batch[name] = torch.where(batch[name] == 0, words, batch[name])
    return {name: value.contiguous().to(device) for name, value in batch.items()}
