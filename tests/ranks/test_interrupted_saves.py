"""Whatever happens to a save, the folder holds the former checkpoint or the new one: never parts of both."""

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
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_fsdp_tools import CheckpointError, ConfigError, ParameterEMA, from_pretrained, save_pretrained
from hf_fsdp_tools.saving import hidden_folder, publish
from hf_fsdp_tools.saving.hidden_folder import HiddenFolder
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import full_state, loaded, make_checkpoint, make_model, refusal
from tests._dist import run_cases, run_ranks
from tests._grids import fast_and_nightly

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
        with patch.object(publish, "ThreadPoolExecutor", partial(ThreadPoolExecutor, 1)):
            yield
    finally:
        _heard["by"] = None


def visible(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def crash_points(save: Callable[[], object], target: Path, copies: Path) -> int:
    """Copies of the target, hidden folders included, as a kill at each change of rank 0 would leave it: each other one.

    All ranks call; the number of changes.
    """
    seen: list[tuple[dict[str, bytes], list[str]]] = []
    count = 0

    def copy() -> None:
        nonlocal count
        count += 1
        now = visible(target), sorted(path.name for path in target.rglob("*") if path.is_symlink())
        if now not in seen:
            seen.append(now)
            shutil.copytree(target, copies / f"{len(seen):02d}", symlinks=True)

    if dist.get_rank() == 0:
        with hearing(copy):
            save()
        copy()
    else:
        save()
    dist.barrier()
    return count


# ---- full checkpoints ----

OLD, NEW = 5, 6

SAVES = {
    # size of the former shards, of the new ones, whether the config differs
    "shards over as many, another config": ("60KB", "60KB", True),
    "shards over another number": ("60KB", "100KB", False),
    "a file over shards, another config": ("60KB", "5GB", True),
    "shards over a file, another config": ("5GB", "60KB", True),
    "a file over a file, another config": ("5GB", "5GB", True),
    "shards in a new folder": (None, "60KB", False),
}


def configured(model: PreTrainedModel, other: bool) -> PreTrainedModel:
    model.config.rms_norm_eps = 1e-3 if other else 1e-6
    return model


def by_index(folder: Path) -> PreTrainedModel:
    """What a reader sees that follows the index and knows nothing of transformers."""
    model = LlamaForCausalLM(LlamaConfig(**json.loads((folder / "config.json").read_text())))
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    model.load_state_dict({key: value for file in files for key, value in load_file(folder / file).items()})
    return model


def begin_and_end(folder: Path) -> Path:
    hidden = HiddenFolder(folder)
    hidden.begin()
    hidden.end()
    assert not list(folder.glob(".*")) and not [path for path in folder.rglob("*") if path.is_symlink()]
    return folder


def make_former(target: Path, size: str | None) -> None:
    configured(make_model("llama", seed=OLD), False).save_pretrained(target, max_shard_size=size)


def save_while_it_is_copied(former: str | None, size: str, other: bool, source: Path, root: Path) -> int:
    model = loaded("llama", source)
    configured(model, other)
    if dist.get_rank() == 0 and former is not None:
        make_former(root / "saved", former)
    dist.barrier()
    (root / "copies").mkdir(exist_ok=True, parents=True)
    (root / "saved").mkdir(exist_ok=True, parents=True)
    return crash_points(
        lambda: save_pretrained(model, root / "saved", max_shard_size=size), root / "saved", root / "copies"
    )


def save_each(names: list[str], source: Path, root: Path) -> dict[str, int]:
    return run_cases({name: partial(save_while_it_is_copied, *SAVES[name], source, root / name) for name in names})


def which(open_it: Callable[[], Any], known: dict[str, PreTrainedModel], other: bool) -> str:
    """Which model a folder opens as, weights and config; "refused" for none."""
    try:
        opened = open_it()
    except (CheckpointError, OSError, ValueError):
        return "refused"
    state = full_state(opened)
    for name, model in known.items():
        expected = model.state_dict()
        if all(torch.equal(state[key], tensor) for key, tensor in expected.items()):
            eps = 1e-3 if other and name == "new" else 1e-6
            return name if opened.config.rms_norm_eps == eps else f"{name} with the config of the other"
    return "a mixture"


@fast_and_nightly(lambda names: [(names[0],)], list(SAVES))
def test_a_kill_at_any_change_leaves_one_whole_checkpoint(tmp_path: Path, combinations: list[tuple[str]]) -> None:
    known = {"old": make_model("llama", seed=OLD), "new": make_model("llama", seed=NEW)}
    source = make_checkpoint("llama", tmp_path / "source", seed=NEW)
    names = [name for (name,) in combinations]
    counts = run_ranks(save_each, 2, names, source, tmp_path)[0]
    for name in names:
        former, size, other = SAVES[name]
        copies = sorted((tmp_path / name / "copies").iterdir())
        assert counts[name] > 15 and len(copies) > 4, "the changes were not heard"
        after_the_next = lambda folder: build_and_load(begin_and_end(folder))  # noqa: E731
        for open_it in (LlamaForCausalLM.from_pretrained, build_and_load, by_index, after_the_next):
            found = [which(lambda c=copy, o=open_it: o(c), known, other) for copy in copies]
            first = "old" if former else "refused"
            switched = found.index("new")
            assert found == [first] * switched + ["new"] * (len(found) - switched), (name, found)
        last = tmp_path / name / "saved"
        assert not [path for path in last.iterdir() if path.name.startswith(".")]
        index = last / "model.safetensors.index.json"
        files = set(json.loads(index.read_text())["weight_map"].values()) if size != "5GB" else {"model.safetensors"}
        assert {path.name for path in last.glob("*.safetensors*")} == files | ({index.name} if size != "5GB" else set())


def build_and_load(folder: Path) -> PreTrainedModel:
    model = build_meta_model(folder, auto_class=AutoModelForCausalLM)
    load_weights(model, folder, strict=True)
    return model


class FailsOnce:
    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")


def fail_at_each_change(source: Path, root: Path, name: str) -> tuple[int, int]:
    """A save whose n-th change fails, for each n; how many kept the old, and how many saved the new all the same."""
    former, size, other = SAVES[name]
    target, model = root / name, build_and_load(source)
    configured(model, other)
    make_former(target, former)
    before, kept, saved = visible(target), 0, 0
    for n in range(1, 60):
        fault = FailsOnce(n)
        with hearing(fault), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an older file that cannot be removed
            try:
                save_pretrained(model, target, max_shard_size=size)
                error = None
            except CheckpointError as raised:
                error = raised
        if error is not None:
            assert "No space left on device" in str(error)
            assert visible(target) == before, n
            kept += 1
        else:
            assert which(lambda: build_and_load(target), {"new": model}, other) == "new", n
            shutil.rmtree(target)
            make_former(target, former)
            saved += 1
        if fault.left > 0:
            break
    return kept, saved


@pytest.mark.parametrize(
    "name",
    [
        "shards over as many, another config",
        pytest.param("shards over a file, another config", marks=pytest.mark.nightly),
    ],
)
def test_a_failure_at_any_change_is_undone(tmp_path: Path, name: str) -> None:
    source = make_checkpoint("llama", tmp_path / "source", seed=NEW)
    ((kept, saved),) = run_ranks(fail_at_each_change, 1, source, tmp_path, name)
    assert kept > 5 and 1 < saved < 30, (kept, saved)


# ---- two jobs, and jobs elsewhere ----


def test_a_job_that_saves_at_the_same_time_is_refused_and_left_alone(tmp_path: Path) -> None:
    source, target = make_checkpoint("llama", tmp_path / "source", seed=NEW), tmp_path / "saved"
    model = build_and_load(source)
    other = HiddenFolder(target)
    other.begin()
    try:
        with pytest.raises(CheckpointError, match=rf"Another job is saving .*process {os.getpid()} on .*of its own"):
            save_pretrained(model, target)
        assert [path.name for path in target.iterdir()] == [other.path.name] and other.new.is_dir()
    finally:
        other.end()
    assert not target.exists(), "nothing was saved, so nothing is left"
    save_pretrained(model, target)


def test_links_of_strangers_are_not_followed(tmp_path: Path) -> None:
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
    save_pretrained(build_and_load(make_checkpoint("llama", tmp_path / "source", seed=NEW)), target)
    assert (home / "ssh" / "id").read_text() == "key" and (home / "data" / "rows").read_text() == "rows"


@pytest.mark.parametrize("why", ["another machine", "no locks", "not begun"])
def test_leftovers_whose_owner_cannot_be_asked_are_removed_after_an_hour(tmp_path: Path, why: str) -> None:
    left = tmp_path / ".save-0123abcd.incomplete"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"12345678")
    if why != "not begun":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip() if why == "no locks" else "another"
        (left / "owner.json").write_text(json.dumps({"boot": boot, "process": 1, "host": "other"}))

    def begin() -> None:
        hidden = HiddenFolder(tmp_path)
        no_locks = patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "Function not implemented"))
        with no_locks if why == "no locks" else nullcontext():
            hidden.begin()
        hidden.end()

    begin()
    assert left.exists()
    for path in (left, *left.iterdir()):
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    begin()
    assert not left.exists()


