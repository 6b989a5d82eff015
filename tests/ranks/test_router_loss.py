"""A mixture's auxiliary loss has the same weight beside that of the tokens in any number of micro-batches and ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hf_fsdp_tools import FSDPTrainerMixin, from_pretrained, make_accelerator
from tests._checkpoints import word_tokenizer
from tests._dist import run_cases, run_ranks
from tests._training import arguments, logged

ROW = [3, 9, 4, 30, 5, 81, 7, 12]
"""All rows are this one: the auxiliary loss of tokens together is no mean of those of parts, unless they are alike."""

LARGE = {"output_router_logits": True, "router_aux_loss_coef": 2.0, "experts_implementation": "batched_mm"}


class Sharded(FSDPTrainerMixin, Trainer):
    pass


class ShardedSFT(FSDPTrainerMixin, SFTTrainer):
    pass


def run(source: Path, folder: Path, kind: Any, rows: int, steps: int) -> dict[str, list[float]]:
    """Losses, norms and evaluations of a trainer, with so many rows in each of so many micro-batches."""
    mixed = issubclass(kind, FSDPTrainerMixin)
    own: dict[str, Any] = {"optim": "sgd", "eval_strategy": "steps", "eval_steps": 1, "max_grad_norm": 100.0}
    own |= {"per_device_train_batch_size": rows, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": steps}
    data, config, more = Dataset.from_list([{"input_ids": ROW, "labels": ROW}] * 16), TrainingArguments, {}
    if issubclass(kind, SFTTrainer):
        config, more = SFTConfig, {"processing_class": word_tokenizer()}
    args = arguments(folder, config, max_steps=2, bf16=False, **own)
    if mixed:
        model = from_pretrained(source, accelerator=make_accelerator(args), **LARGE)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, **LARGE)
    trainer = kind(model, args=args, train_dataset=data, eval_dataset=data, **more)
    trainer.train()
    return {key: logged(trainer, key) for key in ("loss", "grad_norm", "eval_loss")}


def together(source: Path, folder: Path, kinds: dict[str, tuple[Any, int, int]]) -> dict[str, Any]:
    return run_cases({name: partial(run, source, folder / name, *each) for name, each in kinds.items()})


def test_an_auxiliary_loss_does_not_depend_on_the_number_of_micro_batches(folders, tmp_path):
    alone = {"plain": (Trainer, 4, 1), "plain, 4 parts": (Trainer, 1, 4)}
    (expected,) = run_ranks(together, 1, folders["mixtral"], tmp_path / "one", alone)
    parted, expected = expected["plain, 4 parts"], expected["plain"]
    assert parted["loss"][0] > expected["loss"][0] + 2, "transformers takes the mean: compute_loss is no longer needed"
    ours = {"1 part": (Sharded, 2, 1), "2 parts": (Sharded, 1, 2), "TRL, 2 parts": (ShardedSFT, 1, 2)}
    for result in run_ranks(together, 2, folders["mixtral"], tmp_path / "two", ours):
        for name, found in result.items():
            for key, values in found.items():
                assert values == pytest.approx(expected[key], rel=1e-5), (name, key)
