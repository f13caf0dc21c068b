"""A server of OpenAI's protocol: what it is sent, what it sends, and its errors."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from plain_openai import DONE, PlainServer, Response, answer, chunk, error, page, plain_server

from localgen.backends.errors import (
    ContextExceeded,
    InvalidRequest,
    LocalgenError,
    ModelNotFound,
    QueueFull,
)
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message, ToolCall
from localgen.client import Client, Completion, TextDelta
from localgen.client.connection import EndpointConnection, parse_retry_after
from localgen.client.endpoints import Endpoint
from localgen.client.errors import EndpointErrors, EndpointUnavailable
from localgen.client.request_body import OpenAICompat
from localgen.client.stream import CompletionStreamParser, TimedChunks, iter_sse_data
from localgen.config import BadSetting
from localgen.hub.hf_client import AccessDenied

KEY = "sk-very-secret"
OPTIONS = LoadOptions()


@pytest.fixture
def server() -> Iterator[PlainServer]:
    with plain_server() as running:
        yield running


class Asking:
    """A client of a server, its messages, and the seconds it slept."""

    def __init__(self, server: PlainServer, key_env: str | None = None) -> None:
        self.said: list[str] = []
        self.slept: list[float] = []
        endpoint = Endpoint(server.url, key_env=key_env)
        self.client = Client(EndpointConnection(endpoint, self.said.append, self.slept.append))

    def load(self, model: str | None = None) -> ModelInfo:
        return self.client.load(model, OPTIONS)

    def events(self, model: str | None = "big", **params: Any) -> list[TextDelta | Completion]:
        asked = [Message("user", "one two")]
        return list(self.client.chat(model, asked, SamplingParams(**params)))

    def answer(self, model: str | None = "big", **params: Any) -> tuple[str, Completion]:
        *texts, end = self.events(model, **params)
        assert isinstance(end, Completion)
        return "".join(part.text for part in texts if isinstance(part, TextDelta)), end

    def failure(self, model: str | None = "big", **params: Any) -> LocalgenError:
        with pytest.raises(LocalgenError) as raised:
            self.events(model, **params)
        assert "\n" not in raised.value.message
        return raised.value


# --- requests ---


def test_a_request_holds_standard_fields_only(server: PlainServer) -> None:
    text, end = Asking(server).answer()
    assert text == "re: one two "
    assert (end.model, end.finish_reason) == ("big", "stop")
    assert server.asked == [
        {
            "model": "big",
            "messages": [{"role": "user", "content": "one two"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    headers = server.seen[-1].headers
    assert "authorization" not in headers
    assert not [name for name in headers if "localgen" in name]


def test_settings_that_are_given_are_sent_under_openais_names(server: PlainServer) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {5: -1.0},
        "max_tokens": 9,
        "seed": 3,
        "stop": ("END",),
    }
    _, end = Asking(server).answer(**given, json_schema='{"type": "object"}')
    sent = server.asked[0]
    for name in set(given) - {"logit_bias", "stop"}:
        assert sent[name] == given[name]
    assert (sent["logit_bias"], sent["stop"]) == ({"5": -1.0}, ["END"])
    held = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert sent["response_format"] == {"type": "json_schema", "json_schema": held}
    assert "json_schema" not in sent
    assert end.notes == ()


@pytest.mark.parametrize(
    ("family", "name"),
    [("vllm", "repetition_penalty"), ("llamacpp", "repeat_penalty"), (7, "repetition_penalty")],
)
def test_other_settings_are_sent_too_and_said_once(family: object, name: str) -> None:
    with plain_server({"id": "big", "owned_by": family}) as server:
        asking = Asking(server)
        _, end = asking.answer(top_k=7, repeat_penalty=1.1)
        assert server.asked[0]["top_k"] == 7
        assert server.asked[0][name] == 1.1
        (note,) = end.notes
        assert note.endswith(f"may ignore it: top_k, {name}")
        assert asking.answer(top_k=7)[1].notes == ()
        assert asking.answer(top_k=7, min_p=0.1)[1].notes[0].endswith("ignore it: min_p")


def test_a_setting_that_is_refused_is_named(server: PlainServer) -> None:
    server.refuse = lambda body: error(400, "Unrecognized argument") if "top_k" in body else None
    failed = Asking(server).failure(top_k=7, temperature=1.0)
    assert type(failed) is InvalidRequest
    assert "Unrecognized argument" in failed.message
    assert failed.message.endswith("(not in OpenAI's protocol: top_k)")


def test_tool_calls_and_results_go_along(server: PlainServer) -> None:
    call = ToolCall("c1", "add", '{"a": 1}')
    said = [
        Message("assistant", "", reasoning="hm", tool_calls=(call,)),
        Message("tool", "3", tool_call_id="c1", name="add"),
    ]
    list(Asking(server).client.chat("big", said, SamplingParams()))
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert server.asked[0]["messages"] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]


def test_schema_that_is_not_json_is_rejected(server: PlainServer) -> None:
    assert "is not valid JSON" in Asking(server).failure(json_schema="{").message
    assert server.asked == []


@pytest.mark.parametrize(
    "refusal",
    [
        error(400, "Unknown parameter: 'stream_options'."),
        Response(422, b'{"detail":[{"loc":["body","stream_options"],"msg":"extra forbidden"}]}'),
    ],
)
def test_request_is_repeated_without_stream_options(server: PlainServer, refusal: Response) -> None:
    server.refuse = lambda body: refusal if "stream_options" in body else None
    asking = Asking(server)
    _, end = asking.answer()
    assert end.estimated
    assert (end.prompt_tokens, end.completion_tokens) == (None, 3)
    assert len(server.asked) == 2
    asking.answer()
    assert len(server.asked) == 3  # it has been understood


def test_the_local_server_is_never_asked_in_another_form() -> None:
    for message in ("unknown field stream_options", "use max_completion_tokens"):
        assert OpenAICompat().adapt_to_error(message) is not None
        assert OpenAICompat(is_local=True).adapt_to_error(message) is None


def test_max_completion_tokens_is_sent_where_required(server: PlainServer) -> None:
    sentence = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    server.refuse = lambda body: error(400, sentence) if "max_tokens" in body else None
    asking = Asking(server)
    asking.answer(max_tokens=4)
    asking.answer(max_tokens=5)
    assert [sent.get("max_completion_tokens") for sent in server.asked] == [None, 4, 5]
    assert "max_tokens" not in server.asked[-1]


# --- responses ---


@pytest.mark.parametrize(
    "events",
    [
        [b": keep-alive\n\n", *answer("a", "b"), b": bye\n\n"],
        [event.replace(b"\n", b"\r\n") for event in answer("a", "b")],
        [event.replace(b"data: ", b"data:") for event in answer("a", "b")],
        [event.replace(b"data: ", b"id: 7\nevent: message\ndata: ") for event in answer("a", "b")],
        [b"".join(answer("a", "b")).rstrip()],
        [bytes([byte]) for byte in b"".join(answer("a", "b"))],
        answer("a", "b")[:-1],
        [chunk({"role": None, "content": None}), *answer("a", "b")],
        [chunk(choices=None), chunk({"content": "ab"}), chunk(None), chunk({}, "stop"), DONE],
    ],
    ids=[
        "comments",
        "crlf",
        "no-blank",
        "fields",
        "no-end",
        "bytes",
        "no-done",
        "nulls",
        "no-choices",
    ],
)
def test_valid_streams_of_any_layout_are_parsed(server: PlainServer, events: list[bytes]) -> None:
    server.events = events
    text, end = Asking(server).answer()
    assert (text, end.finish_reason) == ("ab", "stop")


def test_answer_without_a_stream_is_parsed(server: PlainServer) -> None:
    message = {"role": "assistant", "content": "whole"}
    body = {
        "model": "big",
        "choices": [{"message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 2},
    }
    server.kind = "application/json; charset=utf-8"
    server.events = [json.dumps(body).encode()]
    text, end = Asking(server).answer()
    assert (text, end.prompt_tokens, end.completion_tokens) == ("whole", 4, 2)
    assert end.timings.predicted_per_second == 0  # there is nothing to measure a rate by


def test_reasoning_is_separate_from_text(server: PlainServer) -> None:
    server.events = [
        chunk({"reasoning_content": "hm "}),
        chunk({"reasoning": "so"}),
        *answer("yes"),
    ]
    *texts, _ = Asking(server).events()
    assert [(part.reasoning, part.text) for part in texts if isinstance(part, TextDelta)] == [
        ("hm ", ""),
        ("so", ""),
        ("", "yes"),
    ]


def test_tool_calls_of_a_server_give_a_note(server: PlainServer) -> None:
    calls = [{"index": 0, "id": "c", "function": {"name": "add", "arguments": ""}}]
    more = [{"index": 0, "function": {"arguments": "{}"}}]
    server.events = [
        chunk({"content": None, "tool_calls": calls}),
        chunk({"tool_calls": more}, "tool_calls"),
        DONE,
    ]
    text, end = Asking(server).answer()
    assert (text, end.finish_reason) == ("", "tool_calls")
    assert end.notes == ("the model called add, but no tools were offered",)


def piece(index: int | None, call_id: str = "", name: str = "", arguments: str = "") -> object:
    """A piece of a call, as `delta.tool_calls` has it."""
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"function": function, "type": "function"} | {
        key: found for key, found in (("index", index), ("id", call_id)) if found not in (None, "")
    }


ADD, ECHO = ToolCall("a", "add", '{"a": 1}'), ToolCall("b", "echo", '{"text": "x"}')


@pytest.mark.parametrize(
    "deltas",
    [
        # one after the other
        [
            [piece(0, "a", "add", '{"a"')],
            [piece(0, arguments=": 1}")],
            [piece(1, "b", "echo", '{"text": ')],
            [piece(1, arguments='"x"}')],
        ],
        # interleaved, and several in a chunk
        [
            [piece(0, "a", "add"), piece(1, "b", "echo")],
            [piece(1, arguments='{"text": ')],
            [piece(0, arguments='{"a"')],
            [piece(1, arguments='"x"}'), piece(0, arguments=": 1}")],
        ],
        # the second call begins first
        [
            [piece(1, "b", "echo", '{"text": ')],
            [piece(0, "a", "add", '{"a": 1}')],
            [piece(1, arguments='"x"}')],
        ],
        # id and name in pieces of their own
        [
            [piece(0, "a"), piece(1, "b")],
            [piece(1, name="echo"), piece(0, name="add")],
            [piece(0, arguments='{"a": 1}'), piece(1, arguments='{"text": "x"}')],
        ],
        # the name with each piece, or an id that is new with each piece
        [
            [piece(0, "a", "add", '{"a"'), piece(1, "b", "echo", '{"text": ')],
            [piece(0, "a", "add", ": 1}"), piece(1, "other", arguments='"x"}')],
        ],
        # whole calls without an index, or all with the same
        [[piece(None, "a", "add", '{"a": 1}'), piece(None, "b", "echo", '{"text": "x"}')]],
        [[piece(0, "a", "add", '{"a": 1}')], [piece(0, "b", "echo", '{"text": "x"}')]],
    ],
)
def test_pieces_of_calls_are_joined_by_their_index(
    server: PlainServer, deltas: list[list[object]]
) -> None:
    chunks = [chunk({"tool_calls": delta}) for delta in deltas]
    server.events = [*chunks, chunk({}, "tool_calls"), DONE]
    _, end = Asking(server).answer()
    assert end.tool_calls == (ADD, ECHO)


def test_token_counts_of_the_server_are_used(server: PlainServer) -> None:
    usage = {
        "prompt_tokens": 40,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 30},
    }
    server.events = answer("a", "b", usage=usage)
    _, end = Asking(server).answer()
    assert (end.prompt_tokens, end.cached_tokens, end.timings.prompt_n) == (40, 30, 10)
    assert (end.estimated, end.client_measured) == (False, True)


def read(events: Sequence[tuple[float, bytes]]) -> Completion:
    """The completion of an answer whose events arrive at these seconds after the request."""
    now = [100.0]

    def arriving() -> Iterator[bytes]:
        for at_s, event in events:
            now[0] = 100.0 + at_s
            yield event

    arrivals = TimedChunks(arriving(), lambda: now[0])
    reader = CompletionStreamParser(arrivals, 100.0, EndpointErrors(Endpoint("http://h/v1")))
    *_, end = reader.parse(iter_sse_data(arrivals))
    assert isinstance(end, Completion)
    return end


def test_time_is_measured_from_the_request_to_each_piece() -> None:
    timings = read(
        [
            (0.1, chunk({"role": "assistant", "content": ""})),
            (0.5, chunk({"content": "a"})),
            (1.0, chunk({"content": "b"})),
            (2.5, chunk({"content": "c"})),
            (3.0, chunk({}, "stop")),
            (9.0, DONE),
        ]
    ).timings
    assert timings.ttft_ms == pytest.approx(500)
    assert timings.predicted_ms == pytest.approx(2000)
    assert timings.predicted_per_second == pytest.approx(1.0)
    assert timings.predicted_n == 3


def test_rate_with_several_tokens_per_event() -> None:
    usage = {"completion_tokens": 30, "prompt_tokens": 1}
    pieces = [(at_s, chunk({"content": "ab"})) for at_s in (1.0, 2.0, 3.0)]
    end = read([*pieces, (3.0, chunk({}, "stop", usage=usage)), (3.0, DONE)])
    # tokens of the first piece were not generated after it
    assert end.timings.predicted_per_second == pytest.approx(10.0)


def test_tokens_that_arrive_together_have_no_rate() -> None:
    burst = b"".join(chunk({"content": "a"}) for _ in range(5))
    assert read([(0.5, burst + DONE)]).timings.predicted_per_second == 0
    # five at once, then five more a second later
    assert read([(0.5, burst), (1.5, burst), (2.0, DONE)]).timings.predicted_per_second == 5


def test_reasoning_that_is_not_shown_is_not_in_the_rate() -> None:
    details = {"reasoning_tokens": 1000}
    usage = {"completion_tokens": 1003, "completion_tokens_details": details}
    pieces = [(at_s, chunk({"content": "a"})) for at_s in (8.0, 9.0, 10.0)]
    end = read([*pieces, (10.0, chunk({}, "stop", usage=usage)), (10.0, DONE)])
    assert end.completion_tokens == 1003
    assert end.timings.predicted_per_second == pytest.approx(1.0)


def test_closing_a_stream_closes_the_connection(server: PlainServer) -> None:
    server.gap_s = 0.01
    server.events = [chunk({"content": "word " * 500})] * 2000
    stream = Asking(server).client.chat("big", [Message("user", "x")], SamplingParams())
    assert isinstance(next(stream), TextDelta)
    stream.close()
    assert server.hung_up.wait(timeout=10)


# --- models ---


def test_the_only_model_needs_no_name(server: PlainServer) -> None:
    asking = Asking(server)
    found = asking.load()
    assert (found.name, found.url, found.ctx) == ("big", server.url, 0)
    asking.answer(None)
    assert server.asked[0]["model"] == "big"
    assert [seen.path for seen in server.seen].count("/v1/models") == 1


def test_one_of_several_models_has_to_be_named() -> None:
    with plain_server("big", "small") as server:
        with pytest.raises(InvalidRequest, match="2 models, name one: big, small"):
            Asking(server).load()
        assert Asking(server).load("small").name == "small"
        assert [card.name for card in Asking(server).client.models()] == ["big", "small"]
        assert any("not in the server's list" in note for note in Asking(server).load("huge").notes)


def test_empty_and_missing_model_lists(server: PlainServer) -> None:
    server.models = []
    with pytest.raises(InvalidRequest, match="lists no models: name one"):
        Asking(server).load()
    server.models = None
    assert Asking(server).answer("mine")[0] == "re: one two "
    with pytest.raises(EndpointUnavailable, match="check the path"):
        Asking(server).load()
    with pytest.raises(ModelNotFound, match="does not list its models"):
        Asking(server).client.models()


@pytest.mark.parametrize(
    ("card", "ctx"),
    [
        ({"max_model_len": 4096}, 4096),
        ({"context_length": 8192}, 8192),
        ({"meta": {"n_ctx": 2048, "n_ctx_train": 9}}, 2048),
        ({"meta": None, "max_model_len": "many"}, 0),
    ],
)
def test_context_is_read_from_the_model_list(card: dict[str, Any], ctx: int) -> None:
    with plain_server({"id": "big"} | card) as server:
        asking = Asking(server)
        assert asking.load().ctx == ctx
        assert asking.answer()[1].ctx == (ctx or None)


def test_a_long_list_is_cut() -> None:
    names = [f"m{number}" for number in range(30)]
    with plain_server(*names) as server, pytest.raises(InvalidRequest, match=r"m19 and 10 more$"):
        Asking(server).load()


# --- keys ---


def test_a_key_comes_from_the_environment(
    server: PlainServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = KEY
    monkeypatch.setenv("BIG_KEY", f" {KEY}\n")
    assert Asking(server, "BIG_KEY").answer()[0] == "re: one two "
    with pytest.raises(AccessDenied, match=r"requires an API key \(401\): --api-key-env"):
        Asking(server).load()


def test_an_error_does_not_repeat_a_key(
    server: PlainServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "another"
    monkeypatch.setenv("BIG_KEY", KEY)
    with pytest.raises(AccessDenied, match=r"rejects the API key in BIG_KEY \(401\)") as raised:
        Asking(server, "BIG_KEY").load()
    assert "Incorrect API key" in raised.value.message
    assert KEY not in raised.value.message


@pytest.mark.parametrize("held", ["", "  ", "two words", "naïve", "a\x1bb"])
def test_variable_without_a_valid_key_is_rejected(
    server: PlainServer, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIG_KEY", held)
    with pytest.raises(BadSetting, match="BIG_KEY"):
        Asking(server, "BIG_KEY")


def test_unencrypted_key_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", KEY)
    said: list[str] = []
    there = Endpoint("http://far.example/v1", key_env="K")
    client = Client(EndpointConnection(there, said.append))
    client.connect()
    client.connect()
    assert said == ["the API key is sent to far.example unencrypted: use https://"]
    for near in ("http://localhost:1/v1", "http://[::1]:1/v1", "https://far.example/v1"):
        Client(EndpointConnection(Endpoint(near, key_env="K"), said.append)).connect()
    assert len(said) == 1


# --- errors ---


@pytest.mark.parametrize(
    ("response", "kind", "message"),
    [
        (
            error(403, "no"),
            AccessDenied,
            "requires an API key (403): --api-key-env names the variable",
        ),
        (error(404, "no such model"), ModelNotFound, "no model nix at {url}, models are big"),
        (Response(404, b"not found"), ModelNotFound, "no model nix at {url}, models are big"),
        (error(400, "too odd"), InvalidRequest, "{url} rejects the request (400): too odd"),
        (error(400, "x", code=400), InvalidRequest, "rejects the request (400): x"),
        (error(400, "too long", code="context_length_exceeded"), ContextExceeded, "too long"),
        (error(429, "no quota"), QueueFull, "accepts no more requests for now (429): no quota"),
        (Response(500, b""), EndpointUnavailable, "{url} failed with status 500"),
        (Response(502, b" Bad\n gateway\n"), EndpointUnavailable, r"status 502: Bad\n gateway"),
        (page(503), EndpointUnavailable, "{url} failed with status 503"),
        (Response(400, b'{"object":"error","message":"old"}'), InvalidRequest, "(400): old"),
        (Response(400, b'{"error":"plain"}'), InvalidRequest, "(400): plain"),
        (
            Response(422, b'{"detail":[{"loc":["body","seed"],"msg":"too big"}]}'),
            InvalidRequest,
            "(422): body.seed: too big",
        ),
        (
            Response(308, headers={"Location": "https://new/v1"}),
            EndpointUnavailable,
            "redirects to https://new/v1: use that URL",
        ),
    ],
)
def test_a_refusal_is_one_line(
    server: PlainServer, response: Response, kind: type[LocalgenError], message: str
) -> None:
    server.first = [response]
    failed = Asking(server).failure("nix")
    assert type(failed) is kind
    assert message.format(url=server.url) in failed.message


def test_a_long_refusal_is_cut(server: PlainServer) -> None:
    server.first = [Response(500, b"x" * 3_000_000)]
    assert len(Asking(server).failure().message) < 600


def test_error_within_a_stream_ends_the_answer(server: PlainServer) -> None:
    server.events = [chunk({"content": "a"}), b'data: {"error": {"message": "out of memory"}}\n\n']
    failed = Asking(server).failure()
    assert type(failed) is EndpointUnavailable
    assert failed.message.endswith("ended the answer: out of memory")


@pytest.mark.parametrize("cut", [False, True])
def test_truncated_stream_is_an_error(server: PlainServer, cut: bool) -> None:
    server.cut = cut
    server.events = answer("a", "b")[:2]
    failed = Asking(server).failure()
    assert type(failed) is EndpointUnavailable
    assert ("was lost" if cut else "in the middle of the answer") in failed.message


@pytest.mark.parametrize(
    "event",
    [b"data: hello\n\n", b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', b"data: \xff\n\n"],
)
def test_stream_outside_the_protocol_is_rejected(server: PlainServer, event: bytes) -> None:
    server.events = [event]
    assert "outside of OpenAI's protocol" in Asking(server).failure().message


def test_web_page_is_rejected(server: PlainServer) -> None:
    server.listing = page()
    with pytest.raises(EndpointUnavailable, match=r"answers with a web page: check the path"):
        Asking(server).load("big")
    server.listing = None
    server.first = [page()]
    assert "answers with a web page" in Asking(server).failure().message


@pytest.mark.parametrize("body", [b"{}", b"[1]", b'"x"', b"no", b'{"data": [{}]}'])
def test_invalid_model_list_is_rejected(server: PlainServer, body: bytes) -> None:
    server.listing = Response(200, body)
    with pytest.raises(EndpointUnavailable, match="is not an OpenAI-compatible server"):
        Asking(server).load()


def test_retry_waits_as_long_as_the_server_asks(server: PlainServer) -> None:
    busy = Response(429, b"", {"Retry-After": "3"})
    server.first = [busy, Response(503, b"", {"Retry-After": "4"})]
    asking = Asking(server)
    _, end = asking.answer()
    assert asking.slept == [3, 4]
    assert [line.endswith("; Ctrl+C stops") for line in asking.said] == [True, True]
    assert "asks to wait 3 s (429)" in asking.said[0]
    assert len(end.notes) == 2


def test_retries_are_limited(server: PlainServer) -> None:
    asking = Asking(server)
    server.first = [Response(429, b"", {"Retry-After": "3600"})]
    assert "it asks to wait 3,600 s" in asking.failure().message
    assert asking.slept == []
    server.first = [Response(429, b"", {"Retry-After": "1"})] * 9
    assert type(asking.failure()) is QueueFull
    assert asking.slept == [1, 1, 1]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 50.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("", None),
        ("soon", None),
        ("-1", None),
    ],
)
def test_retry_after_header_is_parsed(header: str, seconds: float | None) -> None:
    assert parse_retry_after(header, now_s=10.0) == seconds


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:{closed}/v1", ": connection refused"),
        ("http://nowhere.invalid/v1", "unknown host nowhere.invalid"),
        ("https://127.0.0.1:{port}/v1", "no TLS connection"),
    ],
)
def test_unreachable_server_is_reported(server: PlainServer, url: str, message: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = server.url.rpartition(":")[2].removesuffix("/v1")
        there = url.format(closed=unused.getsockname()[1], port=port)
        with pytest.raises(EndpointUnavailable) as raised:
            Client(EndpointConnection(Endpoint(there))).load("big", OPTIONS)
    assert message in raised.value.message


def test_untrusted_certificate_is_rejected(tmp_path: Path) -> None:
    certificate = tmp_path / "both.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-keyout", certificate, "-out", tmp_path / "cert.pem"),
        ],
        capture_output=True,
    )
    assert made.returncode == 0, made.stderr
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", certificate)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def shake_hands() -> None:
            talking, _ = listening.accept()
            with talking, pytest.raises(ssl.SSLError):
                context.wrap_socket(talking, server_side=True)

        thread = threading.Thread(target=shake_hands)
        thread.start()
        there = Endpoint(f"https://127.0.0.1:{listening.getsockname()[1]}/v1")
        with pytest.raises(EndpointUnavailable, match=r"not trusted .*SSL_CERT_FILE"):
            Client(EndpointConnection(there)).load("big", OPTIONS)
        thread.join(timeout=10)


def test_proxy_variables_are_used_except_for_this_machine(
    server: PlainServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    # connections to this machine never use a proxy
    assert Asking(server).load("big").name == "big"
    with pytest.raises(
        EndpointUnavailable, match="through the proxy of the environment: connection"
    ):
        Client(EndpointConnection(Endpoint("http://far.example/v1"))).load("big", OPTIONS)
    monkeypatch.setenv("HTTP_PROXY", "nonsense://x")
    with pytest.raises(BadSetting, match="HTTPS_PROXY"):
        Client(EndpointConnection(Endpoint("http://far.example/v1")))


def test_compressed_error_is_decoded(server: PlainServer) -> None:
    body = gzip.compress(error(500, "deep inside").body)
    server.first = [Response(500, body, {"Content-Encoding": "gzip"})]
    assert "deep inside" in Asking(server).failure().message


def test_server_statistics_are_not_available(server: PlainServer) -> None:
    with pytest.raises(InvalidRequest, match="does not report statistics"):
        Asking(server).client.stats()


# --- bounds ---

MIB = 1 << 20


def test_a_line_without_end_is_an_error(server: PlainServer) -> None:
    server.events = [b"data: ", *[b"x" * MIB] * 64]
    message = Asking(server).failure().message
    assert message.endswith(" sent a line of more than 16 MiB")
    assert server.hung_up.wait(10)


def test_an_event_without_end_is_an_error(server: PlainServer) -> None:
    server.events = [b"data: " + b"x" * MIB + b"\n"] * 64
    assert Asking(server).failure().message.endswith(" sent an event of more than 16 MiB")
    assert server.hung_up.wait(10)


def test_a_body_without_end_is_an_error(server: PlainServer) -> None:
    server.kind, server.events = "application/json", [b" " * MIB] * 64
    assert Asking(server).failure().message.endswith(" sent a response of more than 16 MiB")
    assert server.hung_up.wait(10)
    server.listing = Response(200, b" " * 17 * MIB)
    with pytest.raises(EndpointUnavailable, match="sent a response of more than 16 MiB"):
        Asking(server).load()


def test_long_lines_are_read_whole() -> None:
    text = b"x" * (8 * MIB)
    chunks = [b"data: ", *(text[at : at + 1000] for at in range(0, len(text), 1000)), b"\r\n\r\n"]
    assert list(iter_sse_data(chunks)) == [text]
    # many events may be longer together
    assert len(list(iter_sse_data([b"data: " + text + b"\n\n"] * 3))) == 3


@pytest.mark.parametrize("event", [b'{"error": %s}', b"%s", b'{"choices": %s}'])
def test_deeply_nested_json_is_an_error(server: PlainServer, event: bytes) -> None:
    deep = event % (b"[" * 100_000 + b"]" * 100_000)
    server.events = [b"data: " + deep + b"\n\n"]
    Asking(server).failure()
    server.listing = Response(200, deep)
    Asking(server).failure()
    server.listing = Response(500, deep[:60_000])
    Asking(server).failure()
