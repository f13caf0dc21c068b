"""`serve --record-trace`: hashes of blocks, lines of a trace, and its replay."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import stat
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_server import real_server
from serving import settings_in

from localgen.backends.block_hashes import BLOCK_TOKENS, block_hashes
from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Finished, Timings
from localgen.bench.datasets import read_trace, trace_queries
from localgen.bench.prompts import WordPrompts
from localgen.config import BadSetting
from localgen.server.stats.request_log import RequestRecord
from localgen.server.stats.trace_recorder import TraceRecorder

KEY = b"k" * 32


def random_tokens(count: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(100_000) for _ in range(count)]


@given(st.integers(0, 3 * BLOCK_TOKENS), st.integers(0, 3 * BLOCK_TOKENS))
def test_equal_hashes_are_equal_beginnings(shared: int, more: int) -> None:
    begin = random_tokens(shared)
    first = block_hashes(begin + random_tokens(more, 2), KEY)
    second = block_hashes(begin + random_tokens(more + 1, 3), KEY)
    assert len(first) == -(-(shared + more) // BLOCK_TOKENS)
    pairs = zip(first, second, strict=False)
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert num_equal == shared // BLOCK_TOKENS


def test_a_hash_stands_for_all_blocks_before() -> None:
    tokens = random_tokens(3 * BLOCK_TOKENS)
    changed = [tokens[0] + 1, *tokens[1:]]
    assert not set(block_hashes(tokens, KEY)) & set(block_hashes(changed, KEY))


def test_hashes_need_the_key_and_the_salt() -> None:
    tokens = random_tokens(10)
    found = {block_hashes(tokens, key, salt) for key in (KEY, b"other") for salt in ("", "a")}
    assert len(found) == 4
    assert all(0 <= each[0] < 1 << 53 for each in found)


def finished(prompt_tokens: int = 600, answer: int = 5, **more: Any) -> Finished:
    return Finished(
        request_id="r",
        reason="stop",
        timings=Timings(),
        prompt_tokens=prompt_tokens,
        completion_tokens=answer,
        ctx=2048,
        **more,
    )


def ended(*results: Finished, arrived_s: float) -> RequestRecord:
    return RequestRecord(
        id="r",
        requested_model="m",
        client="",
        account="",
        arrived_s=arrived_s,
        model="tiny",
        finished=list(results),
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each_answer_also_after_a_restart(tmp_path: Path) -> None:
    path, settings = tmp_path / "day.jsonl", settings_in(tmp_path)
    recorder = TraceRecorder(path, settings)
    hashes = block_hashes(random_tokens(600), recorder.block_hash_key)
    now_ms = time.time() * 1e3
    both = [finished(block_hashes=hashes), finished(answer=0, block_hashes=hashes)]
    recorder.on_request_end(ended(*both, arrived_s=time.monotonic() - 2))
    # cancelled before it was prepared
    recorder.on_request_end(ended(finished(0, 0), arrived_s=time.monotonic()))
    again = TraceRecorder(path, settings)
    assert again.block_hash_key == recorder.block_hash_key
    again.on_request_end(ended(finished(block_hashes=hashes), arrived_s=time.monotonic()))
    first, second, third = lines_of(path)
    assert first == {
        "timestamp": first["timestamp"],
        "input_length": 600,
        "output_length": 5,
        "hash_ids": list(hashes),
        "model": "tiny",
    }
    assert second["output_length"] == 1, "a prompt without an answer takes a step"
    assert abs(first["timestamp"] - (now_ms - 2000)) < 1000
    assert third["timestamp"] - first["timestamp"] == pytest.approx(2000, abs=1000)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.input_length for entry in read_trace(path)] == [600, 600, 600]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with pytest.raises(InvalidRequest, match=r"--record-trace .*none/x: No such file"):
        TraceRecorder(tmp_path / "none" / "x", settings)
    settings.kv_dir.mkdir(parents=True)
    (settings.kv_dir / "key").write_bytes(b"short")
    (settings.kv_dir / "key").chmod(0o600)
    with pytest.raises(BadSetting, match=r"the key of its hashes: .*key has 5 bytes"):
        TraceRecorder(tmp_path / "x", settings)


def test_a_full_disk_costs_requests_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    recorder = TraceRecorder(path, settings_in(tmp_path))
    record = ended(finished(block_hashes=(1,)), arrived_s=0.0)
    recorder.on_request_end(record)
    write, free = os.write, [40]

    def limited(fd: int, content: bytes) -> int:
        part = content[: free[0]]
        free[0] -= len(part)
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, part)

    monkeypatch.setattr(os, "write", limited)
    with caplog.at_level(logging.WARNING):
        recorder.on_request_end(record)
        recorder.on_request_end(record)
        free[0] = 1 << 20
        recorder.on_request_end(record)
    assert [each.message for each in caplog.records] == [
        f"requests are missing in {path}: only a part was written",
        f"the trace {path} is written again",
    ]
    assert len(lines_of(path)) == 2, "whole lines only"


def test_an_incomplete_line_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x"
    path.write_text('{"timestamp": 1, "input_length": 5, "output_length": 1}\n{"timestamp": 2, "in')
    path.chmod(0o644)
    TraceRecorder(path, settings_in(tmp_path)).on_request_end(
        ended(finished(block_hashes=(1,)), arrived_s=0.0)
    )
    assert [line["input_length"] for line in lines_of(path)] == [5, 600]
    assert "was incomplete, and is removed" in caplog.text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_no_trace_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("important\n")
    for other, says in ((path, "it is no trace"), (Path("/dev/null"), "it is no regular file")):
        with pytest.raises(InvalidRequest, match=says):
            TraceRecorder(other, settings_in(tmp_path))
    assert path.read_text() == "important\n"


def test_a_conversation_is_recorded_and_replayed(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    words = " ".join(["the", "a", "is", "house", "tree", "sun", "and", "it", "of", "to"]) + " "
    messages = [{"role": "user", "content": f"secret {words * 60}"}]
    with real_server("tiny", "--record-trace", str(path)) as server:
        for _ in range(2):
            answer = httpx.post(
                f"{server.url}/v1/chat/completions",
                json={"model": "tiny", "messages": messages, "max_tokens": 8},
                timeout=60,
            ).json()
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": "and then?"})
        httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "tiny", "prompt": ["one", "two"], "n": 2, "max_tokens": 3},
            timeout=60,
        ).raise_for_status()
    first, second, *others = lines_of(path)
    assert first["input_length"] > BLOCK_TOKENS
    assert first["output_length"] <= 8
    whole = first["input_length"] // BLOCK_TOKENS
    assert second["hash_ids"][:whole] == first["hash_ids"][:whole]
    assert second["hash_ids"][whole:] != first["hash_ids"][whole:]
    assert len(others) == 4
    keys = {"timestamp", "input_length", "output_length", "hash_ids", "model"}
    assert all(line.keys() == keys for line in lines_of(path))
    replayed = list(trace_queries(read_trace(path), WordPrompts(1), 7))
    assert [query.max_tokens for query in replayed[:2]] == [
        first["output_length"],
        second["output_length"],
    ]
    begins = [query.prompt.split()[:BLOCK_TOKENS] for query in replayed[:2]]
    assert begins[0] == begins[1]
