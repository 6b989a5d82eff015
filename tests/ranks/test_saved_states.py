"""What a save leaves at each moment, what a resume says of a damaged state, and states of several models."""

import hashlib
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import TrainerCallback

from hf_fsdp_tools import (
    CheckpointError,
    RanksError,
    TrainerSettings,
    from_pretrained,
    make_accelerator,
    wait_for_saves,
)
from hf_fsdp_tools.integrations import accelerator_state
from hf_fsdp_tools.integrations.streams import LOADERS
from tests._checkpoints import full
from tests._dist import named, run_cases, run_ranks
from tests._grids import fast_and_nightly
from tests._training import ShardedTrainer, arguments, make_rows
from tests.api import AVERAGES, MANIFEST, patched, problem_of, wait_for_all_ranks
from tests.ranks.test_saves import hearing

# ---- at each moment of a save ----


@contextmanager
def moments(folder: Path, target: Path, watching: bool = True) -> Iterator[list[Path]]:
    """Copies of a folder, made on this rank before each change of the file system in the block."""
    copies: list[Path] = []

    def copy() -> None:
        copies.append(target / f"{len(copies)}")
        _copy(folder, copies[-1])

    with hearing(copy) if watching else nullcontext():
        yield copies


def _copy(source: Path, target: Path) -> None:
    """As another rank goes on meanwhile, files may vanish."""
    target.mkdir(parents=True)
    for path in source.rglob("*"):
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            to.mkdir(exist_ok=True)
        elif path.is_file():
            shutil.copyfile(path, to)


