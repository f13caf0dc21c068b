"""The work folder of an unfinished quantization: the output path plus `.partial`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.hf.folder import INDEX_FILE
from localgen.backends.units import format_count
from localgen.quant.files.layerwise_checkpoint import stored_tensors
from localgen.quant.files.safetensors_writer import atomic_write

_MANIFEST = "plan.json"
# keys of the manifest whose values say nothing to people; of several differences these are named
# last, in this order
_IN_WORDS = {
    "model bytes": "model",
    "model checksum": "version of the model",
    "calibration": "calibration text, --samples or --seq-len",
}


def require_parent_folder(out: Path) -> None:
    """Raise InvalidRequest unless the folder that an output is written to exists."""
    if not out.absolute().parent.is_dir():
        raise InvalidRequest(f"--out {out}: there is no folder {out.parent}", param="out")


class WorkFolder:
    """num_files: safetensors files of the result, the first one for tensors outside layers."""

    def __init__(self, output: Path, num_files: int) -> None:
        self.out = output
        self.path = output.parent / f"{output.name}.partial"
        self._num_files = num_files

    @contextlib.contextmanager
    def opened(self, manifest: dict[str, Any], *, resume: bool) -> Iterator[None]:
        """Create the folder, or resume a run with the same manifest; other runs wait outside.

        manifest: all that determines the result, a JSON object. A run with another one and without
        a finished layer is replaced. Raises InvalidRequest if the output exists, or an unfinished
        run that may not or cannot be resumed, or is running.
        """
        self.check_startable(resume=resume)
        self.path.mkdir(exist_ok=True)
        with self._locked():
            found = self.read_manifest()
            if found is not None and self.has_finished_layers:
                self.check_same_manifest(manifest)
            elif found != manifest:
                if found is not None:
                    self._clear()
                with atomic_write(self.path / _MANIFEST) as path:
                    path.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Raises InvalidRequest if another process has the folder."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(folder)
            yield
        finally:
            os.close(folder)

    def _lock(self, folder: int) -> None:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequest(
                f"another localgen is writing to {self.path}: wait for it, or give another --out"
            ) from None

    def check_startable(self, *, resume: bool) -> None:
        """Raise InvalidRequest as in `opened`, without comparing manifests."""
        if self.out.exists():
            raise InvalidRequest(f"{self.out} already exists: remove it, or give another --out")
        require_parent_folder(self.out)
        if not (self.path / _MANIFEST).is_file():
            if self.has_finished_layers:
                raise InvalidRequest(
                    f"{self.path} has layers, but no {_MANIFEST} that tells of what: remove it, or "
                    "give another --out"
                )
            return
        with self._locked():  # first: nobody is told to remove what is being written
            if not resume and self.has_finished_layers:
                if not self.num_done_layers:
                    raise InvalidRequest(
                        f"{self.path} has an unfinished run of another model: remove it, or give "
                        "another --out"
                    )
                done = format_count(self.num_done_layers, "layer")
                raise InvalidRequest(
                    f"{self.path} has an unfinished run of {done}: --resume continues it; or "
                    "remove it"
                )

    @property
    def num_bytes(self) -> int:
        """Size of all files in it; 0 if there is none."""
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    @property
    def num_done_layers(self) -> int:
        """Number of finished layers, counted from the first."""
        layers = self._num_files - 1
        return next((i for i in range(layers) if not self.layer_file(i).is_file()), layers)

    @property
    def has_finished_layers(self) -> bool:
        """True if any layer is finished, also of a model with another number of layers."""
        files = self.path.glob("model-*-of-*.safetensors")
        return any(not path.name.startswith("model-00001-") for path in files)

    def layer_file(self, index: int) -> Path:
        return self._file(index + 2)

    def importance_file(self, index: int) -> Path:
        return self.path / f"importance-{index:05d}.bin"

    def remove(self) -> None:
        """The manifest goes last: a later run takes nothing of this one for its own."""
        self._clear()
        shutil.rmtree(self.path)

    def _clear(self) -> None:
        """Remove all but the manifest."""
        for path in self.path.iterdir():
            if path.name != _MANIFEST:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @property
    def non_layer_file(self) -> Path:
        """File of the tensors outside layers."""
        return self._file(1)

    def publish(self) -> None:
        """Write the index and rename the folder to the output path."""
        weight_map, size = {}, 0
        for number in range(1, self._num_files + 1):
            path = self._file(number)
            for name, stored in stored_tensors(path).items():
                weight_map[name] = path.name
                size += stored.num_bytes
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        with atomic_write(self.path / INDEX_FILE) as path:
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for left in (*self.path.glob("*states-*.bin"), *self.path.glob(".*.unfinished")):
            left.unlink()
        self.path.rename(self.out)
        (self.out / _MANIFEST).unlink()  # last: without it, nobody knows what layers are of

    def _file(self, number: int) -> Path:
        return self.path / f"model-{number:05d}-of-{self._num_files:05d}.safetensors"

    def read_manifest(self) -> dict[str, Any] | None:
        """Manifest of the unfinished run, empty if it cannot be read; None if there is no run."""
        try:
            found = json.loads((self.path / _MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def check_same_manifest(self, manifest: dict[str, Any]) -> None:
        """Raise InvalidRequest if the unfinished run was started with another manifest."""
        before, now = _flatten(self.read_manifest() or {}), _flatten(manifest)
        other = sorted(key for key in before | now if before.get(key) != now.get(key))
        if other:
            named = list(_IN_WORDS)
            key = min(other, key=lambda key: named.index(key) if key in named else -1)
            difference = _IN_WORDS.get(key) or f"{key} ({before.get(key)}, now {now.get(key)})"
            raise InvalidRequest(
                f"{self.path} was started with another {difference}: use the same, remove it, or "
                "give another --out"
            )


def _flatten(values: dict[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        inside = isinstance(value, dict)
        found |= _flatten(value, f"{at}{key} ") if inside else {f"{at}{key}": value}
    return found
