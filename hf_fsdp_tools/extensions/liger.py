"""Liger's fused kernels in the place of a model's own norms, rotary angles, gated layers and loss.

One word has them everywhere: `from_pretrained(…, use_liger_kernel=True)`, `--use_liger_kernel true` of the recipes and
their files, `TrainingArguments(use_liger_kernel=True)`. transformers' own function lets Liger change the instances of a
model; rotary angles it changes for the kind of model, for the whole process.
"""

from collections.abc import Mapping
from importlib.util import find_spec

from torch import nn
from transformers import PreTrainedModel

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.modeling.notes import Chosen
from hf_fsdp_tools.sharding.sharding import Feature, Sharding

_WORD = "use_liger_kernel"


def use_liger(model: PreTrainedModel, options: bool | Mapping[str, bool]) -> None:
    """Let a model that is not sharded compute by Liger's kernels; `options` say which, as in `liger_kernel_config`."""
    if find_spec("liger_kernel") is None:
        raise ConfigError(f"{_WORD} needs liger_kernel: pip install liger-kernel")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from transformers.integrations.liger import apply_liger_kernel  # imports PEFT, and so bitsandbytes

    if (kind := model.config.model_type) not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"{_WORD}: Liger has no kernels for {kind}. Leave it out; compile=True fuses operators too.")
    apply_liger_kernel(model, dict(options) if isinstance(options, Mapping) else None)
    Chosen.put(model, features=Chosen.of(model).features | {"liger"})


def refuse_liger(device_type: str, *, shares: bool) -> None:
    """Refuse the kernels on CPUs, and where ranks have parts of rows or layers: the loss is of whole ones."""
    if device_type == "cpu":
        raise ConfigError(f"{_WORD}: Liger's kernels need a GPU. Leave it out on CPUs.")
    if shares:
        raise ConfigError(
            f"{_WORD} computes the loss of whole rows and a whole head, and with cp_size or tp_size each rank has a "
            f"part of them. Leave {_WORD} or these sizes out."
        )


class Liger(Feature):
    """A model that computes by Liger's kernels is on GPUs, each of which has whole rows and layers."""

    def check(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """Device and mesh are looked at."""
        dims = sharding.axes.dims
        refuse_liger(sharding.mesh.device_type, shares=max(dims.cp_size, dims.tp_size) > 1)


FEATURE = Liger()
