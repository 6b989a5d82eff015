"""Shard any Hugging Face model with PyTorch FSDP.

    from hf_fsdp_tools import from_pretrained

    model = from_pretrained("Qwen/Qwen3-8B")   # under torchrun or accelerate launch: each rank reads its own slices

The names below, those of `hf_fsdp_tools.steps` (the single steps of `from_pretrained`), `scripting`, `testing`,
`extensions.fsdp1` and `extensions.streamed` are the whole public interface; `ARCHITECTURE.md` draws how they fit
together. Importing this package imports nothing else: each name loads its module at first use, so accelerate,
transformers and torch come when they are needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; a test compares it with the table below
    from hf_fsdp_tools.background import wait_for_saves as wait_for_saves
    from hf_fsdp_tools.diagnostics.diagnosis import diagnose as diagnose
    from hf_fsdp_tools.distributed.mesh import ParallelDims as ParallelDims
    from hf_fsdp_tools.distributed.rounds import rank_timeout as rank_timeout
    from hf_fsdp_tools.errors import CheckpointError as CheckpointError
    from hf_fsdp_tools.errors import ConfigError as ConfigError
    from hf_fsdp_tools.errors import FSDPToolsError as FSDPToolsError
    from hf_fsdp_tools.errors import RanksError as RanksError
    from hf_fsdp_tools.extensions.averages import ParameterEMA as ParameterEMA
    from hf_fsdp_tools.extensions.muon.muon import Muon as Muon
    from hf_fsdp_tools.foresight.memory import estimate_memory as estimate_memory
    from hf_fsdp_tools.foresight.recommend import recommend_config as recommend_config
    from hf_fsdp_tools.foresight.setup import TrainingSetup as TrainingSetup
    from hf_fsdp_tools.foresight.throughput import estimate_throughput as estimate_throughput
    from hf_fsdp_tools.integrations.config import LaunchConfig as LaunchConfig
    from hf_fsdp_tools.integrations.plugin import FSDPPlugin as FSDPPlugin
    from hf_fsdp_tools.integrations.state import make_accelerator as make_accelerator
    from hf_fsdp_tools.integrations.trainer import FSDPTrainerMixin as FSDPTrainerMixin
    from hf_fsdp_tools.integrations.trainer_settings import TrainerSettings as TrainerSettings
    from hf_fsdp_tools.loading.vocabulary import resize_token_embeddings as resize_token_embeddings
    from hf_fsdp_tools.planning.policy import WrapPolicy as WrapPolicy
    from hf_fsdp_tools.pretrained import from_config as from_config
    from hf_fsdp_tools.pretrained import from_pretrained as from_pretrained
    from hf_fsdp_tools.saving.export import export_checkpoint as export_checkpoint
    from hf_fsdp_tools.saving.save import save_pretrained as save_pretrained
    from hf_fsdp_tools.sharding.adapters import add_adapter as add_adapter
    from hf_fsdp_tools.sharding.adapters import load_adapter as load_adapter
    from hf_fsdp_tools.sharding.describe import describe_sharding as describe_sharding
    from hf_fsdp_tools.sharding.hf_interface import unsharded as unsharded
    from hf_fsdp_tools.sharding.replicated import clip_grad_norm_ as clip_grad_norm_
    from hf_fsdp_tools.sharding.sharding import Float8Policy as Float8Policy
    from hf_fsdp_tools.streaming.live import live_weights as live_weights
else:  # a type checker that saw it would let every name pass

    def __getattr__(name: str) -> Any:
        """Load the module that owns a public name when the name is first used (PEP 562)."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


_NAMES_OF = {
    "background": ("wait_for_saves",),
    "diagnostics.diagnosis": ("diagnose",),
    "distributed.mesh": ("ParallelDims",),
    "distributed.rounds": ("rank_timeout",),
    "errors": ("CheckpointError", "ConfigError", "FSDPToolsError", "RanksError"),
    "foresight.memory": ("estimate_memory",),
    "foresight.recommend": ("recommend_config",),
    "foresight.setup": ("TrainingSetup",),
    "foresight.throughput": ("estimate_throughput",),
    "integrations.config": ("LaunchConfig",),
    "integrations.plugin": ("FSDPPlugin",),
    "integrations.state": ("make_accelerator",),
    "integrations.trainer": ("FSDPTrainerMixin",),
    "integrations.trainer_settings": ("TrainerSettings",),
    "loading.vocabulary": ("resize_token_embeddings",),
    "planning.policy": ("WrapPolicy",),
    "pretrained": ("from_config", "from_pretrained"),
    "saving.export": ("export_checkpoint",),
    "saving.save": ("save_pretrained",),
    "sharding.adapters": ("add_adapter", "load_adapter"),
    "extensions.averages": ("ParameterEMA",),
    "sharding.describe": ("describe_sharding",),
    "sharding.hf_interface": ("unsharded",),
    "sharding.replicated": ("clip_grad_norm_",),
    "sharding.sharding": ("Float8Policy",),
    "streaming.live": ("live_weights",),
    "extensions.muon.muon": ("Muon",),
}

_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
__all__ = sorted(_MODULE_OF)  # a list of names, made from the table

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
