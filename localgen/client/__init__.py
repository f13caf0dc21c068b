"""Clients of the local server and of remote servers.

Imported lazily: a screen that needs only values paints sooner without httpx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localgen.client.client import Client
    from localgen.client.model_client import ModelClient
    from localgen.client.remote_client import RemoteClient
    from localgen.client.responses import (
        Completion,
        Health,
        ModelCard,
        RunningModel,
        TextDelta,
    )

__all__ = [
    "Client",
    "Completion",
    "Health",
    "ModelCard",
    "ModelClient",
    "RemoteClient",
    "RunningModel",
    "TextDelta",
]
_MODULES = {"Client": "client", "ModelClient": "model_client", "RemoteClient": "remote_client"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'responses')}"), name)
