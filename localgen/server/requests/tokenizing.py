"""Requests for the tokens of a prompt, independent of the API protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localgen.backends.errors import TimedOut
from localgen.backends.model_info import ModelInfo
from localgen.backends.types import Tokenized, TokenizeRequest
from localgen.server.models.manager import ModelManager
from localgen.server.requests.presets import NamedSettings
from localgen.server.requests.protocol import encode_json
from localgen.server.requests.streaming import cancel_on_disconnect

BodyBuilder = Callable[[Tokenized, ModelInfo], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeJob:
    """A request whose prompt is tokenized by its model.

    timeout_s: maximum duration since arrival. allow_paths: see ModelManager.acquire.
    """

    model: str | None
    request: TokenizeRequest
    timeout_s: float | None
    allow_paths: bool

    @property
    def deadline_s(self) -> float | None:
        """When the request times out (monotonic seconds), or None if never."""
        return None if self.timeout_s is None else self.request.request.arrived_s + self.timeout_s


class TokenizeResponse(Response):
    """Loads the model if needed and tokenizes. Errors are raised before the response starts."""

    def __init__(self, manager: ModelManager, job: TokenizeJob, build_body: BodyBuilder) -> None:
        super().__init__()
        self._manager, self._job, self._build_body = manager, job, build_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(receive):
            body = await self._tokenize()
            response = Response(encode_json(body), media_type="application/json")
            await response(scope, receive, send)

    async def _tokenize(self) -> dict[str, Any]:
        job = self._job
        name = self._manager.default_name if job.model is None else job.model
        named = await NamedSettings.find(name)
        (request,) = named.apply((job.request.request,))
        acquired = self._manager.acquire(
            job.model, allow_paths=job.allow_paths, deadline_s=job.deadline_s
        )
        async with acquired as (resident, info):
            left_s = None if job.deadline_s is None else job.deadline_s - time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    tokenized = await resident.engine.tokenize(
                        replace(job.request, request=request)
                    )
            except TimeoutError:
                message = f"the request timed out, the limit is {job.timeout_s:g} s"
                raise TimedOut(message) from None
            return self._build_body(tokenized, info)
