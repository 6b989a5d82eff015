"""Every kind of save: the older one, the one that is struck, and what is found afterwards."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback

from hf_fsdp_tools import CheckpointError, from_pretrained, save_pretrained, wait_for_saves
from hf_fsdp_tools.integrations.checkpoints import problem_of
from tests._checkpoints import full
from tests._training import ShardedTrainer, arguments, make_rows, new_accelerator

from .replay import begin, seen

__all__ = [
    "ENDS",
    "SAVES",
    "Save",
    "digest_of_training",
    "digest_of_values",
    "look_at",
    "quiet_trainer",
    "save_first",
    "save_struck",
    "train_and_save",
]

Ready = Callable[[], None]
"""Called on every rank just before the save that is struck."""

STEPS = 4
_SEVERAL, _ONE = "60KB", "1GB"


@dataclass(frozen=True)
class Save:
    """One kind of save. All functions run on every rank; `models` holds the checkpoints `a` and `b`."""

    name: str
    first: Callable[[Path, Path], str]
    """Makes the older save in a folder; its digest."""

    again: Callable[[Path, Path, Ready], str]
    """Saves over it; the digest of what it saves."""

    found: Callable[[Path, Path], list[str]]
    """A digest by each way to open the folder, or "error: …"."""


# ---- run by ranks ----


def save_first(kind: Save, models: Path, out: Path) -> str:
    return kind.first(models, out / "out")


def save_struck(
    kind: Save, models: Path, out: Path, notes: Path, struck: tuple[int, str, int] | None = None
) -> tuple[str, int]:
    """The digest of what was saved, and how many calls this rank had. Struck are a rank, by what, at which call."""

    def ready() -> None:
        dist.barrier()
        mine = struck is not None and struck[0] == dist.get_rank()
        begin(out, notes, *(struck[1:] if struck is not None and mine else ()))

    return kind.again(models, out / "out", ready), seen()


def look_at(kind: Save, models: Path, outs: list[Path]) -> list[tuple[list[str], int]]:
    """What each way of opening finds in each folder, and how many hidden bytes are left after one more save."""
    looks = []
    for out in outs:
        found = kind.found(models, out / "out")
        left = 0
        if kind.first is not _nothing:
            kind.again(models, out / "out", dist.barrier)
            wait_for_saves()
            left = sum(path.stat().st_size for path in out.rglob("*") if path.is_file() and _is_hidden(path, out))
        looks.append((found, left))
    return looks


def _is_hidden(path: Path, root: Path) -> bool:
    """Whether a file is what a save leaves; the metadata of DCP is hidden too, and belongs there."""
    return path.name != ".metadata" and any(part.startswith(".") for part in path.relative_to(root).parts)


# ---- save_pretrained ----


def _digest_of(model: Any) -> str:
    """Of all values, and of the one setting that another config has otherwise."""
    return f"{digest_of_values(model.named_parameters())} {model.config.rms_norm_eps}"


def _save_model(models: Path, name: str, out: Path, size: str) -> str:
    model = from_pretrained(models / name, accelerator=new_accelerator())
    save_pretrained(model, out, max_shard_size=size)
    return _digest_of(model)


def _by_index(out: Path) -> str:
    """What a reader finds that follows the index and knows nothing of transformers."""
    model = LlamaForCausalLM(LlamaConfig(**json.loads((out / "config.json").read_text())))
    index = out / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    model.load_state_dict({key: value for file in files for key, value in load_file(out / file).items()}, strict=False)
    return _digest_of(model)


def _found_whole(models: Path, out: Path) -> list[str]:
    if (out / "adapter_config.json").exists():
        return _adapter_found(models, out)
    roads = (
        lambda: AutoModelForCausalLM.from_pretrained(out),
        lambda: from_pretrained(out, accelerator=new_accelerator()),
    )
    return [*(_tried(lambda road=road: _digest_of(road())) for road in roads), _tried(lambda: _by_index(out))]


@dataclass(frozen=True)
class _Whole:
    """`save_pretrained` of model b over model a; in the background, with or without `wait_for_saves`."""

    before: str | None
    """Size of the older shards; None for an adapter."""
    after: str
    blocking: bool = True
    waits: bool = True
    eps: float | None = None
    """Of another config."""

    def first(self, models: Path, out: Path) -> str:
        return _adapter_first(models, out) if self.before is None else _save_model(models, "a", out, self.before)

    def again(self, models: Path, out: Path, ready: Ready) -> str:
        model = from_pretrained(models / "b", accelerator=new_accelerator())
        model.config.rms_norm_eps = self.eps or model.config.rms_norm_eps
        ready()
        save_pretrained(model, out, max_shard_size=self.after, blocking=self.blocking)
        if self.waits:
            wait_for_saves()
        return _digest_of(model)

    def found(self, models: Path, out: Path) -> list[str]:
        return _found_whole(models, out)


def _adapted(models: Path, seed: int, alpha: int = 8) -> nn.Module:
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(seed)
    return from_pretrained(models / "a", accelerator=new_accelerator(), peft_config=config)


def _adapter_first(models: Path, out: Path) -> str:
    model = _adapted(models, 1)
    save_pretrained(model, out)
    return _digest_of_adapter(model)


def _adapter_again(models: Path, out: Path, ready: Ready, alpha: int = 8) -> str:
    model = _adapted(models, 2, alpha)
    ready()
    save_pretrained(model, out)
    return _digest_of_adapter(model)


def _other_adapter(models: Path, out: Path, ready: Ready) -> str:
    return _adapter_again(models, out, ready, alpha=32)


def _digest_of_adapter(model: Any) -> str:
    return f"{digest_of_values(_adapter_of(model))} {model.peft_config['default'].lora_alpha}"


def _adapter_found(models: Path, out: Path) -> list[str]:
    def plainly() -> str:
        base = AutoModelForCausalLM.from_pretrained(models / "a")
        return _digest_of_adapter(PeftModel.from_pretrained(base, str(out)))

    ours = _tried(lambda: _digest_of_adapter(from_pretrained(out, accelerator=new_accelerator())))
    return [_tried(plainly), ours]


def _adapter_of(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if "lora_" in name)


# ---- save_state ----


@dataclass(frozen=True)
class _State:
    """`Accelerator.save_state` after one step, and after two."""

    automatic: bool
    blocking: bool = True

    def _after(self, models: Path, out: Path, steps: int, *, load: bool = False) -> tuple[Any, str]:
        """The Accelerator, and the digest of its training, after some steps."""
        naming = ProjectConfiguration(str(out), automatic_checkpoint_naming=self.automatic, total_limit=2)
        accelerator = new_accelerator(project_config=naming)
        model = from_pretrained(models / "a", accelerator=accelerator)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        if load:
            accelerator.load_state(None if self.automatic else out)
        for row in make_rows(steps):
            accelerator.backward(model(**{key: value[None] for key, value in row.items()}).loss)
            optimizer.step()
            optimizer.zero_grad()
        return accelerator, digest_of_training(model, optimizer)

    def first(self, models: Path, out: Path) -> str:
        accelerator, digest = self._after(models, out, 1)
        for _ in range(2 if self.automatic else 1):  # under automatic naming, the next save deletes the first
            accelerator.save_state(None if self.automatic else out)
        return digest

    def again(self, models: Path, out: Path, ready: Ready) -> str:
        accelerator, digest = self._after(models, out, 2)
        numbers = [int(path.name.rpartition("_")[2]) for path in out.glob("checkpoints/checkpoint_*")]
        accelerator.project_configuration.iteration = 1 + max(numbers, default=-1)
        ready()
        accelerator.save_state(None if self.automatic else out, blocking=self.blocking)
        wait_for_saves()
        return digest

    def found(self, models: Path, out: Path) -> list[str]:
        return [_tried(lambda: self._after(models, out, 0, load=True)[1])]


# ---- the Trainer ----


class _Saves(TrainerCallback):
    """Notes in a file outside of the folder which checkpoints were said to be saved."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            with open(self.notes, "a") as stream:
                stream.write(f"{state.global_step}\n")


