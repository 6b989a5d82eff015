"""Settings of the mixin for Trainers as one value, from code, a command line or a YAML file."""

from dataclasses import dataclass, field

from hf_fsdp_tools.errors import ConfigError


@dataclass
class TrainerSettings:
    """What `FSDPTrainerMixin` does beyond `TrainingArguments`: an attribute of the class, or given when it is made.

        class MyTrainer(FSDPTrainerMixin, Trainer):
            fsdp_settings = TrainerSettings(blocking=False)

        trainer = MyTrainer(model, arguments, fsdp_settings=settings)  # in the place of those of the class

    `HfArgumentParser` of transformers makes an option of each, and reads them from YAML and JSON; recipes take them.

    Raises:
        ConfigError: `ema_decay` is not from 0 to below 1, or `ema_device` cannot be used.

    Example:
        >>> from transformers import HfArgumentParser, TrainingArguments
        >>> parser = HfArgumentParser((TrainingArguments, TrainerSettings))
        >>> arguments, settings = parser.parse_dict({"output_dir": "run", "use_cpu": True, "ema_decay": 0.999})
        >>> settings.ema_decay, settings.blocking
        (0.999, True)
    """

    blocking: bool = field(
        default=True, metadata={"help": "False: train on while a checkpoint is written from a copy in host memory."}
    )
    checksums: bool = field(
        default=False, metadata={"help": "Note the SHA-256 of a checkpoint's files, which a resumed run compares."}
    )
    allow_incomplete: bool = field(
        default=False,
        metadata={"help": "Resume without optimizer, scheduler or random states, which start anew with a warning."},
    )
    allow_nan: bool = field(
        default=False, metadata={"help": "Continue when the loss is NaN or inf (default: stop all ranks)."}
    )
    clip_by_last_norm: bool = field(
        default=False,
        metadata={"help": "Clip by the norm of the step before, for a CPU that steps early."},
    )
    ema_decay: float | None = field(
        default=None,
        metadata={"help": "Average the trained weights after each step (0.999, say), and save that too."},
    )
    ema_device: str | None = field(
        default=None, metadata={"help": "cpu keeps the averages of --ema_decay in host memory."}
    )
    report_estimate: str | None = field(
        default=None, metadata={"help": "Add a line of JSON to this file: estimate and measurement."}
    )
    streams_are_shares: bool = field(
        default=False,
        metadata={"help": "A stream to train on has this rank's rows alone already, so that it is not divided."},
    )

    def __post_init__(self) -> None:
        if not 0 <= (self.ema_decay or 0) < 1:
            raise ConfigError(
                f"ema_decay is {self.ema_decay:g}; give at least 0 and less than 1, usually 0.99 to 0.9999."
            )
        if self.ema_device not in (None, "cpu"):
            raise ConfigError(f"ema_device is {self.ema_device!r}; give cpu, or leave it out.")
        if self.ema_device is not None and self.ema_decay is None:
            raise ConfigError("ema_device needs ema_decay: give 0.999, for example.")
