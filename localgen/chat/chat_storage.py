"""Where one chat is stored: the store, and the session that it continues or begins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import collapse
from localgen.chat.session import ChatSession
from localgen.chat.session_choice import SessionChoice
from localgen.chat.session_recorder import SessionRecorder
from localgen.chat.session_store import SessionBusy, SessionRecord, SessionStore
from localgen.chat.stored_sessions import find_session, latest_session, open_store

_NEW_SESSION = SessionRecord(0)


@dataclass(frozen=True, slots=True)
class ChatStorage:
    """store: None: the chat is not stored. record: the session to continue. A new one has the id 0.

    failure: why the chat is not stored. warning: that the session is of another server.
    """

    state_dir: Path
    store: SessionStore | None = None
    record: SessionRecord = _NEW_SESSION
    keeps_history: bool = True
    failure: str = ""
    warning: str = ""

    def recorder(self, chat: ChatSession) -> SessionRecorder | None:
        """Create what stores the chat; None if it is not stored."""
        return None if self.store is None else SessionRecorder(chat, self.store, self.record)


@contextlib.contextmanager
def open_chat_storage(state_dir: Path, choice: SessionChoice) -> Iterator[ChatStorage]:
    """Open the store and the chosen session.

    A new chat continues without storage if the store is unusable. Raises InvalidRequest if there
    is no such session; SessionBusy if another process writes an answer in it; and, for a stored
    session, the errors of open_store().
    """
    if not choice.keeps_history:
        yield ChatStorage(state_dir, keeps_history=False)
        return
    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(open_store(state_dir))
        except LocalgenError as error:
            if choice.is_stored:
                raise
            yield ChatStorage(state_dir, failure=error.message)
            return
        yield ChatStorage(state_dir, store, _read_chosen(store, choice))


def _read_chosen(store: SessionStore, choice: SessionChoice) -> SessionRecord:
    if choice.is_latest:
        record = latest_session(store)
    elif choice.name is not None:
        record = _find_or_begin(store, collapse(choice.name))
    else:
        record = _NEW_SESSION
    if record.unfinished_turn is not None:
        raise SessionBusy(f"another localgen is answering in {record.name}: wait for it")
    return record


def _find_or_begin(store: SessionStore, name: str) -> SessionRecord:
    found = find_session(store, name)
    if found is not None:
        return store.read(found.id)
    if name.isdecimal():
        raise InvalidRequest(f"no session {name}: localgen history lists them")
    return SessionRecord(0, name)
