"""Number formats with a nearly constant width, for columns and gauges."""

from __future__ import annotations

from localgen.backends.units import BYTE_UNITS

UNKNOWN_TEXT = "—"


def format_rate(per_s: float | None) -> str:
    """Tokens/s: `1,234`, `45.6`, `0.43`."""
    return UNKNOWN_TEXT if per_s is None else format_number(per_s)


def format_number(value: float | None) -> str:
    """Three significant digits: `1,234`, `456`, `45.6`, `4.56`, `0`; from a million `1.23M`."""
    if value is None or value >= 999_999.5:
        return format_integer(value)
    if value == 0:
        return "0"
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def format_integer(value: float | None) -> str:
    """A whole number: `12,345`; from a million `1.23M`, from a billion `1.23G`."""
    if value is None:
        return UNKNOWN_TEXT
    if value >= 1e9:
        return f"{value / 1e9:.2f}G"
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:.2f}M"


def format_duration_ms(ms: float | None) -> str:
    """Milliseconds as `0.42 ms`, `12.3 ms`, `456 ms`, `1.23 s`, `2m 05s`, `1h 02m`."""
    if ms is None:
        return UNKNOWN_TEXT
    if ms < 999.5:
        return f"{format_number(ms)} ms"
    if ms < 99_950:
        return f"{format_number(ms / 1e3)} s"
    return format_duration_s(ms / 1e3)


def format_duration_s(seconds: float | None) -> str:
    """Seconds as `12s`, `2m 05s`, `1h 02m`, `3d 04h`."""
    if seconds is None:
        return UNKNOWN_TEXT
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02}h"


def format_bytes(num_bytes: float | None) -> str:
    """Bytes in powers of ten, the unit of disks and model files: `1.23 GB`."""
    if num_bytes is None:
        return UNKNOWN_TEXT
    unit = 0
    while abs(num_bytes) >= 999.5 and unit < len(BYTE_UNITS) - 1:
        num_bytes, unit = num_bytes / 1e3, unit + 1
    return f"{format_number(num_bytes)} {BYTE_UNITS[unit]}"


def format_bytes_of(used_bytes: float | None, total_bytes: float | None) -> str:
    """Used and total bytes; a common unit is written once: `9.00 of 16.0 GB`."""
    used, total = format_bytes(used_bytes), format_bytes(total_bytes)
    unit = total.rpartition(" ")[2]
    return f"{used.removesuffix(f' {unit}')} of {total}"


def format_percent(fraction: float | None) -> str:
    """A fraction as `4.2%`, `42%`; values above 1 are not clamped."""
    if fraction is None:
        return UNKNOWN_TEXT
    return f"{fraction * 100:.1f}%" if 0 < fraction < 0.0995 else f"{fraction * 100:.0f}%"
