"""A client of any server that speaks OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.types import Message, SamplingParams
from localgen.client.connection import Connection, Reply
from localgen.client.endpoints import Endpoint
from localgen.client.errors import Refusal, failure, names, not_openai
from localgen.client.openai_body import Dialect, chat_body, extras
from localgen.client.protocol import encoded
from localgen.client.responses import Answer, ModelCard, Text
from localgen.client.sse import DONE, payloads
from localgen.client.stream import AnswerReader, Arrivals

_MEASURED = "TTFT and tokens/s are measured here, the network included"
# a server need not have a list, and a key need not be good for it
_NO_LIST = (403, 404, 405, 501)


class RemoteClient:
    """One session. say: gets one line when something happens that a user should know.

    sleep: waits that many seconds; None: or until cut().
    """

    def __init__(
        self,
        endpoint: Endpoint,
        say: Callable[[str], None] = lambda line: None,
        *,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.url = endpoint.url
        self._endpoint = endpoint
        self._say = say
        self._connection = Connection(endpoint, endpoint.key(), say, sleep)
        self._dialect = Dialect()
        self._infos: dict[str | None, ModelInfo] = {}
        self._listed: list[str] = []
        self._told_unencrypted = False
        self._told_extras: set[str] = set()

    def close(self) -> None:
        """Close the connections; a request that runs on one is cancelled."""
        self._connection.close()

    def cut(self) -> None:
        """From another thread: what runs ends with a LocalgenError, as does all that follows."""
        self._connection.cut()

    def connect(self) -> None:
        """Warn, once, of a key that others can read on its way. Connections come with requests."""
        seen = self._endpoint.is_loopback or self._endpoint.is_encrypted or self._told_unencrypted
        if self._endpoint.key_env is not None and not seen:
            self._told_unencrypted = True
            self._say(f"the key goes to {self._endpoint.host} unencrypted: https:// would hide it")

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
        if model not in self._infos:
            self._infos[model] = self._look_up(model)
        return self._infos[model]

    def chat(
        self,
        model: str | None,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        ctx: int | None = None,
        priority: int = 0,
    ) -> Generator[Text | Answer, None, None]:
        """Text as it is generated, then one Answer. Closing the generator cancels the request."""
        assert ctx is None, "other servers settle their context themselves"
        assert priority == 0, "other servers have no priorities"
        info = self.load(model, LoadOptions())
        while True:
            body = encoded(chat_body(info.name, messages, params, self._dialect))
            with self._connection.post("chat/completions", body) as reply:
                if isinstance(reply, Reply):
                    yield from self._answer(reply, info, params)
                    return
            self._dialect = self._other_dialect(reply, info.name, params)

    def models(self) -> list[ModelCard]:
        """What the server lists. ModelNotFound: it has no list."""
        cards = self._cards()
        if cards is None:
            raise ModelNotFound(f"{self._endpoint.where} does not list its models")
        return [ModelCard(card["id"], self._endpoint.url, 0, "", "url") for card in cards]

    def stats(self) -> dict[str, Any]:
        """InvalidRequest: it has nothing like it."""
        raise InvalidRequest(f"{self._endpoint.where} does not say what it is doing")

    def _answer(
        self, reply: Reply, info: ModelInfo, params: SamplingParams
    ) -> Iterator[Text | Answer]:
        arrivals = Arrivals(reply.response.iter_bytes())
        reader = AnswerReader(info.name, self._endpoint, reply.sent_s, arrivals)
        for part in reader.read(self._events(reply.kind, arrivals)):
            if isinstance(part, Answer):
                notes = (*reply.waits, *part.notes, *self._unusual(params))
                part = replace(part, ctx=part.ctx or info.ctx or None, notes=notes)
            yield part

    def _events(self, kind: str, body: Iterable[bytes]) -> Iterator[bytes]:
        match kind:
            case "application/json":  # it does not stream
                yield from (b"".join(body), DONE)
            case "text/event-stream" | "":
                yield from payloads(body)
            case _:
                raise not_openai(self._endpoint, kind)

    def _other_dialect(self, refusal: Refusal, name: str, params: SamplingParams) -> Dialect:
        """How to put it otherwise. LocalgenError: it is not about how it was put."""
        other = self._dialect.after(refusal.text) if refusal.status in (400, 422) else None
        if other is None:
            sent = extras(params, self._dialect)
            raise failure(refusal, self._endpoint, name, self._listed, sent)
        return other

    def _unusual(self, params: SamplingParams) -> Iterator[str]:
        """A note on settings that a server may have left aside without a word; once for each."""
        if self._dialect.family == "localgen":
            return  # it refuses what it does not know
        new = [field for field in extras(params, self._dialect) if field not in self._told_extras]
        if new:
            self._told_extras.update(new)
            yield f"not in OpenAI's protocol, so the server may ignore it: {', '.join(new)}"

    def _look_up(self, model: str | None) -> ModelInfo:
        cards = {card["id"]: card for card in self._cards(needed=model is None) or ()}
        self._listed = list(cards)
        name = self._only_one() if model is None else model
        card = cards.get(name, {})
        # a server may know more names than it lists
        makers = {str(each.get("owned_by", "")) for each in ([card] if card else cards.values())}
        family = makers.pop() if len(makers) == 1 else ""
        self._dialect = replace(self._dialect, family=family)
        notes = [] if family == "localgen" else [_MEASURED]
        if cards and not card:
            notes.append(f"{name} is not listed there, {names(self._listed)} is")
        return _info(name, self._endpoint, _ctx(card), tuple(notes))

    def _only_one(self) -> str:
        if len(self._listed) == 1:
            return self._listed[0]
        if not self._listed:
            raise InvalidRequest(f"{self._endpoint.where} lists no models: name one")
        raise InvalidRequest(
            f"{self._endpoint.where} has {len(self._listed):,} models, name one: "
            f"{names(self._listed)}"
        )

    def _cards(self, *, needed: bool = False) -> list[dict[str, Any]] | None:
        """What the server lists; None: it has no list. LocalgenError: it does not get that far.

        needed: whether it is an error that there is none.
        """
        with self._connection.get("models") as reply:
            if isinstance(reply, Refusal):
                if reply.status in _NO_LIST and not needed:
                    return None
                raise failure(reply, self._endpoint)
            body = reply.response.read()
        try:
            found = msgspec.json.decode(body)
            listed = found["data"] if isinstance(found, dict) else found
            return [card for card in listed if isinstance(card["id"], str)]
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise not_openai(self._endpoint, reply.kind) from error


def _ctx(card: dict[str, Any]) -> int:
    """The longest sequence as vLLM and SGLang, OpenRouter, or llama-server tell it; 0: untold."""
    meta = card.get("meta")
    inner = meta.get("n_ctx") if isinstance(meta, dict) else None
    told = (card.get("max_model_len"), card.get("context_length"), inner)
    return next((ctx for ctx in told if isinstance(ctx, int) and ctx > 0), 0)


def _info(name: str, endpoint: Endpoint, ctx: int, notes: tuple[str, ...]) -> ModelInfo:
    return ModelInfo(
        name=name,
        path="",
        architecture="",
        description=f"at {endpoint.where}",
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
