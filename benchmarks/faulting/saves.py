"""Every kind of save: the older one, the one that is struck, and what is found afterwards."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PrinterCallback

from hf_fsdp_tools import from_pretrained, save_pretrained
from hf_fsdp_tools.integrations.checkpoints import problem_of
from tests._checkpoints import full
from tests._training import ShardedTrainer, arguments, make_rows, new_accelerator

from .replay import begin

Ready = Callable[[], None]
"""Called on every rank just before the save that is struck."""

SEVERAL, ONE = "60KB", "1GB"


@dataclass(frozen=True)
class Save:
    """One kind of save. All functions run on every rank; `models` holds the checkpoints `a` and `b`."""

    name: str

    def first(self, models: Path, out: Path) -> str:
        """Make the older save in a folder; its digest."""
        raise NotImplementedError  # abstract: each kind has its own

    def again(self, models: Path, out: Path, ready: Ready) -> str:
        """Save over it; the digest of what it saves."""
        raise NotImplementedError  # abstract: each kind has its own

    def found(self, models: Path, out: Path) -> list[str]:
        """A digest by each way to open the folder, or "error: …"."""
        raise NotImplementedError  # abstract: each kind has its own


# ---- run by ranks ----


def save_first(kind: Save, models: Path, out: Path) -> str:
    return kind.first(models, out / "out")


def save_noted(kind: Save, models: Path, out: Path, notes: Path) -> str:
    """Save over it, with all calls noted; the digest of what was saved."""

    def ready() -> None:
        dist.barrier()
        begin(out, notes)

    return kind.again(models, out / "out", ready)


def look_at(kind: Save, models: Path, outs: list[Path]) -> list[tuple[list[str], int]]:
    """What each way of opening finds in each folder, and how many hidden bytes are left after one more save."""
    looks = []
    for out in outs:
        found = kind.found(models, out / "out")
        kind.again(models, out / "out", dist.barrier)
        hidden = (path for path in out.rglob(".*") if path.name != ".metadata")  # which is DCP's
        left = sum(file.stat().st_size for path in hidden for file in (path, *path.rglob("*")) if file.is_file())
        looks.append((found, left))
    return looks


def tried(look: Callable[[], str]) -> str:
    try:
        return look()
    except Exception as error:
        return f"error: {type(error).__name__}: {str(error)[:300]}"


# ---- save_pretrained ----


def digest_of_model(model: Any) -> str:
    """Of all values, and of the one setting that another config has otherwise."""
    return f"{digest_of_values(model.named_parameters())} {model.config.rms_norm_eps}"


def by_index(out: Path) -> str:
    """What a reader finds that follows the index and knows nothing of transformers."""
    model = LlamaForCausalLM(LlamaConfig(**json.loads((out / "config.json").read_text())))
    index = out / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    model.load_state_dict({key: value for file in files for key, value in load_file(out / file).items()}, strict=False)
    return digest_of_model(model)


@dataclass(frozen=True)
class Adapter(Save):
    """`save_pretrained` of one adapter over another; of another `lora_alpha`."""

    alpha: int = 8

    def _saved(self, models: Path, out: Path, ready: Ready, seed: int, alpha: int) -> str:
        config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(seed)
        model = from_pretrained(models / "a", accelerator=new_accelerator(), peft_config=config)
        ready()
        save_pretrained(model, out)
        return digest_of_adapter(model)

    def first(self, models: Path, out: Path) -> str:
        return self._saved(models, out, dist.barrier, 1, 8)

    def again(self, models: Path, out: Path, ready: Ready) -> str:
        return self._saved(models, out, ready, 2, self.alpha)

    def found(self, models: Path, out: Path) -> list[str]:
        base = AutoModelForCausalLM.from_pretrained(models / "a")
        return [
            tried(lambda: digest_of_adapter(PeftModel.from_pretrained(base, str(out)))),
            tried(lambda: digest_of_adapter(from_pretrained(out, accelerator=new_accelerator()))),
        ]


def digest_of_adapter(model: Any) -> str:
    values = ((name, parameter) for name, parameter in model.named_parameters() if "lora_" in name)
    return f"{digest_of_values(values)} {model.peft_config['default'].lora_alpha}"


@dataclass(frozen=True)
class Model(Save):
    """`save_pretrained` of model b over model a."""

    before: str | None
    """Size of the older shards; None for an adapter."""
    after: str
    eps: float | None = None
    """Of another config."""

    def first(self, models: Path, out: Path) -> str:
        if self.before is None:
            return Adapter(self.name).first(models, out)
        model = from_pretrained(models / "a", accelerator=new_accelerator())
        save_pretrained(model, out, max_shard_size=self.before)
        return digest_of_model(model)

    def again(self, models: Path, out: Path, ready: Ready) -> str:
        model = from_pretrained(models / "b", accelerator=new_accelerator())
        model.config.rms_norm_eps = self.eps or model.config.rms_norm_eps
        ready()
        save_pretrained(model, out, max_shard_size=self.after)
        return digest_of_model(model)

    def found(self, models: Path, out: Path) -> list[str]:
        if (out / "adapter_config.json").exists():
            return Adapter(self.name).found(models, out)
        return [
            tried(lambda: digest_of_model(AutoModelForCausalLM.from_pretrained(out))),
            tried(lambda: digest_of_model(from_pretrained(out, accelerator=new_accelerator()))),
            tried(lambda: by_index(out)),
        ]


# ---- save_state ----


@dataclass(frozen=True)
class State(Save):
    """`Accelerator.save_state` after one step, and after two."""

    def _after(self, models: Path, out: Path, steps: int, *, load: bool = False) -> tuple[Any, str]:
        """The Accelerator, and the digest of its training, after some steps."""
        accelerator = new_accelerator()
        model = from_pretrained(models / "a", accelerator=accelerator)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        if load:
            accelerator.load_state(out)
        for row in make_rows(steps):
            accelerator.backward(model(**{key: value[None] for key, value in row.items()}).loss)
            optimizer.step()
            optimizer.zero_grad()
        return accelerator, digest_of_training(model, optimizer)

    def first(self, models: Path, out: Path) -> str:
        accelerator, digest = self._after(models, out, 1)
        accelerator.save_state(out)
        return digest

    def again(self, models: Path, out: Path, ready: Ready) -> str:
        accelerator, digest = self._after(models, out, 2)
        ready()
        accelerator.save_state(out)
        return digest

    def found(self, models: Path, out: Path) -> list[str]:
        return [tried(lambda: self._after(models, out, 0, load=True)[1])]


# ---- the Trainer ----


def quiet_trainer(models: Path, args: Any) -> ShardedTrainer:
    """A Trainer of model a that prints no log."""
    model = from_pretrained(models / "a", accelerator=new_accelerator())
    trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(16))
    trainer.remove_callback(PrinterCallback)
    return trainer


class NumberThatExists(Save):
    """A Trainer that begins anew and saves a checkpoint that an earlier run has saved."""

    def _train(self, models: Path, out: Path, rate: float, ready: Ready) -> str:
        args = arguments(out, save_strategy="steps", save_steps=1, max_steps=1, learning_rate=rate)
        trainer = quiet_trainer(models, args)
        ready()
        trainer.train()
        return digest_of_values(trainer.model.named_parameters())

    def first(self, models: Path, out: Path) -> str:
        return self._train(models, out, 1e-2, dist.barrier)

    def again(self, models: Path, out: Path, ready: Ready) -> str:
        return self._train(models, out, 1e-3, ready)

    def found(self, models: Path, out: Path) -> list[str]:
        checkpoint = out / "checkpoint-1"
        if problem := problem_of(checkpoint):
            return [f"error: {problem}"]
        saved = lambda: from_pretrained(checkpoint, accelerator=new_accelerator()).named_parameters()  # noqa: E731
        return [tried(lambda: digest_of_values(saved()))]


SAVES = (
    Model("save_pretrained, as many files", SEVERAL, SEVERAL),
    Model("save_pretrained, fewer files", SEVERAL, "120KB"),
    Model("save_pretrained, files over one", ONE, SEVERAL),
    Model("save_pretrained, one over files", SEVERAL, ONE),
    Model("save_pretrained, one over one", ONE, ONE),
    Model("save_pretrained, another config", SEVERAL, SEVERAL, eps=1e-3),
    Model("save_pretrained, one over one, another config", ONE, ONE, eps=1e-3),
    Model("save_pretrained, files over an adapter", None, SEVERAL),
    Adapter("save_pretrained, adapter"),
    Adapter("save_pretrained, adapter of another config", alpha=32),
    State("save_state, one name"),
    NumberThatExists("Trainer, a number that exists"),
)


# ---- digests ----


def digest_of_values(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of all values, gathered. Every rank must call."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        found.update(name.encode() + full(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def digest_of_training(model: nn.Module, optimizer: Any) -> str:
    """A hash of weights and optimizer state."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = [
        (f"{names[parameter]} {key}", value)
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    ]
    return digest_of_values([*model.named_parameters(), *state])
