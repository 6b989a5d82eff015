"""Settings of the mixin: from a command line or a file, refused where they cannot be, and a copy for each trainer."""

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_fsdp_tools import ConfigError, TrainerSettings
from tests._checkpoints import make_model
from tests._training import ShardedTrainer


def test_they_come_from_a_command_line_and_a_file(tmp_path, capsys):
    parser = HfArgumentParser((TrainingArguments, TrainerSettings))
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--blocking", "false", "--checksums", "--ema_decay", "0.9"]
    _, from_words = parser.parse_args_into_dataclasses([*words, "--report_estimate", "run.jsonl"])
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: run\nuse_cpu: true\nblocking: false\nchecksums: true\nema_decay: 0.9\n")
    _, from_file = parser.parse_yaml_file(str(file))
    assert from_words == TrainerSettings(blocking=False, checksums=True, ema_decay=0.9, report_estimate="run.jsonl")
    assert from_file == TrainerSettings(blocking=False, checksums=True, ema_decay=0.9)
    assert all(action.help for action in parser._actions if action.dest in vars(from_file))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ema_decay": 1.0}, "ema_decay is 1; give at least 0 and less than 1"),
        ({"ema_decay": 0.9, "ema_device": "disk"}, "ema_device is 'disk'; give cpu"),
        ({"ema_device": "cpu"}, "ema_device needs ema_decay"),
    ],
)
def test_what_cannot_be_is_refused_when_they_are_made(settings, said):
    with pytest.raises(ConfigError, match=said):
        TrainerSettings(**settings)


def test_a_trainer_has_those_of_its_class_or_its_own_and_changes_no_others(tmp_path):
    class Saving(ShardedTrainer):
        fsdp_settings = TrainerSettings(checksums=True)

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    first, second = (Saving(make_model("llama"), args) for _ in range(2))
    first.fsdp_settings.blocking = False
    assert first.fsdp_settings == TrainerSettings(checksums=True, blocking=False)
    assert second.fsdp_settings == Saving.fsdp_settings == TrainerSettings(checksums=True)
    own = Saving(make_model("llama"), args, fsdp_settings=TrainerSettings(allow_nan=True))
    assert own.fsdp_settings == TrainerSettings(allow_nan=True) and not ShardedTrainer.fsdp_settings.checksums
