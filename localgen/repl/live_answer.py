"""Streamed answers: complete blocks are printed once, only the last block is redrawn."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from copy import copy
from types import TracebackType

from rich.console import Console
from rich.text import Text

from localgen.backends.terminal_text import one_line
from localgen.backends.types import PromptProgress
from localgen.chat import report
from localgen.repl.answer_rows import AnswerRows
from localgen.repl.live_rows import LiveRows, Row

RENDER_INTERVAL_S = 0.08
# idle time per render time: a long block is slow to render, and the model needs the cores
IDLE_PER_RENDER = 9
_RESERVED_ROWS = 3  # the live line, the blank row above it, the cursor's row


class LiveAnswer:
    """Streams one answer to a console; a context manager.

    A thread renders at a fixed rate, independent of the token rate. Reasoning is printed dimmed,
    line by line. On exit the whole text is printed and the live part is removed. used_tokens: an
    estimate for the prompt and the conversation before it. shows_figures: the live part ends with
    the statistics so far. reasoning_hint: shown with them during the reasoning.
    prompt_progress: how much of the prompt is computed, called from the thread that renders.
    """

    def __init__(
        self,
        console: Console,
        *,
        used_tokens: int,
        max_context: int | None,
        shows_figures: bool = True,
        reasoning_hint: str = "",
        prompt_progress: Callable[[], PromptProgress | None] = lambda: None,
    ) -> None:
        self._console = console
        self._shows_figures = shows_figures
        self._reasoning_hint = reasoning_hint
        self._prompt_progress = prompt_progress
        self._used_tokens, self._context_mark = used_tokens, "~"
        self._max_context = max_context
        self._rows = AnswerRows(console)
        self._live = LiveRows(console)
        self._render_thread = threading.Thread(target=self._render_loop, daemon=True)
        self._done = threading.Event()
        self._render_error: Exception | None = None
        self._unprinted: deque[tuple[str, str]] = deque()  # reasoning, text
        self._notice = ""
        self._tokens = 0
        self._is_reasoning = False
        self._estimated = False
        self._started_s = time.monotonic()
        self._ttft_s: float | None = None

    def feed(
        self,
        text: str,
        num_tokens: int,
        reasoning: str = "",
        *,
        estimated: bool = False,
        prompt_tokens: int | None = None,
    ) -> None:
        """Append text and reasoning.

        num_tokens: total tokens of the answer so far. estimated: num_tokens is an estimate.
        prompt_tokens: replaces the estimate of used_tokens.
        """
        if prompt_tokens is not None:
            self._used_tokens, self._context_mark = prompt_tokens, ""
        if self._ttft_s is None:
            self._ttft_s = time.monotonic() - self._started_s
        self._tokens = num_tokens
        self._estimated = estimated
        self._is_reasoning = bool(reasoning) and not text
        self._notice = ""
        self._unprinted.append((reasoning, text))

    def show_notice(self, message: str) -> None:
        """Show a message in the live part until more text comes."""
        self._notice = message

    def figures(self) -> report.LiveFigures:
        """TTFT, tokens, rate and context usage so far."""
        return report.LiveFigures(
            time.monotonic() - self._started_s,
            self._ttft_s,
            self._tokens,
            self._used_tokens + self._tokens,
            self._max_context,
            "~" if self._estimated else "",
            self._context_mark,
            self._prompt_progress(),
        )

    def __enter__(self) -> LiveAnswer:
        self._live.start()
        if self._console.is_terminal:
            self._render_thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._render_thread.ident is not None:
            self._render_thread.join()
        self._print_final(last=True)
        self._live.stop()
        if self._render_error is not None and error is None:
            raise self._render_error

    def _render_loop(self) -> None:
        try:
            pause_s = RENDER_INTERVAL_S
            while not self._done.wait(pause_s):
                started_s = time.monotonic()
                self._print_final()
                pause_s = max(RENDER_INTERVAL_S, IDLE_PER_RENDER * (time.monotonic() - started_s))
        except Exception as failure:  # raised again in __exit__
            self._render_error = failure

    def _print_final(self, *, last: bool = False) -> None:
        """Print the complete reasoning lines and blocks; the rest stays live."""
        while not self._draw(last=last):
            pass  # it was resized meanwhile

    def _draw(self, *, last: bool) -> bool:
        """Draw what there is; False, and nothing changes, if the console was resized meanwhile."""
        if self._live.is_resized():
            self._live.let_last(self._rows.let_last(self._live.live))
        while self._unprinted:
            self._rows.feed(*self._unprinted.popleft())
        if last:
            self._rows.finish()
        rows = copy(self._rows)
        lasting, changing = rows.take_final(last=last), rows.changing()
        num_fitting = max(1, self._console.size.height - _RESERVED_ROWS - bool(self._notice))
        if len(changing) > num_fitting:
            num_lasting = rows.let_last(changing)
            lasting, changing = lasting + changing[:num_lasting], changing[num_lasting:]
        # rows beyond the screen height would be pushed into the scrollback at every repaint
        below = [] if last else self._render_status()
        is_drawn = self._live.draw(lasting, changing[-num_fitting:], below)
        if is_drawn:
            self._rows = rows
        return is_drawn

    def _render_status(self) -> list[Row]:
        parts = (
            self._reasoning_hint if self._is_reasoning else "",
            report.live_stats_line(self.figures()) if self._shows_figures else "",
        )
        stats = " · ".join(part for part in parts if part)
        below = [(one_line(self._notice), "yellow"), (stats, "dim")]
        lines = [Text(text, style=style, no_wrap=True) for text, style in below if text]
        return [row for line in lines for row in self._console.render_lines(line, pad=False)]
