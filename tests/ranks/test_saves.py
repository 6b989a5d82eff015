"""Saving as one machine: where (a folder, a store, the hub) × what (weights, an adapter, a training state, an export) ×
how (at once, in the background) × which call or request fails, on which rank, or is the last before a kill.

In each cell the place holds the former checkpoint or the new one, never parts of both; the error is the same on all
ranks; the next save succeeds and leaves nothing hidden."""

import errno
import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import peft
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from hf_fsdp_tools import (
    CheckpointError,
    ConfigError,
    ParameterEMA,
    RanksError,
    TrainerSettings,
    export_checkpoint,
    from_pretrained,
    save_pretrained,
    wait_for_saves,
)
from hf_fsdp_tools.saving import hidden_folder
from hf_fsdp_tools.saving import target as places
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import assert_same_tensors, full_state, loaded, make_checkpoint, make_model, no_space, refusal
from tests._dist import run_cases, run_ranks
from tests._hub import fake_hub
from tests._training import ShardedTrainer, arguments, make_rows, new_accelerator
from tests.api import HiddenFolder, all_ranks, read_manifest
from tests.ranks.test_hub import use_and_run

OLD, NEW = 5, 6
QUIET = {"load_kwargs": {"progress": False}}


_WRITES = {"os.rename", "os.remove", "os.link", "os.symlink", "os.mkdir", "os.rmdir", "os.truncate"}
_heard: dict[str, Callable[[], None] | None] = {"by": None}


def _hear(event: str, args: tuple[Any, ...]) -> None:
    """Tell the listener before each call of this process that changes the file system."""
    listener = _heard["by"]
    opens = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    is_write = event in _WRITES or opens
    if listener is not None and is_write:
        _heard["by"] = None  # what the listener does is not heard
        try:
            listener()
        finally:
            _heard["by"] = listener


@contextmanager
def hearing(listener: Callable[[], None]) -> Iterator[None]:
    """Call the listener before each change of the file system, of which there is one at a time meanwhile. The hook
    stays, so only in a rank of a test."""
    if "is added" not in _heard:
        sys.addaudithook(_hear)
        _heard["is added"] = None
    _heard["by"] = listener
    try:
        with patch.object(places, "ThreadPoolExecutor", partial(ThreadPoolExecutor, 1)):
            yield
    finally:
        _heard["by"] = None


@contextmanager
def hearing_requests(listener: Callable[[], None]) -> Iterator[None]:
    """Call the listener before each request that changes a store (fsspec's in memory)."""
    with ExitStack() as stack:
        for owner, name in ((MemoryFile, "commit"), (MemoryFileSystem, "_rm")):
            do = getattr(owner, name)
            heard = lambda *args, do=do: (listener(), do(*args))[1]  # noqa: E731
            stack.enter_context(patch.object(owner, name, heard))
        yield


class FailsOnce:
    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            no_space()


def visible(folder: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if not re.search(r"(^|/)\.(?!metadata$)", name)}


class Folder:
    hearing = staticmethod(hearing)

    def __init__(self, root: Path) -> None:
        self.place, self.copies = root / "checkpoint-1", root.with_name(f"{root.name} copies")
        self.copies.mkdir(parents=True, exist_ok=True)

    def content(self) -> dict[str, bytes]:
        return visible(self.place)

    def keep(self) -> Path:
        """A copy, hidden files included, as a kill would leave it."""
        copy = self.copies / f"{len([*self.copies.iterdir()]):03d}"
        return shutil.copytree(self.place, copy, symlinks=True) if self.place.exists() else copy

    def put_back(self, kept: Path | None) -> None:
        """All ranks call."""
        all_ranks(None)
        if kept is not None:
            shutil.rmtree(self.place, ignore_errors=True)
            shutil.copytree(kept, self.place, symlinks=True)
        all_ranks(None)

    def hidden(self) -> list[Path]:
        return [*self.place.parent.glob(".*"), *self.place.glob(".*"), *self.links()]

    def links(self) -> list[Path]:
        return [path for path in self.place.rglob("*") if path.is_symlink()]


