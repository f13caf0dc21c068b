"""Errors of a server as one sentence that states the problem and the fix."""

from __future__ import annotations

import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.request import getproxies

import httpx
import msgspec

from localgen.backends.errors import (
    InvalidRequest,
    LocalgenError,
    ModelNotFound,
    QueueFull,
    ServerUnavailable,
    error_from_code,
)
from localgen.backends.terminal_text import one_line
from localgen.backends.typed_data import decode_json
from localgen.client.endpoints import Endpoint, OwnCluster
from localgen.client.launch import read_server_pid
from localgen.client.local_replies import ErrorReply
from localgen.config import ServerSettings
from localgen.hub.hf_client import AccessDenied

CONNECT_TIMEOUT_S = 10.0
LIST_TIMEOUT_S = 30.0
_MAX_MESSAGE_CHARS = 400
_MAX_LISTED_NAMES = 20
_Reply = TypeVar("_Reply")


class NoServer(ServerUnavailable):
    """No local server runs."""


class ServerNotAnswering(ServerUnavailable):
    """The local server runs, but does not answer: it is stopped, or hangs."""


class EndpointUnavailable(LocalgenError):
    """A remote server cannot be reached, fails, or does not speak OpenAI's protocol."""

    code = "endpoint_unavailable"


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """A response whose status is not 200. body: its first bytes; retry_after_s: its Retry-After.

    request_id: its X-Request-Id, if any.
    """

    status: int
    body: bytes
    is_html: bool = False
    location: str = ""
    retry_after_s: float | None = None
    request_id: str = ""

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class SentRequest:
    """The part of a refused request that helps to explain the refusal.

    model: its model. listed_models: the server's models, if known. nonstandard: its fields that
    OpenAI's protocol does not have.
    """

    model: str | None = None
    listed_models: Sequence[str] = ()
    nonstandard: Sequence[str] = ()


class ServerErrors(ABC):
    """Translates the failures of one server. name: the server in messages."""

    name: str
    unavailable: type[LocalgenError]

    @abstractmethod
    def connection_error(self, error: httpx.HTTPError) -> LocalgenError:
        """The error of a connection that could not be opened, or broke."""

    @abstractmethod
    def refusal(self, response: ErrorResponse, sent: SentRequest = SentRequest()) -> LocalgenError:
        """The error of a response whose status is not 200."""

    @abstractmethod
    def stream_error(self, event: bytes) -> LocalgenError:
        """The error that an event of a stream reports."""

    def incomplete_stream(self) -> LocalgenError:
        """The error of a stream without an end."""
        return self.unavailable(f"{self.name} closed the connection in the middle of the answer")

    def malformed_event(self, event: bytes, error: Exception) -> LocalgenError:
        """The error of an event that cannot be decoded."""
        # it may be an error message in plain text
        start = event[:80].decode(errors="replace")
        return self.unavailable(
            f"{self.name} sent a response outside of OpenAI's protocol: {start!r} ({error})"
        )

    def not_openai(self, media_type: str) -> LocalgenError:
        """The error of a successful response that is not of OpenAI's protocol."""
        what = "a web page" if "html" in media_type else media_type or "an unknown content type"
        return self.unavailable(
            f"{self.name} is not an OpenAI-compatible server, it answers with {what}: "
            "check the path, it often ends in /v1"
        )


class LocalErrors(ServerErrors):
    """Errors of the local server, which are LocalgenErrors serialized as JSON."""

    name = "the server"
    unavailable = ServerUnavailable

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings

    def connection_error(self, error: httpx.HTTPError) -> LocalgenError:
        if isinstance(error, httpx.TimeoutException) or is_backlog_full(error):
            return self._not_answering()
        if isinstance(error, httpx.ConnectError):
            return NoServer(f"no server answers on {self._settings.socket_path}")
        return ServerUnavailable(
            f"the server stopped while answering: see {self._settings.log_path}"
        )

    def _not_answering(self) -> LocalgenError:
        pid = read_server_pid(self._settings)
        if pid is None:
            return ServerNotAnswering(
                f"what listens on {self._settings.socket_path} does not answer: end it, or set "
                "LOCALGEN_RUNTIME_DIR to another folder"
            )
        return ServerNotAnswering(
            f"the server (process {pid}) does not answer: `kill -CONT {pid}` if it was stopped, "
            f"or `kill -9 {pid}`"
        )

    def refusal(self, response: ErrorResponse, sent: SentRequest = SentRequest()) -> LocalgenError:
        try:
            return self.stream_error(response.body)
        except ServerUnavailable:
            return ServerUnavailable(f"the server answered with status {response.status}")

    def stream_error(self, event: bytes) -> LocalgenError:
        error = self.decode(event, ErrorReply).error
        return error_from_code(error.code, error.message, error.param)

    def decode(self, body: bytes, kind: type[_Reply]) -> _Reply:
        """Decode a reply. Raises ServerUnavailable if it is not of this kind."""
        try:
            return decode_json(body, kind)
        except msgspec.MsgspecError as error:
            raise ServerUnavailable(
                f"what answers on {self._settings.socket_path} is not a server of this version of "
                f"localgen ({error}): end it, or set LOCALGEN_RUNTIME_DIR to another folder"
            ) from error


def is_backlog_full(error: httpx.HTTPError) -> bool:
    """True if a socket has more connections waiting than its server wanted to keep."""
    is_connecting = isinstance(error, httpx.ConnectError)
    return is_connecting and any(isinstance(e, BlockingIOError) for e in _exception_chain(error))


