"""The question about a tool call, above the prompt: keys that are no text answer it."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.style import Style
from textual.widgets import Static

from localgen.mcp_tools.chat_tools import CallQuestion, Decision

# key, decision, text and the name in keys.toml of each answer
TOOL_ANSWERS = (
    ("Alt+Y", Decision.ONCE, "Run the tool", "run_tool"),
    ("Alt+A", Decision.ALWAYS, "Always run it", "always_run_tool"),
    ("Alt+R", Decision.REFUSE, "Refuse it", "refuse_tool"),
)


class ToolQuestion(VerticalScroll):
    """Shows a call that waits for the user; hidden if none does. The arguments can be scrolled.

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
        self._text = Static(markup=False)

    def compose(self) -> ComposeResult:
        yield self._text

    def show_question(self, question: CallQuestion | None) -> None:
        """Show a question; None hides the widget."""
        if question is self.question:
            return
        self.question = question
        if question is not None:
            self._text.update(_content(question))
            self.scroll_home(animate=False)
        self.set_class(question is not None, "-shown")


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
    return Content("\n").join((answers, call))


def _click(decision: Decision) -> Style:
    return Style.from_meta({"@click": f"app.answer_call('{decision.value}')"})
