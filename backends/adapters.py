"""LoRA adapters: as requests name them, and as an engine has read them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from localgen.backends.errors import InvalidRequest

# in the memory of one model; a request that needs more waits for others to end
MAX_LOADED_ADAPTERS = 8
# the only one that has adapters
ADAPTER_BACKEND = "llamacpp"
_SALT_PREFIX = "lora "


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter that a request names. path: a GGUF file, or a folder as PEFT writes it.

    scale: factor of what it adds to the weights.
    """

    name: str
    path: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter whose file was read and checked.

    key: hash of its content; adapters of the same key and scale are the same one, whatever their
    names. content: what the runner loads it from.
    """

    key: str
    scale: float
    name: str = field(compare=False)
    num_bytes: int = field(compare=False)
    content: Any = field(compare=False, repr=False)


# adapters of a sequence, in the order of their keys
Adapters = tuple[Adapter, ...]
# reads the file of an adapter, in any thread; raises ModelNotFound or LoadFailed
ReadAdapter = Callable[[AdapterRef], Adapter]


def read_adapters(refs: Seq[AdapterRef], read: ReadAdapter | None) -> Adapters:
    """Read the adapters of a request; those with a scale of 0 are left out.

    read: None if the backend has none. Raises InvalidRequest, or as `read`.
    """
    if not refs:
        return ()
    if read is None:
        raise InvalidRequest(
            f"{refs[0].name} is a LoRA adapter, which only the llama.cpp backend has: load the "
            f"model with --backend {ADAPTER_BACKEND}",
            param="model",
        )
    if len(refs) > MAX_LOADED_ADAPTERS:
        raise InvalidRequest(
            f"{len(refs)} adapters in one request, at most {MAX_LOADED_ADAPTERS}", param="lora"
        )
    for ref in refs:
        if not math.isfinite(ref.scale):
            raise InvalidRequest(f"the scale of {ref.name} must be a number", param="lora")
    found: dict[str, Adapter] = {}
    for adapter in (read(ref) for ref in refs if ref.scale):
        if adapter.key in found:
            raise InvalidRequest(
                f"{found[adapter.key].name} and {adapter.name} are the same adapter: give it once",
                param="lora",
            )
        found[adapter.key] = adapter
    return tuple(found[key] for key in sorted(found))


def prefix_salt(cache_salt: str, adapters: Adapters) -> str:
    """The salt under which prefixes are kept: others for each set of adapters and scales.

    No salt that a client gives leads to those of an adapter.
    """
    if not adapters and not cache_salt.startswith(_SALT_PREFIX):
        return cache_salt
    text = json.dumps([cache_salt, [(each.key, each.scale) for each in adapters]])
    return _SALT_PREFIX + hashlib.sha256(text.encode()).hexdigest()
