"""Moving averages on shards: those of one process bit for bit, saved, applied, resumed on another number of ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint import load, save
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback

from hf_fsdp_tools import (
    CheckpointError,
    ConfigError,
    ParallelDims,
    ParameterEMA,
    WrapPolicy,
    from_pretrained,
    make_accelerator,
    resize_token_embeddings,
    save_pretrained,
)
from tests._checkpoints import assert_same_tensors, full, plain_model, stored_tensors
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, make_rows, new_accelerator
from tests.api import Held

DECAY, STEPS = 0.9, 2
LORA = {"r": 3, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}


def step(model: Any, number: int) -> None:
    """Change each parameter that is trained by noise that its name gives."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            seed = number + sum(map(ord, name))
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)).to(parameter.dtype)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.detach().add_(Held.of(parameter).part_of(noise) if isinstance(parameter, DTensor) else noise)


def expected(kind: str, folder: Path, way: str) -> dict[str, torch.Tensor]:
    """Averages of a plain model by torch's own class."""
    model: Any = plain_model(kind, folder)
    if way == "lora":
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(**LORA))
        for name, parameter in model.named_parameters():  # as in `averaged`
            if "lora_" in name:
                parameter.data.fill_(0.5)
    elif way == "bf16":
        model.to(torch.bfloat16)
    values = [p.detach().float() for p in model.parameters() if p.requires_grad]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    averages = AveragedModel(torch.nn.ParameterList(values), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averages.update_parameters(torch.nn.ParameterList(values))
    for number in range(STEPS):
        step(model, number)
        now = [p.detach().float() for p in model.parameters() if p.requires_grad]
        averages.update_parameters(torch.nn.ParameterList(now))
    return dict(zip(names, (p.detach() for p in averages.module), strict=True))


WAYS = {
    "sharded": ("llama", {}),
    "tied": ("tied", {"policy": WrapPolicy(replicate=("model.norm.weight",))}),
    "lora": ("llama", {"peft_config": LORA}),
    "bf16": ("llama", {"dtype": "bf16", "mesh": ParallelDims(dp_replicate_size=2)}),
}
"""(kind of checkpoint, options of `from_pretrained`)."""


def averaged(way: str, folders: dict[str, Path], root: Path) -> dict[str, torch.Tensor]:
    """Averages after some steps; applied, saved and loaded again on the way."""
    kind, options = WAYS[way]
    model = from_pretrained(folders[kind], **options)
    if way == "lora":
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.to_local().detach().fill_(0.5)
    ema = ParameterEMA(model, DECAY, device="cpu" if way == "tied" else None)
    for number in range(STEPS):
        step(model, number)
        ema.step()
    found = {name: full(value).clone() for name, value in ema.state_dict().items()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: full(p).clone() for name, p in trained.items()}
    out = root / way
    with ema.applied():
        save_pretrained(model, out / "saved")
        now = {name: full(p).clone() for name, p in trained.items()}
        with pytest.raises(ConfigError, match=r"Leave the block of applied\(\)"):
            ema.step()
    for name, value in found.items():
        assert torch.equal(now[name], value.to(now[name].dtype)), name
        assert torch.equal(full(trained[name]), before[name]), name
        assert torch.equal(full(ema.state_dict()[name]), value), name
    save({"ema": ema}, checkpoint_id=out / "state")
    fresh = ParameterEMA(model, 0.5)
    load({"ema": fresh}, checkpoint_id=out / "state")
    assert_same_tensors({name: full(value) for name, value in fresh.state_dict().items()}, found)
    return found


def refused(folders: dict[str, Path], root: Path) -> None:
    model = from_pretrained(folders["llama"])
    with pytest.raises(ConfigError, match=r"decay is 1; give a number of at least 0 and below 1"):
        ParameterEMA(model, 1)
    accelerator = new_accelerator()
    accelerator.register_for_checkpointing(ParameterEMA(model))
    with pytest.raises(ConfigError, match=r"ParameterEMA, which is registered for checkpointing, has shards"):
        accelerator.save_state(str(root / "state"))
    ema = ParameterEMA(model)
    resize_token_embeddings(model, 140)
    for use in (ema.step, ema.state_dict, lambda: ema.applied().__enter__()):
        with pytest.raises(ConfigError, match=r"embed_tokens.weight.* was resized or sharded since"):
            use()
    with pytest.raises(ConfigError, match="trains nothing"):
        ParameterEMA(model.requires_grad_(False))


def trainer(folders: dict[str, Path], out: Path, **settings: Any) -> Any:
    model = from_pretrained(folders["tied"], accelerator=make_accelerator(cpu=True))
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 1} | settings
    rows = make_rows(16)
    made: Any = ShardedTrainer(model, arguments(out, **settings), train_dataset=rows, eval_dataset=rows[:4])
    made.fsdp_settings.ema_decay = DECAY
    return made


def whole(made: Any) -> dict[str, torch.Tensor]:
    return {name: full(value).clone() for name, value in made.ema.state_dict().items()}


class Noting(TrainerCallback):
    def __init__(self, made: Any) -> None:
        self.made, made.noted = made, None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.made.noted = self.made.noted or whole(self.made)


def of_a_trainer(folders: dict[str, Path], root: Path) -> list[dict[str, torch.Tensor]]:
    """At the end; and where a second run goes on in the middle, at once and at its end."""
    made = trainer(folders, root / "run")
    made.train()
    end = whole(made)
    going_on = trainer(folders, root / "on")
    going_on.fsdp_settings.blocking = False
    going_on.add_callback(Noting(going_on))
    going_on.train(resume_from_checkpoint=str(root / "run" / "checkpoint-2"))
    return [end, going_on.noted, whole(going_on)]


def goes_on_elsewhere(folders: dict[str, Path], root: Path) -> dict[str, torch.Tensor]:
    """On another number of ranks; and what says that a state has no averages."""
    made = trainer(folders, root / "elsewhere", max_steps=3)
    made.add_callback(Noting(made))
    made.train(resume_from_checkpoint=str(root / "run" / "checkpoint-2"))
    without = trainer(folders, root / "without", max_steps=2)
    without.fsdp_settings.ema_decay = None
    without.train()
    lacking = trainer(folders, root / "lacking", max_steps=2)
    with pytest.raises(CheckpointError, match=r"lacks the moving averages \(ema_state/.metadata\)"):
        lacking.train(resume_from_checkpoint=str(root / "without" / "checkpoint-2"))
    return made.noted


def test_averages_on_shards_are_those_of_one_process_bit_for_bit(folders, tmp_path):
    ways = {way: partial(averaged, way) for way in WAYS}
    cases = ways | {"trainer": of_a_trainer, "refused": refused}
    found = run_ranks(run_cases, 2, cases, folders, tmp_path)
    for way, (kind, _) in WAYS.items():
        right = expected(kind, folders[kind], way)
        for rank in found:
            assert_same_tensors(rank[way], right, way)
        if way == "sharded":
            saved = stored_tensors(tmp_path / way / "saved")
            assert all(torch.equal(value, saved[name]) for name, value in right.items())
    end, middle, again = found[0]["trainer"]
    assert_same_tensors(again, end, "resumed to the bit")
    assert any(not torch.equal(middle[name], value) for name, value in end.items())
    assert_same_tensors(run_ranks(goes_on_elsewhere, 1, folders, tmp_path)[0], middle)
