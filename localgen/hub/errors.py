"""What can go wrong between here and the hub; each message says what to do."""

from __future__ import annotations

from localgen.backends.errors import LocalgenError


class HubUnavailable(LocalgenError):
    """The hub cannot be reached, or does not answer as one."""

    code = "hub_unavailable"


class AccessDenied(LocalgenError):
    """The repository is private, or gated and its licence not accepted; or a server wants a key."""

    code = "access_denied"


class DiskFull(LocalgenError):
    """The files do not fit; the message states what they need and what there is."""

    code = "disk_full"


class DownloadFailed(LocalgenError):
    """A file did not arrive as the hub describes it."""

    code = "download_failed"
