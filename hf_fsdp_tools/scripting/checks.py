"""Errors of a user, found before the model is loaded."""

from typing import Any

__all__ = ["check_before_loading"]


def check_before_loading(
    model_args: Any, training: Any, tokenizer: Any, train: Any, evaluation: Any = None, *, auto_class: Any = None
) -> None:
    """Refuse what would fail only after the model is loaded.

    Args:
        model_args: `ModelArguments`.
        training: the Trainer's arguments.
        tokenizer: of the model.
        train: the training split.
        evaluation: the evaluation split.
        auto_class: as for `load_model`.
    """
