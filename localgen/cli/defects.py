"""Where the traceback of an unexpected error goes: a file, never the screen."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

from localgen import __version__
from localgen.backends.errors import LocalgenError
from localgen.config import Settings


def record(error: Exception) -> Path:
    """Append an error's traceback to the log; gives the log."""
    path = _folder() / "defects.log"
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    trace = "".join(traceback.format_exception(error))
    with path.open("a", encoding="utf-8", errors="replace") as log:
        log.write(f"{stamp} localgen {__version__} {' '.join(sys.argv[1:])}\n{trace}\n")
    return path


def _folder() -> Path:
    try:
        settings = Settings.from_environment()
        settings.prepare()
        return settings.state_dir
    except (LocalgenError, OSError):
        return Path(tempfile.mkdtemp(prefix="localgen-"))
