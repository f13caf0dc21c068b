"""The client of a server that speaks OpenAI's protocol, over TCP or a Unix socket."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self
from urllib.parse import quote

import msgspec

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.typed_data import decode_json
from localgen.backends.types import OVERFLOW_ERROR, Message, PromptProgress, Tool
from localgen.client.connection import Connection, ServerResponse
from localgen.client.errors import ErrorResponse, SentRequest, format_model_names
from localgen.client.remote_stats import fetch_stats
from localgen.client.request_body import (
    GenerationRequest,
    OpenAICompat,
    encode_json,
    nonstandard_fields,
)
from localgen.client.responses import Completion, ModelCard, Reply, TextDelta
from localgen.client.stream import read_completion

_CLIENT_TIMING_NOTE = "TTFT and tokens/s are measured here, the network included"
# a server may have no model list, or the key no access to it
_NO_MODEL_LIST_STATUSES = (403, 404, 405, 501)


class Client:
    """The client of the server at the other end of a connection, which may be any.

    Methods raise LocalgenError. url: the base URL; empty for the local server, which has more
    operations: see LocalClient. prompt_progress: of the running request, or None if not reported.
    """

    url = ""
    prompt_progress: PromptProgress | None = None

    def __init__(self, connection: Connection) -> None:
        self.url = connection.url
        self._connection = connection
        self._compat = OpenAICompat()
        self._model_infos: dict[str | None, ModelInfo] = {}
        self._listed_models: list[str] = []
        self._warned_fields: set[str] = set()
        self._running_id = ""  # of the answer that is being read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, which cancels running requests."""
        self._connection.close()

    def abort(self) -> None:
        """From another thread: end all requests, now and in future, with a LocalgenError."""
        self._connection.abort()

    def connect(self) -> None:
        """Prepare for requests, which open their own connections."""
        self._connection.warn_once()

    def load(
        self,
        model: str | None,
        options: LoadOptions,
        on_progress: Callable[[float], None] = lambda share: None,
        keep_alive: str | None = None,
    ) -> ModelInfo:
        """Look a model up in the server's list, once for each name. Only LocalClient loads it.

        model: None for the default, or the only one of a server at a URL. on_progress: called with
        values from 0 to 1. keep_alive: how long an idle model stays loaded, e.g. `30s`, or None for
        the server's default.
        """
        assert options == LoadOptions(), "remote servers take no load options"
        assert keep_alive is None, "remote servers have their own keep-alive time"
        if model not in self._model_infos:
            self._model_infos[model] = self._fetch_info(model)
        return self._model_infos[model]

    def chat(
        self,
        model: str | None,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        ctx: int | None = None,
        priority: int = 0,
        save_prefix: bool = True,
        on_overflow: str = OVERFLOW_ERROR,
        tools: tuple[Tool, ...] = (),
        tool_choice: str = "auto",
    ) -> Generator[TextDelta | Completion, None, None]:
        """Stream an answer to a chat, then yield one Completion.

        save_prefix, on_overflow: see Request; only servers of localgen have them. tools,
        tool_choice: see Request. Closing the generator cancels the request.
        """
        request = GenerationRequest(
            *(model, messages, params, ctx, priority, save_prefix, on_overflow, tools, tool_choice)
        )
        return self._generate(request)

    @property
    def is_localgen(self) -> bool:
        """True if the server is one of localgen, as known after load()."""
        return self._compat.owned_by == "localgen"

    def answer_now(self) -> bool:
        """From another thread: end the reasoning of the answer that is being read, if it reasons.

        Returns False if no part of an answer has come, or if it has ended. Raises InvalidRequest if
        the server cannot.
        """
        if not self.is_localgen:
            raise InvalidRequest(
                f"{self._name} cannot end the reasoning alone: Ctrl+C stops the answer"
            )
        if not self._running_id:
            return False
        path = f"requests/{quote(self._running_id, safe='')}/answer-now"
        with self._connection.post(path, b"{}") as reply:
            response = self._accepted(reply)
            body = response.read()
        try:
            return bool(decode_json(body, dict[str, bool]).get("answering"))
        except msgspec.DecodeError as error:
            raise self._connection.errors.not_openai(response.media_type) from error

    def complete(
        self, model: str | None, prompt: str, params: SamplingParams
    ) -> Generator[TextDelta | Completion, None, None]:
        """Stream the continuation of a text, as chat() streams an answer."""
        return self._generate(GenerationRequest(model, prompt, params))

    def send(self, path: str, body: dict[str, Any]) -> Reply:
        """Send a request whose answer is not streamed. path: after `/v1/`.

        An answer with an error of the server is returned, too.
        """
        name = self._name_on_server(body.get("model"))
        with self._post(path, encode_json(body | {"model": name})) as reply:
            if isinstance(reply, ErrorResponse):
                return Reply(reply.status, reply.request_id, _error_body(reply))
            answer = reply.read()
            request_id = reply.http.headers.get("x-request-id", "")
        try:
            return Reply(200, request_id, decode_json(answer, dict[str, Any]))
        except msgspec.DecodeError as error:
            raise self._connection.errors.not_openai(reply.media_type) from error

    def models(self) -> list[ModelCard]:
        """The models that can be requested. Raises ModelNotFound if the server has no list."""
        cards = self._fetch_cards()
        if cards is None:
            raise ModelNotFound(f"{self._name} does not list its models")
        return [ModelCard(card["id"], self.url, 0, "", "url") for card in cards]

    def stats(self) -> dict[str, Any]:
        """Server and models at this moment. Raises InvalidRequest if it is not one of localgen."""
        found = fetch_stats(self._connection)
        if found is None:
            raise InvalidRequest(f"{self._name} does not report statistics")
        return found

    @property
    def _name(self) -> str:
        """The server in messages."""
        return self._connection.errors.name

    def _generate(
        self, request: GenerationRequest
    ) -> Generator[TextDelta | Completion, None, None]:
        with self._open(request) as response:
            self._running_id = response.http.headers.get("x-request-id", "")
            try:
                for part in read_completion(
                    response, self._connection.errors, self._on_silence, self._on_prompt
                ):
                    yield self._annotated(part, request) if isinstance(part, Completion) else part
            finally:
                self._running_id, self.prompt_progress = "", None

    def _on_silence(self, silent_s: float) -> None:
        self._connection.notify(f"no answer of the engine for {silent_s:.0f} s; Ctrl+C stops")

    def _on_prompt(self, progress: PromptProgress) -> None:
        self.prompt_progress = progress

    @contextlib.contextmanager
    def _open(self, request: GenerationRequest) -> Iterator[ServerResponse]:
        """Send a request; after an error about its form, again in another form."""
        name = self._name_on_server(request.model)
        while True:
            with self._post(request.path, request.body(name, self._compat)) as reply:
                if isinstance(reply, ServerResponse):
                    yield reply
                    return
            self._compat = self._adapted_compat(reply, name, request.params)

    def _name_on_server(self, model: str | None) -> str | None:
        return self.load(model, LoadOptions()).name

    def _post(
        self, path: str, body: bytes
    ) -> contextlib.AbstractContextManager[ServerResponse | ErrorResponse]:
        return self._connection.post(path, body)

    def _accepted(self, reply: ServerResponse | ErrorResponse) -> ServerResponse:
        if isinstance(reply, ErrorResponse):
            raise self._connection.errors.refusal(reply)
        return reply

    def _adapted_compat(
        self, refusal: ErrorResponse, name: str | None, params: SamplingParams
    ) -> OpenAICompat:
        """The dialect to retry with. Raises the error if it is not about the request's form."""
        about_form = refusal.status in (400, 422)
        adapted = self._compat.adapt_to_error(refusal.text) if about_form else None
        if adapted is None:
            sent = SentRequest(name, self._listed_models, nonstandard_fields(params, self._compat))
            raise self._connection.errors.refusal(refusal, sent)
        return adapted

    def _annotated(self, completion: Completion, request: GenerationRequest) -> Completion:
        """Add what the client has looked up and the server did not report."""
        if completion.tool_calls and not request.tools:
            names = ", ".join(call.name for call in completion.tool_calls)
            note = f"the model called {names}, but no tools were offered"
            completion = replace(completion, notes=(*completion.notes, note))
        info = self._model_infos.get(request.model)
        if info is None:
            return completion
        return replace(
            completion,
            model=completion.model or info.name,
            ctx=completion.ctx or info.ctx or None,
            notes=(*completion.notes, *self._nonstandard_notes(request.params)),
        )

    def _nonstandard_notes(self, params: SamplingParams) -> Iterator[str]:
        """A note on parameters that the server may have ignored; once for each."""
        if self._compat.owned_by == "localgen":
            return  # it rejects unknown parameters
        new = [
            field
            for field in nonstandard_fields(params, self._compat)
            if field not in self._warned_fields
        ]
        if new:
            self._warned_fields.update(new)
            yield f"not in OpenAI's protocol, so the server may ignore it: {', '.join(new)}"

    def _fetch_info(self, model: str | None) -> ModelInfo:
        cards = {card["id"]: card for card in self._fetch_cards(required=model is None) or ()}
        self._listed_models = list(cards)
        name = self._sole_model() if model is None else model
        card = cards.get(name, {})
        # a server may accept names that it does not list
        owners = {str(each.get("owned_by", "")) for each in ([card] if card else cards.values())}
        owned_by = owners.pop() if len(owners) == 1 else ""
        self._compat = replace(self._compat, owned_by=owned_by)
        notes = [] if owned_by == "localgen" else [_CLIENT_TIMING_NOTE]
        if cards and not card:
            listed = format_model_names(self._listed_models)
            notes.append(f"{name} is not in the server's list: {listed}")
        return _model_info(name, self._name, self.url, _context_length(card), tuple(notes))

    def _sole_model(self) -> str:
        if len(self._listed_models) == 1:
            return self._listed_models[0]
        if not self._listed_models:
            raise InvalidRequest(f"{self._name} lists no models: name one")
        raise InvalidRequest(
            f"{self._name} has {len(self._listed_models):,} models, name one: "
            f"{format_model_names(self._listed_models)}"
        )

    def _fetch_cards(self, *, required: bool = False) -> list[dict[str, Any]] | None:
        """The server's model list; None if it has none, which is an error if required."""
        with self._connection.get("models") as reply:
            is_missing = (
                isinstance(reply, ErrorResponse) and reply.status in _NO_MODEL_LIST_STATUSES
            )
            if is_missing and not required:
                return None
            response = self._accepted(reply)
            body = response.read()
        try:
            found = decode_json(body)
            listed = found["data"] if isinstance(found, dict) else found
            return [card for card in listed if isinstance(card["id"], str)]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise self._connection.errors.not_openai(response.media_type) from error


