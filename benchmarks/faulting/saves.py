"""Every kind of save: the older one, the one that is struck, and what is found afterwards."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
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


Write = Callable[[Path, Path, Ready], str]
"""Saves to a folder, of the checkpoints `a` and `b` in another; the digest of what it saves. Every rank must call."""


@dataclass(frozen=True)
class Save:
    """One kind of save."""

    name: str
    first: Write
    """Makes the older save."""
    again: Write
    """Saves over it."""
    found: Callable[[Path, Path], list[str]]
    """A digest by each way to open the folder, or "error: …"."""


# ---- run by ranks ----


def save_first(kind: Save, models: Path, out: Path) -> str:
    return kind.first(models, out / "out", dist.barrier)


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


def save_model(
    source: str, max_shard_size: str, models: Path, out: Path, ready: Ready, *, eps: float | None = None
) -> str:
    """Model a or b; with `eps` of another config."""
    model = from_pretrained(models / source, accelerator=new_accelerator())
    model.config.rms_norm_eps = eps or model.config.rms_norm_eps
    ready()
    save_pretrained(model, out, max_shard_size=max_shard_size)
    return digest_of_model(model)


def find_model(models: Path, out: Path) -> list[str]:
    if (out / "adapter_config.json").exists():
        return find_adapter(models, out)
    return [
        tried(lambda: digest_of_model(AutoModelForCausalLM.from_pretrained(out))),
        tried(lambda: digest_of_model(from_pretrained(out, accelerator=new_accelerator()))),
        tried(lambda: by_index(out)),
    ]


def save_adapter(seed: int, alpha: int, models: Path, out: Path, ready: Ready) -> str:
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(seed)
    model = from_pretrained(models / "a", accelerator=new_accelerator(), peft_config=config)
    ready()
    save_pretrained(model, out)
    return digest_of_adapter(model)


def find_adapter(models: Path, out: Path) -> list[str]:
    base = AutoModelForCausalLM.from_pretrained(models / "a")
    return [
        tried(lambda: digest_of_adapter(PeftModel.from_pretrained(base, str(out)))),
        tried(lambda: digest_of_adapter(from_pretrained(out, accelerator=new_accelerator()))),
    ]


def digest_of_adapter(model: Any) -> str:
    values = ((name, parameter) for name, parameter in model.named_parameters() if "lora_" in name)
    return f"{digest_of_values(values)} {model.peft_config['default'].lora_alpha}"


# ---- save_state ----


def trained(models: Path, steps: int, state: Path | None = None) -> tuple[Any, str]:
    """The Accelerator, and the digest of its training, after some steps from the beginning or from a state."""
    accelerator = new_accelerator()
    model = from_pretrained(models / "a", accelerator=accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if state is not None:
        accelerator.load_state(state)
    for row in make_rows(steps):
        accelerator.backward(model(**{key: value[None] for key, value in row.items()}).loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, digest_of_training(model, optimizer)


def save_state(steps: int, models: Path, out: Path, ready: Ready) -> str:
    """`Accelerator.save_state` after some steps."""
    accelerator, digest = trained(models, steps)
    ready()
    accelerator.save_state(out)
    return digest


def find_state(models: Path, out: Path) -> list[str]:
    return [tried(lambda: trained(models, 0, out)[1])]


# ---- the Trainer ----


def save_by_trainer(rate: float, models: Path, out: Path, ready: Ready) -> str:
    """A Trainer that begins anew, and saves a checkpoint that an earlier run has saved."""
    args = arguments(out, save_strategy="steps", save_steps=1, max_steps=1, learning_rate=rate)
    model = from_pretrained(models / "a", accelerator=new_accelerator())
    trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(16))
    trainer.remove_callback(PrinterCallback)
    ready()
    trainer.train()
    return digest_of_values(trainer.model.named_parameters())


def find_checkpoint(models: Path, out: Path) -> list[str]:
    checkpoint = out / "checkpoint-1"
    if problem := problem_of(checkpoint):
        return [f"error: {problem}"]
    saved = lambda: from_pretrained(checkpoint, accelerator=new_accelerator()).named_parameters()  # noqa: E731
    return [tried(lambda: digest_of_values(saved()))]


def of_models(name: str, before: str, after: str, eps: float | None = None) -> Save:
    """Model b over model a; sizes of the older and the newer files."""
    return Save(name, partial(save_model, "a", before), partial(save_model, "b", after, eps=eps), find_model)


ADAPTER, TRAINER = partial(save_adapter, 1, 8), partial(save_by_trainer, 1e-2)
SAVES = (
    of_models("save_pretrained, as many files", SEVERAL, SEVERAL),
    of_models("save_pretrained, fewer files", SEVERAL, "120KB"),
    of_models("save_pretrained, files over one", ONE, SEVERAL),
    of_models("save_pretrained, one over files", SEVERAL, ONE),
    of_models("save_pretrained, one over one", ONE, ONE),
    of_models("save_pretrained, another config", SEVERAL, SEVERAL, eps=1e-3),
    of_models("save_pretrained, one over one, another config", ONE, ONE, eps=1e-3),
    Save("save_pretrained, files over an adapter", ADAPTER, partial(save_model, "b", SEVERAL), find_model),
    Save("save_pretrained, adapter", ADAPTER, partial(save_adapter, 2, 8), find_adapter),
    Save("save_pretrained, adapter of another config", ADAPTER, partial(save_adapter, 2, 32), find_adapter),
    Save("save_state, one name", partial(save_state, 1), partial(save_state, 2), find_state),
    Save(
        "Trainer, a number that exists", partial(save_by_trainer, 1e-2), partial(save_by_trainer, 1e-3), find_checkpoint
    ),
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
