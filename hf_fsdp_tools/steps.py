"""The steps of `from_pretrained` one by one, and what they look at: for scripts that want something else in between."""

from hf_fsdp_tools.errors import WrapPlanError
from hf_fsdp_tools.loading.load import load_weights
from hf_fsdp_tools.loading.opening import open_checkpoint
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.planning.blocks import detect_blocks
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.plan import WrapPlan
from hf_fsdp_tools.sharding.shard import parallelize_model, shard_model

__all__ = [
    "WrapPlan", "WrapPlanError", "build_meta_model", "detect_blocks", "load_weights", "make_wrap_plan",
    "open_checkpoint", "parallelize_model", "shard_model",
]  # fmt: skip
