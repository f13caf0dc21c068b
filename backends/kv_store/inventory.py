"""What is kept on disk, without an engine: totals of each model, removal, and a check of blocks."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localgen.backends.kv_store import block_file
from localgen.backends.kv_store.block_file import BlockRefused
from localgen.backends.kv_store.disk_tier import (
    ABOUT_NAME,
    StoredFile,
    namespace_folders,
    read_about,
    stored_files,
)

# hex digits of a namespace that tell it from others, as in the ids of `localgen ps`
_ID_CHARS = 12
_NO_KEY = "there is no key to check it with"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The blocks of one namespace: of one model, build of the engine, and type of the KV cache.

    name: the model's, or the id if it is unknown. folder: of the blocks. path: of the model's
    files. path, build, cache_type: empty if unknown. prefixes: blocks that no other block follows.
    size_bytes: of the blocks. used_s, loaded_s: Unix time of the last use and the last load, or 0.
    limit_bytes: of all models together, as of the last load, or None if unknown.
    """

    name: str
    id: str
    folder: str
    path: str
    is_model_gone: bool
    build: str
    cache_type: str
    blocks: int
    tokens: int
    prefixes: int
    size_bytes: int
    used_s: float
    limit_bytes: int | None
    loaded_s: float


@dataclass(frozen=True, slots=True)
class RefusedBlock:
    path: str
    reason: str
    removed: bool


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """Result of a check. whole: number of blocks that an engine would load."""

    name: str
    id: str
    whole: int
    refused: tuple[RefusedBlock, ...]


@dataclass(frozen=True, slots=True)
class RemovedFiles:
    """kept: files of others in the folder, which is then kept too."""

    freed_bytes: int
    kept: tuple[Path, ...]


def stored_models(folder: Path) -> list[StoredModel]:
    """All namespaces in the folder of the disk tier, those of one model together, latest first.

    Raises OSError.
    """
    found = [_stored_model(each) for each in namespace_folders(folder)]
    return sorted(found, key=lambda model: (model.name.lower(), -model.used_s, model.id))


def model_names(folder: Path) -> list[str]:
    """Names of the models, without a look at their blocks. Raises OSError."""
    return sorted({_name_of(each) for each in namespace_folders(folder)})


def matching(models: Sequence[StoredModel], wanted: str) -> list[StoredModel]:
    """The namespaces with this name, id, or path of the model's files."""
    return [model for model in models if wanted in (model.name, model.id, model.path)]


def latest_limit(models: Sequence[StoredModel]) -> int | None:
    """Bytes that all models together may take, as of the last load, or None if unknown."""
    latest = max(models, key=lambda model: model.loaded_s, default=None)
    return latest.limit_bytes if latest is not None else None


def remove_model(model: StoredModel) -> RemovedFiles:
    """Remove the files of a namespace, then its folder if no others are in it.

    Links are removed, not followed. Raises OSError.
    """
    folder = Path(model.folder)
    freed_bytes, kept = 0, dict[Path, None]()
    for _ in range(2):  # until its name is gone, an engine may write blocks
        # its name goes last: what an interruption leaves is still listed by it
        for path in sorted(_entries(folder), key=lambda path: path.name == ABOUT_NAME):
            with contextlib.suppress(FileNotFoundError):  # the engine was first
                found = path.lstat()
                if stat.S_ISDIR(found.st_mode) or not _is_own_name(path.name):
                    kept[path] = None
                    continue
                path.unlink()
                freed_bytes += found.st_size
    with contextlib.suppress(OSError):  # not empty: files of others, or the engine writes again
        folder.rmdir()
    return RemovedFiles(freed_bytes, tuple(kept))


def read_key(folder: Path) -> bytes | None:
    """The key of all blocks, or None if there is none. Raises BlockRefused, or OSError."""
    with contextlib.suppress(FileNotFoundError):
        return block_file.read_key(folder)
    return None


def check_model(model: StoredModel, key: bytes | None, *, remove: bool) -> CheckedModel:
    """Read every block as an engine does. remove: remove the refused ones. Raises OSError."""
    whole, refused = 0, []
    namespace = bytes.fromhex(Path(model.folder).name)
    for file in stored_files(Path(model.folder)):
        with contextlib.suppress(FileNotFoundError):  # the engine has removed it
            reason = _refusal(file.path, namespace, key)
            if not reason:
                whole += 1
                continue
            if remove:
                file.path.unlink()
            refused.append(RefusedBlock(str(file.path), reason, remove))
    return CheckedModel(model.name, model.id, whole, tuple(refused))


def _stored_model(folder: Path) -> StoredModel:
    about, files = read_about(folder), list(stored_files(folder))
    parents = {file.parent for file in files}

    def fact(name: str) -> str:
        return str(about.get(name, ""))

    path, limit = fact("path"), fact("limit_bytes")
    cache_types = dict.fromkeys((fact("cache_type_k"), fact("cache_type_v")))
    return StoredModel(
        name=_name_of(folder),
        id=folder.name[:_ID_CHARS],
        folder=str(folder),
        path=path,
        is_model_gone=bool(path) and _is_gone(Path(path)),
        build=fact("build"),
        cache_type="/".join(filter(None, cache_types)),
        blocks=len(files),
        tokens=sum(_num_tokens(file, bytes.fromhex(folder.name)) for file in files),
        prefixes=sum(file.digest not in parents for file in files),
        size_bytes=sum(file.num_bytes for file in files),
        used_s=max((file.used_s for file in files), default=0.0),
        limit_bytes=int(limit) if limit.isdecimal() else None,
        loaded_s=_changed_s(folder / ABOUT_NAME),
    )


def _name_of(folder: Path) -> str:
    return str(read_about(folder).get("model", "")) or folder.name[:_ID_CHARS]


def _num_tokens(file: StoredFile, namespace: bytes) -> int:
    """Tokens that a block claims to hold; 0 if it would be refused."""
    try:
        return len(block_file.read_tokens(file.path, namespace))
    except (BlockRefused, OSError):
        return 0


def _is_gone(path: Path) -> bool:
    """False if that is unknown, as in a folder without access."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _changed_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return list(folder.iterdir())
    return []


def _is_own_name(name: str) -> bool:
    is_block = block_file.parse_file_name(name) is not None
    return is_block or block_file.is_unfinished(name) or name == ABOUT_NAME


def _refusal(path: Path, namespace: bytes, key: bytes | None) -> str:
    """Why an engine would not load a block; empty if it would. Raises FileNotFoundError."""
    if key is None:
        return _NO_KEY
    try:
        block_file.read_block(path, namespace, key)
    except BlockRefused as reason:
        return str(reason)
    except FileNotFoundError:
        raise
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return ""
