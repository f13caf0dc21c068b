"""Settings from LOCALGEN_* variables, and the folders shared by server and clients."""

from __future__ import annotations

import os
import re
import socket
import stat
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from localgen.backends.errors import DISK_FULL_ERRNOS, DiskFull, LocalgenError

if TYPE_CHECKING:
    from localgen.backends.model_info import KVShare

# name of the model that is part of the package
BUILT_IN_MODEL = "tiny"
DEFAULT_KEEP_ALIVE_S = 300.0
DEFAULT_HANG_TIMEOUT_S = 60.0
# size of sun_path: 104 bytes on macOS and 108 on Linux, including the terminating zero
SOCKET_PATH_BYTES = (104 if sys.platform == "darwin" else 108) - 1

# uid shown in a container for files of users outside of it
_OVERFLOW_UID = 65534
_MAX_LINKS = 40  # as Linux follows
_DURATION_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class BadSetting(LocalgenError):
    """A setting is invalid, or a folder it names cannot be used; the message names the variable."""

    code = "bad_setting"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the server.

    keep_alive_s: idle time before models are unloaded and the server exits, or None if never.
    memory_limit: bytes for all models together, or None for the machine's available memory.
    max_queue: waiting requests per model before new ones are rejected, or None for the engine's
    default.
    parallel: requests per model computed at once, or None for the engine's default.
    draft: default of LoadOptions.draft, used where it suits the model.
    hang_timeout_s: an engine that sends nothing for so long while it has requests or loads a model
    is killed, or None if never.
    record_trace: file to which a line is added for each answered prompt, or None.
    kv_share: of the cluster that the server is part of, or None.
    keep_model: the model of `localgen serve MODEL` stays loaded when it is idle, unless a request
    gives it a time.
    """

    runtime_dir: Path
    state_dir: Path
    keep_alive_s: float | None = DEFAULT_KEEP_ALIVE_S
    memory_limit: int | None = None
    max_queue: int | None = None
    parallel: int | None = None
    draft: str | None = None
    hang_timeout_s: float | None = DEFAULT_HANG_TIMEOUT_S
    record_trace: Path | None = None
    kv_share: KVShare | None = None
    keep_model: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ServerSettings:
        """Read the settings. Raises BadSetting, naming the invalid variable."""
        keep_alive = environ.get("LOCALGEN_KEEP_ALIVE", "").strip()
        limit = environ.get("LOCALGEN_MEMORY_LIMIT", "").strip()
        max_queue = environ.get("LOCALGEN_MAX_QUEUE", "").strip()
        hang_timeout = environ.get("LOCALGEN_HANG_TIMEOUT", "").strip()
        return cls(
            runtime_dir=_dir_from_env(environ, "LOCALGEN_RUNTIME_DIR")
            or _default_runtime_dir(environ),
            state_dir=_dir_from_env(environ, "LOCALGEN_STATE_DIR") or _default_state_dir(),
            keep_alive_s=parse_keep_alive(keep_alive) if keep_alive else DEFAULT_KEEP_ALIVE_S,
            memory_limit=parse_size(limit, "LOCALGEN_MEMORY_LIMIT") if limit else None,
            max_queue=_parse_count(max_queue, "LOCALGEN_MAX_QUEUE") if max_queue else None,
            hang_timeout_s=(
                parse_hang_timeout(hang_timeout) if hang_timeout else DEFAULT_HANG_TIMEOUT_S
            ),
        )

    def to_environment(self) -> dict[str, str]:
        """Environment variables that give a child process these settings."""
        variables = {
            "LOCALGEN_RUNTIME_DIR": str(self.runtime_dir),
            "LOCALGEN_STATE_DIR": str(self.state_dir),
            "LOCALGEN_KEEP_ALIVE": "-1" if self.keep_alive_s is None else f"{self.keep_alive_s}",
            "LOCALGEN_HANG_TIMEOUT": f"{self.hang_timeout_s or 0}",
        }
        if self.memory_limit is not None:
            variables["LOCALGEN_MEMORY_LIMIT"] = str(self.memory_limit)
        if self.max_queue is not None:
            variables["LOCALGEN_MAX_QUEUE"] = str(self.max_queue)
        return variables

    @property
    def socket_path(self) -> Path:
        """Socket of this user's server."""
        return self.runtime_dir / "server.sock"

    @property
    def server_lock_path(self) -> Path:
        """Locked by the server while it runs."""
        return self.runtime_dir / "server.lock"

    @property
    def start_lock_path(self) -> Path:
        """Locked by a client that is starting a server."""
        return self.runtime_dir / "start.lock"

    @property
    def log_path(self) -> Path:
        """Log of a server started by a client; in the runtime folder if the other is read-only."""
        is_read_only = self.state_dir.exists() and not os.access(self.state_dir, os.W_OK)
        return (self.runtime_dir if is_read_only else self.state_dir) / "server.log"

    @property
    def kv_dir(self) -> Path:
        """Folder of the computed prefixes (KV cache) that engines keep on disk."""
        return self.state_dir / "kv"

    def is_server_listening(self) -> bool:
        """Return True if a server accepts connections on the socket."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket_path))
            except BlockingIOError:  # its backlog is full
                return True
            except OSError:
                return False
        return True

    def require_safe_runtime_dir(self) -> None:
        """Raise BadSetting if the folder of the socket exists and another user could replace it."""
        require_private_dir(self.runtime_dir, "LOCALGEN_RUNTIME_DIR")

    def create_dirs(self) -> None:
        """Create both folders. Raises BadSetting if unsafe, not writable, or the path too long."""
        _require_short_path(self.socket_path)
        _require_xdg_dir(self.runtime_dir)
        make_private_dir(self.runtime_dir, "LOCALGEN_RUNTIME_DIR")
        self.create_state_dir()

    def create_state_dir(self) -> None:
        """Create the folder of sessions and logs. Raises BadSetting if unsafe or not writable."""
        make_private_dir(self.state_dir, "LOCALGEN_STATE_DIR")


def config_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder of the user's configuration files, which may not exist."""
    default = platformdirs.user_config_path("localgen", appauthor=False)
    return _dir_from_env(environ, "LOCALGEN_CONFIG_DIR") or default


