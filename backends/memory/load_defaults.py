"""Default load options of the runners that determine memory usage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDefaults:
    """Defaults of one runner.

    parallel: maximum number of running sequences.
    num_cached_prefixes: additional sequence ids for cached prefixes.
    cache_type: data type of cached keys and values.
    weight_element_bytes: bytes per element of dequantized weights, or None if weights stay
    quantized.
    """

    parallel: int
    max_batch_tokens: int
    num_cached_prefixes: int = 0
    cache_type: str
    weight_element_bytes: int | None = None


# 512 is llama.cpp's own n_ubatch: larger steps are not faster, and a step cannot be cancelled
LLAMACPP_DEFAULTS = LoadDefaults(
    parallel=32, max_batch_tokens=512, num_cached_prefixes=32, cache_type="f16"
)
CUDA_DEFAULTS = LoadDefaults(
    parallel=256, max_batch_tokens=8192, cache_type="bf16", weight_element_bytes=2
)
# a CPU has about 1/100 of a GPU's throughput
CUDA_ON_CPU_DEFAULTS = LoadDefaults(
    parallel=32, max_batch_tokens=512, cache_type="f32", weight_element_bytes=4
)
# default number of parts of llama.cpp's split KV cache, each of one context length
DEFAULT_SPLIT_PARTS = 4

# defaults of LoadOptions.kv_ram and kv_disk; less on a machine or under a limit that is small
DEFAULT_KV_RAM_BYTES, DEFAULT_KV_DISK_BYTES = 1 << 30, 4 << 30
KV_RAM_SHARE = 1 / 16


def default_kv_ram_bytes(memory_bytes: int) -> int:
    """Default of LoadOptions.kv_ram. memory_bytes: of the machine, or the limit of the model."""
    return min(DEFAULT_KV_RAM_BYTES, int(memory_bytes * KV_RAM_SHARE))
