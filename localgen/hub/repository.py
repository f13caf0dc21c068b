"""List the files of a hub repository through huggingface_hub, and translate its errors."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from localgen.backends.errors import DISK_FULL_ERRNOS, LocalgenError, ModelNotFound
from localgen.backends.formats.model_files import gguf_models_in, shards_of, stem_of
from localgen.hub import catalog, quants
from localgen.hub.hf_client import (
    AccessDenied,
    DiskFull,
    DownloadFailed,
    HubUnavailable,
    hub_host,
    hub_url,
    import_huggingface_hub,
)

# enough for the GGUF metadata before the vocabulary (a few kilobytes), and for a config.json
_HEAD_BYTES = 256 << 10
_REQUEST_TIMEOUT_S = 15.0
_MAX_ATTEMPTS = 5
# files needed to run a safetensors model; no code and no pickles
_MODEL_SUFFIXES = {".json", ".safetensors", ".jinja", ".model", ".txt"}
_DIGEST = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_Result = TypeVar("_Result")


def read_file_head(repo: str, commit: str, path: str) -> bytes:
    """Read the first 256 KiB of a file, or slightly more. Raises HubUnavailable or AccessDenied."""
    library = import_huggingface_hub()
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    url = library.hf_hub_url(repo, path, revision=commit)
    headers = build_hf_headers() | {"Range": f"bytes=0-{_HEAD_BYTES - 1}"}
    with (
        translate_hub_errors(repo),
        get_session().stream(
            "GET", url, headers=headers, timeout=_REQUEST_TIMEOUT_S, follow_redirects=True
        ) as reply,
    ):
        hf_raise_for_status(reply)
        found = b""
        # a server without range support sends the whole file
        for block in reply.iter_bytes():
            found += block
            if len(found) >= _HEAD_BYTES:
                break
    return found


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. path: within the repository.

    digest: SHA-256 of the content for large files (LFS), git's SHA-1 for others; its name in the
    cache.
    """

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A GGUF model of a repository, with all its shards."""

    files: tuple[RemoteFile, ...]

    @property
    def stem(self) -> str:
        return stem_of(Path(self.files[0].path))

    @property
    def quant(self) -> str:
        return quants.quant_of(self.stem)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class RepoListing:
    """The files of a repository at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    def gguf_models(self) -> list[RemoteModel]:
        """Return the GGUF models, smallest first, without those that lack a shard."""
        by_path = {file.path: file for file in self.files}
        found = []
        for first in gguf_models_in(Path(path) for path in by_path):
            shards = [by_path.get(str(shard)) for shard in shards_of(first)]
            whole = [shard for shard in shards if shard is not None]
            if len(whole) == len(shards):
                found.append(RemoteModel(tuple(whole)))
        return sorted(found, key=lambda model: model.size_bytes)

    def safetensors_files(self, skip: tuple[str, ...] = ()) -> tuple[RemoteFile, ...]:
        """Return the files of a safetensors model, smallest first; empty if it has none."""
        top = [
            file
            for file in self.files
            if "/" not in file.path
            and Path(file.path).suffix in _MODEL_SUFFIXES
            and not any(fnmatch(file.path, pattern) for pattern in skip)
        ]
        names = {file.path for file in top}
        weights = {name for name in names if name.endswith(".safetensors")}
        if "config.json" not in names or not weights:
            return ()
        if any(name.startswith("model") for name in weights):
            # some repositories have the weights twice, also in their publisher's own layout
            top = [file for file in top if not file.path.startswith("consolidated")]
        return tuple(sorted(top, key=lambda file: (file.size_bytes, file.path)))


def list_repo(repo: str, notify: Callable[[str], None]) -> RepoListing:
    """Fetch the file list of a repository. Raises ModelNotFound, AccessDenied or HubUnavailable."""
    api = import_huggingface_hub().HfApi()

    def ask() -> RepoListing:
        found = api.model_info(repo, files_metadata=True, timeout=_REQUEST_TIMEOUT_S)
        files = tuple(
            RemoteFile(
                f.rfilename, f.size or 0, _checked_digest(f.lfs.sha256 if f.lfs else f.blob_id)
            )
            for f in found.siblings or ()
        )
        # use the hub's capitalization of the name, but keep the requested name of a renamed
        # repository
        spelled = found.id if catalog.same_ignoring_case(found.id, repo) else repo
        return RepoListing(spelled, _checked_digest(found.sha), files)

    with translate_hub_errors(repo):
        return _retry_rate_limited(ask, notify)


