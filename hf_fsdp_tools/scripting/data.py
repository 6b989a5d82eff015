"""The dataset of a recipe as a training and an evaluation split, and the tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.text import first_line

__all__ = ["load_splits", "load_tokenizer"]

_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def load_splits(script: Any, training: Any, *, columns: Sequence[frozenset[str]]) -> tuple[Any, Any]:
    """The training and evaluation split; a twentieth is held out where the dataset has only one.

    Args:
        script: `ScriptArguments`.
        training: the Trainer's arguments.
        columns: the sets of columns of which the recipe needs one.
    """
    from datasets import load_dataset

    path = Path(script.dataset_name)
    with agreed("loading the dataset"):
        try:
            if path.is_file():
                splits = load_dataset(_KINDS.get(path.suffix, "text"), data_files=str(path))
            else:
                splits = load_dataset(script.dataset_name, name=script.dataset_config)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"Cannot load the dataset {script.dataset_name!r}: {first_line(error)}") from error
        if script.dataset_train_split not in splits:
            raise ConfigError(
                f"{script.dataset_name!r} has no split {script.dataset_train_split!r}, only {', '.join(splits)}. "
                "Name one with --dataset_train_split."
            )
        train = splits[script.dataset_train_split]
        if not any(wanted <= set(train.column_names) for wanted in columns):
            raise ConfigError(
                f"{script.dataset_name!r} has the columns {', '.join(sorted(train.column_names))}; needed: "
                f"{', or '.join(' and '.join(sorted(wanted)) for wanted in columns)}. Rename one."
            )
        evaluation = splits.get(script.dataset_test_split)
        if evaluation is None:
            halves = train.train_test_split(test_size=0.05, seed=training.seed)
            train, evaluation = halves["train"], halves["test"]
    return train, evaluation


def load_tokenizer(model_args: Any, training: Any) -> Any:
    """The tokenizer of the model."""
    from transformers import AutoTokenizer

    name = model_args.model_name_or_path
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=model_args.model_revision, trust_remote_code=training.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"No model or no tokenizer at {name!r}: {first_line(error)}") from error
