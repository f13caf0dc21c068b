"""--stabilize: what it changes in prompts, and what the prefix cache serves then."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from models import Bench, LoadedBench
from real_server import real_server
from test_launch import settings

from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.text.stabilizer import stabilize
from localgen.backends.types import Message, Request, Tool
from localgen.client import LocalClient
from localgen.config import ServerSettings

__all__ = ["settings"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TURNS = 8


def stable_text(text: str, role: str = "system") -> str:
    changed, _ = stabilize(Request(id="r", messages=(Message(role, text),)))
    assert changed.messages is not None
    return changed.messages[0].content


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "x-anthropic-billing-header: cc_version=2.1.9; cch=9f1;\nYou are",
            "x-anthropic-billing-header: cc_version=2.1.9; cch=a10;\nYou are",
        ),
        ("Today's date is 2026-11-25.", "Today's date is 2026-11-26."),
        ("Today's date: 2026/11/25", "Today's date: 2026/11/26"),
        ("It is Wednesday, November 25, 2026", "It is Thursday, November 26, 2026"),
        ("Date: Wed Nov 25 2026", "Date: Thu Nov 26 2026"),
        ("on 25 November 2026", "on 26 November 2026"),
        ("now: 2026-11-25T23:18:36.5Z", "now: 2026-11-26T01:02:03.7Z"),
        ("The time is 9:05", "The time is 23:59"),
    ],
)
def test_noise_of_system_messages(one: str, other: str) -> None:
    assert one != other
    assert stable_text(one) == stable_text(other) != one
    assert stable_text(stable_text(one)) == stable_text(one)
    # what a user writes is never changed
    assert stable_text(one, "user") == one


@pytest.mark.parametrize(
    "text",
    [
        "You are a helpful assistant.\nUse tools; answer in Markdown. May 64 tests pass?",
        "x-header: a=1; b=2;",
        "HTTP/1.1 on port 8080, version 2026.11, ratio 16:9x",
        "x-anthropic-billing-header: the words after it stay",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert stable_text(text) == text


def test_what_was_changed_is_said() -> None:
    tools = tuple(Tool(name, "", '{"type": "object", "properties": {}}') for name in ("b", "a"))
    system = Message("system", "Today is 2026-11-25, 10:15. May I?")
    changed, notes = stabilize(Request(id="r", messages=(system,), tools=tools))
    assert [tool.name for tool in changed.tools] == ["a", "b"]
    assert notes == ("stabilized: clock time, date, order of 2 tools and their fields",)
    assert changed.messages == (Message("system", "Today is 2026-11-01, 00:00. May I?"),)
    plain = Request(id="r", prompt="2026-11-25")
    assert stabilize(plain) == (plain, ())


class Session:
    """An agent's session: a system message with a time, tools, and what was said so far."""

    def __init__(self, bench: LoadedBench, *, stabilized: bool, noisy: bool) -> None:
        self._bench, self._stabilized, self._noisy = bench, stabilized, noisy
        self._said: list[Message] = []
        self._last_prompt = self._old_tokens = self._cached_tokens = 0

    def turn(self, number: int) -> None:
        """Ask for the next answer; count how much of the last prompt came from the cache."""
        minute = number if self._noisy else 0
        rules = " ".join(f"Rule {rule}: answer in {rule + 3} words." for rule in range(40))
        system = f"x-anthropic-billing-header: cch=9f{minute};\nIt is 10:{minute:02}. {rules}"
        self._said.append(Message("user", f"What is {number} + {number}?"))
        name = self._bench.submit(
            [Message("system", system), *self._said], GREEDY, stabilize=self._stabilized
        )
        (reply,) = self._bench.run([name])
        assert ("stabilized: " in str(reply.finished.notes)) is self._stabilized
        if number:
            self._cached_tokens += reply.finished.timings.cache_n
            self._old_tokens += self._last_prompt
        self._last_prompt = reply.finished.prompt_tokens
        self._said.append(Message("assistant", reply.text))

    @property
    def cached_share(self) -> float:
        """The share of each turn's old prompt that came from the cache, on average."""
        return self._cached_tokens / self._old_tokens


def cuda_bench() -> LoadedBench:
    pytest.importorskip("torch")
    from test_cuda_runner import CudaBench

    return CudaBench()


@pytest.mark.parametrize("backend", ["llamacpp", "cuda"])
def test_sessions_of_agents_come_from_the_cache(backend: str) -> None:
    bench = Bench(LoadOptions(parallel=2)) if backend == "llamacpp" else cuda_bench()
    shares = {}
    for stabilized, noisy in ((False, False), (False, True), (True, True)):
        session = Session(bench, stabilized=stabilized, noisy=noisy)
        for number in range(TURNS):
            session.turn(number)
        shares[stabilized, noisy] = session.cached_share
    bench.close()
    assert shares[False, False] >= 0.98
    assert shares[False, True] < 0.1
    assert shares[True, True] >= 0.98


def ask(url: str, **headers: str) -> list[str]:
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "It is 10:15."},
            {"role": "user", "content": "hi"},
        ],
        "max_tokens": 2,
    }
    reply = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    notes: list[str] = reply.json()["localgen"]["notes"]
    return notes


def test_a_port_of_launch_stabilizes_its_requests(settings: ServerSettings) -> None:
    with LocalClient(settings) as client:
        client.connect()
        client.load("tiny", LoadOptions(), lambda *_: None)
        for wanted in (True, False):
            with client.private_port(stabilize=wanted) as port:
                notes = ask(f"{port.url}/v1/chat/completions", **{"x-api-key": port.key})
            assert port.stabilize is wanted
            assert ("stabilized: clock time" in notes) is wanted


def test_a_server_stabilizes_all_requests() -> None:
    with real_server(LOCALGEN_STABILIZE="1") as server:
        with LocalClient(server.settings) as client:
            client.connect()
            with client.private_port() as port:
                assert port.stabilize, "launch says so"
        assert "stabilized: clock time" in ask(f"{server.url}/v1/chat/completions")
        assert "prompts are stabilized" in server.log.read_text()


def test_an_earlier_prompt_is_quoted_to_local_clients_only(settings: ServerSettings) -> None:
    rules = " ".join(f"Rule {rule}: answer in {rule + 3} words." for rule in range(60))

    def broken(http: httpx.Client, head: str) -> dict[str, Any]:
        system = {"role": "system", "content": f"secret={head} {rules}"}
        body = {"model": "tiny", "max_tokens": 2}
        body |= {"messages": [system, {"role": "user", "content": "hi"}]}
        whole = http.post("/v1/chat/completions", json=body).json()["timings"]["prefix_break"]
        return whole or {}

    with LocalClient(settings) as client:
        client.connect()
        with client.private_port() as port:
            key = {"x-api-key": port.key}
            with httpx.Client(base_url=port.url, headers=key, trust_env=False, timeout=60) as http:
                assert broken(http, "alpha-word") == {}
                found = broken(http, "other-word")
        assert (found["before"], "other-word" in found["after"]) == ("", True)
        socket = httpx.HTTPTransport(uds=str(settings.socket_path))
        with httpx.Client(transport=socket, base_url="http://localgen", timeout=60) as http:
            broken(http, "third-word")
            assert "third-word" in broken(http, "fourth-word")["before"]
