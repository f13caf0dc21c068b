"""What the copy key copies: the last answer, then its code blocks."""

from __future__ import annotations

import time

from localgen.backends import units

# a later key copies the whole answer again
_REPEAT_S = 5.0


class AnswerCopies:
    """Goes through the copies of an answer, one for each press of the key."""

    def __init__(self) -> None:
        self._last_s, self._at, self._answer = float("-inf"), 0, ""

    def next(self, answer: str) -> tuple[str, str]:
        """Return the text to copy and its message: the answer, then its blocks from the last."""
        from localgen.chat.markup import code_blocks  # the parser is slow to import

        blocks = code_blocks(answer)
        now_s = time.monotonic()
        is_again = now_s - self._last_s < _REPEAT_S and answer == self._answer
        self._at = (self._at + 1) % (len(blocks) + 1) if is_again else 0
        self._last_s, self._answer = now_s, answer
        if self._at == 0:
            more = "; Ctrl+Y again: its last code block" if blocks else ""
            return answer, f"copied the last answer{more}"
        block = blocks[-self._at]
        lines = units.format_count(block.count("\n"), "line")
        number = len(blocks) + 1 - self._at
        return block, f"copied {lines} of code, block {number} of {len(blocks)}"