class Store:
    hearing = staticmethod(hearing_requests)
    place = "memory://run"

    def content(self) -> dict[str, bytes]:
        return {name: file.getvalue() for name, file in MemoryFileSystem.store.items()}

    keep = content

    def put_back(self, kept: dict[str, bytes]) -> None:
        MemoryFileSystem.store.clear()
        for name, content in kept.items():
            MemoryFileSystem().pipe_file(name, content)


def moments(save: Callable[[], object], target: Any) -> list[Any]:
    """What is kept of the target as a kill at each change of rank 0 would leave it: each other one. All ranks call."""
    seen: list[Any] = []
    kept = []

    def copy() -> None:
        now = target.content(), getattr(target, "links", list)()
        if now not in seen:
            seen.append(now)
            kept.append(target.keep())

    if dist.is_initialized() and dist.get_rank() > 0:
        save()
    else:
        with target.hearing(copy):
            save()
        copy()
    return kept


def fail_at_each_change(
    save: Callable[[], object], target: Any, rank: int, is_new: Callable[[], bool], step: int = 1
) -> tuple[int, int]:
    """A save over the target whose n-th change fails on that rank, for each n; how many kept what was there, and how
    many saved the new all the same, as the last did, of which nothing failed. All ranks call."""
    here, kept, saved = dist.get_rank() if dist.is_initialized() else 0, 0, 0
    before, former = target.content(), target.keep() if here == 0 else None
    all_ranks(None)
    for n in count(1, step):
        fault, said = FailsOnce(n), ""
        with target.hearing(fault) if here == rank else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a former file that cannot be removed
            try:
                save()
                wait_for_saves()
            except (CheckpointError, RanksError) as error:  # the other rank's, where the Trainer's own code fails
                said = str(error)
        told = all_ranks(said)
        assert len({*told}) == 1 or any("While saving" in each and "rank 0 failed" in each for each in told), (n, told)
        assert not said or "No space left on device" in said, n
        if said and not re.search(r" is saved, but|^Deleting old states", said):
            assert target.content() == before, (n, said)
            kept += 1
        else:
            assert is_new(), n
            target.put_back(former)
            saved += 1
        if any(all_ranks(here == rank and fault.left > 0)):
            return kept, saved
    raise AssertionError


def configured(model: PreTrainedModel, other: bool) -> PreTrainedModel:
    model.config.rms_norm_eps = 1e-3 if other else 1e-6
    return model


def tuned(seed: int, *, other: bool = False) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False, lora_alpha=16 if other else 8)
    return get_peft_model(make_model("llama"), config)


