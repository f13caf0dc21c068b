"""Main memory: what models can have within our control groups, and the peak of this process."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
# what is never given to a model: it is for the rest of the machine
RESERVED_BYTES = 256 << 20
PROC_STATUS = Path("/proc/self/status")


def available_memory_bytes() -> int:
    """Bytes that can be had now without swapping."""
    free = int(psutil.virtual_memory().available)
    return min([free, *(max(0, limit - used) for limit, used in cgroup_limits())])


def total_memory_bytes() -> int:
    """Bytes that this process and its like may ever have."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in cgroup_limits())])


def cgroup_limits(
    cgroup_root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP
) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group (version 2) around us that has a limit, in bytes.

    What files keep in the page cache does not count as used: it goes when memory is needed.
    """
    lines = _read_text(own_cgroup).splitlines()
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if name is None:
        return
    # in a namespace of its own a container sees its group as the root
    for group in (cgroup_root / name, *(cgroup_root / name).parents):
        limit, current = _read_text(group / "memory.max"), _read_text(group / "memory.current")
        if limit.isdecimal() and current.isdecimal():
            yield (
                int(limit),
                max(0, int(current) - _page_cache_bytes(_read_text(group / "memory.stat"))),
            )
        if group == cgroup_root:
            return


def _page_cache_bytes(stat: str) -> int:
    pairs = (line.split() for line in stat.splitlines())
    kept = {name: int(value) for name, value in pairs}
    return kept.get("inactive_file", 0) + kept.get("active_file", 0)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def peak_memory_bytes(status: Path = PROC_STATUS) -> int:
    """Largest resident set so far, in bytes.

    Linux's getrusage starts with what the process was that became this one by exec, however large:
    its own peak stands in the status file (proc_pid_status(5), VmHWM, in KiB).
    """
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) << 10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10
