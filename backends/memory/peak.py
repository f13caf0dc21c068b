"""Most main memory that this process has had."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

OWN_STATUS = Path("/proc/self/status")


def peak_bytes(status: Path = OWN_STATUS) -> int:
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
