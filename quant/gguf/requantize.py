"""GGUF files of every type: written from a checkpoint, and requantized by llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from localgen.backends.errors import InvalidRequest, LoadFailed, ModelNotFound
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.safetensors import NumpyCheckpoint
from localgen.quant.gguf.convert import convert_to_gguf
from localgen.quant.gguf.imatrix import ImatrixSource, write_imatrix
from localgen.quant.request.gguf_types import DIRECT_TYPES, GGUF_TYPES, resolve_gguf_type

GgufStep = Literal["converting", "quantizing"]
# called with a step, how much of it is done, and of how much: bytes, then tensors
GgufProgress = Callable[[GgufStep, int, int], None]
# llama.cpp gives embedding, head and some layers more bits than the others
_EXTRA_BITS = 1.0


def make_gguf(
    source: Path,
    target: Path,
    file_type: str,
    *,
    override_folder: Path | None = None,
    imatrix: ImatrixSource | Path | None = None,
    dataset_name: str = "",
    progress: GgufProgress | None = None,
) -> None:
    """Write the model folder `source` as the GGUF file `target`, of any type.

    file_type: as in gguf_types, in any case. override_folder: a folder whose safetensors files have
    tensors to take in place of the model's own, by the same names. imatrix: of its linears, or
    an importance matrix's file as llama.cpp makes them; without effect on F32, F16, BF16 and
    Q8_0. dataset_name: what calibrated it.

    Beside `target` a folder `.NAME.work` holds a file of 16 bits meanwhile, and what a run that
    was killed has left. `target` appears only when it is complete.

    ModelNotFound and LoadFailed as of `convert`, and where llama.cpp fails. InvalidRequest: no
    such type, or one that needs an importance matrix.
    """
    name = resolve_gguf_type(file_type)
    if GGUF_TYPES[name].needs_imatrix and imatrix is None:
        raise InvalidRequest(
            f"{name} is garbage without an importance matrix: calibrate one, or use Q2_K, IQ3_S "
            "or more bits",
            param="type",
        )
    if not source.is_dir():
        raise ModelNotFound(f"{source} is no folder")
    report = progress or (lambda step, done, total: None)

    def converted(done: int, total: int) -> None:
        report("converting", done, total)

    if name in DIRECT_TYPES:
        convert_to_gguf(source, target, name, override_folder=override_folder, progress=converted)
        return
    spec = read_hf_config(source)
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
            write_imatrix(matrix, spec, imatrix, dataset_name)
        half = "BF16" if NumpyCheckpoint(source, override_folder).dtypes() == {"BF16"} else "F16"
        convert_to_gguf(source, wide, half, override_folder=override_folder, progress=converted)
        result = work / "result.gguf"
        requantize(wide, result, name, matrix, lambda *done: report("quantizing", *done))
        _publish(result, target)


def requantize(
    source: Path,
    target: Path,
    file_type: str,
    imatrix: Path | None,
    progress: Callable[[int, int], None],
) -> None:
    """Make one GGUF file of another by llama.cpp, in a process of its own: it may abort.

    progress: tensors done and in all. LoadFailed with llama.cpp's reason.
    """
    job = {
        "source": str(source),
        "target": str(target),
        "file_type": int(GGUF_TYPES[file_type].file_type),
        "imatrix": None if imatrix is None else str(imatrix),
        "threads": _threads(),
    }
    command = [sys.executable, "-m", "localgen.quant.gguf.requantize_process", json.dumps(job)]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert child.stdout is not None
            reason = _read_progress(child.stdout, progress)
            status = child.wait()
        finally:
            child.kill()
            child.wait()
        if status:
            raise LoadFailed(
                f"llama.cpp cannot make {file_type} of it: {reason or _last_line(errors)}"
            )


def _read_progress(output: IO[str], progress: Callable[[int, int], None]) -> str:
    """Report what the process says until it ends; the reason if it fails."""
    reason = ""
    for line in output:
        said = json.loads(line)
        reason = said.get("error", reason)
        if "done" in said:
            progress(said["done"], said["total"])
    return reason


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode("utf-8", "replace").split("\n")
    shown = [line.strip() for line in lines if line.strip()]
    return shown[-1] if shown else "it ended without a word"


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
    """About how large a file of the type is."""
    bits = GGUF_TYPES[file_type].bits_per_weight
    return int(spec.num_params * (bits if file_type in DIRECT_TYPES else bits + _EXTRA_BITS) / 8)


def _check_disk_space(target: Path, spec: ModelSpec, name: str) -> None:
    needed = estimate_gguf_bytes(spec, "F16") + estimate_gguf_bytes(spec, name)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise LoadFailed(
            f"{target} takes {needed / 1e9:.1f} GB while it is made, its disk has "
            f"{free / 1e9:.1f} GB free: make room or write elsewhere"
        )
