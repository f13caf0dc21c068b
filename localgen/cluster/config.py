"""The file of a cluster, cluster.toml, and its options."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from localgen.config import BadSetting
from localgen.server.http.access import DEFAULT_PORT, AccessPolicy, read_api_keys

MAX_REPLICAS = 1000
# the most that Ray Serve takes
MAX_PER_MACHINE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A cluster: replicas of one server behind a gateway.

    model: loaded by each replica at its start, and the default of requests that name none; None for
    the built-in default. replicas: engines. host, port: of the gateway. api_key_file: absolute, or
    None without keys. spill: how many requests more than the least loaded replica the one with a
    prompt's prefix may have. address: of a Ray cluster that runs, or None to start one here.
    allow_host: names by which clients call the gateway, separated by commas, besides those of its
    machine. replicas_per_machine: the most on one machine of the Ray cluster at address; None to
    divide them among the machines that are there at the start.
    """

    model: str | None = None
    replicas: int = 2
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key_file: str | None = None
    spill: int = 4
    address: str | None = None
    allow_host: str | None = None
    replicas_per_machine: int | None = None

    def __post_init__(self) -> None:
        _require_count("replicas", self.replicas, 1, MAX_REPLICAS)
        _require_count("port", self.port, 1, 65535)
        _require_count("spill", self.spill, 0, 1 << 16)
        if self.replicas_per_machine is not None:
            _require_count("replicas_per_machine", self.replicas_per_machine, 1, MAX_PER_MACHINE)
            if self.address is None:
                raise BadSetting("replicas_per_machine is for a Ray cluster that runs: set address")

    def access(self) -> AccessPolicy:
        """The access policy of the gateway. Raises BadSetting if it is insecure."""
        keys = read_api_keys(Path(self.api_key_file)) if self.api_key_file else ()
        names = [name.strip() for name in (self.allow_host or "").split(",")]
        policy = AccessPolicy(
            host=self.host,
            port=self.port,
            keys=keys,
            allowed_hosts=tuple(name for name in names if name),
        )
        policy.validate()
        if self.address is not None and not keys:
            raise BadSetting(
                "replicas on other machines must not answer anybody: with --address, give "
                "--api-key-file, at the same path on each machine"
            )
        return policy

    def with_options(self, **options: Any) -> ClusterConfig:
        """The options of the command line that are not None replace those of the file."""
        return replace(
            self, **{name: value for name, value in options.items() if value is not None}
        )


def read_cluster_file(path: Path) -> ClusterConfig:
    """Read a cluster.toml. Raises BadSetting that names the line or the key."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSetting(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"{path}: {error}") from error
    return read_settings(found, str(path), path.parent)


def read_settings(found: Mapping[str, Any], place: str, folder: Path) -> ClusterConfig:
    """The configuration of the keys of a cluster.toml. Raises BadSetting that names place and key.

    folder: relative paths start there.
    """
    types = {each.name: str if "str" in str(each.type) else int for each in fields(ClusterConfig)}
    for name, value in found.items():
        if name not in types:
            raise BadSetting(f"{place}: unknown key {name!r}: there are {', '.join(sorted(types))}")
        if type(value) is not types[name]:
            kind = "a string" if types[name] is str else "a whole number"
            raise BadSetting(f"{place}: {name} must be {kind}, not {value!r}")
    settings = dict(found)
    if "api_key_file" in settings:
        settings["api_key_file"] = str((folder / settings["api_key_file"]).absolute())
    try:
        return ClusterConfig(**settings)
    except BadSetting as error:
        raise BadSetting(f"{place}: {error.message}") from error


def _require_count(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadSetting(f"{name} must be {least} to {most}, not {value}")
