"""Check the numbers of a GGUF file that native code trusts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localgen.backends.errors import LoadFailed

# of llama.cpp, which aborts beyond them
_MAX_LAYERS = 512
_MAX_EXPERTS = 512


def check_gguf_numbers(header: Mapping[str, Any], path: Path) -> None:
    """Raise LoadFailed, naming the key, if a number of the model's metadata is out of range.

    header: as read_gguf_header returns it.
    """
    prefix = f"{header.get('general.architecture')}."
    numbers = {
        key.removeprefix(prefix): value for key, value in header.items() if key.startswith(prefix)
    }
    layers, experts = numbers.get("block_count"), numbers.get("expert_count", 0)
    before_last = layers - 1 if isinstance(layers, int) else layers
    ranges = {
        "block_count": (1, _MAX_LAYERS),
        "context_length": (1, 2**31 - 1),
        "expert_count": (0, _MAX_EXPERTS),
        "expert_used_count": (1 if experts else 0, experts),
        "nextn_predict_layers": (0, before_last),
        "attention.shared_kv_layers": (0, before_last),
    }
    for name, value in numbers.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise _out_of_range(path, prefix + name, number, "a finite number")
            if name.endswith("epsilon") and not _is_between(number, 0, math.inf):
                raise _out_of_range(path, prefix + name, number, "a number that is not negative")
            if name in ranges and not _is_between(number, *ranges[name]):
                least, most = ranges[name]
                raise _out_of_range(path, prefix + name, number, f"{least} to {most}")


def _is_between(value: object, least: float, most: object) -> bool:
    """True if all are numbers in this order; invalid limits are reported for their own key."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value and (not isinstance(most, int | float) or value <= most)


def _out_of_range(path: Path, key: str, value: object, expected: str) -> LoadFailed:
    return LoadFailed(f"cannot load {path}: {key} is {str(value)[:60]!r}, it must be {expected}")