class Run:
    """A training state in the making."""

    def __init__(self, source: Path) -> None:
        self.accelerator: Any = new_accelerator()
        model = from_pretrained(source, accelerator=self.accelerator, **QUIET)
        made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, made)

    def step(self) -> None:
        row = make_rows(2)[dist.get_rank()]
        self.accelerator.backward(self.model(**{key: value[None] for key, value in row.items()}).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


class OfLibrary(torch.nn.Module):
    """A model that saves itself, with one of transformers in it."""

    def __init__(self, inside: PreTrainedModel) -> None:
        super().__init__()
        self.inside, self.head = inside, torch.nn.Linear(2, 2)

    def save_pretrained(self, folder: str) -> None:
        self.inside.save_pretrained(folder)
        Path(folder, "head.txt").write_text("new")


STATES = ("state", "trainer")


class Cell(NamedTuple):
    former: str | None
    """What is there before: weights in files of that size, an "adapter", a "state" or the checkpoint of a "trainer"."""
    new: str
    other: bool = False
    """Whether the new config is another one."""
    blocking: bool = True

    def make_former(self, place: Path) -> None:
        if self.former == "adapter":
            tuned(OLD).save_pretrained(str(place))
        elif self.former not in (None, *STATES):
            configured(make_model("llama", seed=OLD), False).save_pretrained(place, max_shard_size=self.former)

    def saver(self, source: Path, place: Path) -> Callable[[], object]:
        """What saves the new in place of the former, on all ranks; it is loaded already."""
        how: dict[str, Any] = {} if self.blocking else {"blocking": False}
        if self.new == "trainer":
            args = arguments(place.parent, max_steps=1, save_strategy="steps", save_steps=1)

            def train() -> None:
                args.learning_rate *= 1.01  # another state than the former
                model = from_pretrained(source, accelerator=new_accelerator(), **QUIET)
                ours = TrainerSettings(blocking=self.blocking)
                ShardedTrainer(model=model, args=args, train_dataset=make_rows(4), fsdp_settings=ours).train()

            train()
            wait_for_saves()
            return train
        if self.new == "state":
            run = Run(source)
            run.step()
            run.accelerator.save_state(place)
            run.step()
            return partial(run.accelerator.save_state, place, **how)
        if self.new == "export":
            return partial(export_checkpoint, source, place, max_shard_size="60KB")
        if self.new == "adapter":
            return partial(save_pretrained, tuned(NEW, other=self.other), place)
        model = configured(loaded("llama", source), self.other)
        if self.new == "library":
            return partial(save_pretrained, OfLibrary(model), place, max_shard_size="60KB")
        return partial(save_pretrained, model, place, max_shard_size=self.new, **how)

    def which(self, open_it: Callable[[], Any]) -> str:
        """What a folder opens as, weights and config; "refused" for nothing."""
        try:
            opened = open_it()
        except (CheckpointError, OSError, ValueError):
            return "refused"
        state, seeds = full_state(opened), {"old": OLD, "new": NEW}
        is_adapter = isinstance(opened, PeftModel)
        for name, seed in seeds.items():
            other = self.other and name == "new"
            expected, said = known(is_adapter, seed, other)
            if all(torch.equal(state[key], tensor) for key, tensor in expected.items()):
                is_new = name == "new"
                if self.new == "library" and getattr(opened, "has_head", is_new) != is_new:
                    return f"{name} with the files of the other"
                return name if config_of(opened) == said else f"{name} with the config of the other"
        return "a mixture"


@cache
def known(is_adapter: bool, seed: int, other: bool) -> tuple[dict[str, torch.Tensor], float]:
    model = tuned(seed, other=other) if is_adapter else configured(make_model("llama", seed=seed), other)
    return model.state_dict(), config_of(model)


def config_of(model: Any) -> float:
    return model.peft_config["default"].lora_alpha if isinstance(model, PeftModel) else model.config.rms_norm_eps


def build_and_load(folder: Path | str) -> PreTrainedModel:
    model = build_meta_model(folder, auto_class=AutoModelForCausalLM)
    load_weights(model, folder, strict=True, progress=False)
    return model


def by_library(folder: Path) -> Any:
    if (folder / "adapter_config.json").exists():
        return PeftModel.from_pretrained(make_model("llama"), folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    model.has_head = (folder / "head.txt").exists()  # of a library's model
    return model


def after_the_next(folder: Path) -> Any:
    """What is there once the next save has begun and ended."""
    hidden = HiddenFolder(folder)
    hidden.begin()
    hidden.discard()
    assert not list(folder.glob(".*")) and not [path for path in folder.rglob("*") if path.is_symlink()]
    return by_library(folder)


CELLS = {
    "shards over as many, another config": Cell("60KB", "60KB", True),
    "an adapter over one of another config": Cell("adapter", "adapter", True),
    "full weights over an adapter": Cell("adapter", "5GB"),
    "a state over a state, in the background": Cell("state", "state", blocking=False),
    "shards over another number": Cell("60KB", "100KB"),
    "a file over shards, in the background": Cell("60KB", "5GB", True, blocking=False),
    "shards over a file, another config": Cell("5GB", "60KB", True),
    "a file over a file, another config": Cell("5GB", "5GB", True),
    "shards in a new folder": Cell(None, "60KB"),
    "an export over shards": Cell("100KB", "export"),
    "a state over a state": Cell("state", "state"),
    "a library's model over shards": Cell("100KB", "library", True),
    "a run that was begun anew, in the background": Cell("trainer", "trainer", blocking=False),
}


def in_cells(case: Callable[..., Any], names: list[str], source: Path, root: Path) -> Any:
    return run_cases({name: partial(case, CELLS[name], source, root / name) for name in names})


def with_former(cell: Cell, source: Path, root: Path) -> tuple[Folder, Callable[[], object]]:
    target = Folder(root)
    if dist.get_rank() == 0:
        cell.make_former(target.place)
        target.place.mkdir(exist_ok=True, parents=True)
        (target.place / "README.md").write_text("---\nlicense: mit\n---\nmine\n")
    all_ranks(None)
    return target, cell.saver(source, target.place)


def killed(cell: Cell, source: Path, root: Path) -> Any:
    """The contents at each change, which the test opens; of a state the number of those that are the new one."""
    target, save = with_former(cell, source, root)
    kept = moments(lambda: (save(), wait_for_saves()), target)
    assert not target.hidden()
    text = (target.place / "README.md").read_text()
    assert "mine" in text and "license: mit" in text
    os.umask(umask := os.umask(0))
    modes = {path.stat().st_mode & 0o777 for path in target.place.glob("*.*") if path.suffix != ".former"}
    assert modes <= {0o666 & ~umask, 0o600 if cell.new in STATES else 0o666 & ~umask}, modes
    return kept


def failing(cell: Cell, source: Path, root: Path) -> list[tuple[int, int]]:
    """Of each rank's changes: how many failures kept the former, and how many saved the new all the same."""
    found = []
    for rank in (0, 1):
        target, save = with_former(cell, source, root / f"{rank}")

        def is_new(place: Path = target.place) -> bool:
            if cell.new not in STATES:
                return all(all_ranks(dist.get_rank() > 0 or cell.which(partial(by_library, place)) == "new"))
            manifest = read_manifest(place)
            return manifest is not None and not manifest.damage(place)

        found.append(fail_at_each_change(save, target, rank, is_new, 3 if cell.new == "trainer" else 1))
        left = [path for path in target.hidden() if not path.name.startswith(".seen-by-all")]
        assert not left, left  # but for an empty file that could not be removed
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("source"), seed=NEW)


def fast_and_nightly(*fast: int) -> Any:
    """These cells in each commit, all others nightly."""
    names = [*CELLS]
    chosen = [names[i] for i in fast]
    others = pytest.param([name for name in names if name not in chosen], id="others", marks=pytest.mark.nightly)
    return pytest.mark.parametrize("names", [pytest.param(chosen, id="fast"), others])


@fast_and_nightly(0, 1, 2, 3, 11)
def test_a_kill_at_any_change_leaves_one_whole_checkpoint(source: Path, tmp_path: Path, names: list[str]) -> None:
    for name, copies in run_ranks(in_cells, 2, killed, names, source, tmp_path)[0].items():
        cell, contents = CELLS[name], [visible(copy) for copy in copies]
        if cell.new in STATES:
            switched = contents.index(contents[-1])
            assert switched > 0 and all(content == contents[0] for content in contents[:switched])
            assert all(content == contents[-1] for content in contents[switched:])
            continue
        assert len(copies) > 10, "the changes were not all heard"
        readers: list[Callable[[Path], Any]] = [by_library, after_the_next]
        readers += [build_and_load] if "adapter" not in cell[:2] else []
        for open_it in readers:
            found = [cell.which(partial(open_it, copy)) for copy in copies]
            first, switched = "old" if cell.former else "refused", found.index("new")
            assert found == [first] * switched + ["new"] * (len(found) - switched), (name, found)
        text = contents[-1].get("model.safetensors.index.json")
        files = set(json.loads(text)["weight_map"].values()) if text is not None else {"model.safetensors"}
        left = {file for file in contents[-1] if file.endswith(".safetensors")}
        assert left == ({"adapter_model.safetensors"} if cell.new == "adapter" else files), "nothing of the former"


@fast_and_nightly(0, 3)
def test_a_failure_at_any_change_is_undone(source: Path, tmp_path: Path, names: list[str]) -> None:
    found = run_ranks(in_cells, 2, failing, names, source, tmp_path)
    assert found[0] == found[1]
    for name, ((kept, saved), (kept_by_second, _)) in found[0].items():
        assert kept > 15 and 5 < saved < 30, (name, kept, saved, "the changes were not all heard")
        assert kept_by_second or CELLS[name].new in ("adapter", "export"), "what rank 1 writes fails, too"


def test_a_store_has_at_each_request_the_old_checkpoint_or_the_new_one(source: Path) -> None:
    plain, target = build_and_load(source), Store()
    lora = LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    adapted: Any = from_pretrained(source, peft_config=lora, **QUIET)
    ema = ParameterEMA(plain)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 1

    def averages() -> None:
        with ema.applied():
            save_pretrained(plain, target.place)

    def adapter(value: float) -> None:
        with torch.no_grad():
            for parameter in adapted.parameters():
                parameter.copy_(torch.full_like(parameter, value) if parameter.requires_grad else parameter)
        save_pretrained(adapted, target.place)

    def weights(**how: Any) -> None:
        save_pretrained(plain, target.place, **how)
        wait_for_saves()

    cells: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (weights, averages),
        (averages, partial(weights, blocking=False)),
        (partial(adapter, 1), partial(adapter, 2)),
    ]
    for first, second in cells:
        states = []
        for save in (second, first):
            target.put_back({})
            save()
            states.insert(0, opened_from_store())
        former, kept = target.content(), moments(second, target)
        found = []
        for moment in kept:
            target.put_back(moment)
            now = opened_from_store()
            found += [[all(torch.equal(now[key], t) for key, t in state.items()) for state in states].index(True)]
        assert found == sorted(found) and set(found) == {0, 1}, found
        target.put_back(former)
        is_new = lambda new=states[1]: all(torch.equal(t, new[key]) for key, t in opened_from_store().items())  # noqa: E731
        (failed, saved), is_adapter = fail_at_each_change(second, target, 0, is_new), second is cells[2][1]
        assert (failed, len(kept), saved) == (1, 2, 1) if is_adapter else failed > 1 and len(kept) > 2 and saved > 1
    MemoryFileSystem().pipe_file("/run/README.md", b"mine")
    save_pretrained(adapted, target.place)
    before = target.content()
    assert before["/run/README.md"] == b"mine"
    adapted.peft_config["default"].lora_alpha = 9
    with pytest.raises(CheckpointError, match=r"an adapter of another configuration \(lora_alpha\).* another place"):
        save_pretrained(adapted, target.place)
    assert target.content() == before
    target.put_back({})


