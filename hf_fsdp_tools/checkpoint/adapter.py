"""The adapters of a sharded PEFT model as the folder that PEFT itself writes: adapters only, all rows of every rank."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.errors import CheckpointError

from .agreement import agreed, rank_and_size
from .report import SaveReport

__all__ = ["is_adapted", "save_adapter"]


def is_adapted(model: nn.Module) -> bool:
    """Whether this is a PEFT model, whose base is not to be saved again with every adapter."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def save_adapter(
    model: nn.Module, folder: Path, *, tokenizer: Any = None, dtype: torch.dtype | None = None
) -> SaveReport:
    """Write `adapter_model.safetensors` and `adapter_config.json`; `PeftModel.from_pretrained` opens them.

    PEFT chooses what belongs to an adapter (`modules_to_save` too) and writes it, on rank 0; adapters are small, so they
    are gathered there, one tensor at a time.

    Args:
        model: a `PeftModel`, sharded or not.
        folder: made if it is not there; only rank 0 needs to see it.
        tokenizer: saved beside the adapter.
        dtype: what floating-point tensors become in the file; None keeps the model's.

    Every rank of the default process group must call; the adapters' tensors are gathered.

    Raises:
        CheckpointError: the folder cannot be written; the same on every rank.
    """
    start = time.perf_counter()
    rank, _ = rank_and_size()
    whole = _gather_adapter(model, dtype, keep=rank == 0)
    with agreed(f"writing the adapter to {str(folder)!r}"):
        if rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                model.save_pretrained(str(folder), state_dict=whole)  # type: ignore[operator]  # PEFT's own
                if tokenizer is not None:
                    tokenizer.save_pretrained(folder)
            except OSError as error:
                raise CheckpointError(
                    f"Cannot save the adapter to {str(folder)!r}: {error}. Check space and permissions."
                ) from error
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in whole.values())
    return SaveReport(
        folder=str(folder),
        files=("adapter_model.safetensors",),
        total_bytes=num_bytes,
        bytes_written=num_bytes if rank == 0 else 0,
        gathered_bytes=num_bytes,
        write_calls=1 if rank == 0 else 0,
        seconds=round(time.perf_counter() - start, 4),
    )


def _gather_adapter(model: nn.Module, dtype: torch.dtype | None, *, keep: bool) -> dict[str, torch.Tensor]:
    """Every tensor that is trained, or named as the tuner names its own, whole on the CPU; empty stand-ins unless kept."""
    prefix = getattr(getattr(model, "base_model", None), "prefix", None) or "lora_"
    whole = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.requires_grad or prefix in name:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            full = full.detach().to(dtype if full.is_floating_point() else None)
            whole[name] = full.cpu() if keep else full.to("meta")
    return whole
