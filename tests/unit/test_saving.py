"""One folder in place of another, the list of a checkpoint's files, and which old checkpoints are deleted."""

import fcntl
import json
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from hf_fsdp_tools import CheckpointError, TrainerSettings
from hf_fsdp_tools.integrations import resume, states
from tests.api import (
    MANIFEST,
    StateSave,
    check_sums,
    last_complete,
    problem_of,
    read_manifest,
    remove_checkpoint,
    rotate,
    write_manifest,
)


def checkpoint(folder: Path, step: int = 1) -> Path:
    (folder / "optimizer_0").mkdir(parents=True)
    for name in ("model.safetensors", "scheduler.pt", "rng_state.pth", "optimizer_0/.metadata"):
        (folder / name).write_bytes(f"{name} of step {step}".encode())
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    write_manifest(folder, ["trainer_state.json", "model.safetensors"], resume.TRAINER_GLOBS, checksums=True)
    return folder


def test_a_manifest_names_what_is_gone_or_has_another_size(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1")
    manifest = read_manifest(folder)
    assert manifest is not None and not manifest.damage(folder) and manifest.ranks == 1
    assert {"optimizer_0/.metadata", "scheduler.pt", "rng_state.pth"} < manifest.sizes.keys()
    check_sums(folder, manifest)
    (folder / "tokenizer.json").write_text("{}")  # others may come
    state = json.loads((folder / "trainer_state.json").read_text()) | {"best_metric": 0.5}
    (folder / "trainer_state.json").write_text(json.dumps(state))  # people edit these
    assert problem_of(folder) == ""
    (folder / "optimizer_0" / ".metadata").unlink()
    (folder / "scheduler.pt").write_bytes(b"cut")
    sizes = "has 3 bytes, and had 22 when it was saved"
    assert manifest.damage(folder) == {"optimizer_0/.metadata": "is absent", "scheduler.pt": sizes}
    assert "'optimizer_0/.metadata' is absent" in problem_of(folder)
    assert "optimizer" not in problem_of(folder, resume.STATE_FILES), "that it is absent is allowed"


MALFORMED = (
    "{",
    "null",
    '{"format": 2, "ranks": 2, "files": {}}',
    '{"format": 1, "ranks": 2, "files": {"../../etc/passwd": {}}}',
    '{"format": 1, "ranks": 2, "files": {"model.safetensors": {"bytes": "many"}}}',
    "[" * 100_000,
)


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_manifest_is_one_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=MANIFEST) as caught:
        read_manifest(tmp_path)
    assert len(str(caught.value)) < 500


STATES = ("", "{}", "7", '{"global_step": "2"}', '{"global_step": 2, "unheard_of": 1}', '{"global_step": 2')


@pytest.mark.parametrize("text", STATES)
def test_a_damaged_trainer_state_is_no_complete_checkpoint(tmp_path: Path, text: str) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1")
    (folder / "trainer_state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        last_complete(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"trainer_state\.json.*from the last complete one"):
        resume.check_checkpoint(SimpleNamespace(args=SimpleNamespace()), folder)
    checkpoint(tmp_path / "checkpoint-0", 0)
    with pytest.warns(UserWarning, match=r"Resuming from checkpoint-0: '.*checkpoint-1' has"):
        assert last_complete(str(tmp_path)) == str(tmp_path / "checkpoint-0")


def test_what_a_run_goes_on_with_is_looked_for_and_without_a_warning_where_nothing_is_wrong(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert last_complete(str(tmp_path)) == str(folder)
        assert last_complete(str(tmp_path / "absent")) is None, "the Trainer says that there is none"
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=1, process_index=0),
        accelerator=SimpleNamespace(scaler=object()),
        fsdp_settings=TrainerSettings(),
    )
    with pytest.raises(CheckpointError, match=r"lacks the loss scale \(scaler\.pt\): .*\(allow_incomplete=True\)"):
        resume.check_checkpoint(trainer, folder)
    (folder / "mine").mkdir()
    (folder / "mine" / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"mine/adapter_model\.safetensors: is damaged"):
        resume.check_checkpoint(trainer, folder)


