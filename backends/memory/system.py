"""Main memory within the cgroup limits, the peak usage of this process, and its CPU cores."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
# never given to a model: left for the rest of the system
RESERVED_BYTES = 256 << 20
PROC_STATUS = Path("/proc/self/status")


def available_memory_bytes() -> int:
    """Bytes that can be allocated now without swapping."""
    free = int(psutil.virtual_memory().available)
    return min([free, *(max(0, limit - used) for limit, used in cgroup_limits())])


def total_memory_bytes() -> int:
    """Total memory in bytes, capped by the cgroup limits."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in cgroup_limits())])


def num_physical_cores() -> int:
    """Physical cores available to this process; hyper-threads do not speed up decode."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))


def cgroup_limits(
    cgroup_root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP
) -> Iterator[tuple[int, int]]:
    """Yield (limit, usage) in bytes for each enclosing cgroup (version 2) that has a limit.

    The page cache does not count as used, because it is reclaimed under memory pressure.
    """
    lines = _read_text(own_cgroup).splitlines()
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if name is None:
        return
    # in a cgroup namespace a container sees its own cgroup as the root
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
    """Return the peak resident set size in bytes.

    On Linux, getrusage also counts the process image before exec, which may have been larger; the
    VmHWM field of the status file does not (proc_pid_status(5), in KiB).
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
