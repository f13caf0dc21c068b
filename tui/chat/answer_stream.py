"""One answer as it grows, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from localgen.backends import units
from localgen.backends.errors import EngineDied, LocalgenError, ServerUnavailable
from localgen.chat import report
from localgen.chat.conversation import Turn
from localgen.chat.session import Session
from localgen.client import Answer, Text


@dataclass(frozen=True, slots=True)
class Position:
    """How much of an answer has been read: pieces of thought and of text."""

    thoughts: int = 0
    texts: int = 0


class Answering:
    """Asks a session's model and gathers what comes. Only its thread writes to it.

    tokens: so far; estimated: or about so many. load_share: how much of the model is loaded, while
    it has to be. error: why there is no whole answer. ended: set last of all. again: it is to take
    the place of the last turn's answer.
    """

    def __init__(
        self,
        session: Session,
        prompt: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        again: bool = False,
    ) -> None:
        self.prompt = prompt
        self.again = again
        self.tokens = 0
        self.estimated = False
        self.load_share: float | None = None
        self.ttft_s: float | None = None
        self.answer: Answer | None = None
        self.error = ""
        self.ended = threading.Event()
        self._session = session
        self._clock = clock
        self._started_s = clock()
        self._stopped = threading.Event()
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._thread = threading.Thread(target=self._run, name="answer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it where it is. Returns at once; `ended` follows."""
        self._stopped.set()
        self._session.client.cut()

    @property
    def is_stopping(self) -> bool:
        return self._stopped.is_set()

    def since(self, position: Position) -> tuple[str, str, Position]:
        """Thoughts and text that came after a position, and the position now."""
        now = Position(len(self._thoughts), len(self._texts))
        thoughts = self._thoughts[position.thoughts : now.thoughts]
        return "".join(thoughts), "".join(self._texts[position.texts : now.texts]), now

    def turn(self) -> Turn:
        """The turn as far as it has come; whole when the answer has ended."""
        thought, text, _ = self.since(Position())
        return Turn(self.prompt, text, self.answer is None, thought, self._served())

    def line(self) -> str:
        """How it goes, in one line."""
        if self.is_stopping:
            return "stopping"
        if self.load_share is not None:
            return f"loading {self._session.name} {self.load_share:.0%}"
        waited_s = self._clock() - self._started_s
        used = self._session.used_tokens() + len(self.prompt) // 4 + self.tokens
        about = "~" if self.estimated else ""
        limit = self._session.ctx
        return report.live_line(waited_s, self.ttft_s, self.tokens, used, limit, about)

    def rate(self) -> float:
        """Tokens a second; 0: not known yet."""
        if self.answer is not None:
            return self.answer.timings.predicted_per_second
        if self.ttft_s is None or self.tokens < 2:
            return 0.0
        writing_s = self._clock() - self._started_s - self.ttft_s
        return (self.tokens - 1) / writing_s if writing_s > 0 else 0.0

    def speed(self) -> str:
        """TTFT and tokens a second, as far as they are known: what tells answers apart."""
        if self.answer is not None:
            ttft_ms = self.answer.timings.ttft_ms
        elif self.ttft_s is not None:
            ttft_ms = self.ttft_s * 1e3
        else:
            return self.progress()
        rate = self.rate()
        return f"TTFT {units.duration(ttft_ms)}" + (f" · {rate:,.1f} tok/s" if rate else "")

    def progress(self) -> str:
        """How far it is, in few words."""
        if self.is_stopping:
            return "stopping"
        if self.load_share is not None:
            return f"loading {self.load_share:.0%}"
        if self.ttft_s is None:
            return f"waiting {self._clock() - self._started_s:.1f} s"
        rate = self.rate()
        return f"{rate:,.1f} tok/s" if rate else "writing"

    def _served(self) -> str:
        if self.answer is not None:
            lines = [report.answer_line(self.answer), *report.warnings(self.answer)]
            if self._session.options.verbose and self._session.info is not None:
                lines += report.verbose_lines(self.answer, self._session.info.load_ms)
            return "\n".join((f"{self.answer.model} · {lines[0]}", *lines[1:]))
        if self._stopped.is_set():
            return "stopped"
        return f"broken off: {self.error}" if self.error else ""

    def _run(self) -> None:
        try:
            self._ask()
        except LocalgenError as error:
            self.error = error.message
        except Exception as error:  # a user sees a sentence, and the other sessions go on
            self.error = f"a defect of localgen ({type(error).__name__}: {error})"
        finally:
            self.load_share = None
            self.ended.set()

    def _ask(self) -> None:
        try:
            self._stream()
        except (ServerUnavailable, EngineDied):
            if self._stopped.is_set() or self._texts or self._thoughts:
                raise
            self._stream()  # nothing has come yet: it had left, and is started again

    def _stream(self) -> None:
        self._session.ensure_loaded(self._loading)
        self.load_share = None
        with closing(self._session.stream(self.prompt, again=self.again)) as events:
            for event in events:
                match event:
                    case Text():
                        self._add(event)
                    case Answer():
                        self.answer = event
                if self._stopped.is_set():
                    return
        if self.answer is None:
            raise ServerUnavailable("the answer broke off")

    def _loading(self, share: float) -> None:
        self.load_share = share

    def _add(self, new: Text) -> None:
        if self.ttft_s is None:
            self.ttft_s = self._clock() - self._started_s
        self.tokens, self.estimated = new.num_tokens, new.estimated
        if new.reasoning:
            self._thoughts.append(new.reasoning)
        if new.text:
            self._texts.append(new.text)
