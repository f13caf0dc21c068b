"""An engine tells the gateway of its cluster which prompts it still has."""

from __future__ import annotations

import base64
import itertools

import pytest
from fake_runner import FakeRunner
from kv_blocks import NAMESPACE, save_all
from serving import wait_until
from tcp_server import tcp_server

from localgen.backends.engine import held_prompts
from localgen.backends.engine.held_prompts import CHECK_PERIOD_S, HeldPrompts
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.sequence import Sequence, SequenceState
from localgen.backends.sampling_params import BASE_SAMPLING
from localgen.backends.types import PromptChunks, split_hashes
from localgen.server.requests.caller import CHUNKS_HEADER, GATEWAY_HEADER, encode_chunks


def prompt(*parts: int, tokens_per_chunk: int = 10) -> Sequence:
    """A sequence of whose chunks each has tokens of one kind."""
    tokens = [part for part in parts for _ in range(tokens_per_chunk)]
    chains = itertools.accumulate(bytes([part]) for part in parts)
    hashes = tuple(each.ljust(8, b".") for each in chains)
    return Sequence(
        id=str(parts),
        tokens=tokens,
        num_prompt=len(tokens),
        params=BASE_SAMPLING,
        ctx=999,
        max_len=999,
        chunks=PromptChunks(hashes, len(parts)),
    )


class Held:
    """A runner whose prefix cache has `donors`, and what is reported of it."""

    def __init__(self, store: PrefixStore | None = None) -> None:
        self.runner, self.now_s = FakeRunner(), 0.0
        self.prompts = HeldPrompts(self.runner, store, lambda: self.now_s)

    def end(self, seq: Sequence, kept: int | None = None) -> None:
        """It ends; its first tokens are kept in the cache, by default all."""
        seq.state = SequenceState.ENDED
        self.runner.donors.append(seq.tokens[:kept])

    def check(self) -> list[str] | None:
        self.now_s += CHECK_PERIOD_S
        self.prompts.check()
        report = self.prompts.take_report()
        if report is None:
            return None
        return [each.decode().rstrip(".") for each in split_hashes(report)]


def chains(*names: bytes) -> list[str]:
    return [name.decode() for name in names]


def test_a_prompt_is_held_from_its_arrival_until_it_is_evicted() -> None:
    held, seq = Held(), prompt(1, 2, 3)
    held.prompts.add(seq)
    assert held.check() == chains(b"\1", b"\1\2", b"\1\2\3"), "it is queued or being computed"
    held.end(seq)
    assert held.check() is None, "nothing has changed"
    held.runner.donors = [seq.tokens[:11]]
    assert held.check() == chains(b"\1")
    held.runner.donors = []
    assert held.check() == []
    assert held.check() is None


def test_a_prompt_that_failed_is_not_held() -> None:
    held, seq = Held(), prompt(1, 2)
    held.prompts.add(seq)
    held.end(seq, kept=0)
    assert held.check() == []


def test_the_next_turn_replaces_the_last_and_others_share_its_beginning() -> None:
    held = Held()
    first, second, other = prompt(1, 2), prompt(1, 2, 3), prompt(1, 4)
    for seq in (first, second, other):
        held.prompts.add(seq)
        held.end(seq)
    newest_first = chains(b"\1", b"\1\4", b"\1\2", b"\1\2\3")
    assert held.check() == newest_first
    held.runner.donors = [other.tokens]
    assert held.check() == chains(b"\1", b"\1\4")


def test_a_part_that_rounding_hides_is_reported_as_held() -> None:
    held, seq = Held(), prompt(*range(1, 9))
    held.prompts.add(seq)
    held.end(seq, kept=len(seq.tokens) - 4)  # of the last page
    assert len(held.check() or ()) == 8


def test_what_is_in_ram_or_on_disk_is_held() -> None:
    store = PrefixStore(NAMESPACE, ram_bytes=1 << 20, disk=None)
    held, seq = Held(store), prompt(1, 2, 3, tokens_per_chunk=100)
    save_all(store, seq.tokens[:200])
    held.prompts.add(seq)
    held.end(seq, kept=0)
    assert held.check() == chains(b"\1", b"\1\2")


def test_few_prompts_are_looked_up_at_once_and_each_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_prompts, "_CHECK_S", 0.0)
    held = Held()
    for part in (1, 2, 3):
        held.prompts.add(prompt(part, 9))
        next(reversed(held.prompts._prompts.values())).seq = None
    assert [len(held.check() or ()) for _ in range(3)] == [4, 2, 0]


def test_the_latest_prompts_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_prompts, "MAX_TOKENS", 45)
    monkeypatch.setattr(held_prompts, "MAX_REPORTED_CHUNKS", 3)
    held = Held()
    for part in (1, 2, 3):
        held.prompts.add(prompt(part, 9))
    assert held.check() == chains(b"\3", b"\3\t", b"\2"), "the first of each is told before others"
    assert len(held.prompts._prompts) == 2


def test_only_the_gateway_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_REAL_ENGINE", "1")
    sent = PromptChunks((b"chunk--1", b"chunk--2"), 2)
    messages = [{"role": "user", "content": "the quick brown fox " * 20}]
    with tcp_server(gateway_secret="secret") as server:

        def post(chunks: str, **headers: str) -> int:
            body = {"model": "tiny", "messages": messages, "max_tokens": 2}
            headers |= {CHUNKS_HEADER: chunks}
            path = "/v1/chat/completions"
            return server.http.post(path, json=body, headers=headers).status_code

        def held(**headers: str) -> list[str | None]:
            models = server.http.get("/v1/stats", headers=headers).json()["models"]
            return [model.get("held_chunks") for model in models]

        gateway = {GATEWAY_HEADER: "secret"}
        assert post("1:" + base64.b64encode(b"foreign-").decode()) == 200, "not obeyed"
        assert post("x:y", **gateway) == 400
        assert post(encode_chunks(sent), **gateway) == 200
        wanted = base64.b64encode(b"".join(sent.hashes)).decode()
        wait_until(lambda: held(**gateway) == [wanted])
        assert held() == [None]
