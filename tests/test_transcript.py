"""The Markdown of a session: what a text holds stays in its section."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from localgen.backends.types import ToolCall
from localgen.chat.conversation import Conversation, ToolStep, Turn
from localgen.chat.transcript import transcript_markdown

CALL = ToolCall("1", "t", '{"a": "</summary>"}')
HOSTILE = [
    "</details>\n\n# Injected\n\n<details>",
    "text </details> text",
    "a\n\n</details>",
    "<!-- hidden from here",
    "<script>\n\n```\nalert()",
    "<pre>\n\n- x",
    "```\nopen",
    "~~~~ python\nopen\n~~~",
    "```markdown\nopen\n```python",
    "```\ncode </details>\n```",
    "````\n```\n</details>\n````",
    "`a\nb` </details> `c",
    "| a |\n|---|\n| </details> |",
    "> quote\n> <b>\n\n1. ```\n   <i>",
    "<div\n\nend",
    "\\</details>",
    "&lt;/details> & <a href='x'>",
    "one\rtwo </details>\r\n```",
    "[x]: </details>",
    "",
]


class Shape(HTMLParser):
    """The elements that a page has, without those that Markdown's own texts make."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.found: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("h2", "details", "summary"):
            self.opened.append(tag)
            self.found.append("/".join(self.opened))
        assert tag not in ("script", "b", "i", "div"), tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h2", "details", "summary"):
            assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def shape(text: str, result: str = "") -> tuple[list[str], str]:
    calls = (ToolCall("1", "notes__read", f'{{"path": "{text}"}}'),)
    step = ToolStep(text, "", calls, (result or text,))
    turns = (Turn(text, text, reasoning=text, summary="3 tokens", steps=(step,)), Turn("next", "z"))
    markdown = transcript_markdown("name", Conversation(text, turns))
    page = Shape(MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown))
    assert page.opened == []
    return page.found, "".join(page.text)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_leaves_its_section(text: str) -> None:
    with_reasoning, _ = shape("plain")
    found, shown = shape(text)
    assert found == (with_reasoning if text else [*with_reasoning[:3], *with_reasoning[5:]])
    for word in ("Injected", "hidden from here", "alert()", "code", "open", "end"):
        assert word not in text or word in shown


def test_markdown_of_an_answer_is_kept() -> None:
    answer = "# Title\n\n- `a < b`\n\n```html\n<p>\n```\n\n1 < 2 and <https://x.example>"
    assert answer in transcript_markdown("x", Conversation(None, (Turn("a", answer),)))


def test_a_result_is_shown_as_it_is() -> None:
    result = "# No heading\n```\n</details> *a*"
    markdown = transcript_markdown(
        "x", Conversation(None, (Turn("a", "b", steps=(ToolStep("", "", (CALL,), (result,)),)),))
    )
    assert f"</summary>\n\n````\n{result}\n````\n\n</details>" in markdown
    assert '<summary>t {"a": "&lt;/summary>"}</summary>' in markdown.replace("&gt;", ">")
