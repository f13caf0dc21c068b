"""A session that is open: what is kept of it, its model, and the answer that grows in it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.chat import commands
from localgen.chat.conversation import Turn
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import Progress, Session
from localgen.chat.session_store import Kept, SessionBusy, SessionChanged, Sessions
from localgen.client import ModelClient
from localgen.tui.chat.answer_stream import Answering

UNNAMED = "New session"
# settings that are no sampling parameters
SYSTEM, CTX = "system", "ctx"
_NAME_CHARS = 48
# commands that change what is kept
_CHANGING = ("/set", "/load", "/clear", "/undo")


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What all sessions of a program share.

    make_client: one for each, as each may be cut off; it gets where to tell its user something.
    url: the server it leads to; empty: ours. model: that of new sessions; None: the built-in one.
    """

    store: Sessions
    make_client: Callable[[Callable[[str], None]], ModelClient]
    options: ModelOptions
    state_dir: Path
    url: str = ""
    model: str | None = None
    clock: Callable[[], float] = time.monotonic


class Stopped(Exception):
    """The user has ended it."""


class OpenSession:
    """Its methods may be called from any thread; those that ask or keep take their time.

    unkept: why the last try to keep it failed; nothing is lost as long as the program runs.
    draft: what is typed and not sent. busy: the command that runs; load_share: how much of the
    model it needs is loaded. news: what the client has told since it was last asked something;
    said: the same and more, until somebody takes it out to tell the user.
    """

    def __init__(self, kept: Kept, house: House) -> None:
        self.kept = kept
        self.answering: Answering | None = None
        self.last: Answering | None = None
        self.unkept = ""
        self.busy = ""
        self.load_share: float | None = None
        self.news = ""
        self.said: deque[str] = deque()
        self.draft = house.store.draft(kept.id)
        self._kept_draft = self.draft
        self._house = house
        self._lock = threading.RLock()
        self._begun = self._is_stopping = False
        self._ended: Turn | None = None
        self._is_foreign = False
        self.session = Session(self._client(), house.state_dir, house.options)
        self._take(kept)

    @property
    def id(self) -> int:
        return self.kept.id

    @property
    def name(self) -> str:
        return self.kept.name or UNNAMED

    @property
    def is_answering(self) -> bool:
        answering = self.answering  # another thread may settle it meanwhile
        return answering is not None and not answering.ended.is_set()

    def ask(self, prompt: str) -> None:
        """Begin an answer. SessionChanged, SessionBusy, SessionGone: it is another's turn."""
        with self._lock:
            self._require_idle()
            self._start(prompt)

    def ask_again(self) -> None:
        """The last prompt once more; the answer there is stays until there is a whole new one."""
        with self._lock:
            self._require_idle()
            turns = self.session.conversation.turns
            if not turns:
                raise InvalidRequest("nothing has been asked yet")
            self._start(turns[-1].prompt, again=True)

    def stop(self) -> bool:
        """End what runs, an answer where it is; whether there was anything. Returns at once."""
        answering = self.answering
        if answering is not None and not answering.ended.is_set():
            answering.stop()
            return True
        return self.stop_command()

    def stop_command(self) -> bool:
        """The same, but for answers."""
        if not self.busy:
            return False
        self._is_stopping = True
        self.session.client.cut()
        return True

    def settle(self) -> None:
        """Make a turn of an answer that has ended."""
        with self._lock:
            done = self.answering
            if done is None or not done.ended.is_set():
                return
            self._keep_turn(done)
            self.answering = None
            self._is_stopping = done.is_stopping
            self._renew_client()
            self.save()

    def obey(self, line: str) -> commands.Outcome:
        """Carry out one of the commands that the chat in a terminal has too."""
        with self._working(line):
            if line.split()[0] in _CHANGING:
                self._require_ours()
            if commands.needs_model(line):
                self.session.ensure_loaded(self._loading)
            return commands.run(self.session, line, self._loading)

    def set(self, setting: str, text: str) -> None:
        """SYSTEM, CTX or a sampling parameter, from the next prompt on; empty: as the model does.

        InvalidRequest: it does not fit.
        """
        with self._lock:
            self._require_ours()
            if setting == SYSTEM:
                self._require_unbusy()
                self.session.change(self.session.conversation.with_system(text))
            elif setting == CTX:
                self.session.set(ctx=commands.ctx_of(self.session, text or "default"))
            else:
                self.session.set_parameter(setting, text or "default")
            self.save()

    def use_model(self, name: str | None, on_progress: Progress) -> None:
        """Load a model and go on with it; on an error the old one stays."""
        with self._working(f"/model {name or ''}"):
            self._require_ours()
            self.session.client.connect()
            self.session.load(name, on_progress)
            self._is_foreign = False

    def rename(self, name: str) -> None:
        with self._lock:
            self._house.store.rename(self.id, name)
            self.kept = replace(self.kept, name=name)

    def put_back(self, before: Kept, after: Kept) -> bool:
        """Take back what a command did; False: something has been said since."""
        with self._lock:
            self._require_idle()
            if self.session.conversation != after.conversation:
                return False
            self.session.change(before.conversation)
            self.session.set(params=before.params)
            self.save()
            return True

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
        options, model, server = self.session.options, self.session.asked, self._house.url
        if self._is_foreign:  # it was only looked at
            model, server = self.kept.model, self.kept.server
        return replace(
            self.kept,
            model=model,
            server=server,
            params=options.params,
            ctx=options.ctx,
            conversation=self.session.conversation,
        )

    def close(self) -> None:
        """Let the connections go; an answer that grows is stopped and kept as far as it is."""
        answering = self.answering
        self.stop()
        if answering is not None:
            answering.ended.wait(2.0)
            self.settle()
        self.save()
        self.session.client.close()

    @contextlib.contextmanager
    def _working(self, what: str) -> Iterator[None]:
        """While a command runs. Stopped: the user has ended it."""
        with self._lock:
            self._require_idle()
            self.busy, self.news = what, ""
        try:
            yield
        except LocalgenError as error:
            if self._is_stopping:
                raise Stopped("stopped") from error
            raise
        finally:
            with self._lock:
                self.busy, self.load_share = "", None
                self._renew_client()
                self.save()

    def _loading(self, share: float) -> None:
        self.load_share = share

    def _start(self, prompt: str, *, again: bool = False) -> None:
        self._is_foreign, self.news = False, ""
        self._begin(prompt)
        answering = Answering(self.session, prompt, self._house.clock, again=again)
        self.last = self.answering = answering
        answering.start()

    def _begin(self, prompt: str) -> None:
        wanted = replace(self.copy(), name=self.kept.name or one_line(prompt)[:_NAME_CHARS])
        self._ended = None
        try:
            self.kept = self._house.store.begin(wanted, prompt)
            self._begun, self.unkept = True, ""
        except InvalidRequest:  # another program has changed it, or writes in it
            raise
        except LocalgenError as error:  # a full disk is no reason not to answer
            self.kept = replace(self.kept, name=wanted.name)
            self._begun, self.unkept = False, error.message

    def _keep_turn(self, done: Answering) -> None:
        turn = self._ended = done.turn()
        if not done.again:
            self.session.answered(turn, done.answer)
            return
        is_better = not turn.stopped or self.session.conversation.turns[-1].is_unanswered
        if is_better or not turn.is_unanswered:  # a half stands below what there was
            self.session.answered(turn, done.answer, again=is_better)

    def _save(self) -> None:
        store = self._house.store
        if self.draft != self._kept_draft:
            store.keep_draft(self.id, self.draft)
            self._kept_draft = self.draft
        if self.answering is not None:
            if self._begun:
                store.grow(self.kept, self.answering.turn())
            return
        if self._begun and self._ended is not None:
            self.kept = store.end(self.kept, self._ended)
            self._begun = False
        now = self.copy()
        if now != self.kept:
            try:
                self.kept = store.change(now)
            except SessionChanged:
                self._part(now)

    def _part(self, now: Kept) -> None:
        """Go on as another session: both versions are worth keeping."""
        theirs, name = self.id, self.name
        self.kept = self._house.store.create(replace(now, name=f"{name} (2)"))
        self.said.append(
            f"another localgen tui has changed {one_line(name)} meanwhile: "
            f"what you see goes on as {one_line(self.name)}"
        )
        self._kept_draft = ""
        with contextlib.suppress(LocalgenError):  # else it stands in both
            self._house.store.keep_draft(theirs, "")

    def _take(self, kept: Kept) -> None:
        """Make the session what was read."""
        self._is_foreign = kept.server != self._house.url
        model = self._house.model if self._is_foreign else kept.model
        self.session.change(kept.conversation)
        self.session.set(params=kept.params, ctx=kept.ctx, system=kept.conversation.system)
        if model != self.session.asked:
            self.session.info, self.session.asked = None, model

    def _client(self) -> ModelClient:
        return self._house.make_client(self._hear)

    def _hear(self, line: str) -> None:
        self.news = line
        self.said.append(line)

    def _renew_client(self) -> None:
        """One that was cut asks nothing any more."""
        if self._is_stopping:
            self._is_stopping = False
            self.session.client.close()
            self.session.client = self._client()

    def _require_idle(self) -> None:
        if self.answering is not None:
            raise InvalidRequest("an answer is being written: Ctrl+C stops it")
        self._require_unbusy()
        self._renew_client()

    def _require_unbusy(self) -> None:
        if self.busy:
            raise InvalidRequest(f"{self.busy} is not done yet")

    def _require_ours(self) -> None:
        if self.kept.growing is not None:
            raise SessionBusy("another localgen tui writes an answer here: wait for it")
