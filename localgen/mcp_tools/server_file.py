"""mcp.toml: the user's MCP servers. Only the one in the user's configuration folder is read.

[files]
command = "npx"
args = ["-y", "@modelcontextprotocol/server-filesystem", "/home/me/notes"]

[tickets]
url = "https://tickets.example/mcp"
headers = { Authorization = "Bearer ${TICKETS_TOKEN}" }
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.config import BadSetting, config_dir, require_private_dir, require_safe_links
from localgen.toml_store import TomlStore

CALL_TIMEOUT_S = 60.0
_DIR_VARIABLE = "LOCALGEN_CONFIG_DIR"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server: a program that speaks MCP on stdin and stdout, or a URL of streamable HTTP.

    command: the program and its arguments; empty if there is a url. env, headers: values as
    written, where ${NAME} means a variable of the environment. cwd: folder of the program; empty
    for the user's home folder. tools: patterns of the tools that are offered. timeout_s: of a call.
    """

    name: str
    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    tools: tuple[str, ...] = ("*",)
    timeout_s: float = CALL_TIMEOUT_S

    @property
    def place(self) -> str:
        """The program, or the URL without name and query, for messages to the user."""
        if self.command:
            return shlex.join(self.command)
        return f"{self.origin}{urlsplit(self.url).path}"

    @property
    def origin(self) -> str:
        """The host of the URL, for messages that the model reads: the path may have a key."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    @property
    def is_unencrypted(self) -> bool:
        """Whether what is sent can be read on the network: http, and not to this machine."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        try:
            is_here = ip_address(host).is_loopback
        except ValueError:  # a name
            is_here = host == "localhost"
        return parts.scheme == "http" and not is_here

    def program(self) -> str:
        """The absolute path of the program.

        Relative entries of PATH are not searched: they are in the current folder, whose programs
        must not run by themselves. Raises BadSetting if the program is not found.
        """
        name = self.command[0]
        entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
        found = shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, entries)))
        if found is None:
            raise BadSetting(f"MCP server {self.name}: the program {name} was not found")
        return found

    def folder(self) -> str:
        """The folder that the program runs in. Raises BadSetting if it does not exist."""
        folder = Path(self.cwd).expanduser() if self.cwd else Path.home()
        if not folder.is_dir():
            raise BadSetting(f"MCP server {self.name}: the folder {folder} does not exist")
        return str(folder)

    def expanded(self, values: Mapping[str, str]) -> dict[str, str]:
        """Environment or headers with their variables replaced. Raises BadSetting if one is not
        set."""

        def value_of(match: re.Match[str]) -> str:
            if match[1] not in os.environ:
                raise BadSetting(f"MCP server {self.name} needs {match[1]}, which is not set")
            return os.environ[match[1]]

        return {name: _VARIABLE.sub(value_of, text) for name, text in values.items()}

    def to_table(self) -> dict[str, Any]:
        """Its fields in mcp.toml, without the defaults."""
        command, *args = self.command or ("",)
        default = McpServer("")
        table = {
            "command": command,
            "args": args,
            "url": self.url,
            "env": dict(self.env),
            "headers": dict(self.headers),
            "cwd": self.cwd,
            "tools": [] if self.tools == default.tools else list(self.tools),
            "timeout": 0 if self.timeout_s == default.timeout_s else self.timeout_s,
        }
        return {name: value for name, value in table.items() if value}


def servers_path() -> Path:
    """Path of the file, which may not exist."""
    return config_dir() / "mcp.toml"


def read_servers() -> dict[str, McpServer | BadSetting]:
    """The servers by name; the error instead of one whose table is invalid.

    Raises BadSetting if the file is invalid, or if another user could have written it: it names
    programs to run.
    """
    path = servers_path()
    require_private_dir(path.parent, _DIR_VARIABLE)
    require_safe_links(path, _DIR_VARIABLE)
    try:
        found = path.stat() if path.exists() else None
    except OSError as error:
        raise BadSetting(f"{path}: {error}: correct it or remove it") from error
    if found is not None and found.st_mode & 0o022:
        raise BadSetting(f"{path} is writable by other users: chmod 600 it")
    if found is not None and found.st_uid not in (0, os.getuid()):
        raise BadSetting(f"{path} belongs to another user: remove it")
    return {name: _parse(path, name, table) for name, table in _store().read().items()}


def server_names() -> list[str]:
    """The names, for completion; none if the file cannot be read."""
    try:
        return list(read_servers())
    except LocalgenError:
        return []


def find_server(name: str) -> McpServer:
    """Raises InvalidRequest if there is none of that name, BadSetting if its table or the file is
    invalid."""
    known = read_servers()
    found = known.get(name)
    if found is None:
        raise _unknown(name, known)
    if isinstance(found, BadSetting):
        raise found
    return found


