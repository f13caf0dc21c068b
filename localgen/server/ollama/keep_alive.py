"""keep_alive as Ollama's clients write it: seconds, or a duration as Go prints them."""

from __future__ import annotations

import re

from localgen.backends.errors import InvalidRequest
from localgen.server.resident import KeepAlive

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"\d{1,12}(?:\.\d{1,12})?"
_PART = re.compile(rf"({_NUMBER})(ns|us|µs|ms|s|m|h)")
_WHOLE = re.compile(rf"(-?)((?:{_PART.pattern})+|{_NUMBER})")


def parse(given: float | str | None) -> KeepAlive | None:
    """None: not given, so no change. Below zero: for ever. InvalidRequest."""
    if given is None or given == "":
        return None
    match = _WHOLE.fullmatch(str(given).strip()) if isinstance(given, str) else None
    if isinstance(given, str) and match is None:
        raise InvalidRequest(
            f"keep_alive is {given[:40]!r}: give seconds, or a time such as 30s, 5m, 1h30m, 0, "
            "or -1 for ever",
            param="keep_alive",
        )
    if match is None:
        seconds = float(given)
    else:
        parts = _PART.findall(match[2])
        seconds = sum(float(amount) * _UNITS_S[unit] for amount, unit in parts)
        seconds = seconds if parts else float(match[2])
        seconds = -1.0 if match[1] and seconds else seconds
    return KeepAlive(None if seconds < 0 else seconds)
