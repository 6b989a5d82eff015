"""What transformers, PEFT and users' scripts see of a sharded model: class names, methods, copies of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from hf_fsdp_tools import (
    ConfigError,
    from_pretrained,
    make_accelerator,
    wait_for_saves,
)
from tests._checkpoints import make_checkpoint, randomize, tiny_config
from tests._dist import run_cases, run_ranks
from tests._training import apart, full_parameters

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
    part_of_a_state_dict_is_not_saved_by_accelerate,
    a_plain_state_dict_is_loaded_into_the_shards,
    images_and_texts_are_encoded_before_a_generation,
)


# ---- what the Trainer looks at ----


def make_llava(folder: Path) -> None:
    config = tiny_config("llava")
    config.image_token_index = 130
    randomize(AutoModelForImageTextToText.from_config(config)).save_pretrained(folder)


def test_what_scripts_call_on_a_model_works_on_shards(tmp_path: Path) -> None:
    make_checkpoint("t5", tmp_path / "t5")
    make_llava(tmp_path / "llava")
    run_ranks(run_cases, 2, OF_A_MODEL, make_checkpoint("llama", tmp_path))