def _checked_digest(digest: str) -> str:
    """Return the digest, which becomes a file name. Raises ValueError if it is not a hex digest."""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is not a digest")
    return digest


def _retry_rate_limited(request: Callable[[], _Result], notify: Callable[[str], None]) -> _Result:
    """Run a request, and retry after a 429 response, as long as its Retry-After says."""
    from huggingface_hub.errors import HfHubHTTPError

    for attempt in range(_MAX_ATTEMPTS):
        try:
            return request()
        except HfHubHTTPError as error:
            if error.response.status_code != 429 or attempt == _MAX_ATTEMPTS - 1:
                raise
            retry_after = error.response.headers.get("Retry-After", "")
            wait_s = float(retry_after) if retry_after.isdecimal() else 2.0**attempt
            notify(f"{hub_host()} asks to wait {wait_s:.0f} s")
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def translate_hub_errors(repo: str) -> Iterator[None]:
    """Convert huggingface_hub's exceptions in the block to LocalgenErrors with a remedy."""
    import_huggingface_hub()
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.HfHubHTTPError as error:
        raise _from_http_error(error, repo) from error
    except errors.LocalEntryNotFoundError as error:
        reason = error.__cause__
        if isinstance(reason, errors.HfHubHTTPError):
            raise _from_http_error(reason, repo) from error
        raise _unreachable_error(reason or error) from error
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{repo!r} is not a repository name", param="model") from error
    except (httpx2.TransportError, errors.OfflineModeIsEnabled) as error:
        raise _unreachable_error(error) from error
    except OSError as error:
        raise _from_os_error(error, repo) from error
    except (ValueError, TypeError, KeyError) as error:
        # a captive portal, or another server that is not a hub
        raise HubUnavailable(
            f"{hub_host()} does not respond like a Hugging Face hub: {error}"
        ) from error


def _from_http_error(error: Exception, repo: str) -> LocalgenError:
    from huggingface_hub import errors, get_token

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if isinstance(error, errors.GatedRepoError):
        return _gated_error(repo, has_token=get_token() is not None)
    if isinstance(error, errors.RepositoryNotFoundError):
        private = "" if get_token() else "; if it is private, set HF_TOKEN"
        return ModelNotFound(f"{hub_host()} has no repository {repo}{private}", param="model")
    if isinstance(error, (errors.EntryNotFoundError, errors.RevisionNotFoundError)):
        return ModelNotFound(f"{repo} has changed on {hub_host()}: pull it again", param="model")
    if status == 401:
        return AccessDenied(f"{hub_host()} rejects the token: set HF_TOKEN to a valid one")
    if status == 403:
        return AccessDenied(
            f"{hub_host()} denies this token access to {repo}: grant it read permission"
        )
    if status == 429:
        return HubUnavailable(
            f"{hub_host()} still limits the request rate: try again in a few minutes"
        )
    return HubUnavailable(f"{hub_host()} responds with HTTP status {status}: try again later")


def _gated_error(repo: str, *, has_token: bool) -> AccessDenied:
    page = f"{hub_url()}/{repo}"
    entry = catalog.entry_by_repo(repo)
    source = (
        next((f for f in entry.safetensors if catalog.same_ignoring_case(f.repo, repo)), None)
        if entry
        else None
    )
    copy = f"; or use the ungated copy {source.mirror}" if source and source.mirror else ""
    if has_token:
        return AccessDenied(
            f"{repo} is gated: accept its terms on {page}, with this token's account{copy}"
        )
    return AccessDenied(f"{repo} is gated: accept its terms on {page} and set HF_TOKEN{copy}")


def _unreachable_error(error: BaseException) -> HubUnavailable:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return HubUnavailable(
            f"HF_HUB_OFFLINE is set, so {hub_host()} is not contacted: unset it to download"
        )
    return HubUnavailable(
        f"cannot reach {hub_host()} ({_network_reason(error)}): check the network, then try again"
    )


def _network_reason(error: BaseException) -> str:
    """The system's words for a network error; those of the library if the system gave none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _from_os_error(error: OSError, repo: str) -> LocalgenError:
    if error.errno in DISK_FULL_ERRNOS:
        return DiskFull(
            "the disk is full: make room and pull again to resume; "
            f"or localgen rm {repo} removes the unfinished download"
        )
    if error.errno is None:  # raised by huggingface_hub if the size is wrong
        return DownloadFailed(f"{repo} was not downloaded completely: pull again")
    return DownloadFailed(f"cannot write to the cache: {error}")
