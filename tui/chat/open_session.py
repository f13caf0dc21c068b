"""A session that is open: what is kept of it, its model, and the answer that grows in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.types import SamplingParams
from localgen.chats import commands
from localgen.chats.conversation import Conversation
from localgen.chats.inert import one_line
from localgen.chats.options import ModelOptions
from localgen.chats.session import Progress, Session
from localgen.chats.sessions import Kept, SessionChanged, SessionGone, Sessions
from localgen.client import ModelClient
from localgen.tui.chat.answering import Answering

UNNAMED = "New session"
_NAME_CHARS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What all sessions of a program share. make_client: one for each, as each may be cut off."""

    store: Sessions
    make_client: Callable[[], ModelClient]
    options: ModelOptions
    state_dir: Path
    clock: Callable[[], float] = time.monotonic


class OpenSession:
    """Its methods may be called from any thread; those that ask or keep take their time.

    unkept: why the last try to keep it failed; nothing is lost as long as the program runs.
    draft: what is typed and not sent. busy: the command that runs.
    """

    def __init__(self, kept: Kept, house: House) -> None:
        self.kept = kept
        self.answering: Answering | None = None
        self.last: Answering | None = None
        self.unkept = ""
        self.busy = ""
        self.draft = house.store.draft(kept.id)
        self._kept_draft = self.draft
        self._house = house
        self._lock = threading.RLock()
        self._begun = False
        self._before: Conversation | None = None
        self.session = Session(house.make_client(), house.state_dir, house.options)
        self._take(kept)

    @property
    def id(self) -> int:
        return self.kept.id

    @property
    def name(self) -> str:
        return self.kept.name or UNNAMED

    @property
    def is_answering(self) -> bool:
        return self.answering is not None and not self.answering.ended.is_set()

    def ask(self, prompt: str) -> None:
        """Begin an answer. SessionChanged, SessionBusy, SessionGone: it is another's turn."""
        with self._lock:
            self._require_idle()
            if not self.kept.name:
                self.kept = replace(self.kept, name=one_line(prompt)[:_NAME_CHARS])
            self._begin(prompt)
            self.answering = Answering(self.session, prompt, self._house.clock)
            self.last = self.answering
            self.answering.start()

    def ask_again(self) -> None:
        """The last prompt once more, in place of its answer."""
        with self._lock:
            self._require_idle()
            turns = self.session.conversation.turns
            if not turns:
                raise InvalidRequest("nothing has been asked yet")
            before = self.session.conversation
            self.session.change(before.undo())
            try:
                self.ask(turns[-1].prompt)
            except LocalgenError:
                self.session.change(before)
                raise
            self._before = before

    def stop(self) -> bool:
        """End the answer where it is; whether there was one."""
        if self.answering is None or not self.is_answering:
            return False
        self.answering.stop()
        return True

    def settle(self) -> None:
        """Make a turn of an answer that has ended."""
        with self._lock:
            done = self.answering
            if done is None or not done.ended.is_set():
                return
            self.session.answered(done.turn(), done.answer)
            self.answering = None
            before, self._before = self._before, None
            if done.is_stopping:  # its client is cut off
                self.session.client.close()
                self.session.client = self._house.make_client()
            self.save()
            if before is not None and done.turn().is_unanswered:
                self.session.change(before)  # the answer there was is better than none
                self.save()

    def obey(self, line: str, on_progress: Progress) -> commands.Outcome:
        """Carry out one of the commands that the chat in a terminal has too."""
        with self._lock:
            self._require_idle()
            self.busy = line
        try:
            if commands.needs_model(line):
                self.session.ensure_loaded(on_progress)
            return commands.run(self.session, line, on_progress)
        finally:
            self.busy = ""
            self.save()

    def set_params(self, params: SamplingParams) -> None:
        self.session.options = replace(self.session.options, params=params)
        self.save()

    def set_ctx(self, ctx: int | None) -> None:
        self.session.options = replace(self.session.options, ctx=ctx)
        self.save()

    def set_system(self, system: str) -> None:
        with self._lock:
            self._require_idle()
            self.session.change(self.session.conversation.with_system(system))
            self.save()

    def use_model(self, name: str | None, on_progress: Progress) -> None:
        """Load a model and go on with it; on an error the old one stays."""
        with self._lock:
            self._require_idle()
            self.busy = f"/model {name or ''}"
        try:
            self.session.client.connect()
            self.session.load(name, on_progress)
        finally:
            self.busy = ""
            self.save()

    def stop_loading(self) -> None:
        """From another thread: end use_model()."""
        loading, self.session.client = self.session.client, self._house.make_client()
        loading.cut()

    def save(self) -> None:
        """Keep what is not kept yet; `unkept` says why that failed."""
        with self._lock:
            try:
                self._save()
                self.unkept = ""
            except LocalgenError as error:
                self.unkept = error.message

    def refresh(self) -> bool:
        """Take over what another program has written; whether there was anything."""
        with self._lock:
            if self.answering is not None or self.busy or self.unkept:
                return False
            fresh = self._house.store.read(self.id)
            if fresh == self.kept:
                return False
            if fresh.revision != self.kept.revision:
                self._take(fresh)
            self.kept = fresh
            return True

    def copy(self) -> Kept:
        """What it is now, with the settings in force."""
        options = self.session.options
        return replace(
            self.kept,
            model=self.session.asked,
            params=options.params,
            ctx=options.ctx,
            conversation=self.session.conversation,
        )

    def close(self) -> None:
        """Let the connections go; an answer that grows is stopped and kept as far as it is."""
        if self.answering is not None:
            self.stop()
            self.answering.ended.wait(2.0)
            self.settle()
        self.save()
        self.session.client.close()

    def _begin(self, prompt: str) -> None:
        try:
            self.kept = self._house.store.begin(self.copy(), prompt)
            self._begun, self.unkept = True, ""
        except (SessionChanged, SessionGone):
            raise
        except InvalidRequest:  # another program writes in it
            raise
        except LocalgenError as error:  # a full disk is no reason not to answer
            self._begun, self.unkept = False, error.message

    def _save(self) -> None:
        store = self._house.store
        if self.draft != self._kept_draft:
            store.keep_draft(self.id, self.draft)
            self._kept_draft = self.draft
        if self.answering is not None:
            if self._begun:
                store.grow(self.kept, self.answering.turn())
            return
        turns = self.session.conversation.turns
        if self._begun and turns:
            self.kept = store.end(self.kept, turns[-1])
            self._begun = False
        now = self.copy()
        if now != self.kept:
            try:
                self.kept = store.change(now)
            except SessionChanged:
                # both are worth keeping
                self.kept = store.create(replace(now, name=f"{self.name} (2)"))

    def _take(self, kept: Kept) -> None:
        """Make the session what was read."""
        model, system = kept.model, kept.conversation.system
        self.session.change(Conversation(system, kept.conversation.turns))
        self.session.options = replace(
            self.session.options, params=kept.params, ctx=kept.ctx, system=system
        )
        if model != self.session.asked:
            self.session.info, self.session.asked = None, model

    def _require_idle(self) -> None:
        if self.answering is not None:
            raise InvalidRequest("an answer is being written: Ctrl+C stops it")
        if self.busy:
            raise InvalidRequest(f"{self.busy} is not done yet")