@pytest.mark.parametrize("real_times", [True, False])
def test_an_interrupted_checkpoint_is_not_counted_and_the_last_stays(tmp_path: Path, real_times: bool) -> None:
    for step in (2, 3):
        checkpoint(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-4").mkdir()  # interrupted
    (tmp_path / "checkpoint-mine").mkdir()
    for number, name in enumerate(("checkpoint-4", "checkpoint-2", "checkpoint-3")):
        os.utime(tmp_path / name, (number * 100, number * 100))
    times = nullcontext() if real_times else patch("os.path.getmtime", return_value=7.0)
    with times:
        rotate(tmp_path / "checkpoint-3", 1, None)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"checkpoint-3", "checkpoint-mine"} | ({"checkpoint-4"} if not real_times else set())
    with nullcontext() if real_times else pytest.warns(UserWarning, match=r"checkpoint-4. has no readable"):
        assert last_complete(str(tmp_path)) == str(tmp_path / "checkpoint-3")


def test_rotation_keeps_the_limit_and_the_best(tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / f"checkpoint-{step}", step) for step in range(1, 7)]
    for step, folder in enumerate(folders):
        os.utime(folder, (step * 100, step * 100))

    def left(limit: int | None, best: str | None, **options: Any) -> str:
        rotate(folders[-1], limit, best, **options)
        return "".join(sorted(path.name[-1] for path in tmp_path.iterdir()))

    assert left(None, None) == left(0, None) == "123456"
    assert left(3, str(folders[0]), uploaded=folders[2:4]) == "13456", "what is still uploaded stays"
    assert left(3, str(folders[0])) == "156"
    assert left(1, str(folders[0])) == "16"


def test_a_checkpoint_that_is_deleted_counts_no_more_and_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1")
    seen: list[tuple[set[str], str]] = []
    unlink = os.unlink

    def watched(path: str, *args: object, **kwargs: object) -> None:
        seen.append(({file.name for file in folder.rglob("*") if file.is_file()}, problem_of(folder)))
        unlink(path, *args, **kwargs)  # type: ignore[arg-type]

    whole = {file.name for file in folder.rglob("*") if file.is_file()} - {MANIFEST}
    with patch("os.unlink", watched):
        remove_checkpoint(folder)
    assert len(seen) >= 4 and not folder.exists()
    assert all(problem or whole <= names for names, problem in seen)
    folder = checkpoint(tmp_path / "checkpoint-1")
    denied = patch("shutil.rmtree", side_effect=PermissionError(13, "Permission denied"))
    with denied, pytest.warns(UserWarning, match=r"checkpoint-1' cannot be deleted"):
        remove_checkpoint(folder)
    assert problem_of(folder)
    archive = checkpoint(tmp_path / "archive" / "checkpoint-1")
    out = tmp_path / "out"
    checkpoint(out / "checkpoint-2", 2)
    (out / "checkpoint-1").symlink_to(archive)
    os.utime(archive, (100, 100))
    rotate(out / "checkpoint-2", 1, None)
    assert [path.name for path in out.iterdir()] == ["checkpoint-2"] and problem_of(archive) == ""


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path, can_exchange: bool) -> None:
    archive, link = tmp_path / "archive", tmp_path / "out" / "state"
    save(archive, "archived")
    (archive / "mine.txt").touch()
    link.parent.mkdir()
    link.symlink_to(archive)
    with nullcontext() if can_exchange else patch.object(states, "exchange", return_value=False):
        save(link, "new")
    assert not link.is_symlink() and (link / "scheduler.bin").read_text() == "new" and not (link / "mine.txt").exists()
    assert (archive / "scheduler.bin").read_text() == "archived"
    assert [path.name for path in link.parent.iterdir()] == ["state"]


FILES = ("scheduler*",)


def save(folder: Path, text: str) -> None:
    place = StateSave(folder, FILES)
    try:
        place.begin()
        (place.staging / "scheduler.bin").write_text(text)
        place.take_place()
    finally:
        place.held.close()