class EndpointErrors(ServerErrors):
    """Errors of a remote server, in the various forms that servers use."""

    unavailable = EndpointUnavailable

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.name = endpoint.display_name

    def connection_error(self, error: httpx.HTTPError) -> LocalgenError:
        where = self.name
        match error:
            case httpx.NetworkError() | httpx.RemoteProtocolError() if isinstance(
                self._endpoint, OwnCluster
            ):
                problem = self._cluster_problem(error)
            case httpx.ConnectTimeout():
                problem = f"{where} does not answer within {CONNECT_TIMEOUT_S:.0f} s"
            case httpx.ReadTimeout():
                problem = f"{where} does not list its models within {LIST_TIMEOUT_S:.0f} s"
            case httpx.ProxyError():
                problem = f"the proxy to {where} fails: {error}"
            case httpx.ConnectError():
                proxy = " through the proxy of the environment" if self._uses_proxy() else ""
                problem = f"cannot reach {where}{proxy}: {self._connect_failure_reason(error)}"
            case _:
                detail = f" ({error})" if str(error) else ""
                problem = f"the connection to {where} was lost{detail}"
        return EndpointUnavailable(problem)

    def _cluster_problem(self, error: httpx.HTTPError) -> str:
        if not self._endpoint.is_restarted:
            return f"{self.name} has ended: `localgen cluster up` starts it"
        if isinstance(error, httpx.ConnectError):
            return f"{self.name} does not listen, as its gateway starts anew: try again"
        return f"the gateway of {self.name} ended while answering and starts anew: try again"

    def refusal(self, response: ErrorResponse, sent: SentRequest = SentRequest()) -> LocalgenError:
        message = self._message(response.body)
        detail = f": {message}" if message and not response.is_html else ""
        where, status = self.name, response.status
        match status:
            case 401 | 403:
                return AccessDenied(self._access_denied_message(status) + detail)
            case 404 | 405:
                return self._not_found_error(response, detail, sent)
            case 429:
                wait_s = response.retry_after_s
                wait = "" if wait_s is None else f", it asks to wait {wait_s:,.0f} s"
                return QueueFull(f"{where} accepts no more requests for now (429){wait}{detail}")
            case 400 | 413 | 422:
                fields = ", ".join(sent.nonstandard)
                hint = f" (not in OpenAI's protocol: {fields})" if fields else ""
                return _invalid_request_error(
                    response, f"{where} rejects the request ({status}){detail}{hint}"
                )
        if 300 <= status < 400:
            to = f" to {response.location}: use that URL" if response.location else f" ({status})"
            return EndpointUnavailable(f"{where} redirects{to}")
        return EndpointUnavailable(f"{where} failed with status {status}{detail}")

    def stream_error(self, event: bytes) -> LocalgenError:
        return EndpointUnavailable(f"{self.name} ended the answer: {self._message(event)}")

    def _message(self, body: bytes) -> str:
        """The message of an error body in any of the usual forms; may be empty."""
        try:
            sentence = _message_text(decode_json(body))
        except (msgspec.DecodeError, RecursionError):
            sentence = body.decode(errors="replace")
        return self._redact_key(one_line(sentence.strip()))[:_MAX_MESSAGE_CHARS]

    def _redact_key(self, message: str) -> str:
        # a server may repeat the key that it received
        try:
            key = self._endpoint.api_key()
        except LocalgenError:
            key = None
        return message.replace(key, "…") if key else message

    def _access_denied_message(self, status: int) -> str:
        key_env = self._endpoint.key_env
        if key_env is None:
            return (
                f"{self.name} requires an API key ({status}): "
                "--api-key-env names the variable that holds it"
            )
        return (
            f"{self.name} rejects the API key in {key_env} ({status}): set {key_env} to a valid one"
        )

    def _not_found_error(
        self, response: ErrorResponse, detail: str, sent: SentRequest
    ) -> LocalgenError:
        where, model, listed_models = self.name, sent.model, sent.listed_models
        if model is not None and listed_models and model not in listed_models:
            return ModelNotFound(
                f"no model {model} at {where}, models are {format_model_names(listed_models)}"
            )
        if model is not None and (listed_models or "model" in response.text.lower()):
            return ModelNotFound(f"no model {model} at {where}{detail}")
        return EndpointUnavailable(
            f"{where} does not speak OpenAI's protocol ({response.status}): "
            "check the path, it often ends in /v1"
        )

    def _connect_failure_reason(self, error: httpx.ConnectError) -> str:
        for cause in _exception_chain(error):
            match cause:
                case socket.gaierror():
                    return f"unknown host {self._endpoint.host}: check the URL and the network"
                case ConnectionRefusedError():
                    return "connection refused"
                case ssl.SSLCertVerificationError():
                    return (
                        f"its certificate is not trusted ({cause.verify_message}): "
                        "set SSL_CERT_FILE to a file with your certificate authority"
                    )
                case ssl.SSLError():
                    return f"no TLS connection ({cause.reason}): try http:// instead of https://"
                case OSError() if cause.strerror:
                    return cause.strerror
        return str(error) or "no connection"

    def _uses_proxy(self) -> bool:
        proxies = getproxies()
        scheme = self._endpoint.url.partition(":")[0]
        return not self._endpoint.is_loopback and (scheme in proxies or "all" in proxies)


def format_model_names(models: Sequence[str]) -> str:
    """The first 20 model names, and the number of others."""
    more = len(models) - _MAX_LISTED_NAMES
    shown = ", ".join(models[:_MAX_LISTED_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


def _invalid_request_error(response: ErrorResponse, message: str) -> LocalgenError:
    try:
        error = decode_json(response.body)["error"]
        code, param = error.get("code"), error.get("param")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return InvalidRequest(message)
    known = error_from_code(str(code), message, param if isinstance(param, str) else None)
    return known if type(known) is not LocalgenError else InvalidRequest(message, param=known.param)


def _message_text(value: Any) -> str:
    """The message of a decoded error body, at any depth."""
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


def _exception_chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
