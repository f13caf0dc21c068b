"""Ollama's own Python client against the real server with the built-in model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx
import ollama
import pytest
from ollama import ResponseError
from real_server import RealServer, real_server
from serving import wait_until

QUESTION = {"role": "user", "content": "What is 17 + 25?"}
KEY = "a-key-of-some-length"
DURATIONS = (
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
    *("eval_count", "eval_duration"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as started:
        yield started


@pytest.fixture
def client(server: RealServer) -> ollama.Client:
    return ollama.Client(server.url)


def failure(ask: Callable[[], object]) -> ResponseError:
    with pytest.raises(ResponseError) as refused:
        ask()
    return refused.value


def asked(server: RealServer, route: str, **body: Any) -> httpx.Response:
    whole = {"model": "tiny", "stream": False, "options": {"num_predict": 20}} | body
    return httpx.post(f"{server.url}/api/{route}", json=whole, timeout=60)


def names(client: ollama.Client) -> list[str | None]:
    return [model.model for model in client.ps().models]


def test_chat_answers(client: ollama.Client) -> None:
    reply = client.chat("tiny", [QUESTION], options={"temperature": 0})
    assert reply.model == "tiny"
    assert reply.message.role == "assistant"
    assert reply.message.content == "17 + 25 = 42."
    assert (reply.done, reply.done_reason) == (True, "stop")
    assert reply.created_at is not None
    sent = datetime.fromisoformat(reply.created_at.replace("Z", "+00:00"))
    assert abs(datetime.now(UTC) - sent) < timedelta(minutes=1)
    for name in DURATIONS:
        assert reply[name] > 0, name
    assert reply.eval_duration is not None
    assert reply.total_duration is not None
    assert reply.eval_duration < reply.total_duration < 60e9


def test_chat_streams(client: ollama.Client) -> None:
    *parts, last = client.chat("tiny", [QUESTION], options={"temperature": 0}, stream=True)
    assert len(parts) > 1
    assert "".join(part.message.content or "" for part in parts) == "17 + 25 = 42."
    assert not any(part.done for part in parts)
    assert (last.done, last.done_reason, last.message.content) == (True, "stop", "")
    assert last.eval_count is not None
    assert last.eval_count >= len(parts)


def test_streams_are_lines_of_json_and_the_default(server: RealServer) -> None:
    body = {"model": "tiny", "messages": [QUESTION]}
    reply = httpx.post(f"{server.url}/api/chat", json=body, timeout=60)
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert "x-request-id" in reply.headers
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert {"cache_n", "ttft_ms"} <= lines[-1]["timings"].keys()


def test_generate_answers(client: ollama.Client) -> None:
    greedy = {"temperature": 0}
    reply = client.generate("tiny", QUESTION["content"], options=greedy)
    assert reply.response == "17 + 25 = 42."
    streamed = client.generate("tiny", QUESTION["content"], options=greedy, stream=True)
    assert "".join(part.response or "" for part in streamed) == "17 + 25 = 42."
    with_system = client.generate("tiny", "Hello", system="Be brief.", options=greedy)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert with_system.response == client.chat("tiny", chat, options=greedy).message.content


def test_a_raw_generation_sees_no_template(client: ollama.Client) -> None:
    templated = client.generate("tiny", "Once upon", options={"num_predict": 1})
    raw = client.generate("tiny", "Once upon", raw=True, options={"num_predict": 1})
    assert raw.prompt_eval_count is not None
    assert templated.prompt_eval_count is not None
    assert raw.prompt_eval_count < templated.prompt_eval_count
    assert (raw.eval_count, raw.done_reason) == (1, "length")


def test_the_async_client(server: RealServer) -> None:
    async def ask() -> tuple[str, str]:
        client = ollama.AsyncClient(server.url)
        whole = client.chat("tiny", [QUESTION], options={"temperature": 0})
        parts = await client.chat("tiny", [QUESTION], options={"temperature": 0}, stream=True)
        streamed = [part.message.content or "" async for part in parts]
        return (await whole).message.content or "", "".join(streamed)

    assert asyncio.run(ask()) == ("17 + 25 = 42.", "17 + 25 = 42.")


def test_json_and_a_schema(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "maximum": 99}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    reply = client.chat("tiny", [QUESTION], format=schema, options={"temperature": 1, "seed": 3})
    assert list(json.loads(reply.message.content or "")) == ["sum"]
    free = client.generate("tiny", "Hello", format="json", options={"num_predict": 600})
    assert isinstance(json.loads(free.response or ""), dict)


def test_samplers_reach_the_engine(client: ollama.Client) -> None:
    def ask(**options: Any) -> str:
        reply = client.generate("tiny", "Tell me a story.", options={"num_predict": 30, **options})
        return reply.response or ""

    one = ask(temperature=1.5, seed=1)
    assert one == ask(temperature=1.5, seed=1)
    assert one != ask(temperature=1.5, seed=2)
    assert ask(temperature=1.5, seed=1, top_k=1) == ask(temperature=0)
    stopped = ask(temperature=0, stop=[one[:1], "e"])
    assert "e" not in stopped


def test_tools(client: ollama.Client, server: RealServer) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
          a: First number to add
          b: Second number to add
        """
        return a + b

    short = {"num_predict": 40}
    reply = client.chat("tiny", [QUESTION], tools=[add], options=short)
    # the model is trained for sums, not for tools: only the prompt counts
    plain = client.chat("tiny", [QUESTION], options=short)
    assert reply.prompt_eval_count is not None
    assert plain.prompt_eval_count is not None
    assert reply.prompt_eval_count > plain.prompt_eval_count
    call = {"function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
    history: list[dict[str, Any]] = [
        QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_name": "add", "content": "42"},
    ]
    answered = client.chat("tiny", history, tools=[add], options=short)
    assert answered.prompt_eval_count is not None
    assert answered.prompt_eval_count > reply.prompt_eval_count
    tools = [{"function": {"name": "no name"}}]
    wrong = asked(server, "chat", messages=[QUESTION], tools=tools)
    assert wrong.status_code == 400
    assert "tools[0].function.name" in wrong.json()["error"]


def test_a_model_that_does_not_think(client: ollama.Client) -> None:
    assert client.chat("tiny", [QUESTION], think=False).message.content
    for think in (True, "high"):
        refused = failure(partial(client.chat, "tiny", [QUESTION], think=think))
        assert refused.status_code == 400
        assert "has no thinking option" in refused.error


def test_logprobs(client: ollama.Client) -> None:
    reply = client.chat("tiny", [QUESTION], logprobs=True, top_logprobs=2)
    assert reply.logprobs is not None
    assert "".join(position.token for position in reply.logprobs) == reply.message.content
    for position in reply.logprobs:
        assert position.logprob <= 0
        assert position.top_logprobs is not None
        assert len(position.top_logprobs) == 2
    streamed = client.chat("tiny", [QUESTION], logprobs=True, stream=True)
    tokens = [position.token for part in streamed for position in part.logprobs or ()]
    assert "".join(tokens) == reply.message.content


def test_installed_models_are_listed(client: ollama.Client) -> None:
    (tiny,) = [model for model in client.list().models if model.model == "tiny"]
    assert tiny.size is not None
    assert tiny.size > 1_000_000
    assert tiny.digest is not None
    assert len(tiny.digest) >= 12
    assert tiny.modified_at is not None
    assert tiny.details is not None
    assert (tiny.details.format, tiny.details.family) == ("gguf", "llama")
    assert (tiny.details.parameter_size, tiny.details.quantization_level) == ("5.77M", "F16")


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_show(client: ollama.Client, name: str) -> None:
    shown = client.show(name)
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 2048
    assert shown.modelinfo["general.parameter_count"] == 5770496
    assert shown.capabilities is not None
    assert "completion" in shown.capabilities
    assert "im_start" in (shown.template or "")
    assert shown.details is not None
    assert shown.details.quantization_level == "F16"


def test_load_ps_and_unload(client: ollama.Client) -> None:
    assert client.generate("tiny", keep_alive="1h30m").done_reason == "load"
    (model,) = client.ps().models
    assert (model.model, model.context_length) == ("tiny", 2048)
    assert model.size is not None
    assert model.size > 10_000_000
    assert model.size_vram is not None
    assert 0 <= model.size_vram <= model.size
    assert model.expires_at is not None
    left = model.expires_at - datetime.now(UTC)
    assert timedelta(minutes=89) < left <= timedelta(minutes=90)
    assert client.chat("tiny", [], keep_alive=-1).done_reason == "load"
    (model,) = client.ps().models
    assert model.expires_at is not None
    assert model.expires_at.year > 2200
    reply = client.chat("tiny", [], keep_alive=0)
    assert (reply.done_reason, reply.done, reply.message.content) == ("unload", True, "")
    assert names(client) == []
    assert client.generate("tiny", keep_alive=0).done_reason == "unload"


def test_keep_alive_zero_with_a_prompt_unloads_after_the_answer(client: ollama.Client) -> None:
    assert client.chat("tiny", [QUESTION], keep_alive=0).message.content
    wait_until(lambda: names(client) == [])
    assert client.chat("tiny", [QUESTION], keep_alive="5m").message.content
    assert names(client) == ["tiny"]


def test_a_model_in_use_goes_when_its_answer_is_done(client: ollama.Client) -> None:
    parts = client.generate(
        "tiny", "Tell me a story.", stream=True, keep_alive="5m", options={"num_predict": 60}
    )
    next(parts)
    assert client.generate("tiny", keep_alive=0).done_reason == "unload"
    *_, last = parts
    assert last.done
    wait_until(lambda: names(client) == [])


def test_copy_and_delete(client: ollama.Client) -> None:
    assert client.copy("tiny", "work").status == "success"
    assert "work" in [model.model for model in client.list().models]
    assert client.chat("work:latest", [QUESTION]).message.content
    assert client.copy("tiny", "work").status == "success"  # the same again
    assert failure(lambda: client.copy("qwen3-0.6b", "work")).status_code == 400
    assert client.delete("work").status == "success"
    assert failure(lambda: client.chat("work:latest", [QUESTION])).status_code == 404
    assert failure(lambda: client.delete("work")).status_code == 404


Call = Callable[[ollama.Client], object]


def chats(**fields: Any) -> Call:
    return lambda client: client.chat("tiny", [QUESTION], **fields)


def option(**options: Any) -> Call:
    return chats(options=options)


def generates(**fields: Any) -> Call:
    return lambda client: client.generate("tiny", "Hello", **fields)


@pytest.mark.parametrize(
    ("ask", "status", "says"),
    [
        (lambda c: c.chat("no-such-model", [QUESTION]), 404, "no-such-model"),
        (lambda c: c.show("no-such-model"), 404, "no-such-model"),
        (lambda c: c.pull("lama-8b"), 404, "llama-8b"),
        (lambda c: c.pull("tiny", insecure=True), 400, "insecure"),
        (lambda c: c.delete("tiny"), 400, "is built into localgen"),
        (lambda c: c.copy("no-such-model", "x"), 404, "no-such-model"),
        (lambda c: c.copy("tiny", "../x"), 400, "cannot be an alias"),
        (lambda c: c.copy("/etc/passwd", "x"), 400, "not a path"),
        (lambda c: c.copy("tiny", "llama-8b"), 400, "is a name of the catalog"),
        (lambda c: c.copy("tiny", "llama3.1:8b"), 400, "is a name of the catalog"),
        (lambda c: c.show("../tiny.gguf"), 400, "not a path"),
        (lambda c: c.generate("/etc/hostname", "a"), 400, "not a path"),
        (lambda c: c.delete("~/x"), 400, "not a path"),
        (lambda c: c.create("x", from_="tiny"), 404, "/api/create"),
        (lambda c: c.chat("tiny", [{"role": "system2", "content": ""}]), 400, "messages[0].role"),
        (
            lambda c: c.chat("tiny", [{"role": "user", "content": "a", "images": [b"x"]}]),
            400,
            "images",
        ),
        (chats(keep_alive="soon"), 400, "keep_alive"),
        (chats(top_logprobs=2), 400, "top_logprobs"),
        (generates(suffix="x"), 400, "suffix"),
        (generates(template="{{ .Prompt }}"), 400, "template"),
        (generates(context=[1, 2]), 400, "context"),
        (generates(images=[b"x"]), 400, "images"),
        (generates(raw=True, system="x"), 400, "system"),
        (generates(width=512), 400, "width"),
        (option(bogus=1), 400, "options.bogus"),
        (option(temperature=-1), 400, "temperature is -1"),
        (option(num_ctx=999_999), 400, "999,999"),
        (option(num_predict=-3), 400, "num_predict"),
        (option(seed=2**32), 400, "seed"),
        (option(tfs_z=0.5), 400, "tfs_z"),
        (option(penalize_newline=False), 400, "penalize_newline"),
        (option(low_vram=True), 400, "low_vram"),
        (option(num_batch=7), 409, "--batch-size 512, not 7"),
        (option(num_thread=3), 409, "--threads"),
        (option(num_thread=99_999), 400, "--threads is 99999"),
    ],
)
def test_rejected_requests_give_a_reason(
    client: ollama.Client, ask: Call, status: int, says: str
) -> None:
    client.chat("tiny", [])
    refused = failure(lambda: ask(client))
    assert refused.status_code == status
    assert says in refused.error
    assert "\n" not in refused.error


def test_options_without_effect_are_accepted(client: ollama.Client) -> None:
    same: dict[str, Any] = {"num_keep": 5, "tfs_z": 1.0, "penalize_newline": True, "numa": False}
    same |= {"main_gpu": 0, "low_vram": False, "f16_kv": True, "num_gpu": -1, "num_thread": 0}
    same |= {"seed": -1, "num_predict": -1, "num_ctx": 1024, "mirostat": 0, "mirostat_tau": 5.0}
    assert client.chat("tiny", [QUESTION], options=same).done_reason == "stop"


def test_num_ctx_caps_a_request(client: ollama.Client) -> None:
    refused = failure(lambda: client.generate("tiny", "word " * 60, options={"num_ctx": 32}))
    assert refused.status_code == 400
    assert "the context is 32" in refused.error
    assert names(client) == ["tiny"]


def test_closing_a_stream_frees_the_model(client: ollama.Client, server: RealServer) -> None:
    parts = client.generate("tiny", "Tell me a story.", raw=True, stream=True)
    with closing(parts):  # type: ignore[type-var]
        next(parts)

    def idle() -> bool:
        models = httpx.get(f"{server.url}/v1/stats").json()["models"]
        return all(model["active_requests"] == 0 for model in models)

    wait_until(idle)


@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", "text/plain", None])
def test_a_body_is_json_whatever_it_is_called(server: RealServer, content_type: str | None) -> None:
    body = json.dumps({"model": "tiny", "prompt": "Hello", "stream": False}).encode()
    headers = {"Content-Type": content_type} if content_type else {}
    reply = httpx.post(f"{server.url}/api/generate", content=body, headers=headers, timeout=60)
    assert reply.json()["done"] is True


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/api/chat", b"{", 400),
        ("POST", "/api/chat", b"", 400),
        ("POST", "/api/chat", b'{"model": "tiny", "bogus": 1}', 400),
        ("POST", "/api/show", b"{}", 400),
        ("POST", "/api/show", b'{"model": "a", "name": "b"}', 400),
        ("GET", "/api/chat", b"", 405),
        ("POST", "/api/nothing", b"", 404),
    ],
)
def test_errors_have_the_shape_that_clients_read(
    server: RealServer, method: str, path: str, body: bytes, status: int
) -> None:
    reply = httpx.request(method, server.url + path, content=body)
    assert reply.status_code == status
    assert list(reply.json()) == ["error"]
    assert isinstance(reply.json()["error"], str)


