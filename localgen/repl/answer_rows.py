"""The rows of an answer that streams: those that are final, and those of its last block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from rich.console import Console
from rich.text import Text

from localgen.backends.terminal_text import ProseStream
from localgen.chat.markup import split_blocks, split_table
from localgen.repl.live_rows import Row
from localgen.repl.markdown import render_block

# of a code block that begins: a fence with a name that grows, an empty line, a fence
_GROWING_ROWS = 3
_BLANK_ROW = "\n"
# what Markdown shows while it is incomplete and may hide later, and what depends on the width
_OPTIONAL = frozenset("*_`#|~[]()<>\\\u258c" + _BLANK_ROW)


class AnswerRows:
    """Renders each block when it can no longer change, and the last one as it is now.

    The first rows of the last block can be made lasting early (let_last); they do not come again.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._escaped_reasoning, self._escaped_text = ProseStream(), ProseStream()
        self._reasoning = ""
        self._text = ""
        # visible_text() of what follows that has been made lasting
        self._lasting_reasoning = self._lasting = ""
        self._has_header = False  # the text begins with a table whose header has
        self._returned_any = False

    def feed(self, reasoning: str, text: str) -> None:
        """Append text and reasoning."""
        self._reasoning += self._escaped_reasoning.feed(reasoning, last=bool(text))
        self._text += self._escaped_text.feed(text)

    def finish(self) -> None:
        """The answer is complete."""
        self._reasoning += self._escaped_reasoning.feed("", last=True)
        self._text += self._escaped_text.feed("", last=True)

    def take_final(self, *, last: bool = False) -> list[Row]:
        """The rows of reasoning lines and blocks that are complete, once; of all if `last`."""
        thought_rows: list[Row] = []
        if thought := self._take_reasoning_lines(last=last or bool(self._text)):
            rows = self._render_thought(thought.removesuffix("\n"))
            thought_rows, self._lasting_reasoning = _without(self._lasting_reasoning, rows)
            self._returned_any = True
        blocks, self._text = split_blocks(self._text)
        if last:
            blocks, self._text = [*blocks, self._text], ""
        rows = []
        for block in blocks:
            rows += self._render_block(block)
            self._returned_any, self._has_header = bool(rows) or self._returned_any, False
        rows, self._lasting = _without(self._lasting, rows)
        return thought_rows + rows

    def changing(self) -> list[Row]:
        """The rows of the last line of reasoning or the last block, which more text may change."""
        if self._reasoning:
            return _without(self._lasting_reasoning, self._render_thought(self._reasoning))[0]
        rows = self._render_block(self._text)
        text = visible_text(rows)
        count, _ = _match(self._lasting, text)
        if count < len(text):
            self._lasting = text[:count]
        return _drop_visible(rows, count)

    def let_last(self, rows: Sequence[Row]) -> int:
        """Make all rows but the last ones, which grow, lasting; returns how many.

        rows: of changing().
        """
        num_rows = max(0, len(rows) - _GROWING_ROWS)
        if self._reasoning:
            self._lasting_reasoning += visible_text(rows[:num_rows])
            return num_rows
        if (table := split_table(self._text)) is None:
            self._lasting += visible_text(rows[:num_rows])
            return num_rows
        header, body, rest = table
        first = 0 if self._has_header else _header_rows(rows)
        # as many characters as the first lines of the source have when rendered, in any width
        lines = _index_by_total(_num_visible(self._render_body(header, line)) for line in body)
        table_rows = _index_by_total(_num_visible([row]) for row in rows[first:num_rows])
        total = max(lines.keys() & table_rows.keys())
        num_lines, num_rows = lines[total], first + table_rows[total]
        if num_rows:
            self._lasting, self._has_header = "", num_lines < len(body) or not rest.strip()
            self._text = "".join((header, *body[num_lines:], rest)) if self._has_header else rest
            self._returned_any = True
        return num_rows

    def _take_reasoning_lines(self, *, last: bool) -> str:
        """Remove and return the complete lines of reasoning, or all of it if `last`."""
        cut = len(self._reasoning) if last else self._reasoning.rfind("\n") + 1
        whole, self._reasoning = self._reasoning[:cut], self._reasoning[cut:]
        return whole

    def _render_thought(self, thought: str) -> list[Row]:
        return self._console.render_lines(Text(thought, style="dim"), pad=False)

    def _render_block(self, block: str) -> list[Row]:
        rows = render_block(self._console, block)
        if self._has_header:
            return rows[_header_rows(rows) :]
        gap: list[Row] = [[]] if rows and self._returned_any else []
        return gap + rows

    def _render_body(self, header: str, lines: str) -> list[Row]:
        rows = render_block(self._console, header + lines)
        return rows[_header_rows(rows) :]


def visible_text(rows: Sequence[Row]) -> str:
    """The characters of rows without spaces and box-drawing characters: the same at any width.

    A row that has no others is one newline.
    """
    texts = ("".join(segment.text for segment in row) for row in rows)
    return "".join("".join(filter(_is_visible, text)) or _BLANK_ROW for text in texts)


def _num_visible(rows: Sequence[Row]) -> int:
    return sum(_is_visible(char) for row in rows for segment in row for char in segment.text)


def _index_by_total(sizes: Iterable[int]) -> dict[int, int]:
    """How many of the sizes have each of their totals; the fewest."""
    index: dict[int, int] = {}
    for count, total in enumerate(accumulate(sizes, initial=0)):
        index.setdefault(total, count)
    return index


def _without(lasting: str, rows: list[Row]) -> tuple[list[Row], str]:
    """The rows without what is lasting, and what of that is behind them."""
    text = visible_text(rows)
    count, matched = _match(lasting, text)
    # at a difference: rather repeat text than lose any
    return _drop_visible(rows, count), lasting[matched:] if count == len(text) else ""


def _match(lasting: str, text: str) -> tuple[int, int]:
    """How many characters of `text` are in `lasting`, from the first one on, and those there.

    Either may have characters that the other lacks, as a link has when it is complete.
    """
    at, count = 0, 0
    while at < len(lasting) and count < len(text):
        if lasting[at] == text[count]:
            at, count = at + 1, count + 1
        elif lasting[at] in _OPTIONAL:
            at += 1
        elif text[count] in _OPTIONAL:
            count += 1
        else:
            break
    return count, at


def _drop_visible(rows: Sequence[Row], count: int) -> list[Row]:
    """The rows without the first `count` characters of visible_text()."""
    for index, row in enumerate(rows):
        if not count:
            return list(rows[index:])
        here = len(visible_text([row]))
        if here > count:
            return [_drop_from_row(row, count), *rows[index + 1 :]]
        count -= here
    return []


def _drop_from_row(row: Row, count: int) -> Row:
    """The end of a row that has more than `count` visible characters."""
    for index, segment in enumerate(row):
        here = sum(map(_is_visible, segment.text))
        if here > count:
            text = segment.text
            while count:
                count -= _is_visible(text[0])
                text = text[1:]
            return [segment._replace(text=text.lstrip()), *row[index + 1 :]]
        count -= here
    return []


def _header_rows(rows: Sequence[Row]) -> int:
    """Rows of a table's header, with the line below it; 0 if there is none."""
    for index, row in enumerate(rows):
        if visible_text([row]) == _BLANK_ROW and any(segment.text.strip() for segment in row):
            return index + 1
    return 0


def _is_visible(character: str) -> bool:
    return not (character.isspace() or "\u2500" <= character <= "\u257f")
