"""What all sessions of the app share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from localgen.chat.parameters import ModelOptions
from localgen.chat.session_store import SessionStore
from localgen.client import Client
from localgen.client.suggested_models import SuggestedModel
from localgen.mcp_tools.chat_tools import ChatTools
from localgen.mcp_tools.connections import McpConnections


@dataclass(frozen=True, slots=True, kw_only=True)
class AppContext:
    """Dependencies shared by all sessions of the app.

    make_client: creates a client with a callback for notices to the user; one per session, because
    aborting a request closes its client. server_url: the remote server, or empty for the local one.
    model: model of new sessions, or None for the default model. notice: for the user, at the start.
    suggest_models: models to propose, may take a second. clock: for durations; now_s: Unix time.
    tools: of new sessions, each of which has its own permissions.
    """

    store: SessionStore
    make_client: Callable[[Callable[[str], None]], Client]
    options: ModelOptions
    state_dir: Path
    server_url: str = ""
    model: str | None = None
    notice: str = ""
    suggest_models: Callable[[], Sequence[SuggestedModel]] = tuple
    tools: ChatTools = field(default_factory=lambda: ChatTools(McpConnections()))
    clock: Callable[[], float] = time.monotonic
    now_s: Callable[[], float] = time.time
