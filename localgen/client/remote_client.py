"""A client of any server that speaks OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client.connection import EndpointConnection, EndpointResponse
from localgen.client.endpoints import Endpoint
from localgen.client.errors import (
    EndpointErrorResponse,
    endpoint_error,
    format_model_names,
    not_openai_error,
)
from localgen.client.openai_body import OpenAICompat, chat_body, nonstandard_fields
from localgen.client.protocol import encode_json
from localgen.client.responses import Completion, ModelCard, TextDelta
from localgen.client.sse import DONE, iter_sse_data
from localgen.client.stream import CompletionStreamParser, TimedChunks

_CLIENT_TIMING_NOTE = "TTFT and tokens/s are measured here, the network included"
# a server need not have a list, and a key need not be good for it
_NO_MODEL_LIST_STATUSES = (403, 404, 405, 501)


class RemoteClient:
    """One session. notify: gets one line when something happens that a user should know.

    sleep: waits that many seconds; None: or until abort().
    """

    def __init__(
        self,
        endpoint: Endpoint,
        notify: Callable[[str], None] = lambda line: None,
        *,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.url = endpoint.url
        self._endpoint = endpoint
        self._notify = notify
        self._connection = EndpointConnection(endpoint, endpoint.api_key(), notify, sleep)
        self._compat = OpenAICompat()
        self._model_infos: dict[str | None, ModelInfo] = {}
        self._listed_models: list[str] = []
        self._warned_unencrypted = False
        self._warned_fields: set[str] = set()

    def close(self) -> None:
        """Close the connections; a request that runs on one is cancelled."""
        self._connection.close()

    def abort(self) -> None:
        """From another thread: what runs ends with a LocalgenError, as does all that follows."""
        self._connection.abort()

    def connect(self) -> None:
        """Warn, once, of a key that others can read on its way. Connections come with requests."""
        seen = self._endpoint.is_loopback or self._endpoint.is_encrypted or self._warned_unencrypted
        if self._endpoint.key_env is not None and not seen:
            self._warned_unencrypted = True
            self._notify(
                f"the key goes to {self._endpoint.host} unencrypted: https:// would hide it"
            )

    def load(
        self,
        model: str | None,
        options: LoadOptions,
        on_progress: Callable[[float], None] = lambda share: None,
        keep_alive: str | None = None,
    ) -> ModelInfo:
        """What is known of a model; without a name, of the only one that the server has.

        The server is asked once for each name. It alone decides what is loaded, and how.
        """
        assert options == LoadOptions(), "other servers take no load options"
        assert keep_alive is None, "other servers settle that themselves"
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
    ) -> Generator[TextDelta | Completion, None, None]:
        """Text as it is generated, then one Completion. Closing the generator cancels the
        request."""
        assert ctx is None, "other servers settle their context themselves"
        assert priority == 0, "other servers have no priorities"
        info = self.load(model, LoadOptions())
        while True:
            body = encode_json(chat_body(info.name, messages, params, self._compat))
            with self._connection.post("chat/completions", body) as reply:
                if isinstance(reply, EndpointResponse):
                    yield from self._stream_completion(reply, info, params)
                    return
            self._compat = self._adapted_compat(reply, info.name, params)

    def models(self) -> list[ModelCard]:
        """What the server lists. ModelNotFound: it has no list."""
        cards = self._fetch_cards()
        if cards is None:
            raise ModelNotFound(f"{self._endpoint.display_name} does not list its models")
        return [ModelCard(card["id"], self._endpoint.url, 0, "", "url") for card in cards]

    def stats(self) -> dict[str, Any]:
        """InvalidRequest: it has nothing like it."""
        raise InvalidRequest(f"{self._endpoint.display_name} does not say what it is doing")

    def _stream_completion(
        self, response: EndpointResponse, info: ModelInfo, params: SamplingParams
    ) -> Iterator[TextDelta | Completion]:
        arrivals = TimedChunks(response.response.iter_bytes())
        reader = CompletionStreamParser(info.name, self._endpoint, response.sent_s, arrivals)
        for part in reader.parse(self._sse_events(response.media_type, arrivals)):
            if isinstance(part, Completion):
                notes = (*response.wait_notes, *part.notes, *self._nonstandard_notes(params))
                part = replace(part, ctx=part.ctx or info.ctx or None, notes=notes)
            yield part

    def _sse_events(self, media_type: str, body: Iterable[bytes]) -> Iterator[bytes]:
        match media_type:
            case "application/json":  # it does not stream
                yield from (b"".join(body), DONE)
            case "text/event-stream" | "":
                yield from iter_sse_data(body)
            case _:
                raise not_openai_error(self._endpoint, media_type)

    def _adapted_compat(
        self, error: EndpointErrorResponse, name: str, params: SamplingParams
    ) -> OpenAICompat:
        """How to put it otherwise. LocalgenError: it is not about how it was put."""
        other = self._compat.adapt_to_error(error.text) if error.status in (400, 422) else None
        if other is None:
            sent = nonstandard_fields(params, self._compat)
            raise endpoint_error(error, self._endpoint, name, self._listed_models, sent)
        return other

    def _nonstandard_notes(self, params: SamplingParams) -> Iterator[str]:
        """A note on settings that a server may have left aside without a word; once for each."""
        if self._compat.owned_by == "localgen":
            return  # it refuses what it does not know
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
        # a server may know more names than it lists
        makers = {str(each.get("owned_by", "")) for each in ([card] if card else cards.values())}
        family = makers.pop() if len(makers) == 1 else ""
        self._compat = replace(self._compat, owned_by=family)
        notes = [] if family == "localgen" else [_CLIENT_TIMING_NOTE]
        if cards and not card:
            notes.append(
                f"{name} is not listed there, {format_model_names(self._listed_models)} is"
            )
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
        """What the server lists; None: it has no list. LocalgenError: it does not get that far.

        required: whether it is an error that there is none.
        """
        with self._connection.get("models") as reply:
            if isinstance(reply, EndpointErrorResponse):
                if reply.status in _NO_MODEL_LIST_STATUSES and not required:
                    return None
                raise endpoint_error(reply, self._endpoint)
            body = reply.response.read()
        try:
            found = msgspec.json.decode(body)
            listed = found["data"] if isinstance(found, dict) else found
            return [card for card in listed if isinstance(card["id"], str)]
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise not_openai_error(self._endpoint, reply.media_type) from error


def _context_length(card: dict[str, Any]) -> int:
    """The longest sequence as vLLM and SGLang, OpenRouter, or llama-server tell it; 0: untold."""
    meta = card.get("meta")
    inner = meta.get("n_ctx") if isinstance(meta, dict) else None
    told = (card.get("max_model_len"), card.get("context_length"), inner)
    return next((ctx for ctx in told if isinstance(ctx, int) and ctx > 0), 0)


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