def opened_from_store() -> dict[str, torch.Tensor]:
    return full_state(from_pretrained(Store.place, **QUIET))


UPLOADS = [(step, blocking) for step in ("commit", "preupload", "batch", "put") for blocking in (True, False)]


def an_upload_fails_once(step: str, blocking: bool, source: Path, place: Path) -> None:
    cell, name = CELLS["shards in a new folder"], f"org/{step}-{blocking}"
    hub = {"push_to_hub": True, "repo_id": name, "token": "secret", "blocking": blocking}
    model = loaded("llama", source)
    if dist.get_rank() == 0:  # where the files of the cell before are, which nobody would put again
        shutil.rmtree(place.parent / "hub" / "lfs", ignore_errors=True)

    def save() -> None:
        save_pretrained(model, place, **hub)
        wait_for_saves()

    said = refusal(save, CheckpointError)
    assert f"{str(place)!r} is saved and complete, but its upload to {name!r} failed" in said
    assert "no room" in said, said
    assert cell.which(partial(by_library, place)) == "new"
    for expected in ("old", "new"):
        assert cell.which(partial(from_pretrained, name, token="secret", **QUIET)) == expected
        save()


@pytest.mark.parametrize("uploads", [UPLOADS[:1], pytest.param(UPLOADS[1:], marks=pytest.mark.nightly)])
def test_what_fails_at_a_step_of_an_upload_leaves_the_save_and_the_former_commit(
    source: Path, tmp_path: Path, uploads: Any
) -> None:
    former = make_checkpoint("llama", tmp_path / "former", seed=OLD)
    moods = {f"org/{step}-{blocking}": (f"{step} HTTP 400 no room", 1) for step, blocking in uploads}
    (tmp_path / "hub").mkdir()
    with fake_hub({name: {"main": former} for name in moods}, moods, tmp_path / "hub") as server:
        cases = {f"{at}": partial(an_upload_fails_once, *at, source, tmp_path / f"{at}") for at in uploads}
        run_ranks(use_and_run, 2, server.url, tmp_path / "home", cases)


