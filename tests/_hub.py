"""A small hub on this machine: as much of the protocol as huggingface_hub needs to download from it and to upload to it
(as git LFS does), and its moods."""

import base64
import hashlib
import importlib
import json
import os
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote

from huggingface_hub import constants, hf_api

Mood = tuple[str, int]
"""What happens to weight files of a repository (see `fake_hub`), and how many requests of each file it happens to."""


def use_hub(url: str, home: Path) -> None:
    """Let huggingface_hub of this process, a rank, use a hub and a cache, as if it had been started so.

    It waits longer for an answer than any machine is busy (see `impatient`), and uploads by the protocol of git LFS.
    """
    os.environ |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    importlib.reload(constants)
    hf_api.api.endpoint = url
    constants.HF_HUB_ETAG_TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT = 60  # 10 s by default


def impatient(of: str) -> AbstractContextManager[object]:
    """In this block huggingface_hub waits half a second for answers of one kind.

    They are of a file ("DOWNLOAD"), for which it asks six times, or of files and repositories ("ETAG").
    """
    return patch.object(constants, f"HF_HUB_{of}_TIMEOUT", 0.5)


class FakeHub(ThreadingHTTPServer):
    """A server of folders as repositories; `requests` counts (method, repository, file), of uploads (step, repository,
    revision); `commits` are those that were uploaded."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, dict[str, Path]], root: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories  # name -> revision -> folder
        self.root = root  # for what is uploaded
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.commits: list[dict[str, Any]] = []
        self.created: dict[str, dict[str, Any]] = {}  # how repositories were asked for
        self.heads: dict[tuple[str, str], str] = {}  # the commits of branches that were uploaded to
        self.moods: dict[str, Mood] = {}
        self.silent = threading.Event()  # set: nothing is answered any more
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Every file of a repository, by its name."""
        folder = self.repositories[name][revision]
        return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}

    def head(self, name: str, revision: str) -> str:
        """The commit that a branch or tag is at."""
        return self.heads.get((name, revision)) or commit_of(revision)

    def commit(self, name: str, revision: str, lines: list[dict[str, Any]]) -> str:
        """Make a commit of the lines that a client sends, and the branch stand there; the commit."""
        assert self.root is not None
        header, *operations = lines
        made = hashlib.sha1(f"{name} {revision} {len(self.commits)}".encode()).hexdigest()
        former, folder = self.repositories[name][revision], self.root / made
        shutil.copytree(former, folder)
        for operation in operations:
            value = operation["value"]
            path = folder / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if operation["key"] == "file":
                path.write_bytes(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                shutil.copyfile(self.root / "lfs" / value["oid"], path)
            else:
                path.unlink()
        self.repositories[name][revision], self.heads[name, revision] = folder, made
        done = {(o["key"], o["value"]["path"]) for o in operations}
        self.commits.append({"name": name, "revision": revision, "done": done, **header["value"]})
        return made


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
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
        by_commit = {self.server.head(name, r): folder for r, folder in folders.items()}
        folder = folders.get(revision) or by_commit.get(revision)
        if folder is None:
            return self._refuse(404, "RevisionNotFound")
        commit = revision if revision in by_commit else self.server.head(name, revision)
        if is_list:
            names = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
            if rest[:1] == ["tree"]:
                tree = [{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": n} for n in names]
                return self._json(tree)
            info = {"id": name, "sha": commit, "siblings": [{"rfilename": n} for n in names]}
            return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        if not (folder / file).is_file():
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
        content = (folder / file).read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"ETag": tag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        mood, times = self.server.moods.get(name, ("", 0))
        if not file.endswith(".safetensors") or self.server.requests[self.command, name, file] > times:
            mood = ""
        if mood.startswith("HTTP ") and self.command == "GET":
            return self._send(int(mood.split()[1]), b'{"error": "a mood"}')
        return self._send(200, content, headers, mood=mood)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        """A file, by its SHA-256."""
        _, organization, name, oid = self.path.strip("/").split("/")
        body = self._upload("put", f"{organization}/{name}", "")
        if body is not None:
            assert self.server.root is not None and hashlib.sha256(body).hexdigest() == oid
            (self.server.root / "lfs").mkdir(exist_ok=True)
            (self.server.root / "lfs" / oid).write_bytes(body)
            self._send(200, b"")

    def do_POST(self) -> None:
        parts = [unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]
        if self.path.startswith("/api/repos/create"):
            body = self._upload("create", "", "", of=lambda sent: f"{sent['organization'] or 'me'}/{sent['name']}")
            if body is not None:
                self._create(json.loads(body))
        elif self.path.startswith("/api/validate-yaml"):
            self._read()
            self._json({"errors": [], "warnings": []})
        elif parts[-4:-1] == ["info", "lfs", "objects"]:
            self._batch(f"{parts[0]}/{parts[1].removesuffix('.git')}")
        else:  # api, models, organization, name, step, revision
            name, (step, revision) = "/".join(parts[2:4]), parts[4:]
            body = self._upload(step, name, revision)
            if body is not None:
                getattr(self, f"_{step}")(name, revision, body)

    def _create(self, sent: dict[str, Any]) -> None:
        name = f"{sent['organization'] or 'me'}/{sent['name']}"
        place = {"url": f"{self.server.url}/{name}", "name": name, "id": "1"}
        if name in self.server.repositories:
            return self._send(409, json.dumps(place).encode())
        assert self.server.root is not None
        folder = self.server.root / name / "empty"
        folder.mkdir(parents=True)
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
        self.server.repositories[name] = {"main": folder}
        self.server.created[name] = sent
        self._json(place)

    def _branch(self, name: str, revision: str, body: bytes) -> None:
        folders = self.server.repositories[name]
        folders[revision] = folders["main"]
        self._json({})

    def _preupload(self, name: str, revision: str, body: bytes) -> None:
        folder = self.server.repositories[name][revision]
        found = []
        for file in json.loads(body)["files"]:
            path, is_lfs = folder / file["path"], file["path"].endswith(".safetensors")
            old = path.read_bytes() if path.is_file() else b""
            hashed = hashlib.sha256(old) if is_lfs else hashlib.sha1(b"blob %d\0" % len(old) + old)  # as git names it
            mode, oid = "lfs" if is_lfs else "regular", hashed.hexdigest() if path.is_file() else None
            found.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": found})

    def _batch(self, name: str) -> None:
        body = self._upload("batch", name, "")
        if body is None:
            return
        objects: list[dict[str, Any]] = [{k: o[k] for k in ("oid", "size")} for o in json.loads(body)["objects"]]
        for found in objects:
            assert self.server.root is not None
            if not (self.server.root / "lfs" / found["oid"]).is_file():
                found["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{name}/{found['oid']}"}}
        self._json({"objects": objects, "transfer": "basic"})

    def _commit(self, name: str, revision: str, body: bytes) -> None:
        made = self.server.commit(name, revision, [json.loads(line) for line in body.splitlines()])
        self._json({"commitUrl": f"{self.server.url}/{name}/commit/{made}", "commitOid": made})

    def _upload(self, step: str, name: str, revision: str, *, of: Any = None) -> bytes | None:
        """The body of a request that writes; None where it was answered already: not allowed, or by a mood."""
        body = self._read()
        name = of(json.loads(body)) if of is not None else name
        self.server.requests[step, name, revision] += 1
        if self.server.silent.is_set():
            self.server.closing.wait()
            return None
        token = self.headers.get("authorization")
        if step != "put" and token != "Bearer secret":
            said = "Invalid user token" if token is None else "You have read access only"
            return self._send(401 if token is None else 403, json.dumps({"error": said}).encode())
        mood, times = self.server.moods.get(name, ("", 0))
        if mood.startswith(f"{step} HTTP ") and self.server.requests[step, name, revision] <= times:
            _, _, status, said = mood.split(" ", 3)
            return self._send(int(status), json.dumps({"error": said}).encode())
        return body

    def _read(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, mood: str = "") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if mood in ("silences", "resets"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
        if mood == "silences":
            self.server.silent.set()
            self.server.closing.wait()
        elif mood == "resets":
            time.sleep(0.2)  # so that the half is read
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        else:
            self.wfile.write(body)


def commit_of(revision: str) -> str:
    """The made-up commit that a branch or tag is at."""
    return hashlib.sha1(revision.encode()).hexdigest()


@contextmanager
def fake_hub(
    repositories: dict[str, dict[str, Path]], moods: dict[str, Mood] | None = None, root: Path | None = None
) -> Iterator[FakeHub]:
    """A hub that runs meanwhile. `org/silent` never answers, `org/gated` and `org/private` (token "secret") refuse.

    Repositories are folders by name and revision; uploads go to `root`, where token "secret" may write and any other
    reads only. A mood is what happens to the first requests of each weight file: in the middle of the answer the hub
    falls silent ("silences") or resets the connection ("resets"), or a status comes, as "HTTP 503". For uploads it is a
    step ("create", "preupload", "batch", "put", "commit") and its answer, as "put HTTP 500 words".
    """
    server = FakeHub(repositories, root)
    server.moods |= moods or {}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