def test_probes_of_clients_are_answered(server: RealServer) -> None:
    for method in ("GET", "HEAD"):
        assert httpx.request(method, f"{server.url}/").status_code == 200
        assert httpx.request(method, f"{server.url}/api/version").status_code == 200
    assert "Ollama is running" in httpx.get(f"{server.url}/").text
    assert set(httpx.get(f"{server.url}/api/version").json()) == {"version"}


def test_requests_are_logged_and_counted(client: ollama.Client, server: RealServer) -> None:
    name = asked(server, "generate", prompt="Hello").headers["x-request-id"]
    wait_until(lambda: f"request id={name} model=tiny" in server.log.read_text())
    figures = httpx.get(f"{server.url}/metrics").text
    assert 'localgen:request_success_total{finished_reason="stop",model_name="tiny"}' in figures


def test_keys_and_rate_limits_apply_to_ollama_paths() -> None:
    with real_server("--api-key", KEY, "--rate-limit", "3") as server:
        assert failure(lambda: ollama.Client(server.url).list()).status_code == 401
        for path in ("/", "/api/version", "/api/tags", "/api/ps"):
            refused = httpx.get(server.url + path)
            assert refused.status_code == 401
        assert list(httpx.get(f"{server.url}/api/tags").json()) == ["error"]
        client = ollama.Client(server.url, headers={"Authorization": f"Bearer {KEY}"})
        host = httpx.get(
            f"{server.url}/api/tags",
            headers={"Host": "evil.example", "Authorization": f"Bearer {KEY}"},
        )
        assert host.status_code == 403
        for _ in range(3):
            client.generate("tiny", "Hello", options={"num_predict": 1})
        late = failure(lambda: client.chat("tiny", [QUESTION]))
        assert late.status_code == 429
        assert len(client.list().models) >= 1


def test_a_keep_alive_of_seconds(client: ollama.Client) -> None:
    client.generate("tiny", keep_alive=90)
    (model,) = client.ps().models
    assert model.expires_at is not None
    assert abs(model.expires_at.timestamp() - time.time() - 90) < 10
