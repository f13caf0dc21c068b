"""The llama.cpp library: started once in a process; its log, its types, its limits."""

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
    "bf16": 30,  # not named by the binding
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
# how llama.cpp speaks of a file that was cut short or is another kind of file
_DAMAGED_FILE_SIGNS = ("gguf_init_from", "corrupted or incomplete")


class BufferSizes:
    """Bytes by kind, to a hundredth of a MiB, on all devices together."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def parse_line(self, line: str) -> None:
        """A line of the log, of whatever it tells."""
        match = _LINE.search(line)
        if match:
            self._bytes[match[1]] += round(float(match[2]) * _MIB)

    def usage(self) -> MemoryUsage:
        """What has been allocated for a model and its context."""
        return MemoryUsage(
            weights=self._bytes["model"],
            kv=self._bytes["KV"] + self._bytes["RS"],
            work=self._bytes["compute"] + self._bytes["output"],
        )


class LlamaLog:
    """What llama.cpp prints: its first error and first warning, to explain a failure, and the
    sizes of the buffers that it allocates."""

    def __init__(self) -> None:
        self.buffers = BufferSizes()
        self._first_lines: dict[int, str] = {}
        self._level = 0
        self._callback = C.llama_log_callback(self._on_log)  # kept: C holds a bare pointer
        C.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _on_log(self, level: int, text: bytes, _user: Any) -> None:
        self._level = self._level if level == _LOG_CONT else level
        line = text.decode("utf-8", "replace").strip()
        if line and self._level in (_LOG_WARN, _LOG_ERROR):
            self._first_lines.setdefault(self._level, line)
        else:
            self.buffers.parse_line(line)

    def reason(self) -> str:
        """The first error since `clear`, which is usually the cause of the others, in one line."""
        line = self._first_lines.get(_LOG_ERROR) or self._first_lines.get(_LOG_WARN)
        # it may quote the file, and must not steer a terminal
        shown = "".join(c if c.isprintable() else "\ufffd" for c in line or "")
        if any(sign in shown for sign in _DAMAGED_FILE_SIGNS):
            return f"{shown}: it is no whole GGUF file, fetch it again"
        return shown or "llama.cpp gave no reason"

    def has_warning_about(self, word: str) -> bool:
        """Whether the first warning since `clear` was about that."""
        return word in self._first_lines.get(_LOG_WARN, "")

    def clear(self) -> None:
        """Forget what was said before."""
        self._first_lines.clear()


@functools.cache
def llama_library() -> LlamaLog:
    """Start llama.cpp, once in a process."""
    # an abort would call a debugger for a backtrace, and keep everybody waiting for seconds
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    log = LlamaLog()
    C.llama_backend_init()
    return log


def supports_gpu() -> bool:
    """Whether llama.cpp was built with a GPU backend and finds a device for it."""
    llama_library()
    return bool(C.llama_supports_gpu_offload())
