"""The benchmark of drafts runs, and drafts do not change the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import speculation
from benchmarks.forced_output import copies, prose


def test_copies_repeat_their_prompt() -> None:
    prompt, answer = copies(40, 2048, edited=0.0, seed=1)
    assert answer == prompt
    prompt, edited = copies(400, 2048, edited=0.1, seed=1)
    assert len(edited) == 400
    assert set(edited) - set(prompt)


def test_prose_is_cut_into_prompts_and_answers() -> None:
    first, second = prose(64, 100, 2, vocab=10_000)
    assert [len(part) for part in (*first, *second)] == [64, 100, 64, 100]
    assert first != second


def test_speculation_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = tmp_path / "found.json"
    assert speculation.main(["--quick", "--threads", "2", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert len(found["checks"]) == 6
    same = {s["test"]: s["median"] for s in found["series"] if s["side"] == "same text"}
    assert len(same) == 6
    assert min(same.values()) >= 0.9
    assert "a copy with changes" in capsys.readouterr().out
