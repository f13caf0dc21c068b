"""Chat messages of OpenAI requests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Message
from localgen.server.openai.tools import MessageToolCall, parse_tool_calls
from localgen.server.requests.body import StrictModel, drop_fields, reject_unsupported_fields
from localgen.server.requests.parts import refusal_of_part

_UNSUPPORTED_IN_MESSAGES: dict[str, tuple[object, ...]] = {
    "refusal": (),
    "function_call": (),
    "audio": (),
    "annotations": ([],),
}


# fields that are valid for one role only
_ROLE_BY_FIELD = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}


# tells other servers where to cache a prompt
_HARMLESS_IN_PARTS = ("cache_control",)


class TextPart(StrictModel):
    """A content part. Only text is supported."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _require_text(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise InvalidRequest(
                f"messages: content part {kind[:40]}: {refusal_of_part(kind)}", param="messages"
            )
        return drop_fields(part, _HARMLESS_IN_PARTS)


class ChatMessage(StrictModel):
    """A chat message. Role `developer` is an alias of `system`.

    reasoning_content, reasoning: earlier reasoning of the assistant. name: of the function for role
    tool, else of the author, for templates that show it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, body: Any) -> Any:
        return reject_unsupported_fields(body, _UNSUPPORTED_IN_MESSAGES)

    def to_message(self, index: int) -> Message:
        """Convert to a Message. index: position in the request, for error messages.

        Raises InvalidRequest if a field is missing or not valid for the role.
        """
        place = f"messages[{index}]"
        if self.content is None and not self.tool_calls:
            raise InvalidRequest(f"{place}.content is missing", param=f"{place}.content")
        if self.role == "tool" and self.tool_call_id is None:
            where = f"{place}.tool_call_id"
            raise InvalidRequest(f"{where} is missing: set the id of the tool call", param=where)
        for field, role in _ROLE_BY_FIELD.items():
            if getattr(self, field) and self.role != role:
                where = f"{place}.{field}"
                raise InvalidRequest(
                    f"{where} is only valid for role {role}: leave it out", param=where
                )
        return Message(
            "system" if self.role == "developer" else self.role,
            _content_text(self.content),
            self.reasoning_content or self.reasoning,
            parse_tool_calls(self.tool_calls or (), f"{place}.tool_calls"),
            self.tool_call_id,
            self.name,
        )


def _content_text(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


class ChatTemplateKwargs(StrictModel):
    """Chat template variables that a request may set."""

    enable_thinking: bool | None = None
