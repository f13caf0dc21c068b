"""Request schemas of the Messages API. Unknown fields are rejected by name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.server.anthropic.content import (
    AnthropicMessage,
    AnthropicTool,
    TextBlock,
    parse_anthropic_tools,
    to_messages,
    to_system_text,
)
from localgen.server.requests.body import (
    RequestBody,
    StrictModel,
    drop_fields,
    reject_unsupported_fields,
)
from localgen.server.requests.turns import join_turns

# accepted without effect: none of them changes a token of the answer
_HARMLESS = (
    *("metadata", "service_tier", "context_management", "inference_geo", "cache_control"),
    *("speed", "diagnostics", "user_profile_id", "workspace_id"),
)
_UNSUPPORTED: dict[str, tuple[object, ...]] = {"mcp_servers": ([],), "container": ()}


class ToolChoice(StrictModel):
    """any: the model calls at least one tool. tool: it calls the one of this name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(StrictModel):
    """Reasoning. enabled, adaptive: as the model does by default, up to budget_tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    display: str | None = None


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """effort: no effect; the model's own default applies."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class _PromptRequest(RequestBody):
    """The fields that make the prompt."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, body: Any) -> Any:
        return drop_fields(reject_unsupported_fields(body, _UNSUPPORTED), _HARMLESS)

    def to_request_fields(self) -> dict[str, Any]:
        """Keyword arguments for Request. Raises InvalidRequest."""
        system = to_system_text(self.system)
        head = (Message("system", system),) if system else ()
        turns, prefill = _split_prefill(to_messages(self.messages))
        tools = parse_anthropic_tools(self.tools or ())
        choice = self.tool_choice or ToolChoice(type="auto")
        return {
            "messages": join_turns((*head, *turns)),
            "prefill": prefill,
            "tools": tools,
            "tool_choice": _tool_choice(choice, [tool.name for tool in tools]),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "thinking": False if self.thinking and self.thinking.type == "disabled" else None,
        }


class MessagesRequest(_PromptRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**63)]
    stream: bool = False
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    temperature: float | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: float | None = None

    def to_sampling_params(self) -> SamplingParams:
        wanted = self.output_config.format if self.output_config else None
        return SamplingParams(
            max_tokens=self.max_tokens,
            thinking_budget=self.thinking.budget_tokens if self.thinking else None,
            stop=tuple(self.stop_sequences or ()),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            json_schema=None if wanted is None else json.dumps(wanted.schema_),
        )


class CountTokensRequest(_PromptRequest):
    """POST /v1/messages/count_tokens."""


def _split_prefill(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], str]:
    """The messages before an assistant message at the end, and its text: the answer's beginning."""
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls:
        return messages, ""
    return messages[:-1], last.content


def _tool_choice(choice: ToolChoice, names: list[str]) -> str:
    """Return auto, none, required or a tool name. Raises InvalidRequest for an unknown tool."""
    match choice.type:
        case "any" if not names:
            raise InvalidRequest("tool_choice any needs tools", param="tool_choice")
        case "any":
            return "required"
        case "tool" if choice.name not in names:
            known = ", ".join(names) or "none"
            raise InvalidRequest(
                f"tool_choice: no tool {choice.name!r} in tools ({known})", param="tool_choice"
            )
        case "tool":
            assert choice.name is not None
            return choice.name
        case kind:
            return kind
