"""Data sets of the recipes' demos, made by code of CPython's own documentation (`demo_passages`).

text           {"text": passage}
instructions   {"messages": [a user asks for a topic, the assistant answers with its passage]}
preferences    {"prompt", "chosen": the passage, "rejected": its words shuffled, or a passage of another topic}
classes        {"text": passage, "label": the group that its topic belongs to}
"""

import json
import os
import pydoc
import random
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from hf_fsdp_tools.distributed.agreement import going_first
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.scripting.demo import EVAL_EVERY, demo_passages, make_demo_model

_FOLDER = Path("outputs", "demo")
"""Of demo models and data, in the current folder: beside what recipes write, and never in a folder that is uploaded."""


def make_demo(accelerator: Any, kind: str) -> tuple[str, str]:
    """The folders of a small model and of a data set, made by the first rank of each node.

    Both are below `outputs/demo`; a model that is there already is kept.

    Args:
        accelerator: of `make_accelerator`.
        kind: "text", "instructions", "preferences", "classes", or "images" (a vision-language model and its data).

    The bars of datasets are switched off. Every rank must call. The other ranks wait, and stop if it fails.

    Raises:
        ConfigError: the folder holds something else, or this Python has no `pydoc_data`; on every rank alike.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> model_args.model_name_or_path, script.dataset_name = make_demo(make_accelerator(cpu=True), "classes")
        Quick start: a small model and its data (classes), made on the spot in outputs/demo...
        >>> data, held_out = load_splits(script, training, columns=[{"text", "label"}])
        outputs/demo/classes: ... rows to train on, ... to evaluate
    """
    import datasets

    model, data = _FOLDER / ("vision_model" if kind == "images" else "model"), _FOLDER / kind
    accelerator.print(
        f"Quick start: a small model and its data ({kind}), made on the spot in {_FOLDER}. Give --model_name_or_path "
        "and --dataset_name for your own."
    )
    datasets.disable_progress_bars()  # seven bars for seven short moments
    is_first = rank_on_node()[0] == 0
    with going_first(is_first):
        if is_first and kind == "images":
            import_module("hf_fsdp_tools.scripting.demo_images").write_demo_images(model, data)
        elif is_first:
            make_demo_model(model)
            write_demo_dataset(data, kind)
    return str(model), str(data)


def write_demo_dataset(folder: str | os.PathLike[str], kind: str = "text") -> tuple[Path, Path]:
    """Write a demo data set as `train.jsonl` and `eval.jsonl`, every tenth row held out; return both paths.

    Existing files of these names are replaced, each in one step, so that a reader never sees half a file. Call it on
    one rank; nothing is communicated.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    rows = demo_rows(kind)
    split = {
        "train.jsonl": [row for number, row in enumerate(rows) if number % EVAL_EVERY],
        "eval.jsonl": rows[::EVAL_EVERY],
    }
    for name, part in split.items():
        partial = root / f"{name}.{uuid4().hex}.partial"  # not the process's id: machines with one disk may share it
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part), encoding="utf-8")
        partial.replace(root / name)
    return root / "train.jsonl", root / "eval.jsonl"


def demo_rows(kind: str) -> list[dict[str, Any]]:
    """The rows of a demo data set, one for each passage; the same under the same Python version."""
    passages = demo_passages()
    if kind == "text":
        return [{"text": passage} for _, passage in passages]
    if kind == "instructions":
        return [
            {"messages": [_turn("user", question), _turn("assistant", passage)]}
            for question, (_, passage) in zip(_questions(passages), passages, strict=True)
        ]
    if kind == "preferences":
        return [
            {
                "prompt": [_turn("user", question)],
                "chosen": [_turn("assistant", passage)],
                "rejected": [_turn("assistant", _worse(number, passages))],
            }
            for number, (question, (_, passage)) in enumerate(zip(_questions(passages), passages, strict=True))
        ]
    if kind == "classes":
        groups = _groups()
        return [{"text": passage, "label": groups.get(topic, "language")} for topic, passage in passages]
    raise ConfigError(f"There is no demo data of the kind {kind!r}; choose text, instructions, preferences or classes.")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _questions(passages: list[tuple[str, str]]) -> list[str]:
    """What a user asks for each passage, numbered within its topic."""
    asked: list[str] = []
    numbers: dict[str, int] = {}
    for topic, _ in passages:
        number = numbers[topic] = numbers.get(topic, 0) + 1
        asked.append(f"Explain the Python topic {topic!r}." if number == 1 else f"Part {number} on {topic!r}, please.")
    return asked


def _worse(number: int, passages: list[tuple[str, str]]) -> str:
    """A worse answer than a passage: its words in another order, or, every second time, a passage of another topic.

    Which of them is drawn: every tenth row is held out, and all of those would have even numbers.
    """
    topic, passage = passages[number]
    chance = random.Random(number)
    if chance.random() < 0.5:
        words = passage.split()
        chance.shuffle(words)
        return " ".join(words)
    return chance.choice([other for name, other in passages if name != topic])


def _groups() -> dict[str, str]:
    """The group of a topic, as the tables of `help()` show it: by the keywords and topics that they relate to it."""
    related: dict[str, set[str]] = {}
    for table in (pydoc.Helper.topics, pydoc.Helper.keywords):
        for name, target in table.items():
            if isinstance(target, tuple):  # (topic, related names); a plain text refers to another entry
                related.setdefault(target[0], set()).update([name, *target[1].split()])
    groups = {}
    for topic, names in related.items():
        if names & {"SPECIALMETHODS"}:
            groups[topic] = "special methods"
        elif names & {"TYPES", "FORMATTING", "SEQUENCES", "MAPPINGS", "DICTIONARYLITERALS", "LISTLITERALS"}:
            groups[topic] = "types"
        elif names & {name for name in pydoc.Helper.keywords if name.islower()} - {"is", "lambda"}:
            groups[topic] = "statements"
    return groups
