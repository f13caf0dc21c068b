"""GGUF files of every type: converted to 16 bits, then requantized by llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from localgen.backends.errors import InvalidRequest, LoadFailed, ModelNotFound
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint
from localgen.backends.messages import FrameSocket, start_process
from localgen.backends.units import format_size
from localgen.machine.python_process import last_line, python_command
from localgen.quant.gguf.convert import convert_to_gguf
from localgen.quant.gguf.imatrix import ImatrixSource, imatrix_keys, write_imatrix
from localgen.quant.gguf.metadata import check_convertible
from localgen.quant.request.events import FailedEvent, OnEvent
from localgen.quant.request.gguf_types import DIRECT_TYPES, GGUF_TYPES, resolve_gguf_type
from localgen.quant.request.request import EVENT_CODEC

# llama.cpp gives embedding, head and some layers more bits than the others
_EXTRA_BITS = 1.0
_NO_TYPES: Mapping[str, str] = MappingProxyType({})


def make_gguf(
    source: Path,
    target: Path,
    file_type: str,
    *,
    types: Mapping[str, str] = _NO_TYPES,
    override_folder: Path | None = None,
    imatrix: ImatrixSource | Path | None = None,
    dataset_name: str = "",
    chunk_tokens: int | None = None,
    extra_keys: Mapping[str, str | int] = MappingProxyType({}),
    on_event: OnEvent = lambda event: None,
) -> None:
    """Write the model folder `source` as the GGUF file `target` of any type, atomically.

    file_type: as in gguf_types, in any case. types: ggml types by tensor name, for tensors that do
    not follow the file type. override_folder: as in convert_to_gguf. imatrix: the importance of the
    linears, or an importance matrix file of llama.cpp; ignored for F32, F16, BF16 and Q8_0 without
    `types`. dataset_name, chunk_tokens: as in write_imatrix. extra_keys: as in convert_to_gguf.

    A folder `.NAME.work` next to `target` has the 16-bit file meanwhile; the next run deletes what
    a killed run left there.

    Raises as convert_to_gguf, LoadFailed if llama.cpp fails, and InvalidRequest if the type is
    unknown or needs an importance matrix.
    """
    name = resolve_gguf_type(file_type)
    if GGUF_TYPES[name].needs_imatrix and imatrix is None:
        raise InvalidRequest(
            f"{name} needs an importance matrix: make one, or use Q2_K, IQ3_S or more bits",
            param="type",
        )
    if not source.is_dir():
        raise ModelNotFound(f"{source} is not a folder")
    if name in DIRECT_TYPES and not types:
        convert_to_gguf(
            source,
            target,
            name,
            override_folder=override_folder,
            extra_keys=extra_keys,
            on_event=on_event,
        )
        return
    spec = read_hf_config(source)
    check_convertible(source / "config.json", spec)
    if name == "MXFP4_MOE" and spec.moe is None:
        raise InvalidRequest(
            "MXFP4_MOE rounds experts, this model has none: use Q4_K_M or Q8_0", param="type"
        )
    with _work_folder(target) as work:
        _check_disk_space(target, spec, name)
        wide, matrix = work / "16bit.gguf", None
        if isinstance(imatrix, Path):
            matrix = imatrix
        elif imatrix is not None:
            matrix = work / "imatrix.gguf"
            write_imatrix(matrix, spec, imatrix, dataset_name, chunk_tokens)
        half = "BF16" if NumpyCheckpoint(source, override_folder).dtypes() == {"BF16"} else "F16"
        convert_to_gguf(
            source,
            wide,
            half,
            override_folder=override_folder,
            extra_keys={**extra_keys, **({} if matrix is None else imatrix_keys(matrix))},
            on_event=on_event,
        )
        result = work / "result.gguf"
        requantize(wide, result, name, matrix, on_event, types)
        _publish(result, target)


def requantize(
    source: Path,
    target: Path,
    file_type: str,
    imatrix: Path | None,
    on_event: OnEvent,
    types: Mapping[str, str] = _NO_TYPES,
) -> None:
    """Requantize a GGUF file by llama.cpp, in a child process because it may abort.

    types: as in make_gguf; the file type must be a quantized one. Raises LoadFailed with
    llama.cpp's reason.
    """
    ftype = int(GGUF_TYPES[file_type].file_type)
    given = json.dumps(dict(types))
    arguments = map(str, (source, target, ftype, _threads(), imatrix or "", given))
    command = python_command("localgen.quant.gguf.requantize_process", *arguments)
    with tempfile.TemporaryFile() as output:
        child, messages = start_process(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output
        )
        try:
            reason = _forward_events(messages, on_event)
            status = child.wait()
        finally:
            child.kill()
            child.wait()
            messages.close()
        if status:
            reason = reason or last_line(output, "it ended without an error message")
            raise LoadFailed(f"llama.cpp cannot make {file_type} of it: {reason}")


def _forward_events(messages: FrameSocket, on_event: OnEvent) -> str:
    """Forward events until the process ends; return its reason if it failed."""
    reason = ""
    for content in messages:
        event = EVENT_CODEC.decode(content)
        if isinstance(event, FailedEvent):
            reason = event.message
        else:
            on_event(event)
    return reason


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    work = target.with_name(f".{target.name}.work")
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        yield work
    except OSError as error:
        raise LoadFailed(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _publish(result: Path, target: Path) -> None:
    with result.open("rb") as file:
        os.fsync(file.fileno())
    result.replace(target)


def estimate_gguf_bytes(spec: ModelSpec, file_type: str) -> int:
    """Estimated size of a file of the type."""
    bits = GGUF_TYPES[file_type].bits_per_weight
    return int(spec.num_params * (bits if file_type in DIRECT_TYPES else bits + _EXTRA_BITS) / 8)


def _check_disk_space(target: Path, spec: ModelSpec, name: str) -> None:
    needed = estimate_gguf_bytes(spec, "F16") + estimate_gguf_bytes(spec, name)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise LoadFailed(
            f"{target} takes {format_size(needed)} while it is made, its disk has "
            f"{format_size(free)} free: make room or write elsewhere"
        )