# ---- adapters ----


def tuned(seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 3, "target_modules": ["q_proj"], "init_lora_weights": False, **options})
    return get_peft_model(make_model("llama"), config)


def save_adapters(root: Path) -> dict[str, list[str]]:
    """An adapter over another, and a full model over an adapter: what PEFT opens before and after the next save."""
    found = {}
    full_model = make_model("llama", seed=NEW)
    for name, alpha in (("another config", 16), ("full model", 8)):
        target, copies = root / name / "saved", root / name / "copies"
        models = {"old": tuned(OLD, lora_alpha=8), "new": tuned(NEW, lora_alpha=alpha)}
        models["old"].save_pretrained(str(target))
        (target / "README.md").write_text("---\nlicense: mit\n---\nmine\n")
        copies.mkdir()
        saved = full_model if name == "full model" else models["new"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # *.former
            crash_points(lambda m=saved, t=target: save_pretrained(m, t), target, copies)
        for folder in sorted(copies.iterdir()):
            opened = [which_of_two(each, models, full_model) for each in (folder, begin_and_end(folder))]
            assert opened[0] == opened[1]
            found.setdefault(name, []).append(opened[0])
        assert "mine" in (target / "README.md").read_text() and "license: mit" in (target / "README.md").read_text()
        assert not list(target.glob(".*"))
        os.umask(umask := os.umask(0))
        modes = {path.stat().st_mode & 0o777 for path in target.iterdir() if path.suffix != ".former"}
        assert modes == {0o666 & ~umask}
    return found


def which_of_two(folder: Path, models: dict[str, Any], full_model: PreTrainedModel) -> str:
    if (folder / "adapter_config.json").exists():
        return which_adapter(folder, models)
    return which(lambda: LlamaForCausalLM.from_pretrained(folder), {"full": full_model}, False)


def which_adapter(folder: Path, models: dict[str, Any]) -> str:
    opened = PeftModel.from_pretrained(make_model("llama"), folder)
    state = opened.state_dict()
    for name, model in models.items():
        if all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items()):
            same = opened.peft_config["default"].lora_alpha == model.peft_config["default"].lora_alpha
            return name if same else f"{name} with the config of the other"
    return "a mixture"


