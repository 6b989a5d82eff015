"""Shard any Hugging Face model with PyTorch FSDP.

    from hf_fsdp_tools import from_pretrained

    model = from_pretrained("Qwen/Qwen3-8B")   # under torchrun or accelerate launch: each rank reads only its own bytes

The names below are the whole public interface; `ARCHITECTURE.md` draws how they fit together. Importing this package imports
nothing else: each name loads its module at first use, so accelerate, transformers and torch come when they are needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_fsdp_tools.adapters import add_adapter, load_adapter, shard_added
    from hf_fsdp_tools.blocks import BlockStack, ModelBlocks, detect_blocks
    from hf_fsdp_tools.checkpoint import CheckpointIndex, LoadReport, SaveReport, load_weights, save_pretrained
    from hf_fsdp_tools.config import FSDPConfig
    from hf_fsdp_tools.demo import make_demo_model
    from hf_fsdp_tools.diagnostics import Diagnosis, diagnose
    from hf_fsdp_tools.errors import (
        BlockDetectionError,
        CheckpointError,
        ConfigError,
        EstimateError,
        FSDPToolsError,
        MeshError,
        WrapPlanError,
    )
    from hf_fsdp_tools.findings import Finding
    from hf_fsdp_tools.fsdp1 import load_weights_fsdp1, wrap_fsdp1
    from hf_fsdp_tools.fsdp1_policy import hybrid_auto_wrap_policy
    from hf_fsdp_tools.integrations import FSDPTrainerMixin, HybridFSDPPlugin, make_accelerator
    from hf_fsdp_tools.mesh import ParallelDims
    from hf_fsdp_tools.meta import build_meta_model
    from hf_fsdp_tools.prepare import from_pretrained
    from hf_fsdp_tools.resize import resize_token_embeddings
    from hf_fsdp_tools.shard import Sharding, describe_sharding, shard_model, sharding_of
    from hf_fsdp_tools.tokens import tokens_per_rank
    from hf_fsdp_tools.wrap import HybridPolicy, WrapPlan, WrapUnit, check_wrap_plan, make_wrap_plan

_MODULE_OF = {
    "BlockDetectionError": "errors",
    "BlockStack": "blocks",
    "CheckpointError": "errors",
    "CheckpointIndex": "checkpoint",
    "ConfigError": "errors",
    "Diagnosis": "diagnostics",
    "EstimateError": "errors",
    "FSDPConfig": "config",
    "FSDPToolsError": "errors",
    "FSDPTrainerMixin": "integrations",
    "Finding": "findings",
    "HybridFSDPPlugin": "integrations",
    "HybridPolicy": "wrap",
    "LoadReport": "checkpoint",
    "MeshError": "errors",
    "ModelBlocks": "blocks",
    "ParallelDims": "mesh",
    "SaveReport": "checkpoint",
    "Sharding": "shard",
    "WrapPlan": "wrap",
    "WrapPlanError": "errors",
    "WrapUnit": "wrap",
    "add_adapter": "adapters",
    "build_meta_model": "meta",
    "check_wrap_plan": "wrap",
    "describe_sharding": "shard",
    "detect_blocks": "blocks",
    "diagnose": "diagnostics",
    "from_pretrained": "prepare",
    "hybrid_auto_wrap_policy": "fsdp1_policy",
    "load_adapter": "adapters",
    "load_weights": "checkpoint",
    "load_weights_fsdp1": "fsdp1",
    "make_accelerator": "integrations",
    "make_demo_model": "demo",
    "make_wrap_plan": "wrap",
    "resize_token_embeddings": "resize",
    "save_pretrained": "checkpoint",
    "shard_added": "adapters",
    "shard_model": "shard",
    "sharding_of": "shard",
    "tokens_per_rank": "tokens",
    "wrap_fsdp1": "fsdp1",
}

__all__ = [
    "BlockDetectionError",
    "BlockStack",
    "CheckpointError",
    "CheckpointIndex",
    "ConfigError",
    "Diagnosis",
    "EstimateError",
    "FSDPConfig",
    "FSDPToolsError",
    "FSDPTrainerMixin",
    "Finding",
    "HybridFSDPPlugin",
    "HybridPolicy",
    "LoadReport",
    "MeshError",
    "ModelBlocks",
    "ParallelDims",
    "SaveReport",
    "Sharding",
    "WrapPlan",
    "WrapPlanError",
    "WrapUnit",
    "add_adapter",
    "build_meta_model",
    "check_wrap_plan",
    "describe_sharding",
    "detect_blocks",
    "diagnose",
    "from_pretrained",
    "hybrid_auto_wrap_policy",
    "load_adapter",
    "load_weights",
    "load_weights_fsdp1",
    "make_accelerator",
    "make_demo_model",
    "make_wrap_plan",
    "resize_token_embeddings",
    "save_pretrained",
    "shard_added",
    "shard_model",
    "sharding_of",
    "tokens_per_rank",
    "wrap_fsdp1",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load the module that owns a public name when the name is first used (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
