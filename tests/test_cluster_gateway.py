"""The gateway in front of scripted replicas: each request ends exactly once, whatever they do."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.types import Message, Scope

import localgen
from localgen.backends.types import PromptChunks
from localgen.client.snapshot import parse_localgen_stats
from localgen.cluster.gateway import MIN_PROMPT_CHUNKS, Gateway
from localgen.cluster.prefix_table import prompt_chunks
from localgen.cluster.route import Asked, Choice
from localgen.cluster.totals import REPLICAS, merged_metrics, merged_stats
from localgen.server.http.guard import RequestRefused
from localgen.server.requests.caller import decode_chunks

CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
RESPONSES = "/v1/responses"
LONG_S = 30.0
SCOPE: Scope = {"type": "http", "method": "POST", "headers": [], "client": None, "arrived_s": 0.0}


class Replica(BaseHTTPRequestHandler):
    """Answers by the path's query: whole, a stream, or a stream that breaks off."""

    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append((self.path, headers, body))
        if self.server.dies:
            return self._reset()
        _, _, script = self.path.partition("?")
        media = "application/x-ndjson" if self.path.startswith("/api/") else "text/event-stream"
        self.send_response(self.server.status)
        self.send_header("Content-Type", media if script else "application/json")
        if self.path == CHAT:
            self.send_header("X-Request-Id", "id1")
        if not script:
            answer = json.dumps({"port": self.server.server_port}).encode()
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._send(b"data: one\n\n")
        if script == "endless":
            self.server.closed.set() if self._send_until_closed() else None
        elif script == "breaks":
            self._reset()
        else:
            self._send(b"data: [DONE]\n\n")
            self._send(b"")

    def _reset(self) -> None:
        """End as a process that was killed."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True

    def _send(self, piece: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.flush()

    def _send_until_closed(self) -> bool:
        try:
            while True:
                self._send(b"data: more\n\n")
        except OSError:
            self.close_connection = True
            return True

    def log_message(self, format: str, *args: Any) -> None:
        pass


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Replica)
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.closed = threading.Event()
        self.dies = False
        self.status = 200

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def replica() -> Iterator[ScriptedServer]:
    with scripted() as server:
        yield server


class Chooser:
    """Chooses the replicas in turn, and notes why."""

    def __init__(self, *urls: str, **choice: Any) -> None:
        self.choice = choice
        self.urls, self.asked = list(urls), list[Asked]()
        self.num_open = 0
        self.gone: list[frozenset[str]] = []

    @asynccontextmanager
    async def choose(self, asked: Asked, gone: frozenset[str]) -> AsyncIterator[Choice]:
        self.gone.append(gone)
        self.asked.append(asked)
        url = self.urls.pop(0) if len(self.urls) > 1 else self.urls[0]
        self.num_open += 1
        try:
            yield Choice(f"r{len(self.asked)}", url, **self.choice)
        finally:
            self.num_open -= 1

    async def ask_all(self, path: str) -> Sequence[tuple[str, bytes]]:
        raise AssertionError(path)


@asynccontextmanager
async def never(asked: Asked, gone: frozenset[str]) -> AsyncIterator[Choice]:
    """Waits for a replica that does not come."""
    await asyncio.Event().wait()
    yield Choice("", "")


def ask(
    asked: Chooser, path: str, body: Any = None, *, leaves: bool = False, **headers: str
) -> list[Message]:
    gateway = Gateway(asked.choose, asked.ask_all, secret="s3")
    return asyncio.run(exchange(gateway, path, body, leaves, headers))


async def exchange(
    gateway: Gateway,
    path: str,
    body: Any = None,
    leaves: bool = False,
    headers: Any = (),
    method: str = "POST",
) -> list[Message]:
    """What the gateway sends. leaves: the client goes after the first piece."""
    path, _, query = path.partition("?")
    scope: Scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "client": ("10.0.0.9", 1234),
        "headers": [
            (b"content-type", b"application/json"),
            (b"host", b"cluster.example"),
            *((name.encode(), value.encode()) for name, value in dict(headers).items()),
        ],
    }
    whole = json.dumps({"messages": []} if body is None else body).encode()
    incoming = [{"type": "http.request", "body": whole}]
    sent: list[Message] = []
    gone = asyncio.Event()

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if leaves and message.get("body"):
            gone.set()
            await asyncio.sleep(0)

    await asyncio.wait_for(gateway(scope, receive, send), LONG_S)
    return sent


def text_of(sent: list[Message]) -> str:
    starts = [message for message in sent if message["type"] == "http.response.start"]
    assert len(starts) == 1
    ends = [message for message in sent[1:] if not message.get("more_body")]
    assert ends == [sent[-1]], "ended once"
    return b"".join(message.get("body", b"") for message in sent).decode()


def test_a_request_is_passed_as_it_is(replica: ScriptedServer) -> None:
    body = {"messages": [{"role": "user", "content": "ä" * 600}], "n": 1}
    sent = ask(Chooser(replica.url), CHAT, body, authorization="Bearer secret-key")
    ((path, headers, seen),) = replica.seen
    assert (path, json.loads(seen)) == (CHAT, body)
    assert headers["authorization"] == "Bearer secret-key"
    assert headers["x-localgen-session"] == "10.0.0.9:1234"
    assert headers["host"] == f"127.0.0.1:{replica.server_port}"
    assert sent[0]["status"] == 200
    assert (b"x-localgen-replica", b"r1") in sent[0]["headers"]
    assert b"date" not in dict(sent[0]["headers"]), "the gateway's server adds its own"
    assert json.loads(text_of(sent)) == {"port": replica.server_port}


@pytest.mark.parametrize("path", ["/v1/x/../stats", "/./v1/stats", "/v1/stats/.."])
def test_a_path_that_means_another_one_reaches_no_replica(
    replica: ScriptedServer, path: str
) -> None:
    sent = ask(Chooser(replica.url), path)
    assert sent[0]["status"] == 404
    assert "no . and .. here" in text_of(sent)
    assert not replica.seen


@pytest.mark.parametrize(
    "path", ["/v1/%73tats", "/v1/%2e%2e/stats", "/v1/a\nb", "/v1/ä b", "/v1//stats"]
)
def test_a_replica_reads_the_path_that_the_gateway_has_read(
    replica: ScriptedServer, path: str
) -> None:
    """As the replica's server decodes it once."""
    assert ask(Chooser(replica.url), path)[0]["status"] == 200
    ((seen, _, _),) = replica.seen
    assert unquote(seen) == path


