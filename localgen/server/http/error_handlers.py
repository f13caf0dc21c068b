"""Handlers of errors: each becomes a response in the format of its API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from localgen.backends.errors import LocalgenError
from localgen.server.http.errors import error_response
from localgen.server.http.guard import RequestRefused
from localgen.server.models.disk_paths import error_message
from localgen.server.requests.caller import is_local_request
from localgen.server.requests.protocol import http_status_for_code


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error in the format of the API that the request belongs to."""

    @app.exception_handler(LocalgenError)
    async def handle_localgen_error(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, LocalgenError)
        code, param = error.code, error.param
        is_local = is_local_request(http.scope)
        message = error_message(code, error.message, param, is_local=is_local)
        return _error_response(http, code, message, param)

    @app.exception_handler(RequestValidationError)
    async def handle_validation_error(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problem = main_problem(error.errors())
        if problem["type"] == "json_invalid":
            message, param = _json_message(problem, error.body), None
        else:
            source, *place = problem["loc"]
            assert source in ("body", "query", "path", "header"), source
            message, param = validation_message(problem, place)
        return _error_response(http, "invalid_request", message, param)

    @app.exception_handler(HTTPException)
    async def handle_http_error(http: HttpRequest, error: Exception) -> Response:
        if isinstance(error, RequestRefused):
            return error.to_response(http.url.path)
        assert isinstance(error, HTTPException)
        place = f"{http.method} {http.url.path}"
        match error.status_code:
            case 404:
                return _error_response(http, "not_found", f"no such endpoint: {place}")
            case 405:
                message = f"{place}: method not allowed"
                return _error_response(http, "method_not_allowed", message, headers=error.headers)
            case _:
                return _error_response(http, "invalid_request", str(error.detail))

    @app.exception_handler(Exception)
    async def handle_internal_error(http: HttpRequest, error: Exception) -> Response:
        # Starlette re-raises the error after this response, which logs the traceback
        message = f"{http.url.path} failed with an internal error: see the server log"
        return _error_response(http, "internal_error", message)


_EMPTY = ("too_short", "string_too_short")
_JSON_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
}


def main_problem(problems: Sequence[Any]) -> Any:
    """The pydantic error to report, of those of one body."""
    return min(problems, key=_rank)


def _rank(problem: Any) -> int:
    """Which problem is named. An unknown field first: a misspelt one also makes the right one
    missing. Then an empty list or text, which is also none of the other types of its field."""
    kind = problem["type"]
    return 0 if kind == "extra_forbidden" else 1 if kind in _EMPTY else 2


def _json_message(problem: Any, body: str) -> str:
    """Return a one-line message for a body that is not JSON, with the line and column."""
    # the parser's own wording: some of its reasons end with "at"
    error = json.JSONDecodeError(problem["ctx"]["error"], body, problem["loc"][-1])
    return f"the body is not valid JSON: {error}"


def validation_message(problem: Any, place: Sequence[Any]) -> tuple[str, str | None]:
    """Return a one-line message for a pydantic error, and the path of its field if any.

    place: the path of the problem in the body.
    """
    # without the types of a field that may have several
    steps = [step for step in place if not _is_type(str(step))]
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    field = field.removeprefix(".")
    match problem["type"]:
        case "extra_forbidden":
            return f"unknown field {field}", field
        case "model_attributes_type" if not field:
            return "the body must be a JSON object with Content-Type: application/json", None
        case "missing":
            return (f"{field} is missing", field) if field else ("the body is missing", None)
        case kind if kind in _EMPTY and problem["ctx"]["min_length"] == 1 and field:
            return f"{field} must not be empty", field
        case "greater_than_equal":
            return f"{field} must be at least {problem['ctx']['ge']:,}", field
        case "less_than_equal":
            return f"{field} must be at most {problem['ctx']['le']:,}", field
        case "less_than":
            return f"{field} must be below {problem['ctx']['lt']:,}", field
        # not of a union, whose other types would be left out
        case "int_type" | "float_type" | "bool_type" | "string_type" if (
            field and steps[-1] == problem["loc"][-1]
        ):
            return f"{field} must be {_JSON_TYPES[problem['type']]}", field
        case _:
            reason = str(problem["msg"])
            return (f"{field}: {reason}", field) if field else (reason, None)


def _is_type(step: str) -> bool:
    """True for a type in the path of a problem, as `str` or `constrained-list[Item]`."""
    name = step.removeprefix("constrained-")
    return name == "str" or name.startswith("list[")


def _error_response(
    http: HttpRequest, code: str, message: str, param: str | None = None, headers: Any = None
) -> Response:
    if http_status_for_code(code) in (429, 503):
        headers = {"Retry-After": "1"}
    return error_response(http.url.path, code, message, param, headers=headers)
