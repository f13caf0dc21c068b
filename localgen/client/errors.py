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
    error_from_code,
)
from localgen.client.endpoints import Endpoint
from localgen.hub.hf_client import AccessDenied

CONNECT_TIMEOUT_S = 10.0
LIST_TIMEOUT_S = 30.0
_MAX_MESSAGE_CHARS = 400
_MAX_LISTED_NAMES = 20


class EndpointUnavailable(LocalgenError):
    """Another server cannot be reached, fails, or does not speak OpenAI's protocol."""

    code = "endpoint_unavailable"


@dataclass(frozen=True, slots=True)
class EndpointErrorResponse:
    """A response that is no answer.

    body: how it starts. retry_after_s: how long it asks to wait.
    """

    status: int
    body: bytes
    is_html: bool = False
    location: str = ""
    retry_after_s: float | None = None

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


def error_message(body: bytes, endpoint: Endpoint) -> str:
    """What an error body says, in any of the shapes that servers give it; may be empty."""
    try:
        sentence = _message_text(msgspec.json.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        sentence = body.decode(errors="replace")
    return _redact_key(" ".join(sentence.split()), endpoint)[:_MAX_MESSAGE_CHARS]


def format_model_names(models: Sequence[str]) -> str:
    """Models for a sentence, the first few of them."""
    more = len(models) - _MAX_LISTED_NAMES
    shown = ", ".join(models[:_MAX_LISTED_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


def endpoint_error(
    response: EndpointErrorResponse,
    endpoint: Endpoint,
    model: str | None = None,
    listed_models: Sequence[str] | None = None,
    nonstandard: Sequence[str] = (),
) -> LocalgenError:
    """The error of a refusal. listed_models: the models that there are; nonstandard: unusual fields
    sent."""
    message = error_message(response.body, endpoint)
    told = f": {message}" if message and not response.is_html else ""
    where, status = endpoint.display_name, response.status
    match status:
        case 401 | 403:
            return AccessDenied(_access_denied_message(endpoint, status) + told)
        case 404 | 405:
            return _not_found_error(response, where, told, model, listed_models)
        case 429:
            wait = (
                ""
                if response.retry_after_s is None
                else f", it asks to wait {response.retry_after_s:,.0f} s"
            )
            return QueueFull(f"{where} takes no more requests at present (429){wait}{told}")
        case 400 | 413 | 422:
            odd = f" (not in OpenAI's protocol: {', '.join(nonstandard)})" if nonstandard else ""
            return _invalid_request_error(
                response, f"{where} refuses the request ({status}){told}{odd}"
            )
    if 300 <= status < 400:
        there = f" to {response.location}: give that URL" if response.location else ": it has moved"
        return EndpointUnavailable(f"{where} sends on{there}")
    return EndpointUnavailable(f"{where} failed with status {status}{told}")


def not_openai_error(endpoint: Endpoint, media_type: str) -> EndpointUnavailable:
    """A good answer of a kind that no OpenAI server gives."""
    what = (
        "a web page"
        if "html" in media_type
        else f"{media_type or 'something'} that is not its protocol"
    )
    return EndpointUnavailable(
        f"{endpoint.display_name} is no OpenAI server, it answers with {what}: "
        "check the path, it often ends in /v1"
    )


def connection_error(error: httpx.HTTPError, endpoint: Endpoint) -> EndpointUnavailable:
    """The error of a connection that did not come about, or broke."""
    where = endpoint.display_name
    match error:
        case httpx.ConnectTimeout():
            return EndpointUnavailable(f"{where} does not answer within {CONNECT_TIMEOUT_S:.0f} s")
        case httpx.ReadTimeout():
            return EndpointUnavailable(
                f"{where} does not list its models within {LIST_TIMEOUT_S:.0f} s"
            )
        case httpx.ProxyError():
            return EndpointUnavailable(f"the proxy on the way to {where} fails: {error}")
        case httpx.ConnectError():
            way = " by the proxy of the environment" if _uses_proxy(endpoint) else ""
            return EndpointUnavailable(
                f"cannot reach {where}{way}: {_connect_failure_reason(error, endpoint)}"
            )
    detail = f" ({error})" if str(error) else ""
    return EndpointUnavailable(f"the connection to {where} broke off{detail}")


def _access_denied_message(endpoint: Endpoint, status: int) -> str:
    if endpoint.key_env is None:
        return (
            f"{endpoint.display_name} wants a key ({status}): "
            "--api-key-env names the variable with it"
        )
    return f"{endpoint.display_name} refuses the key in {endpoint.key_env} ({status})"


def _not_found_error(
    response: EndpointErrorResponse,
    where: str,
    detail: str,
    model: str | None,
    listed_models: Sequence[str] | None,
) -> LocalgenError:
    if model is not None and listed_models and model not in listed_models:
        return ModelNotFound(
            f"no model {model} at {where}: there is {format_model_names(listed_models)}"
        )
    if model is not None and (listed_models or "model" in response.text.lower()):
        return ModelNotFound(f"{where} has no model {model}{detail}")
    return EndpointUnavailable(
        f"{where} does not know OpenAI's protocol ({response.status}): "
        "check the path, it often ends in /v1"
    )


def _invalid_request_error(response: EndpointErrorResponse, message: str) -> LocalgenError:
    try:
        error = msgspec.json.decode(response.body)["error"]
        code, param = error.get("code"), error.get("param")
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError):
        return InvalidRequest(message)
    known = error_from_code(str(code), message, param if isinstance(param, str) else None)
    return known if type(known) is not LocalgenError else InvalidRequest(message, param=known.param)


def _message_text(value: Any) -> str:
    """The message in an error object, however deep it lies."""
    match value:
        case str():
            return value
        case {"error": dict() | str() as inner} | {"detail": inner} | {"message": inner}:
            return _message_text(inner)
        case {"loc": list() as place, "msg": str() as text}:
            return f"{'.'.join(str(part) for part in place)}: {text}"
        case [*parts]:
            return "; ".join(_message_text(part) for part in parts)
    return "" if value is None else str(value)


def _connect_failure_reason(error: httpx.ConnectError, endpoint: Endpoint) -> str:
    for cause in _exception_chain(error):
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


def _uses_proxy(endpoint: Endpoint) -> bool:
    found = getproxies()
    scheme = endpoint.url.partition(":")[0]
    return not endpoint.is_loopback and (scheme in found or "all" in found)


def _exception_chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _redact_key(message: str, endpoint: Endpoint) -> str:
    # a server may repeat what it was sent
    try:
        key = endpoint.api_key()
    except LocalgenError:
        key = None
    return message.replace(key, "…") if key else message