def _error_body(reply: ErrorResponse) -> dict[str, Any]:
    """The error in OpenAI's form, also if the server sent another one."""
    try:
        return decode_json(reply.body, dict[str, Any])
    except msgspec.DecodeError:
        error = {"message": reply.text[:200], "type": "error", "param": None, "code": None}
        return {"error": error}


def _context_length(card: dict[str, Any]) -> int:
    """The context length as vLLM and SGLang, OpenRouter, or llama-server report it, or 0 if
    unknown."""
    meta = card.get("meta")
    inner = meta.get("n_ctx") if isinstance(meta, dict) else None
    reported = (card.get("max_model_len"), card.get("context_length"), inner)
    return next((ctx for ctx in reported if isinstance(ctx, int) and ctx > 0), 0)


def _model_info(name: str, server: str, url: str, ctx: int, notes: tuple[str, ...]) -> ModelInfo:
    return ModelInfo(
        name=name,
        path="",
        architecture="",
        description=f"at {server}",
        params=0,
        size_bytes=0,
        vocab=0,
        ctx_train=0,
        ctx=ctx,
        kv_tokens=0,
        max_seqs=0,
        kv_bytes=0,
        layers=0,
        backend="",
        processor="",
        load_ms=0.0,
        can_rewind=False,
        chat_template=None,
        sampling=SamplingParams(),
        options=LoadOptions(),
        notes=notes,
        url=url,
    )
