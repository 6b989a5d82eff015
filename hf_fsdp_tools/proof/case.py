"""A tiny model of a configuration's kind that trains on random or given rows: what a check is made of."""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.proof.batches import MOST_WORDS, WORDS, candidates, random_batch
from hf_fsdp_tools.proof.plain import Case, forward, load_plain, loss_of
from hf_fsdp_tools.proof.shrink import LEVELS, VOCABULARY, Sizes, shrink

_MOST_PARAMETERS = 40_000_000
_MOST_TOKENS = 48
"""The longest row that is given: tiny models know 128 positions."""

_CHANCE = re.compile(r".*(dropout|drop_path|drop_rate|layerdrop|layer_drop|jitter).*|drop|.*pdrop")
"""Names of settings that leave something to chance in training."""


_WINDOWS = ("sliding_window", "attention_chunk_size", "sliding_window_size")
_WINDOW = 5
"""Tokens that attention with a window sees, less than half of a row."""
_ORIGINAL = "original_max_position_embeddings"
_LENGTH = 16
"""Tokens from which on rotary rules that depend on the length are others: more than short rows have, and less than long
ones."""


class NotBuiltError(ConfigError):
    """No class was built and run at a small size; says what each said."""


def tiny_case(
    config: PreTrainedConfig,
    model_classes: Iterable[Any],
    folder: Path,
    *,
    num_batches: int = 2,
    words: int = WORDS,
    is_training: bool = False,
    tp_size: int = 1,
    sizes: Sizes | None = None,
) -> tuple[Case, dict[str, Any]]:
    """A case with the first class that trains, its checkpoint written by transformers to `folder`; and facts of it.

    `sizes` hold for types that `shrink` does not know.
    """
    said: list[str] = []
    for model_class in model_classes:
        for level in LEVELS:
            try:
                model = build(model_class, shrink(config, level, tp_size, sizes))
                batches = list(candidates(model, words))
            except Exception as error:
                said.append(f"{model_class.__name__} {level}: {_said(error)}")
                continue
            for batch in batches:
                if problem := trains(model.train(is_training), random_batch(batch, 1000)):
                    said.append(f"{model_class.__name__} {level} ({' '.join(batch)}): {problem}")
                    continue
                model.save_pretrained(folder)
                count = sum(parameter.numel() for parameter in model.parameters())
                frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
                made = {"rows": [random_batch(batch, 1000 + i) for i in range(num_batches)]}
                facts = {"class": model_class.__name__, "size": level, "parameters": count, "inputs": " ".join(batch)}
                kind = type(model)
                return Case(
                    model_class=kind, folder=folder, batches=made, frozen=frozen, is_training=is_training
                ), facts
    raise NotBuiltError("; ".join(dict.fromkeys(said)))


