"""An answer drawn as it comes: whole blocks scroll away for good, only the last one is live."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text as Styled

from localgen.backends.terminal_text import inert
from localgen.chat import report
from localgen.repl.markdown import block_lines, split_blocks

PAINT_S = 0.08
# a long block is slow to draw: the model needs the cores more than the screen does
PAUSE_PER_PAINT = 9
_ROWS_KEPT_FREE = 3  # the live line, the blank row above it, the cursor's row


class LiveAnswer:
    """One answer on a console. One thread paints, at a steady rate whatever the token rate.

    What the model thinks before it answers is dimmed, line by line as it comes.

    On leaving, the whole text stands printed and nothing live is left.
    """

    def __init__(self, console: Console, *, used: int, limit: int | None) -> None:
        self._console = console
        self._used = used
        self._limit = limit
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._painter = threading.Thread(target=self._paint_until_done, daemon=True)
        self._done = threading.Event()
        self._failure: Exception | None = None
        self._fresh: deque[tuple[str, str]] = deque()  # thoughts, text
        self._thought = ""
        self._tail = ""
        self._printed_any = False
        self._tokens = 0
        self._estimated = False
        self._started_s = time.monotonic()
        self._ttft_s: float | None = None

    def feed(self, text: str, tokens: int, reasoning: str = "", *, estimated: bool = False) -> None:
        """More of the answer, and of the thoughts before it.

        tokens: how many there are by now; estimated: or about so many.
        """
        if self._ttft_s is None:
            self._ttft_s = time.monotonic() - self._started_s
        self._tokens = tokens
        self._estimated = estimated
        self._fresh.append((reasoning, text))

    def speed(self) -> str:
        """One line: TTFT, rate, tokens and place in the context, as seen from here."""
        waited_s = time.monotonic() - self._started_s
        used = self._used + self._tokens
        about = "~" if self._estimated else ""
        return report.live_line(waited_s, self._ttft_s, self._tokens, used, self._limit, about)

    def __enter__(self) -> LiveAnswer:
        self._live.start()
        if self._console.is_terminal:
            self._painter.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._painter.ident is not None:
            self._painter.join()
        self._settle(last=True)
        self._live.update("")
        self._live.stop()
        if self._failure is not None and error is None:
            raise self._failure

    def _paint_until_done(self) -> None:
        try:
            pause_s = PAINT_S
            while not self._done.wait(pause_s):
                started_s = time.monotonic()
                self._settle()
                self._live.refresh()
                pause_s = max(PAINT_S, PAUSE_PER_PAINT * (time.monotonic() - started_s))
        except Exception as failure:  # raised again where the answer is awaited
            self._failure = failure

    def _settle(self, *, last: bool = False) -> None:
        """Print the thoughts and blocks that have become whole; the rest is live."""
        while self._fresh:
            reasoning, text = self._fresh.popleft()
            self._thought += inert(reasoning)
            self._tail += inert(text)
        thought = self._whole_thought(last=last or bool(self._tail))
        blocks, self._tail = split_blocks(self._tail)
        if last:
            blocks, self._tail = [*blocks, self._tail], ""
        # the live part shrinks first: printing redraws it in the same write
        self._live.update(self._live_part())
        if thought:
            self._console.print(Styled(thought.removesuffix("\n"), style="dim"))
            self._printed_any = True
        for block in blocks:
            self._print(block)

    def _whole_thought(self, *, last: bool) -> str:
        """The lines of thought that are complete; last: nothing is added to them any more."""
        cut = len(self._thought) if last else self._thought.rfind("\n") + 1
        whole, self._thought = self._thought[:cut], self._thought[cut:]
        return whole

    def _print(self, block: str) -> None:
        rows = block_lines(self._console, block)
        if not rows:
            return
        if self._printed_any:
            self._console.print()
        self._console.print(_rows(rows), end="")
        self._printed_any = True

    def _live_part(self) -> Group:
        thought = Styled(self._thought, style="dim")
        rows = self._console.render_lines(thought, pad=False) if self._thought else []
        rows += block_lines(self._console, self._tail)
        # more than fits would push rows into the scroll-back again at every repaint
        fitting = rows[-max(1, self._console.size.height - _ROWS_KEPT_FREE) :]
        has_gap = rows and self._printed_any and not self._thought
        gap: list[list[Segment]] = [[]] if has_gap else []
        return Group(_rows([*gap, *fitting]), Styled(self.speed(), style="dim", no_wrap=True))


def _rows(rows: list[list[Segment]]) -> Segments:
    return Segments([segment for row in rows for segment in (*row, Segment.line())])
