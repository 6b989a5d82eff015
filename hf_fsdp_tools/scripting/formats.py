"""Rows of other formats as TRL's trainers take them."""

from collections.abc import Mapping
from typing import Any

__all__ = ["from_alpaca", "from_sharegpt", "with_turns_for_prompt"]

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}
"""Roles of ShareGPT as chat templates name them."""


def from_sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    """`{"from": "human", "value": …}` as `{"role": "user", "content": …}`."""
    turns = [
        {"role": turn.get("role") or turn.get("from"), "content": turn.get("content") or turn.get("value") or ""}
        for turn in row["conversations"]
    ]
    return {"messages": [turn | {"role": _ROLES.get(str(turn["role"]), turn["role"])} for turn in turns]}


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
    asked = [{"role": "user", "content": row["prompt"]}]
    if answers == ["completion"]:
        return {"prompt": asked, "completion": row["completion"]}
    turns = {name: row[name] for name in answers}
    return {name: one if one and one[0].get("role") != "assistant" else asked + one for name, one in turns.items()}