def build(model_class: Any, config: Any) -> PreTrainedModel:
    """A plain model in fp32 on the CPU in evaluation mode, random throughout."""
    on_meta = build_meta_model(config, auto_class=model_class, dtype=torch.float32)
    size = sum(parameter.numel() for parameter in on_meta.parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = model_class._from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # what is initialised with zeros or ones would hide what is read or averaged wrongly
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def trains(model: nn.Module, batch: dict[str, Any]) -> str:
    """Why a plain model does not train on a batch; empty where it does."""
    model.zero_grad()
    try:
        loss = loss_of(forward(model, batch))
        if not loss.isfinite():
            return f"loss {float(loss)}"
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        return _said(error)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        return "gradients are not finite"
    return "" if any(bool(gradient.any()) for gradient in gradients) else "no gradients"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


# ---- what a user's own training adds ----


def telling(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration of which a few words tell all: nothing left to chance, windows shorter than rows."""
    config = copy.deepcopy(config)
    parts = [config]
    for part in parts:
        parts += [value for value in vars(part).values() if isinstance(value, PreTrainedConfig)]
        for name, value in vars(part).items():
            if type(value) is float and _CHANCE.fullmatch(name):
                setattr(part, name, 0.0)
            elif type(value) is int and name in _WINDOWS:
                setattr(part, name, min(value, _WINDOW))
            elif type(value) is int and name == _ORIGINAL:
                setattr(part, name, min(value, _LENGTH))
            elif name == "rope_parameters":
                for rule in (value, *value.values()) if isinstance(value, dict) else ():
                    if isinstance(rule, dict) and rule.get("rope_type") == "dynamic":
                        part.max_position_embeddings = _LENGTH
                    if isinstance(rule, dict) and _ORIGINAL in rule:
                        rule[_ORIGINAL] = min(rule[_ORIGINAL], _LENGTH)
    return config


def with_kinds(case: Case) -> tuple[Case, dict[str, str]]:
    """The case with more kinds of rows, and why a kind that its plain model does not train on is left out."""
    (rows,) = case.batches.values()
    batches, left_out = dict(case.batches), {}
    model = load_plain(case).train(case.is_training)
    for kind, make in {"padded": _padded, "packed": _packed, "long": _long}.items():
        made = [make(row) for row in rows]
        if any(batch is None for batch in made):
            left_out[kind] = (
                "they take no attention mask of words" if kind == "padded" else "they have no labels of words"
            )
        elif problem := next((problem for batch in made if batch and (problem := trains(model, batch))), ""):
            left_out[kind] = problem
        else:
            batches[kind] = [batch for batch in made if batch is not None]
    return replace(case, batches=batches), left_out


def _padded(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """The batch with the end of each row but the first padded."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or mask is None or mask.shape != ids.shape or "decoder_input_ids" in batch:
        return None
    new = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    length = ids.shape[1]
    for row in range(1, ids.shape[0]):
        missing = min(3 * row, length // 2)
        new["attention_mask"][row, length - missing :] = 0
        if "labels" in new and new["labels"].shape == ids.shape:
            new["labels"][row, length - missing :] = -100
    return new


def _packed(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """The words of all rows in one row, each from position 0, as TRL's packing makes them."""
    if (words := _words_alone(batch)) is None:
        return None
    first = words["labels"].clone()
    first[:, 0] = -100  # no row predicts the first token of the next
    positions = torch.arange(first.shape[1]).repeat(first.shape[0])[None]
    rows = {name: value.reshape(1, -1) for name, value in (words | {"labels": first}).items()}
    return {**rows, "position_ids": positions, "use_cache": False}


def _long(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """The words in rows three times as long, and what a Trainer adds: its count of tokens, and labels
    that are shifted already, here other ones."""
    if (words := _words_alone(batch)) is None:
        return None
    rows = {name: torch.cat([each, each.flip(1), each], dim=1) for name, each in words.items()}
    counted = {"shift_labels": rows["labels"].roll(2, 1), "num_items_in_batch": torch.tensor(len(rows["labels"]) * 17)}
    return {**rows, "attention_mask": torch.ones_like(rows["labels"]), "use_cache": False, **counted}


def _words_alone(batch: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """Words and labels of a batch, and their types, without the places of images and sound."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is None or labels is None or labels.shape != ids.shape:
        return None
    is_word = (ids < MOST_WORDS).all(0)
    return {name: batch[name][:, is_word] for name in ("input_ids", "labels", "token_type_ids") if name in batch}


def with_adapter(case: Case, config: Any = None) -> Case:
    """The case with a LoRA adapter of PEFT (by default of all linear layers, and a copy of the head that is trained),
    random in both factors and in copies."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    model = load_plain(case)
    heads = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    config = config or LoraConfig(r=4, target_modules="all-linear", modules_to_save=heads or None)
    adapter = get_peft_model(model, replace(config, init_lora_weights=False, lora_dropout=0.0))
    for name, parameter in adapter.named_parameters():
        if ".modules_to_save." in name:  # PEFT's copies are as their originals, whichever of the two runs
            parameter.data += 0.02 * torch.randn(parameter.shape)
    folder = case.folder.with_name("adapter")
    adapter.save_pretrained(str(folder))
    return replace(case, folder=folder, is_adapter=True)


def given_batches(rows: Sequence[Any], collator: Any, count: int) -> list[dict[str, Any]]:
    """The first batches of a user's rows, two rows each, cut and folded into what the tiny model knows.

    Raises:
        ConfigError: the rows do not make batches with `input_ids`.
    """
    from transformers import default_data_collator

    if len(rows) < 2 * count:
        raise ConfigError(f"{len(rows)} rows were given; {2 * count} are needed, two for each of {count} batches.")
    batches = []
    for i in range(count):
        made = dict((collator or default_data_collator)([rows[2 * i], rows[2 * i + 1]]))
        if not isinstance(made.get("input_ids"), torch.Tensor):
            raise ConfigError(f"The collator made {', '.join(made)}; verify needs rows of input_ids.")
        made.setdefault("labels", made["input_ids"].clone())
        batches.append({name: _fitted(name, value) for name, value in made.items()})
    return batches


def _fitted(name: str, value: Any) -> Any:
    """An input with short rows; ids of words folded into the small vocabulary, below its special tokens."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value[:, :_MOST_TOKENS] if value.dim() == 2 else value
    if name not in ("input_ids", "labels", "decoder_input_ids"):
        return value
    return torch.where(value < 0, value, 5 + value % (VOCABULARY - 40))
