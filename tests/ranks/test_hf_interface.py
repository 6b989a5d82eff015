"""What transformers, PEFT and users' scripts see of a sharded model: class names, methods, copies of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, Trainer

from hf_fsdp_tools import (
    ConfigError,
    FSDPTrainerMixin,
    TrainerSettings,
    from_pretrained,
    make_accelerator,
    save_pretrained,
    wait_for_saves,
)
from tests._checkpoints import assert_same_tensors, full_state, lora, make_checkpoint, randomize, tiny_config
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, apart, arguments, full_parameters

ROWS = torch.arange(8 * 12).reshape(8, 12) % 90


def batch_of(row: int) -> dict[str, torch.Tensor]:
    return {"input_ids": ROWS[row : row + 2], "labels": ROWS[row : row + 2]}


def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def one_step(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(**batch_of(0)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


# ---- saving as scripts do ----


def the_last_line_of_an_example_saves(folder: Path) -> None:
    """`unwrapped_model.save_pretrained(…)` of accelerate's and transformers' examples, which every rank calls."""
    accelerator = make_accelerator(cpu=True)
    model: Any = one_step(accelerator.prepare(from_pretrained(folder, accelerator=accelerator)))
    expected = one_step(plain_model(folder))
    unwrapped: Any = accelerator.unwrap_model(model)
    main = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    unwrapped.save_pretrained(folder / "example", **main)
    state = accelerator.get_state_dict(model)
    unwrapped.save_pretrained(folder / "gathered", state_dict=state, **main)
    unwrapped.save_pretrained(folder / "without_main", state_dict=state)
    given = {"max_shard_size": "20KB", "safe_serialization": True, "push_to_hub": False}
    unwrapped.save_pretrained(str(folder / "parts"), blocking=False, **given)
    assert (report := wait_for_saves()) is not None and report.copied_bytes > 0, "it was written in the background"
    dist.barrier()
    assert len(list((folder / "parts").glob("*.safetensors"))) > 2
    for name in ("example", "gathered", "without_main", "parts"):
        again = plain_model(folder / name)
        assert apart(full_parameters(again), full_parameters(expected)) < 1e-6, name
        assert "rope_theta" in json.loads((folder / name / "config.json").read_text()), "the key of transformers 4"
    for asked in ({"safe_serialization": False}, {"variant": "fp16"}, {"misspelt": 1}):
        with pytest.raises(ConfigError, match=rf"cannot honour {next(iter(asked))}=.*on shards"):
            unwrapped.save_pretrained(folder / "refused", **asked)
    with pytest.raises(ConfigError, match=r"state_dict of shards .*Leave state_dict out"):
        unwrapped.save_pretrained(folder / "refused", state_dict=model.state_dict())
    assert not (folder / "refused").exists()


def an_adapter_saves_itself(folder: Path) -> None:
    adapted: Any = from_pretrained(folder, peft_config=lora())
    adapted.save_pretrained(folder / "adapter", is_main_process=dist.get_rank() == 0)
    state = full_state(adapted)
    adapted.save_pretrained(folder / "adapter_given", state_dict=state if dist.get_rank() == 0 else {})
    dist.barrier()
    for name in ("adapter", "adapter_given"):
        again = PeftModel.from_pretrained(plain_model(folder), folder / name)
        assert torch.equal(again(**batch_of(0)).logits, adapted(**batch_of(0)).logits), name
    with pytest.raises(ConfigError, match=r"cannot honour selected_adapters="):
        adapted.save_pretrained(folder / "refused", selected_adapters=["default"])


def part_of_a_state_dict_is_not_saved_by_accelerate(folder: Path) -> None:
    accelerator = make_accelerator(cpu=True)
    model = from_pretrained(folder, accelerator=accelerator)
    said = r"would hold rank 0's shards of 21 tensors \(first: .*embed_tokens.weight.*, \d+ of \d+ values"
    with pytest.raises(ConfigError, match=rf"best.pt' {said}(.|\n)*accelerator.get_state_dict\(model\)"):
        accelerator.save({"model": model.state_dict(), "epoch": 3}, folder / "best.pt")
    whole = accelerator.get_state_dict(model)
    accelerator.save({"model": whole, "epoch": 3}, folder / "best.pt")
    dist.barrier()
    saved = torch.load(folder / "best.pt")["model"]
    assert apart(saved, dict(plain_model(folder).state_dict())) == 0


# ---- other methods ----


def a_plain_state_dict_is_loaded_into_the_shards(folder: Path) -> None:
    model: Any = one_step(from_pretrained(folder))
    whole = {key: value.clone() for key, value in plain_model(folder).state_dict().items()}
    model(**batch_of(0))  # leaves units gathered, as before a backward pass
    assert str(model.load_state_dict(whole)) == "<All keys matched successfully>"
    assert apart(full_parameters(model), full_parameters(plain_model(folder))) == 0
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    one_step(model)
    assert apart(full_parameters(model), full_parameters(one_step(plain_model(folder)))) < 1e-6

    some = dict(whole, extra=torch.ones(1))
    del some["model.norm.weight"]
    with pytest.raises(RuntimeError, match=r'(?s)Unexpected key\(s\).*"extra".*Missing key|Missing key.*Unexpected'):
        model.load_state_dict(some)
    told = model.load_state_dict(some, strict=False)
    assert (told.missing_keys, told.unexpected_keys) == (["model.norm.weight"], ["extra"])
    with pytest.raises(RuntimeError, match=r"size mismatch for model\.norm\.weight"):
        model.load_state_dict(dict(whole, **{"model.norm.weight": torch.ones(3)}))


PICTURE = {
    "input_ids": torch.tensor([[1, *[130] * 16, *range(20, 30)]]),
    "pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32),
}
TEXT = {"input_ids": torch.arange(3, 12)[None], "decoder_input_ids": torch.arange(9)[None]}


ENCODED = [("llava", AutoModelForImageTextToText, PICTURE, LoraConfig(r=2, target_modules="all-linear"))]
ENCODED += [("t5", AutoModelForSeq2SeqLM, TEXT, None)]


def images_and_texts_are_encoded_before_a_generation(folder: Path) -> None:
    """Which transformers does outside of the model's own forward pass; in inference mode too."""
    for name, auto_class, inputs, peft_config in ENCODED:
        model: Any = from_pretrained(folder / name, auto_class=auto_class, peft_config=peft_config)
        plain = auto_class.from_pretrained(folder / name)
        with torch.inference_mode():
            asked = {"max_new_tokens": 5, "do_sample": False, "decoder_start_token_id": 0}
            made = [each.generate(**inputs, **asked) for each in (model, plain)]
        assert torch.equal(*made), name
        assert not [n for n, each in model.named_parameters() if not isinstance(each, DTensor)], name
        model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
        with pytest.raises(ValueError, match="nonsense"):
            model.generate(**inputs, **asked, nonsense=1)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "after an error too"


