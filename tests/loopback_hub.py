"""A hub on loopback that serves real files to huggingface_hub's own client, with faults on demand.

It implements what a download needs: the listing of a repository, and files by `resolve`, large
ones through a redirect to another host as the real hub does.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 4096
_PIECE_BYTES = 1 << 16


@dataclass
class Repo:
    """files: content by path. gated: tokens with access; None: public."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    gated: set[str] | None = None


@dataclass
class Faults:
    """Faults of the next requests.

    drop_at: share of a file after which the connection ends, for `drops` downloads. corrupt: number
    of downloads with a wrong byte. busy: number of requests that get 429. hold: set by a download
    after half of its file, which then waits for release.
    """

    drop_at: float = 0.4
    drops: int = 0
    corrupt: int = 0
    busy: int = 0
    retry_after: str = "0"
    ignore_range: bool = False
    denied: dict[str, tuple[int, str]] = field(default_factory=dict)
    hold: threading.Event | None = None
    release: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Request:
    """A request as it arrived. start: first byte of its range; host: as the client named it."""

    method: str
    path: str
    start: int
    host: str
    authorization: str | None


class LoopbackHub:
    """repos: repositories by `user/repo`."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults = Faults()
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        handler = type("Bound", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, repo: str, files: dict[str, bytes], **more: object) -> Repo:
        self.repos[repo] = Repo(files, **more)  # type: ignore[arg-type]
        return self.repos[repo]

    @property
    def downloads(self) -> list[Request]:
        """Requests for the content of large files."""
        return [r for r in self.requests if r.method == "GET" and r.path.startswith("/cdn/")]

    @contextmanager
    def serving(self) -> Iterator[LoopbackHub]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.faults.release.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def take(self, fault: str) -> bool:
        """Whether a fault applies now; counts it."""
        with self.lock:
            left = getattr(self.faults, fault)
            if left:
                setattr(self.faults, fault, left - 1)
            return bool(left)


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        found = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(found[1]) if found else 0
        host = self.headers.get("Host", "").partition(":")[0]
        authorization = self.headers.get("Authorization")
        asked = Request(self.command, path, start, host, authorization)
        with self.hub.lock:
            self.hub.requests.append(asked)
        self._asked = asked
        if self.hub.take("busy"):
            self._send(429, b"", {"Retry-After": self.hub.faults.retry_after})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            self._listing(match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            self._content(self.hub.repos[match[1]].files[match[2]], {}, asked)
        else:
            self._send(404, b"")

    def _denied(self, name: str) -> bool:
        if name in self.hub.faults.denied:
            status, code = self.hub.faults.denied[name]
            self._send(status, b"", {"X-Error-Code": code} if code else {})
            return True
        return False

    def _listing(self, name: str) -> None:
        if self._denied(name):
            return
        repo = self.hub.repos.get(name)
        if repo is None:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            return
        siblings = [_sibling(path, content) for path, content in repo.files.items()]
        body = {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "tags": []}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, path: str) -> None:
        if self._denied(name):
            return
        repo = self.hub.repos.get(name)
        if repo is None:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            return
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repo.gated is not None and token not in repo.gated:
            self._send(403 if token else 401, b"", {"X-Error-Code": "GatedRepo"})
            return
        headers = {"X-Repo-Commit": repo.commit}
        if revision not in ("main", repo.commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path not in repo.files:
            self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        else:
            self._file(name, path, repo.files[path], headers)

    def _file(self, name: str, path: str, content: bytes, headers: dict[str, str]) -> None:
        etag = f'"{_digest(content)}"'
        if len(content) < LARGE_BYTES:
            self._content(content, headers | {"ETag": etag}, self._asked)
            return
        headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(len(content))}
        # another host by name: credentials for the hub must not reach it
        headers["Location"] = f"http://localhost:{self.hub.port}/cdn/{name}/{path}"
        self._send(302, b"", headers)

    def _content(self, content: bytes, headers: dict[str, str], asked: Request) -> None:
        faults = self.hub.faults
        start = 0 if faults.ignore_range else asked.start
        if start >= len(content) > 0:
            self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            return
        end = len(content)
        if asked.method == "GET" and self.hub.take("corrupt"):
            content = content[:-1] + bytes([content[-1] ^ 1])
        if asked.method == "GET" and self.hub.take("drops"):
            end = max(start, int(len(content) * faults.drop_at))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        for key, value in ({"Content-Length": str(len(content) - start)} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if asked.method == "GET":
            self._write(content, start, end)

    def _write(self, content: bytes, start: int, end: int) -> None:
        half = len(content) // 2
        for at in range(start, end, _PIECE_BYTES):
            if self.hub.faults.hold is not None and at <= half < at + _PIECE_BYTES:
                self.wfile.flush()
                self.hub.faults.hold.set()
                self.hub.faults.release.wait(60)
            try:
                self.wfile.write(content[at : min(end, at + _PIECE_BYTES)])
            except OSError:
                break  # the client has left
        self.close_connection = end < len(content)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _sibling(path: str, content: bytes) -> dict[str, object]:
    digest = _digest(content)
    whole: dict[str, object] = {"rfilename": path, "size": len(content), "blobId": digest[:40]}
    if len(content) >= LARGE_BYTES:
        whole["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 134}
    return whole


def _digest(content: bytes) -> str:
    """SHA-256 of a large file, git's SHA-1 of a small one."""
    if len(content) >= LARGE_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
