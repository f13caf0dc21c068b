"""Numbers as people read them, the same width wherever they stand below each other."""

from __future__ import annotations

UNKNOWN = "—"
_UNITS = ("B", "kB", "MB", "GB", "TB")


def rate(per_s: float | None) -> str:
    """Tokens a second: `1,234`, `45.6`, `0.43`."""
    return UNKNOWN if per_s is None else number(per_s)


def number(value: float | None) -> str:
    """Three digits that matter: `1,234`, `456`, `45.6`, `4.56`, `0`; from a million on `1.23M`."""
    if value is None or value >= 999_999.5:
        return count(value)
    if value == 0:
        return "0"
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def count(value: float | None) -> str:
    """A whole number: `12,345`; from a million on `1.23M`."""
    if value is None:
        return UNKNOWN
    if value >= 1e9:
        return f"{value / 1e9:.2f}G"
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:.2f}M"


def duration(ms: float | None) -> str:
    """Of milliseconds: `0.42 ms`, `12.3 ms`, `456 ms`, `1.23 s`, `2m 05s`, `1h 02m`."""
    if ms is None:
        return UNKNOWN
    if ms < 999.5:
        return f"{number(ms)} ms"
    if ms < 99_950:
        return f"{number(ms / 1e3)} s"
    return clock(ms / 1e3)


def clock(seconds: float | None) -> str:
    """Of seconds: `12s`, `2m 05s`, `1h 02m`, `3d 04h`."""
    if seconds is None:
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02}h"


def size(num_bytes: float | None) -> str:
    """Bytes in powers of ten, as disks and models are sold: `1.23 GB`."""
    if num_bytes is None:
        return UNKNOWN
    unit = 0
    while abs(num_bytes) >= 999.5 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1e3, unit + 1
    return f"{number(num_bytes)} {_UNITS[unit]}"


def part_of(part: float | None, whole: float | None) -> str:
    """Bytes of all there are, the unit once where it is the same: `9.00 of 16.0 GB`."""
    used, total = size(part), size(whole)
    unit = total.rpartition(" ")[2]
    return f"{used.removesuffix(f' {unit}')} of {total}"


def percent(share: float | None) -> str:
    """Of a share, 0 to 1: `4.2%`, `42%`; more than all is shown as such."""
    if share is None:
        return UNKNOWN
    return f"{share * 100:.1f}%" if 0 < share < 0.0995 else f"{share * 100:.0f}%"