def test_a_job_that_saves_at_the_same_time_is_refused_and_left_alone(source: Path, tmp_path: Path) -> None:
    model, target = build_and_load(source), tmp_path / "saved"
    other = HiddenFolder(target)
    other.begin()
    try:
        with pytest.raises(CheckpointError, match=rf"Another job is saving .*process {os.getpid()} on .*of its own"):
            save_pretrained(model, target)
        assert [path.name for path in target.iterdir()] == [other.path.name] and other.new.is_dir()
    finally:
        other.discard()
    assert not target.exists(), "nothing was saved, so nothing is left"
    save_pretrained(model, target)


def test_links_of_strangers_are_not_followed(source: Path, tmp_path: Path) -> None:
    """A folder that others may write to holds what looks like a save that was killed, and leads elsewhere."""
    home, target = tmp_path / "home", tmp_path / "saved"
    for folder in (home / "ssh", home / "data", target / ".save-0123abcd.incomplete" / "former"):
        folder.mkdir(parents=True)
    (home / "ssh" / "id").write_text("key")
    (home / "data" / "rows").write_text("rows")
    hidden = target / ".save-0123abcd.incomplete"
    (hidden / "now").symlink_to("../../home/ssh")
    (hidden / "former" / "id").touch()
    (target / "id").symlink_to(f"{hidden.name}/now/id")
    (target / ".save-4567abcd.incomplete").symlink_to(home / "data")
    for path in (home / "data", home / "data" / "rows", *hidden.rglob("*"), hidden):
        os.utime(path, (time.time() - 4000,) * 2, follow_symlinks=False)
    save_pretrained(build_and_load(source), target)
    assert (home / "ssh" / "id").read_text() == "key" and (home / "data" / "rows").read_text() == "rows"


