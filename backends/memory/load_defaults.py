"""How the runners load a model where nothing else is asked: what its memory follows from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDefaults:
    """parallel: sequences computed at once. num_cached_prefixes: ids for kept prefixes beside them.

    cache_type: of keys and values. weight_element_bytes: of widened weights; None: they stay as
    they are.
    """

    parallel: int
    max_batch_tokens: int
    num_cached_prefixes: int = 0
    cache_type: str
    weight_element_bytes: int | None = None


# 512 is llama.cpp's own width of a prompt step: larger ones are not faster, and nothing can be
# cancelled within a step
LLAMACPP_DEFAULTS = LoadDefaults(
    parallel=32, max_batch_tokens=512, num_cached_prefixes=32, cache_type="f16"
)
CUDA_DEFAULTS = LoadDefaults(
    parallel=256, max_batch_tokens=8192, cache_type="bf16", weight_element_bytes=2
)
# a CPU is a hundredth of a GPU
CUDA_ON_CPU_DEFAULTS = LoadDefaults(
    parallel=32, max_batch_tokens=512, cache_type="f32", weight_element_bytes=4
)
# of llama.cpp's cache in parts, each with room for a whole context
DEFAULT_SPLIT_PARTS = 4
