"""The flat-parameter path of FSDP1, deprecated upstream, in a room of its own so that it can be deleted one day."""

from hf_fsdp_tools.extensions.fsdp1.policy import hybrid_auto_wrap_policy
from hf_fsdp_tools.extensions.fsdp1.wrap import load_weights_fsdp1, wrap_fsdp1

__all__ = ["hybrid_auto_wrap_policy", "load_weights_fsdp1", "wrap_fsdp1"]
