"""Quantizations, as the names of files tell them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

from localgen.hub.catalog import QUANT_PATTERN

DEFAULT_QUANT = "Q4_K_M"
AUTO_QUANT = "auto"
_QUANT_SUFFIX = re.compile(rf"(?:^|[-._])({QUANT_PATTERN.pattern})$", re.IGNORECASE)


class HasQuant(Protocol):
    """A model with a file name."""

    @property
    def stem(self) -> str: ...

    @property
    def quant(self) -> str: ...


_Model = TypeVar("_Model", bound=HasQuant)


def quant_of(stem: str) -> str:
    """The quantization that a stem ends in, upper case; the whole stem if in none."""
    match = _QUANT_SUFFIX.search(stem)
    return match[1].upper() if match else stem


def matches_tag(stem: str, tag: str) -> bool:
    """Whether `user/repo:tag` means the file of this stem."""
    wanted, name = tag.lower(), stem.lower()
    return name == wanted or bool(re.search(rf"[-._]{re.escape(wanted)}$", name))


def select_quant(
    models: Sequence[_Model], tag: str | None, default: str = DEFAULT_QUANT
) -> _Model | None:
    """The model that a tag means; without one the default, or the only one there is."""
    wanted = tag or default
    exact = [model for model in models if model.quant == wanted.upper()]
    found = exact or [model for model in models if matches_tag(model.stem, wanted)]
    if found:
        return found[0]
    return models[0] if tag is None and len(models) == 1 else None
