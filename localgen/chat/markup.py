"""The Markdown dialect of answers."""

from __future__ import annotations

from markdown_it import MarkdownIt


def create_markdown_parser() -> MarkdownIt:
    """Create a parser for CommonMark with tables and strikethrough.

    HTML, images, entities and reference definitions are disabled: they would hide or reorder text
    of the answer.
    """
    return (
        MarkdownIt("commonmark", {"html": False})
        .enable(["table", "strikethrough"])
        .disable(["image", "entity", "reference", "html_block", "html_inline"])
    )
