"""What is overridden of Accelerate, the Trainer and torch is still there, and versions that nobody tried are told."""

import inspect
import re

import pytest
import torch
from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state
from accelerate.state import AcceleratorState, PartialState
from transformers import Trainer

from hf_fsdp_tools import FSDPTrainerMixin
from hf_fsdp_tools.integrations.hooks import overridden
from tests.api import ShardedAccelerator, ShardedScaler

EXTENDED = ((FSDPTrainerMixin, Trainer), (ShardedAccelerator, Accelerator), (ShardedScaler, torch.amp.GradScaler))
HOOKS = [(own, base, name) for own, base in EXTENDED for name in overridden(own)]
ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def test_all_that_these_classes_define_and_use_is_there():
    names = {name for _, _, name in HOOKS}
    assert {"_save_rng_state", "_update_auto_batch_size", "train", "prepare", "load_state", "_unscale_grads_"} <= names
    for own, base in EXTENDED:
        for name, value in vars(own).items():
            if isinstance(value, property):  # in place of an attribute that the base sets for itself
                assert re.search(rf"self\.{name} = ", inspect.getsource(base.__init__)), f"{base.__name__}.{name}"
            elif callable(value) and not name.startswith("__"):
                assert name in names
    source = inspect.getsource(Accelerator.__init__)
    for held in ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"):
        assert f"self.{held} = []" in source
    assert "self._save_model_state_pre_hook = " in source
    given = ["output_dir", "model_states", "optimizers", "schedulers", "dataloaders", "process_index", "step", "scaler"]
    assert [*inspect.signature(save_accelerator_state).parameters][:8] == given
    for state in (AcceleratorState, PartialState):
        assert isinstance(state._shared_state, dict) and callable(state._reset_state)
    assert "_from_accelerator" in inspect.signature(AcceleratorState).parameters
    assert callable(torch.autograd.Variable._execution_engine.queue_callback)
    assert '"_step_supports_amp_scaling"' in inspect.getsource(torch.amp.GradScaler.step)
    assert callable(torch._amp_foreach_non_finite_check_and_unscale_)


@pytest.mark.parametrize(("own", "base", "name"), HOOKS, ids=[f"{own.__name__}.{name}" for own, _, name in HOOKS])
def test_what_is_overridden_is_there_with_the_same_parameters(own, base, name):
    assert callable(getattr(base, name, None)), f"{base.__name__} has no {name}: nobody calls ours"
    theirs = [p.name for p in inspect.signature(getattr(base, name)).parameters.values() if p.kind not in ANY]
    parameters = inspect.signature(getattr(own, name)).parameters.values()
    added = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty} - set(theirs)
    mine = [p.name for p in parameters if p.kind not in ANY and p.name not in added]
    assert mine == theirs[: len(mine)]
    assert len(mine) == len(theirs) or any(p.kind in ANY for p in parameters), f"lacks {theirs[len(mine) :]}"
