"""The sessions of the tui in a file that several programs may have open."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import SamplingParams
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.database import Database, StoreFailed, Writer

BROKEN_OFF = "broken off: the program ended"
_KEPT_DELETED_S = 30 * 86_400.0
_NOTHING_SAID = Conversation()

_SCHEMA = (
    """
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL,
        model TEXT,
        system TEXT,
        params TEXT NOT NULL,
        ctx INTEGER,
        revision INTEGER NOT NULL DEFAULT 0,
        changed_s REAL NOT NULL,
        deleted_s REAL
    );
    CREATE TABLE turns (
        session INTEGER NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        prompt TEXT NOT NULL,
        answer TEXT NOT NULL,
        reasoning TEXT NOT NULL,
        stopped INTEGER NOT NULL,
        served TEXT NOT NULL,
        writer TEXT,
        PRIMARY KEY (session, place)
    );
    CREATE TABLE drafts (
        session INTEGER NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
        writer TEXT NOT NULL,
        text TEXT NOT NULL,
        PRIMARY KEY (session, writer)
    )
    """,
    "ALTER TABLE sessions ADD COLUMN server TEXT NOT NULL DEFAULT ''",
)


class SessionGone(InvalidRequest):
    """The session was deleted."""


class SessionChanged(InvalidRequest):
    """Another program has changed the session since it was read: read it again."""


class SessionBusy(InvalidRequest):
    """Another program writes an answer in the session."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A session as it was read. model: as the user calls it; None: the built-in one.

    server: the URL of the one whose model it is; empty: ours.
    growing: the turn that another program is writing; it is not part of the conversation yet.
    """

    id: int
    name: str = ""
    model: str | None = None
    server: str = ""
    params: SamplingParams = SamplingParams()
    ctx: int | None = None
    conversation: Conversation = _NOTHING_SAID
    revision: int = 0
    growing: Turn | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """A session in a list. is_growing: some program writes an answer in it."""

    id: int
    name: str
    model: str | None
    turns: int
    changed_s: float
    is_growing: bool


class Sessions:
    """The file at a path. writer: this program. now: Unix time.

    Methods raise SessionGone, SessionChanged and SessionBusy, and what Database does; then nothing
    has changed. They may be called from any thread.
    """

    def __init__(self, path: Path, writer: Writer, now: Callable[[], float] = time.time) -> None:
        self._database = Database(path, _SCHEMA)
        self._writer = writer
        self._now = now
        with self._database.writing() as sqlite:
            _close_broken(sqlite, writer)
            sqlite.execute("DELETE FROM sessions WHERE deleted_s < ?", (now() - _KEPT_DELETED_S,))

    def close(self) -> None:
        self._database.close()

    def changes(self) -> int:
        """A number that is another one after another program has written."""
        return self._database.changes()

    def all(self) -> list[Listed]:
        """All of them, the latest change first."""
        with self._database.reading() as sqlite:
            rows = sqlite.execute(
                "SELECT id, name, model, COUNT(place), changed_s, MAX(writer) "
                "FROM sessions LEFT JOIN turns ON session = id WHERE deleted_s IS NULL "
                "GROUP BY id ORDER BY changed_s DESC, id DESC"
            )
            return [
                Listed(session, name, model, turns, changed_s, self._grows(writer))
                for session, name, model, turns, changed_s, writer in rows
            ]

    def read(self, session: int) -> Kept:
        """A session; a turn whose program was killed in mid-answer is closed as it stands."""
        with self._database.writing() as sqlite:
            _close_broken(sqlite, self._writer)
            return _read(sqlite, session)

    def create(self, kept: Kept) -> Kept:
        """A new session of these contents; its id and revision are new."""
        with self._database.writing() as sqlite:
            made = sqlite.execute(
                "INSERT INTO sessions (name, params, changed_s) VALUES ('', '{}', ?)",
                (self._now(),),
            )
            assert made.lastrowid is not None
            new = replace(kept, id=made.lastrowid, revision=0, growing=None)
            return self._write(sqlite, new, Conversation())

    def change(self, kept: Kept) -> Kept:
        """Put other contents in place of those that were read as this revision."""
        with self._database.writing() as sqlite:
            before = self._require_same(sqlite, kept)
            new = replace(kept, revision=kept.revision + 1)
            return self._write(sqlite, new, before.conversation)

    def rename(self, session: int, name: str) -> None:
        """Other programs take the name over with the next thing they write."""
        with self._database.writing() as sqlite:
            _require_there(sqlite, session)
            sqlite.execute("UPDATE sessions SET name = ? WHERE id = ?", (_plain(name), session))

    def begin(self, kept: Kept, prompt: str) -> Kept:
        """Ask a prompt: a turn without an answer, which grow() and end() fill."""
        with self._database.writing() as sqlite:
            before = self._require_same(sqlite, kept)
            place, turn = len(kept.conversation.turns), Turn(prompt, "", stopped=True)
            new = replace(kept, revision=kept.revision + 1)
            begun = self._write(sqlite, new, before.conversation)
            _insert(sqlite, kept.id, place, turn, self._writer.name)
            return begun

    def grow(self, kept: Kept, turn: Turn) -> None:
        """What there is of the answer by now."""
        with self._database.writing() as sqlite:
            self._fill(sqlite, kept, turn, self._writer.name)

    def end(self, kept: Kept, turn: Turn) -> Kept:
        """The turn that was begun is this one."""
        with self._database.writing() as sqlite:
            self._fill(sqlite, kept, turn, None)
            new = replace(
                kept,
                conversation=kept.conversation.with_turn(turn),
                revision=kept.revision + 1,
            )
            return self._touch(sqlite, new)

    def delete(self, session: int) -> None:
        """Out of the list; restore() brings it back within a month."""
        with self._database.writing() as sqlite:
            _require_there(sqlite, session)
            self._require_quiet(sqlite, session)
            sqlite.execute("UPDATE sessions SET deleted_s = ? WHERE id = ?", (self._now(), session))

    def restore(self, session: int) -> None:
        with self._database.writing() as sqlite:
            sqlite.execute("UPDATE sessions SET deleted_s = NULL WHERE id = ?", (session,))
            _require_there(sqlite, session)

    def draft(self, session: int) -> str:
        """What was typed and not sent: by this program, or by one that has ended."""
        with self._database.writing() as sqlite:
            rows = sqlite.execute(
                "SELECT writer, text FROM drafts WHERE session = ? ORDER BY rowid DESC", (session,)
            ).fetchall()
            free = [text for writer, text in rows if not self._is_elsewhere(writer)]
            if not free:
                return ""
            gone = [(session, writer) for writer, _ in rows if not self._is_elsewhere(writer)]
            sqlite.executemany("DELETE FROM drafts WHERE session = ? AND writer = ?", gone)
            self._keep_draft(sqlite, session, free[0])
            return str(free[0])

    def keep_draft(self, session: int, text: str) -> None:
        """What is typed and not sent; the empty text: nothing."""
        with self._database.writing() as sqlite:
            _require_there(sqlite, session)
            self._keep_draft(sqlite, session, text)

    def prompts(self, most: int) -> list[str]:
        """What was asked lately in any session, the oldest first."""
        with self._database.reading() as sqlite:
            rows = sqlite.execute(
                "SELECT prompt FROM turns ORDER BY turns.rowid DESC LIMIT ?", (most,)
            )
            return list(dict.fromkeys(row[0] for row in rows))[::-1]

    def turns(self, session: int) -> list[Turn]:
        """What was said in a session, as far as it is there."""
        with self._database.reading() as sqlite:
            rows = sqlite.execute(
                "SELECT prompt, answer, stopped, reasoning, served "
                "FROM turns WHERE session = ? ORDER BY place",
                (session,),
            )
            return [_turn(row) for row in rows]

    def _grows(self, writer: str | None) -> bool:
        """Whether the writer of a turn that is not whole still runs."""
        return writer is not None and self._writer.is_alive(writer)

    def _is_elsewhere(self, writer: str) -> bool:
        return writer != self._writer.name and self._writer.is_alive(writer)

    def _keep_draft(self, sqlite: sqlite3.Connection, session: int, text: str) -> None:
        mine = (session, self._writer.name)
        sqlite.execute("DELETE FROM drafts WHERE session = ? AND writer = ?", mine)
        if text:
            sqlite.execute("INSERT INTO drafts VALUES (?, ?, ?)", (*mine, _plain(text)))

    def _require_same(self, sqlite: sqlite3.Connection, kept: Kept) -> Kept:
        self._require_quiet(sqlite, kept.id)
        found = _read(sqlite, kept.id)
        if found.revision != kept.revision:
            raise SessionChanged(
                f"{kept.name or 'the session'} was changed by another localgen tui: "
                "look at it, then do it again"
            )
        return found

    def _require_quiet(self, sqlite: sqlite3.Connection, session: int) -> None:
        writers = sqlite.execute(
            "SELECT writer FROM turns WHERE session = ? AND writer IS NOT NULL", (session,)
        )
        if any(self._writer.is_alive(writer) for (writer,) in writers):
            raise SessionBusy("an answer is being written in this session: wait for it, or stop it")

    def _fill(self, sqlite: sqlite3.Connection, kept: Kept, turn: Turn, writer: str | None) -> None:
        done = sqlite.execute(
            "UPDATE turns SET answer = ?, reasoning = ?, stopped = ?, served = ?, writer = ? "
            "WHERE session = ? AND place = ? AND writer = ?",
            (
                *(_plain(turn.answer), _plain(turn.reasoning), turn.stopped, _plain(turn.served)),
                writer,
                *(kept.id, len(kept.conversation.turns), self._writer.name),
            ),
        )
        if done.rowcount != 1:
            raise SessionGone(f"{kept.name or 'the session'} is gone, its answer was not kept")

    def _write(self, sqlite: sqlite3.Connection, kept: Kept, before: Conversation) -> Kept:
        """kept instead of what was there before; turns that stay are not written again."""
        same = _same_turns(before.turns, kept.conversation.turns)
        sqlite.execute("DELETE FROM turns WHERE session = ? AND place >= ?", (kept.id, same))
        for place, turn in enumerate(kept.conversation.turns[same:], same):
            _insert(sqlite, kept.id, place, turn, None)
        return self._touch(sqlite, kept)

    def _touch(self, sqlite: sqlite3.Connection, kept: Kept) -> Kept:
        """Write all but the turns; what is there then. A name, once given, is rename()'s alone."""
        system = kept.conversation.system
        sqlite.execute(
            "UPDATE sessions SET name = CASE name WHEN '' THEN ? ELSE name END, model = ?, "
            "server = ?, system = ?, params = ?, ctx = ?, revision = ?, changed_s = ? "
            "WHERE id = ?",
            (
                *(_plain(kept.name), kept.model, kept.server),
                None if system is None else _plain(system),
                msgspec.json.encode(kept.params).decode(),
                *(kept.ctx, kept.revision, self._now(), kept.id),
            ),
        )
        named = sqlite.execute("SELECT name FROM sessions WHERE id = ?", (kept.id,))
        return replace(kept, name=named.fetchone()[0])


