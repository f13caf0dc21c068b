"""Error responses in the format of the requested API: OpenAI, Ollama or Anthropic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from localgen.server.anthropic import serializer as anthropic
from localgen.server.ollama import serializer as ollama
from localgen.server.openai import serializer as openai
from localgen.server.requests.protocol import encode_json, http_status_for_code


def error_response(
    path: str,
    code: str,
    message: str,
    param: str | None = None,
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Build the error response for a request path. status: default is that of the error code."""
    status = status or http_status_for_code(code)
    body: dict[str, Any]
    if path.startswith(ollama.API_PREFIX):
        body = ollama.ollama_error_body(message)
    elif path.startswith(anthropic.PATH):
        body = anthropic.anthropic_error_body(code, message, status=status)
    else:
        body = openai.openai_error_body(code, message, param, status=status)
    return Response(encode_json(body), status, headers, "application/json")
