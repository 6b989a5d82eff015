"""One folder in place of another where the system cannot exchange two, the list of a checkpoint's files, and which old
checkpoints are deleted."""

import fcntl
import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from hf_fsdp_tools import CheckpointError
from hf_fsdp_tools.saving import states
from tests.api import (
    TRAINER_GLOBS,
    StateFolder,
    check_sums,
    last_complete,
    problem_of,
    read_manifest,
    rotate,
    write_manifest,
)


def checkpoint(folder: Path, step: int = 1) -> Path:
    (folder / "optimizer_0").mkdir(parents=True)
    for name in ("model.safetensors", "scheduler.pt", "rng_state.pth", "optimizer_0/.metadata"):
        (folder / name).write_bytes(f"{name} of step {step}".encode())
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    write_manifest(folder, ["trainer_state.json", "model.safetensors"], TRAINER_GLOBS, checksums=True)
    os.utime(folder, (step * 100, step * 100))
    return folder


def test_a_manifest_names_what_is_gone_or_has_another_size(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1")
    manifest = read_manifest(folder)
    assert manifest is not None and not manifest.damage(folder) and manifest.ranks == 1
    check_sums(folder, manifest)
    (folder / "tokenizer.json").write_text("{}")  # others may come
    state = json.loads((folder / "trainer_state.json").read_text()) | {"best_metric": 0.5}
    (folder / "trainer_state.json").write_text(json.dumps(state))  # people edit these
    assert problem_of(folder) == ""
    (folder / "optimizer_0" / ".metadata").unlink()
    (folder / "scheduler.pt").write_bytes(b"cut")
    sizes = "has 3 bytes, and had 22 when it was saved"
    assert manifest.damage(folder) == {"optimizer_0/.metadata": "is absent", "scheduler.pt": sizes}


def test_rotation_keeps_the_limit_and_the_best_and_what_a_link_leads_to(tmp_path: Path) -> None:
    """A checkpoint that was interrupted does not count; a folder without a number stays."""
    folders = [checkpoint(tmp_path / f"checkpoint-{step}", step) for step in range(1, 7)]
    (tmp_path / "checkpoint-0").mkdir()
    os.utime(tmp_path / "checkpoint-0", (50, 50))
    (tmp_path / "checkpoint-m").mkdir()

    def left(limit: int | None, best: Path | None, **options: object) -> str:
        rotate(folders[-1], limit, None if best is None else str(best), **options)  # type: ignore[arg-type]
        return "".join(sorted(path.name[-1] for path in tmp_path.iterdir()))

    assert left(None, None) == left(0, None) == "0123456m"
    assert left(3, folders[0], uploaded=folders[2:4]) == "13456m", "what is still uploaded stays"
    assert left(3, folders[0]) == "156m"
    archive = checkpoint(tmp_path / "archive", 2)
    (tmp_path / "checkpoint-2").symlink_to(archive)
    assert left(1, None) == "6em" and problem_of(archive) == ""
    with patch("os.path.getmtime", return_value=7.0):
        (tmp_path / "checkpoint-9").mkdir()
        checkpoint(tmp_path / "checkpoint-3", 3)
        assert left(1, None) == "69em"
    with pytest.warns(UserWarning, match=r"checkpoint-9. has no readable"):
        assert last_complete(str(tmp_path)) == str(folders[-1])


def save(folder: Path, text: str) -> None:
    place = StateFolder(folder, ("scheduler*",))
    try:
        place.begin()
        (place.new / "scheduler.bin").write_text(text)
        place.publish([])
    finally:
        place.discard()


class Killed(BaseException):
    """The process is gone: nothing that would tidy up runs."""


@pytest.mark.parametrize("can_exchange", [True, False])
def test_at_each_step_of_a_save_the_old_state_or_the_new_one_is_there(tmp_path: Path, can_exchange: bool) -> None:
    """A save is killed at its first event of the file system, at its second, …; then the next one runs."""
    kills = 0
    for point in range(100):
        folder = tmp_path / f"{point}" / "state"
        save(folder, "old")
        (folder / "notes").mkdir()
        (folder / "notes" / "mine.txt").write_text("a user's own")
        exchange = states.exchange if can_exchange else lambda *_: False
        with patch.object(states, "exchange", exchange), patch.multiple("os", **_deadly(point)):
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


def test_a_link_is_replaced_and_names_that_cannot_be_are_one_error(tmp_path: Path) -> None:
    archive, link = tmp_path / "archive", tmp_path / "out" / "state"
    save(archive, "archived")
    (archive / "mine.txt").touch()
    link.parent.mkdir()
    link.symlink_to(archive)
    save(link, "new")
    assert not link.is_symlink() and (link / "scheduler.bin").read_text() == "new" and not (link / "mine.txt").exists()
    assert (archive / "scheduler.bin").read_text() == "archived"
    assert [path.name for path in link.parent.iterdir()] == ["state"]
    with pytest.raises(CheckpointError, match="Cannot save to '"):
        save(tmp_path / ("x" * 250), "new")


def test_two_jobs_that_save_to_one_folder_are_told_so_and_leftovers_of_others_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    save(folder, "old")
    with open(tmp_path / ".state.lock", "a") as of_another:
        fcntl.flock(of_another, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"Another job is saving to '.*/state'"):
            save(folder, "new")
    assert (folder / "scheduler.bin").read_text() == "old"
    save(folder, "new")  # a lock that a killed job has left locks nothing
    for number in (1, 2):
        (tmp_path / f".checkpoint_{number}.incomplete" / f"checkpoint_{number}" / "optimizer_0").mkdir(parents=True)
    (tmp_path / ".checkpoint_3.lock").touch()
    with open(tmp_path / ".checkpoint_2.lock", "a") as of_another:
        fcntl.flock(of_another, fcntl.LOCK_EX)
        states.remove_leftovers(tmp_path, "checkpoint_*")
    assert {path.name for path in tmp_path.iterdir()} == {"state", ".checkpoint_2.incomplete", ".checkpoint_2.lock"}
