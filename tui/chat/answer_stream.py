"""One answer, generated in a background thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from localgen.backends import units
from localgen.backends.errors import EngineDied, LocalgenError, ServerUnavailable
from localgen.chat import report
from localgen.chat.conversation import Turn
from localgen.chat.session import ChatSession
from localgen.client import Completion, TextDelta


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How much of an answer has been read, in chunks of reasoning and of text."""

    reasoning_chunks: int = 0
    text_chunks: int = 0


class RateHistory:
    """Tokens/s in each of the last periods that are over. clock: in seconds."""

    def __init__(self, clock: Callable[[], float], period_s: float = 0.5, periods: int = 5) -> None:
        self._clock, self._period_s = clock, period_s
        self._counts: deque[int] = deque([0], maxlen=periods + 1)
        self._began_s = clock()
        self._lock = threading.Lock()

    def add(self, tokens: int) -> None:
        """Count tokens that have come now."""
        with self._lock:
            self._advance()
            self._counts[-1] += tokens

    def values(self) -> tuple[float, ...]:
        """The rates, oldest first."""
        with self._lock:
            self._advance()
            return tuple(count / self._period_s for count in list(self._counts)[:-1])

    def _advance(self) -> None:
        now_s = self._clock()
        while now_s - self._began_s >= self._period_s:
            self._began_s += self._period_s
            self._counts.append(0)


