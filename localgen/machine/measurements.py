"""Cache of what was measured on this machine, one JSON file for all measurements."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import platformdirs
import psutil

from localgen.backends.memory.system import num_physical_cores
from localgen.backends.typed_data import convert
from localgen.locked_file import LockedFile

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement(Generic[T]):
    """A measured value. source: its origin, for users."""

    value: T
    source: str


def measurements_path() -> Path:
    """Path of the file with measurements."""
    return platformdirs.user_cache_path("localgen", appauthor=False) / "measurements.json"


def cached_measurement(name: str, kind: type[T]) -> Measurement[T] | None:
    """Return the cached value, or None if there is none of this type."""
    try:
        value = convert(_read().get(_key(name)), kind)
    except msgspec.ValidationError:
        return None
    return Measurement(value, "measured before") if value else None


def cached_or_measured(
    name: str, kind: type[T], measure: Callable[[], T], *, remeasure: bool
) -> Measurement[T]:
    """Return the cached value, or measure it. remeasure: ignore the cache.

    name: of the measurement, with its revision. An empty value is not cached.
    """
    cached = None if remeasure else cached_measurement(name, kind)
    if cached is not None:
        return cached
    if is_machine_busy():
        # other programs take their share: usable now, but not cached
        return Measurement(measure(), "measured now, while the machine is busy")
    value = measure()
    if value:
        _store(_key(name), value)
    return Measurement(value, "measured now")


def is_machine_busy() -> bool:
    """True if other programs compute: what is measured now would be too slow."""
    return psutil.getloadavg()[0] > num_physical_cores() / 2


def _key(name: str) -> str:
    """Name and machine: several machines may share a home folder."""
    from localgen.machine.system_info import cpu_name

    total_gb = round(psutil.virtual_memory().total / 1e9)
    machine = f"{platform.node()}, {cpu_name()}, {num_physical_cores()} cores, {total_gb} GB"
    return f"{name}: {machine}"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(measurements_path().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _store(key: str, value: object) -> None:
    file = LockedFile(measurements_path())
    with contextlib.suppress(OSError):  # not cached: measured again next time
        file.path.parent.mkdir(parents=True, exist_ok=True)
        with file.locked():
            file.write(json.dumps(_read() | {key: value}, indent=1))
