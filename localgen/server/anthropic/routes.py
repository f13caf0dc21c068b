"""Routes of the Messages API."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from localgen.server.anthropic.schema import CountTokensRequest, MessagesRequest
from localgen.server.anthropic.serializer import PATH, MessageSerializer, count_body
from localgen.server.models.manager import ModelManager
from localgen.server.requests.caller import Caller
from localgen.server.requests.generation import GenerationJob, GenerationResponse
from localgen.server.requests.tokenizing import TokenizeJob, TokenizeResponse
from localgen.server.stats.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class AnthropicApi:
    """Routes of the Messages API. timeout_s: maximum duration of a request."""

    manager: ModelManager
    journal: RequestLog
    timeout_s: float | None

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.post(PATH, response_model=None)
        async def messages(body: MessagesRequest, http: HttpRequest) -> Response:
            return self._generate(body, Caller.from_request(http))

        @router.post(f"{PATH}/count_tokens", response_model=None)
        async def count_tokens(body: CountTokensRequest, http: HttpRequest) -> Response:
            caller = Caller.from_request(http)
            job = TokenizeJob(
                model=body.model,
                request=caller.new_tokenize_request(**body.to_request_fields()),
                timeout_s=self.timeout_s,
                allow_paths=caller.is_local,
            )
            return TokenizeResponse(self.manager, job, lambda tokenized, _: count_body(tokenized))

        return router

    def _generate(self, body: MessagesRequest, caller: Caller) -> Response:
        request = caller.new_request(body.to_sampling_params(), **body.to_request_fields())
        job = GenerationJob(
            id=request.id,
            model=body.model,
            account=caller.account,
            timeout_s=self.timeout_s,
            requests=(request,),
            stream=body.stream,
            make_serializer=partial(
                MessageSerializer.from_metadata,
                max_tokens=body.max_tokens,
                stop_sequences=tuple(body.stop_sequences or ()),
            ),
            allow_paths=caller.is_local,
        )
        return GenerationResponse(self.manager, self.journal, job)
