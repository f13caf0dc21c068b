"""Requests to a real server with the built-in model. Input is what is sent on a connection."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import socket
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.fuzz_parts.mutations import CHARACTERS, NUMBERS, Mutator
from benchmarks.fuzz_parts.samples import SCHEMAS
from benchmarks.fuzz_parts.worker import MAX_GROWTH_BYTES, Outcome
from localgen.machine.python_process import python_command, python_environment

_START_S = 90.0
_ANSWER_S = 120.0
# inputs between two requests that must be answered
_CHECK_EVERY = 25
_HI = [{"role": "user", "content": "2+3="}]
_WEATHER = {
    "type": "function",
    "function": {"name": "w", "parameters": {"type": "object", "required": ["city"]}},
}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[0]}}
_FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMAS[0]}
_CHAT: dict[str, Any] = {"model": "tiny", "messages": _HI, "max_tokens": 4}
_MESSAGES: dict[str, Any] = {"model": "tiny", "messages": _HI, "max_tokens": 4}
_TOOL = {"name": "w", "description": "a", "input_schema": {"type": "object"}}
_PARTS = [{"type": "text", "text": "a"}]
_TURNS = [
    {"role": "user", "content": _PARTS},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "t1", "name": "w", "input": {"city": "b"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "c"}]},
]
_RESPONSES: dict[str, Any] = {"model": "tiny", "input": "2+3=", "max_output_tokens": 4}
_FUNCTION = {"type": "function", "name": "w", "parameters": {"type": "object"}}
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "w", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "c"},
]
_RANGES: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "n": 2}
AGENT_SAMPLES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/messages", _MESSAGES | {"temperature": 0.5, "top_k": 3, "stop_sequences": ["x"]}),
    ("POST", "/v1/messages", _MESSAGES | {"stream": True, "system": _PARTS}),
    ("POST", "/v1/messages", _MESSAGES | {"tools": [_TOOL], "tool_choice": {"type": "auto"}}),
    ("POST", "/v1/messages", _MESSAGES | {"messages": _TURNS, "tools": [_TOOL]}),
    ("POST", "/v1/messages", _MESSAGES | {"thinking": {"type": "enabled", "budget_tokens": 9}}),
    ("POST", "/v1/messages", _MESSAGES | {"output_config": {"format": _FORMAT}}),
    ("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": _TURNS, "tools": [_TOOL]}),
    ("POST", "/v1/responses", _RESPONSES | {"temperature": 0.5, "metadata": {"a": "b"}}),
    ("POST", "/v1/responses", _RESPONSES | {"stream": True, "instructions": "a", "store": False}),
    ("POST", "/v1/responses", _RESPONSES | {"input": _ITEMS, "reasoning": {"max_tokens": 5}}),
    ("POST", "/v1/responses", _RESPONSES | {"tools": [_FUNCTION], "tool_choice": "auto"}),
    ("POST", "/v1/responses", _RESPONSES | {"text": {"format": _FORMAT}}),
    ("POST", "/v1/responses", _RESPONSES | {"previous_response_id": "resp_abc"}),
    ("GET", "/v1/responses/resp_abc", None),
    ("DELETE", "/v1/responses/resp_abc", None),
    ("POST", "/tokenize", {"model": "tiny", "content": "a b", "with_pieces": True}),
    ("POST", "/tokenize", {"model": "tiny", "prompt": "a b", "add_special_tokens": False}),
    ("POST", "/tokenize", {"model": "tiny", "messages": _HI}),
    ("POST", "/detokenize", {"model": "tiny", "tokens": [1, 2, 300]}),
    ("POST", "/apply-template", {"model": "tiny", "messages": _HI, "tools": [_WEATHER]}),
)
_SAMPLES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/chat/completions", _CHAT | _RANGES | {"logprobs": True, "top_logprobs": 2}),
    ("POST", "/v1/chat/completions", _CHAT | {"stream": True, "min_p": 0.1}),
    ("POST", "/v1/chat/completions", _CHAT | {"response_format": _SCHEMA}),
    ("POST", "/v1/chat/completions", _CHAT | {"tools": [_WEATHER]}),
    ("POST", "/v1/chat/completions", _CHAT | {"logit_bias": {"5": 3}, "tool_choice": "none"}),
    ("POST", "/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 3}),
    ("POST", "/v1/embeddings", {"model": "tiny", "input": ["a", "b"], "encoding_format": "base64"}),
    ("POST", "/v1/models/load", {"model": "tiny", "options": {"ctx": 512, "parallel": 2}}),
    ("POST", "/v1/models/unload", {"model": "other"}),
    ("POST", "/v1/requests/abc/cancel", {}),
    ("POST", "/v1/requests/abc/answer-now", {}),
    ("GET", "/v1/models/tiny", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/stats", None),
    ("GET", "/metrics", None),
    ("GET", "/health", None),
    ("POST", "/api/chat", {"model": "tiny", "messages": _HI, "options": {"num_predict": 4}}),
    ("POST", "/api/generate", {"model": "tiny", "prompt": "a", "raw": True, "options": {}}),
    ("POST", "/api/generate", {"model": "tiny", "prompt": "a", "format": SCHEMAS[1]}),
    ("POST", "/api/embed", {"model": "tiny", "input": "a", "truncate": True}),
    ("POST", "/api/show", {"model": "tiny", "verbose": True}),
    ("POST", "/api/copy", {"source": "tiny", "destination": "other"}),
    ("DELETE", "/api/delete", {"model": "other"}),
    ("GET", "/api/tags", None),
    ("GET", "/api/ps", None),
    *AGENT_SAMPLES,
)  # fmt: skip


class HttpTarget:
    name, suffix = "http", ".http"

    def __init__(self) -> None:
        self._server: _Server | None = None
        self._num_inputs = 0

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def make(self, source: random.Random) -> bytes:
        mutator = Mutator(source)
        method, path, value = source.choice(_SAMPLES)
        body = b"" if value is None else mutator.json_text(value).encode(errors="surrogatepass")
        headers = {"Host": "127.0.0.1", "Content-Type": "application/json"}
        kind = source.random()
        if kind < 0.05:
            path = mutator.text(path)
        elif kind < 0.1:
            method = source.choice(("GET", "PUT", "HEAD", "OPTIONS", "TRACE", "PATCH", "A" * 99))
        elif kind < 0.2:
            key = source.choice(_HEADERS)
            headers[key] = source.choice((*CHARACTERS, *map(str, NUMBERS), "a" * 70_000, "gzip"))
        headers |= {"Content-Length": str(len(body)), "Connection": "close"}
        lines = "".join(f"{key}: {text}\r\n" for key, text in headers.items())
        head = f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode(errors="surrogatepass")
        return mutator.data(head) + body if source.random() < 0.02 else head + body

    def run(self, content: bytes) -> Outcome:
        """Send one input. Starts the server if there is none."""
        server = self._server = self._server or _Server()
        try:
            answer = server.send(content)
            outcome = _judge(content, answer)
        except TimeoutError:
            outcome = Outcome("hang", f"{_route(content)}: no answer in {_ANSWER_S:g} s")
        except ConnectionError:  # the server closed before it had read everything
            outcome = Outcome("refused")
        self._num_inputs += 1
        if outcome.is_finding or self._num_inputs % _CHECK_EVERY == 0:
            trouble = server.trouble()
            if trouble:
                self.close()
                return Outcome("crash", f"{_route(content)}: {trouble}", server.log_tail)
        return outcome


_HEADERS = (
    *("Content-Encoding", "Transfer-Encoding", "Expect", "Authorization", "X-Request-Id", "Host"),
    *("Origin", "Accept", "Content-Type", "X-Api-Key", "Cookie", "Upgrade", "Range", "Priority"),
)


class _Server:
    """localgen serve on a loopback port, with folders of its own and no way to a hub."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="lgfuzz")
        root = Path(self._folder.name)
        places = {name: root / name.lower() for name in ("XDG_RUNTIME_DIR", "LOCALGEN_STATE_DIR")}
        places |= {name: root / name.lower() for name in ("XDG_CACHE_HOME", "HF_HOME")}
        for place in places.values():
            place.mkdir(mode=0o700)
        environment = python_environment() | {key: str(path) for key, path in places.items()}
        environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "PIP_NO_INDEX": "1"}
        self._log = root / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                python_command("localgen.cli.main", "serve", "--port", "0"),
                env=environment,
                cwd=root,
                stdout=log,
                stderr=log,
            )
        self.port = self._await_port()
        self.log_tail = ""
        self._good()
        self._rss = self._bytes()

    def send(self, content: bytes) -> bytes:
        """The answer, up to the end of the connection. Raises TimeoutError."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_ANSWER_S) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(content)
            received, deadline_s = bytearray(), time.monotonic() + _ANSWER_S
            while True:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not select.select([connection], [], [], left_s)[0]:
                    raise TimeoutError
                part = connection.recv(1 << 16)
                received += part
                if not part:
                    return bytes(received)

    def trouble(self) -> str:
        """Return what is wrong with the server, empty if nothing is."""
        try:
            self._good()
            growth = self._bytes() - self._rss
            trouble = f"grew by {growth >> 20} MiB" if growth > MAX_GROWTH_BYTES else ""
        except (OSError, AssertionError, psutil.Error) as error:
            trouble = f"no answer to a good request: {type(error).__name__}"
        self.log_tail = self._log.read_text(errors="replace")[-3000:] if trouble else ""
        return trouble

    def stop(self) -> None:
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self._folder.cleanup()

    def _good(self) -> None:
        body = json.dumps(_CHAT).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        answer = self.send(head.encode() + body)
        # another model may have been loaded with other options, which is no defect
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 409")), answer[:200]

    def _bytes(self) -> int:
        main = psutil.Process(self._process.pid)
        return sum(one.memory_info().rss for one in (main, *main.children(recursive=True)))

    def _await_port(self) -> int:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            found = re.search(r"listening on http://\S+:(\d+)", self._log.read_text())
            if found:
                return int(found[1])
            time.sleep(0.1)
        raise SystemExit(f"the server did not start: {self._log.read_text()[-1000:]}")


def _judge(content: bytes, answer: bytes) -> Outcome:
    head, _, body = answer.partition(b"\r\n\r\n")
    status_line = head.split(b"\r\n")[0]
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", status_line)
    if found is None:
        is_closed = not answer
        return Outcome(
            "refused" if is_closed else "exception", "no status line", repr(answer[:500])
        )
    status = int(found[1])
    detail = os.fsdecode(body[:500])
    if status >= 500:
        reason = re.sub(r"[\d'\"].*", "", detail.partition('"message":"')[2])[:60]
        return Outcome("exception", f"{_route(content)}: {status} {reason}", repr(answer[:2000]))
    if status < 400:
        return Outcome("accepted")
    # the HTTP library's own answer to what is no HTTP
    if content.startswith(b"HEAD ") or body == b"Invalid HTTP request received.":
        return Outcome("refused")
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return Outcome("exception", f"{status} without our error body", repr(answer[:1000]))
    return Outcome("refused", detail=str(error)[:200])


def _route(content: bytes) -> str:
    line = content.split(b"\r\n")[0].decode(errors="replace")
    return " ".join(line.split(" ")[:2])[:60]
