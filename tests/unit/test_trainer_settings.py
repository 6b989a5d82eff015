"""Settings of the mixin: from a command line or a file, refused where they cannot be, and a copy for each trainer."""

from types import SimpleNamespace

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments

from hf_fsdp_tools import ConfigError, FSDPPlugin, TrainerSettings
from hf_fsdp_tools.integrations import reporting
from hf_fsdp_tools.integrations.reporting import Measured
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


def test_a_trainer_of_ones_own_is_estimated_as_it_ran(patch_inner):
    """By its arguments, adapter and batches; and a reason where nothing can be estimated."""
    from peft import LoraConfig, get_peft_model

    patch_inner(device_title=lambda device: "NVIDIA H100 80GB HBM3", rank_on_node=lambda: (0, 4))
    base = make_model("llama")
    model = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))
    known = {"num_processes": 4, "mixed_precision": "bf16", "parallelism_config": None}
    gpus = SimpleNamespace(device=torch.device("cuda"), state=SimpleNamespace(fsdp_plugin=FSDPPlugin()), **known)
    args = TrainingArguments("run", use_cpu=True, report_to=[], gradient_accumulation_steps=2)
    trainer = SimpleNamespace(model=model, args=args, accelerator=gpus)
    measured = Measured()
    measured.count({"input_ids": torch.zeros(3, 24, dtype=torch.long)})
    found = reporting._estimate(trainer, base, measured)
    expected = {
        "per_device_train_batch_size": 3,
        "max_length": 24,
        "gradient_accumulation_steps": 2,
        "num_processes": 4,
        "lora_r": 4,
    }
    expected |= {"lora_dropout": 0.1, "lora_target_modules": ("q_proj", "v_proj"), "loss": "full", "gpu": "h100-80gb"}
    assert expected.items() <= found["setup"].items() and found["peak_gb"] > 0
    args.optim = "no such"
    assert "no such" in reporting._estimate(trainer, base, measured)["none"]
    gpus.device = torch.device("cpu")
    assert reporting._estimate(trainer, base, measured) is None
