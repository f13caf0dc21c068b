"""The compute devices of this llama.cpp build and their memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from llama_cpp._ggml import libggml

from localgen.backends.llamacpp.library import llama_library

_KINDS = {0: "cpu", 1: "gpu", 2: "gpu", 3: "accelerator"}


@dataclass(frozen=True, slots=True)
class GgmlDevice:
    """kind: cpu, gpu, accelerator or other. free_bytes, total_bytes: its memory, as reported."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int


def list_devices() -> list[GgmlDevice]:
    """Return all devices in ggml's order."""
    llama_library()
    ggml = _with_signatures(libggml)
    return [
        _device(ggml, ggml.ggml_backend_dev_get(i)) for i in range(ggml.ggml_backend_dev_count())
    ]


def gpu_free_bytes() -> int | None:
    """Free memory of all GPUs together. Returns None if there is no GPU."""
    gpus = [device for device in list_devices() if device.kind == "gpu"]
    return sum(device.free_bytes for device in gpus) if gpus else None


def _device(ggml: ctypes.CDLL, handle: int) -> GgmlDevice:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    name = ggml.ggml_backend_dev_name(handle).decode("utf-8", "replace")
    description = ggml.ggml_backend_dev_description(handle).decode("utf-8", "replace")
    kind = _KINDS.get(ggml.ggml_backend_dev_type(handle), "other")
    return GgmlDevice(name, description, kind, free.value, total.value)


def _with_signatures(ggml: ctypes.CDLL) -> ctypes.CDLL:
    """Set the ctypes signatures that llama-cpp-python does not declare."""
    size = ctypes.POINTER(ctypes.c_size_t)
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    ggml.ggml_backend_dev_name.restype = ctypes.c_char_p
    ggml.ggml_backend_dev_name.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_dev_description.restype = ctypes.c_char_p
    ggml.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_dev_type.restype = ctypes.c_int
    ggml.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_dev_memory.restype = None
    ggml.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size, size]
    return ggml
