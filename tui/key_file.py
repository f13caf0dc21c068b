"""The user's own key bindings, from `keys.toml` in the configuration folder.

A table for each app gives keys to actions by their name, such as

    [tui]
    new = "alt+n"
    search = ["alt+s", "alt+f"]
"""

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from textual.binding import Binding, BindingType
from textual.keys import Keys, _character_to_key

from localgen.config import config_dir

_TABLES = ("tui", "top")
_MODIFIERS = ("ctrl", "shift", "alt", "super", "hyper", "meta")
_KEYS = frozenset(
    (*(key.value.rpartition("+")[2] for key in Keys), *map(_character_to_key, string.printable))
)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """keys: of an action, comma separated. problem: what is wrong with the file, for the user."""

    keys: dict[str, str] = field(default_factory=dict)
    problem: str = ""


def key_file_path() -> Path:
    return config_dir() / "keys.toml"


def with_names(*bindings: Binding) -> list[BindingType]:
    """Bindings whose keys can be changed under the name of their action."""
    return [replace(each, id=each.id or _action_name(each.action)) for each in bindings]


def _action_name(action: str) -> str:
    return re.sub(r"\(.*|^\w+\.", "", action)


def names_of(*owners: Iterable[BindingType]) -> set[str]:
    """The names in lists of bindings."""
    every = [each for bindings in owners for each in bindings if isinstance(each, Binding)]
    return {each.id for each in every if each.id is not None}


def read_key_file(
    table: str, actions: Collection[str], unavailable: Collection[str] = ()
) -> KeyFile:
    """Read the keys of one app. actions: their names. What is wrong is left out.

    unavailable: keys that would never reach an action, as the prompt edits with them.
    """
    path = key_file_path()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return KeyFile()
    except (OSError, ValueError) as error:
        return KeyFile({}, f"{path}: {error}: correct it or remove it")
    keys = {}
    problems = [f"no table [{name}]" for name in content if name not in _TABLES]
    for name, value in _table(content, table).items():
        listed = [value] if isinstance(value, str) else value
        if name not in actions:
            problems.append(f"no action {name}; there are {', '.join(sorted(actions))}")
        elif not isinstance(listed, list) or not all(isinstance(key, str) for key in listed):
            problems.append(f'{name}: give a key such as "ctrl+e", or a list of keys')
        elif unknown := [key for key in listed if not _is_key(key)]:
            problems.append(f"{name}: there is no key {unknown[0]}")
        elif taken := [key for key in listed if key in unavailable]:
            problems.append(f"{name}: {taken[0]} edits the prompt, give another key")
        else:
            keys[name] = ",".join(listed)
    problem = f"{path}: [{table}] {'; '.join(problems)}" if problems else ""
    return KeyFile(keys, problem)


def _is_key(key: str) -> bool:
    *modifiers, last = key.split("+")
    return last in _KEYS and all(each in _MODIFIERS for each in modifiers)


def _table(content: dict[str, object], table: str) -> dict[str, object]:
    found = content.get(table, {})
    return found if isinstance(found, dict) else {}
