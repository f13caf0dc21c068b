"""Typed access to the fields of a JSON object or of GGUF metadata."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localgen.backends.errors import LoadFailed


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """An object of a file, checked as it is read.

    prefix: path of the object within the file, for example `rope_scaling.`. A null field counts as
    missing. A missing field gives the default. Every reader raises LoadFailed, naming the file and
    the field, if the value is invalid, or missing with None as the default.
    """

    path: Path
    values: dict[str, Any]
    prefix: str = ""

    @classmethod
    def from_file(cls, path: Path) -> ConfigFields:
        """Read a JSON file. Raises LoadFailed if it is missing or not a JSON object."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise LoadFailed(f"{path.parent} has no {path.name}") from None
        except OSError as error:
            raise LoadFailed(f"{path} cannot be read: {error}") from None
        return cls.parse(content, path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> ConfigFields:
        """Parse the JSON of a file or of a part of it. Raises LoadFailed if it is no object."""
        try:
            values = json.loads(content.decode("utf-8"))
        except RecursionError:
            raise LoadFailed(f"{path} cannot be read: its JSON is nested too deeply") from None
        except ValueError as error:
            raise LoadFailed(f"{path} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise LoadFailed(f"{path} holds no JSON object")
        return cls(path, values)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def invalid_value(self, key: str, expected: str) -> LoadFailed:
        """An error to raise: `key` has another value than expected."""
        text = json.dumps(self.values.get(key))
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        return LoadFailed(f"{self.path}: {self.prefix}{key} is {shown}, not {expected}")

    def load_error(self, reason: str) -> LoadFailed:
        """An error to raise about the whole object, naming the file."""
        return LoadFailed(f"{self.path}: {reason}")

    def section(self, key: str) -> ConfigFields | None:
        """The object under `key`, or None if it is missing."""
        if key not in self:
            return None
        if not isinstance(self.values[key], dict):
            raise self.invalid_value(key, "an object")
        return ConfigFields(self.path, self.values[key], f"{self.prefix}{key}.")

    def positive_int(
        self, key: str, default: int | None = None, *, max_value: int = 2**31 - 1
    ) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= max_value:
            limit = "" if max_value == 2**31 - 1 else f" up to {max_value:,}"
            raise self.invalid_value(key, f"a positive integer{limit}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not _is_number(value) or value <= 0:
            raise self.invalid_value(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.invalid_value(key, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.invalid_value(key, "a string")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.invalid_value(key, "a list of strings")
        return tuple(value)

    def sizes(self, key: str) -> tuple[int, ...]:
        """A list of integers of at least 0."""
        value = self._value(key, None)
        if not isinstance(value, list) or not all(_is_size(item) for item in value):
            raise self.invalid_value(key, "a list of sizes")
        return tuple(value)

    def positive_floats(self, key: str, length: int) -> tuple[float, ...]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(_is_number(x) and x > 0 for x in value):
            raise self.invalid_value(key, "a list of positive numbers")
        if len(value) != length:
            raise self.load_error(
                f"{self.prefix}{key} has {len(value)} values, {length} are needed"
            )
        return tuple(float(item) for item in value)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise LoadFailed(f"{self.path} has no {self.prefix}{key}")
        return default


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    # isfinite raises for integers too large for a float
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)
