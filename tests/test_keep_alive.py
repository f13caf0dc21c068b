"""Streams get bytes during a long prompt: agents give up those without any."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from serving import ServerHarness, chat_body, server_harness

from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message, PromptProgress
from localgen.client import TextDelta

KEEP_ALIVE_S = 0.1
TOKEN_S = 0.5
MESSAGES = chat_body("", "one two")["messages"]
ROUTES: dict[str, tuple[dict[str, Any], bytes]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, b": computing\n\n"),
    "/v1/completions": ({"prompt": "one two"}, b": computing\n\n"),
    "/v1/responses": ({"input": "one two"}, b": computing\n\n"),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 9},
        b'event: ping\ndata: {"type":"ping"}\n\n',
    ),
}


@pytest.fixture(scope="module")
def served() -> Iterator[ServerHarness]:
    with pytest.MonkeyPatch.context() as patch, server_harness() as built:
        patch.setenv("TEST_KEEP_ALIVE_S", str(KEEP_ALIVE_S))
        built.start()
        yield built


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_has_bytes_until_its_text_comes(served: ServerHarness, path: str) -> None:
    fields, nothing = ROUTES[path]
    model = served.model("late", first_s=TOKEN_S, token_s=TOKEN_S)
    body = {"model": model, "stream": True} | fields
    with served.http.stream("POST", path, json=body) as reply:
        pieces = b"".join(reply.iter_bytes())
    assert reply.status_code == 200
    first = pieces.index(b"one")
    assert nothing in pieces[:first]
    assert nothing in pieces[first:], "between two tokens too"
    assert b"two" in pieces


@pytest.mark.parametrize("path", [*ROUTES, "/api/chat"])
def test_a_stream_has_the_progress_of_its_prompt(served: ServerHarness, path: str) -> None:
    text = "!read !read !read !read one two"
    fields = {"prompt": text, "input": text, "messages": chat_body("", text)["messages"]}
    given, _ = ROUTES.get(path, ({"messages": MESSAGES}, b""))
    body = {name: fields.get(name, value) for name, value in given.items()}
    model = served.named(f"reading{path.replace('/', '-')}", token_s=0.2)
    with served.http.stream("POST", path, json={"model": model, "stream": True} | body) as reply:
        pieces = b"".join(reply.iter_bytes())
    first = pieces.index(b'" one"')
    if path == "/api/chat":
        found = re.findall(rb'"prompt_computed":(\d),"prompt_tokens":6', pieces)
    elif path == "/v1/messages":
        found = []
        assert b'{"type":"ping"}' in pieces[:first]
    else:
        found = re.findall(rb": prompt (\d) of 6 tokens\n\n", pieces)
    assert path == "/v1/messages" or found
    assert set(found) <= {b"1", b"2", b"3"}, "not after the prompt"
    for progress in (b": prompt ", b'"prompt_computed"'):
        assert progress not in pieces[first:]


def test_the_client_knows_how_much_of_the_prompt_is_computed(served: ServerHarness) -> None:
    client = served.client()
    answer = client.chat(
        served.model("reading", token_s=0.2),
        [Message("user", "!read !read !read !read one two")],
        SamplingParams(),
    )
    assert client.prompt_progress is None
    assert isinstance(next(answer), TextDelta)
    assert client.prompt_progress == PromptProgress(3, 6)
    assert len(list(answer)) == 2
    assert client.prompt_progress is None


def test_ollama_has_chunks_without_text(served: ServerHarness) -> None:
    body = {"model": served.named("slow", token_s=TOKEN_S), "messages": MESSAGES}
    lines = [json.loads(line) for line in served.http.post("/api/chat", json=body).iter_lines()]
    empty = [line for line in lines if not line["message"]["content"] and not line["done"]]
    assert empty
    assert "".join(line["message"]["content"] for line in lines) == "one two"


def test_an_error_after_such_bytes_is_an_event(served: ServerHarness) -> None:
    body = chat_body(served.model("dying", first_s=TOKEN_S), "!die", stream=True)
    with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[0] == ": computing"
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_died"


def test_an_answer_in_one_piece_has_only_itself(served: ServerHarness) -> None:
    reply = served.chat(served.model(token_s=TOKEN_S), "one two")
    assert reply.json()["choices"][0]["message"]["content"] == "one two"


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_has_bytes_while_its_model_loads(served: ServerHarness, path: str) -> None:
    fields, nothing = ROUTES[path]
    model = served.model(f"loading{path.replace('/', '-')}", load_s=TOKEN_S)
    body = {"model": model, "stream": True} | fields
    with served.http.stream("POST", path, json=body) as reply:
        pieces = b"".join(reply.iter_bytes())
    assert reply.status_code == 200
    assert pieces.startswith(nothing)
    assert pieces.index(nothing) < pieces.index(b"one") < pieces.index(b"two")


def test_ollama_has_chunks_while_the_model_loads(served: ServerHarness) -> None:
    body = {"model": served.named("loading", load_s=TOKEN_S), "messages": MESSAGES}
    lines = [json.loads(line) for line in served.http.post("/api/chat", json=body).iter_lines()]
    assert not lines[0]["message"]["content"]
    assert "".join(line["message"]["content"] for line in lines) == "one two"


@pytest.mark.parametrize("path", [*ROUTES, "/api/chat"])
def test_an_error_of_a_load_that_took_long_is_an_event(served: ServerHarness, path: str) -> None:
    fields, _ = ROUTES.get(path, ({"messages": MESSAGES}, b""))
    name = served.named(f"broken{path.replace('/', '-')}", load_s=TOKEN_S, fail="no such tensor")
    with served.http.stream("POST", path, json={"model": name, "stream": True} | fields) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert reply.status_code == 200
    assert "no such tensor" in lines[-1]
