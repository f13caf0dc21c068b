"""Download files from the hub into the cache: resumable, verified, and once for all processes.

An interrupted huggingface_hub download starts over, and it verifies sizes only. So its HTTP
function writes into a file that is kept here, under the name of its cache for incomplete files. The
file gets its final name once its hash is verified.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.gguf.reader import check_gguf_start
from localgen.backends.units import format_size
from localgen.hub.hf_client import DownloadFailed, cache_folder, import_huggingface_hub, repo_folder
from localgen.hub.repository import RemoteFile

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# receives the bytes of a file in the cache, whichever process downloads it
OnBytes = Callable[[int], None]
_POLL_S = 0.25
_MAX_ATTEMPTS = 3
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PullPlan:
    """The files a pull downloads. name: the model's name afterwards.

    quant_reason: why this quantization was chosen, if the user did not choose it.
    """

    name: str
    repo: str
    commit: str
    files: tuple[RemoteFile, ...]
    quant_reason: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def remaining_bytes(self) -> int:
        """Bytes not downloaded yet."""
        return sum(file.size_bytes - downloaded_bytes(self.repo, file) for file in self.files)

    @property
    def is_cached(self) -> bool:
        """True if every file is in the cache's snapshot."""
        snapshot = repo_folder(self.repo) / "snapshots" / self.commit
        return all((snapshot / file.path).exists() for file in self.files)


class PartialFile(io.FileIO):
    """An incomplete file, positioned at its end. Written bytes are hashed and counted.

    on_bytes: receives the size after each block; of a file with content first once it is hashed.

    Writing raises LoadFailed if the first bytes of a .gguf file are not those of GGUF.
    """

    def __init__(self, path: Path, file: RemoteFile, on_bytes: OnBytes) -> None:
        path.touch()
        super().__init__(path, "r+")
        self._file = file
        self._on_bytes = on_bytes
        self._hash = _hash_of(file)
        while block := self.read(_BLOCK_BYTES):
            self._hash.update(block)
        if self.tell():
            on_bytes(self.tell())

    def write(self, block: ReadableBuffer) -> int:
        if self.tell() == 0 and self._file.path.lower().endswith(".gguf"):
            check_gguf_start(memoryview(block), self._file.path)
        left = memoryview(block)
        while left:
            # a full disk writes part of the block and fails on the rest
            left = left[super().write(left) or 0 :]
        self._hash.update(block)
        self._on_bytes(self.tell())
        return len(memoryview(block))

    def truncate(self, size: int | None = None) -> int:
        """Start over, if the server does not support range requests."""
        left = super().truncate(size)
        assert left == 0, "can only truncate to zero"
        self._hash = _hash_of(self._file)
        return left

    def matches_digest(self) -> bool:
        """Return True if the content has the hash that the hub announced."""
        return self._hash.hexdigest() == self._file.digest


def blob_path(repo: str, file: RemoteFile) -> Path:
    """Path of a file's content in the cache."""
    return repo_folder(repo) / "blobs" / file.digest


def downloaded_bytes(repo: str, file: RemoteFile) -> int:
    """Number of bytes of a file in the cache, complete or not."""
    blob = blob_path(repo, file)
    if blob.exists():
        return file.size_bytes
    # incomplete files of other programs have a suffix before .incomplete
    unfinished = blob.parent.glob(f"{file.digest}*.incomplete")
    return max((_size(path) for path in unfinished), default=0)


def download_file(repo: str, commit: str, file: RemoteFile, on_bytes: OnBytes) -> None:
    """Download a file into the cache, or wait while another process does.

    An interrupted download is resumed by the next call. Raises the exceptions of huggingface_hub,
    and DownloadFailed if the content does not match its hash or is not GGUF in a .gguf file; it is
    then removed.
    """
    import_huggingface_hub()
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    folder = repo_folder(repo)
    # huggingface_hub's lock for this file, so that its other users and we wait for each other
    lock = cache_folder() / ".locks" / folder.name / f"{file.digest}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    blob_path(repo, file).parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            with WeakFileLock(lock, timeout=_POLL_S):
                if not blob_path(repo, file).exists():
                    _download_locked(repo, commit, file, on_bytes)
                break
        except Timeout:
            on_bytes(downloaded_bytes(repo, file))
    on_bytes(file.size_bytes)
    _link(repo, commit, file)


def _download_locked(repo: str, commit: str, file: RemoteFile, on_bytes: OnBytes) -> None:
    from huggingface_hub import constants, hf_hub_url

    if file.size_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise DownloadFailed(
            f"{file.path} has {format_size(file.size_bytes)}, too large for one HTTP download: "
            f"`hf download {repo} {file.path}` downloads it into the same cache"
        )
    blob = blob_path(repo, file)
    unfinished = blob.with_name(f"{blob.name}.incomplete")
    if _size(unfinished) > file.size_bytes:
        unfinished.unlink()
    try:
        with PartialFile(unfinished, file, on_bytes) as target:
            _stream(hf_hub_url(repo, file.path, revision=commit), target, file)
            if not target.matches_digest():
                unfinished.unlink()
                raise DownloadFailed(
                    f"{file.path} of {repo} arrived damaged (its hash is not {file.digest[:12]}…) "
                    "and was removed: pull again"
                )
    except LoadFailed as error:
        unfinished.unlink()
        raise DownloadFailed(
            f"{error.message}; it was removed: choose another file or repository than {repo}"
        ) from error
    except BaseException:
        _remove_if_empty(unfinished)
        raise
    unfinished.replace(blob)


def _remove_if_empty(path: Path) -> None:
    """Remove what a refused download leaves."""
    if path.exists() and not _size(path):
        path.unlink()


def _stream(url: str, target: PartialFile, file: RemoteFile) -> None:
    """Download the rest of a file, resuming after broken connections."""
    import httpx2
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    failures = 0
    while True:
        start = target.tell()
        try:
            # huggingface_hub resumes after most broken connections, but not after a reset
            http_get(
                url,
                target,
                resume_size=start,
                headers=build_hf_headers(),
                expected_size=file.size_bytes,
            )
            return
        except httpx2.TransportError:
            failures = 0 if target.tell() > start else failures + 1
            if failures == _MAX_ATTEMPTS:
                raise
            time.sleep(1)


def _link(repo: str, commit: str, file: RemoteFile) -> None:
    """Link the content into the snapshot, in huggingface_hub's layout."""
    from huggingface_hub import hf_hub_download

    hf_hub_download(repo, file.path, revision=commit)


def _hash_of(file: RemoteFile) -> hashlib._Hash:
    if len(file.digest) == hashlib.sha256().digest_size * 2:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
