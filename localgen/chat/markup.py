"""How the Markdown of a model is read."""

from __future__ import annotations

from markdown_it import MarkdownIt


def create_markdown_parser() -> MarkdownIt:
    """CommonMark with tables and strikethrough, as far as a terminal can show it.

    HTML, images, entities and reference definitions would hide or reorder what the model wrote.
    """
    return (
        MarkdownIt("commonmark", {"html": False})
        .enable(["table", "strikethrough"])
        .disable(["image", "entity", "reference", "html_block", "html_inline"])
    )
