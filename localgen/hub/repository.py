"""What a repository on the hub has, asked through huggingface_hub."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from localgen.backends.errors import LocalgenError, ModelNotFound
from localgen.backends.formats.model_files import gguf_models_in, shards_of, stem_of
from localgen.hub import catalog, quants
from localgen.hub.hf_client import (
    AccessDenied,
    DiskFull,
    DownloadFailed,
    HubUnavailable,
    hub_host,
    import_huggingface_hub,
)

# metadata before the vocabulary take a few kilobytes, a config.json too
_HEAD_BYTES = 256 << 10
_REQUEST_TIMEOUT_S = 15.0
_REQUEST_TIMEOUT_S = 15.0
_MAX_ATTEMPTS = 5
# of a repository in Hugging Face's format: what runs it, none of it code or pickles
_MODEL_SUFFIXES = {".json", ".safetensors", ".jinja", ".model", ".txt"}
_DIGEST = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_Result = TypeVar("_Result")


def read_file_head(repo: str, commit: str, path: str) -> bytes:
    """At least as much as there is of the first 256 KiB. HubUnavailable, AccessDenied."""
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
        # a server that knows no ranges sends all of it
        for block in reply.iter_bytes():
            found += block
            if len(found) >= _HEAD_BYTES:
                break
    return found


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """path: within its repository. digest: SHA-256 of its content where it is large (LFS), git's
    SHA-1 where it is not; the cache calls it by that."""

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A GGUF model of a repository, all its shards."""

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
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[RemoteFile, ...]

    def gguf_models(self) -> list[RemoteModel]:
        """Its GGUF models, smallest first; one that lacks a shard is none."""
        by_path = {file.path: file for file in self.files}
        found = []
        for first in gguf_models_in(Path(path) for path in by_path):
            shards = [by_path.get(str(shard)) for shard in shards_of(first)]
            whole = [shard for shard in shards if shard is not None]
            if len(whole) == len(shards):
                found.append(RemoteModel(tuple(whole)))
        return sorted(found, key=lambda model: model.size_bytes)

    def safetensors_files(self, skip: tuple[str, ...] = ()) -> tuple[RemoteFile, ...]:
        """What a model in Hugging Face's format needs, small files first; empty: it has none."""
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
            # some have all weights a second time, in their maker's own layout
            top = [file for file in top if not file.path.startswith("consolidated")]
        return tuple(sorted(top, key=lambda file: (file.size_bytes, file.path)))


def list_repo(repo: str, notify: Callable[[str], None]) -> RepoListing:
    """Ask the hub. ModelNotFound, AccessDenied, HubUnavailable."""
    api = import_huggingface_hub().HfApi()

    def ask() -> RepoListing:
        found = api.model_info(repo, files_metadata=True, timeout=_REQUEST_TIMEOUT_S)
        files = tuple(
            RemoteFile(
                f.rfilename, f.size or 0, _checked_digest(f.lfs.sha256 if f.lfs else f.blob_id)
            )
            for f in found.siblings or ()
        )
        # the hub knows how the name is spelled; a renamed repository keeps the name it was asked by
        spelled = found.id if catalog.same_ignoring_case(found.id, repo) else repo
        return RepoListing(spelled, _checked_digest(found.sha), files)

    with translate_hub_errors(repo):
        return _retry_rate_limited(ask, notify)


def _checked_digest(digest: str) -> str:
    """A digest, which becomes the name of a file here. ValueError: it is none."""
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is no digest")
    return digest


def _retry_rate_limited(request: Callable[[], _Result], notify: Callable[[str], None]) -> _Result:
    """The answer; where the hub says that we ask too much, after the time it names."""
    from huggingface_hub.errors import HfHubHTTPError

    for attempt in range(_MAX_ATTEMPTS):
        try:
            return request()
        except HfHubHTTPError as error:
            if error.response.status_code != 429 or attempt == _MAX_ATTEMPTS - 1:
                raise
            asked = error.response.headers.get("Retry-After", "")
            wait_s = float(asked) if asked.isdecimal() else 2.0**attempt
            notify(f"{hub_host()} asks to wait {wait_s:.0f} s")
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def translate_hub_errors(repo: str) -> Iterator[None]:
    """What the library raises while the block runs becomes a LocalgenError that says what to do."""
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
        raise ModelNotFound(f"{repo!r} is no name of a repository", param="model") from error
    except (httpx2.TransportError, errors.OfflineModeIsEnabled) as error:
        raise _unreachable_error(error) from error
    except OSError as error:
        raise _from_os_error(error, repo) from error
    except (ValueError, TypeError, KeyError) as error:
        # a captive portal, or something else that is no hub
        raise HubUnavailable(f"{hub_host()} does not answer as a hub does: {error}") from error


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
        return AccessDenied(f"{hub_host()} refuses the token: set HF_TOKEN to a valid one")
    if status == 403:
        return AccessDenied(
            f"{hub_host()} does not let this token read {repo}: give it the permission"
        )
    if status == 429:
        return HubUnavailable(f"{hub_host()} still asks to slow down: try again in a few minutes")
    return HubUnavailable(f"{hub_host()} answers with status {status}: try again later")


def _gated_error(repo: str, *, has_token: bool) -> AccessDenied:
    page = f"https://{hub_host()}/{repo}"
    entry = catalog.entry_by_repo(repo)
    source = (
        next((f for f in entry.safetensors if catalog.same_ignoring_case(f.repo, repo)), None)
        if entry
        else None
    )
    copy = f"; or take the open copy {source.mirror}" if source and source.mirror else ""
    if has_token:
        return AccessDenied(
            f"{repo} is gated: accept its terms on {page}, with this token's account{copy}"
        )
    return AccessDenied(f"{repo} is gated: accept its terms on {page} and set HF_TOKEN{copy}")


def _unreachable_error(error: BaseException) -> HubUnavailable:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return HubUnavailable(
            f"HF_HUB_OFFLINE is set, so {hub_host()} is not asked: unset it to fetch"
        )
    reason = str(error) or type(error).__name__
    return HubUnavailable(
        f"cannot reach {hub_host()} ({reason}): check the network, then pull again"
    )


def _from_os_error(error: OSError, repo: str) -> LocalgenError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            "the disk is full: make room and pull again, which goes on from there; "
            f"or localgen rm {repo} drops what came"
        )
    if error.errno is None:  # the library's own, of a size that is not the one announced
        return DownloadFailed(f"{repo} did not arrive whole: pull again")
    return DownloadFailed(f"cannot write to the cache: {error}")
