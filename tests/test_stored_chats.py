"""Terminal chats in the session store: stored, continued, and shared with the TUI."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console
from scripted_client import Script, ScriptedClient, answer
from tui_chats import MakeTui, wait, wait_for_answer

from localgen.backends.errors import DiskFull, EngineDied, InvalidRequest
from localgen.chat.chat_storage import ChatStorage, open_chat_storage
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.database import SESSIONS_SCHEMA
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import ChatSession
from localgen.chat.session_choice import SessionChoice
from localgen.chat.session_recorder import SessionRecorder
from localgen.chat.session_store import SessionBusy, SessionRecord, SessionStore
from localgen.chat.stored_sessions import find_session, list_with_turns, open_store
from localgen.repl.repl import Repl

NEW, LATEST = SessionChoice(), SessionChoice(is_latest=True)


class Chat:
    """A terminal chat with lines typed one at a time, and its screen."""

    def __init__(self, storage: ChatStorage, scripts: tuple[Script, ...]) -> None:
        self.client = ScriptedClient(*scripts)
        self.session = ChatSession(self.client, storage.state_dir, ModelOptions())
        self.session.set_conversation(storage.record.conversation)
        self.session.load(None, lambda _: None)
        self.screen = io.StringIO()
        console = Console(file=self.screen, width=200)
        recorder = storage.recorder(self.session)
        self.repl = Repl(self.session, console, self._leave, recorder, None, storage.failure)

    def type(self, *lines: str) -> str:
        """Type lines; returns everything on the screen so far."""
        for line in lines:
            self.repl.handle_line(line)
        return self.screen.getvalue()

    def open_and_leave(self) -> str:
        """Start and leave at once; returns the screen."""
        self.repl.run()
        return self.screen.getvalue()

    def _leave(self, _prompt: str) -> str:
        raise EOFError


OpenChat = Callable[..., Chat]


@pytest.fixture
def open_chat(tmp_path: Path) -> Iterator[OpenChat]:
    """Opens chats on one store, each with a session choice and scripts; closes them afterwards."""
    with ExitStack() as stack:

        def open_one(choice: SessionChoice, *scripts: Script) -> Chat:
            return Chat(stack.enter_context(open_chat_storage(tmp_path, choice)), scripts)

        yield open_one


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    with open_store(tmp_path) as opened:
        yield opened


def stored(store: SessionStore) -> dict[str, list[str]]:
    """Prompts of each session by name, latest first."""
    return {
        each.name: [turn.prompt for turn in store.turns(each.id)] for each in store.list_sessions()
    }


def test_a_chat_is_stored_after_each_turn(open_chat: OpenChat, store: SessionStore) -> None:
    chat = open_chat(NEW)
    chat.type("/set system Be brief.", "/help")
    assert stored(store) == {}, "nothing without a turn"
    chat.type("one")
    assert stored(store) == {"one": ["one"]}
    chat.type("two", "/set parameter top_k 7")
    (listed,) = store.list_sessions()
    record = store.read(listed.id)
    assert record.conversation == chat.session.conversation
    assert (record.name, record.params.top_k) == ("one", 7)
    assert record.conversation.system == "Be brief."


@pytest.mark.parametrize("end", [KeyboardInterrupt(), EngineDied("it died")])
def test_half_an_answer_is_stored(
    open_chat: OpenChat, store: SessionStore, end: BaseException
) -> None:
    open_chat(NEW, ("half", end), ("half", end)).type("one")
    (turn,) = store.turns(1)
    assert (turn.prompt, turn.answer, turn.stopped) == ("one", "half", True)
    assert turn.summary in ("stopped", "interrupted: it died")


def test_the_tui_and_the_terminal_continue_each_other(
    open_chat: OpenChat, make_tui: MakeTui
) -> None:
    open_chat(NEW).type("from the terminal")
    tui = make_tui()
    (listed,) = tui.manager.summaries
    opened = tui.manager.get(listed.id)
    opened.ask("from the tui")
    wait_for_answer(tui, opened)
    chat = open_chat(SessionChoice("From the Terminal"))
    screen = chat.open_and_leave()
    assert "continued: 'from the terminal' · 2 turns\n>>> from the tui\nre: from the tui" in screen
    chat.type("again")
    assert [message.content for message in chat.client.record.asked[0].messages][::2] == [
        "from the terminal", "from the tui", "again",
    ]  # fmt: skip
    assert tui.manager.sync_store()
    assert opened.chat.conversation == chat.session.conversation


def test_clear_and_load_begin_another_session(open_chat: OpenChat, store: SessionStore) -> None:
    chat = open_chat(NEW)
    screen = chat.type("one", "two", "/save x", "/clear")
    assert "'one' stays stored" in screen
    chat.type("three", "/load x", "four")
    prompts = [[turn.prompt for turn in store.turns(number)] for number in (1, 2, 3)]
    assert prompts == [["one", "two"], ["three"], ["one", "two", "four"]]


def test_compact_begins_another_session(open_chat: OpenChat, store: SessionStore) -> None:
    chat = open_chat(NEW, ("1" * 400, answer()), ("It was about one.", answer()))
    screen = chat.type("/compact")
    assert "there is no answer to summarize yet" in screen
    assert "the model answers" not in screen
    screen = chat.type("one", "/compact")
    assert "Ctrl+C stops it" in screen
    assert "1 turn became a summary" in screen
    assert "'one' stays stored" in screen
    chat.type("two")
    assert [turn.prompt for turn in store.turns(1)] == ["one"]
    assert [turn.answer for turn in store.turns(2)] == ["It was about one.", "re: two"]
    assert {*stored(store)} == {"one", "It was about one."}


def test_undo_and_regen_change_the_stored_session(open_chat: OpenChat, store: SessionStore) -> None:
    chat = open_chat(NEW, ("first", answer()), ("second", answer()))
    chat.type("one", "/regen")
    assert [turn.answer for turn in store.turns(1)] == ["second"]
    chat.type("two", "/undo")
    assert stored(store) == {"one": ["one"]}


def test_each_branch_is_a_session(open_chat: OpenChat, store: SessionStore) -> None:
    chat = open_chat(NEW)
    chat.type("one", "/fork idea", "/switch main", "/switch idea")
    assert stored(store) == {"one": ["one"]}, "a copy without a change is not stored"
    chat.type("two", "/switch main", "three")
    assert stored(store) == {"one": ["one", "three"], "one (idea)": ["one", "two"]}


def test_two_that_continue_one_session_lose_nothing(
    open_chat: OpenChat, store: SessionStore
) -> None:
    open_chat(NEW).type("one")
    first, second = open_chat(LATEST), open_chat(LATEST)
    first.type("mine")
    screen = second.type("yours", "more")
    notice = "another localgen has changed 'one': your version continues as 'one (2)'"
    assert screen.count(notice) == 1
    assert stored(store) == {"one": ["one", "mine"], "one (2)": ["one", "yours", "more"]}


def test_a_session_that_was_deleted_meanwhile_is_stored_again(
    open_chat: OpenChat, store: SessionStore
) -> None:
    chat = open_chat(NEW)
    chat.type("one")
    store.delete(1)
    assert "another localgen has deleted 'one': it is stored again" in chat.type("two")
    assert stored(store) == {"one": ["one", "two"]}


def test_a_session_in_which_the_tui_answers_is_not_opened(
    open_chat: OpenChat, make_tui: MakeTui
) -> None:
    gate = threading.Event()
    tui = make_tui(("half", gate, answer()))
    opened = tui.manager.open_empty()
    opened.ask("q")
    with pytest.raises(SessionBusy, match="another localgen is answering in q"):
        open_chat(LATEST)
    gate.set()
    wait(lambda: not opened.is_answering)


def test_a_full_disk_is_said_once_and_nothing_is_lost(
    open_chat: OpenChat, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_store: SessionStore, _record: SessionRecord) -> SessionRecord:
        raise DiskFull("the disk is full")

    chat = open_chat(NEW)
    with monkeypatch.context() as patch:
        patch.setattr(SessionStore, "create", fail)
        screen = chat.type("one", "two")
        left = chat.open_and_leave()
    assert screen.count("conversation not stored: the disk is full") == 1
    assert "re: two" in screen
    assert "this conversation is not stored: the disk is full" in left
    chat.type("three")
    assert stored(store) == {"one": ["one", "two", "three"]}


def test_a_newer_localgen_that_upgrades_the_store_is_said_once(
    open_chat: OpenChat, tmp_path: Path
) -> None:
    chat = open_chat(NEW)
    chat.type("one")
    with contextlib.closing(sqlite3.connect(tmp_path / "sessions.db")) as sqlite:
        sqlite.execute("ALTER TABLE turns ADD COLUMN mood TEXT")
        sqlite.execute(f"PRAGMA user_version = {len(SESSIONS_SCHEMA) + 1}")
        screen = chat.type("two", "three")
        assert screen.count("conversation not stored: a newer localgen has upgraded ") == 1
        assert "re: three" in screen
        assert [turn.prompt for turn in chat.session.conversation.turns] == ["one", "two", "three"]
        assert "this conversation is not stored: a newer localgen" in chat.open_and_leave()
        assert sqlite.execute("SELECT prompt FROM turns").fetchall() == [("one",)]


def test_a_damaged_store_ends_no_new_chat(open_chat: OpenChat, tmp_path: Path) -> None:
    (tmp_path / "sessions.db").write_text("no database" * 100)
    with open_chat_storage(tmp_path, NEW) as storage:
        assert (storage.store, storage.keeps_history) == (None, True)
        assert "is damaged" in storage.failure
    chat = open_chat(NEW)
    assert "re: one" in chat.type("one")
    assert "this conversation is not stored: " in chat.open_and_leave()
    with pytest.raises(Exception, match="is damaged"):
        open_chat(LATEST)


def test_without_history_nothing_is_written(tmp_path: Path) -> None:
    with open_chat_storage(tmp_path, SessionChoice(keeps_history=False)) as storage:
        chat = Chat(storage, ())
        assert "re: one" in chat.type("one")
    assert list(tmp_path.iterdir()) == []


def test_session_is_found_by_name_or_id(open_chat: OpenChat, store: SessionStore) -> None:
    one = Conversation("sys", (Turn("q", "a"),))
    first = store.create(SessionRecord(0, "Trip", conversation=one))
    store.create(SessionRecord(0, "7", conversation=one))
    store.create(SessionRecord(0, "empty"))
    assert [each.name for each in list_with_turns(store)] == ["7", "Trip"]
    for choice, name, turns in (
        (LATEST, "7", 1),
        (SessionChoice("trip"), "Trip", 1),
        (SessionChoice(str(first.id)), "Trip", 1),
        (SessionChoice("7"), "7", 1),
        (SessionChoice("empty"), "empty", 0),
        (SessionChoice(" a new\n one"), "a new one", 0),
    ):
        record = open_chat(choice).repl.recorder.record  # type: ignore[union-attr]
        assert (record.name, len(record.conversation.turns)) == (name, turns)
    with pytest.raises(InvalidRequest, match="no session 99"):
        open_chat(SessionChoice("99"))


def test_a_named_session_begins_with_its_first_turn(
    open_chat: OpenChat, store: SessionStore
) -> None:
    chat = open_chat(SessionChoice("trip"))
    assert "new session 'trip'" in chat.open_and_leave()
    assert stored(store) == {}
    chat.type("one")
    assert stored(store) == {"trip": ["one"]}
    assert "stored as 'trip': localgen chat --continue" in chat.open_and_leave()


def test_the_farewell_names_the_session_unless_it_is_the_latest(open_chat: OpenChat) -> None:
    for prompt in ("what's new?", "hi", "hi"):
        open_chat(NEW).type(prompt)
    by_id = {number: open_chat(SessionChoice(str(number))).open_and_leave() for number in (1, 2, 3)}
    assert "localgen chat --session 'what'\"'\"'s new?'\n" in by_id[1]
    assert "localgen chat --session 2\n" in by_id[2], "the name is that of two"
    assert "localgen chat --continue\n" in by_id[3]


def test_a_session_that_was_only_opened_is_not_written(
    open_chat: OpenChat, store: SessionStore
) -> None:
    turns = (Turn("q", "a"),)
    far = SessionRecord(
        0, "far", "big", "http://far/v1", ctx=64, conversation=Conversation("", turns)
    )
    before = store.create(far)
    chat = open_chat(LATEST)
    listed = store.list_sessions()
    chat.type("/help", "/fork idea", "/switch main")
    chat.open_and_leave()
    assert (store.read(before.id), store.list_sessions()) == (before, listed)
    chat.type("one")
    after = store.read(before.id)
    assert (after.model, after.server_url, after.revision) == ("tiny", "", 1)


def test_a_model_file_is_stored_with_its_folder(
    open_chat: OpenChat, store: SessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chat = open_chat(NEW)
    chat.session.requested_model = "tiny.gguf"
    chat.client.names = ("tiny.gguf", "other")
    chat.type("one")
    assert store.read(1).model == str(tmp_path / "tiny.gguf")


def test_ctrl_c_while_storing_neither_loses_nor_doubles_a_turn(
    open_chat: OpenChat, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = SessionStore.update

    def update_interrupted(opened: SessionStore, record: SessionRecord) -> SessionRecord:
        os.kill(os.getpid(), signal.SIGINT)
        written = update(opened, record)
        os.kill(os.getpid(), signal.SIGINT)
        return written

    chat = open_chat(NEW)
    chat.type("one")
    monkeypatch.setattr(SessionStore, "update", update_interrupted)
    chat.type("two", "three")
    assert stored(store) == {"one": ["one", "two", "three"]}


def test_leaving_stores_what_is_not_stored_yet(
    open_chat: OpenChat, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_recorder: SessionRecorder) -> str:
        raise KeyboardInterrupt

    chat = open_chat(NEW)
    with monkeypatch.context() as patch:
        patch.setattr(SessionRecorder, "save", interrupt)
        chat.type("one")
    assert stored(store) == {}
    assert "stored as 'one': localgen chat --continue" in chat.open_and_leave()
    assert stored(store) == {"one": ["one"]}


def test_a_title_that_was_cut_at_a_space_is_found(open_chat: OpenChat, store: SessionStore) -> None:
    open_chat(NEW).type("a" * 47 + " b")
    assert [*stored(store)] == ["a" * 47]
    store.rename(1, "from before ")
    assert find_session(store, "From before") == find_session(store, "from before ")
    assert find_session(store, "from before") is not None


def test_continue_without_a_session_is_rejected(open_chat: OpenChat) -> None:
    with pytest.raises(InvalidRequest, match="no stored conversation to continue"):
        open_chat(LATEST)


@pytest.mark.parametrize(
    ("choice", "at_terminal", "reason"),
    [
        (SessionChoice("x", is_latest=True), True, "exclude each other"),
        (SessionChoice(" "), True, "give a name"),
        (SessionChoice("x", keeps_history=False), True, "history is off"),
        (SessionChoice(is_latest=True), False, "need a terminal"),
    ],
)
def test_invalid_session_choices_are_rejected(
    choice: SessionChoice, at_terminal: bool, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        choice.validate(at_terminal=at_terminal)


def test_stored_sessions_are_private(open_chat: OpenChat, tmp_path: Path) -> None:
    open_chat(NEW).type("one")
    assert (tmp_path / "sessions.db").stat().st_mode & 0o077 == 0


def test_what_is_continued_is_inert_and_short(open_chat: OpenChat, store: SessionStore) -> None:
    turn = Turn("q\x1b[2J", "long " * 200, stopped=True)
    store.create(SessionRecord(0, "a\x1b]0;x\x07", conversation=Conversation(None, (turn,))))
    screen = open_chat(LATEST).open_and_leave()
    assert "\x1b" not in screen
    assert "\x07" not in screen
    assert "long…\n(stopped)" in screen
    assert len(screen) < 1000
