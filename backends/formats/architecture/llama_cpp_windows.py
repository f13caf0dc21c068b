"""Sliding windows that llama.cpp does not compute: those of all architectures but Gemma's.

Its loaders of llama, qwen2, qwen3 and qwen3moe read no window, that of phi3 disables it.
"""

from __future__ import annotations

from localgen.backends.formats.architecture.families import BY_GGUF_NAME, FAMILIES, Family
from localgen.backends.formats.architecture.model_spec import ModelSpec


def spec_window_note(spec: ModelSpec) -> str | None:
    """What llama.cpp loses of the model; None if nothing."""
    windows = [window for window in spec.sliding_windows if window is not None]
    return _window_note(FAMILIES[spec.architecture], min(windows, default=0), spec.max_len)


def gguf_window_note(
    architecture: str | None, window: int | None, context: int | None
) -> str | None:
    """What llama.cpp leaves out of a GGUF file with this metadata; None if nothing, or unknown."""
    family = BY_GGUF_NAME.get(architecture or "")
    return None if family is None else _window_note(family, window or 0, context or 0)


def _window_note(family: Family, window: int, context: int) -> str | None:
    if family.gemma or not family.gguf_name or not 0 < window < context:
        return None
    return (
        f"llama.cpp computes no sliding windows of this architecture: exact within {window:,} "
        "tokens of context, beyond them layers see text that they were trained not to see"
    )
