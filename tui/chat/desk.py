"""The sessions of a program: those in the store, and those that are open."""

from __future__ import annotations

from dataclasses import dataclass, replace

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.chats.conversation import Conversation, Turn
from localgen.chats.inert import one_line
from localgen.chats.sessions import Kept, Listed, SessionGone
from localgen.tui.chat.open_session import House, OpenSession
from localgen.tui.chat.variants import Variant, sessions

_AROUND_CHARS = 40
MOST_HITS = 200


@dataclass(frozen=True, slots=True)
class Hit:
    """A place where a text was found. place: the turn; None: the session's name."""

    session: int
    name: str
    place: int | None
    excerpt: str


class Desk:
    """Its methods may be called from any thread, and take their time."""

    def __init__(self, house: House, model: str | None = None) -> None:
        self.house = house
        self.listed: list[Listed] = []
        self.open: dict[int, OpenSession] = {}
        self._model = model
        self._changes = -1
        self.reload()

    @property
    def answering(self) -> list[OpenSession]:
        """Those in which an answer is being written."""
        return [each for each in self.open.values() if each.answering is not None]

    def reload(self) -> None:
        """Read the list again."""
        self.listed = self.house.store.all()

    def first(self) -> OpenSession:
        """Where a program begins: a session that is still empty, or a new one."""
        options = self.house.options
        blank = Kept(
            0,
            model=self._model,
            params=options.params,
            ctx=options.ctx,
            conversation=Conversation(options.system),
        )
        for listed in self.listed:
            if listed.turns or listed.name or listed.is_growing:
                continue
            found = self.get(listed.id)
            if found.copy() == replace(blank, id=found.id, revision=found.kept.revision):
                return found
        return self._create(blank)

    def get(self, session: int) -> OpenSession:
        """A session by its id, opened if it is not. SessionGone."""
        if session not in self.open:
            kept = self.house.store.read(session)
            self.open[session] = OpenSession(kept, self.house)
        return self.open[session]

    def fork(self, source: OpenSession, name: str = "") -> OpenSession:
        """A copy to go on in."""
        called = name or self._free_name(source.name)
        return self._create(replace(source.copy(), name=called, growing=None))

    def compare(self, source: OpenSession, compared: list[Variant]) -> list[OpenSession]:
        """A session for each, which goes on from what was said in one."""
        return [self._create(kept) for kept in sessions(source.copy(), compared)]

    def rename(self, session: int, name: str) -> None:
        """InvalidRequest: a name without a letter."""
        name = one_line(name)
        if not name:
            raise InvalidRequest("a session needs a name")
        self.house.store.rename(session, name)
        if session in self.open:
            found = self.open[session]
            found.kept = replace(found.kept, name=name)
        self.reload()

    def delete(self, session: int) -> None:
        """Out of the list; restore() brings it back. InvalidRequest: an answer grows in it."""
        if session in self.open and self.open[session].answering is not None:
            raise InvalidRequest("an answer is being written in it: stop it first")
        self.house.store.delete(session)
        found = self.open.pop(session, None)
        if found is not None:
            found.session.client.close()
        self.reload()

    def restore(self, session: int) -> None:
        self.house.store.restore(session)
        self.reload()

    def settle(self) -> list[OpenSession]:
        """Make turns of answers that have ended; the sessions of those."""
        done = [each for each in self.answering if each.answering and each.answering.ended.is_set()]
        for each in done:
            each.settle()
        if done:
            self.reload()
        return done

    def keep(self) -> bool:
        """Write what has grown, see what other programs have written; whether they have.

        To be called about once a second: that is as much as a killed program loses.
        """
        for each in list(self.open.values()):
            each.save()
        changes = self.house.store.changes()
        # a program that is killed writes no change
        if changes == self._changes and not any(each.is_growing for each in self.listed):
            return False
        self._changes = changes
        self.reload()
        for each in list(self.open.values()):
            try:
                each.refresh()
            except SessionGone:
                self.open.pop(each.id, None)
        return True

    def search(self, text: str) -> list[Hit]:
        """Where a text occurs, in any letter case: names, prompts, answers."""
        wanted = text.casefold().strip()
        if not wanted:
            return []
        hits = [
            Hit(listed.id, listed.name, None, listed.name)
            for listed in self.listed
            if wanted in listed.name.casefold()
        ]
        for session, name, place, turn in self.house.store.transcripts():
            if len(hits) >= MOST_HITS:
                break
            excerpt = _excerpt(turn, wanted)
            if excerpt is not None:
                hits.append(Hit(session, name, place, excerpt))
        return hits

    def close(self) -> None:
        """Stop what runs, keep everything."""
        for each in self.answering:
            each.stop()
        for each in list(self.open.values()):
            try:
                each.close()
            except LocalgenError:
                continue  # it was said while the program ran

    def _create(self, kept: Kept) -> OpenSession:
        made = self.house.store.create(kept)
        self.open[made.id] = OpenSession(made, self.house)
        self.reload()
        return self.open[made.id]

    def _free_name(self, name: str) -> str:
        taken = {listed.name for listed in self.listed}
        base, number = name, 2
        while f"{base} ({number})" in taken:
            number += 1
        return f"{base} ({number})"


def _excerpt(turn: Turn, wanted: str) -> str | None:
    for said in (turn.prompt, turn.answer):
        at = said.casefold().find(wanted)
        if at >= 0:
            # casefold may change lengths a little: an excerpt need not be exact
            start = max(0, at - _AROUND_CHARS)
            return one_line(said[start : at + len(wanted) + 2 * _AROUND_CHARS])
    return None
