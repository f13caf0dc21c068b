"""The sessions of the app: stored and open ones."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import collapse, escape_name
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.session_store import SessionGone, SessionRecord, SessionSummary
from localgen.chat.session_tree import in_tree_order
from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.chat.app_context import AppContext
from localgen.tui.chat.compare import CompareVariant, variant_records

_EXCERPT_CHARS = 40
MAX_HITS = 200


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A search result. turn_index: the matching turn, or None for the session's name."""

    session_id: int
    name: str
    turn_index: int | None
    excerpt: str


class SessionManager:
    """Owns the open sessions. Methods may be called from any thread, and block."""

    def __init__(self, context: AppContext) -> None:
        self.context = context
        self.summaries: list[SessionSummary] = []
        self._active_sessions: list[ActiveSession] = []
        self._open_lock = threading.Lock()
        self._data_version = -1
        self.reload_summaries()

    @property
    def active_by_id(self) -> dict[int, ActiveSession]:
        """Open sessions by id. An id can change when a conflicting session is saved as a copy."""
        return {each.id: each for each in tuple(self._active_sessions)}

    @property
    def answering_sessions(self) -> list[ActiveSession]:
        """Sessions with an answer in progress."""
        return [each for each in tuple(self._active_sessions) if each.answer_stream is not None]

    @property
    def busy_sessions(self) -> list[ActiveSession]:
        """Sessions with a command or a model load in progress."""
        return [each for each in tuple(self._active_sessions) if each.running_command]

    @property
    def unsaved_sessions(self) -> list[ActiveSession]:
        """Sessions whose last save failed."""
        return [each for each in tuple(self._active_sessions) if each.save_error]

    def reload_summaries(self) -> None:
        """Read the session list from the store again; forks are below their source."""
        self.summaries = in_tree_order(self.context.store.list_sessions())

    def open_empty(self) -> ActiveSession:
        """Return an empty session with the app's settings, creating one if there is none."""
        options = self.context.options
        blank = SessionRecord(
            0,
            model=self.context.model,
            server_url=self.context.server_url,
            params=options.params,
            ctx=options.ctx,
            conversation=Conversation(options.system),
        )
        for listed in self.summaries:
            if listed.num_turns or listed.name or listed.is_generating:
                continue
            found = self.get(listed.id)
            if found.to_record() == replace(blank, id=found.id, revision=found.record.revision):
                return found
        return self._create(blank)

    def get(self, session_id: int) -> ActiveSession:
        """Return a session by id, opening it if necessary. Raises SessionGone."""
        with self._open_lock:
            found = self.active_by_id.get(session_id)
            if found is None:
                found = ActiveSession(self.context.store.read(session_id), self.context)
                self._active_sessions.append(found)
            return found

    def fork(self, source: ActiveSession, name: str = "") -> ActiveSession:
        """Create a copy of a session."""
        called = name or self._unique_name(source.name)
        return self._create(
            replace(source.to_record(), name=called, unfinished_turn=None, forked_from=source.id)
        )

    def keep_copy(self, active: ActiveSession, record: SessionRecord) -> None:
        """Store an earlier state of a session as a fork of it, without opening it."""
        name = self._unique_name(active.name)
        self.context.store.create(
            replace(record, name=name, unfinished_turn=None, forked_from=active.id)
        )
        self.reload_summaries()

    def fork_before(self, source: ActiveSession, turn_index: int) -> ActiveSession:
        """Create a copy of a session that ends before a turn."""
        record = source.to_record()
        turns = record.conversation.turns[:turn_index]
        return self._create(
            replace(
                record,
                name=self._unique_name(source.name),
                conversation=replace(record.conversation, turns=turns),
                unfinished_turn=None,
                forked_from=source.id,
            )
        )

    def compare(self, source: ActiveSession, variants: list[CompareVariant]) -> list[ActiveSession]:
        """Create a session per variant, each continuing the source's conversation without tools."""
        base = replace(
            source.to_record(), server_url=self.context.server_url, forked_from=source.id
        )
        made = [self._create(kept) for kept in variant_records(base, variants)]
        for each in made:  # the comparison has no place for questions about calls
            each.chat.tools = self.context.tools.without_servers()
        return made

    def undo_command(
        self, active: ActiveSession, before: SessionRecord, after: SessionRecord
    ) -> ActiveSession:
        """Revert a command; if the conversation has changed since, in a new session."""
        if active.id in self.active_by_id and active.undo_command(before, after):
            return active
        return self._create(
            replace(
                before,
                name=self._unique_name(active.name),
                unfinished_turn=None,
                forked_from=active.id,
            )
        )

    def rename(self, session_id: int, name: str) -> None:
        """Rename a session. Raises InvalidRequest if the name is empty."""
        name = collapse(name)
        if not name:
            raise InvalidRequest("a session needs a name")
        found = self.active_by_id.get(session_id)
        if found is not None:
            found.rename(name)
        else:
            self.context.store.rename(session_id, name)
        self.reload_summaries()

    def delete(self, session_id: int) -> None:
        """Delete a session; restore() undoes it. Raises InvalidRequest while it is in use."""
        found = self.active_by_id.get(session_id)
        if found is not None and (found.answer_stream is not None or found.running_command):
            raise InvalidRequest("an answer is being written in it: stop it first")
        self.context.store.delete(session_id)
        if found is not None:
            self._drop(found)
            found.chat.client.close()
        self.reload_summaries()

    def restore(self, session_id: int) -> None:
        self.context.store.restore(session_id)
        self.reload_summaries()

    def finalize_answers(self) -> list[ActiveSession]:
        """Add answers that have ended to their conversations; returns those sessions."""
        done = [each for each in self.answering_sessions if not each.is_answering]
        for each in done:
            each.finalize_answer()
        if done:
            self.reload_summaries()
        return done

    def sync_store(self) -> bool:
        """Save changes and load those made by other processes; False if there were none of those.

        Called about once a second, which bounds what a killed process loses.
        """
        for each in tuple(self._active_sessions):
            each.save()
        changes = self.context.store.data_version()
        listed = {each.id for each in self.summaries}
        if (
            changes == self._data_version
            and self.active_by_id.keys() <= listed
            # a killed process leaves its session marked as generating without a change
            and not any(each.is_generating for each in self.summaries)
        ):
            return False
        self._data_version = changes
        self.reload_summaries()
        for each in tuple(self._active_sessions):
            try:
                each.refresh()
            except SessionGone:
                self._drop(each)
        return True

    @contextlib.contextmanager
    def syncing_in_background(self, interval_s: float) -> Iterator[None]:
        """Keep saving from a background thread while the caller blocks."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(interval_s):
                with contextlib.suppress(LocalgenError):
                    self.finalize_answers()
                    self.sync_store()

        thread = threading.Thread(target=run, name="keep", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def drain_messages(self) -> list[tuple[ActiveSession, str]]:
        """Return and clear the pending notices of all sessions."""
        heard = []
        for each in tuple(self._active_sessions):
            while each.messages:
                heard.append((each, each.messages.popleft()))
        return heard

    def search(
        self, text: str, is_cancelled: Callable[[], bool] = lambda: False
    ) -> list[SearchHit]:
        """Find a text in names, prompts and answers, ignoring case.

        is_cancelled: returns true once the result is no longer needed.
        """
        wanted = text.casefold().strip()
        if not wanted:
            return []
        hits = [
            SearchHit(listed.id, listed.name, None, escape_name(listed.name))
            for listed in self.summaries
            if wanted in listed.name.casefold()
        ]
        # read one session at a time, so that writers are not blocked for long
        for listed in self.summaries:
            if len(hits) >= MAX_HITS or is_cancelled():
                break
            for place, turn in enumerate(self.context.store.turns(listed.id)):
                excerpt = _excerpt(turn, wanted)
                if excerpt is not None:
                    hits.append(SearchHit(listed.id, listed.name, place, excerpt))
        return hits[:MAX_HITS]

    def close(self) -> None:
        """Stop all work, save and close all sessions."""
        for each in tuple(self._active_sessions):
            each.stop()
        for each in tuple(self._active_sessions):
            try:
                each.close()
            except LocalgenError:
                continue  # shown to the user before

    def _drop(self, active: ActiveSession) -> None:
        with contextlib.suppress(ValueError):  # another thread has removed it
            self._active_sessions.remove(active)

    def _create(self, record: SessionRecord) -> ActiveSession:
        made = ActiveSession(self.context.store.create(record), self.context)
        self._active_sessions.append(made)
        self.reload_summaries()
        return made

    def _unique_name(self, name: str) -> str:
        taken = {listed.name for listed in self.summaries}
        base, number = re.sub(r" \(\d+\)$", "", name), 2
        while f"{base} ({number})" in taken:
            number += 1
        return f"{base} ({number})"


def _excerpt(turn: Turn, query: str) -> str | None:
    for text in (turn.prompt, turn.answer):
        at = text.casefold().find(query)
        if at >= 0:
            # casefold() may change the length: the position is approximate
            start = max(0, at - _EXCERPT_CHARS)
            return collapse(text[start : at + len(query) + 2 * _EXCERPT_CHARS])
    return None
