"""The first bytes of a file on the hub: what describes a model, without the model."""

from __future__ import annotations

from localgen.hub.library import hub
from localgen.hub.remote import translated

# metadata before the vocabulary take a few kilobytes, a config.json too
_BYTES = 256 << 10
_ASK_S = 15.0


def beginning(repo: str, commit: str, path: str) -> bytes:
    """At least as much as there is of the first 256 KiB. HubUnavailable, AccessDenied."""
    library = hub()
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    url = library.hf_hub_url(repo, path, revision=commit)
    headers = build_hf_headers() | {"Range": f"bytes=0-{_BYTES - 1}"}
    with (
        translated(repo),
        get_session().stream(
            "GET", url, headers=headers, timeout=_ASK_S, follow_redirects=True
        ) as reply,
    ):
        hf_raise_for_status(reply)
        found = b""
        # a server that knows no ranges sends all of it
        for block in reply.iter_bytes():
            found += block
            if len(found) >= _BYTES:
                break
    return found