def test_a_question_mark_in_a_path_is_no_query(replica: ScriptedServer) -> None:
    gateway = Gateway(Chooser(replica.url).choose, Chooser().ask_all, secret="s3")
    request = gateway._request(
        gateway._parse({**SCOPE, "path": "/v1/a?b", "query_string": b"c=d"}, b""), "http://r", ""
    )
    assert request.url.raw_path == b"/v1/a%3Fb?c=d"


def test_chunks_that_are_not_reported_are_not_routed_by(replica: ScriptedServer) -> None:
    asked = Chooser(replica.url)
    ask(asked, CHAT, {"messages": [{"role": "user", "content": "a" * 256 * 4000}]})
    assert len(asked.asked[0].chunks) == 3072


def test_an_adapter_is_a_model_of_its_own(replica: ScriptedServer) -> None:
    asked = Chooser(replica.url)
    text = {"prompt": "a" * 600}
    bodies = [{"model": "poet", **text}, text, {"lora": [{"id": "poet"}], **text}]
    for body in bodies:
        ask(asked, "/v1/completions", body)
    assert [json.loads(seen) for _, _, seen in replica.seen] == bodies
    assert [each.model for each in asked.asked] == ["poet", "", ""]
    assert len({each.chunks for each in asked.asked}) == len(bodies)


