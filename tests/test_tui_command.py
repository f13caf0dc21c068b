"""`localgen tui` where it cannot start: one line, and nothing is changed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localgen.backends.errors import InvalidRequest
from localgen.cli.main import run_command_line


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(tmp_path / "run"))
    yield
    gc.enable()  # the command switches it off until the first paint


def test_without_a_terminal_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["tui"]) == 3
    assert capsys.readouterr().err.startswith("localgen: tui needs a terminal")


def test_a_prompt_is_not_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["tui", "what is this?"]) == 3
    assert "takes a model, not a prompt" in capsys.readouterr().err


def pretend_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True, raising=False)


def test_a_path_is_stored_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localgen.tui.chat.app import ChatApp

    pretend_terminal(monkeypatch)
    started: list[ChatApp] = []
    monkeypatch.setattr(ChatApp, "run", lambda app, inline: started.append(app))
    monkeypatch.chdir(tmp_path)
    for model in ("./model.gguf", "tiny"):
        assert run_command_line(["tui", model]) == 0
    stored = [app.session_manager.context.model for app in started]
    assert stored == [str(tmp_path / "model.gguf"), "tiny"]


def test_damaged_store_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_terminal(monkeypatch)
    store = tmp_path / "state" / "sessions.db"
    store.parent.mkdir(mode=0o700)
    store.write_text("no database at all, though long enough to look at\n" * 100)
    before = store.read_bytes()
    assert run_command_line(["tui"]) == 19
    told = capsys.readouterr().err
    assert f"{store} is damaged" in told
    assert told.count("\n") == 1
    assert store.read_bytes() == before


def test_a_store_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from localgen.chat.database import WriterLock
    from localgen.tui.chat.app import ChatApp

    pretend_terminal(monkeypatch)
    state_dir, open_writer = tmp_path / "state", WriterLock.__init__
    notices: list[str] = []

    def refuse(self: WriterLock, folder: Path) -> None:
        if folder.parent == state_dir:
            raise InvalidRequest("cannot write to it")
        open_writer(self, folder)

    def run(app: ChatApp, *, inline: bool) -> None:
        assert not inline
        app.session_manager.open_empty()
        notices.append(app.session_manager.context.notice)

    monkeypatch.setattr(WriterLock, "__init__", refuse)
    monkeypatch.setattr(ChatApp, "run", run)
    assert run_command_line(["tui"]) == 0
    assert notices == ["conversations are not kept: cannot write to it"]
    assert capsys.readouterr().err == f"{notices[0]}\n"
    assert list(state_dir.iterdir()) == []
