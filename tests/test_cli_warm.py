"""`warm`: a system prompt is read ahead of time, and kept."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from command_line import own_folders, scripted
from scripted_client import TIMINGS, ScriptedClient, answer, model_info
from top_script import DISK_TIER

from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.types import Message
from localgen.cli import warm
from localgen.cli.main import run_command_line

__all__ = ["own_folders", "scripted"]


@pytest.fixture
def head(tmp_path: Path) -> Path:
    path = tmp_path / "head.txt"
    path.write_text("You answer in verses about the sea and its ships. " * 20 + "\n")
    return path


@pytest.fixture
def stopped_server() -> Iterator[None]:
    yield
    run_command_line(["stop"])


@pytest.mark.usefixtures("stopped_server")
def test_what_was_read_is_there_after_a_restart(
    head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["warm", "tiny", "--prompt-file", str(head)]) == 0
    said = re.fullmatch(
        r"tiny has read (\d+) tokens in [\d.]+ s\nthey are on disk\n", capsys.readouterr().out
    )
    assert said is not None
    asking = ["run", "tiny", "Hello!", "-n", "2", "--system", f"@{head}", "--verbose"]
    assert run_command_line(asking) == 0
    cached = re.search(r"(\d+) cached", capsys.readouterr().err)
    assert cached is not None
    assert int(cached[1]) > 0.8 * int(said[1])
    assert run_command_line(["stop"]) == 0
    assert run_command_line(asking) == 0
    # an idle engine reads the disk into RAM
    assert re.search(r"restored: +\d+ tokens from (RAM|disk)", capsys.readouterr().err)
    assert run_command_line(["warm", "tiny", "-f", str(head)]) == 0
    assert re.fullmatch(
        r"tiny had read \d+ tokens before\nthey are on disk\n", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("cached", "computed", "said"),
    [
        (0, 1951, "has read 1,951 tokens in 2.0 s"),
        (1940, 11, "had read 1,951 tokens before"),
        (640, 1311, "has read 1,311 tokens in 2.0 s, and had read 640 before"),
        (0, 9, "has read 9 tokens in 2.0 s"),
    ],
)
def test_what_was_computed_is_told_from_what_was_there(
    cached: int, computed: int, said: str
) -> None:
    timings = replace(TIMINGS, cache_n=cached, prompt_n=computed, prompt_ms=2000.0)
    assert warm._what_was_read(timings) == said


@pytest.mark.usefixtures("stopped_server")
def test_the_prompt_may_come_from_standard_input(
    head: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with head.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run_command_line(["warm", "tiny", "-f", "-"]) == 0
    assert "has read" in capsys.readouterr().out
    broken = head.with_name("broken.txt")
    broken.write_bytes(b"\xff\xfe")
    with broken.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run_command_line(["warm", "tiny", "-f", "-"]) != 0
    assert "UTF-8" in capsys.readouterr().err


@pytest.mark.usefixtures("stopped_server")
def test_what_has_no_room_on_disk_is_said(
    head: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALGEN_KV_DISK", "1000")
    assert run_command_line(["warm", "tiny", "-f", str(head)]) == 0
    said = capsys.readouterr().out
    no_room = r"up to \d+ tokens of them stay until the model is unloaded: --kv-disk has no room"
    assert re.search(no_room, said)


@pytest.mark.parametrize(
    ("disk", "said"),
    [
        ([], "it was unloaded before they were on disk"),
        ([{"error": "No space left on device"}], "cannot be written: No space left on device"),
        ([{"unsaved_tokens": 9}], "9 tokens of prefixes are written when it is idle"),
        ([{"unsaved_tokens": 9}, {"unsaved_tokens": 8}, {"unsaved_tokens": 0}], "they are on disk"),
    ],
)
def test_why_a_prompt_is_not_on_disk(
    head: Path,
    scripted: Callable[..., ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    disk: list[dict[str, object]],
    said: str,
) -> None:
    """disk: what the server reports of it at one moment after the other."""
    monkeypatch.setattr(warm, "SAVE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(warm, "_POLL_S", 0.01)
    reports = iter([{}, *disk])
    last: dict[str, object] = {}

    def stats(_: ScriptedClient) -> dict[str, object]:
        last.update(next(reports, {}))
        tier = asdict(replace(DISK_TIER, **last))  # type: ignore[arg-type]
        model = {"name": "tiny", "path": "/models/tiny.gguf", "stats": {"kv_tiers": [tier]}}
        return {"server": {}, "models": [model] if disk else []}

    scripted()
    monkeypatch.setattr(ScriptedClient, "stats", stats)
    info = model_info("tiny", options=LoadOptions(kv_disk=1 << 30))
    monkeypatch.setattr(ScriptedClient, "load", lambda *_, **__: info)
    assert run_command_line(["warm", "tiny", "-f", str(head)]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.usefixtures("stopped_server")
def test_load_options_and_their_variables_hold(
    head: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALGEN_KV_DISK", "0")
    assert run_command_line(["warm", "tiny", "-f", str(head)]) == 0
    assert "until the model is unloaded: it keeps no prefixes on disk" in capsys.readouterr().out
    assert run_command_line(["stop", "tiny"]) == 0
    assert run_command_line(["warm", "tiny", "-f", str(head), "--no-prefix-cache"]) != 0
    assert "keeps no prefixes" in capsys.readouterr().err


@pytest.mark.usefixtures("stopped_server")
def test_a_disk_that_cannot_be_used_is_named(
    head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state/kv").write_text("no folder")
    assert run_command_line(["warm", "tiny", "-f", str(head)]) == 0
    said = capsys.readouterr().out
    assert "until the model is unloaded: prefixes are not kept on disk: " in said
    assert "File exists" in said


def test_it_is_asked_twice_with_the_context(
    head: Path, scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    timings = replace(TIMINGS, cache_n=0, prompt_n=4096, prompt_ms=54_000.0)
    client = scripted(("a", answer(timings=timings)), ("a", answer()))
    assert run_command_line(["warm", "tiny", "-f", str(head), "-c", "9000"]) == 0
    assert "tiny has read 4,096 tokens in 54.0 s\n" in capsys.readouterr().out
    one, two = client.record.asked
    assert one == two
    assert one.messages[0] == Message("system", head.read_text().removesuffix("\n"))
    assert (one.ctx, one.params.max_tokens) == (9000, 1)
    assert client.record.loaded[0][1].ctx == 9000


def test_a_model_that_keeps_nothing_says_so(
    head: Path,
    scripted: Callable[..., ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scripted()
    assert run_command_line(["warm", "tiny", "-f", str(head)]) == 0
    assert "until the model is unloaded" in capsys.readouterr().out

    def without(*_: object, **__: object) -> ModelInfo:
        return replace(model_info("tiny"), can_rewind=False)

    monkeypatch.setattr(ScriptedClient, "load", without)
    assert run_command_line(["warm", "tiny", "-f", str(head)]) != 0
    assert "keeps no prefixes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], "no prompt: give one with --prompt-file FILE"),
        (["-f", "missing.txt"], "missing.txt: No such file"),
        (["-f", os.devnull], "it is empty"),
    ],
)
def test_wrong_prompts(given: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["warm", "tiny", *given]) != 0
    assert error in capsys.readouterr().err
