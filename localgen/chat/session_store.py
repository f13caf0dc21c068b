"""The database of sessions, which several processes may use at once."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.typed_data import decode_json
from localgen.chat.conversation import Conversation, ToolStep, Turn
from localgen.chat.database import SESSIONS_SCHEMA, Database, StoreFailed, WriterLock

INTERRUPTED_SUMMARY = "interrupted: the program ended"
_DELETED_RETENTION_S = 30 * 86_400.0
_EMPTY_CONVERSATION = Conversation()


class SessionGone(InvalidRequest):
    """The session was deleted."""


class SessionChanged(InvalidRequest):
    """Another process has changed the session since it was read: read it again."""


class SessionBusy(InvalidRequest):
    """An answer is being written in the session."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as read from the database.

    model: name given by the user, or None for the default model. server_url: URL of the remote
    server, or empty for the local server. unfinished_turn: the turn being written; it is not part
    of the conversation yet. forked_from: id of the session it was copied from, which may be
    deleted.
    """

    id: int
    name: str = ""
    model: str | None = None
    server_url: str = ""
    params: SamplingParams = SamplingParams()
    ctx: int | None = None
    conversation: Conversation = _EMPTY_CONVERSATION
    revision: int = 0
    unfinished_turn: Turn | None = None
    forked_from: int | None = None


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session in a list. is_generating: an answer is being written in it.

    depth: in the tree of forks, 0 for one that is no fork of a listed session.
    """

    id: int
    name: str
    model: str | None
    num_turns: int
    changed_s: float
    is_generating: bool
    forked_from: int | None = None
    depth: int = 0