class Killed(BaseException):
    """The process is gone: nothing that would tidy up runs."""


@pytest.mark.parametrize("can_exchange", [True, False])
def test_at_each_step_of_a_save_the_old_state_or_the_new_one_is_there(tmp_path: Path, can_exchange: bool) -> None:
    """A save is killed at its first event of the file system, at its second, …; then the next one runs."""
    able = nullcontext() if can_exchange else patch.object(states, "exchange", return_value=False)
    kills = 0
    for point in range(100):
        folder = tmp_path / f"{point}" / "state"
        save(folder, "old")
        (folder / "notes").mkdir()
        (folder / "notes" / "mine.txt").write_text("a user's own")
        with able, patch.multiple("os", **_deadly(point)):
            try:
                save(folder, "new")
            except Killed:
                kills += 1
        killed = kills == point + 1
        there = folder if folder.exists() else states.former_of(folder)
        assert can_exchange <= (there == folder), "with an exchange the name always means a state"
        assert (there / "scheduler.bin").read_text() in (("old", "new") if killed else ("new",))
        assert (there / "notes" / "mine.txt").read_text() == "a user's own"
        save(folder, "newer")
        assert (folder / "scheduler.bin").read_text() == "newer"
        assert (folder / "notes" / "mine.txt").read_text() == "a user's own"
        assert [path.name for path in folder.parent.iterdir()] == ["state"], "nothing is left of the killed save"
        if not killed:
            break
    assert kills >= 8


def _deadly(point: int) -> dict[str, object]:
    """Calls of the file system, the one at `point` of which kills the process before it does anything."""
    count = iter(range(1000))

    def counted(real):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            if next(count) >= point:
                raise Killed
            return real(*args, **kwargs)

        return call

    return {name: counted(getattr(os, name)) for name in ("mkdir", "rename", "link", "unlink", "rmdir", "fsync")}


def test_a_rename_that_fails_is_undone_and_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("x" * 250, "file/state", "file"):
        with pytest.raises(CheckpointError, match=r"Cannot save to '|is a file"):
            save(tmp_path / name, "new")
    folder = tmp_path / "state"
    save(folder, "old")
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.parent.name.endswith(".incomplete"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    said = pytest.raises(CheckpointError, match=r"Input/output error.*still there")
    with patch.object(states, "exchange", return_value=False), patch.object(Path, "rename", fails), said:
        save(folder, "new")
    assert (folder / "scheduler.bin").read_text() == "old"
    place = StateSave(folder, FILES)
    place.begin()
    place.staging.rmdir()
    with pytest.raises(CheckpointError, match=r"still there"):
        place.take_place()
    place.held.close()
    assert (folder / "scheduler.bin").read_text() == "old"
    late = patch.object(states, "sync", side_effect=OSError(5, "Input/output error"))
    with late, pytest.raises(CheckpointError, match=r"state' is saved, but .*Input/output error"):
        save(folder, "new")
    assert (folder / "scheduler.bin").read_text() == "new"


def test_two_jobs_that_save_to_one_folder_are_told_so_and_leftovers_of_others_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    save(folder, "old")
    with open(tmp_path / ".state.lock", "a") as of_another:
        fcntl.flock(of_another, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"Another job is saving to '.*/state'"):
            save(folder, "new")
    assert (folder / "scheduler.bin").read_text() == "old"
    save(folder, "new")  # a lock that a killed job has left locks nothing
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    for number in (1, 2):
        (tmp_path / f".checkpoint_{number}.incomplete" / f"checkpoint_{number}" / "optimizer_0").mkdir(parents=True)
    (tmp_path / ".checkpoint_3.lock").touch()
    with open(tmp_path / ".checkpoint_2.lock", "a") as of_another:
        fcntl.flock(of_another, fcntl.LOCK_EX)
        states.remove_leftovers(tmp_path, "checkpoint_*")
    assert {path.name for path in tmp_path.iterdir()} == {"state", ".checkpoint_2.incomplete", ".checkpoint_2.lock"}
