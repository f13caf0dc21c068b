"""`localgen history`, and how `localgen chat` chooses a session."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_client import ScriptedClient

import localgen.client
from localgen.backends.errors import DiskFull, InvalidRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.chat.chat_storage import ChatStorage
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.database import WriterLock
from localgen.chat.parameters import ModelOptions
from localgen.chat.saved_chats import load_chat
from localgen.chat.session_store import SessionRecord, SessionStore
from localgen.chat.stored_sessions import open_store
from localgen.cli.main import run_command_line

CONVERSATION = Conversation("Be brief.", (Turn("one", "1", reasoning="Hm."), Turn("two", "2")))
PARAMS = SamplingParams(top_k=3, max_tokens=5)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SessionStore]:
    """A store with a session of this machine's model, then one of another server."""
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("LOCALGEN_MODEL", raising=False)
    with open_store(tmp_path / "state") as opened:
        far = SessionRecord(0, "far", "big", "http://far/v1", conversation=CONVERSATION)
        opened.create(far)
        mine = SessionRecord(0, "my trip", "other", params=PARAMS, ctx=64)
        opened.create(SessionRecord(0, "empty"))
        mine = opened.create(mine)
        opened.update(
            SessionRecord(mine.id, mine.name, "other", "", PARAMS, 64, CONVERSATION, mine.revision)
        )
        yield opened


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class StartedChats(list[tuple[str | None, ModelOptions, ChatStorage]]):
    """Model, options and storage of each chat that `localgen chat` starts on a terminal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(
            localgen.client, "LocalClient", lambda *_args, **_named: ScriptedClient()
        )
        monkeypatch.setattr(
            "localgen.repl.start_chat.start_chat", lambda *chat: self.append(chat[2:5])
        )

    def run(self, *arguments: str) -> int:
        """Exit status of `localgen chat`."""
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", Terminal())
            patch.setattr(sys, "stdout", Terminal())
            return run_command_line(["chat", *arguments])


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch, store: SessionStore) -> StartedChats:
    return StartedChats(monkeypatch)


def test_history_lists_sessions(store: SessionStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["history"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "NAME", "TURNS", "MODEL", "CHANGED"]
    assert [row.split("   ")[1].strip() for row in rows] == ["my trip", "far"]
    assert run_command_line(["history", "--json"]) == 0
    first, _ = json.loads(capsys.readouterr().out)
    assert (first["name"], first["model"], first["num_turns"]) == ("my trip", "other", 2)


@pytest.mark.parametrize("failure", [DiskFull("disk full"), InvalidRequest("read-only")])
def test_history_of_a_store_that_cannot_be_written(
    store: SessionStore,
    failure: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del store  # another program has it open: its last transactions are in the WAL
    state_dir, open_writer = Path(os.environ["LOCALGEN_STATE_DIR"]), WriterLock.__init__

    def refuse(self: WriterLock, folder: Path) -> None:
        if folder.parent == state_dir:
            raise failure
        open_writer(self, folder)

    monkeypatch.setattr(WriterLock, "__init__", refuse)
    assert run_command_line(["history", "my trip"]) == 0
    shown = capsys.readouterr()
    assert "two" in shown.out
    assert str(failure) in shown.err
    (state_dir / "sessions.db-wal").unlink()
    (state_dir / "sessions.db").write_bytes(b"no database" * 500)
    assert run_command_line(["history"]) != 0
    assert str(failure) in capsys.readouterr().err
    assert run_command_line(["history", "my trip", "--delete", "--yes"]) != 0


def test_empty_history(
    store: SessionStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in store.list_sessions():
        store.delete(each.id)
    assert run_command_line(["history"]) == 0
    assert capsys.readouterr() == ("", "no stored conversations: localgen chat starts one\n")
    assert run_command_line(["history", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


@pytest.mark.parametrize("name", ["my trip", "MY TRIP", "3"])
def test_a_session_as_text(
    store: SessionStore, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run_command_line(["history", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# my trip\n\nSystem prompt:\n\n> Be brief.\n")
    assert "## You\n\none\n\n## Answer\n\n<details><summary>Reasoning</summary>\n\nHm." in out
    assert out.endswith("## Answer\n\n2\n")


def test_a_session_as_json_can_be_loaded(
    store: SessionStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command_line(["history", "my trip", "--json"]) == 0
    path = tmp_path / "chat.json"
    path.write_text(capsys.readouterr().out)
    chat = load_chat(path)
    assert (chat.model, chat.params, chat.conversation) == ("other", PARAMS, CONVERSATION)


def test_delete_removes_one_session(
    store: SessionStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["history", "my trip", "--delete", "--yes"]) == 0
    assert capsys.readouterr().out == "my trip deleted\n"
    assert [each.name for each in store.list_sessions()] == ["empty", "far"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nix"], "session 'nix' not found: localgen history lists"),
        (["far", "--yes"], "--yes needs --delete"),
        (["far", "--delete", "--json"], "--json and --delete exclude each other"),
        (["--delete"], "give the name or id of a session"),
        (["far", "--delete"], "no terminal to ask for confirmation"),
    ],
)
def test_invalid_requests_are_rejected(
    store: SessionStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run_command_line(["history", *arguments]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err
    assert err.count("\n") == 1
    assert len(store.list_sessions()) == 3


def test_a_continued_chat_has_the_stored_model_and_settings(
    chats: StartedChats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALGEN_MODEL", "usual")
    monkeypatch.setenv("LOCALGEN_SYSTEM", "usual")
    assert chats.run("--continue") == 0
    ((model, options, storage),) = chats
    assert (model, options.params, options.ctx) == ("other", PARAMS, 64)
    assert (options.system, storage.record.name) == ("Be brief.", "my trip")
    assert storage.warning == ""


def test_what_is_given_replaces_what_is_stored(chats: StartedChats) -> None:
    arguments = ["tiny", "-sys", "Rhyme.", "--temp", "0.5", "-n", "-1"]
    assert chats.run("--session", "my trip", *arguments) == 0
    ((model, options, _),) = chats
    assert (model, options.system, options.ctx) == ("tiny", "Rhyme.", None)
    assert options.params == SamplingParams(top_k=3, temperature=0.5)


def test_a_session_of_another_server_has_a_model_of_this_one(chats: StartedChats) -> None:
    assert chats.run("--session", "far") == 0
    ((model, options, storage),) = chats
    assert (model, options.system) == (None, "Be brief.")
    assert storage.record.conversation == CONVERSATION
    assert storage.warning == "'far' was with http://far/v1: --url http://far/v1 continues it there"


def test_a_given_grammar_replaces_a_stored_one(chats: StartedChats, store: SessionStore) -> None:
    held = SessionRecord(0, "held", params=SamplingParams(json_schema="{}", top_k=3))
    store.create(held)
    assert chats.run("--session", "held", "--regex", "a+") == 0
    assert chats[0][1].params == SamplingParams(regex="a+", top_k=3)


def test_a_new_chat_takes_nothing_over(chats: StartedChats, store: SessionStore) -> None:
    before = store.list_sessions()
    for arguments in ([], ["--session", "new"], ["--no-history"]):
        assert chats.run(*arguments, "-sys", "Rhyme.") == 0
    assert [(model, options.system) for model, options, _ in chats] == [(None, "Rhyme.")] * 3
    assert [storage.record.name for *_, storage in chats] == ["", "new", ""]
    assert [storage.keeps_history for *_, storage in chats] == [True, True, False]
    assert store.list_sessions() == before


def test_history_is_turned_off_by_the_environment(
    chats: StartedChats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALGEN_HISTORY", "0")
    assert chats.run() == 0
    assert chats[0][2].store is None
    assert chats.run("--continue") == 3
    assert chats.run("--continue", "--history") == 0
