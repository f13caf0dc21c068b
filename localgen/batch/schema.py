"""The bodies of a batch are validated by the schema of the local server, before it is asked."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from localgen.backends.errors import InvalidRequest
from localgen.batch.lines import CHAT_URL
from localgen.server.http import fastapi_import as fastapi_import  # before fastapi

# isort: split
from localgen.server.http.error_handlers import main_problem, validation_message
from localgen.server.openai.schema import ChatRequest, CompletionRequest


def validate_body(url: str, body: dict[str, Any]) -> None:
    """Raise InvalidRequest, with the server's message, for a body that it would refuse.

    What depends on the model is not known here: its template, vocabulary and context.
    """
    try:
        if url == CHAT_URL:
            chat = ChatRequest.model_validate(body)
            chat.to_sampling_params()
            chat.to_request_fields()
        else:
            CompletionRequest.model_validate(body).to_sampling_params()
    except ValidationError as error:
        problem = main_problem(error.errors())
        message, _ = validation_message(problem, problem["loc"])
        raise InvalidRequest(f"body: {message}") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"body: {error.message}") from error
