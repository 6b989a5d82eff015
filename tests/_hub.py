"""A small hub on this machine: enough of the real one's protocol that huggingface_hub downloads from it, and its moods."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

__all__ = ["FakeHub", "fake_hub"]


class FakeHub(ThreadingHTTPServer):
    """Serves folders as repositories; ``requests`` counts (method, repository, file)."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, dict[str, Path]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories  # name -> revision -> folder
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.silent = threading.Event()  # set: nothing is answered any more
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = [unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]
        if parts[0] == "control":  # /control/silent
            self.server.silent.set()
            return self._send(200, b"{}")
        is_list = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_list else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        revision = rest[1] if len(rest) > 1 else "main"
        file = "/".join(rest[2:])
        self.server.requests[self.command, name, file] += 1
        if self.server.silent.is_set() or name == "org/silent":
            self.server.closing.wait()
            return None
        if name == "org/gated":
            return self._refuse(403, "GatedRepo")
        if name == "org/private" and self.headers.get("authorization") != "Bearer secret":
            return self._refuse(401, "RepoNotFound")
        folders = self.server.repositories.get(name)
        if folders is None:
            return self._refuse(404, "RepoNotFound")
        by_commit = {commit_of(r): folder for r, folder in folders.items()}
        folder = folders.get(revision) or by_commit.get(revision)
        if folder is None:
            return self._refuse(404, "RevisionNotFound")
        commit = revision if revision in by_commit else commit_of(revision)
        if is_list:
            names = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
            info = {"id": name, "sha": commit, "siblings": [{"rfilename": n} for n in names]}
            return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        if not (folder / file).is_file():
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
        content = (folder / file).read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        stops = name == "org/stalls" and file.endswith(".safetensors") and self.command == "GET"
        return self._send(200, content, headers, stops=stops)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, stops: bool = False) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if stops:  # half of it, and then neither this nor anything else is answered
            self.wfile.write(body[: len(body) // 2])
            self.server.silent.set()
            self.server.closing.wait()
            return
        self.wfile.write(body)


def commit_of(revision: str) -> str:
    """The made-up commit that a branch or tag is at."""
    return hashlib.sha1(revision.encode()).hexdigest()


@contextmanager
def fake_hub(repositories: dict[str, dict[str, Path]]) -> Iterator[FakeHub]:
    """A hub that runs meanwhile. ``org/silent`` never answers, ``org/stalls`` goes silent in the middle of a weight file,
    ``org/gated`` and ``org/private`` (token "secret") refuse."""
    server = FakeHub(repositories)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
