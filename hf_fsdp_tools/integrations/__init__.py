"""Accelerate and the HF Trainer: the only package that imports accelerate, and the only one that reads its variables.

    make_accelerator()   an `Accelerator` that runs FSDP2 on GPUs, on one GPU, and on CPUs
    HybridFSDPPlugin     Accelerate's FSDP plugin with our wrap policy and our precision
    FSDPTrainerMixin     `class MyTrainer(FSDPTrainerMixin, Trainer)`

Accelerate is left as it is: no function of it is replaced. Three things are done around it: its state is told that FSDP
runs on CPUs too (`state.start_state`), `prepare` passes sharded models through untouched
(`accelerator.ShardedAccelerator`), and what `accelerate launch` put into variables is translated into our policy (`plugin`).
"""

from .accelerator import make_accelerator
from .plugin import HybridFSDPPlugin
from .trainer import FSDPTrainerMixin

__all__ = ["FSDPTrainerMixin", "HybridFSDPPlugin", "make_accelerator"]
