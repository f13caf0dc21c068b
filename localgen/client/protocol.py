"""Requests and answers as the server's protocol has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import msgspec

from localgen.backends.errors import (
    InvalidRequest,
    LocalgenError,
    ServerUnavailable,
    error_from_code,
)
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message, Timings
from localgen.client.responses import Completion, Health, TextDelta
from localgen.client.sse import DONE


def sampling_fields(params: SamplingParams, *, chat: bool) -> dict[str, Any]:
    """The settings that were given, under the names of the protocol."""
    default = SamplingParams()
    body = {
        field.name: getattr(params, field.name)
        for field in fields(params)
        if getattr(params, field.name) != getattr(default, field.name)
    }
    if chat and params.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": params.logprobs}
    return body


def message_fields(message: Message) -> dict[str, Any]:
    """A message as the protocol has it, with the fields that it has."""
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
    """A body as JSON. InvalidRequest: it holds what JSON cannot."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the request holds text that is not UTF-8: leave it out") from error
    except ValueError as error:
        raise InvalidRequest("the request holds a number that is not finite") from error


def parse_completion_stream(events: Iterator[bytes]) -> Iterator[TextDelta | Completion]:
    """An answer from the events of its stream. ServerUnavailable if they stop too early."""
    final: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    for event in events:
        if event == DONE:
            yield _parse_completion(final, usage)
            return
        chunk = raise_for_error(msgspec.json.decode(event))
        usage = chunk.get("usage") or usage
        if "timings" in chunk:
            final = chunk
        elif chunk["choices"] and any(new := _parse_delta(chunk["choices"][0])):
            yield TextDelta(new[0], chunk["localgen"]["num_tokens"], new[1])
    raise ServerUnavailable("the server went away in mid-answer")


def raise_for_error(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply, unless it is an error."""
    if "error" in reply:
        raise _parse_error(reply["error"])
    return reply


def parse_error_response(status: int, body: bytes) -> LocalgenError:
    """The error that a response with this status tells of."""
    try:
        return _parse_error(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ServerUnavailable(f"the server answered with status {status}")


def parse_health(status: int, body: bytes) -> Health:
    """What /health said: 200, or 503 of a server that is not ready. LocalgenError: neither."""
    try:
        told = msgspec.json.decode(body, type=dict[str, Any])
        if status not in (200, 503) or "status" not in told:
            raise parse_error_response(status, body)
        # the first servers did not say
        return msgspec.convert({"protocol": 0} | told, Health)
    except msgspec.MsgspecError as error:
        raise parse_error_response(status, body) from error


def _parse_error(error: dict[str, Any]) -> LocalgenError:
    return error_from_code(error["code"], error["message"], error["param"])


def _parse_delta(choice: dict[str, Any]) -> tuple[str, str]:
    """New content and new reasoning."""
    if "text" in choice:
        return choice["text"], ""
    delta = choice["delta"]
    return delta.get("content") or "", delta.get("reasoning_content") or ""


def _parse_completion(final: dict[str, Any], usage: dict[str, Any]) -> Completion:
    served = final["localgen"]
    return Completion(
        model=final["model"],
        finish_reason=final["choices"][0]["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
        timings=msgspec.convert(final["timings"], Timings),
        ctx=served["ctx"],
        seed=served["seed"],
        stop=served["stop"],
        notes=tuple(served["notes"]),
    )