def _content(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".incomplete", ".json"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Remembers(TrainerCallback):
    def __init__(self) -> None:
        self.contents: dict[str, dict[str, str]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait_for_saves()
        name = f"checkpoint-{state.global_step}"
        self.contents[name] = _content(Path(args.output_dir, name))


def _trainer(source: Path, out: Path, kind: Any = ShardedTrainer, **settings: Any) -> Any:
    callbacks = settings.pop("callbacks", None)
    ours, failing = TrainerSettings(**settings.pop("ours", {})), settings.pop("failing", None)
    made = arguments(out, **{"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **settings})
    model = from_pretrained(source, accelerator=make_accelerator(cpu=True))
    given = {"train_dataset": make_rows(32), "callbacks": callbacks, "fsdp_settings": ours}
    trainer = kind(model=model, args=made, **given)
    trainer.failing = failing
    return trainer


def moments_of_a_trainer(limit: int, blocking: bool, source: Path, out: Path) -> None:
    folder, remembers = out / "run", Remembers()
    settings = {"max_steps": 3, "save_total_limit": limit, "ours": {"blocking": blocking, "ema_decay": 0.5}}
    trainer = _trainer(source, folder, callbacks=[remembers], **settings)
    with moments(folder, out / "copies", dist.get_rank() == 0) as seen:
        trainer.train()
    if dist.get_rank() != 0:
        return
    assert sorted(remembers.contents) == [f"checkpoint-{step}" for step in (1, 2, 3)]
    assert all(f"{AVERAGES}/__0_0.distcp" in content for content in remembers.contents.values())
    begun = False
    for moment in seen:
        complete = [path for path in sorted(moment.glob("checkpoint-*")) if not problem_of(path)]
        begun |= bool(complete)
        assert begun == bool(complete), f"{moment}: a complete checkpoint was there, and none is"
        for path in complete:
            assert _content(path) == remembers.contents[path.name], path
    assert len(seen) > 50 and begun
    assert {path.name for path in folder.iterdir()} == {f"checkpoint-{step}" for step in range(4 - limit, 4)}


class FailsAlone(ShardedTrainer):
    """On one rank something fails before the collectives of a save, in code that is not the package's."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if dist.get_rank() == self.failing:
            raise ValueError("a mistake of mine")
        super()._save_optimizer_and_scheduler(output_dir)


def fails_alone_while_the_optimizer_is_saved(rank: int, source: Path, out: Path) -> None:
    trainer = _trainer(source, out, kind=FailsAlone, failing=rank, max_steps=1)
    own = dist.get_rank() == rank
    with pytest.raises(ValueError if own else RanksError, match="a mistake of mine") as caught:
        trainer.train()
    assert own or f"rank {rank} failed" in str(caught.value)
    no_memory = patch.object(accelerator_state, "get_optimizer_state_dict", side_effect=MemoryError("no room"))
    with no_memory if own else nullcontext(), pytest.raises((MemoryError, CheckpointError), match="no room"):
        _trainer(source, out).train()
    assert not list(out.glob("checkpoint-*"))
    wait_for_all_ranks()


def _slowly(sync: Callable[[int], None], opened: threading.Event, descriptor: int) -> None:
    if threading.current_thread().name == "save":
        time.sleep(0.05)
        assert opened.wait(200), "nobody lets it through"
    sync(descriptor)


def the_same_is_saved_in_the_background(source: Path, out: Path) -> None:
    """Every file of every checkpoint, but for what names the save itself, while the next steps run."""
    own = ("training_args.bin", "optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata")
    limits = {"save_total_limit": 1, "max_steps": 2}
    opened = threading.Event()
    opened.set()
    with patch.object(os, "fsync", partial(_slowly, os.fsync, opened)):
        for blocking in (True, False):
            _trainer(source, out / f"{blocking}", ours={"blocking": blocking}, **limits).train()
        accelerator, model, optimizer = _loop(source)
        _step(accelerator, model, optimizer)
        accelerator.save_state(out / "True" / "state")
        opened.clear()
        accelerator.save_state(out / "False" / "state", blocking=False)
        assert not (out / "False" / "state").exists(), "nobody sees what is not complete"
        for _ in range(2):
            _step(accelerator, model, optimizer)
        opened.set()
        report = wait_for_saves()
        assert report is not None and report.total_bytes > report.bytes_written > 0 and report.copied_bytes
    for name in ("checkpoint-2", "state"):
        contents = [_content(out / f"{blocking}" / name) for blocking in (True, False)]
        at_once, later = ({file: text for file, text in found.items() if file not in own} for found in contents)
        assert at_once == later and len(later) > 4, name
        assert not list((out / "False" / name).rglob("*.incomplete"))
    assert sorted(path.name for path in (out / "False").iterdir()) == ["checkpoint-2", "state"]
    accelerator.load_state(out / "False" / "state")
    trainer = _trainer(source, out / "False", ours={"blocking": False}, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3 and not problem_of(out / "False" / "checkpoint-3")


def removed_while_it_is_saved(source: Path, out: Path) -> None:
    _trainer(source, out, max_steps=1, save_total_limit=1).train()
    before = _content(out / "checkpoint-1")
    from hf_fsdp_tools.integrations import trainer as module

    real = module.write_part

    def removing(*args: Any, **kwargs: Any) -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            shutil.rmtree(out / ".checkpoint-2.incomplete")
        dist.barrier()
        real(*args, **kwargs)

    said = pytest.raises(CheckpointError, match=r"checkpoint-2' was changed while it was saved: '.*' (is|are) gone")
    with patch.object(module, "write_part", removing), said:
        _trainer(source, out, save_total_limit=1).train(resume_from_checkpoint=True)
    dist.barrier()
    assert _content(out / "checkpoint-1") == before and not problem_of(out / "checkpoint-1")
    assert not (out / "checkpoint-2").exists()


def a_folder_of_each_rank(source: Path, out: Path) -> None:
    """Each node has a disk of its own: said before the first step, not after an hour at the first save."""
    own = out / f"{dist.get_rank()}"
    trainer = _trainer(source, own)
    with (
        patched(_APPEARS_S=0.5),
        pytest.raises(CheckpointError, match="that all ranks share") as said,
    ):
        trainer.train()
    assert "failed on 1 of 2 ranks" in str(said.value)
    assert trainer.state.global_step == 0 and not [path for path in own.rglob("*") if path.is_file()]
    trainer.args.save_strategy = "no"
    trainer.train()


def _run(source: Any, root: Path, *cases: Any, **others: Any) -> None:
    every = named(*cases) | others
    run_ranks(run_cases, 2, {name: partial(case, source, root / name) for name, case in every.items()})


@pytest.mark.parametrize(("limit", "blocking"), [(1, True), pytest.param(2, False, marks=pytest.mark.nightly)])
def test_at_each_moment_of_a_training_a_whole_state_is_there_and_nothing_else_counts_as_one(
    folders: dict[str, Path], tmp_path: Path, limit: int, blocking: bool
) -> None:
    run_ranks(moments_of_a_trainer, 2, limit, blocking, folders["llama"], tmp_path)


ALONE = [partial(fails_alone_while_the_optimizer_is_saved, rank) for rank in (0, 1)]
SAVES = {
    "fails alone": ALONE[1],
    "in the background": the_same_is_saved_in_the_background,
    "removed": removed_while_it_is_saved,
    "a folder of each rank": a_folder_of_each_rank,
}
OTHER_SAVES = {"fails alone": ALONE[0]}


@pytest.mark.parametrize("saves", [SAVES, pytest.param(OTHER_SAVES, marks=pytest.mark.nightly)], ids=["usual", "more"])
def test_a_save_leaves_the_older_state_or_the_new_one(folders: dict[str, Path], tmp_path: Path, saves: Any) -> None:
    _run(folders["llama"], tmp_path, **saves)


# ---- damage ----


def gone(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return damage


def cut(name: str, length: int = 50) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, length)


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def flipped(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        text = bytearray((folder / name).read_bytes())
        text[len(text) // 2] ^= 1
        (folder / name).write_bytes(text)

    return damage


def shard(how: Callable[[str], Callable[[Path], None]]) -> Callable[[Path], None]:
    return lambda folder: how(f"optimizer_0/{sorted(p.name for p in folder.glob('optimizer_0/__1_*'))[0]}")(folder)


OF_TRAINER: dict[str, tuple[Callable[[Path], None], str]] = {
    "optimizer gone": (gone("optimizer_0"), r"optimizer_0"),
    "metadata garbage": (written("optimizer_0/.metadata", "garbage"), r"\.metadata"),
    "shard gone": (shard(gone), r"__1_0\.distcp"),
    "shard cut": (shard(cut), r"__1_0\.distcp"),
    "scheduler cut": (cut("scheduler.pt"), r"scheduler\.pt"),
    "random states gone": (gone("rng_state_1.pth"), r"rng_state_1\.pth"),
    "random states malicious": (written("rng_state_1.pth", "cos\nsystem\n(S'true'\ntR."), r"rng_state_1\.pth"),
    "weights cut": (cut("model.safetensors"), r"model\.safetensors"),
    "trainer state {}": (written("trainer_state.json", "{}"), r"trainer_state\.json"),
}
"""Damage, and what the error names."""

OF_STATE = {
    "model gone": (gone("pytorch_model_fsdp_0"), r"pytorch_model_fsdp_0"),
    "scheduler cut": (cut("scheduler.bin"), r"scheduler\.bin"),
    "random states malicious": (written("random_states_1.pkl", "cos\nsystem\n(S'true'\ntR."), r"random_states_1\.pkl"),
    "an object that runs code": (written("custom_checkpoint_0.pkl", "cos\nsystem\n(S'true'\ntR."), r"custom_check"),
    "flipped bit": (shard(flipped), r"__1_0\.distcp' have another checksum"),
}
NEED_MANIFEST = ("random states gone", "flipped bit")  # without the list it is as if fewer ranks had saved, or no sums


def _refused(load: Callable[[str], Any], good: Path, damages: dict[str, Any], in_turn: bool) -> None:
    """Each damage is one short error on every rank, with the list of files or, each second one, without it."""
    for number, (name, (damage, says)) in enumerate(damages.items()):
        with_manifest = name in NEED_MANIFEST or (number % 2 == 0) == in_turn
        bad = good.with_name(f"bad-{number}")
        if dist.get_rank() == 0:
            damage(shutil.copytree(good, bad))
            if not with_manifest:
                (bad / MANIFEST).unlink()
        dist.barrier()
        with warnings.catch_warnings(), pytest.raises(CheckpointError, match=says) as caught:
            warnings.simplefilter("ignore")
            load(str(bad))
        assert len(str(caught.value)) < 1500, name
        assert str(bad) in str(caught.value), name


class NoStep(TrainerCallback):
    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        pytest.fail("a step was trained")


def damaged_checkpoints(in_turn: bool, source: Path, out: Path) -> None:
    _trainer(source, out, max_steps=1).train()
    good = out / "checkpoint-1"
    trainer = _trainer(source, out / "later", max_steps=3, save_strategy="no", callbacks=[NoStep()])
    _refused(lambda bad: trainer.train(resume_from_checkpoint=bad), good, OF_TRAINER, in_turn)
    fails = patch("numpy.random.set_state", side_effect=OSError(5, "Input/output error"))
    said = pytest.raises(Exception, match="Input/output error")
    with fails if dist.get_rank() == 1 else nullcontext(), said:
        trainer.train(resume_from_checkpoint=str(good))


def damaged_states(in_turn: bool, source: Path, out: Path) -> None:
    accelerator, model, optimizer = _loop(source)
    _step(accelerator, model, optimizer)
    good = accelerator.save_state(out / "good", checksums=True)
    before = [full(parameter).clone() for parameter in model.parameters()]
    _step(accelerator, model, optimizer)
    other = [full(parameter).clone() for parameter in model.parameters()]
    _refused(accelerator.load_state, good, OF_STATE, in_turn)
    assert all(torch.equal(full(p), w) for p, w in zip(model.parameters(), other, strict=True)), "nothing was read"
    accelerator.load_state(good)
    assert all(torch.equal(full(p), w) for p, w in zip(model.parameters(), before, strict=True))
    accelerator.register_for_checkpointing(torch.optim.lr_scheduler.LinearLR(torch.optim.SGD(model.parameters())))
    own = accelerator.save_state(out / "with an object")
    for name, content, said in (
        ("custom_checkpoint_0.pkl", [1], "object does not take what was saved"),
        (LOADERS, 5, "holds no epochs"),
    ):
        bad = own.with_name(f"with another {name}")
        if dist.get_rank() == 0:
            shutil.copytree(own, bad, ignore=shutil.ignore_patterns(MANIFEST))
            torch.save(content, bad / name) if name != LOADERS else (bad / name).write_text(str(content))
        dist.barrier()
        with pytest.raises(CheckpointError, match=said):
            accelerator.load_state(bad)


def going_on_without(source: Path, out: Path) -> None:
    _trainer(source, out, max_steps=1, lr_scheduler_type="linear").train()
    good = out / "checkpoint-1"
    allowed = {"allow_incomplete": True}
    for name, what in (("scheduler.pt", "the scheduler"), ("rng_state_1.pth", "random states")):
        bad = good.with_name(f"without {name}")
        if dist.get_rank() == 0:
            gone(name)(shutil.copytree(good, bad))
        dist.barrier()
        trainer = _trainer(source, out / "on", max_steps=2, save_strategy="no", ours=allowed)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trainer.train(resume_from_checkpoint=str(bad))
        said = [str(warning.message) for warning in seen if "anew" in str(warning.message)]
        assert [what in text for text in said] == ([True] if dist.get_rank() == 0 else []), said
        steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
        assert steps == {2}, "the optimizer went on, although the scheduler is absent"


@pytest.mark.parametrize("in_turn", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_damaged_state_is_one_error_before_anything_is_read(folders: Any, tmp_path: Path, in_turn: bool) -> None:
    damaged = {each.__name__: partial(each, in_turn) for each in (damaged_checkpoints, damaged_states)}
    _run(folders["llama"], tmp_path, going_on_without, **damaged)


# ---- several models and optimizers ----


def _loop(source: Path) -> tuple[Accelerator, Any, Any]:
    accelerator = make_accelerator(cpu=True)
    model = from_pretrained(source, accelerator=accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, _ = accelerator.prepare(model, optimizer, scheduler)
    return accelerator, model, optimizer


def _step(accelerator: Any, model: Any, *optimizers: Any) -> None:
    row = make_rows(2)[dist.get_rank()]
    accelerator.backward(model(**{key: value[None] for key, value in row.items()}).loss)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _teacher_first(accelerator: Any, sources: dict[str, Path]) -> tuple[list[Any], list[Any]]:
    teacher = from_pretrained(sources["tied"], accelerator=accelerator).requires_grad_(False)
    student = from_pretrained(sources["llama"], accelerator=accelerator)
    teacher = accelerator.prepare(teacher)
    student, optimizer = accelerator.prepare(student, torch.optim.AdamW(student.parameters(), lr=1e-2))
    return [teacher, student], [optimizer]


def _two(accelerator: Any, sources: dict[str, Path]) -> list[Any]:
    return [from_pretrained(sources[kind], accelerator=accelerator) for kind in ("llama", "tied")]


def _other_order(accelerator: Any, sources: dict[str, Path]) -> tuple[list[Any], list[Any]]:
    first, second = _two(accelerator, sources)
    of_second = torch.optim.AdamW(second.parameters(), lr=1e-2)
    of_first = torch.optim.SGD(first.parameters(), lr=1e-2, momentum=0.9)
    first, second, *optimizers = accelerator.prepare(first, second, of_second, of_first)
    return [first, second], optimizers


def _two_of_one(accelerator: Any, sources: dict[str, Path]) -> tuple[list[Any], list[Any]]:
    model = from_pretrained(sources["llama"], accelerator=accelerator)
    halves = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]]
    made = [torch.optim.AdamW(halves[0], lr=1e-2), torch.optim.Adagrad(halves[1], lr=1e-2)]
    model, *optimizers = accelerator.prepare(model, *made)
    return [model], optimizers


def _one_of_two(accelerator: Any, sources: dict[str, Path]) -> tuple[list[Any], list[Any]]:
    first, second = _two(accelerator, sources)
    made = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
    first, second, optimizer = accelerator.prepare(first, second, made)
    return [first, second], [optimizer]


MAKE = (_teacher_first, _other_order, _two_of_one, _one_of_two)


def _all_of(models: list[Any], optimizers: list[Any]) -> list[torch.Tensor]:
    tensors = [parameter for model in models for parameter in model.parameters()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                tensors += [state[key] for key in sorted(state)]
    return [full(tensor).clone() for tensor in tensors]


def several(make: Callable[..., Any], sources: dict[str, Path], out: Path) -> None:
    accelerator = make_accelerator(cpu=True)
    models, optimizers = make(accelerator, sources)

    def step() -> None:
        for model in models:
            if any(parameter.requires_grad for parameter in model.parameters()):
                _step(accelerator, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step()
    accelerator.save_state(out)
    saved = _all_of(models, optimizers)
    step()
    expected = _all_of(models, optimizers)
    accelerator.free_memory()
    models, optimizers = make(accelerator, sources)
    accelerator.load_state(out)
    assert all(map(torch.equal, _all_of(models, optimizers), saved))
    step()
    found = _all_of(models, optimizers)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def accelerate_itself_reads_what_one_model_saved(sources: dict[str, Path], out: Path) -> None:
    accelerator, model, optimizer = _loop(sources["llama"])
    _step(accelerator, model, optimizer)
    accelerator.save_state(out / "state")
    saved = _all_of([model], [optimizer])
    _step(accelerator, model, optimizer)
    Accelerator.load_state(accelerator, str(out / "state"))
    assert all(map(torch.equal, _all_of([model], [optimizer]), saved))


def one_rank_that_fails_stops_the_others(sources: dict[str, Path], out: Path) -> None:
    """Also where only rank 0 writes a file between the gathers of two models."""
    accelerator = make_accelerator(cpu=True)
    accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    _other_order(accelerator, sources)
    full_disk = patch("torch.save", side_effect=OSError(28, "No space left on device"))
    with full_disk, pytest.raises((CheckpointError, RanksError), match="No space left on device"):
        accelerator.save_state(out / "state")
    assert not (out / "state").exists()


@fast_and_nightly(lambda makes: [(makes[1],)], MAKE)
def test_models_and_optimizers_are_saved_in_any_number_and_order(
    folders: dict[str, Path], tmp_path: Path, combinations: list[tuple[Any]]
) -> None:
    makes = {make.__name__: partial(several, make) for (make,) in combinations}
    cases = (accelerate_itself_reads_what_one_model_saved, one_rank_that_fails_stops_the_others)
    _run(folders, tmp_path, *cases, **makes)
