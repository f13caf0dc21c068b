"""The question about a tool call, above the prompt: keys that are no text answer it."""

from __future__ import annotations

import time

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.style import Style
from textual.widgets import Static

from localgen.mcp_tools.call_question import CallQuestion, Decision

# key, decision, text and the name in keys.toml of each answer
TOOL_ANSWERS = (
    ("Alt+Y", Decision.ONCE, "Run the tool", "run_tool"),
    ("Alt+A", Decision.ALWAYS, "Always run it", "always_run_tool"),
    ("Alt+R", Decision.REFUSE, "Refuse it", "refuse_tool"),
)
# a key that comes sooner after the question, or after another such key, is meant for an earlier one
SETTLE_S = 0.5


class ToolQuestion(VerticalScroll):
    """Shows a call that waits for the user; hidden if none does.

    The arguments come with long values cut, and below it, by scrolling, uncut.

    question: the one that is shown.
    """

    DEFAULT_CSS = """
    ToolQuestion {
        height: auto; max-height: 40%; padding: 0 2; display: none;
        border-top: solid $warning; background: $surface; scrollbar-size-vertical: 1;
    }
    ToolQuestion.-shown { display: block; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.question: CallQuestion | None = None
        self._unsettled_s: float | None = None
        self._text = Static(markup=False)

    def compose(self) -> ComposeResult:
        yield self._text

    def show_question(self, question: CallQuestion | None) -> None:
        """Show a question; None hides the widget."""
        if question is self.question:
            return
        self.question, self._unsettled_s = question, None
        if question is not None:
            self._text.update(_content(question))
            self.scroll_home(animate=False)
            self.call_after_refresh(self._on_drawn, question)
        self.set_class(question is not None, "-shown")

    @property
    def is_drawn(self) -> bool:
        """True once the question has been on the screen."""
        return self._unsettled_s is not None

    def accepts(self, given_s: float) -> bool:
        """Whether an answer that was given at a time, as of time.monotonic(), is for this question.

        It is not if it came before the question was drawn, or within SETTLE_S of that or of the
        last one that was not.
        """
        if self._unsettled_s is not None and given_s - self._unsettled_s >= SETTLE_S:
            return True
        if self._unsettled_s is not None:
            self._unsettled_s = max(self._unsettled_s, given_s)
        return False

    def _on_drawn(self, question: CallQuestion) -> None:
        if question is self.question and not self.is_drawn:
            self._unsettled_s = time.monotonic()


def _content(question: CallQuestion) -> Content:
    # the answers first: long arguments are scrolled
    answers = Content("   ").join(
        # not broken within an answer
        Content.styled(f"{key} {text}".replace(" ", "\N{NO-BREAK SPACE}"), _click(decision))
        for key, decision, text, _ in TOOL_ANSWERS
    )
    call = Content.assemble(
        ("run ", "bold $warning"), (question.title, "bold"), f"? {question.arguments}"
    )
    if not question.is_cut:
        return Content("\n").join((answers, call))
    scroll = Content.styled("scroll for all of it:", "dim")
    return Content("\n").join((answers, call, scroll, Content(question.whole_arguments)))


def _click(decision: Decision) -> Style:
    return Style.from_meta({"@click": f"app.answer_call('{decision.value}')"})
