"""One answer, generated in a background thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import closing
from dataclasses import dataclass, field
from queue import SimpleQueue

from localgen.backends import units
from localgen.backends.errors import EngineDied, LocalgenError, ServerUnavailable
from localgen.chat import report
from localgen.chat.conversation import ToolStep, Turn
from localgen.chat.session import ChatSession
from localgen.client import Completion, TextDelta
from localgen.mcp_tools.call_question import CallQuestion, Decision
from localgen.mcp_tools.chat_tools import MAX_ROUNDS, ROUNDS_NOTICE, CallHandlers, runnable_calls
from localgen.mcp_tools.results import ToolResult


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How much of an answer has been read: whole steps, then chunks of reasoning and of text."""

    reasoning_chunks: int = 0
    text_chunks: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """The steps of an answer that are over, and the chunks of the part that is being written."""

    steps: tuple[ToolStep, ...] = ()
    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


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
    steps: of the answer before its beginning. question: the tool call that waits for the user.
    """

    def __init__(
        self,
        session: ChatSession,
        prompt: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        regenerate: bool = False,
        beginning: str = "",
        steps: tuple[ToolStep, ...] = (),
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
        # replaced as a whole when a part ends, since other threads read it
        self._part = _Part(steps, text=[beginning] if beginning else [])
        self._num_begun_steps = len(steps)
        self.question: CallQuestion | None = None
        self._decisions: SimpleQueue[Decision] = SimpleQueue()
        self._running_call: Future[ToolResult] | None = None
        self._running_title = ""
        self._thread = threading.Thread(target=self._run, name="answer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop generating, or the tool call; without waiting, `ended` is set later."""
        self._stop_requested.set()
        self._decisions.put(Decision.STOP)
        call = self._running_call
        if call is not None:
            call.cancel()
        self._session.client.abort()

    def answer_question(self, question: CallQuestion, decision: Decision) -> bool:
        """Answer the question, if it is still the one asked."""
        if question is not self.question:
            return False
        self.question = None
        self._decisions.put(decision)
        return True

    @property
    def is_stopping(self) -> bool:
        return self._stop_requested.is_set()

    @property
    def is_reasoning(self) -> bool:
        """True if the answer so far is reasoning."""
        part = self._part
        return bool(part.reasoning) and not part.text and not self.ended.is_set()

    @property
    def steps(self) -> tuple[ToolStep, ...]:
        """The parts that ended with tool calls."""
        return self._part.steps

    def chunks_since(self, position: StreamPosition) -> tuple[str, str, StreamPosition]:
        """Return reasoning and text after a position, and the new position.

        After a step, which the text is then a part of, that of the next part from its start.
        """
        part = self._part
        now = StreamPosition(len(part.reasoning), len(part.text), len(part.steps))
        if position.steps != now.steps:
            position = StreamPosition()
        thoughts = part.reasoning[position.reasoning_chunks : now.reasoning_chunks]
        text = part.text[position.text_chunks : now.text_chunks]
        return "".join(thoughts), "".join(text), now

    def took_s(self) -> float:
        """Time since the request, up to the end of the answer."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._started_s

    def to_turn(self) -> Turn:
        """The turn so far; complete once the answer has ended."""
        part, is_stopped = self._part, self.completion is None
        text, thought = "".join(part.text), "".join(part.reasoning)
        return Turn(self.prompt, text, is_stopped, thought, self._summary(), part.steps)

    def status_line(self) -> str:
        """Progress in one line."""
        if self.is_stopping:
            return "stopping"
        if (loaded := self.load_progress) is not None:
            return f"{self._session.name}: {report.loading_text(loaded)}"
        if tool := self._tool_text():
            return tool
        waited_s = self._clock() - self._started_s
        used, about = self.used_tokens, "~" if self.is_estimated else ""
        context_mark = "~" if used is None else ""
        if used is None:
            used = self._session.estimate_used_tokens() + len(self.prompt) // 4 + self.num_tokens
        figures = report.LiveFigures(
            *(waited_s, self.ttft_s, self.num_tokens, used, self._session.ctx, about, context_mark),
            prompt=self._session.client.prompt_progress,
        )
        can_end = self.is_reasoning and self._session.client.is_localgen
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
        if tool := self._tool_text():
            return tool
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
        if self.question is not None:
            return "asks you"
        if self.ttft_s is None:
            waited_s = self._clock() - self._started_s
            read = self._session.client.prompt_progress
            if read is not None and read.total:
                return f"prompt {read.computed / read.total:.0%}"
            return f"{waited_s:.0f} s …"
        return f"{self.tokens_per_s():,.0f}"

    def _summary(self) -> str:
        """The figures of the answer, or why it is not whole; then notices."""
        notices = (ROUNDS_NOTICE,) if len(self.steps) >= MAX_ROUNDS else ()
        return "\n".join(line for line in (self._figures(), *notices) if line)

    def _figures(self) -> str:
        if self.completion is not None:
            session = self._session
            return report.answer_summary(self.completion, session.options, session.model_info)
        if self._stop_requested.is_set():
            return "stopped"
        return f"interrupted: {self.error}" if self.error else ""

    def _tool_text(self) -> str:
        """What a tool call waits for; empty if there is none."""
        question = self.question  # read once: another thread may reset it
        if question is not None:
            return f"{question.title}: Alt+Y runs it, Alt+R refuses"
        return (
            f"{self._running_title} is running; Ctrl+C stops waiting for it"
            if self._running_title
            else ""
        )

    def _run(self) -> None:
        try:
            self._answer()
        except LocalgenError as error:
            self.error = error.message
        except Exception as error:  # report it; other sessions must keep running
            self.error = f"internal error ({type(error).__name__}: {error})"
        finally:
            self._running_title = ""
            self.load_progress, self._ended_s = None, self._clock()
            self.ended.set()

    def _answer(self) -> None:
        """Stream the parts of the answer, and run the tool calls between them."""
        completion = self._stream_with_retry()
        while completion is not None and (
            calls := runnable_calls(completion, len(self._part.steps))
        ):
            handlers = CallHandlers(self._ask, self._wait, self._on_call, self._on_outcome)
            results = self._session.run_calls(calls, handlers)
            part = self._part
            text, thought = "".join(part.text), "".join(part.reasoning)
            step = ToolStep(text, thought, calls, results.texts)
            self._part, self.num_tokens = _Part((*part.steps, step)), 0
            if results.was_stopped or self._stop_requested.is_set():
                return
            completion = self._stream_with_retry()
        self.completion = completion

    def _on_call(self, title: str, _arguments: str) -> None:
        self._running_title = title

    def _on_outcome(self, _notice: str) -> None:
        self._running_title = ""

    def _ask(self, question: CallQuestion) -> Decision:
        self.question = question
        if self._stop_requested.is_set():
            return Decision.STOP
        try:
            return self._decisions.get()
        finally:
            self.question = None

    def _wait(self, call: Future[ToolResult]) -> ToolResult | None:
        self._running_call = call
        try:
            if self._stop_requested.is_set():
                call.cancel()
            return call.result()
        except CancelledError:
            return None
        finally:
            self._running_call = None

    def _stream_with_retry(self) -> Completion | None:
        try:
            return self._stream()
        except (ServerUnavailable, EngineDied):
            if self._stop_requested.is_set() or self.num_tokens:
                raise
            return self._stream()  # nothing received: the server was gone; it restarts

    def _stream(self) -> Completion | None:
        """Stream a part of the answer; None if it was stopped."""
        self._session.ensure_loaded(self._on_load_progress)
        self.load_progress = None
        stream = self._session.stream(
            self.prompt,
            regenerate=self.is_regeneration,
            # it is in a step later
            beginning=self._beginning if len(self.steps) == self._num_begun_steps else "",
            steps=self.steps,
        )
        with closing(stream) as events:
            for event in events:
                match event:
                    case TextDelta():
                        self._append(event)
                    case Completion():
                        return event
                if self._stop_requested.is_set():
                    return None
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
            self._part.reasoning.append(delta.reasoning)
        if delta.text:
            self._part.text.append(delta.text)
