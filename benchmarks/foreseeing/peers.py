"""What other tools say of the memory of a training, to stand beside ours."""

from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from torch import nn

from hf_fsdp_tools.foresight.setup import TrainingSetup

__all__ = ["accelerate_bytes", "deepspeed_bytes"]


def accelerate_bytes(model: nn.Module, setup: TrainingSetup) -> int:
    """Bytes per GPU as `accelerate estimate-memory` gives them for training with Adam.

    It knows neither sharding nor activations: the number is the same for any number of GPUs, batch and sequence.

    Args:
        model: on meta, in fp32, as the command loads it.
        setup: precision is read.
    """
    total, _ = calculate_maximum_sizes(model)
    usage = estimate_training_usage(total, {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[setup.precision])
    return int(max(usage.values()))


def deepspeed_bytes(model: nn.Module, setup: TrainingSetup) -> int:
    """Bytes per GPU as DeepSpeed's `estimate_zero3_model_states_mem_needs` gives them.

    The formula (deepspeed/runtime/zero/stage3.py): 18 bytes per parameter over all GPUs, with CPU offload none of them,
    and 4 bytes per parameter of the largest layer. It has no activations.

    Args:
        model: on meta.
        setup: number of GPUs and offload are read.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = (sum(parameter.numel() for parameter in module.parameters(recurse=False)) for module in model.modules())
    largest = 4 * max(layers)
    return largest if setup.offload else largest + int(18 * total / setup.num_gpus)
