"""File descriptors: one for each connection, and how many there may be."""

from __future__ import annotations

import resource

# what systems give by default, 256 or 1,024, is for programs that serve nobody
_WANTED = 8192


def limit() -> int:
    """Most that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> None:
    """Take as many as are wanted, if the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