@pytest.mark.parametrize(
    ("path", "system"),
    [
        (CHAT, lambda text: {"messages": [{"role": "system", "content": text}]}),
        (CHAT, lambda text: {"messages": [{"role": "developer", "content": [{"text": text}]}]}),
        (MESSAGES, lambda text: {"system": [{"type": "text", "text": text}], "messages": []}),
        (RESPONSES, lambda text: {"instructions": text, "input": "Hello"}),
    ],
)
def test_prompts_that_replicas_stabilize_are_routed_alike(
    replica: ScriptedServer, path: str, system: Callable[[str], dict[str, Any]]
) -> None:
    asked = Chooser(replica.url)
    names = {21: ("x", "y"), 22: ("y", "x")}  # of tools, on each day
    bodies = [
        {
            "tools": [{"name": name} for name in names[day]],
            **system(f"Today is Nov {day}, 2026, {day}:30. " + "a" * 600),
        }
        for day in names
    ]

    async def run(stabilizes: bool) -> None:
        gateway = Gateway(asked.choose, asked.ask_all, stabilizes=stabilizes)
        for body in bodies:
            await exchange(gateway, path, body)

    for stabilizes in (True, False):
        asyncio.run(run(stabilizes))
    stable, again, first, second = (each.chunks for each in asked.asked)
    assert stable == again
    assert len({stable, first, second}) == 3
    assert [json.loads(seen) for _, _, seen in replica.seen] == bodies * 2, "passed as they are"


def test_a_stream_comes_in_pieces(replica: ScriptedServer) -> None:
    asked = Chooser(replica.url)
    sent = ask(asked, f"{CHAT}?whole", {"prompt": "a" * 300})
    assert text_of(sent) == "data: one\n\ndata: [DONE]\n\n"
    assert len(asked.asked[0].chunks) == 1
    assert asked.num_open == 0


@pytest.mark.parametrize(
    ("path", "begins"),
    [
        (CHAT, 'data: {"error":'),
        (MESSAGES, 'event: error\ndata: {"type":"error"'),
        (RESPONSES, 'event: error\ndata: {"type":"error","code":"server_unavailable",'),
        (OLLAMA, '{"error":'),
    ],
)
def test_a_replica_that_dies_in_a_stream_ends_it_with_an_error(
    replica: ScriptedServer, path: str, begins: str
) -> None:
    asked = Chooser(replica.url)
    first, rest = text_of(ask(asked, f"{path}?breaks")).split("data: one\n\n")
    assert first == ""
    assert rest.startswith(begins)
    assert "the engine that answered has ended: try again" in rest
    assert len(replica.seen) == 1, "what was answered in part is not asked again"
    assert asked.num_open == 0


def test_a_replica_that_is_gone_is_passed_over(replica: ScriptedServer) -> None:
    with scripted() as gone:
        url = gone.url
    asked = Chooser(url, replica.url)
    sent = ask(asked, CHAT)
    assert asked.gone == [frozenset(), {"r1"}]
    assert json.loads(text_of(sent)) == {"port": replica.server_port}
    sent = ask(Chooser(url), CHAT)
    assert sent[0]["status"] == 503
    assert "try again" in text_of(sent)


def test_a_replica_that_dies_before_it_answers_is_passed_over(replica: ScriptedServer) -> None:
    with scripted() as dying:
        dying.dies = True
        asked = Chooser(dying.url, replica.url)
        assert json.loads(text_of(ask(asked, CHAT))) == {"port": replica.server_port}
        assert (len(dying.seen), asked.gone[1]) == (1, frozenset({"r1"}))


