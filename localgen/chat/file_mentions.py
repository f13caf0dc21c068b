"""Files mentioned in a prompt as `@path` or `@path:10-40`: their text is sent below the prompt."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from pathlib import Path

from localgen.backends import units
from localgen.backends.errors import InvalidRequest
from localgen.chat.fences import fenced

MAX_FILE_CHARS = 1_000_000
_MAX_FILES = 20_000  # of a folder are offered
_LIST_TIMEOUT_S = 5.0
_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_RANGE = re.compile(r"(.+):(\d+)(?:-(\d+))?")
_TYPED = re.compile(r'(?<!\S)@(?:"([^"\n]*)|([^\s"]*))$')
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__"})


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt with the text of its files. notices: which were attached, and which do not exist."""

    text: str
    notices: tuple[str, ...] = ()


def expand_mentions(prompt: str, folder: Path) -> ExpandedPrompt:
    """Append the text of the mentioned files. Relative paths are relative to `folder`.

    A word that begins with `@` and names no file is left as it is. Raises InvalidRequest if a file
    cannot be read, has more than MAX_FILE_CHARS or is not text, or lacks the lines.
    """
    sections: dict[str, str] = {}
    notices = []
    for found in _MENTION.finditer(prompt):
        name, lines = _resolve(found[1] or found[2], folder)
        if name:
            title, body = _read(folder / os.path.expanduser(name), name, lines)
            if title not in sections:
                sections[title] = fenced(body, Path(name).suffix.lstrip("."))
                count = units.format_count(len(body.splitlines()), "line")
                notices.append(f"attached {name} ({count})")
        elif not name and _looks_like_a_path(found[2] or ""):
            notices.append(f"no file {found[2]}: sent as text")
    text = "\n\n".join([prompt, *(f"{title}:\n{code}" for title, code in sections.items())])
    return ExpandedPrompt(text, tuple(notices))


def typed_mention(text: str) -> tuple[int, str] | None:
    """The mention that a text ends with: index of its `@`, and what is typed of the path."""
    found = _TYPED.search(text)
    return None if found is None else (found.start(), found[1] or found[2] or "")


def mention_of(path: str) -> str:
    """How a prompt mentions a path."""
    return f'@"{path}"' if re.search(r"\s", path) else f"@{path}"


def list_files(folder: Path) -> list[str]:
    """Paths of the files below a folder, relative to it; at most 20,000.

    Those that git knows or does not ignore; outside of a repository, none in hidden folders.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(
            command, cwd=folder, capture_output=True, check=True, timeout=_LIST_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return list(islice(_walk(folder), _MAX_FILES))
    return [os.fsdecode(path) for path in listed.split(b"\0")[:_MAX_FILES] if path]


def matching_files(files: Sequence[str], typed: str, count: int) -> list[str]:
    """Paths that have the typed letters in this order, the best match first.

    Those with the typed text in the file's name come first, then those with it in the path.
    """
    wanted = typed.lower()
    pattern = re.compile(".*?".join(map(re.escape, wanted)), re.DOTALL)

    def rank(path: str) -> tuple[bool, bool, int, str]:
        lower = path.lower()
        return wanted not in lower.rpartition("/")[2], wanted not in lower, len(path), path

    return nsmallest(count, (path for path in files if pattern.search(path.lower())), key=rank)


def _resolve(word: str, folder: Path) -> tuple[str, tuple[int, int] | None]:
    """Name of the file and the lines that a mention names; an empty name if there is none."""
    for candidate in (word, word.rstrip(".,:;!?)]}'\"")):
        if _is_file(folder, candidate):
            return candidate, None
        ranged = _RANGE.fullmatch(candidate)
        if ranged is not None and _is_file(folder, ranged[1]):
            first = int(ranged[2])
            return ranged[1], (first, int(ranged[3] or first))
    return "", None


def _is_file(folder: Path, name: str) -> bool:
    try:
        return bool(name) and (folder / os.path.expanduser(name)).is_file()
    except OSError:  # a name that is too long, for example
        return False


def _looks_like_a_path(word: str) -> bool:
    return "/" in word or _RANGE.fullmatch(word) is not None


def _read(path: Path, name: str, lines: tuple[int, int] | None) -> tuple[str, str]:
    """Title and text of a file, or of these lines of it."""
    first, last = lines or (1, None)
    if first < 1 or (last is not None and last < first):
        raise InvalidRequest(f"{name}:{first}-{last}: give the first line and the last, from 1 on")
    try:
        with open(path, encoding="utf-8") as file:
            text = (
                file.read(MAX_FILE_CHARS + 1)
                if lines is None
                else "".join(islice(file, first - 1, last))
            )
    except OSError as error:
        raise InvalidRequest(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidRequest(f"{name} is not a text file")
    if len(text) > MAX_FILE_CHARS:
        raise InvalidRequest(f"{name} is too long: mention some lines of it, as in @{name}:1-200")
    if lines is None:
        return name, text
    if not text:
        raise InvalidRequest(f"{name}:{first}: the file has fewer lines")
    return f"{name}, lines {first} to {first + len(text.splitlines()) - 1}", text


def _walk(folder: Path) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            each for each in folders if each[0] != "." and each not in _SKIPPED_FOLDERS
        )
        for name in sorted(names):
            yield os.path.relpath(os.path.join(root, name), folder)
