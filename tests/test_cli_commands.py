"""The commands `ps`, `list` and `stop`, help, and options that all commands share."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from command_line import own_folders, scripted
from scripted_client import ScriptedClient, answer
from top_script import DISK_TIER, RAM_TIER

import localgen.client
from localgen.backends.errors import ServerUnavailable
from localgen.cli import commands, errors, tables
from localgen.cli.main import run_command_line

__all__ = ["own_folders", "scripted"]
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("arguments", [["run", "tiny", "x", "--json"], ["list", "--json"]])
def test_json_on_a_terminal_has_no_control_characters(
    scripted: Callable[..., ScriptedClient],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    hostile = "\x1b[2J \x9b2J \x7f \u202e é"
    client = scripted((hostile, answer()))
    client.names = ("tiny", hostile)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run_command_line(arguments) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert out.isascii()
    found = json.loads(out)
    assert (found["text"] if arguments[0] == "run" else found[1]["name"]) == hostile


def test_ps(scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]) -> None:
    scripted()
    assert run_command_line(["ps"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "ID", "SIZE", "MEMORY", "PROCESSOR", "CONTEXT", "UNTIL", "ALSO"]
    cells = ["tiny", "a1b2", "12.0 MB", "130 MB", "100% CPU", "2,048", "5 minutes from now"]
    assert re.split(r" {3,}", row) == cells
    assert run_command_line(["ps", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["memory_bytes"]) == ("tiny", 130_000_000)


@pytest.mark.parametrize(
    ("until_s", "active", "text"),
    [
        (0.0, 0, "now"),
        (1.0, 0, "now"),
        (2.0, 0, "2 seconds from now"),
        (89.0, 0, "89 seconds from now"),
        (120.0, 0, "2 minutes from now"),
        (None, 0, "forever"),
        (0.0, 1, "busy (1)"),
    ],
)
def test_when_a_model_is_unloaded(until_s: float | None, active: int, text: str) -> None:
    assert tables.format_expiry(until_s, active) == text


@pytest.mark.parametrize("name", ["list", "ls"])
def test_list(
    name: str, scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(running=False)
    assert run_command_line([name]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "NAME", "tiny", "other",
    ]  # fmt: skip


def test_stop(scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]) -> None:
    client = scripted()
    assert run_command_line(["stop", "tiny"]) == 0
    assert (client.record.unloaded, client.record.shutdowns) == (["tiny"], 0)
    assert run_command_line(["stop"]) == 0
    assert client.record.shutdowns == 1
    assert capsys.readouterr().out == "tiny unloaded\nserver stopped\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "saving up to 1,700 tokens of prefixes to disk, for at most 10 s\n"),
        (["tiny"], "saving up to 1,500 tokens of prefixes to disk, for at most 10 s\n"),
        (["idle"], ""),
    ],
)
def test_stop_says_that_prefixes_are_saved(
    scripted: Callable[..., ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    def model(name: str, unsaved: int) -> dict[str, object]:
        tiers = [asdict(RAM_TIER), asdict(replace(DISK_TIER, unsaved_tokens=unsaved))]
        return {"name": name, "stats": {"kv_tiers": tiers}}

    models = [model("tiny", 1500), model("other", 200), model("idle", 0)]
    monkeypatch.setattr(ScriptedClient, "stats", lambda _: {"server": {}, "models": models})
    monkeypatch.setattr(ScriptedClient, "unload", lambda *_: True)
    scripted()
    assert run_command_line(["stop", *arguments]) == 0
    assert capsys.readouterr().err == said


def test_a_server_that_reports_nothing_is_stopped(
    scripted: Callable[..., ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: ScriptedClient) -> None:
        raise ServerUnavailable("no answer")

    monkeypatch.setattr(ScriptedClient, "stats", fail)
    client = scripted()
    assert run_command_line(["stop"]) == 0
    assert client.record.shutdowns == 1


def test_stop_starts_nothing(
    scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    client = scripted(running=False)
    assert run_command_line(["stop"]) == 0
    assert capsys.readouterr().out == "no server is running\n"
    assert run_command_line(["stop", "tiny"]) == errors.exit_status("server_unavailable")
    assert "tiny is not loaded: no server is running" in capsys.readouterr().err
    assert client.record.connects == 0


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["--version"]) == 0
    assert capsys.readouterr().out == f"localgen {localgen.__version__}\n"
    assert run_command_line([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in commands.COMMANDS)
    assert "141" in text


@pytest.mark.parametrize("name", [*commands.COMMANDS, "ls"])
def test_help_of_each_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: localgen")
    assert err == ""


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["rnu"]])
def test_no_heavy_import_before_it_is_needed(arguments: list[str]) -> None:
    program = (
        "import sys; from localgen.cli.main import run_command_line\n"
        "run_command_line(sys.argv[1:])\n"
        "print('LOADED', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = {name.split(".")[0] for name in done.stdout.rpartition("LOADED")[2].split()}
    assert loaded.isdisjoint(
        {"torch", "textual", "llama_cpp", "fastapi", "httpx", "prompt_toolkit", "rich", "numpy"}
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["help"], "Usage: localgen [OPTIONS]"),
        (["-h"], "Usage: localgen [OPTIONS]"),
        (["help", "run"], "Usage: localgen run"),
        (["run", "-h"], "Usage: localgen run"),
        (["version"], "localgen "),
    ],
)
def test_spellings_of_other_tools_are_accepted(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(arguments) == 0
    assert line in capsys.readouterr().out
