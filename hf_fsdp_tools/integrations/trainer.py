"""Our sharding, precision and saving under the HF Trainer and its subclasses."""

from pathlib import Path

import torch

from hf_fsdp_tools.checkpoint import save_pretrained

from .accelerator import adopt
from .frozen import FrozenModel
from .plugin import HybridFSDPPlugin
from .state import start_state

__all__ = ["FSDPTrainerMixin"]


class FSDPTrainerMixin:
    """Puts our sharding, precision and saving under a `Trainer` or a subclass of it.

        class MyTrainer(FSDPTrainerMixin, Trainer): ...

        accelerator = make_accelerator()
        trainer = MyTrainer(model=from_pretrained(name, accelerator=accelerator), args=TrainingArguments(...), ...)
        trainer.train()
        trainer.save_model()

    The model may also be plain, equal on every rank: it is sharded by the same policy when training starts. Settings come
    from `TrainingArguments(fsdp=True, fsdp_config=…)` where given, else from `accelerate launch`. `save_model` writes a
    normal Hugging Face checkpoint from all ranks at once, whatever the state dict type; no rank gathers the model.
    """

    ref_model = FrozenModel()
    """TRL's reference model (DPO, KTO, GRPO, …): sharded by the same policy as the model, and never trained."""
    teacher_model = FrozenModel()
    """TRL's teacher (distillation), likewise."""

    def create_accelerator_and_postprocess(self) -> None:
        """Called by `Trainer.__init__`. Starts FSDP before the Trainer makes its own Accelerator, which then finds it."""
        args = self.args  # type: ignore[attr-defined]  # the Trainer's
        plugin = HybridFSDPPlugin(**(args.fsdp_plugin_args or {}))
        start_state(
            plugin,
            mixed_precision=args.mixed_precision,
            cpu=args.use_cpu,
            parallelism_config=args.parallelism_config,
        )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # the Trainer's
        self.accelerator = adopt(self.accelerator)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write model, tokenizer and training arguments as a normal Hugging Face folder. Every rank must call."""
        if not self.accelerator.is_fsdp2:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]  # the Trainer's; gathers on rank 0
            return
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)  # type: ignore[attr-defined]
        save_pretrained(self.model, folder, tokenizer=self.processing_class)  # type: ignore[attr-defined]
        if self.args.should_save:  # type: ignore[attr-defined]
            torch.save(self.args, folder / "training_args.bin")  # type: ignore[attr-defined]
        if self.args.push_to_hub and not _internal_call:  # type: ignore[attr-defined]
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]
