"""The child process in which llama.cpp quantizes one file.

It sends events to its parent: a ProgressEvent per tensor, and a FailedEvent if it fails.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
from gguf import GGMLQuantizationType

from localgen.backends.errors import LoadFailed, LocalgenError
from localgen.backends.messages import FrameSocket, inherited_socket
from localgen.quant.gguf.imatrix import read_imatrix
from localgen.quant.request.events import FailedEvent, ProgressEvent
from localgen.quant.request.request import EVENT_CODEC

_LOG_ERROR, _LOG_CONT = 4, 5
_TENSOR = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
_FAILED = re.compile(r"failed to quantize: (.*)")
# rows of one tensor that are in memory at once
_BUFFER_BYTES = 1 << 29


def main(
    source: str, target: str, file_type: str, threads: str, imatrix: str, types: str, fd: str
) -> int:
    """Return the exit status. file_type: llama.cpp's number of it. imatrix: may be empty. types:
    JSON object of type names by tensor name, for tensors that do not follow the file type."""
    parent = inherited_socket(int(fd))
    log = _LlamaCppLog(parent)
    try:
        means = read_imatrix(Path(imatrix)) if imatrix else {}
    except LocalgenError as error:
        _send(parent, FailedEvent(error.message, error.code))
        return 1
    params = C.llama_model_quantize_default_params()
    params.nthread = int(threads)
    params.ftype = int(file_type)
    params.max_buf_size = _BUFFER_BYTES
    entries = (C.llama_model_imatrix_data * (len(means) + 1))()  # an empty entry ends the list
    for entry, (name, values) in zip(entries, means.items(), strict=False):
        entry.name = name.encode()
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = values.size
    if means:
        params.imatrix = entries
    overrides = _type_overrides(json.loads(types))
    if len(overrides) > 1:
        params.tt_overrides = overrides
    status = C.llama_model_quantize(source.encode(), target.encode(), params)
    if status:
        _send(parent, FailedEvent(log.reason, LoadFailed.code))
    return int(status != 0)


def _type_overrides(types: dict[str, str]) -> ctypes.Array[C.llama_model_tensor_override]:
    """An empty entry ends the list."""
    overrides = (C.llama_model_tensor_override * (len(types) + 1))()
    for entry, (name, type_name) in zip(overrides, types.items(), strict=False):
        entry.pattern = f"^{re.escape(name)}$".encode()
        entry.type = int(GGMLQuantizationType[type_name])
    return overrides


def _send(parent: FrameSocket, event: ProgressEvent | FailedEvent) -> None:
    """Exits if the parent is gone."""
    try:
        parent.send(EVENT_CODEC.encode(event))
    except OSError:
        os._exit(1)


class _LlamaCppLog:
    """Receives llama.cpp's log: forwards progress and keeps the last error."""

    def __init__(self, parent: FrameSocket) -> None:
        self._parent = parent
        self.reason = "it gave no reason"
        self._level = 0
        self._callback = C.llama_log_callback(self._on_log_line)  # kept: C holds a bare pointer
        C.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _on_log_line(self, level: int, text: bytes, _user: Any) -> None:
        self._level = self._level if level == _LOG_CONT else level
        line = text.decode("utf-8", "replace").strip()
        if match := _TENSOR.match(line):
            event = ProgressEvent("rounding", int(match[1]), int(match[2]), "tensors")
            _send(self._parent, event)
        elif line and self._level == _LOG_ERROR:
            failed = _FAILED.search(line)
            self.reason = failed[1] if failed else line


if __name__ == "__main__":
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    sys.exit(main(*sys.argv[1:]))
