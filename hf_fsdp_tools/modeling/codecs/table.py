"""The table of all codecs."""

from hf_fsdp_tools.modeling.codecs.base import Codec
from hf_fsdp_tools.modeling.codecs.compressed import Integers, Nvfp4, Scaled
from hf_fsdp_tools.modeling.codecs.fp8 import FineGrained
from hf_fsdp_tools.modeling.codecs.mxfp4 import Mxfp4
from hf_fsdp_tools.modeling.codecs.mxfp8 import Mxfp8
from hf_fsdp_tools.modeling.codecs.words import Words

CODECS: list[type[Codec]] = [FineGrained, Mxfp4, Mxfp8, Scaled, Integers, Nvfp4, Words]
"""In the order in which they are asked whether a stored tensor is theirs."""
