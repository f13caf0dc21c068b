"""Format sizes, durations, rates and counts."""

from __future__ import annotations

BYTE_UNITS = ("B", "KB", "MB", "GB", "TB")
_GB = BYTE_UNITS.index("GB")


def format_size(size_bytes: float) -> str:
    """Format a size with a decimal unit (powers of 1000), as the Hugging Face Hub does.

    Messages compare sizes in GB, so these always have a decimal: `4.9 GB`, `139.6 GB`, `144 MB`.
    """
    unit = 0
    while size_bytes >= 999.5 and unit < len(BYTE_UNITS) - 1:
        size_bytes /= 1000
        unit += 1
    digits = 0 if unit == 0 or (unit < _GB and size_bytes >= 99.95) else 1
    return f"{size_bytes:.{digits}f} {BYTE_UNITS[unit]}"


def format_params(count: int) -> str:
    """Format a number of parameters as names of models do: `5.8M`, `135M`, `1.0B`."""
    if count >= 999.5e6:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.{0 if count >= 99.95e6 else 1}f}M"


def format_duration(ms: float) -> str:
    """Format a duration in ms below one second, else in seconds."""
    return f"{ms:.0f} ms" if ms < 999.5 else f"{ms / 1000:.2f} s"


def format_rate(per_s: float) -> str:
    """Tokens/s with one decimal below 100, as an integer from there on."""
    return f"{per_s:.1f}" if per_s < 99.95 else f"{per_s:,.0f}"


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_elapsed(seconds: float) -> str:
    """Format a duration as `1 h 05 min`, `3 min 20 s` or `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{seconds:.0f} s"
