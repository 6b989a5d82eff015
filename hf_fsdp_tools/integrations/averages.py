"""Moving averages in a Trainer: made when training begins, taken after each step, saved with each training state."""

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from transformers import TrainerCallback

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.averages import ParameterEMA
from hf_fsdp_tools.integrations.resume import AVERAGES, using_format
from hf_fsdp_tools.integrations.states import StateSave
from hf_fsdp_tools.loading.formats.dcp import METADATA


class Averaging(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Makes `trainer.ema` when training begins, from a training state if there is one with averages, and keeps it."""

    def __init__(self, trainer: Any, resumed: Path | None) -> None:
        self.trainer, self.resumed = trainer, resumed

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the averages of weights that are loaded, and read those of the training state. Every rank calls."""
        trainer = self.trainer
        if not trainer.accelerator.is_fsdp2:
            raise ConfigError("ema_decay needs FSDP2: version 1 has parts of several parameters as one. Leave it out.")
        trainer.ema = ParameterEMA(trainer.model, trainer.ema_decay, device=trainer.ema_device)
        if self.resumed is not None:
            read_averages(trainer, self.resumed)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the parameters as the optimizer has left them."""
        self.trainer.ema.step()


def write_averages(ema: ParameterEMA, state: StateSave) -> None:
    """Write averages as a DCP folder of a training state. Every rank must call."""
    state.write_dcp({"ema": ema.state_dict()}, state.staging / AVERAGES)
    state.needed.append(f"{AVERAGES}/{METADATA}")


def read_averages(trainer: Any, folder: Path) -> None:
    """Fill a trainer's averages from those of a training state; where it has none, they stay. Every rank must call."""
    if trainer.ema is not None and (folder / AVERAGES).is_dir():
        with using_format(trainer.accelerator.state.fsdp_plugin, None, folder):
            load({"ema": trainer.ema.state_dict()}, checkpoint_id=folder / AVERAGES)
