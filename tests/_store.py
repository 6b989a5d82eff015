"""An S3 server in this process (moto's), which counts what each rank asks for, and fails where it is told to."""

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

import fsspec
import torch.distributed as dist

from tests._dist import run_cases
from tests.api import all_ranks


class Server:
    """The server; a rank's access key is its name and process."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app, self.url = app, ""
        self._counting = threading.Lock()  # requests are answered by threads
        self.sent: Counter[str] = Counter()
        """Bytes of weight files that each rank got."""
        self.most: Counter[str] = Counter()
        """The largest body that each rank sent."""
        self.fault: Callable[[str, str, str, Any], int | None] = lambda rank, method, path, environ: None
        """Says with which status a request fails."""
        self.left = 0

    def fail(self, who: str, n: int, how: str = "once") -> None:
        """Let the n-th request from now that writes, of ranks whose name begins so, be refused ("once"), or that and
        all that follow ("on"), or be the last before a kill ("kill")."""

        def nth(rank: str, method: str, *_: Any) -> int | None:
            if not rank.startswith(who) or method not in ("PUT", "POST", "DELETE"):
                return None
            self.left -= 1
            if self.left == 0 and how == "kill":
                os.kill(int(rank.split("-")[1]), signal.SIGKILL)
            return 403 if self.left == 0 or (self.left < 0 and how == "on") else None

        self.left, self.fault = n, nth

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        found = re.search(r"Credential=([\w-]+)/", environ.get("HTTP_AUTHORIZATION", ""))
        rank, method, path = found[1] if found else "", environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path.startswith("/fail/"):
            answer, (_, _, who, n, how) = str(self.left), path.split("/")
            self.fail(who, int(n), how)
            start("200 OK", [])
            return [answer.encode()]
        status = self.fault(rank, method, path + "?" + environ.get("QUERY_STRING", ""), environ)
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if status is not None:
            environ["wsgi.input"].read(length)
            code = {403: "AccessDenied", 500: "InternalError", 400: "InvalidRequest"}[status]
            start(f"{status} refused", [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>as the test says</Message></Error>".encode()]
        self.most[rank] = max(self.most[rank], length)

        def begun(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            if method == "GET" and path.endswith((".safetensors", ".distcp")):
                with self._counting:
                    self.sent[rank.split("-")[0]] += int(dict((k.lower(), v) for k, v in headers)["content-length"])
            return start(status, headers, *more)

        return self.app(environ, begun)


@contextmanager
def s3_server() -> Iterator[Server]:
    """A server with an empty bucket `bucket`."""
    from moto.backends import get_backend
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *args: Any) -> None:
            """Print nothing."""

    app = Server(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    app.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    get_backend("s3").reset()  # moto keeps buckets in the process: those of a server before this one, too
    try:
        use(app.url, "tests")
        fsspec.filesystem("s3").mkdir("bucket")
        yield app
    finally:
        server.shutdown()
        thread.join()
        fsspec.config.conf.pop("s3", None)


def use(url: str, name: str, **options: Any) -> None:
    """Let `s3://` of this process mean the server, as a user would by fsspec's configuration."""
    fsspec.config.conf["s3"] = {
        "key": name,
        "secret": "secret",
        "client_kwargs": {"endpoint_url": url},
        "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 5, "read_timeout": 5},
        **options,
    }


def fail_at(rank: str, n: int, how: str = "once") -> int:
    """`Server.fail`; how many requests were left of the last time. All ranks call."""
    all_ranks(None)
    left = 0
    if dist.get_rank() == 0:
        url = fsspec.config.conf["s3"]["client_kwargs"]["endpoint_url"]
        left = int(urlopen(f"{url}/fail/{rank}/{n}/{how}").read())
    return all_ranks(left)[0]


def on_ranks(url: str, cases: Any, *args: Any, **options: Any) -> Any:
    """Cases on ranks whose name is theirs to the server."""
    use(url, f"rank{dist.get_rank()}-{os.getpid()}", **options)
    return run_cases(cases, *args)
