"""Files of LoRA adapters, read and checked for one model."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from localgen.backends.adapters import MAX_LOADED_ADAPTERS, Adapter, AdapterRef
from localgen.backends.errors import LoadFailed, ModelNotFound, OutOfMemory
from localgen.backends.formats.gguf.lora import BaseModel, check_lora_file, write_lora_file
from localgen.backends.formats.hf.peft import PEFT_CONFIG, PEFT_WEIGHTS, read_peft_adapter
from localgen.backends.formats.model_files import shards_of
from localgen.backends.memory.system import RESERVED_BYTES, available_memory_bytes
from localgen.backends.units import format_size

# files that are kept open, so that each is read once; converted ones take space on a disk
_MAX_OPEN, _MAX_CONVERTED = 32, MAX_LOADED_ADAPTERS
_Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """An open GGUF file. is_converted: it has no name, and is gone once nobody has it open."""

    file: BinaryIO
    version: _Version
    is_converted: bool = False

    def descriptor(self) -> int:
        """A new descriptor at its beginning. Raises LoadFailed if it was written to meanwhile."""
        if _version_of(os.fstat(self.file.fileno())) != self.version:
            raise LoadFailed(f"{self.file.name} changes: try again when it is complete")
        descriptor = os.dup(self.file.fileno())
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor


def check_adapter(ref: AdapterRef, model_path: Path | None) -> None:
    """Read an adapter as a request would.

    model_path: of its model; None if that is not here, so that the adapter's files alone are
    checked. Raises ModelNotFound, LoadFailed or OutOfMemory.
    """
    if model_path is not None:
        AdapterFiles(model_path).read(ref)
        return
    _file_version(ref)
    path = Path(ref.path)
    if path.is_dir():
        read_peft_adapter(path)
    else:
        check_lora_file(path, _shown(ref), None)


class AdapterFiles:
    """Reads adapters of the model in a GGUF file. Thread-safe."""

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._base: BaseModel | None = None
        self._found: OrderedDict[str, tuple[_Version, Adapter]] = OrderedDict()  # by path
        self._lock = threading.Lock()

    def read(self, ref: AdapterRef) -> Adapter:
        """The adapter of a request; see ReadAdapter."""
        with self._lock:
            version = _file_version(ref)
            known = self._found.pop(ref.path, None)
            if known is None or known[0] != version:
                known = version, self._open(ref)
            self._found[ref.path] = known  # the latest used is the last one
            self._evict()
        return replace(known[1], name=ref.name, scale=ref.scale)

    def _evict(self) -> None:
        """Forget the least recently used; their files close when no request needs them."""
        paths = list(self._found)
        converted = [path for path in paths if self._found[path][1].content.is_converted]
        for path in {*paths[:-_MAX_OPEN], *converted[:-_MAX_CONVERTED]}:
            del self._found[path]

    def _open(self, ref: AdapterRef) -> Adapter:
        if self._base is None:
            self._base = BaseModel.of_files(shards_of(self._model_path))
        path, shown = Path(ref.path), _shown(ref)
        try:
            if not path.is_dir():
                return self._open_gguf(ref, path, shown)
            return self._open_peft(ref, path, shown, self._base)
        except OSError as error:
            raise LoadFailed(f"cannot read {shown}: {error.strerror or error}") from error

    def _open_peft(self, ref: AdapterRef, path: Path, shown: str, base: BaseModel) -> Adapter:
        _require_room(shown, (path / PEFT_WEIGHTS).stat().st_size)
        pairs = read_peft_adapter(path)
        try:
            with tempfile.TemporaryDirectory(prefix="localgen-") as folder:
                converted = Path(folder) / "adapter.gguf"
                write_lora_file(converted, shown, pairs, base)
                return self._open_gguf(ref, converted, shown, is_converted=True)
        except OSError as error:
            raise LoadFailed(
                f"cannot convert {shown}: {error.strerror or error}: make room for temporary "
                "files, or set TMPDIR to a folder that has it"
            ) from error

    def _open_gguf(
        self, ref: AdapterRef, path: Path, shown: str, *, is_converted: bool = False
    ) -> Adapter:
        assert self._base is not None
        file = path.open("rb")
        content = AdapterContent(file, _version_of(os.fstat(file.fileno())), is_converted)
        num_bytes = os.fstat(file.fileno()).st_size
        _require_room(shown, num_bytes)
        check_lora_file(path, shown, self._base)
        key = hashlib.file_digest(file, "sha256").hexdigest()
        return Adapter(key, ref.scale, ref.name, num_bytes, content)


def _shown(ref: AdapterRef) -> str:
    return f"adapter {ref.name} ({ref.path})"


def _require_room(shown: str, num_bytes: int) -> None:
    free = available_memory_bytes() - RESERVED_BYTES
    if num_bytes > free:
        raise OutOfMemory(f"{shown} takes {format_size(num_bytes)}, {format_size(free)} are free")


def _file_version(ref: AdapterRef) -> _Version:
    """Differs after a change. Raises ModelNotFound if a file is missing."""
    path = Path(ref.path)
    try:
        if not path.is_dir():
            return _version_of(path.stat())
        if not (path / PEFT_CONFIG).exists():
            raise ModelNotFound(
                f"adapter {ref.name}: the folder {path} has no {PEFT_CONFIG}: give the folder that "
                "PEFT has written, or a GGUF file",
                param="model",
            )
        stats = [(path / name).stat() for name in (PEFT_CONFIG, PEFT_WEIGHTS)]
        return tuple(value for stat in stats for value in _version_of(stat))
    except OSError as error:
        raise ModelNotFound(
            f"adapter {ref.name}: cannot read {error.filename}: {error.strerror}", param="model"
        ) from None


def _version_of(stat: os.stat_result) -> _Version:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
