"""Quantization names in file names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

from localgen.hub.catalog import QUANT_PATTERN

DEFAULT_QUANT = "Q4_K_M"
AUTO_QUANT = "auto"
_QUANT_SUFFIX = re.compile(rf"(?:^|[-._])({QUANT_PATTERN.pattern})$", re.IGNORECASE)


class HasQuant(Protocol):
    @property
    def stem(self) -> str: ...

    @property
    def quant(self) -> str: ...


_Model = TypeVar("_Model", bound=HasQuant)


def quant_of(stem: str) -> str:
    """Return the quantization suffix of a stem in upper case, else the whole stem."""
    match = _QUANT_SUFFIX.search(stem)
    return match[1].upper() if match else stem


def matches_tag(stem: str, tag: str) -> bool:
    """Return True if `user/repo:tag` selects the file with this stem."""
    wanted, name = tag.lower(), stem.lower()
    return name == wanted or bool(re.search(rf"[-._]{re.escape(wanted)}$", name))


def select_quant(
    models: Sequence[_Model], tag: str | None, default: str = DEFAULT_QUANT
) -> _Model | None:
    """Return the model that a tag selects, or None.

    Without a tag, that is the default quantization, or the only model.
    """
    wanted = tag or default
    exact = [model for model in models if model.quant == wanted.upper()]
    found = exact or [model for model in models if matches_tag(model.stem, wanted)]
    if found:
        return found[0]
    return models[0] if tag is None and len(models) == 1 else None
