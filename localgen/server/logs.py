"""Log lines, for people or for programs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]


def formatter(kind: LogFormat = "text") -> logging.Formatter:
    """One line for each record. What is passed as `extra={"fields": {…}}` follows the message."""
    return _Json() if kind == "json" else _Text("%(asctime)s %(levelname)s %(message)s")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = getattr(record, "fields", {})
    return found


class _Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        pairs = (f" {name}={_word(value)}" for name, value in _fields(record).items())
        return super().formatMessage(record) + "".join(pairs)


def _word(value: object) -> str:
    """As one word: a name that a client chose could forge a line or another field."""
    text = str(value)
    plain = text.isprintable() and not set(text) & set(' "=')
    return text if plain and text else json.dumps(text)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        } | _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
