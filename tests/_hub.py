"""A small hub on this machine: as much of the protocol as huggingface_hub needs to download from it, and its moods."""

import hashlib
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

__all__ = ["FakeHub", "Mood", "fake_hub"]

Mood = tuple[str, int]
"""What happens to weight files of a repository (see `fake_hub`), and how many requests of each file it happens to."""


class FakeHub(ThreadingHTTPServer):
    """A server of folders as repositories; `requests` counts (method, repository, file)."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, dict[str, Path]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories  # name -> revision -> folder
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.moods: dict[str, Mood] = {}
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
        mood, times = self.server.moods.get(name, ("", 0))
        if not file.endswith(".safetensors") or self.server.requests[self.command, name, file] > times:
            mood = ""
        if mood.startswith("HTTP ") and (self.command == "GET" or mood.endswith("HEAD")):
            _, status, *more = mood.split()
            headers = {"Retry-After": more[0]} if more and more[0].isdigit() else {}
            return self._send(int(status), b'{"error": "a mood"}', headers)
        if mood == "accepts" and self.command == "GET":
            self.server.closing.wait()
            return None
        return self._send(200, content, headers, mood=mood)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, mood: str = "") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if mood in ("stalls", "silences", "closes", "resets"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
        if mood in ("stalls", "silences"):
            if mood == "silences":
                self.server.silent.set()
            self.server.closing.wait()
        elif mood in ("closes", "resets"):
            time.sleep(0.2)  # so that the half is read
            if mood == "resets":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        elif mood == "drips":
            for i in range(15):
                self.wfile.write(body[len(body) * i // 15 : len(body) * (i + 1) // 15])
                self.wfile.flush()
                time.sleep(0.2)
        else:
            self.wfile.write(body)


def commit_of(revision: str) -> str:
    """The made-up commit that a branch or tag is at."""
    return hashlib.sha1(revision.encode()).hexdigest()


@contextmanager
def fake_hub(repositories: dict[str, dict[str, Path]], moods: dict[str, Mood] | None = None) -> Iterator[FakeHub]:
    """A hub that runs meanwhile. `org/silent` never answers, `org/gated` and `org/private` (token "secret") refuse.

    Args:
        repositories: folders by name and revision.
        moods: by name, for how many requests of each weight file: "accepts" a request and does not answer; stops in the
            middle of the file and keeps the connection ("stalls"), then answers nothing at all ("silences"), "closes"
            the connection, "resets" it; "drips" the file over 3 s; or answers "HTTP 503", with "HTTP 429 5" a time to
            wait, and with "HEAD" behind it also when only the file's size is asked for.
    """
    server = FakeHub(repositories)
    server.moods |= moods or {}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