@pytest.mark.skipif(sys.platform != "linux", reason="the options have these names on Linux")
def test_a_machine_without_power_is_noticed(replica: ScriptedServer) -> None:
    """By the kernel: it closes no connection, and an answer may take any time."""

    async def options() -> list[int]:
        client = Gateway(Chooser().choose, Chooser().ask_all)._client
        async with client.stream("POST", f"{replica.url}{CHAT}", content=b"{}") as reply:
            sock = reply.extensions["network_stream"].get_extra_info("socket")
            tcp = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            found = [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, each)) for each in tcp]
            return [sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *found]

    assert asyncio.run(options()) == [1, 4, 2, 3, 10_000]


def test_a_client_that_leaves_ends_its_request(replica: ScriptedServer) -> None:
    asked = Chooser(replica.url)
    ask(asked, f"{CHAT}?endless", leaves=True)
    assert replica.closed.wait(LONG_S)
    assert asked.num_open == 0


def test_what_is_about_a_request_goes_to_its_replica(replica: ScriptedServer) -> None:
    asked = Chooser(replica.url)

    async def run() -> None:
        gateway = Gateway(asked.choose, asked.ask_all)
        await exchange(gateway, CHAT)
        for path in ("requests/id1/cancel", "responses/resp_id1", "requests/id2/cancel"):
            await exchange(gateway, f"/v1/{path}")
        await exchange(gateway, "/v1/responses", {"previous_response_id": "resp_id1", "input": "a"})

    asyncio.run(run())
    assert [each.wanted for each in asked.asked] == [None, "r1", "r1", None, "r1"]


def test_probes_need_no_replica() -> None:
    for path in ("/health", "/livez"):
        asked = Chooser("http://127.0.0.1:1")
        assert json.loads(text_of(ask(asked, path))) == {"status": "ok"}
        assert asked.asked == []


def test_where_a_prefix_lies_is_said_by_the_gateway_only(replica: ScriptedServer) -> None:
    asked = Chooser(replica.url, kv_peer="10.0.0.1:7000")
    forged: dict[str, Any] = {
        "x-localgen-kv-peer": "10.9.9.9:1",
        "x-localgen-prompt-only": "1",
        "x-localgen-chunks": "1:AAAAAAAAAAA=",
        "x-localgen-account": "key-1",
    }
    ask(asked, CHAT, {"prompt": "a" * 600}, **forged)
    ask(Chooser(replica.url), CHAT, **forged)
    (_, first, _), (_, second, _) = replica.seen
    assert first["x-localgen-kv-peer"] == "10.0.0.1:7000"
    assert "x-localgen-kv-peer" not in second
    assert "x-localgen-prompt-only" not in {**first, **second}
    sent = PromptChunks(prompt_chunks({"prompt": "a" * 600}), 2)
    assert decode_chunks(first["x-localgen-chunks"]) == sent
    assert "x-localgen-chunks" not in second, "it has no whole chunk"
    assert "key-1" not in (first.get("x-localgen-account"), second.get("x-localgen-account"))


def test_a_long_prompt_is_computed_by_a_prompt_replica(replica: ScriptedServer) -> None:
    answering = Chooser(replica.url, new_chunks=MIN_PROMPT_CHUNKS, kv_peer="a:1", kv_address="c:3")
    body = {"prompt": "a" * 3000, "model": "m:latest"}

    async def run(prompts: ScriptedServer) -> Chooser:
        preparing = Chooser(prompts.url, kv_address="b:2", new_chunks=MIN_PROMPT_CHUNKS + 9)
        gateway = Gateway(
            answering.choose,
            answering.ask_all,
            preparing.choose,
            default_names={"", "m"},
            secret="s3",
        )
        await exchange(gateway, CHAT, body)
        prompts.dies = True
        text_of(await exchange(gateway, CHAT, body))
        await exchange(gateway, "/v1/embeddings", body)
        await exchange(gateway, CHAT, {**body, "model": "other"})
        await exchange(gateway, CHAT, {**body, "previous_response_id": "resp_1"})
        answering.choice["new_chunks"] -= 1
        await exchange(gateway, CHAT, body)
        return preparing

    with scripted() as prompts:
        preparing = asyncio.run(run(prompts))
        assert len(prompts.seen) == 2, "only long prompts, and only where that can help"
        path, headers, seen = prompts.seen[0]
    assert (path, json.loads(seen)) == (CHAT, body)
    assert headers["x-localgen-prompt-only"] == "1"
    assert headers["x-localgen-kv-peer"] == "c:3", "the one that answers has more of it"
    assert preparing.asked[0].chunks == answering.asked[0].chunks
    assert (preparing.num_open, answering.num_open) == (0, 0)
    peers = [headers["x-localgen-kv-peer"] for _, headers, _ in replica.seen]
    assert peers == ["b:2", *["a:1"] * 5], "it is answered without the prompt replica"


