"""The llama.cpp library: initialization, its log, the names of its types, and its limits."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections import Counter
from typing import Any

import llama_cpp.llama_cpp as C

from localgen.backends.model_info import MemoryUsage

_LINE = re.compile(r"(model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB")
_MIB = 1 << 20
CACHE_TYPES = {
    "f32": C.GGML_TYPE_F32,
    "f16": C.GGML_TYPE_F16,
    "bf16": 30,  # llama-cpp-python has no constant for it
    "q8_0": C.GGML_TYPE_Q8_0,
    "q5_1": C.GGML_TYPE_Q5_1,
    "q5_0": C.GGML_TYPE_Q5_0,
    "q4_1": C.GGML_TYPE_Q4_1,
    "q4_0": C.GGML_TYPE_Q4_0,
    "iq4_nl": C.GGML_TYPE_IQ4_NL,
}
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
MAX_SEQUENCES = 256
_LOG_WARN, _LOG_ERROR, _LOG_CONT = 3, 4, 5
# llama.cpp's messages for a truncated file or one that is not GGUF
_DAMAGED_FILE_SIGNS = ("gguf_init_from", "corrupted or incomplete", "exceeds remaining file size")


class BufferSizes:
    """Buffer sizes in bytes by kind, parsed from llama.cpp's log and summed over all devices.

    The log prints MiB with two decimals.
    """

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def parse_line(self, line: str) -> None:
        """Add the buffer size that a log line reports, if any."""
        match = _LINE.search(line)
        if match:
            self._bytes[match[1]] += round(float(match[2]) * _MIB)

    def usage(self) -> MemoryUsage:
        """Memory allocated for a model and its contexts."""
        return MemoryUsage(
            weights=self._bytes["model"],
            kv=self._bytes["KV"] + self._bytes["RS"],
            work=self._bytes["compute"] + self._bytes["output"],
        )


class LlamaLog:
    """Captures llama.cpp's log: its first error and warning, and the sizes of its buffers."""

    def __init__(self) -> None:
        self.buffers = BufferSizes()
        self._first_lines: dict[int, str] = {}
        self._level = 0
        self._callback = C.llama_log_callback(
            self._on_log
        )  # keep a reference: C holds only the pointer
        C.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _on_log(self, level: int, text: bytes, _user: Any) -> None:
        self._level = self._level if level == _LOG_CONT else level
        line = text.decode("utf-8", "replace").strip()
        if line and self._level in (_LOG_WARN, _LOG_ERROR):
            self._first_lines.setdefault(self._level, line)
        else:
            self.buffers.parse_line(line)

    def reason(self) -> str:
        """The first error since `clear` as one line, else the first warning.

        The first error is usually the cause of the others.
        """
        line = self._first_lines.get(_LOG_ERROR) or self._first_lines.get(_LOG_WARN)
        # the line may quote the file: strip control characters that could affect a terminal
        shown = "".join(c if c.isprintable() else "\ufffd" for c in line or "")
        if any(sign in shown for sign in _DAMAGED_FILE_SIGNS):
            return f"{shown}: the file is incomplete or not GGUF, download it again"
        return shown or "llama.cpp gave no reason"

    def has_warning_about(self, word: str) -> bool:
        """Return True if the first warning since `clear` contains the word."""
        return word in self._first_lines.get(_LOG_WARN, "")

    def clear(self) -> None:
        """Drop the recorded error and warning."""
        self._first_lines.clear()


@functools.cache
def llama_library() -> LlamaLog:
    """Initialize llama.cpp once per process and return its log."""
    # on an abort ggml would run a debugger for a backtrace, which takes seconds
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    log = LlamaLog()
    C.llama_backend_init()
    return log


def supports_gpu() -> bool:
    """Return True if llama.cpp was built with a GPU backend and finds a device for it."""
    llama_library()
    return bool(C.llama_supports_gpu_offload())
