"""A server of OpenAI's protocol on loopback, without localgen's extensions, with faults on demand.

`python tests/plain_openai.py` runs one to try by hand.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {"prompt_tokens": 40, "completion_tokens": 6, "total_tokens": 46}


@dataclass(frozen=True)
class Response:
    """The response to one request in place of an answer."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    kind: str = "application/json"


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def error(status: int, message: str, **fields: Any) -> Response:
    return Response(status, json.dumps({"error": {"message": message, **fields}}).encode())


def page(status: int = 200) -> Response:
    return Response(status, b"<html><h1>Welcome</h1></html>", kind="text/html; charset=utf-8")


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    """One event of a stream in OpenAI's format."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    made = {"id": "x", "object": "chat.completion.chunk", "model": "big", "choices": choices}
    return b"data: " + json.dumps(made | more).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def answer(*pieces: str, usage: dict[str, Any] | None = None) -> list[bytes]:
    """The events of a complete answer."""
    events = [chunk({"role": "assistant", "content": ""})]
    events += [chunk({"content": piece}) for piece in pieces]
    events.append(chunk({}, "stop"))
    events += [chunk(usage=usage)] if usage is not None else []
    return [*events, DONE]


class PlainServer:
    """Models, events and faults of the server.

    models: None: no model list. first: responses to the first requests, in place of answers.
    refuse: returns the error for a body that it rejects. gap_s: pause before each event.
    """

    def __init__(self, *models: str | dict[str, Any], port: int = 0) -> None:
        self.models: Sequence[str | dict[str, Any]] | None = models or ("big",)
        self.events: list[bytes] = []
        self.kind = "text/event-stream"
        self.first: list[Response] = []
        self.listing: Response | None = None
        self.refuse: Callable[[dict[str, Any]], Response | None] = lambda body: None
        self.key: str | None = None
        self.gap_s = 0.0
        self.cut = False
        self.hung_up = threading.Event()
        self.seen: list[Seen] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._http.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The bodies of the chat completion requests."""
        return [seen.body for seen in self.seen if seen.path.endswith("/chat/completions")]

    def serve(self) -> None:
        self._http.serve_forever(poll_interval=0.02)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def response(self, seen: Seen) -> Response | None:
        """What is wrong with a request; None: nothing."""
        if self.key is not None and seen.headers.get("authorization") != f"Bearer {self.key}":
            return error(401, f"Incorrect API key: {seen.headers.get('authorization')}")
        if seen.path == "/v1/models":
            return self.listing or self._list()
        if seen.path != "/v1/chat/completions":
            return Response(404, b'{"detail":"Not Found"}')
        return self.first.pop(0) if self.first else self.refuse(seen.body)

    def _list(self) -> Response:
        if self.models is None:
            return Response(404, b'{"detail":"Not Found"}')
        cards = [{"id": each} if isinstance(each, str) else each for each in self.models]
        return Response(200, json.dumps({"object": "list", "data": cards}).encode())

    def events_for(self, body: dict[str, Any]) -> list[bytes]:
        if self.events:
            return self.events
        counted = bool(body.get("stream_options", {}).get("include_usage"))
        text = body["messages"][-1]["content"]
        pieces = ["re: ", *(f"{word} " for word in text.split())]
        usage = USAGE | {"completion_tokens": len(pieces)} if counted else None
        return answer(*pieces, usage=usage)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        plain = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", "0"))
                self._reply(json.loads(self.rfile.read(length)))

            def _reply(self, body: dict[str, Any]) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                seen = Seen(self.path, headers, body)
                plain.seen.append(seen)
                response = plain.response(seen)
                if response is None:
                    self._stream(plain.events_for(body))
                else:
                    self._whole(response)

            def _whole(self, response: Response) -> None:
                self.send_response(response.status)
                length = {"Content-Length": str(len(response.body))}
                for name, value in ({"Content-Type": response.kind} | length).items():
                    self.send_header(name, value)
                for name, value in response.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    self.wfile.write(response.body)
                except OSError:
                    plain.hung_up.set()

            def _stream(self, events: Sequence[bytes]) -> None:
                self.send_response(200)
                self.send_header("Content-Type", plain.kind)
                if plain.cut:  # more is promised than comes
                    self.send_header("Content-Length", "1000000")
                self.end_headers()
                try:
                    for event in events:
                        time.sleep(plain.gap_s)
                        self.wfile.write(event)
                        self.wfile.flush()
                except OSError:
                    plain.hung_up.set()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


@contextmanager
def plain_server(*models: str | dict[str, Any], port: int = 0) -> Iterator[PlainServer]:
    """A server that runs while the context is open."""
    server = PlainServer(*models, port=port)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(timeout=10)


if __name__ == "__main__":
    shown = PlainServer("big", "small")
    shown.gap_s = 0.1
    print(shown.url, flush=True)
    shown.serve()