def test_an_adapter_and_a_full_model_in_one_folder_are_never_opened_together(tmp_path: Path) -> None:
    base, out = make_checkpoint("llama", tmp_path / "base", seed=OLD), tmp_path / "out"
    full_model, adapter = build_and_load(base), tuned(NEW)
    adapter.peft_config["default"].base_model_name_or_path = str(base)
    save_pretrained(adapter, out)
    with pytest.warns(UserWarning, match=r"adapter_config.json, adapter_model.safetensors would be opened with"):
        save_pretrained(full_model, out)
    assert full_state(AutoModelForCausalLM.from_pretrained(out)).keys() == full_model.state_dict().keys()
    with pytest.warns(UserWarning, match=r"whose config.json would be opened with"):
        save_pretrained(adapter, out)
    assert AutoModelForCausalLM.from_pretrained(out).name_or_path == str(base), "not what lies beside the adapter"
    assert (out / "model.safetensors").exists(), "it may be somebody's base"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_pretrained(adapter, base)
    assert AutoModelForCausalLM.from_pretrained(base).name_or_path == str(base), "in the folder of its own base"


def test_a_library_has_its_own_card_and_what_is_in_it_is_an_adapter(tmp_path: Path) -> None:
    class WithCard(OfLibrary):
        def save_pretrained(self, folder: str) -> None:
            super().save_pretrained(folder)
            Path(folder, "README.md").write_text("of the library")

    for _ in range(2):
        report = save_pretrained(WithCard(tuned(NEW)), tmp_path)
        assert (tmp_path / "README.md").read_text() == "of the library"
        assert report.files == ("adapter_model.safetensors",) and "head.txt" in report.others
    assert_same_tensors(by_library(tmp_path).state_dict(), tuned(NEW).state_dict())


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        Path(folder, "half.json").write_text("")
        raise KeyError("vocab")


