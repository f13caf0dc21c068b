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
from localgen.chat.fences import fenced, with_file, without_blocks

MAX_FILE_CHARS = 1_000_000
_MAX_FILES = 20_000  # of a folder are offered
_LIST_TIMEOUT_S = 5.0
_MENTION = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
_RANGE = re.compile(r"(.+):(\d{1,9})(?:-(\d{1,9}))?")
_WITH_SUFFIX = re.compile(r".*\w\.[a-zA-Z]\w{0,4}")
_UNMENTIONABLE = re.compile(r'["\x00-\x1f\x7f]').search
_TYPED = re.compile(r'(?<!\S)@(?:"([^"\n]*)|([^\s"]*))\Z')
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__"})


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt with the text of its files. notices: which were attached, and which do not exist."""

    text: str
    notices: tuple[str, ...] = ()


def expand_mentions(prompt: str, folder: Path | None = None) -> ExpandedPrompt:
    """Append the text of the mentioned files below a folder, by default the current one.

    A word that begins with `@` and names no file there is left as it is, and so are code blocks.
    Raises InvalidRequest if a file cannot be read, has more than MAX_FILE_CHARS or is not text, or
    lacks the lines.
    """
    mentions = list(_MENTION.finditer(without_blocks(prompt)))
    if not mentions:
        return ExpandedPrompt(prompt)
    folder, text, notices = folder or _current_folder(), prompt, []
    for found in mentions:
        name, lines = _resolve(found[1] or found[2], folder)
        if name and not _is_below(folder, name):
            notices.append(f"{name} is not below this folder: sent as text")
        elif name:
            heading, body = _read(folder / name, name, lines)
            longer = with_file(text, heading, fenced(body, Path(name).suffix.lstrip(".")))
            if longer != text:
                text = longer
                notices.append(f"attached {name} ({units.format_count(_num_lines(body), 'line')})")
        elif found[1] or _looks_like_a_path(found[2]):
            notices.append(f"no file {found[1] or found[2]}: sent as text")
    return ExpandedPrompt(text, tuple(notices))


def typed_mention(text: str) -> tuple[int, str] | None:
    """The mention that a text ends with: index of its `@`, and what is typed of the path."""
    found = _TYPED.search(text)
    return None if found is None else (found.start(), found[1] or found[2] or "")


def mention_of(path: str) -> str:
    """How a prompt mentions a path."""
    return f'@"{path}"' if re.search(r"\s", path) else f"@{path}"


def list_files(folder: Path | None = None) -> list[str]:
    """Paths of the files below a folder, by default the current one; at most 20,000.

    Those that git knows or does not ignore; outside of a repository, none in hidden folders. Paths
    that cannot be mentioned are left out.
    """
    try:
        folder = folder or _current_folder()
    except InvalidRequest:
        return []
    paths: Iterator[str]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(
            command, cwd=folder, capture_output=True, check=True, timeout=_LIST_TIMEOUT_S
        ).stdout
        paths = (os.fsdecode(path) for path in listed.split(b"\0") if path)
    except (OSError, subprocess.SubprocessError):
        paths = _walk(folder)
    # git lists a path with a conflict three times
    return list(dict.fromkeys(islice((p for p in paths if not _UNMENTIONABLE(p)), _MAX_FILES)))


def matching_files(files: Sequence[str], typed: str, count: int) -> list[str]:
    """Paths that have the typed letters in this order, the best match first.

    Those with the typed text in the file's name come first, then those with it in the path.
    """
    wanted = typed.lower()

    def rank(path: str) -> tuple[bool, bool, int, str]:
        lower = path.lower()
        return wanted not in lower.rpartition("/")[2], wanted not in lower, len(path), path

    return nsmallest(count, (path for path in files if _has_letters(path, wanted)), key=rank)


def _has_letters(path: str, letters: str) -> bool:
    """True if the path has the letters in this order."""
    rest = iter(path.lower())
    return all(letter in rest for letter in letters)


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
        return bool(name) and (folder / name).is_file()
    except (OSError, ValueError):  # a name that is too long, for example
        return False


def _is_below(folder: Path, name: str) -> bool:
    """A text that was pasted must not send what lies elsewhere."""
    return (folder / name).resolve().is_relative_to(folder.resolve())


def _looks_like_a_path(word: str) -> bool:
    return "/" in word or bool(_RANGE.fullmatch(word) or _WITH_SUFFIX.fullmatch(word))


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise InvalidRequest("the current folder is gone: start localgen in another") from error


def _read(path: Path, name: str, lines: tuple[int, int] | None) -> tuple[str, str]:
    """Heading and text of a file, or of these lines of it."""
    first, last = lines or (1, None)
    if first < 1 or (last is not None and last < first):
        raise InvalidRequest(f"{name}:{first}-{last}: give the first line and the last, from 1 on")
    pieces, num_chars = [], 0
    try:
        with open(path, encoding="utf-8") as file:
            for piece in islice(file, first - 1, last):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_FILE_CHARS:
                    advice = f"mention some lines of it, as in @{name}:1-200"
                    raise InvalidRequest(f"{name} is too long: {advice}")
    except OSError as error:
        raise InvalidRequest(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not a text file") from error
    text = "".join(pieces)
    if "\0" in text:
        raise InvalidRequest(f"{name} is not a text file")
    if lines is None:
        return name, text
    if not text:
        raise InvalidRequest(f"{name}:{first}: the file has fewer lines")
    return f"{name}, lines {first} to {first + _num_lines(text) - 1}", text


def _num_lines(text: str) -> int:
    return text.count("\n") + (not text.endswith("\n") and bool(text))


def _walk(folder: Path) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            each for each in folders if each[0] != "." and each not in _SKIPPED_FOLDERS
        )
        for name in sorted(names):
            yield os.path.relpath(os.path.join(root, name), folder)
