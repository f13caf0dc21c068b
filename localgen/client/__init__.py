"""The client of a server of OpenAI's protocol, local or at a URL.

Imported lazily: a screen that needs only values paints sooner without httpx.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localgen.client.client import Client
    from localgen.client.local_client import LocalClient
    from localgen.client.responses import (
        Completion,
        Health,
        ModelCard,
        RunningModel,
        TextDelta,
    )

# httpx imports its own command line where click and rich are installed: a third of its time
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]

__all__ = [
    "Client",
    "Completion",
    "Health",
    "LocalClient",
    "ModelCard",
    "RunningModel",
    "TextDelta",
]
_MODULES = {"Client": "client", "LocalClient": "local_client"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'responses')}"), name)
