"""The client of any server that speaks OpenAI's protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.sampling_params import SamplingParams
from localgen.client.connection import EndpointConnection, ServerResponse
from localgen.client.endpoints import Endpoint
from localgen.client.errors import ErrorResponse, format_model_names
from localgen.client.json_decoding import decode_json
from localgen.client.model_client import ModelClient
from localgen.client.request_body import GenerationRequest, OpenAICompat, nonstandard_fields
from localgen.client.responses import Completion, ModelCard

_CLIENT_TIMING_NOTE = "TTFT and tokens/s are measured here, the network included"
# a server may have no model list, or the key no access to it
_NO_MODEL_LIST_STATUSES = (403, 404, 405, 501)


class RemoteClient(ModelClient):
    """The client of a server at a URL.

    notify: called with a line when the user should know something. sleep: waits that many seconds;
    default: until abort() at most. Raises BadSetting if the API key is not set.
    """

    _connection: EndpointConnection

    def __init__(
        self,
        endpoint: Endpoint,
        notify: Callable[[str], None] = lambda line: None,
        *,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(EndpointConnection(endpoint, notify, sleep), OpenAICompat(), notify)
        self.url = endpoint.url
        self._endpoint = endpoint
        self._model_infos: dict[str | None, ModelInfo] = {}
        self._listed_models: list[str] = []
        self._warned_unencrypted = False
        self._warned_fields: set[str] = set()

    def connect(self) -> None:
        """Warn once if the API key is sent unencrypted. Requests open their own connections."""
        endpoint = self._endpoint
        is_safe = endpoint.key_env is None or endpoint.is_loopback or endpoint.is_encrypted
        if not is_safe and not self._warned_unencrypted:
            self._warned_unencrypted = True
            self._notify(f"the API key is sent to {endpoint.host} unencrypted: use https://")

    def load(
        self,
        model: str | None,
        options: LoadOptions,
        on_progress: Callable[[float], None] = lambda share: None,
        keep_alive: str | None = None,
    ) -> ModelInfo:
        """Look a model up in the server's list, once for each name. Loads nothing.

        model: None for the only model of the server.
        """
        assert options == LoadOptions(), "remote servers take no load options"
        assert keep_alive is None, "remote servers have their own keep-alive time"
        if model not in self._model_infos:
            self._model_infos[model] = self._fetch_info(model)
        return self._model_infos[model]

    def models(self) -> list[ModelCard]:
        """The models that the server lists. Raises ModelNotFound if it has no list."""
        cards = self._fetch_cards()
        if cards is None:
            raise ModelNotFound(f"{self._endpoint.display_name} does not list its models")
        return [ModelCard(card["id"], self._endpoint.url, 0, "", "url") for card in cards]

    def stats(self) -> dict[str, Any]:
        """Raises InvalidRequest: the protocol has no statistics."""
        raise InvalidRequest(f"{self._endpoint.display_name} does not report statistics")

    @contextlib.contextmanager
    def _open(self, request: GenerationRequest) -> Iterator[ServerResponse]:
        """Send a request; after an error about its form, again in another form."""
        name = self.load(request.model, LoadOptions()).name
        while True:
            body = request.body(name, self._compat)
            with self._connection.post(request.path, body) as reply:
                if isinstance(reply, ServerResponse):
                    yield reply
                    return
            self._compat = self._adapted_compat(reply, name, request.params)

    def _adapted_compat(
        self, refusal: ErrorResponse, name: str, params: SamplingParams
    ) -> OpenAICompat:
        """The dialect to retry with. Raises the error if it is not about the request's form."""
        about_form = refusal.status in (400, 422)
        adapted = self._compat.adapt_to_error(refusal.text) if about_form else None
        if adapted is None:
            sent = nonstandard_fields(params, self._compat)
            raise self._connection.errors.refusal(refusal, name, self._listed_models, sent)
        return adapted

    def _annotated(self, completion: Completion, request: GenerationRequest) -> Completion:
        info = self.load(request.model, LoadOptions())
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
        return _model_info(name, self._endpoint, _context_length(card), tuple(notes))

    def _sole_model(self) -> str:
        if len(self._listed_models) == 1:
            return self._listed_models[0]
        if not self._listed_models:
            raise InvalidRequest(f"{self._endpoint.display_name} lists no models: name one")
        raise InvalidRequest(
            f"{self._endpoint.display_name} has {len(self._listed_models):,} models, name one: "
            f"{format_model_names(self._listed_models)}"
        )

    def _fetch_cards(self, *, required: bool = False) -> list[dict[str, Any]] | None:
        """The server's model list; None if it has none, which is an error if required."""
        with self._connection.get("models") as reply:
            if isinstance(reply, ErrorResponse):
                if reply.status in _NO_MODEL_LIST_STATUSES and not required:
                    return None
                raise self._connection.errors.refusal(reply)
            body = reply.read()
        try:
            found = decode_json(body)
            listed = found["data"] if isinstance(found, dict) else found
            return [card for card in listed if isinstance(card["id"], str)]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise self._connection.errors.not_openai(reply.media_type) from error


def _context_length(card: dict[str, Any]) -> int:
    """The context length as vLLM and SGLang, OpenRouter, or llama-server report it; 0: unknown."""
    meta = card.get("meta")
    inner = meta.get("n_ctx") if isinstance(meta, dict) else None
    reported = (card.get("max_model_len"), card.get("context_length"), inner)
    return next((ctx for ctx in reported if isinstance(ctx, int) and ctx > 0), 0)


def _model_info(name: str, endpoint: Endpoint, ctx: int, notes: tuple[str, ...]) -> ModelInfo:
    return ModelInfo(
        name=name,
        path="",
        architecture="",
        description=f"at {endpoint.display_name}",
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
        url=endpoint.url,
    )
