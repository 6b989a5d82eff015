"""Models that compute by Liger's kernels, of which a CPU has none: torch's operators stand in for them, put where Liger
puts its own (0.8.5): `forward` of instances, and a loss that reads the head's weight without calling the head."""

import sys
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional
from transformers import TrainingArguments
from transformers.integrations import liger as by_transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_fsdp_tools import ConfigError, ParallelDims, add_adapter, from_config, from_pretrained, save_pretrained
from hf_fsdp_tools.extensions import liger
from tests._checkpoints import full, lora, tiny_config
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer
from tests.api import sharding_of


def norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * (hidden.float() * scale).to(hidden.dtype)


def gated(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def fused_loss(self: Any, input_ids: Any = None, labels: Any = None, **given: Any) -> CausalLMOutputWithPast:
    hidden = self.model(input_ids=input_ids, **given)[0]
    if labels is None:
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
    logits = functional.linear(hidden[:, :-1], self.lm_head.weight).float()
    return CausalLMOutputWithPast(loss=functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


def put_in(model: Any, **options: bool) -> None:
    assert not options.keys() - {"rms_norm"}
    model.forward = MethodType(fused_loss, model)
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(gated, layer.mlp)
        for module in (layer.input_layernorm, layer.post_attention_layernorm) if options.get("rms_norm", True) else ():
            module.forward = MethodType(norm, module)


@contextmanager
def imitated() -> Any:
    found = {name: ModuleType(name) for name in ("", ".transformers", ".transformers.monkey_patch")}
    modules: Any = {f"liger_kernel{name}": module for name, module in found.items()}
    modules["liger_kernel"].__spec__ = ModuleSpec("liger_kernel", None)
    modules["liger_kernel.transformers"]._apply_liger_kernel_to_instance = put_in
    modules["liger_kernel.transformers.monkey_patch"].MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": put_in}
    with patch.dict(sys.modules, modules), patch.object(by_transformers, "is_liger_kernel_available", lambda: True):
        yield


def losses(model: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    rows = torch.arange(3, 35).view(2, 16)
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def are_those_of_the_plain_model(tied: bool, folder: str) -> None:
    config, found = tiny_config("llama"), {}
    config.tie_word_embeddings = tied
    with imitated(), patch.object(liger, "refuse_liger", lambda device_type, **shares: None):
        for fused in (False, True, {"rms_norm": False}):
            model = from_config(config, seed=0, use_liger_kernel=fused, activation_checkpointing=True).train()
            assert ("forward" in vars(model.model.layers[0].mlp)) == bool(fused)
            found[str(fused)] = (*losses(model), str(sharding_of(model).plan))
            for loss, gradients in ((one[0], one[1]) for one in found.values()):
                torch.testing.assert_close((loss, gradients), found["False"][:2])
        assert len({plan for _, _, plan in found.values()}) == 1, "the same units"
        save_pretrained(model, folder)
        adapted = add_adapter(from_pretrained(folder, use_liger_kernel=True), lora(), seed=0).train()
        plain = add_adapter(from_pretrained(folder), lora(), seed=0).train()
        torch.testing.assert_close(losses(adapted), losses(plain))


def what_cannot_be_is_one_error(folder: str) -> None:
    config = tiny_config("llama")
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        from_config(config, seed=0, use_liger_kernel=True)
    with imitated():
        with pytest.raises(ConfigError, match="no kernels for gpt2"):
            from_config(tiny_config("gpt2"), seed=0, use_liger_kernel=True)
        with pytest.raises(ConfigError, match="need a GPU"):
            args = TrainingArguments(folder, use_cpu=True, use_liger_kernel=True, report_to="none")
            ShardedTrainer(from_config(config, seed=0), args, train_dataset=[{"input_ids": [3, 4]}]).train()
        mesh = ParallelDims(cp_size=2).build_mesh("cpu")
        refuse = liger.refuse_liger
        with (
            patch.object(liger, "refuse_liger", lambda device_type, shares: refuse("cuda", shares=shares)),
            pytest.raises(ConfigError, match="with cp_size or tp_size each rank has a part"),
        ):
            from_config(config, seed=0, mesh=mesh, use_liger_kernel=True)


def test_a_model_with_fused_kernels_is_planned_trained_adapted_and_saved_as_without(tmp_path: Any) -> None:
    cases: dict[str, Any] = {"refused": partial(what_cannot_be_is_one_error, str(tmp_path / "args"))}
    for tied in (False, True):
        cases[f"tied {tied}"] = partial(are_those_of_the_plain_model, tied, str(tmp_path / f"{tied}"))
    run_ranks(run_cases, 2, cases)