def parse_keep_alive(text: str, variable: str = "LOCALGEN_KEEP_ALIVE") -> float | None:
    """Parse `30s`, `5m`, `1h` or a number of seconds. Returns None, no limit, if negative."""
    match = re.fullmatch(r"(-?\d{1,12}(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if match is None:
        raise BadSetting(
            f"{variable}={text}: give a time such as 30s, 5m, 1h, 0, or -1 for no limit",
            param="keep_alive",
        )
    amount = float(match[1]) * _DURATION_UNITS_S[match[2]]
    return amount if amount >= 0 else None


def parse_hang_timeout(text: str, variable: str = "LOCALGEN_HANG_TIMEOUT") -> float | None:
    """Parse a number of seconds. Returns None, no limit, for 0."""
    if re.fullmatch(r"\d{1,9}(\.\d+)?", text) is None:
        raise BadSetting(f"{variable}={text}: give a number of seconds, or 0 for no limit")
    return float(text) or None


def parse_size(text: str, variable: str) -> int:
    """Parse a number of bytes with an optional K, M, G or T (1024-based; `8G`, `8GB`, `8GiB`)."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise BadSetting(f"{variable}={text}: give a size such as 8G, 512M or a number of bytes")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def _parse_count(text: str, variable: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise BadSetting(f"{variable}={text}: give a whole number of at least 1")
    return int(text)


def _dir_from_env(environ: Mapping[str, str], variable: str) -> Path | None:
    text = environ.get(variable, "")
    if not text:
        return None
    folder = Path(text).expanduser()
    if not folder.is_absolute():
        raise BadSetting(f"{variable}={text}: give an absolute path")
    return folder


def _default_runtime_dir(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base and Path(base).is_absolute():
        return Path(base) / "localgen"
    with warnings.catch_warnings():
        # without XDG_RUNTIME_DIR it uses a folder in /tmp and warns; make_private_dir checks that
        # folder
        warnings.simplefilter("ignore")
        return platformdirs.user_runtime_path("localgen", appauthor=False)


def _require_xdg_dir(runtime_dir: Path, environ: Mapping[str, str] = os.environ) -> None:
    # the system creates that folder at login; root could create it anywhere
    base = Path(environ.get("XDG_RUNTIME_DIR", ""))
    is_used = not environ.get("LOCALGEN_RUNTIME_DIR") and runtime_dir.parent == base
    if is_used and not base.exists():
        raise BadSetting(
            f"XDG_RUNTIME_DIR={base} does not exist: unset it, or set LOCALGEN_RUNTIME_DIR to a "
            "folder you own"
        )


def _default_state_dir() -> Path:
    return platformdirs.user_state_path("localgen", appauthor=False)


def _require_short_path(socket_path: Path) -> None:
    size = len(os.fsencode(socket_path))
    if size > SOCKET_PATH_BYTES:
        raise BadSetting(
            f"{socket_path} has {size} bytes, a socket path may have {SOCKET_PATH_BYTES}: "
            "set LOCALGEN_RUNTIME_DIR to a shorter folder"
        )


def make_private_dir(folder: Path, variable: str) -> None:
    """Create a folder that only this user can access (0700), or check an existing one.

    variable: the setting that names it. Raises BadSetting if unsafe or not writable, DiskFull.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private_dir(folder, variable)
        if stat.S_IMODE(folder.stat().st_mode) != 0o700:  # a read-only one may be as it should be
            folder.chmod(0o700)
    except OSError as error:
        raise _unusable_dir(folder, variable, error) from error


def require_private_dir(folder: Path, variable: str) -> None:
    """Check that no other user can replace what is in a folder, if it exists.

    variable: the setting that names it. Raises BadSetting.
    """
    try:
        found = folder.lstat()
        if found.st_uid != os.getuid():
            raise BadSetting(
                f"{folder} belongs to another user: set {variable} to a folder you own"
            )
        if not stat.S_ISDIR(found.st_mode):
            raise BadSetting(f"{folder} is not a folder: set {variable} to one")
        if found.st_mode & 0o022:
            raise BadSetting(f"other users may write to {folder}: chmod 700 it, or set {variable}")
        _require_safe_parents(folder, variable)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable_dir(folder, variable, error) from error


def require_safe_links(path: Path, variable: str) -> None:
    """Check that no other user can replace the file that a link, or a chain of them, leads to.

    variable: the setting that names its folder. Raises BadSetting.
    """
    for _ in range(_MAX_LINKS):
        if not path.is_symlink():
            return
        link, path = path, path.parent / path.readlink()
        folder = path.parent.resolve()
        try:
            found = folder.stat()
            _require_safe_parents(folder, variable)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unusable_dir(folder, variable, error) from error
        # a store of packages: root's folder, in which no user can replace what another has
        is_store = found.st_uid == 0 and found.st_mode & stat.S_ISVTX
        writable = found.st_mode & (stat.S_IWOTH if is_store else 0o022)
        if writable or found.st_uid not in (0, os.getuid()):
            raise BadSetting(
                f"other users may write to {folder}, where {link} leads: chmod go-w it, or move "
                "the file"
            )
    raise BadSetting(f"{path}: too many symbolic links: remove it")


def _unusable_dir(folder: Path, variable: str, error: OSError) -> LocalgenError:
    reason = error.strerror or str(error)
    kind = DiskFull if error.errno in DISK_FULL_ERRNOS else BadSetting
    return kind(f"cannot use the folder {folder} ({reason}): set {variable}")


def _require_safe_parents(folder: Path, variable: str) -> None:
    # a user who may rename a parent folder could replace our socket by their own
    for parent in folder.resolve().parents:
        if _is_replaceable(parent.stat()):
            raise BadSetting(
                f"other users may replace {parent}: set {variable} to a folder you own"
            )


def _is_replaceable(parent: os.stat_result) -> bool:
    """Return True if another user may rename or remove the folder's contents."""
    if parent.st_uid == _OVERFLOW_UID != os.getuid():
        # in a rootless container, the owner is a user outside, who cannot act in here
        return bool(parent.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    replaceable = parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX
    return parent.st_uid not in (0, os.getuid()) or bool(replaceable)
