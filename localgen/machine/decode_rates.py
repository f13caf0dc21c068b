"""Decode rates of a model for three uses. It needs no package: the build of localgen imports it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class DecodeRates:
    """Tokens/s of a model with an empty context, on the CPU.

    with_drafts: of one stream whose steps verify three drafts, if all are accepted.
    many_streams: of 16 streams together.
    """

    one_stream: float
    with_drafts: float
    many_streams: float

    USES: ClassVar[tuple[str, ...]] = ("one stream", "3 drafts", "16 streams")

    def __iter__(self) -> Iterator[float]:
        """The rates in the order of USES."""
        return iter((self.one_stream, self.with_drafts, self.many_streams))


def fastest_by_use(rates: Mapping[str, DecodeRates | None]) -> dict[str, str]:
    """Return which of the named alternatives is fastest for each of DecodeRates.USES.

    Empty if fewer than two have rates.
    """
    known = {name: tuple(each) for name, each in rates.items() if each is not None}
    if len(known) < 2:
        return {}
    return {
        use: max(known, key=lambda name: known[name][i]) for i, use in enumerate(DecodeRates.USES)
    }
