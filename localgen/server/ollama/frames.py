"""How Ollama's protocol frames what it sends: one JSON object a line."""

from __future__ import annotations

from localgen.server.format import encode

# what its paths begin with
PATHS = "/api/"


def error_body(message: str) -> dict[str, str]:
    """The object that every failed request gets."""
    return {"error": message}


class Ndjson:
    """A line for each object. Nothing follows the last one, which says `done` itself."""

    content_type = "application/x-ndjson"
    end = b""

    def event(self, value: object) -> bytes:
        return encode(value) + b"\n"

    def failed(self, code: str, message: str, param: str | None = None) -> bytes:
        return self.event(error_body(message))


NDJSON = Ndjson()