class SessionStore:
    """The sessions in the database at a path. writer: lock of this process. clock: Unix time.

    Methods raise SessionGone, SessionChanged, SessionBusy and the errors of Database; nothing has
    changed then. Thread-safe.
    """

    def __init__(
        self, path: Path, writer: WriterLock, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = Database(path, SESSIONS_SCHEMA)
        self._writer = writer
        self._clock = clock
        with self._database.write_transaction() as sqlite:
            _close_interrupted_turns(sqlite, writer)
            sqlite.execute(
                "DELETE FROM sessions WHERE deleted_s < ?", (clock() - _DELETED_RETENTION_S,)
            )

    def close(self) -> None:
        self._database.close()

    def data_version(self) -> int:
        """A number that changes when another process has written."""
        return self._database.data_version()

    def list_sessions(self) -> list[SessionSummary]:
        """Return all sessions, most recently changed first."""
        with self._database.read_transaction() as sqlite:
            rows = sqlite.execute(
                "SELECT id, name, model, COUNT(place), changed_s, MAX(writer), forked_from "
                "FROM sessions LEFT JOIN turns ON session = id WHERE deleted_s IS NULL "
                "GROUP BY id ORDER BY changed_s DESC, id DESC"
            )
            return [
                SessionSummary(
                    session,
                    name,
                    model,
                    turns,
                    changed_s,
                    self._is_generating(writer),
                    forked_from,
                )
                for session, name, model, turns, changed_s, writer, forked_from in rows
            ]

    def read(self, session_id: int) -> SessionRecord:
        """Read a session. Unfinished turns of killed processes are closed first."""
        with self._database.write_transaction() as sqlite:
            _close_interrupted_turns(sqlite, self._writer)
            return _read_session(sqlite, session_id)

    def create(self, record: SessionRecord) -> SessionRecord:
        """Insert a session and return it with its new id and revision 0."""
        with self._database.write_transaction() as sqlite:
            made = sqlite.execute(
                "INSERT INTO sessions (name, params, changed_s) VALUES ('', '{}', ?)",
                (self._clock(),),
            )
            assert made.lastrowid is not None
            new = replace(record, id=made.lastrowid, revision=0, unfinished_turn=None)
            return self._write_session(sqlite, new, Conversation())

    def update(self, record: SessionRecord) -> SessionRecord:
        """Replace the session. Raises SessionChanged if the revision is not the current one."""
        with self._database.write_transaction() as sqlite:
            before = self._require_same_revision(sqlite, record)
            new = replace(record, revision=record.revision + 1)
            return self._write_session(sqlite, new, before.conversation)

    def rename(self, session_id: int, name: str) -> None:
        """Rename a session; the revision stays, so writes of other processes remain valid."""
        with self._database.write_transaction() as sqlite:
            _require_exists(sqlite, session_id)
            sqlite.execute(
                "UPDATE sessions SET name = ? WHERE id = ?", (_replace_surrogates(name), session_id)
            )

    def begin_turn(self, record: SessionRecord, prompt: str) -> SessionRecord:
        """Append an unfinished turn for a prompt; update_turn() and finish_turn() complete it."""
        with self._database.write_transaction() as sqlite:
            before = self._require_same_revision(sqlite, record)
            place, turn = len(record.conversation.turns), Turn(prompt, "", stopped=True)
            new = replace(record, revision=record.revision + 1)
            updated = self._write_session(sqlite, new, before.conversation)
            _insert_turn(sqlite, record.id, place, turn, self._writer.name)
            return updated

    def update_turn(self, record: SessionRecord, turn: Turn) -> None:
        """Save the partial answer of the unfinished turn."""
        with self._database.write_transaction() as sqlite:
            self._write_turn(sqlite, record, turn, self._writer.name)

    def finish_turn(self, record: SessionRecord, turn: Turn) -> SessionRecord:
        """Save the final answer and append the turn to the conversation."""
        with self._database.write_transaction() as sqlite:
            self._write_turn(sqlite, record, turn, None)
            new = replace(
                record,
                conversation=record.conversation.with_turn(turn),
                revision=record.revision + 1,
            )
            return self._write_fields(sqlite, new)

    def delete(self, session_id: int) -> None:
        """Mark a session as deleted; restore() works for 30 days."""
        with self._database.write_transaction() as sqlite:
            _require_exists(sqlite, session_id)
            self._require_not_generating(sqlite, session_id)
            sqlite.execute(
                "UPDATE sessions SET deleted_s = ? WHERE id = ?", (self._clock(), session_id)
            )

    def restore(self, session_id: int) -> None:
        with self._database.write_transaction() as sqlite:
            sqlite.execute("UPDATE sessions SET deleted_s = NULL WHERE id = ?", (session_id,))
            _require_exists(sqlite, session_id)

    def load_unsent_prompt(self, session_id: int) -> str:
        """Return the unsent prompt of this process, or take over that of an ended process."""
        with self._database.write_transaction() as sqlite:
            rows = sqlite.execute(
                "SELECT writer, text FROM drafts WHERE session = ? ORDER BY rowid DESC",
                (session_id,),
            ).fetchall()
            free = [text for writer, text in rows if not self._is_other_program(writer)]
            if not free:
                return ""
            gone = [
                (session_id, writer) for writer, _ in rows if not self._is_other_program(writer)
            ]
            sqlite.executemany("DELETE FROM drafts WHERE session = ? AND writer = ?", gone)
            self._write_unsent_prompt(sqlite, session_id, free[0])
            return str(free[0])

    def save_unsent_prompt(self, session_id: int, text: str) -> None:
        """Save the unsent prompt of this process; empty text deletes it."""
        with self._database.write_transaction() as sqlite:
            _require_exists(sqlite, session_id)
            self._write_unsent_prompt(sqlite, session_id, text)

    def recent_prompts(self, limit: int) -> list[str]:
        """Return the last prompts of all sessions without duplicates, oldest first."""
        with self._database.read_transaction() as sqlite:
            rows = sqlite.execute(
                "SELECT prompt FROM turns ORDER BY turns.rowid DESC LIMIT ?", (limit,)
            )
            return list(dict.fromkeys(row[0] for row in rows))[::-1]

    def turns(self, session_id: int) -> list[Turn]:
        """Return the turns of a session, unfinished ones included."""
        with self._database.read_transaction() as sqlite:
            rows = sqlite.execute(
                "SELECT prompt, answer, stopped, reasoning, served, steps "
                "FROM turns WHERE session = ? ORDER BY place",
                (session_id,),
            )
            return [_turn_from_row(row) for row in rows]

    def _is_generating(self, writer: str | None) -> bool:
        """True if the writer of an unfinished turn is still running."""
        return writer is not None and self._writer.is_alive(writer)

    def _is_other_program(self, writer: str) -> bool:
        return writer != self._writer.name and self._writer.is_alive(writer)

    def _write_unsent_prompt(self, sqlite: sqlite3.Connection, session_id: int, text: str) -> None:
        mine = (session_id, self._writer.name)
        sqlite.execute("DELETE FROM drafts WHERE session = ? AND writer = ?", mine)
        if text:
            sqlite.execute(
                "INSERT INTO drafts VALUES (?, ?, ?)", (*mine, _replace_surrogates(text))
            )

    def _require_same_revision(
        self, sqlite: sqlite3.Connection, record: SessionRecord
    ) -> SessionRecord:
        self._require_not_generating(sqlite, record.id)
        found = _read_session(sqlite, record.id)
        if found.revision != record.revision:
            raise SessionChanged(
                f"{record.name or 'the session'} was changed by another localgen: "
                "review it, then try again"
            )
        return found

    def _require_not_generating(self, sqlite: sqlite3.Connection, session_id: int) -> None:
        writers = sqlite.execute(
            "SELECT writer FROM turns WHERE session = ? AND writer IS NOT NULL", (session_id,)
        )
        if any(self._writer.is_alive(writer) for (writer,) in writers):
            raise SessionBusy("an answer is being written in this session: wait for it, or stop it")

    def _write_turn(
        self, sqlite: sqlite3.Connection, record: SessionRecord, turn: Turn, writer: str | None
    ) -> None:
        done = sqlite.execute(
            "UPDATE turns SET answer = ?, reasoning = ?, stopped = ?, served = ?, steps = ?, "
            "writer = ? "
            "WHERE session = ? AND place = ? AND writer = ?",
            (
                *(
                    _replace_surrogates(turn.answer),
                    _replace_surrogates(turn.reasoning),
                    turn.stopped,
                    _replace_surrogates(turn.summary),
                    _encode_steps(turn.steps),
                ),
                writer,
                *(record.id, len(record.conversation.turns), self._writer.name),
            ),
        )
        if done.rowcount != 1:
            raise SessionGone(f"{record.name or 'the session'} is gone, its answer was not saved")

    def _write_session(
        self, sqlite: sqlite3.Connection, record: SessionRecord, before: Conversation
    ) -> SessionRecord:
        """Write the session and the turns that differ from `before`."""
        same = _num_common_turns(before.turns, record.conversation.turns)
        sqlite.execute("DELETE FROM turns WHERE session = ? AND place >= ?", (record.id, same))
        for place, turn in enumerate(record.conversation.turns[same:], same):
            _insert_turn(sqlite, record.id, place, turn, None)
        return self._write_fields(sqlite, record)

    def _write_fields(self, sqlite: sqlite3.Connection, record: SessionRecord) -> SessionRecord:
        """Write all fields except the turns and return the stored record.

        An existing name is kept: only rename() changes it.
        """
        system = record.conversation.system
        sqlite.execute(
            "UPDATE sessions SET name = CASE name WHEN '' THEN ? ELSE name END, model = ?, "
            "server = ?, system = ?, params = ?, ctx = ?, forked_from = ?, revision = ?, "
            "changed_s = ? "
            "WHERE id = ?",
            (
                *(_replace_surrogates(record.name), record.model, record.server_url),
                None if system is None else _replace_surrogates(system),
                msgspec.json.encode(record.params).decode(),
                *(record.ctx, record.forked_from, record.revision, self._clock(), record.id),
            ),
        )
        named = sqlite.execute("SELECT name FROM sessions WHERE id = ?", (record.id,))
        return replace(record, name=named.fetchone()[0])


def _read_session(sqlite: sqlite3.Connection, session_id: int) -> SessionRecord:
    _require_exists(sqlite, session_id)
    name, model, server, system, params, ctx, revision, forked_from = sqlite.execute(
        "SELECT name, model, server, system, params, ctx, revision, forked_from FROM sessions "
        "WHERE id = ?",
        (session_id,),
    ).fetchone()
    rows = sqlite.execute(
        "SELECT prompt, answer, stopped, reasoning, served, steps, writer FROM turns "
        "WHERE session = ? ORDER BY place",
        (session_id,),
    ).fetchall()
    whole = tuple(_turn_from_row(row) for row in rows if row[6] is None)
    growing = next((_turn_from_row(row) for row in rows if row[6] is not None), None)
    conversation = Conversation(system, whole)
    return SessionRecord(
        session_id,
        name,
        model,
        server,
        _decode_params(params),
        ctx,
        conversation,
        revision,
        growing,
        forked_from,
    )


def _decode_params(text: str) -> SamplingParams:
    try:
        return decode_json(text, SamplingParams)
    except msgspec.MsgspecError as error:
        raise StoreFailed(f"cannot read the parameters of a session: {error}") from error


def _turn_from_row(row: Sequence[str]) -> Turn:
    return Turn(row[0], row[1], bool(row[2]), row[3], row[4], _decode_steps(row[5]))


def _encode_steps(steps: tuple[ToolStep, ...]) -> str:
    if not steps:
        return ""
    return _replace_surrogates(json.dumps([asdict(step) for step in steps], ensure_ascii=False))


def _decode_steps(text: str) -> tuple[ToolStep, ...]:
    try:
        return decode_json(text, tuple[ToolStep, ...]) if text else ()
    except msgspec.MsgspecError as error:
        raise StoreFailed(f"cannot read the tool calls of a session: {error}") from error


def _num_common_turns(before: tuple[Turn, ...], after: tuple[Turn, ...]) -> int:
    """Number of leading turns that are equal."""
    pairs = zip(before, after, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(len(before), len(after))
    )


def _insert_turn(
    sqlite: sqlite3.Connection, session_id: int, place: int, turn: Turn, writer: str | None
) -> None:
    texts = (
        _replace_surrogates(turn.prompt),
        _replace_surrogates(turn.answer),
        _replace_surrogates(turn.reasoning),
    )
    sqlite.execute(
        "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(session_id, place, *texts, turn.stopped, _replace_surrogates(turn.summary), writer),
            _encode_steps(turn.steps),
        ),
    )


def _require_exists(sqlite: sqlite3.Connection, session_id: int) -> None:
    found = sqlite.execute("SELECT deleted_s FROM sessions WHERE id = ?", (session_id,)).fetchone()
    if found is None or found[0] is not None:
        raise SessionGone("the session was deleted")


def _close_interrupted_turns(sqlite: sqlite3.Connection, writer: WriterLock) -> None:
    """Mark the unfinished turns of killed processes as stopped."""
    rows = sqlite.execute("SELECT DISTINCT writer FROM turns WHERE writer IS NOT NULL").fetchall()
    dead = [name for (name,) in rows if not writer.is_alive(name)]
    for name in dead:
        # new revision: readers that have not seen this turn must not overwrite it
        sqlite.execute(
            "UPDATE sessions SET revision = revision + 1 "
            "WHERE id IN (SELECT session FROM turns WHERE writer = ?)",
            (name,),
        )
        sqlite.execute(
            "UPDATE turns SET writer = NULL, stopped = 1, served = ? WHERE writer = ?",
            (INTERRUPTED_SUMMARY, name),
        )


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
