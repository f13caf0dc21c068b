"""What can go wrong at another server, in one sentence that says what to do."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.request import getproxies

import httpx
import msgspec

from localgen.backends.errors import (
    InvalidRequest,
    LocalgenError,
    ModelNotFound,
    QueueFull,
    error_of,
)
from localgen.client.endpoints import Endpoint
from localgen.hub.hf_client import AccessDenied

CONNECT_S = 10.0
LIST_S = 30.0
_SHOWN_LETTERS = 400
_SHOWN_NAMES = 20


class EndpointUnavailable(LocalgenError):
    """Another server cannot be reached, fails, or does not speak OpenAI's protocol."""

    code = "endpoint_unavailable"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A response that is no answer. body: how it starts. wait_s: how long it asks to wait."""

    status: int
    body: bytes
    is_page: bool = False
    location: str = ""
    wait_s: float | None = None

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


def said(body: bytes, endpoint: Endpoint) -> str:
    """What an error body says, in any of the shapes that servers give it; may be empty."""
    try:
        sentence = _sentence(msgspec.json.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        sentence = body.decode(errors="replace")
    return _without_key(" ".join(sentence.split()), endpoint)[:_SHOWN_LETTERS]


def names(models: Sequence[str]) -> str:
    """Models for a sentence, the first few of them."""
    more = len(models) - _SHOWN_NAMES
    shown = ", ".join(models[:_SHOWN_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


def failure(
    refusal: Refusal,
    endpoint: Endpoint,
    model: str | None = None,
    listed: Sequence[str] | None = None,
    extras: Sequence[str] = (),
) -> LocalgenError:
    """The error of a refusal. listed: the models that there are; extras: unusual fields sent."""
    message = said(refusal.body, endpoint)
    told = f": {message}" if message and not refusal.is_page else ""
    where, status = endpoint.where, refusal.status
    match status:
        case 401 | 403:
            return AccessDenied(_denied(endpoint, status) + told)
        case 404 | 405:
            return _not_found(refusal, where, told, model, listed)
        case 429:
            wait = "" if refusal.wait_s is None else f", it asks to wait {refusal.wait_s:,.0f} s"
            return QueueFull(f"{where} takes no more requests at present (429){wait}{told}")
        case 400 | 413 | 422:
            odd = f" (not in OpenAI's protocol: {', '.join(extras)})" if extras else ""
            return _invalid(refusal, f"{where} refuses the request ({status}){told}{odd}")
    if 300 <= status < 400:
        there = f" to {refusal.location}: give that URL" if refusal.location else ": it has moved"
        return EndpointUnavailable(f"{where} sends on{there}")
    return EndpointUnavailable(f"{where} failed with status {status}{told}")


def not_openai(endpoint: Endpoint, kind: str) -> EndpointUnavailable:
    """A good answer of a kind that no OpenAI server gives."""
    what = "a web page" if "html" in kind else f"{kind or 'something'} that is not its protocol"
    return EndpointUnavailable(
        f"{endpoint.where} is no OpenAI server, it answers with {what}: "
        "check the path, it often ends in /v1"
    )


def lost(error: httpx.HTTPError, endpoint: Endpoint) -> EndpointUnavailable:
    """The error of a connection that did not come about, or broke."""
    where = endpoint.where
    match error:
        case httpx.ConnectTimeout():
            return EndpointUnavailable(f"{where} does not answer within {CONNECT_S:.0f} s")
        case httpx.ReadTimeout():
            return EndpointUnavailable(f"{where} does not list its models within {LIST_S:.0f} s")
        case httpx.ProxyError():
            return EndpointUnavailable(f"the proxy on the way to {where} fails: {error}")
        case httpx.ConnectError():
            way = " by the proxy of the environment" if _has_proxy(endpoint) else ""
            return EndpointUnavailable(f"cannot reach {where}{way}: {_reason(error, endpoint)}")
    detail = f" ({error})" if str(error) else ""
    return EndpointUnavailable(f"the connection to {where} broke off{detail}")


def _denied(endpoint: Endpoint, status: int) -> str:
    if endpoint.key_env is None:
        return f"{endpoint.where} wants a key ({status}): --api-key-env names the variable with it"
    return f"{endpoint.where} refuses the key in {endpoint.key_env} ({status})"


def _not_found(
    refusal: Refusal, where: str, told: str, model: str | None, listed: Sequence[str] | None
) -> LocalgenError:
    if model is not None and listed and model not in listed:
        return ModelNotFound(f"no model {model} at {where}: there is {names(listed)}")
    if model is not None and (listed or "model" in refusal.text.lower()):
        return ModelNotFound(f"{where} has no model {model}{told}")
    return EndpointUnavailable(
        f"{where} does not know OpenAI's protocol ({refusal.status}): "
        "check the path, it often ends in /v1"
    )


def _invalid(refusal: Refusal, message: str) -> LocalgenError:
    try:
        error = msgspec.json.decode(refusal.body)["error"]
        code, param = error.get("code"), error.get("param")
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return InvalidRequest(message)
    known = error_of(str(code), message, param if isinstance(param, str) else None)
    return known if type(known) is not LocalgenError else InvalidRequest(message, param=known.param)


def _sentence(found: Any) -> str:
    """The message in an error object, however deep it lies."""
    match found:
        case str():
            return found
        case {"error": dict() | str() as inner} | {"detail": inner} | {"message": inner}:
            return _sentence(inner)
        case {"loc": list() as place, "msg": str() as text}:
            return f"{'.'.join(str(part) for part in place)}: {text}"
        case [*parts]:
            return "; ".join(_sentence(part) for part in parts)
    return "" if found is None else str(found)


def _reason(error: httpx.ConnectError, endpoint: Endpoint) -> str:
    for cause in _causes(error):
        match cause:
            case socket.gaierror():
                return f"no host {endpoint.host} is known: check the URL and the network"
            case ConnectionRefusedError():
                return "nothing listens there (connection refused)"
            case ssl.SSLCertVerificationError():
                return (
                    f"its certificate is not trusted ({cause.verify_message}): "
                    "SSL_CERT_FILE may name a file of authorities of your own"
                )
            case ssl.SSLError():
                return f"no TLS connection ({cause.reason}): is it http:// rather than https://?"
            case OSError() if cause.strerror:
                return cause.strerror
    return str(error) or "no connection"


def _has_proxy(endpoint: Endpoint) -> bool:
    found = getproxies()
    scheme = endpoint.url.partition(":")[0]
    return not endpoint.is_loopback and (scheme in found or "all" in found)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _without_key(message: str, endpoint: Endpoint) -> str:
    # a server may repeat what it was sent
    try:
        key = endpoint.key()
    except LocalgenError:
        key = None
    return message.replace(key, "…") if key else message
