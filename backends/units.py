"""Format sizes, durations and counts."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KB", "MB", "GB", "TB")


def format_size(size_bytes: float) -> str:
    """Format a size with a decimal unit (powers of 1000), as `ps` and the Hugging Face Hub do."""
    unit = 0
    while size_bytes >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        size_bytes /= 1000
        unit += 1
    digits = 0 if unit == 0 or size_bytes >= 99.95 else 1
    return f"{size_bytes:.{digits}f} {_BYTE_UNITS[unit]}"


def format_duration(ms: float) -> str:
    """Format a duration in ms below one second, else in seconds."""
    return f"{ms:.0f} ms" if ms < 999.5 else f"{ms / 1000:.2f} s"


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_gb(size_bytes: float) -> str:
    """Format a size in GB or MB with one decimal, as in error messages: `1.5 GB`."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


def format_elapsed(seconds: float) -> str:
    """Format a duration as `1 h 05 min`, `3 min 20 s` or `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{seconds:.0f} s"
