"""The values of a config.json, each checked as it is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localgen.backends.errors import LoadFailed


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """A JSON object of a file. Every reader raises LoadFailed naming the file and the field.

    prefix: where in the file the object lies, as in `rope_scaling.`. A field that is null counts
    as missing; a missing one gives the default, or is an error where the default is None.
    """

    path: Path
    values: dict[str, Any]
    prefix: str = ""

    @classmethod
    def from_file(cls, path: Path) -> ConfigFields:
        """The object a JSON file holds. LoadFailed: no such file, or no JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise LoadFailed(f"{path.parent} has no {path.name}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise LoadFailed(f"{path} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise LoadFailed(f"{path} holds no JSON object")
        return cls(path, values)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def invalid_value(self, key: str, expected: str) -> LoadFailed:
        """The error that `key` holds something other than `expected`."""
        text = json.dumps(self.values.get(key))
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        return LoadFailed(f"{self.path}: {self.prefix}{key} is {shown}, not {expected}")

    def load_error(self, reason: str) -> LoadFailed:
        """The error that this object describes something that cannot be run."""
        return LoadFailed(f"{self.path}: {reason}")

    def section(self, key: str) -> ConfigFields | None:
        """The object under `key`; None where there is none."""
        if key not in self:
            return None
        if not isinstance(self.values[key], dict):
            raise self.invalid_value(key, "an object")
        return ConfigFields(self.path, self.values[key], f"{self.prefix}{key}.")

    def positive_int(
        self, key: str, default: int | None = None, *, max_value: int = 2**31 - 1
    ) -> int:
        """A positive integer, up to `max_value`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= max_value:
            limit = "" if max_value == 2**31 - 1 else f" up to {max_value:,}"
            raise self.invalid_value(key, f"a positive integer{limit}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._value(key, default)
        if not _is_number(value) or value <= 0:
            raise self.invalid_value(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.invalid_value(key, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.invalid_value(key, "a string")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.invalid_value(key, "a list of strings")
        return tuple(value)

    def positive_floats(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
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


def _is_number(value: Any) -> bool:
    # a JSON integer may be too large for a float: isfinite would raise
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)
