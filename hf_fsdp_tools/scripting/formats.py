"""Rows of other formats as TRL's trainers take them, and batches that all have an image."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from trl import maybe_convert_to_chatml

_PLACE = "<image>"
"""What stands for an image in the texts of LLaVA's, ShareGPT's and LLaMA-Factory's rows."""

_LOOKED_AT = 100
"""Rows among which one with such a place is looked for. (assumed)"""

_MOST_ROWS = 10_000
"""Rows among which one with an image is looked for. (assumed)"""

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}
"""Roles of ShareGPT as chat templates name them."""


def from_sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    """Convert `{"from": "human", "value": …}` to `{"role": "user", "content": …}`."""
    keys = ("from", "value", "role", "content")
    turns = [{key: turn[key] for key in keys if turn.get(key) is not None} for turn in row["conversations"]]
    turns = maybe_convert_to_chatml({"messages": turns})["messages"]
    return {"messages": [{"content": "", **turn, "role": _ROLES.get(turn["role"], turn["role"])} for turn in turns]}


def from_alpaca(row: dict[str, Any], ask: str, answer: str, pairs: bool) -> dict[str, Any]:
    """A question and its answer as turns of a chat; alpaca's `system` and `input` belong to the question."""
    question = "\n\n".join(part for part in (row[ask], row.get("input")) if part)
    turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    turns.append({"role": "user", "content": question})
    reply = [{"role": "assistant", "content": row[answer]}]
    return {"prompt": turns, "completion": reply} if pairs else {"messages": turns + reply}


def with_turns_for_prompt(dataset: Any) -> Any:
    """A dataset whose `prompt` is no text where the answers are turns of a chat; TRL puts the two behind each other.

    ultrafeedback has such rows: its answers begin with the turn that the prompt is. Others begin with the assistant.
    """
    row: Mapping[str, Any] = next(iter(dataset), {})
    answers = [name for name in ("completion", "chosen", "rejected") if isinstance(row.get(name), list)]
    if not answers or not isinstance(row.get("prompt"), str):
        return dataset
    return dataset.map(_with_prompt, fn_kwargs={"answers": answers}, remove_columns=["prompt"])


def _with_prompt(row: dict[str, Any], answers: list[str]) -> dict[str, Any]:
    question = [{"role": "user", "content": row["prompt"]}]
    if answers == ["completion"]:
        return {"prompt": question, "completion": row["completion"]}
    turns = {name: row[name] for name in answers}
    return {name: one if one and one[0].get("role") != "assistant" else question + one for name, one in turns.items()}


def with_places_of_images(dataset: Any) -> Any:
    """A dataset whose turns have their images where `<image>` stood in the text, as parts of a turn.

    TRL leaves that word in the text and puts all images before the first question. Rows without the word get theirs
    there too.
    """
    rows = islice(iter(dataset), _LOOKED_AT)
    texts = (turn.get("content") for row in rows for turn in row.get("messages") or ())
    if not any(isinstance(text, str) and _PLACE in text for text in texts):
        return dataset
    return dataset.map(_in_parts)


def _in_parts(row: dict[str, Any]) -> dict[str, Any]:
    count = len(row["images"] or ()) if "images" in row else int(row.get("image") is not None)
    turns = [dict(turn) for turn in row["messages"]]
    first = next((turn for turn in turns if turn["role"] == "user"), None)
    if first is not None and not any(_PLACE in (turn["content"] or "") for turn in turns):
        first["content"] = _PLACE * count + first["content"]
    return {"messages": [turn | {"content": list(_parts(turn["content"] or ""))} for turn in turns]}


def _parts(text: str) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(text.split(_PLACE)):
        if number:
            yield {"type": "image", "text": None}
        if words := part.strip() if _PLACE in text else part:
            yield {"type": "text", "text": words}


def images_in_each_batch(trainer: Any, data: Any) -> None:
    """Let every batch of a trainer have an image, so that the ranks gather the same units in each forward pass.

    A model runs its vision tower where there are images. FSDP gathers the tower's shards from all ranks then, so that a
    rank whose batch is text alone would answer with those of another unit: the run hangs, aborts or goes on with wrong
    weights. Such a batch gets one more row with an image, of which no token counts in the loss.

    Args:
        trainer: whose `data_collator` makes the batches; it is replaced.
        data: rows with `images` or `image`, of which the first that has one is added. Where none has, nothing is done.

    Nothing is communicated; every rank must call.

    Example:
        >>> class MyTrainer:  # any with a collator
        ...     data_collator = staticmethod(lambda rows: {"labels": [1] * len(rows)})
        >>> trainer = MyTrainer()
        >>> images_in_each_batch(trainer, [{"images": ["picture.png"]}])
        >>> trainer.data_collator([{"images": []}])["labels"]
        [1, -100]
    """
    row = next((row for row in islice(iter(data), _MOST_ROWS) if _has_image(row)), None)
    collate = trainer.data_collator

    def collate_with_image(rows: list[dict[str, Any]]) -> Any:
        if any(map(_has_image, rows)):
            return collate(rows)
        batch = collate([*rows, dict(row or {})])
        batch["labels"][-1] = -100
        return batch

    if row is not None:
        trainer.data_collator = collate_with_image


def _has_image(row: Mapping[str, Any]) -> bool:
    return bool(row.get("images")) or row.get("image") is not None