def add_server(server: McpServer) -> None:
    """Save a server. Raises InvalidRequest if a value is invalid or its name is taken."""
    validate_server(server)
    store = _store()
    with store.locked():
        found = read_servers().get(server.name)
        if found is not None:
            place = found.place if isinstance(found, McpServer) else "its table is invalid"
            raise InvalidRequest(
                f"MCP server {server.name} already exists ({place}): "
                f"remove it with localgen mcp rm {server.name}"
            )
        store.change(lambda document: document.update({server.name: server.to_table()}))


def remove_server(name: str) -> McpServer | None:
    """Remove a server and return it, or None if its table was invalid.

    Raises InvalidRequest if there is none.
    """
    store = _store()
    with store.locked():
        known = read_servers()
        if name not in known:
            raise _unknown(name, known)
        store.change(lambda document: document.pop(name))
    removed = known[name]
    return removed if isinstance(removed, McpServer) else None


def _unknown(name: str, known: Iterable[str]) -> InvalidRequest:
    names = ", ".join(known)
    told = f"servers are {names}" if names else "none is defined"
    return InvalidRequest(f"no MCP server {name}: {told} (localgen mcp add)")


def validate_server(server: McpServer) -> None:
    """Raise InvalidRequest, which names the value, if one is invalid."""
    if not _NAME.fullmatch(server.name):
        raise InvalidRequest(f"invalid name {server.name!r}: use up to 32 letters, digits, - and _")
    if bool(server.command) == bool(server.url):
        raise InvalidRequest("give either a command or a url")
    if server.command:
        _validate_command(server)
    else:
        _validate_url(server)
    if not server.tools or not all(server.tools):
        raise InvalidRequest('tools: give patterns of names, such as ["read_*"]')
    if not 0 < server.timeout_s <= 86_400:
        raise InvalidRequest(f"timeout is {server.timeout_s:g}: give 1 to 86400 seconds")


def _validate_command(server: McpServer) -> None:
    program = server.command[0]
    if not program.strip() or any("\0" in part for part in server.command):
        raise InvalidRequest("command: give a program")
    if os.sep in program and not os.path.isabs(program):
        raise InvalidRequest(f"command: {program} depends on the current folder: give a whole path")
    try:
        is_absolute = not server.cwd or Path(server.cwd).expanduser().is_absolute()
    except RuntimeError:  # a user who does not exist
        is_absolute = False
    if not is_absolute:
        raise InvalidRequest(f"cwd: {server.cwd} is not a whole path")
    if server.headers:
        raise InvalidRequest("headers are only for a url")
    if bad := next((name for name in server.env if not name or "=" in name), None):
        raise InvalidRequest(f"env: {bad!r} is not the name of a variable")


def _validate_url(server: McpServer) -> None:
    try:
        parts = urlsplit(server.url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unclosed bracket or an invalid port
        is_valid = False
    if not is_valid or not server.url.isprintable() or " " in server.url:
        raise InvalidRequest("url: give the URL of a server, such as https://host/mcp")
    if server.env or server.cwd:
        raise InvalidRequest(f"{'env' if server.env else 'cwd'} is only for a command")
    for name, value in server.headers.items():
        if not _HEADER_NAME.fullmatch(name) or not value.isprintable():
            raise InvalidRequest(f"headers: {name!r} is not a valid header")


def _store() -> TomlStore:
    return TomlStore(servers_path(), _DIR_VARIABLE)


def _parse(path: Path, name: str, table: object) -> McpServer | BadSetting:
    """The server, or what is wrong with its table."""
    import msgspec

    class Fields(msgspec.Struct, forbid_unknown_fields=True):
        command: str = ""
        args: tuple[str, ...] = ()
        url: str = ""
        env: dict[str, str] = {}
        headers: dict[str, str] = {}
        cwd: str = ""
        tools: tuple[str, ...] = ("*",)
        timeout: float = CALL_TIMEOUT_S

    try:
        read = msgspec.convert(table, Fields)
        command = (read.command, *read.args) if read.command else ()
        server = McpServer(
            name, command, read.url, read.env, read.headers, read.cwd, read.tools, read.timeout
        )
        validate_server(server)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).replace("`", "").partition(" - at $.")
        known = f"; fields are {', '.join(Fields.__struct_fields__)}" if "unknown" in reason else ""
        place = f"{where}: " if where else ""
        return BadSetting(f"{path}: {name}: {place}{reason}{known}")
    except InvalidRequest as error:
        return BadSetting(f"{path}: {name}: {error.message}")
    return server