def quiet_trainer(models: Path, args: Any, **settings: Any) -> ShardedTrainer:
    """A Trainer of model a that prints no log."""
    model = from_pretrained(models / "a", accelerator=new_accelerator())
    trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(16), **settings)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _nothing(models: Path, out: Path) -> str:
    return "nothing"


@dataclass(frozen=True)
class _Training:
    """A Trainer that saves after every step, and goes on from the last checkpoint."""

    limit: int
    blocking: bool = True

    def _trainer(self, models: Path, out: Path) -> Any:
        settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": self.limit, "max_steps": STEPS}
        trainer = quiet_trainer(models, arguments(out, **settings), callbacks=[_Saves(out.with_suffix(".notes"))])
        trainer.blocking = self.blocking
        return trainer

    def again(self, models: Path, out: Path, ready: Ready) -> str:
        trainer = self._trainer(models, out)
        ready()
        trainer.train()
        return digest_of_training(trainer.model, trainer.optimizer)

    def found(self, models: Path, out: Path) -> list[str]:
        def resumed() -> str:
            trainer = self._trainer(models, out)
            notes = out.with_suffix(".notes")
            # In the background, the last one that was begun need not be complete.
            saved_before = notes.exists() and len(notes.read_text().split()) > (0 if self.blocking else 1)
            try:
                trainer.train(resume_from_checkpoint=True)
            except (CheckpointError, ValueError):
                if saved_before:
                    raise
                return "nothing"  # no save was complete yet
            return digest_of_training(trainer.model, trainer.optimizer)

        return [_tried(resumed)]