class AnswerStream:
    """Requests an answer and collects its chunks in a thread, the only writer of its state.

    num_tokens: tokens so far; is_estimated: whether that is an estimate. prompt_tokens: of the
    prompt; None before the first token, or not reported. load_progress: fraction of
    the model loaded, while it loads (read it once: it becomes None at any moment). error: why the
    answer is incomplete. ended: set last. rates: the speed lately.
    regenerate: the answer replaces that of the last turn. beginning: of the answer, continued.
    """

    def __init__(
        self,
        session: ChatSession,
        prompt: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        regenerate: bool = False,
        beginning: str = "",
    ) -> None:
        self.prompt = prompt
        self._beginning = beginning
        self.is_regeneration = regenerate
        self.num_tokens = 0
        self.is_estimated = False
        self.prompt_tokens: int | None = None
        self.load_progress: float | None = None
        self.ttft_s: float | None = None
        self.completion: Completion | None = None
        self.error = ""
        self.ended = threading.Event()
        self.rates = RateHistory(clock)
        self._session = session
        self._clock = clock
        self._started_s = clock()
        self._ended_s: float | None = None
        self._stop_requested = threading.Event()
        self._reasoning_chunks: list[str] = []
        self._text_chunks: list[str] = [beginning] if beginning else []
        self._thread = threading.Thread(target=self._run, name="answer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop generating, without waiting; `ended` is set later."""
        self._stop_requested.set()
        self._session.client.abort()

    @property
    def is_stopping(self) -> bool:
        return self._stop_requested.is_set()

    @property
    def is_reasoning(self) -> bool:
        """True if the answer so far is reasoning."""
        return bool(self._reasoning_chunks) and not self._text_chunks and not self.ended.is_set()

    def chunks_since(self, position: StreamPosition) -> tuple[str, str, StreamPosition]:
        """Return reasoning and text after a position, and the new position."""
        now = StreamPosition(len(self._reasoning_chunks), len(self._text_chunks))
        thoughts = self._reasoning_chunks[position.reasoning_chunks : now.reasoning_chunks]
        return (
            "".join(thoughts),
            "".join(self._text_chunks[position.text_chunks : now.text_chunks]),
            now,
        )

    def took_s(self) -> float:
        """Time since the request, up to the end of the answer."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._started_s

    def to_turn(self) -> Turn:
        """The turn so far; complete once the answer has ended."""
        thought, text, _ = self.chunks_since(StreamPosition())
        return Turn(self.prompt, text, self.completion is None, thought, self._summary())

    def status_line(self) -> str:
        """Progress in one line."""
        if self.is_stopping:
            return "stopping"
        if (loaded := self.load_progress) is not None:
            return f"{self._session.name}: {report.loading_text(loaded)}"
        waited_s = self._clock() - self._started_s
        used, about = self.used_tokens, "~" if self.is_estimated else ""
        context_mark = "~" if used is None else ""
        if used is None:
            used = self._session.estimate_used_tokens() + len(self.prompt) // 4 + self.num_tokens
        figures = report.LiveFigures(
            *(waited_s, self.ttft_s, self.num_tokens, used, self._session.ctx, about, context_mark),
            prompt=self._session.client.prompt_progress,
        )
        can_end = self.is_reasoning and self._session.client.can_answer_now
        hint = "Ctrl+X answers now · " if can_end else ""  # first, so that it is not cut off
        return hint + report.live_stats_line(figures)

    @property
    def used_tokens(self) -> int | None:
        """Tokens of the conversation with this answer so far; None if not reported."""
        return None if self.prompt_tokens is None else self.prompt_tokens + self.num_tokens

    def tokens_per_s(self) -> float:
        """Decode speed so far; 0 if unknown."""
        if self.completion is not None:
            return self.completion.timings.predicted_per_second
        if self.ttft_s is None or self.num_tokens < 2:
            return 0.0
        writing_s = self._clock() - self._started_s - self.ttft_s
        return (self.num_tokens - 1) / writing_s if writing_s > 0 else 0.0

    def speed_text(self) -> str:
        """TTFT and tokens/s for comparing answers; progress until the first token."""
        if self.completion is not None:
            ttft_ms = self.completion.timings.ttft_ms
        elif self.ttft_s is not None:
            ttft_ms = self.ttft_s * 1e3
        else:
            return self.progress_text()
        rate = self.tokens_per_s()
        return f"TTFT {units.format_duration(ttft_ms)}" + (f" · {rate:,.1f} tok/s" if rate else "")

    def progress_text(self) -> str:
        """Progress in a few words."""
        if self.is_stopping:
            return "stopping"
        if (loaded := self.load_progress) is not None:
            return report.loading_text(loaded)
        if self.ttft_s is None:
            waited_s = self._clock() - self._started_s
            return report.waiting_text(waited_s, self._session.client.prompt_progress)
        rate = self.tokens_per_s()
        return f"{rate:,.1f} tok/s" if rate else "writing"

    def short_progress_text(self) -> str:
        """Progress in a dozen columns."""
        if self.is_stopping:
            return "stopping"
        if (loaded := self.load_progress) is not None:
            return f"load {loaded:.0%}"
        if self.ttft_s is None:
            waited_s = self._clock() - self._started_s
            read = self._session.client.prompt_progress
            if read is not None and read.total:
                return f"prompt {read.computed / read.total:.0%}"
            return f"{waited_s:.0f} s …"
        return f"{self.tokens_per_s():,.0f}"

    def _summary(self) -> str:
        if self.completion is not None:
            session = self._session
            return report.answer_summary(self.completion, session.options, session.model_info)
        if self._stop_requested.is_set():
            return "stopped"
        return f"interrupted: {self.error}" if self.error else ""

    def _run(self) -> None:
        try:
            self._stream_with_retry()
        except LocalgenError as error:
            self.error = error.message
        except Exception as error:  # report it; other sessions must keep running
            self.error = f"internal error ({type(error).__name__}: {error})"
        finally:
            self.load_progress, self._ended_s = None, self._clock()
            self.ended.set()

    def _stream_with_retry(self) -> None:
        try:
            self._stream()
        except (ServerUnavailable, EngineDied):
            if self._stop_requested.is_set() or self.num_tokens:
                raise
            self._stream()  # nothing received: the server was gone; it restarts

    def _stream(self) -> None:
        self._session.ensure_loaded(self._on_load_progress)
        self.load_progress = None
        stream = self._session.stream(
            self.prompt, regenerate=self.is_regeneration, beginning=self._beginning
        )
        with closing(stream) as events:
            for event in events:
                match event:
                    case TextDelta():
                        self._append(event)
                    case Completion():
                        self.completion = event
                if self._stop_requested.is_set():
                    return
        if self.completion is None:
            raise ServerUnavailable("the answer was interrupted")

    def _on_load_progress(self, fraction: float) -> None:
        self.load_progress = fraction

    def _append(self, delta: TextDelta) -> None:
        if self.ttft_s is None:
            self.ttft_s = self._clock() - self._started_s
        self.rates.add(delta.num_tokens - self.num_tokens)
        self.num_tokens, self.is_estimated = delta.num_tokens, delta.estimated
        self.prompt_tokens = delta.prompt_tokens
        if delta.reasoning:
            self._reasoning_chunks.append(delta.reasoning)
        if delta.text:
            self._text_chunks.append(delta.text)