def every_fault(source: Path, target: Path) -> None:
    """What fails, on which rank (None: on all), in which save, and what is said of it."""
    model, file, new = loaded("llama", source), target / "config.json", target / "new"
    adapter = from_pretrained(source, peft_config=LoraConfig(r=3, target_modules=["q_proj"]))
    no_room = SafetensorError("Error while serializing: I/O error: No space left on device")
    dtypes = {"dtype=torch.bfloat16": torch.float8_e4m3fnuz, "convert it first": torch.complex128}
    here = dist.get_rank()

    def save(place: Path = target, of: Any = model, **options: Any) -> Callable[[], object]:
        return lambda: save_pretrained(of, place, **options)

    def odd(dtype: torch.dtype) -> Any:
        return patch.dict(model._buffers, {"odd": torch.zeros(8).to(dtype)})

    def removed(*_: Any) -> None:
        shutil.rmtree(new)

    cannot = ValueError("cannot be merged") if here == 1 else None
    merge = patch.object(peft.tuners.lora.Linear, "merge", autospec=True, side_effect=cannot)
    rows: list[tuple[Any, int | None, Callable[[], object], str]] = [
        (merge, None, save(of=adapter, merge_adapters=True), "rank 1: PEFT cannot merge .* cannot be merged"),
        (patch.object(peft.peft_model, "safe_save_file", side_effect=no_room), None, save(of=adapter),
         "save the adapter to .*No space left on device"),
        (nullcontext(), None, save(processing_class=NoTokenizer()), "config and tokenizer .*KeyError"),
        (patch.object(hidden_folder, "_fallocate", lambda *_: errno.ENOSPC), 0, save(),
         "Cannot save to .*No space left on .*bytes are to be written"),
        (patch.object(os, "pwritev", no_space), 1, save(), "rank 1: .*Cannot write .*No space left.*Check"),
        (patch("hf_fsdp_tools.saving.save.sync", removed), 1, save(new), "No such file"),
        (nullcontext(), None, save(file / "saved"), "Cannot save to .*Not a directory.*Check "),
        (nullcontext(), None, save(file), "is a file; give the name of a folder"),
        (nullcontext(), None, save(target / ("n" * 256)), "Cannot save to .*File name too long"),
        *((odd(t), None, save(), f"'odd' is {str(t)[6:]}, for which .*{cure}") for cure, t in dtypes.items()),
    ]  # fmt: skip
    for fault, rank, call, words in rows:
        with fault if rank in (None, here) else nullcontext():
            said = refusal(call, ConfigError if fault is merge else CheckpointError)
        assert re.search(f"(?s){words}", said), said
    quickly = patch.object(hidden_folder, "_APPEARS_S", 0.5)
    said = pytest.raises(CheckpointError, match=r"rank 1: .*not the same folder on this rank as on .*absent.*all ranks")
    with quickly, said:
        save_pretrained(model, target / f"{here}")


def test_what_fails_is_one_error_on_every_rank_and_leaves_what_was_saved(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "saved"
    for former in ("60KB", "adapter"):
        Cell(former, "").make_former(target)
    before = visible(target)
    run_ranks(every_fault, 2, source, target)
    assert visible(target) == before and not list(target.glob(".*")) and not (target / "new").exists()


def record_syncs(source: Path, target: Path) -> list[str]:
    model, done = loaded("llama", source), []

    def noting(name: str, what: str, of: Callable[..., Any]) -> Any:
        real = getattr(os, name)
        return patch.object(os, name, lambda *a, **k: (done.append(f"{what} {Path(of(*a)).name}"), real(*a, **k))[1])

    with (
        noting("fsync", "sync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")),
        noting("replace", "rename", lambda old, new: new),
    ):
        save_pretrained(model, target, max_shard_size="60KB")
    return done


def test_everything_is_synced_before_it_is_renamed_and_the_folder_before_and_after_the_switch(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "saved"
    Cell("60KB", "").make_former(target)
    first, second = run_ranks(record_syncs, 2, source, target)
    files = {f"sync model-{i:05d}-of-00004.safetensors" for i in range(1, 5)}
    assert set(second) == files, "each rank that wrote to a file"
    start = next(i for i, event in enumerate(first) if event.startswith("rename"))
    assert files | {"sync model.safetensors.index.json"} <= set(first[:start])
    switch = len(first) - 1 - first[::-1].index("rename now")
    assert "sync saved" in first[start:switch] and re.fullmatch(r"sync \.save-.*incomplete", first[switch + 1])
    end = first.index("rename model.safetensors.index.json", switch)
    assert first[end + 1] == "sync saved"