class _NumberThatExists:
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
        return [_tried(lambda: digest_of_values(saved()))]


def train_and_save(models: Path, out: Path) -> None:
    """A state of Accelerate's (`state`) and a Trainer's checkpoints (`out/checkpoint-2`), after two steps."""
    _State(False).again(models, out / "state", dist.barrier)
    quiet_trainer(models, arguments(out / "out", save_strategy="steps", save_steps=2, max_steps=2)).train()


def _kind(name: str, of: Any) -> Save:
    return Save(name, getattr(of, "first", _nothing), of.again, of.found)


SAVES = {
    save.name: save
    for save in (
        _kind("save_pretrained, as many files", _Whole(_SEVERAL, _SEVERAL)),
        _kind("save_pretrained, fewer files", _Whole(_SEVERAL, "120KB")),
        _kind("save_pretrained, files over one", _Whole(_ONE, _SEVERAL)),
        _kind("save_pretrained, one over files", _Whole(_SEVERAL, _ONE)),
        _kind("save_pretrained, one over one", _Whole(_ONE, _ONE)),
        _kind("save_pretrained, another config", _Whole(_SEVERAL, _SEVERAL, eps=1e-3)),
        _kind("save_pretrained, one over one, another config", _Whole(_ONE, _ONE, eps=1e-3)),
        _kind("save_pretrained, files over an adapter", _Whole(None, _SEVERAL)),
        Save("save_pretrained, adapter", _adapter_first, _adapter_again, _adapter_found),
        Save("save_pretrained, adapter of another config", _adapter_first, _other_adapter, _adapter_found),
        _kind("save_state, one name", _State(False)),
        _kind("save_state, total_limit=2", _State(True)),
        _kind("Trainer, save_total_limit=2", _Training(2)),
        _kind("Trainer, save_total_limit=1", _Training(1)),
        _kind("Trainer, a number that exists", _NumberThatExists()),
        _kind("save_pretrained, blocking=False", _Whole(_SEVERAL, _SEVERAL, blocking=False)),
        _kind("save_state, blocking=False", _State(False, blocking=False)),
        _kind("Trainer, blocking = False", _Training(2, blocking=False)),
    )
}

ENDS = _kind(
    "save_pretrained, blocking=False, and the script ends", _Whole(_SEVERAL, _SEVERAL, blocking=False, waits=False)
)
"""A save that nobody waits for."""


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


def _tried(look: Callable[[], str]) -> str:
    try:
        return look()
    except Exception as error:
        return f"error: {type(error).__name__}: {str(error)[:300]}"
