"""/openapi.json: FastAPI's, with the error responses that this server sends."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from localgen.server.anthropic.serializer import PATH as ANTHROPIC_PATH
from localgen.server.ollama.serializer import API_PREFIX as OLLAMA_PREFIX

_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"anyOf": [_TEXT, {"type": "null"}]}
_ERRORS: dict[str, dict[str, Any]] = {
    "OpenAIError": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": _TEXT_OR_NULL,
                "code": _TEXT,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "OllamaError": {"error": _TEXT},
    "AnthropicError": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": _TEXT, "message": _TEXT},
            "required": ["type", "message"],
        },
    },
}
# what FastAPI describes, and never sends here
_UNUSED = ("HTTPValidationError", "ValidationError")


class DescribedApp(FastAPI):
    """FastAPI with a description of the errors: 400, not 422, for a body that is not valid."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _with_errors(super().openapi())
        return self.openapi_schema


def _with_errors(schema: dict[str, Any]) -> dict[str, Any]:
    known = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in _UNUSED:
        known.pop(name, None)
    for name, properties in _ERRORS.items():
        known[name] = {"type": "object", "properties": properties, "required": [*properties]}
    for path, operations in schema["paths"].items():
        error = {"$ref": f"#/components/schemas/{_error_of(path)}"}
        content = {"content": {"application/json": {"schema": error}}}
        for operation in operations.values():
            responses = operation["responses"]
            if responses.pop("422", None) is not None:
                responses["400"] = {"description": "The request is not valid", **content}
            responses["default"] = {"description": "Error", **content}
    return schema


def _error_of(path: str) -> str:
    if path.startswith(OLLAMA_PREFIX):
        return "OllamaError"
    return "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "OpenAIError"
