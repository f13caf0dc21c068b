"""A session as a Markdown file, whose texts stay in their sections."""

from __future__ import annotations

import html
from collections.abc import Iterator

from markdown_it import MarkdownIt
from markdown_it.token import Token

from localgen.backends.terminal_text import collapse, one_line
from localgen.chat.conversation import Conversation, ToolStep
from localgen.chat.fences import fenced
from localgen.mcp_tools.call_arguments import call_title

# a reader of the file may show HTML
_PARSER = MarkdownIt("commonmark", {"html": True}).enable("table")


def transcript_markdown(name: str, conversation: Conversation) -> str:
    """The transcript of a session as Markdown, with reasoning and tool calls in collapsed sections.

    HTML in a text is shown as text: it could end a section, or hide what follows.
    """
    parts = [f"# {_self_contained(collapse(name))}\n"]
    if conversation.system:
        parts.append(f"System prompt:\n\n{_blockquote(_self_contained(conversation.system))}\n")
    for turn in conversation.turns:
        parts.append(f"## You\n\n{_self_contained(turn.prompt)}\n")
        thought = _collapsed("Reasoning", _self_contained(turn.reasoning)) if turn.reasoning else ""
        calls = "".join(_step_markdown(step) for step in turn.steps)
        summary = " · ".join(turn.summary.splitlines())
        served = f"\n\n*{_self_contained(summary)}*" if summary else ""
        answer = _self_contained(turn.answer)
        parts.append(f"## Answer\n\n{calls}{thought}{answer}{served}\n")
    return "\n".join(parts)


def _step_markdown(step: ToolStep) -> str:
    """The text of a step, and its calls in collapsed sections."""
    text = f"{_self_contained(step.text)}\n\n" if step.text else ""
    calls = (
        # a result is no Markdown of the model's
        _collapsed(f"{call_title(call.name)} {one_line(call.arguments)}", fenced(result, ""))
        for call, result in zip(step.calls, step.results, strict=True)
    )
    return text + "".join(calls)


def _collapsed(title: str, body: str) -> str:
    summary = html.escape(title, quote=False)
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>\n\n"


def _self_contained(text: str) -> str:
    """The same Markdown without HTML, and with its last code block closed."""
    tokens = _PARSER.parse(text)
    while html_lines := set(_html_lines(tokens)):
        text = "\n".join(
            line.replace("<", "&lt;") if at in html_lines else line
            for at, line in enumerate(_lines(text))
        )
        tokens = _PARSER.parse(text)
    last = next((token for token in reversed(tokens) if token.level == 0), None)
    if last is None or last.type != "fence" or last.map is None:
        return text
    begin, end = last.map
    lines = _lines(text)
    fence = lines[end - 1].strip()
    is_closed = end - begin > 1 and set(fence) == {last.markup[0]}
    is_closed = is_closed and len(fence) >= len(last.markup)
    return text if is_closed else f"{text}\n{last.markup}"


def _html_lines(tokens: list[Token]) -> Iterator[int]:
    """The lines of the blocks that have HTML."""
    around = [0, 0]
    for token in tokens:
        around = token.map or around  # the cell of a table has none, its row has
        if token.type == "html_block" or any(
            child.type == "html_inline" for child in token.children or ()
        ):
            yield from range(*around)


def _lines(text: str) -> list[str]:
    """As the parser counts them."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _blockquote(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())