def _read(sqlite: sqlite3.Connection, session: int) -> Kept:
    _require_there(sqlite, session)
    name, model, server, system, params, ctx, revision = sqlite.execute(
        "SELECT name, model, server, system, params, ctx, revision FROM sessions WHERE id = ?",
        (session,),
    ).fetchone()
    rows = sqlite.execute(
        "SELECT prompt, answer, stopped, reasoning, served, writer FROM turns "
        "WHERE session = ? ORDER BY place",
        (session,),
    ).fetchall()
    whole = tuple(_turn(row) for row in rows if row[5] is None)
    growing = next((_turn(row) for row in rows if row[5] is not None), None)
    said = Conversation(system, whole)
    return Kept(session, name, model, server, _params(params), ctx, said, revision, growing)


def _params(text: str) -> SamplingParams:
    try:
        return msgspec.json.decode(text, type=SamplingParams)
    except msgspec.MsgspecError as error:
        raise StoreFailed(f"the settings of a session cannot be read: {error}") from error


def _turn(row: Sequence[str]) -> Turn:
    return Turn(row[0], row[1], bool(row[2]), row[3], row[4])


def _same_turns(before: tuple[Turn, ...], after: tuple[Turn, ...]) -> int:
    """How many of the first turns are the same."""
    pairs = zip(before, after, strict=False)
    return next(
        (at for at, (one, other) in enumerate(pairs) if one != other), min(len(before), len(after))
    )