OF_A_MODEL = (
    the_last_line_of_an_example_saves,
    an_adapter_saves_itself,
    part_of_a_state_dict_is_not_saved_by_accelerate,
    a_plain_state_dict_is_loaded_into_the_shards,
    images_and_texts_are_encoded_before_a_generation,
)


# ---- models of other libraries ----


class Encoder(nn.Module):
    """A transformers model and a layer of its own, in a format of its own, as sentence-transformers has them."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.dense = body, nn.Linear(48, 6)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.dense(self.body(input_ids=input_ids).last_hidden_state).square().mean()}

    def save_pretrained(self, path: str) -> None:
        folder = Path(path)
        self.body.save_pretrained(path, safe_serialization=True)
        (folder / "1_dense").mkdir(parents=True)
        save_file(self.dense.state_dict(), folder / "1_dense" / "model.safetensors")
        (folder / "modules.json").write_text(json.dumps([type(module).__name__ for module in self.children()]))
        with pytest.raises(ConfigError, match="is being saved by rank 0, which cannot run it without the others"):
            self(**batch_of(0))  # for an example in a model card

    @classmethod
    def open(cls, path: Path) -> "Encoder":
        assert json.loads((path / "modules.json").read_text()) == ["LlamaModel", "Linear"]
        model = cls(AutoModel.from_pretrained(path))
        model.dense.load_state_dict(load_file(path / "1_dense" / "model.safetensors"))
        return model


class LibraryTrainer(Trainer):
    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        self.model.load_state_dict(Encoder.open(Path(checkpoint_path)).state_dict())


class ShardedLibraryTrainer(FSDPTrainerMixin, LibraryTrainer):
    fsdp_settings = TrainerSettings(blocking=False)  # the files of the library are written before training goes on


def a_librarys_own_files_are_saved_and_resumed(folder: Path) -> None:
    args = arguments(folder / "run", max_steps=2, save_strategy="steps", save_steps=2)
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    torch.manual_seed(0)
    model = Encoder(AutoModel.from_pretrained(folder))
    trainer = ShardedLibraryTrainer(model=model, args=args, train_dataset=data)
    trainer.train()
    trainer.save_model(str(folder / "run" / "last"))
    model.save_pretrained(str(folder / "run" / "own"))  # type: ignore[operator]
    report = save_pretrained(model, folder / "run" / "ours", model_card=True)
    assert report.files == ("model.safetensors",) and set(report.others) == {
        "config.json", "modules.json", "1_dense/model.safetensors", "README.md",
    }  # fmt: skip
    assert "library_name: tests\n" in (folder / "run" / "ours" / "README.md").read_text()
    trained = full_parameters(model)
    for name in ("last", "own", "ours", "checkpoint-2"):
        assert_same_tensors(Encoder.open(folder / "run" / name).state_dict(), trained, name)
    other = Encoder(AutoModel.from_pretrained(folder))
    again = ShardedLibraryTrainer(model=other, args=args, train_dataset=data)
    again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    assert apart(full_parameters(other), trained) == 0.0


# ---- what the Trainer looks at ----


def smoothed_loss(cls: type[Trainer], model: nn.Module, folder: Path, rows: int) -> float:
    args = arguments(folder / "out", label_smoothing_factor=0.2, per_device_train_batch_size=rows, max_steps=1)
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer: Any = cls(model=model, args=args, train_dataset=data)
    return float(trainer.train().training_loss)


def a_sharded_model_looks_like_the_model_that_it_is(folder: Path) -> float:
    model: Any = from_pretrained(folder)
    assert (type(model).__name__, type(model.model.layers[0]).__name__) == ("LlamaForCausalLM", "LlamaDecoderLayer")
    trained: Any = from_pretrained(folder, activation_checkpointing=True)
    assert trained.config.use_cache is False
    save_pretrained(trained, folder / "trained")
    assert trained.config.use_cache is False
    dist.barrier()
    written = json.loads((folder / "trained" / "config.json").read_text())
    assert written["use_cache"] is True, "as it was before training"
    return smoothed_loss(ShardedTrainer, model, folder, 4)


CASES = (*OF_A_MODEL, a_librarys_own_files_are_saved_and_resumed, a_sharded_model_looks_like_the_model_that_it_is)


def make_llava(folder: Path) -> None:
    config = tiny_config("llava")
    config.image_token_index = 130
    randomize(AutoModelForImageTextToText.from_config(config)).save_pretrained(folder)


def test_what_scripts_call_on_a_model_works_on_shards(tmp_path: Path) -> None:
    make_checkpoint("t5", tmp_path / "t5")
    make_llava(tmp_path / "llava")
    ranks = run_ranks(run_cases, 2, CASES, make_checkpoint("llama", tmp_path))
    loss = smoothed_loss(Trainer, plain_model(tmp_path), tmp_path, 8)  # labels are shifted: its name says it is causal
    losses = [results["a sharded model looks like the model that it is"] for results in ranks]
    assert sum(losses) / 2 == pytest.approx(loss, rel=1e-6)  # each reports its own rows
