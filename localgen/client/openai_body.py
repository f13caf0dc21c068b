"""Requests in OpenAI's own terms, and what changes where a server understands others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client.protocol import message_fields, sampling_fields

_STANDARD_FIELDS = {
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "json_schema",
    "seed",
    "stop",
}
# whoever grew out of llama.cpp calls it by the name that llama.cpp gave it
_LLAMA_CPP_OWNERS = {"llamacpp", "localgen"}


@dataclass(frozen=True, slots=True)
class OpenAICompat:
    """What one server understands. owned_by: who made it, in its own words.

    include_usage: whether it may be asked to count tokens at the end of a stream.
    """

    owned_by: str = ""
    include_usage: bool = True
    max_tokens_field: str = "max_tokens"

    def adapt_to_error(self, message: str) -> OpenAICompat | None:
        """How to ask again after a refusal in these words; None: it is about something else."""
        if self.include_usage and ("stream_options" in message or "include_usage" in message):
            return replace(self, include_usage=False)
        if self.max_tokens_field == "max_tokens" and "max_completion_tokens" in message:
            return replace(self, max_tokens_field="max_completion_tokens")
        return None

    def wire_name(self, field: str) -> str:
        """What this server calls a setting of SamplingParams."""
        if field == "max_tokens":
            return self.max_tokens_field
        if field == "repeat_penalty" and self.owned_by not in _LLAMA_CPP_OWNERS:
            return "repetition_penalty"
        return field


def chat_body(
    model: str, messages: Sequence[Message], params: SamplingParams, compat: OpenAICompat
) -> dict[str, Any]:
    """A streamed chat completion: the settings that were given, and nothing else."""
    given = sampling_fields(params, chat=True)
    schema = given.pop("json_schema", None)
    body = {
        "model": model,
        "messages": [_message_body(message) for message in messages],
        "stream": True,
        **{compat.wire_name(field): value for field, value in given.items()},
    }
    if schema is not None:
        body["response_format"] = _response_format(schema)
    if compat.include_usage:
        body["stream_options"] = {"include_usage": True}
    return body


def nonstandard_fields(params: SamplingParams, compat: OpenAICompat) -> tuple[str, ...]:
    """The settings given that OpenAI's protocol does not have, as they are sent."""
    given = sampling_fields(params, chat=True)
    return tuple(compat.wire_name(field) for field in given if field not in _STANDARD_FIELDS)


def _message_body(message: Message) -> dict[str, Any]:
    # what was thought, and which function a call's result is of, only some servers take
    return message_fields(replace(message, reasoning=None, name=None))


def _response_format(schema: str) -> dict[str, Any]:
    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise InvalidRequest(
            f"the JSON schema is not JSON: {error}", param="json_schema"
        ) from error
    held = {"name": "answer", "schema": parsed, "strict": True}
    return {"type": "json_schema", "json_schema": held}
