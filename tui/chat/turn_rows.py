"""The rows of one turn: prompt, reasoning, answer and summary line."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from localgen.backends.terminal_text import ProseStream, escape_control_chars
from localgen.chat.conversation import ToolStep, Turn
from localgen.chat.fences import with_short_blocks
from localgen.mcp_tools.call_arguments import call_line
from localgen.tui.chat.markdown import RowRenderer, SafeMarkdown
from localgen.tui.chat.rows import FOLD, MUTED, PROMPT, WARNING, Row

_PROMPT_LINES = 12
_PROMPT_CHARS = 2_000
_CODE_LINES = 4
_RESULT_LINES, _RESULT_CHARS = 4, 400
_FIGURE_SEPARATOR = " · "


class TurnRows:
    """A complete turn, or one in progress: append() adds to it, finish() completes it."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._is_folded = True  # only the head of the reasoning is shown
        self._safe_reasoning, self._safe_answer = ProseStream(), SafeMarkdown()
        self._reasoning = _GrowingRows(_split_lines, RowRenderer.reasoning)
        self._answer = _GrowingRows(_split_blocks, RowRenderer.markdown, has_gaps=True)
        self._renderer: RowRenderer | None = None
        self._prompt_rows: list[Row] = []
        self._step_rows: list[Row] = []
        self._rows: list[Row] = []  # empty: something has changed
        self.append(turn.reasoning, turn.answer)
        self.finish(turn)

    def append(self, reasoning: str, text: str) -> None:
        """Append to an answer in progress."""
        self._rows = []
        self._reasoning.append(self._safe_reasoning.feed(reasoning, last=bool(text)))
        self._answer.append(self._safe_answer.feed(text))

    def finish(self, turn: Turn) -> None:
        """Complete the answer and show its summary."""
        self.turn, self._rows = turn, []
        self._reasoning.append(self._safe_reasoning.feed("", last=True))
        self._answer.append(self._safe_answer.feed("", last=True))

    def toggle_reasoning(self) -> None:
        self._is_folded, self._rows = not self._is_folded, []

    def rows(self, renderer: RowRenderer) -> list[Row]:
        """The rows; a blank one is the last. What has not changed is not rendered again."""
        if renderer is not self._renderer:
            self._renderer, self._rows = renderer, []
            self._prompt_rows = renderer.text(_prompt_text(self.turn.prompt), PROMPT)
            steps = self.turn.steps
            self._step_rows = [row for step in steps for row in _rows_of_step(step, renderer)]
            self._reasoning.clear_rows()
            self._answer.clear_rows()
        if not self._rows:
            self._rows = self._prompt_rows + self._step_rows
            self._rows += self._reasoning_rows(renderer)
            self._rows += self._answer.rows(renderer)
            if self.turn.summary:
                style = WARNING if self.turn.stopped else MUTED
                summary = _summary_text(self.turn, renderer.width - 2)
                self._rows += renderer.text(Text(summary), style)
            self._rows.append(())
        return self._rows

    def _reasoning_rows(self, renderer: RowRenderer) -> list[Row]:
        if not self._reasoning.text:
            return []
        head = renderer.text(self._reasoning_head(), MUTED)
        return head if self._is_folded else head + self._reasoning.rows(renderer)

    def _reasoning_head(self) -> Text:
        mark = "▶" if self._is_folded else "▼"
        words = len(self._reasoning.text.split())
        return Text(f"{mark} reasoning, {words:,} words", Style.from_meta({FOLD: True}))


class _GrowingRows:
    """Rows of a text that grows. Those of finished blocks are kept.

    split: returns the blocks that can no longer change, and the rest. has_gaps: a blank row between
    blocks.
    """

    def __init__(
        self,
        split: Callable[[str], tuple[list[str], str]],
        render: Callable[[RowRenderer, str], list[Row]],
        *,
        has_gaps: bool = False,
    ) -> None:
        self.text = ""
        self._split, self._render, self._has_gaps = split, render, has_gaps
        self._rest = ""
        self._finished: list[Row] = []
        self._last: list[Row] = []
        self._is_changed = False

    def append(self, piece: str) -> None:
        if piece:
            self.text += piece
            self._rest += piece
            self._is_changed = True

    def clear_rows(self) -> None:
        """Have all rows rendered again."""
        self._rest, self._finished, self._last = self.text, [], []
        self._is_changed = True

    def rows(self, renderer: RowRenderer) -> list[Row]:
        if self._is_changed:
            self._is_changed = False
            blocks, self._rest = self._split(self._rest)
            for block in blocks:
                self._finished += self._with_gap(self._render(renderer, block))
            self._last = self._with_gap(self._render(renderer, self._rest))
        return self._finished + self._last

    def _with_gap(self, rows: list[Row]) -> list[Row]:
        if rows and self._finished and self._has_gaps:
            return [(), *rows]
        return rows


def _rows_of_step(step: ToolStep, renderer: RowRenderer) -> list[Row]:
    """The text of a step, its calls, and the beginning of each result."""
    rows = renderer.markdown(SafeMarkdown().feed(step.text, last=True)) if step.text else []
    for call, result in zip(step.calls, step.results, strict=True):
        rows += renderer.text(Text(call_line(call)), MUTED)
        rows += renderer.text(Text(_result_text(result)), MUTED, indent=3)
    return rows


def _result_text(result: str) -> str:
    shown = "\n".join(result.split("\n")[:_RESULT_LINES])[:_RESULT_CHARS]
    rest = len(result) - len(shown)
    more = f"\n… {rest:,} characters more" if rest else ""
    return escape_control_chars(shown) + more


def _summary_text(turn: Turn, width: int) -> str:
    """The summary. Of its first line, the figures, as many as fit: the first ones matter most."""
    summary = escape_control_chars(turn.summary)
    figures, line_end, rest = summary.partition("\n")
    while not turn.stopped and cell_len(figures) > width and _FIGURE_SEPARATOR in figures:
        figures = figures.rpartition(_FIGURE_SEPARATOR)[0]
    return figures + line_end + rest


def _split_blocks(text: str) -> tuple[list[str], str]:
    from localgen.chat.markup import split_blocks  # the parser is slow to import

    return split_blocks(text)


def _split_lines(text: str) -> tuple[list[str], str]:
    *lines, rest = text.split("\n")
    return lines, rest


def _prompt_text(prompt: str) -> Text:
    """The prompt, or the first lines of a long one, and of each of its code blocks."""
    whole = escape_control_chars(prompt)
    shown = with_short_blocks(whole, _CODE_LINES)
    lines = shown.split("\n")
    begin = "\n".join(lines[:_PROMPT_LINES])[:_PROMPT_CHARS]
    rest = len(shown) - len(begin)
    mark = ("› ", "prompt.mark")
    if rest <= 0:
        return Text.assemble(mark, (begin, "bold"))
    num_more, num_lines = rest + len(whole) - len(shown), whole.count("\n") + 1
    more = f"\n… {num_more:,} characters more, {num_lines:,} lines in all"
    return Text.assemble(mark, (begin, "bold"), (more, MUTED))
