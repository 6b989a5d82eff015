"""Streams whose runs are killed and resumed twice: every row is seen once, and none is read again."""

import itertools
import multiprocessing
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_fsdp_tools import CheckpointError, from_pretrained, make_accelerator
from tests._checkpoints import refusal
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, new_accelerator
from tests.api import share_of_stream

pytest.importorskip("torchdata", reason="torchdata is not installed (pip install torchdata)")

FILES, PER_FILE = 4, 12


def _rows(files: list[int]) -> Any:
    for file in files:
        yield from ({"number": file * PER_FILE + row} for row in range(PER_FILE))


def _numbered(row: dict[str, Any]) -> dict[str, Any]:
    ids = [3 + row["number"], *range(3, 10)]
    return {"input_ids": ids, "labels": ids}


def stream(files: int = FILES) -> IterableDataset:
    made = IterableDataset.from_generator(_rows, gen_kwargs={"files": list(range(files))})
    return made.map(_numbered, remove_columns=["number"])


class Seen(TrainerCallback):  # type: ignore[misc]
    def __init__(self, last: int) -> None:
        self.last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step >= self.last


class Notes(ShardedTrainer):
    seen: list[int]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen += [int(row[0]) - 3 for row in inputs["input_ids"]]
        return super().training_step(model, inputs, *args, **kwargs)


def _trainer(source: Path, out: Path, data: Any, last: int, **settings: Any) -> Notes:
    defaults = {"max_steps": last, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    model = from_pretrained(source, accelerator=make_accelerator(cpu=True))
    args = arguments(out, **{**defaults, "per_device_train_batch_size": 1, **settings})
    trainer = Notes(model=model, args=args, train_dataset=data, callbacks=[Seen(last)])
    trainer.seen = []
    return trainer


def may_have_workers() -> None:
    """Ranks of these tests are daemons, which may start no processes, and children of a server that forks them."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)


def lives(source: Path, out: Path, make: Any, *, is_share: bool = False, **settings: Any) -> list[int]:
    """The rows of a run of 5 steps; those of one that ends after steps 3 and 5, and goes on at steps 2 and 4."""
    whole = _trainer(source, out / "whole", make(), 5, **settings | {"save_strategy": "no"})
    whole.fsdp_settings.streams_are_shares = is_share
    whole.train()
    found: list[int] = []
    for begin, last in ((0, 3), (2, 5), (4, 5)):
        trainer = _trainer(source, out / "parts", make(), last, **settings | {"max_steps": 5})
        trainer.fsdp_settings.streams_are_shares = is_share
        folder = str(out / "parts" / f"checkpoint-{begin}")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The stream is read again")
            trainer.train(resume_from_checkpoint=folder if begin else None)
        dist.barrier()
        found = [*found[: begin * 2], *trainer.seen]
    assert found == whole.seen, (found, whole.seen)
    assert all(
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(whole.model.parameters(), trainer.model.parameters(), strict=True)
    )
    return found


def an_own_share(files: int, seed: int, workers: int, source: Path, out: Path) -> None:
    """As recipes read: shuffled among themselves, of files of its own or every other row, with workers."""
    may_have_workers()
    make = lambda: share_of_stream(stream(files), seed=seed)  # noqa: E731
    assert len(set(lives(source, out, make, is_share=True, dataloader_num_workers=workers))) == 10


def divided_by_accelerate(dispatch: bool | None, files: int, workers: int, source: Path, out: Path) -> None:
    """Rank 0 reads for all, which is the default."""
    may_have_workers()
    config = {"dispatch_batches": dispatch} if dispatch is not None else None
    settings = {"accelerator_config": config, "dataloader_num_workers": workers}
    assert len(set(lives(source, out, partial(stream, files), **settings))) == 10


def another_stream_is_refused(source: Path, out: Path) -> None:
    _trainer(source, out, stream(), 2).train()
    other = _trainer(source, out, stream().filter(lambda row: True), 3)
    said = refusal(lambda: other.train(resume_from_checkpoint=str(out / "checkpoint-2")), CheckpointError)
    assert "is the position in another stream" in said


def on_another_number_of_ranks(source: Path, out: Path) -> None:
    again = _trainer(source, out, stream(), 3)
    with pytest.warns(UserWarning, match=r"stream is read again .* 'checkpoint-2', for it has no positions of 1 proc"):
        again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert again.seen == [4, 5]


def a_plain_loop(dispatch: bool | None, workers: int, source: Path, out: Path) -> None:
    """Accelerate's `use_stateful_dataloader`, killed and resumed twice; the loader goes on by itself."""
    may_have_workers()
    found: list[int] = []
    for count in (3, 2, 3):
        config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=dispatch)
        accelerator = new_accelerator(dataloader_config=config)
        accelerator.prepare(from_pretrained(source, accelerator=accelerator))
        loader = accelerator.prepare(DataLoader(stream().with_format("torch"), batch_size=1, num_workers=workers))
        if found:
            accelerator.load_state(out / "state")
        for batch in itertools.islice(loader, count):
            found += (batch["input_ids"][:, 0] - 3).tolist()
            if len(found) in (3, 5):
                accelerator.save_state(out / "state")
    assert len(found) == 8 and len(set(found)) == 8, found


USUAL: dict[str, Any] = {
    "own": partial(an_own_share, 3, 3, 0), "divided": partial(divided_by_accelerate, None, 4, 0),
    "plain": partial(a_plain_loop, None, 0), "another": another_stream_is_refused,
}  # fmt: skip
WORKERS = {"own": partial(an_own_share, 4, 3, 2), "divided": partial(divided_by_accelerate, None, 4, 2)}
WORKERS |= {"plain": partial(a_plain_loop, False, 2)}


@pytest.mark.parametrize("cases", [USUAL, pytest.param(WORKERS, marks=pytest.mark.nightly)])
def test_a_stream_goes_on_where_it_was(folders: dict[str, Path], tmp_path: Path, cases: dict[str, Any]) -> None:
    source = folders["llama"]
    for name in cases:
        (tmp_path / name).mkdir()
    run_ranks(run_cases, 2, {name: partial(case, source, tmp_path / name) for name, case in cases.items()})
    if "another" in cases:
        run_ranks(on_another_number_of_ranks, 1, source, tmp_path / "another")
