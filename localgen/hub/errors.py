"""What can go wrong between here and the hub; each message says what to do."""

from __future__ import annotations

from localgen.backends.errors import DiskFull as DiskFull
from localgen.backends.errors import LocalgenError


class HubUnavailable(LocalgenError):
    """The hub cannot be reached, or does not answer as one."""

    code = "hub_unavailable"


class AccessDenied(LocalgenError):
    """The repository is private, or gated and its licence not accepted; or a server wants a key."""

    code = "access_denied"


class DownloadFailed(LocalgenError):
    """A file did not arrive as the hub describes it."""

    code = "download_failed"