def test_a_kill_leaves_the_old_or_the_new_adapter_and_never_one_with_the_config_of_another(tmp_path: Path) -> None:
    (found,) = run_ranks(save_adapters, 1, tmp_path)
    for name, states in found.items():
        new = "full" if name == "full model" else "new"
        assert (states[0], states[-1], set(states)) == ("old", new, {"old", new}), name


def test_an_adapter_and_a_full_model_in_one_folder_are_never_opened_together(tmp_path: Path) -> None:
    base = make_checkpoint("llama", tmp_path / "base", seed=OLD)
    full_model, adapter = build_and_load(base), tuned(NEW)
    adapter.peft_config["default"].base_model_name_or_path = str(base)
    save_pretrained(adapter, tmp_path / "out")
    with pytest.warns(UserWarning, match=r"adapter_config.json, adapter_model.safetensors would be opened with"):
        save_pretrained(full_model, tmp_path / "out")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.state_dict().keys() == full_model.state_dict().keys()
    assert full_state(from_pretrained(tmp_path / "out")).keys() == full_model.state_dict().keys()
    with pytest.warns(UserWarning, match=r"whose config.json would be opened with"):
        save_pretrained(adapter, tmp_path / "out")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.name_or_path == str(base), "the adapter's base, not what lies beside the adapter"
    assert (tmp_path / "out" / "model.safetensors").exists(), "it may be somebody's base"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_pretrained(adapter, base)
    assert AutoModelForCausalLM.from_pretrained(base).name_or_path == str(base), "in the folder of its own base"
    ours = from_pretrained(base)
    assert hasattr(ours, "peft_config") and ours.name_or_path == str(base)


# ---- stores ----


@contextmanager
def hearing_requests(listener: Callable[[], None]) -> Iterator[None]:
    """Call the listener before each request that changes a store (fsspec's in memory)."""
    with ExitStack() as stack:
        for owner, name in ((MemoryFile, "commit"), (MemoryFileSystem, "_rm")):
            stack.enter_context(patch.object(owner, name, after(listener, getattr(owner, name))))
        yield


