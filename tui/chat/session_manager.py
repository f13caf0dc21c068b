"""The sessions of a program: those in the store, and those that are open."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.session_store import Kept, Listed, SessionGone
from localgen.tui.chat.active_session import House, OpenSession
from localgen.tui.chat.compare import Variant, sessions

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

    def __init__(self, house: House) -> None:
        self.house = house
        self.listed: list[Listed] = []
        self._opened: list[OpenSession] = []
        self._opening = threading.Lock()
        self._changes = -1
        self.reload()

    @property
    def open(self) -> dict[int, OpenSession]:
        """The open ones by their ids; a session may get another one when it is kept."""
        return {each.id: each for each in tuple(self._opened)}

    @property
    def answering(self) -> list[OpenSession]:
        """Those in which an answer is being written."""
        return [each for each in tuple(self._opened) if each.answering is not None]

    @property
    def busy(self) -> list[OpenSession]:
        """Those in which a command runs, or a model is loaded for one."""
        return [each for each in tuple(self._opened) if each.busy]

    @property
    def unkept(self) -> list[OpenSession]:
        """Those of which something is not on the disk."""
        return [each for each in tuple(self._opened) if each.unkept]

    def reload(self) -> None:
        """Read the list again."""
        self.listed = self.house.store.all()

    def first(self) -> OpenSession:
        """Where a program begins: a session that is still empty, or a new one."""
        options = self.house.options
        blank = Kept(
            0,
            model=self.house.model,
            server=self.house.url,
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
        with self._opening:
            found = self.open.get(session)
            if found is None:
                found = OpenSession(self.house.store.read(session), self.house)
                self._opened.append(found)
            return found

    def fork(self, source: OpenSession, name: str = "") -> OpenSession:
        """A copy to go on in."""
        called = name or self._free_name(source.name)
        return self._create(replace(source.copy(), name=called, growing=None))

    def compare(self, source: OpenSession, compared: list[Variant]) -> list[OpenSession]:
        """A session for each, which goes on from what was said in one."""
        base = replace(source.copy(), server=self.house.url)
        return [self._create(kept) for kept in sessions(base, compared)]

    def put_back(self, opened: OpenSession, before: Kept, after: Kept) -> OpenSession:
        """Take back what a command did; where the talk went on, as a session of its own."""
        if opened.id in self.open and opened.put_back(before, after):
            return opened
        return self._create(replace(before, name=self._free_name(opened.name), growing=None))

    def rename(self, session: int, name: str) -> None:
        """InvalidRequest: a name without a letter."""
        name = one_line(name)
        if not name:
            raise InvalidRequest("a session needs a name")
        found = self.open.get(session)
        if found is not None:
            found.rename(name)
        else:
            self.house.store.rename(session, name)
        self.reload()

    def delete(self, session: int) -> None:
        """Out of the list; restore() brings it back. InvalidRequest: an answer grows in it."""
        found = self.open.get(session)
        if found is not None and (found.answering is not None or found.busy):
            raise InvalidRequest("an answer is being written in it: stop it first")
        self.house.store.delete(session)
        if found is not None:
            self._forget(found)
            found.session.client.close()
        self.reload()

    def restore(self, session: int) -> None:
        self.house.store.restore(session)
        self.reload()

    def settle(self) -> list[OpenSession]:
        """Make turns of answers that have ended; the sessions of those."""
        done = [each for each in self.answering if not each.is_answering]
        for each in done:
            each.settle()
        if done:
            self.reload()
        return done

    def keep(self) -> bool:
        """Write what has grown, see what other programs have written; whether they have.

        To be called about once a second: that is as much as a killed program loses.
        """
        for each in tuple(self._opened):
            each.save()
        changes = self.house.store.changes()
        listed = {each.id for each in self.listed}
        if (
            changes == self._changes
            and self.open.keys() <= listed
            # a program that is killed writes no change
            and not any(each.is_growing for each in self.listed)
        ):
            return False
        self._changes = changes
        self.reload()
        for each in tuple(self._opened):
            try:
                each.refresh()
            except SessionGone:
                self._forget(each)
        return True

    @contextlib.contextmanager
    def keeping(self, every_s: float) -> Iterator[None]:
        """Keep what grows from another thread, while this one waits for something."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(every_s):
                with contextlib.suppress(LocalgenError):
                    self.settle()
                    self.keep()

        thread = threading.Thread(target=run, name="keep", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def hear(self) -> list[tuple[OpenSession, str]]:
        """What sessions have to say by now, and which."""
        heard = []
        for each in tuple(self._opened):
            while each.said:
                heard.append((each, each.said.popleft()))
        return heard

    def search(self, text: str, is_over: Callable[[], bool] = lambda: False) -> list[Hit]:
        """Where a text occurs, in any letter case: names, prompts, answers.

        is_over: whether nobody waits for it any more.
        """
        wanted = text.casefold().strip()
        if not wanted:
            return []
        hits = [
            Hit(listed.id, listed.name, None, listed.name)
            for listed in self.listed
            if wanted in listed.name.casefold()
        ]
        # a session at a time: whoever writes need not wait for the whole
        for listed in self.listed:
            if len(hits) >= MOST_HITS or is_over():
                break
            for place, turn in enumerate(self.house.store.turns(listed.id)):
                excerpt = _excerpt(turn, wanted)
                if excerpt is not None:
                    hits.append(Hit(listed.id, listed.name, place, excerpt))
        return hits[:MOST_HITS]

    def close(self) -> None:
        """Stop what runs, keep everything."""
        for each in tuple(self._opened):
            each.stop()
        for each in tuple(self._opened):
            try:
                each.close()
            except LocalgenError:
                continue  # it was said while the program ran

    def _forget(self, opened: OpenSession) -> None:
        with contextlib.suppress(ValueError):  # another thread was faster
            self._opened.remove(opened)

    def _create(self, kept: Kept) -> OpenSession:
        made = OpenSession(self.house.store.create(kept), self.house)
        self._opened.append(made)
        self.reload()
        return made

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