def _insert(
    sqlite: sqlite3.Connection, session: int, place: int, turn: Turn, writer: str | None
) -> None:
    texts = (_plain(turn.prompt), _plain(turn.answer), _plain(turn.reasoning))
    sqlite.execute(
        "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (session, place, *texts, turn.stopped, _plain(turn.served), writer),
    )


def _require_there(sqlite: sqlite3.Connection, session: int) -> None:
    found = sqlite.execute("SELECT deleted_s FROM sessions WHERE id = ?", (session,)).fetchone()
    if found is None or found[0] is not None:
        raise SessionGone("the session was deleted")


def _close_broken(sqlite: sqlite3.Connection, writer: Writer) -> None:
    """Turns whose program was killed stay as far as they got."""
    rows = sqlite.execute("SELECT DISTINCT writer FROM turns WHERE writer IS NOT NULL").fetchall()
    dead = [name for (name,) in rows if not writer.is_alive(name)]
    for name in dead:
        # whoever has read the session without this turn must not write over it
        sqlite.execute(
            "UPDATE sessions SET revision = revision + 1 "
            "WHERE id IN (SELECT session FROM turns WHERE writer = ?)",
            (name,),
        )
        sqlite.execute(
            "UPDATE turns SET writer = NULL, stopped = 1, served = ? WHERE writer = ?",
            (BROKEN_OFF, name),
        )


def _plain(text: str) -> str:
    """The text as UTF-8 can have it: lone surrogates become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
