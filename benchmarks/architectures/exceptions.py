"""What the rules of the census get wrong, by model type, as data."""

from typing import Any

__all__ = ["CLASSES", "INPUTS", "SIZES"]

SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
}
"""Sizes of a configuration after shrinking, by its `model_type`, or by `model_type` and level."""

INPUTS: dict[str, dict[str, Any]] = {}
"""Inputs in place of those by rule, by model type: arguments of a `Spec`, None to leave one out; "only" to have no
others."""

CLASSES: dict[str, list[str]] = {}
"""Model classes in place of those by rule, the best first."""
