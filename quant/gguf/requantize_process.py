"""The process that has llama.cpp quantize one file: it reports in lines of JSON.

`{"done": 3, "total": 56}` for each tensor begun, and `{"error": "…"}` before it fails.
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

from localgen.backends.errors import LocalgenError
from localgen.quant.gguf.imatrix import read_imatrix

_LOG_ERROR, _LOG_CONT = 4, 5
_TENSOR = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
_FAILED = re.compile(r"failed to quantize: (.*)")
# rows of one tensor that are in memory at once
_BUFFER_BYTES = 1 << 29


def main(job: dict[str, Any]) -> int:
    """0: the target is written. job: source, target, file_type, imatrix, threads."""
    log = _LlamaCppLog()
    try:
        means = read_imatrix(Path(job["imatrix"])) if job["imatrix"] else {}
    except LocalgenError as error:
        write_message({"error": error.message})
        return 1
    params = C.llama_model_quantize_default_params()
    params.nthread = job["threads"]
    params.ftype = job["file_type"]
    params.max_buf_size = _BUFFER_BYTES
    entries = (C.llama_model_imatrix_data * (len(means) + 1))()  # the last one ends the list
    for entry, (name, values) in zip(entries, means.items(), strict=False):
        entry.name = name.encode()
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = values.size
    if means:
        params.imatrix = entries
    status = C.llama_model_quantize(job["source"].encode(), job["target"].encode(), params)
    if status:
        write_message({"error": log.reason})
    return int(status != 0)


def write_message(values: dict[str, Any]) -> None:
    """One line to whoever started this; without them there is nothing to do."""
    try:
        print(json.dumps(values), flush=True)
    except OSError:
        os._exit(1)


class _LlamaCppLog:
    """What llama.cpp prints: progress passed on, its last error kept."""

    def __init__(self) -> None:
        self.reason = "it gave no reason"
        self._level = 0
        self._callback = C.llama_log_callback(self._on_log_line)  # kept: C holds a bare pointer
        C.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _on_log_line(self, level: int, text: bytes, _user: Any) -> None:
        self._level = self._level if level == _LOG_CONT else level
        line = text.decode("utf-8", "replace").strip()
        if begun := _TENSOR.match(line):
            write_message({"done": int(begun[1]), "total": int(begun[2])})
        elif line and self._level == _LOG_ERROR:
            failed = _FAILED.search(line)
            self.reason = failed[1] if failed else line


if __name__ == "__main__":
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    sys.exit(main(json.loads(sys.argv[1])))
