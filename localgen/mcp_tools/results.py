"""The result of a tool call as text for the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localgen.backends.terminal_text import escape_control_chars

if TYPE_CHECKING:
    from mcp_types import CallToolResult, ContentBlock

MAX_RESULT_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. text: of the tool, or the reason if it failed."""

    text: str
    failed: bool = False


def read_result(result: CallToolResult) -> ToolResult:
    """The texts of a result; what is no text is named, not included."""
    parts = [_block_text(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return ToolResult("\n".join(parts), bool(result.is_error))


def cut_result(text: str, max_chars: int) -> str:
    """The text with control characters escaped; the end says what was left out."""
    kept = escape_control_chars(text[:max_chars])
    if len(text) <= max_chars:
        return kept
    return f"{kept}\n[cut: the first {max_chars:,} of {len(text):,} characters]"


def _block_text(block: ContentBlock) -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type}: {block.mime_type}, not shown]"
        case "resource_link":
            return f"[resource: {block.uri}]"
        case "resource":
            text = getattr(block.resource, "text", None)
            return text if isinstance(text, str) else f"[resource: {block.resource.uri}, not text]"
