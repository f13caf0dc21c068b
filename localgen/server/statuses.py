"""HTTP statuses of our errors, the same in every protocol."""

from __future__ import annotations

# codes of LocalgenError; anything else is our fault
_STATUS_OF_CODE = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "bad_setting": 400,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "model_busy": 409,
    "queue_full": 429,
    "load_failed": 500,
    "engine_died": 502,
    "server_unavailable": 503,
    "timeout": 504,
    "out_of_memory": 507,
    "hub_unavailable": 503,
    "access_denied": 403,
    "disk_full": 507,
    "download_failed": 502,
}


def status_of(code: str) -> int:
    """The status of a failure."""
    return _STATUS_OF_CODE.get(code, 500)
