"""The tokens of an answer: what else was likely at each place, and a fork from any of them."""

from __future__ import annotations

import asyncio
import re
import threading
from bisect import bisect_left
from collections.abc import Callable
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import escape_control_chars, one_line
from localgen.client.responses import TokenAlternative
from localgen.tui.gauges.plots import bar
from localgen.tui.widgets.dialog import Dialog

NUM_ALTERNATIVES = 8
_BAR_COLUMNS, _TEXT_COLUMNS = 20, 24
# what is shown of the answer around the place: it must be among the rows that fit
_CHARS_BEFORE, _LINES_BEFORE, _CHARS_AFTER = 240, 4, 400
# keys that come faster are skipped over, so that not each place is computed
_LOOK_DELAY_S = 0.15
_FAR, _TO_END = 20, 1_000_000_000
_WORDS = re.compile(r"\s*\S+")

Look = Callable[[str], tuple[TokenAlternative, ...]]


class TokenScreen(Dialog[str | None]):
    """Closes with the beginning of an answer to continue, or None.

    look: returns the likely tokens after a beginning of the answer; it blocks, and raises
    LocalgenError.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close"),
        Binding("right,l", "step(1)", "Next token"),
        Binding("left,h", "step(-1)", "Previous token"),
        Binding("pagedown", f"step({_FAR})", "Far on"),
        Binding("pageup", f"step({-_FAR})", "Far back"),
        # the list has these keys too
        Binding("home", f"step({-_TO_END})", "First token", priority=True),
        Binding("end", f"step({_TO_END})", "Last token", priority=True),
        Binding("j", "choose(1)", show=False),
        Binding("k", "choose(-1)", show=False),
    ]
    DEFAULT_CSS = """
    TokenScreen > Vertical {
        width: 100; max-width: 95%; height: 22; max-height: 95%; padding: 0 1;
        border: round $primary; background: $surface; border-title-color: $primary;
        border-subtitle-color: $text-muted;
    }
    TokenScreen #text { height: 1fr; max-height: 10; margin: 0 0 1 0; }
    TokenScreen #state { height: 1; color: $muted; text-wrap: nowrap; text-overflow: ellipsis; }
    TokenScreen OptionList, TokenScreen OptionList:focus {
        height: 8; border: none; background: $surface; padding: 0;
    }
    """

    def __init__(self, answer: str, look: Look) -> None:
        super().__init__()
        self._answer, self._look, self._look_lock = answer, look, threading.Lock()
        # places between tokens: words at first, parts of words as they become known
        self._places = [found.start() for found in _WORDS.finditer(answer)]
        self._at = 0
        self._alternatives: tuple[TokenAlternative, ...] = ()

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Tokens"
            box.border_subtitle = "← → place, ↑ ↓ token, Enter continues from it, Esc closes"
            yield Static(id="text", markup=False)
            yield Static(id="state", markup=False)
            yield OptionList(markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self._show_place()

    @property
    def _beginning(self) -> str:
        return self._answer[: self._places[self._at]]

    @property
    def _taken(self) -> str:
        """The token of the answer at the place, as far as it is known: else its word."""
        rest = self._answer[self._places[self._at] :]
        texts = [each.text for each in self._alternatives]
        fitting = [text for text in texts if text and rest.startswith(text)]
        if fitting:
            return max(fitting, key=len)
        end = self._places[self._at + 1] if self._at + 1 < len(self._places) else len(self._answer)
        return rest[: end - self._places[self._at]]

    def action_step(self, by: int) -> None:
        """Go on or back by places; a token that is shorter than its word makes a place."""
        if by == 1:
            end = self._places[self._at] + len(self._taken)
            where = bisect_left(self._places, end)
            if end < len(self._answer) and self._places[where : where + 1] != [end]:
                self._places.insert(where, end)
        self._at = max(0, min(self._at + by, len(self._places) - 1))
        self._show_place()

    def action_choose(self, by: int) -> None:
        options = self.query_one(OptionList)
        if by > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        chosen = self._alternatives[event.option_index]
        if "\ufffd" in chosen.text:
            self._show_state("this token is a part of a character: the answer cannot fork at it")
        else:
            self.dismiss(self._beginning + chosen.text)

    def _show_place(self) -> None:
        self._alternatives = ()
        self._show_text()
        self._show_state("computing what was likely here …")
        self._fetch(self._at)

    @work(exclusive=True, group="alternatives")
    async def _fetch(self, at: int) -> None:
        await asyncio.sleep(_LOOK_DELAY_S)
        try:
            found = await asyncio.to_thread(self._look_once, self._beginning)
        except LocalgenError as error:
            self._show_state(one_line(error.message))
            return
        if at != self._at or not self.is_open:
            return
        self._alternatives = found
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([Option(self._row(each)) for each in found])
        self._show_text()
        taken = [index for index, each in enumerate(found) if each.text == self._taken]
        options.highlighted = taken[0] if taken else None
        share = sum(each.probability for each in found)
        self._show_state(
            f"{at + 1:,} of {len(self._places):,} · these are {share:.0%} of the probability"
            if found
            else "the model would end the answer here"
        )

    def _look_once(self, beginning: str) -> tuple[TokenAlternative, ...]:
        with self._look_lock:  # a thread goes on when its worker is cancelled
            return self._look(beginning)

    def _show_state(self, line: str) -> None:
        self.query_one("#state", Static).update(Content(line))

    def _show_text(self) -> None:
        """The answer around the place, with the token at it lit."""
        start, taken = self._places[self._at], self._taken
        end = start + len(taken)
        before = self._answer[max(0, start - _CHARS_BEFORE) : start]
        before = "\n".join(before.split("\n")[-_LINES_BEFORE:])
        lit = escape_control_chars(taken)
        blank = lit[: len(lit) - len(lit.lstrip())]
        text = Content.assemble(
            escape_control_chars(before),
            blank,
            (lit[len(blank) :] or "⏎", "reverse"),
            (escape_control_chars(self._answer[end : end + _CHARS_AFTER]), "$muted"),
        )
        self.query_one("#text", Static).update(text)

    def _row(self, alternative: TokenAlternative) -> Content:
        mark = "● " if alternative.text == self._taken else "  "
        text = one_line(alternative.text.replace(" ", "␣").replace("\n", "⏎"))
        return Content.assemble(
            (mark, "$primary"),
            (f"{text:<{_TEXT_COLUMNS}}", "bold"),
            f"{alternative.probability:>6.1%} ",
            (bar(alternative.probability, _BAR_COLUMNS), "$success"),
        )
