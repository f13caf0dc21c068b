"""Keeps a chat in the store as it goes."""

from __future__ import annotations

from dataclasses import replace

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import collapse, one_line
from localgen.chat.conversation import SUMMARY_PROMPT
from localgen.chat.fences import without_blocks, without_files
from localgen.chat.session import ChatSession
from localgen.chat.session_store import (
    SessionBusy,
    SessionChanged,
    SessionGone,
    SessionRecord,
    SessionStore,
)
from localgen.chat.stored_sessions import options_to_reopen

_TITLE_CHARS = 48


def title_from_prompt(prompt: str) -> str:
    """The name of a session that the user has not named: the start of its first prompt.

    Files and code blocks are left out, unless there is nothing else.
    """
    typed = collapse(without_blocks(without_files(prompt)))
    return (typed or collapse(prompt))[:_TITLE_CHARS].rstrip()


def create_copy(store: SessionStore, record: SessionRecord) -> SessionRecord:
    """Store a version that another process has overtaken as a session of its own."""
    return store.create(replace(record, name=f"{record.name} (2)", forked_from=record.id))


class SessionRecorder:
    """Stores each branch of a chat as a session, from its first turn on.

    record: the session of the chat's first branch; its id is 0 if it is not stored yet.
    """

    def __init__(self, chat: ChatSession, store: SessionStore, record: SessionRecord) -> None:
        self._chat = chat
        self._store = store
        self._branch = chat.branch
        self._records = {chat.branch: record}
        # the chat when each branch was opened or last stored: what was only opened is not written
        self._known = {chat.branch: self._state()}
        self.failure = ""  # why the last save failed

    @property
    def record(self) -> SessionRecord:
        """The session of the current branch as last stored."""
        return self._records[self._branch]

    @property
    def is_stored(self) -> bool:
        """True if the store has all turns of the current branch."""
        return bool(self.record.id and self.record.conversation.turns) and not self.failure

    def options_to_reopen(self) -> str:
        """Options of `localgen chat` for the current session. Raises LocalgenError."""
        return options_to_reopen(self._store, self.record)

    def start_new(self) -> None:
        """Store the current conversation as a new session; the one before stays as it is."""
        self._records[self._branch] = SessionRecord(0)
        self._known.pop(self._branch, None)

    def save(self) -> str:
        """Save the current branch. Returns a notice for the user, or an empty string.

        A failure is reported once; every later save tries again.
        """
        self._follow_branch()
        try:
            notice = self._save()
        except LocalgenError as error:
            notice = "" if self.failure else f"conversation not stored: {error.message}"
            self.failure = error.message
            return notice
        self.failure = ""
        return notice

    def _follow_branch(self) -> None:
        """Switch to the session of the chat's branch; a new branch is a copy of the one before."""
        source, branch = self.record, self._chat.branch
        if branch not in self._records:
            name = f"{source.name} ({one_line(branch)})" if source.name else ""
            self._records[branch] = replace(
                self._to_record(source), id=0, name=name, forked_from=source.id or None
            )
            self._known[branch] = self._state()
        self._branch = branch

    def _save(self) -> str:
        state, now = self._state(), self._to_record(self.record)
        turns = now.conversation.turns
        if state == self._known.get(self._branch) or not (now.id or turns):
            return ""
        if turns and not now.name:
            first = turns[0]
            text = first.answer if first.prompt == SUMMARY_PROMPT else first.prompt
            now = replace(now, name=title_from_prompt(text))
        stored, notice = self._write(now)
        self._records[self._branch], self._known[self._branch] = stored, state
        return notice

    def _write(self, record: SessionRecord) -> tuple[SessionRecord, str]:
        """Return the stored record, and a notice if another process has changed or deleted it."""
        if not record.id:
            return self._store.create(record), ""
        try:
            return self._store.update(record), ""
        except (SessionChanged, SessionBusy):
            copy = create_copy(self._store, record)
            return copy, (
                f"another localgen has changed {record.name!r}: "
                f"your version continues as {copy.name!r}"
            )
        except SessionGone:
            again = self._store.create(record)
            return again, f"another localgen has deleted {record.name!r}: it is stored again"

    def _state(self) -> SessionRecord:
        """The current state of the chat, without the identity of a session."""
        return self._to_record(SessionRecord(0))

    def _to_record(self, record: SessionRecord) -> SessionRecord:
        """The current state of the chat, as a new version of the record."""
        chat = self._chat
        return replace(
            record,
            model=chat.stored_name,
            server_url=chat.client.url,
            params=chat.options.params,
            ctx=chat.options.ctx,
            conversation=chat.conversation,
        )
