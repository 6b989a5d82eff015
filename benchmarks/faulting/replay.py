"""What a crash after any call of any rank leaves: the calls noted by `calls.c`, done again in memory up to there."""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


def preload(folder: Path) -> None:
    """Build `calls.c` and let processes that start from now on load it."""
    library, source = folder / "calls.so", Path(__file__).with_name("calls.c")
    flags = ["-shared", "-fPIC", "-O1", "-w", "-D_LARGEFILE64_SOURCE"]
    subprocess.run(["cc", *flags, "-o", library, source, "-ldl", "-lpthread"], check=True)
    os.environ["LD_PRELOAD"] = str(library)


def begin(root: Path, notes: Path) -> None:
    """Note this process's calls under a folder from now on."""
    start = ctypes.CDLL(None).faults_begin
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    assert start(os.fsencode(root), os.fsencode(notes)) >= 0


class _File:
    def __init__(self, data: bytes = b"", inode: int = 0) -> None:
        self.data, self.synced, self.inode = bytearray(data), bytes(data), inode


class _Tree:
    """Files, links and folders (None) by their paths."""

    def __init__(self, root: Path) -> None:
        self.at: dict[str, _File | str | None] = {}
        inodes: dict[int, _File] = {}
        for path in root.rglob("*"):
            if path.is_symlink():
                self.at[str(path)] = os.readlink(path)
            elif path.is_dir():
                self.at[str(path)] = None
            else:
                self.at[str(path)] = inodes.setdefault(path.stat().st_ino, _File(path.read_bytes()))

    def do(self, call: str, path: str, other: str, offset: int, data: bytes) -> None:
        """One noted call."""
        path, other = os.path.normpath(path), os.path.normpath(other)
        if path not in self.at and call in ("sync", "link", "rename", "remove"):  # renamed by a call that is not noted
            former = [at for at, what in self.at.items() if isinstance(what, _File) and what.inode == offset]
            self._move([(at, path) for at in former[:1]])
        file = self.at.get(path)
        if call == "mkdir":
            self.at[path] = None
        elif call == "create":
            self.at[path] = _File(inode=offset)
        elif call == "symlink":
            self.at[other] = path
        elif call == "link":
            self.at[other] = file
        elif call == "remove":
            del self.at[path]
        elif call == "exchange":
            self._move([(path, other), (other, path)])
        elif call == "rename":
            if not (isinstance(file, _File) and self.at.get(other) is file):
                self._move([(path, other)])
        elif isinstance(file, _File):  # a file that is removed has no path
            if call == "write":
                file.data.extend(bytes(max(0, offset + len(data) - len(file.data))))
                file.data[offset : offset + len(data)] = data
            elif call == "length":
                del file.data[offset:]
            if call in ("length", "reserve"):
                file.data.extend(bytes(max(0, offset - len(file.data))))
            elif call == "sync":
                file.synced = bytes(file.data)

    def _move(self, pairs: list[tuple[str, str]]) -> None:
        moved = {}
        for source, target in pairs:
            below = [path for path in self.at if path == source or path.startswith(f"{source}/")]
            moved |= {target + path[len(source) :]: self.at.pop(path) for path in below}
        self.at |= moved

    def differences(self, other: "_Tree") -> list[str]:
        """Paths that do not mean the same."""
        a, b = (
            {path: bytes(what.data) if isinstance(what, _File) else what for path, what in tree.at.items()}
            for tree in (self, other)
        )
        return sorted(path for path in a | b if a.get(path, "absent") != b.get(path, "absent"))

    def digest(self, *, power: bool) -> str:
        """Equal for equal states; with `power` lost, data that was not synced is zeros."""
        found = hashlib.sha256()
        for path, what in sorted(self.at.items()):
            found.update(f"{path}\0{what if isinstance(what, str) else type(what).__name__}\0".encode())
            found.update(_data(what, power) if isinstance(what, _File) else b"")
        return found.hexdigest()

    def write(self, root: Path, target: Path, *, power: bool) -> None:
        """Make the state in another folder."""
        made: dict[int, Path] = {}
        for path, what in sorted(self.at.items()):
            to = target / Path(path).relative_to(root)
            to.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(what, str):
                to.symlink_to(what)
            elif what is None:
                to.mkdir(exist_ok=True)
            elif id(what) in made:
                os.link(made[id(what)], to)
            else:
                to.write_bytes(_data(what, power))
                made[id(what)] = to


def _data(file: _File, power: bool) -> bytes:
    return bytes(file.data) if not power else file.synced.ljust(len(file.data), b"\0")[: len(file.data)]


def _notes(file: Path) -> Iterator[tuple[str, str, str, int, bytes]]:
    with open(file, "rb") as stream:
        for line in stream:
            call, path, other, offset, size = line.decode().rstrip("\n").split("\t")
            yield call, path, other, int(offset), stream.read(int(size))


def crash_states(before: Path, root: Path, notes: Path, out: Path, most: int) -> tuple[dict[str, int], list[Path]]:
    """How many states there are after the calls of all ranks, and how many differ; folders with so many of them.

    After each call all ranks are killed, or power is lost, data that was not synced being gone. Names are taken to
    reach the disk in their order, as journals do. The first and the last state are among those that are made, of which
    the others are spread over all.
    """
    calls = list(_notes(notes))

    def replayed() -> Iterator[tuple[int, _Tree]]:
        tree = _Tree(before)
        tree.at = {str(root / Path(path).relative_to(before)): what for path, what in tree.at.items()}
        for number, call in enumerate(calls):
            yield number, tree
            tree.do(*call)
        yield len(calls), tree

    first: dict[str, tuple[int, bool]] = {}
    for number, tree in replayed():
        for power in (False, True):
            first.setdefault(tree.digest(power=power), (number, power))
    assert not (other := tree.differences(_Tree(root))), f"the notes lack a call: {other}"
    points = list(first.values())
    chosen = {points[round(i * (len(points) - 1) / max(most - 1, 1))] for i in range(most)}
    folders = []
    for number, tree in replayed():
        for power in (False, True):
            if (number, power) in chosen:
                folders.append(out / f"state-{number}{'-power' if power else ''}")
                tree.write(root, folders[-1], power=power)
    return {"killed": len(calls) + 1, "power lost": len(calls) + 1, "that differ": len(points)}, folders
