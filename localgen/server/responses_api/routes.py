"""Routes of the Responses API."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from localgen.backends.errors import NotFound
from localgen.backends.types import Message
from localgen.server.models.manager import ModelManager
from localgen.server.requests.caller import Caller
from localgen.server.requests.generation import GenerationJob, GenerationResponse
from localgen.server.requests.protocol import encode_json
from localgen.server.responses_api.schema import ResponsesRequest
from localgen.server.responses_api.serializer import PATH, ResponsesSerializer, new_response_id
from localgen.server.responses_api.store import ResponseStore, StoredResponse
from localgen.server.stats.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    """Routes of the Responses API. timeout_s: maximum duration of a request."""

    manager: ModelManager
    journal: RequestLog
    timeout_s: float | None
    store: ResponseStore = field(default_factory=ResponseStore)

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.post(PATH, response_model=None)
        async def responses(body: ResponsesRequest, http: HttpRequest) -> Response:
            return self._generate(body, Caller.from_request(http, body.user))

        @router.get(PATH + "/{response_id}", response_model=None)
        async def stored(response_id: str, http: HttpRequest) -> Response:
            found = self.store.get(response_id, http.scope["account"])
            return Response(encode_json(found.body), media_type="application/json")

        @router.delete(PATH + "/{response_id}", response_model=None)
        async def delete(response_id: str, http: HttpRequest) -> Response:
            self.store.delete(response_id, http.scope["account"])
            deleted = {"id": response_id, "object": "response", "deleted": True}
            return Response(encode_json(deleted), media_type="application/json")

        return router

    def _conversation_of(self, response_id: str, account: str) -> tuple[Message, ...]:
        """Raises NotFound if that response is not stored."""
        try:
            return self.store.get(response_id, account).conversation
        except NotFound as error:
            message = f"{error.message}; send the whole input"
            raise NotFound(message, param="previous_response_id") from None

    def _generate(self, body: ResponsesRequest, caller: Caller) -> Response:
        earlier: tuple[Message, ...] = ()
        if body.previous_response_id is not None:
            earlier = self._conversation_of(body.previous_response_id, caller.account)
        conversation = body.to_conversation(earlier)
        request = caller.new_request(
            body.to_sampling_params(), **body.to_request_fields(conversation)
        )

        response_id = new_response_id()

        def keep(answer: Message, response: dict[str, Any]) -> None:
            if body.store is not False:
                stored = StoredResponse(caller.account, (*conversation, answer), response)
                self.store.put(response_id, stored)

        job = GenerationJob(
            id=request.id,
            model=body.model,
            account=caller.account,
            timeout_s=self.timeout_s,
            requests=(request,),
            stream=body.stream is True,
            make_serializer=partial(
                ResponsesSerializer.from_metadata,
                response_id=response_id,
                echo=body.echo_fields(),
                on_complete=keep,
                namespaces=body.namespaces(),
            ),
            allow_paths=caller.is_local,
        )
        return GenerationResponse(self.manager, self.journal, job)