def after(listener: Callable[[], None], do: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: (listener(), do(*args))[1]


def stored() -> dict[str, bytes]:
    return {name: file.getvalue() for name, file in MemoryFileSystem.store.items()}


def restore(files: dict[str, bytes]) -> None:
    MemoryFileSystem.store.clear()
    for name, content in files.items():
        MemoryFileSystem().pipe_file(name, content)


URL = "memory://run"


def in_store() -> dict[str, torch.Tensor]:
    return full_state(from_pretrained(URL, load_kwargs={"progress": False}))


def at_each_request(first: Callable[[], object], second: Callable[[], object]) -> tuple[int, int]:
    """A save over another, as a kill at each request would leave it and as a failure does: how many of each."""
    states: list[dict[str, torch.Tensor]] = []
    moments: list[dict[str, bytes]] = []
    for save in (second, first):
        restore({})
        save()
        states.insert(0, in_store())
    before = stored()
    with hearing_requests(lambda: moments.append(stored())):
        second()
    found = []
    for moment in (*moments, stored()):
        restore(moment)
        now = in_store()
        found += [[all(torch.equal(now[key], t) for key, t in state.items()) for state in states].index(True)]
    assert found == sorted(found) and set(found) == {0, 1}, found
    failed = 0
    for n in range(1, len(moments) + 1):
        restore(before)
        with hearing_requests(FailsOnce(n)), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a former file that cannot be removed
            try:
                second()
                expected = states[1]
            except CheckpointError:
                failed, expected = failed + 1, states[0]
        assert all(torch.equal(t, expected[key]) for key, t in in_store().items()), n
    return len(moments), failed


def saves_to_stores(source: Path) -> None:
    plain = build_and_load(source)
    lora = LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    adapted = from_pretrained(source, peft_config=lora, load_kwargs={"progress": False})
    ema = ParameterEMA(plain)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter += 1

    def averages() -> None:
        with ema.applied():
            save_pretrained(plain, URL)

    def adapter(value: float) -> None:
        with torch.no_grad():
            for parameter in adapted.parameters():
                parameter.copy_(torch.full_like(parameter, value) if parameter.requires_grad else parameter)
        save_pretrained(adapted, URL)

    requests, failed = at_each_request(lambda: save_pretrained(plain, URL), averages)
    assert requests > 2 and failed > 1
    assert at_each_request(partial(adapter, 1), partial(adapter, 2)) == (1, 1)
    MemoryFileSystem().pipe_file("/run/README.md", b"mine")
    save_pretrained(adapted, URL)
    before = stored()
    assert before["/run/README.md"] == b"mine"
    adapted.peft_config["default"].lora_alpha = 9
    with pytest.raises(CheckpointError, match=r"an adapter of another configuration \(lora_alpha\).* another place"):
        save_pretrained(adapted, URL)
    assert stored() == before


def test_a_store_has_at_each_request_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    run_ranks(saves_to_stores, 1, make_checkpoint("llama", tmp_path, seed=NEW))


# ---- errors that are the same on every rank ----


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        Path(folder, "half.json").write_text("")
        raise KeyError("vocab")


def refused(save: Callable[[], object], match: str, kind: type[Exception] = CheckpointError) -> None:
    said = refusal(save, kind)
    assert re.search(f"(?s){match}", said), said


def tokenizer_cannot_be_saved(model: Any, _: Any, target: Path) -> None:
    refused(lambda: save_pretrained(model, target, processing_class=NoTokenizer()), "config and tokenizer .*KeyError")


def disk_is_full_or_folder_removed_meanwhile(model: Any, _: Any, target: Path) -> None:
    at_once = patch.object(hidden_folder, "_fallocate", lambda *_: errno.ENOSPC)
    with at_once if dist.get_rank() == 0 else nullcontext():
        refused(lambda: save_pretrained(model, target), "Cannot save to .*No space left on .*bytes are to be written")
    on_one_rank = patch.object(os, "pwritev", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with on_one_rank if dist.get_rank() == 1 else nullcontext():
        refused(lambda: save_pretrained(model, target), "rank 1: .*Cannot write .*No space left.*Check")

    def remove(*_: Any) -> None:
        if dist.get_rank() == 1:
            shutil.rmtree(target / "new")

    with patch("hf_fsdp_tools.saving.save.sync", remove):
        refused(lambda: save_pretrained(model, target / "new"), "No such file")


def folder_is_another_on_each_rank(model: Any, _: Any, target: Path) -> None:
    own = target / f".{dist.get_rank()}"
    own.mkdir()
    with pytest.raises(CheckpointError, match=r"rank 1: .*not the same folder on this rank as on .*absent.*all ranks"):
        save_pretrained(model, own)
    own.rmdir()


def names_that_no_folder_can_have(model: Any, _: Any, target: Path) -> None:
    file = target / "config.json"
    refused(lambda: save_pretrained(model, file / "saved"), "Cannot save to .*Not a directory.*Check ")
    refused(lambda: save_pretrained(model, file), "is a file; give the name of a folder")
    save_pretrained(model, target / ("n" * 250))
    refused(lambda: save_pretrained(model, target / ("n" * 256)), "Cannot save to .*File name too long")


def dtype_has_no_name(model: Any, _: Any, target: Path) -> None:
    for dtype, cure in ((torch.float8_e4m3fnuz, "dtype=torch.bfloat16"), (torch.complex128, "convert it first")):
        model.register_buffer("odd", torch.zeros(8).to(dtype))
        refused(lambda: save_pretrained(model, target), f"'odd' is {str(dtype)[6:]}, for which .*{cure}")
    del model.odd


def disk_is_full_for_an_adapter(_: Any, adapter: Any, target: Path) -> None:
    full = SafetensorError("Error while serializing: I/O error: No space left on device")
    with patch.object(peft.peft_model, "safe_save_file", side_effect=full):
        refused(lambda: save_pretrained(adapter, target), "save the adapter to .*No space left on device")


def peft_cannot_merge_on_one_rank(_: Any, adapter: Any, target: Path) -> None:
    fault = ValueError("cannot be merged") if dist.get_rank() == 1 else None
    merge = patch.object(peft.tuners.lora.Linear, "merge", autospec=True, side_effect=fault)
    with merge:
        said = r"rank 1: PEFT cannot merge .* cannot be merged"
        refused(lambda: save_pretrained(adapter, target, merge_adapters=True), said, ConfigError)


FAULTS = [
    peft_cannot_merge_on_one_rank,
    tokenizer_cannot_be_saved,
    disk_is_full_or_folder_removed_meanwhile,
    folder_is_another_on_each_rank,
    names_that_no_folder_can_have,
    dtype_has_no_name,
    disk_is_full_for_an_adapter,
]


def every_fault(source: Path, target: Path) -> None:
    model = loaded("llama", source)
    adapter = from_pretrained(source, peft_config=LoraConfig(r=3, target_modules=["q_proj"]))
    run_cases(FAULTS, model, adapter, target)


def test_what_fails_is_one_error_on_every_rank_and_leaves_what_was_saved(tmp_path: Path) -> None:
    source, target = make_checkpoint("llama", tmp_path / "source", seed=NEW), tmp_path / "saved"
    make_former(target, "60KB")
    tuned(OLD).save_pretrained(str(target))
    before = visible(target)
    run_ranks(every_fault, 2, source, target)
    shutil.rmtree(target / ("n" * 250))
    assert visible(target) == before and not list(target.glob(".*")) and not (target / "new").exists()


# ---- what a power failure leaves ----


def record_syncs(source: Path, target: Path) -> list[str]:
    model, done = loaded("llama", source), []

    def noting(name: str, what: str, of: Callable[..., Any]) -> Any:
        real = getattr(os, name)
        return patch.object(os, name, lambda *a, **k: (done.append(f"{what} {Path(of(*a)).name}"), real(*a, **k))[1])

    with (
        noting("fsync", "sync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")),
        noting("replace", "rename", lambda old, new: new),
        noting("unlink", "remove", lambda path: path),
    ):
        save_pretrained(model, target, max_shard_size="60KB")
    return done


def test_everything_is_synced_before_it_is_renamed_and_the_folder_before_and_after_the_switch(tmp_path: Path) -> None:
    source, target = make_checkpoint("llama", tmp_path / "source", seed=NEW), tmp_path / "saved"
    make_former(target, "60KB")
    first, second = run_ranks(record_syncs, 2, source, target)
    files = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert second == [f"sync {file}" for file in files], "each rank that wrote to a file, once"
    start = first.index("rename " + next(target.glob("*00001-of*")).name)
    assert {f"sync {file}" for file in files} | {"sync model.safetensors.index.json"} <= set(first[:start])
    assert not [event for event in first[:start] if not event.startswith("sync")]
    switch = len(first) - 1 - first[::-1].index("rename now")
    linked = switch - 1 - first[:switch][::-1].index("rename model.safetensors.index.json")
    assert first.index("rename now") < first.index("sync former") < linked and "sync saved" in first[linked:switch]
    assert re.fullmatch(r"sync \.save-.*incomplete", first[switch + 1])
    end = first.index("rename model.safetensors.index.json", switch)
    assert first[end + 1] == "sync saved"
    assert sorted(first[end + 2 :][:4]) == [f"remove {file}" for file in files]
