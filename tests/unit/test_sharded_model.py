"""A sharded model with an Accelerator, a Trainer and folders of other models, in one process: mistakes are named."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from peft import LoraConfig
from transformers import Trainer, TrainingArguments

from hf_fsdp_tools import ConfigError, FSDPTrainerMixin, from_pretrained, make_accelerator
from tests._checkpoints import full_state, make_checkpoint
from tests._training import ShardedTrainer

IDS = torch.arange(3, 11)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


def test_an_accelerator_is_refused_before_anything_is_loaded_and_names_of_torch_are_taken() -> None:
    for given, said in (
        ({"mixed_precison": "bf16"}, "no argument 'mixed_precison': did you mean mixed_precision"),
        ({"mixed_precision": "bf61"}, "mixed_precision='bf61' is no floating-point dtype"),
        ({"dynamo_backend": "indctor"}, "backend of torch.compile is 'indctor': unknown: did you mean inductor"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_accelerator(**given)
    accelerator = make_accelerator(mixed_precision="bfloat16", dynamo_backend=DynamoBackend.EAGER)
    assert accelerator.mixed_precision == "bf16" and accelerator.state.dynamo_plugin.backend is DynamoBackend.EAGER
    with pytest.raises(ConfigError, match=r"class Late\(Trainer, FSDPTrainerMixin\).*Late\(FSDPTrainerMixin, Trainer"):

        class Late(Trainer, FSDPTrainerMixin):
            pass


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", max_steps=2, **settings)


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": IDS[0], "labels": IDS[0]} for _ in range(8)]


def test_a_plain_trainer_or_accelerator_is_named_and_float16_told_once(folder: Path, tmp_path: Path) -> None:
    lora = LoraConfig(target_modules=["q_proj"])
    sharded = {"offload_policy": True}  # on one rank too
    for model in (from_pretrained(folder, **sharded), from_pretrained(folder, peft_config=lora, **sharded)):
        trainer = Trainer(model, arguments(tmp_path), train_dataset=rows())
        with pytest.raises(ConfigError, match=r"LlamaForCausalLM is sharded.*put FSDPTrainerMixin before the Trainer"):
            trainer.train()
    model = from_pretrained(folder, **sharded)
    with pytest.raises(ConfigError, match=r"In a loop, make the Accelerator with make_accelerator\(\)"):
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters()))
    model = from_pretrained(folder).half().train()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with torch.no_grad():
            model(IDS)
        model(IDS)
        model(IDS)
    said = " ".join(str(warning.message) for warning in told)
    assert said.count("weights of LlamaForCausalLM are float16") == 1


class OfItsOwn(Trainer):  # type: ignore[misc]  # transformers is not typed
    """A trainer whose Accelerator is made here."""

    kind: Any = property(lambda self: Accelerator)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator = self.kind(step_scheduler_with_optimizer=False)


def test_an_accelerator_is_ours_from_its_beginning_wherever_a_trainer_makes_it(folder: Path, tmp_path: Path) -> None:
    class OfAnotherKind(Accelerator):  # type: ignore[misc]  # accelerate is not typed
        pass

    class Ours(FSDPTrainerMixin, OfItsOwn):
        pass

    trainer = Ours(from_pretrained(folder), arguments(tmp_path), train_dataset=rows())
    assert isinstance(trainer.accelerator, Accelerator) and not trainer.accelerator.step_scheduler_with_optimizer
    trainer.train()
    trainer.accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "checkpoint_manifest.json").is_file(), "its methods are ours"
    Ours.kind = OfAnotherKind
    with pytest.raises(ConfigError, match=r"Ours makes a OfAnotherKind, which .* rules. Let create_accelerator"):
        Ours(from_pretrained(folder), arguments(tmp_path), train_dataset=rows())


def lora_of(folder: Path) -> Any:
    torch.manual_seed(3)
    return from_pretrained(folder, peft_config=LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))


def test_an_adapter_resumes_where_an_earlier_run_left_full_weights(folder: Path, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ShardedTrainer(from_pretrained(folder), arguments(tmp_path, **settings), train_dataset=rows()).train()
        whole = lora_of(folder)
        ShardedTrainer(whole, arguments(tmp_path, **settings), train_dataset=rows()).train()
    assert not (tmp_path / "checkpoint-1/model.safetensors").exists()
    shutil.rmtree(tmp_path / "checkpoint-2")
    again = lora_of(folder)
    ShardedTrainer(again, arguments(tmp_path, **settings), train_dataset=rows()).train(resume_from_checkpoint=True)
    for name, tensor in full_state(whole).items():
        assert torch.equal(tensor, full_state(again)[name]), name
