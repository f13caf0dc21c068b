"""benchmarks.agent_sessions: what changes in its recordings, and how cached tokens are counted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agent_sessions
from benchmarks.agent_sessions import Recording, Run, Turn

RULES = 8


def bodies(turns: int, *, noise: bool) -> list[dict[str, Any]]:
    recording = Recording(rules=RULES, noise=noise)
    return [recording.request(number) for number in range(turns)]


def test_without_noise_a_request_continues_the_one_before() -> None:
    for before, after in pairwise(bodies(4, noise=False)):
        assert after["tools"] == before["tools"]
        assert after["messages"][: len(before["messages"])] == before["messages"]


def test_with_noise_heads_and_tools_change_but_no_earlier_message() -> None:
    found = bodies(12, noise=True)
    heads = [body["messages"][0]["content"] for body in found]
    assert len({head.split("cch=")[1][:3] for head in heads}) == len(heads)
    assert ["Working folder: /project/src" in head for head in heads] == [False] * 10 + [True] * 2
    assert len({json.dumps(body["tools"]) for body in found}) > 1
    for before, after in pairwise(found):
        earlier, last = before["messages"][1:-1], before["messages"][-1]["content"]
        assert after["messages"][1 : len(earlier) + 1] == earlier
        said = after["messages"][len(earlier) + 1]["content"]
        assert "tokens left" in last
        assert "tokens left" not in said
        assert last.startswith(said)


def test_shares_are_of_the_earlier_prompt() -> None:
    turns = (Turn(1000, 0), Turn(1200, 990), Turn(1500, 1200), Turn(1600, 300))
    run = Run("llamacpp", noise=False, stabilize=False, turns=turns)
    assert run.shares == [0.99, 1.0, 0.2]
    assert run.computed == 210 + 300 + 1300


def test_a_short_session_on_a_server(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ["--backend", "llamacpp", "--turns", "3", "--rules", "20", "--output", str(output)]
    assert agent_sessions.main(arguments) == 0
    quiet, stable, noisy = json.loads(output.read_text())["runs"]
    assert quiet["least_cached_share"] >= 0.98
    assert noisy["computed_after_first"] > 2 * stable["computed_after_first"]
    assert quiet["turns"][0]["cached"] == 0


def test_one_turn_is_refused() -> None:
    with pytest.raises(SystemExit):
        agent_sessions.main(["--turns", "1"])
