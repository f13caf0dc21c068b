"""Build the JSON body of a generation request for one server's dialect of OpenAI's protocol."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SAMPLERS, SamplingParams
from localgen.backends.types import OVERFLOW_ERROR, Message, Tool

_STANDARD_FIELDS = {
    *(sampler.name for sampler in SAMPLERS if sampler.in_openai),
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "json_schema",
    "seed",
    "stop",
}
_HF_NAMES = {sampler.name: sampler.hf_key for sampler in SAMPLERS if sampler.hf_key}
_THINKING_BUDGET_NAMES = {"llamacpp": "thinking_budget_tokens", "vllm": "thinking_token_budget"}
# `owned_by` of servers that use llama.cpp's name, repeat_penalty
_LLAMA_CPP_OWNERS = {"llamacpp", "localgen"}


@dataclass(frozen=True, slots=True)
class OpenAICompat:
    """The dialect of one server.

    owned_by: the maker of its models, from its model list.
    include_usage: the server can report token counts at the end of a stream.
    is_local: the local server, which takes localgen's own fields.
    """

    owned_by: str = ""
    include_usage: bool = True
    max_tokens_field: str = "max_tokens"
    is_local: bool = False

    def adapt_to_error(self, message: str) -> OpenAICompat | None:
        """Return the dialect to retry with after this error, or None if it has another cause."""
        if self.is_local:
            return None
        if self.include_usage and ("stream_options" in message or "include_usage" in message):
            return replace(self, include_usage=False)
        if self.max_tokens_field == "max_tokens" and "max_completion_tokens" in message:
            return replace(self, max_tokens_field="max_completion_tokens")
        return None

    def wire_name(self, field: str) -> str:
        """The server's name of a field of SamplingParams."""
        if field == "max_tokens":
            return self.max_tokens_field
        if field == "thinking_budget":
            return _THINKING_BUDGET_NAMES.get(self.owned_by, field)
        return field if self.owned_by in _LLAMA_CPP_OWNERS else _HF_NAMES.get(field, field)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one streamed answer: to messages, or to a prompt that is continued as is.

    The answer continues an assistant's message at the end.
    ctx, priority, save_prefix, on_overflow: extensions of the local server. tools, tool_choice: see
    Request; only with messages.
    """

    model: str | None
    prompt: Sequence[Message] | str
    params: SamplingParams
    ctx: int | None = None
    priority: int = 0
    save_prefix: bool = True
    on_overflow: str = OVERFLOW_ERROR
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"

    @property
    def path(self) -> str:
        return "completions" if isinstance(self.prompt, str) else "chat/completions"

    def body(self, model: str | None, compat: OpenAICompat) -> bytes:
        """The request as JSON, with the non-default parameters only.

        model: its name on the server. Raises InvalidRequest for values that JSON cannot hold.
        """
        assert compat.is_local or (self.ctx is None and self.priority == 0), "local server only"
        body: dict[str, Any] = {"model": model, "stream": True}
        if isinstance(self.prompt, str):
            body["prompt"] = self.prompt
        else:
            body["messages"] = [_message_body(message, compat) for message in self.prompt]
            if self.prompt[-1].role == "assistant":  # as vLLM has it
                body |= {"continue_final_message": True, "add_generation_prompt": False}
        chosen = sampling_fields(self.params, chat=not isinstance(self.prompt, str))
        schema = None if compat.is_local else chosen.pop("json_schema", None)
        body |= {compat.wire_name(field): value for field, value in chosen.items()}
        if schema is not None:
            body["response_format"] = _response_format(schema)
        if compat.include_usage:
            body["stream_options"] = {"include_usage": True}
        if compat.is_local:
            body |= {
                "ctx": self.ctx,
                "priority": self.priority,
                "save_prefix": self.save_prefix,
            }
        body |= self._tool_fields()
        if self.on_overflow != OVERFLOW_ERROR:
            body["on_overflow"] = self.on_overflow
        return encode_json(body)

    def _tool_fields(self) -> dict[str, Any]:
        if not self.tools:
            return {}
        fields: dict[str, Any] = {"tools": [_tool_body(tool) for tool in self.tools]}
        if self.tool_choice != "auto":
            fields["tool_choice"] = self.tool_choice
        return fields


def _tool_body(tool: Tool) -> dict[str, Any]:
    parameters = json.loads(tool.parameters)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def sampling_fields(params: SamplingParams, *, chat: bool) -> dict[str, Any]:
    """The non-default parameters by field name."""
    default = SamplingParams()
    body = {
        field.name: getattr(params, field.name)
        for field in fields(params)
        if getattr(params, field.name) != getattr(default, field.name)
    }
    if chat and params.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": params.logprobs}
    return body


def nonstandard_fields(params: SamplingParams, compat: OpenAICompat) -> tuple[str, ...]:
    """The server's names of the non-default parameters that OpenAI's protocol does not have."""
    chosen = sampling_fields(params, chat=True)
    return tuple(compat.wire_name(field) for field in chosen if field not in _STANDARD_FIELDS)


def message_fields(message: Message) -> dict[str, Any]:
    """A message as JSON; empty optional fields are left out."""
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    optional = {
        "reasoning_content": message.reasoning,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ],
    }
    return body | {name: value for name, value in optional.items() if value}


def encode_json(body: dict[str, Any]) -> bytes:
    """Encode a request body. Raises InvalidRequest for values that JSON cannot hold."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the request contains text that is not UTF-8") from error
    except ValueError as error:
        raise InvalidRequest("the request contains a number that is not finite") from error


def _message_body(message: Message, compat: OpenAICompat) -> dict[str, Any]:
    if compat.is_local:
        return message_fields(message)
    # not every server accepts reasoning, or the function's name in a tool message
    return message_fields(replace(message, reasoning=None, name=None))


def _response_format(schema: str) -> dict[str, Any]:
    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise InvalidRequest(
            f"the JSON schema is not valid JSON: {error}", param="json_schema"
        ) from error
    named = {"name": "answer", "schema": parsed, "strict": True}
    return {"type": "json_schema", "json_schema": named}