def test_a_prompt_replica_that_is_not_there_is_not_waited_for(
    replica: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localgen.cluster.gateway._PROMPT_CHOICE_S", 0.05)

    async def run() -> list[Message]:
        asked = Chooser(replica.url, new_chunks=MIN_PROMPT_CHUNKS)
        return await exchange(Gateway(asked.choose, asked.ask_all, never), CHAT)

    assert json.loads(text_of(asyncio.run(run()))) == {"port": replica.server_port}


def test_a_request_waits_for_a_replica_no_longer_than_it_may_take(replica: ScriptedServer) -> None:
    asked = Chooser(replica.url)
    gateway = Gateway(never, asked.ask_all, timeout_s=0.05)
    sent = asyncio.run(exchange(gateway, CHAT))
    assert sent[0]["status"] == 504
    assert "the request timed out, the limit is 0.05 s" in text_of(sent)
    gateway = Gateway(asked.choose, asked.ask_all, timeout_s=LONG_S)
    assert asyncio.run(exchange(gateway, CHAT))[0]["status"] == 200


def test_replicas_know_the_gateway_by_its_secret(replica: ScriptedServer) -> None:
    async def run(**options: Any) -> None:
        asked = Chooser(replica.url)
        gateway = Gateway(asked.choose, asked.ask_all, secret="s3", **options)
        headers = {
            "authorization": "Bearer a",
            "x-api-key": "b",
            "x-localgen-gateway": "forged",
            "origin": "https://page.example",
        }
        await exchange(gateway, CHAT, headers=headers)

    asyncio.run(run())
    asyncio.run(run(replica_key="the-only-one"))
    (_, own, _), (_, other, _) = replica.seen
    assert own["x-localgen-gateway"] == "s3"
    assert (own["authorization"], own["x-api-key"]) == ("Bearer a", "b")
    assert "origin" not in own, "the gateway has checked it"
    assert other["authorization"] == "Bearer the-only-one"
    assert "x-api-key" not in other


def test_a_replica_that_is_ending_is_passed_over(replica: ScriptedServer) -> None:
    with scripted() as ending:
        ending.status = 503
        asked = Chooser(ending.url, replica.url)
        assert json.loads(text_of(ask(asked, CHAT))) == {"port": replica.server_port}
        assert asked.gone == [frozenset(), {"r1"}]
        assert ask(Chooser(ending.url), CHAT)[0]["status"] == 503
        assert len(ending.seen) == 4, "it is asked three times if there is no other"


def test_a_body_that_is_refused_gets_its_error() -> None:
    async def receive() -> Message:
        raise RequestRefused(413, "request_too_large", "the body is too large")

    async def run() -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        asked = Chooser("http://127.0.0.1:1")
        scope: Scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
        await Gateway(asked.choose, asked.ask_all)(scope, receive, send)
        return sent

    sent = asyncio.run(run())
    assert sent[0]["status"] == 413
    assert "the body is too large" in text_of(sent)


def test_what_is_no_json_goes_to_a_replica_which_refuses_it(replica: ScriptedServer) -> None:
    for body in ("text", [1], 3):
        ask(Chooser(replica.url), CHAT, body)
    assert len(replica.seen) == 3


def test_statistics_of_all_replicas() -> None:
    def stats(name: str, ago: float) -> bytes:
        models = [{"name": name, "id": "x", "stats": {"running": 1}}]
        ended = [{"ended_ago_s": ago, "model": name}]
        return json.dumps({"server": {}, "models": models, "ended": ended}).encode()

    total = merged_stats([("b", stats("tiny", 1.0)), ("a", stats("tiny", 2.0))])
    assert [model["name"] for model in total["models"]] == ["tiny@a", "tiny@b"]
    assert [model["id"] for model in total["models"]] == ["x@a", "x@b"]
    assert total["ended"] == [
        {"ended_ago_s": 1.0, "model": "tiny@b"},
        {"ended_ago_s": 2.0, "model": "tiny@a"},
    ]
    snapshot = parse_localgen_stats(total | {"ended": None})
    assert snapshot.num_replicas == 2
    models = snapshot.models
    assert [(model.served_name, model.replica) for model in models] == [
        ("tiny", "a"),
        ("tiny", "b"),
    ]
    assert total[REPLICAS]["b"]["models"][0]["name"] == "tiny"
    none = merged_stats([])
    assert (none["models"], none["ended"], none[REPLICAS]) == ([], [], {})
    assert parse_localgen_stats(none).version == localgen.__version__


def test_metrics_of_all_replicas() -> None:
    one = b"# HELP x Requests.\n# TYPE x counter\nx 1.0\n"
    one += b'# HELP y Y.\n# TYPE y gauge\ny{m="t"} 2.0\n'
    assert merged_metrics([("a", one), ("b", one)]).splitlines() == [
        "# HELP x Requests.",
        "# TYPE x counter",
        'x{replica="a"} 1.0',
        'x{replica="b"} 1.0',
        "# HELP y Y.",
        "# TYPE y gauge",
        'y{m="t",replica="a"} 2.0',
        'y{m="t",replica="b"} 2.0',
    ]


def test_a_large_body_is_parsed_before_its_turn_ends(
    replica: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LargeBodyTurns: before the gateway awaits anything else."""
    done: list[str] = []

    def note_chunks(fields: Any) -> tuple[bytes, ...]:
        done.append("parsed")
        return ()

    monkeypatch.setattr("localgen.cluster.gateway.prompt_chunks", note_chunks)
    asked = Chooser(replica.url)

    async def receive() -> Message:
        if done:
            await asyncio.Event().wait()
        asyncio.get_running_loop().call_soon(done.append, "turn ended")
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Message) -> None:
        pass

    async def run() -> None:
        scope = {**SCOPE, "path": CHAT, "query_string": b""}
        await Gateway(asked.choose, asked.ask_all)(scope, receive, send)

    asyncio.run(run())
    assert done == ["parsed", "turn ended"]


def test_a_replica_that_leaves_is_asked_about_its_requests(replica: ScriptedServer) -> None:
    """The router chooses another one, as that gets no new requests."""
    paths = ("/v1/requests/id1/cancel", "/v1/responses/resp_id1", RESPONSES)
    body = {"previous_response_id": "resp_id1", "input": "a"}

    async def run(leaving: ScriptedServer) -> list[list[Message]]:
        asked = Chooser(leaving.url, replica.url)
        gateway = Gateway(asked.choose, asked.ask_all)
        await exchange(gateway, CHAT)
        sent = [await exchange(gateway, path, body) for path in paths]
        assert [path for path, _, _ in leaving.seen] == [CHAT, *paths]
        leaving.dies = True
        return [*sent, await exchange(gateway, paths[0], body)]

    with scripted() as leaving:
        sent = asyncio.run(run(leaving))
    assert [dict(each[0]["headers"])[b"x-localgen-replica"] for each in sent[:3]] == [b"r1"] * 3
    assert json.loads(text_of(sent[3])) == {"port": replica.server_port}, "it has left"
    assert len(replica.seen) == 1
