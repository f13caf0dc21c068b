"""The file of a cluster, cluster.toml, and its options."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from localgen.backends.errors import LocalgenError
from localgen.backends.memory.load_limits import validate_load_options
from localgen.backends.model_info import LoadOptions
from localgen.config import (
    DEFAULT_KEEP_ALIVE_S,
    BadSetting,
    ServerSettings,
    parse_keep_alive,
    parse_size,
)
from localgen.hub.packaged import default_model
from localgen.hub.resolve import did_you_mean, draft_for_server, name_for_server
from localgen.server.http.access import (
    DEFAULT_PORT,
    MAX_BODY_BYTES,
    AccessPolicy,
    is_loopback,
    parse_rate_limit,
    read_api_keys,
)
from localgen.server.openai.schema import LoadRequest

# the names of the deployments in Ray Serve
REPLICAS, PROMPT_REPLICAS, GATEWAY = "EngineReplica", "PromptReplica", "GatewayServer"
MAX_REPLICAS = 1000
# the most that Ray Serve takes
MAX_PER_MACHINE = 100
_TYPE_NAMES: dict[type, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
_TOML_TYPES = {each.__name__: each for each in _TYPE_NAMES}
# meaningless without max_replicas
_AUTOSCALING = ("min_replicas", "target_requests", "ttft_slo_ms", "downscale_delay_s")
# of localgen's servers, which another engine does not have
_SERVER_KEYS = ("timeout_s", "hang_timeout_s", "keep_alive", "stabilize", "record_trace")
_PATHS = ("api_key_file", "record_trace")
_MAX_COUNT, _MAX_MS, _MAX_GPUS = 1 << 16, 1 << 31, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A cluster: replicas of one server behind a gateway.

    model: loaded by each replica at its start, and the default of requests that name none; None for
    that of with_default_model(). load: how. replicas: engines at the start. host, port: of the
    gateway. allow_host: names by which clients call it, separated by commas, besides those of its
    machine.
    cors_origin, rate_limit, max_body and _SERVER_KEYS: as the options of `localgen serve`; origins
    are separated by commas.
    api_key_file, record_trace: absolute, or None without. spill: how many requests more than the
    least loaded replica the one with a prompt's prefix may have. share_prefixes: replicas fetch
    from each other what another has computed. prompt_replicas: that compute long prompts for the
    others.
    command: of another engine with {host} and {port}, which replicas run instead of localgen.

    address: of a Ray cluster that runs, or None to start one here. replicas_per_machine: the most
    on one machine of it; None to divide them among the machines that are there at the start.
    gpus_per_replica: GPUs that Ray gives to each replica alone; with 0, all replicas see all.

    max_replicas: with it, their number changes with the load: see ScalingPolicy for target_requests
    and ttft_slo_ms. downscale_delay_s: for how long one is not needed before it leaves.
    """

    model: str | None = None
    replicas: int = 2
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key_file: str | None = None
    spill: int = 4
    address: str | None = None
    command: str | None = None
    load: LoadOptions = LoadOptions()
    share_prefixes: bool = True
    prompt_replicas: int = 0
    min_replicas: int = 1
    max_replicas: int | None = None
    target_requests: int = 4
    ttft_slo_ms: int | None = None
    downscale_delay_s: int = 60
    allow_host: str | None = None
    cors_origin: str | None = None
    rate_limit: str | None = None
    max_body: str | None = None
    timeout_s: float | None = None
    keep_alive: str | None = None
    hang_timeout_s: float | None = None
    stabilize: bool = False
    record_trace: str | None = None
    replicas_per_machine: int | None = None
    gpus_per_replica: int = 0

    def __post_init__(self) -> None:
        _require_count("replicas", self.replicas, 1, MAX_REPLICAS)
        _require_count("port", self.port, 1, 65535)
        _require_count("spill", self.spill, 0, _MAX_COUNT)
        validate_load_options(self.load)
        for name in ("kv_listen", "kv_peer"):
            if getattr(self.load, name):
                raise BadSetting(f"load.{name} is set by the cluster: see share_prefixes")
        _require_count("prompt_replicas", self.prompt_replicas, 0, MAX_REPLICAS)
        if self.command is not None:
            self._require_for_command()
        if self.prompt_replicas and not self.share_prefixes:
            raise BadSetting("prompt_replicas need share_prefixes, by which prompts are handed on")
        _require_count("gpus_per_replica", self.gpus_per_replica, 0, _MAX_GPUS)
        for name, least in (("timeout_s", 0.001), ("hang_timeout_s", 0.0)):
            if (value := getattr(self, name)) is not None:
                _require_count(name, value, least, _MAX_COUNT)
        if self.keep_alive is not None:
            parse_keep_alive(self.keep_alive, "keep_alive")
        self.max_body_bytes()
        self.token_limit()
        if self.replicas_per_machine is not None:
            _require_count("replicas_per_machine", self.replicas_per_machine, 1, MAX_PER_MACHINE)
            if self.address is None:
                raise BadSetting("replicas_per_machine is for a Ray cluster that runs: set address")
        self._require_autoscaling()

    def _require_autoscaling(self) -> None:
        _require_count("target_requests", self.target_requests, 1, _MAX_COUNT)
        _require_count("downscale_delay_s", self.downscale_delay_s, 1, _MAX_COUNT)
        if self.max_replicas is None:
            self._require_defaults(*_AUTOSCALING)
            return
        _require_count("max_replicas", self.max_replicas, 1, MAX_REPLICAS)
        _require_count("min_replicas", self.min_replicas, 0, MAX_REPLICAS)
        if self.min_replicas > self.max_replicas:
            raise BadSetting(
                f"min_replicas ({self.min_replicas}) is more than max_replicas "
                f"({self.max_replicas})"
            )
        if not self.min_replicas <= self.replicas <= self.max_replicas:
            raise BadSetting(
                f"replicas, those at the start, are {self.replicas}: give a number from "
                f"min_replicas ({self.min_replicas}) to max_replicas ({self.max_replicas})"
            )
        if self.ttft_slo_ms is not None:
            _require_count("ttft_slo_ms", self.ttft_slo_ms, 1, _MAX_MS)

    def _require_for_command(self) -> None:
        """Raise BadSetting for what another engine than localgen does not do."""
        self.engine_command("", 0)
        if self.model is None:
            raise BadSetting("command needs model: the name by which clients ask for it")
        if self.load != LoadOptions():
            raise BadSetting("load options are for localgen's own engines: put them into command")
        if self.token_limit():
            raise BadSetting("rate_limit: tokens are counted by localgen's own engines only")
        for name in ("ttft_slo_ms", "prompt_replicas", *_SERVER_KEYS):
            if getattr(self, name):
                raise BadSetting(f"{name} is for localgen's own engines, not for command")

    def _require_defaults(self, *names: str) -> None:
        """Raise BadSetting for a setting of autoscaling, if there is none."""
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise BadSetting(f"{field.name} is for a number that changes: set max_replicas")

    @classmethod
    def from_json(cls, text: str) -> ClusterConfig:
        """Read what to_json() has written."""
        values = json.loads(text)
        return cls(**values | {"load": LoadOptions(**values["load"])})

    @property
    def num_gpus(self) -> int:
        """GPUs that all replicas at the start need."""
        return self.gpus_per_replica * (self.replicas + self.prompt_replicas)

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(asdict(self))

    def access(self) -> AccessPolicy:
        """The access policy of the gateway. Raises BadSetting if it is insecure."""
        keys = read_api_keys(Path(self.api_key_file)) if self.api_key_file else ()
        if not keys and not is_loopback(self.host):
            raise BadSetting(
                f"{self.host} is reachable from other machines: give --api-key-file (api_key_file "
                "in the file), or listen on 127.0.0.1"
            )
        policy = AccessPolicy(
            host=self.host,
            port=self.port,
            keys=keys,
            cors_origins=_listed(self.cors_origin),
            allowed_hosts=_listed(self.allow_host),
            rate_limit=parse_rate_limit(self.rate_limit or "0"),
            max_body_bytes=self.max_body_bytes(),
        )
        policy.validate()
        if self.address is not None and not keys:
            raise BadSetting(
                "replicas on other machines must not answer anybody: with --address, give "
                "--api-key-file, at the same path on each machine"
            )
        return policy

    def max_body_bytes(self) -> int:
        """Of a request. Raises BadSetting."""
        return parse_size(self.max_body, "max_body") if self.max_body else MAX_BODY_BYTES

    def token_limit(self) -> int | None:
        """Tokens per minute and account, or None. Raises BadSetting."""
        return parse_rate_limit(self.rate_limit or "0").tokens

    def server_settings(self, settings: ServerSettings) -> ServerSettings:
        """The settings of a replica's server. settings: those of its environment.

        The model of the cluster stays loaded, unless a time is set.
        """
        if self.keep_alive is None and settings.keep_alive_s == DEFAULT_KEEP_ALIVE_S:
            settings = replace(settings, keep_model=True)
        elif self.keep_alive is not None:
            settings = replace(settings, keep_alive_s=parse_keep_alive(self.keep_alive))
        if self.hang_timeout_s is not None:
            settings = replace(settings, hang_timeout_s=self.hang_timeout_s or None)
        trace = Path(self.record_trace) if self.record_trace else None
        return replace(settings, record_trace=trace)

    def engine_command(self, host: str, port: int) -> tuple[str, ...]:
        """The words of `command` for an engine that listens there; none without one.

        Raises BadSetting if it is no command or names no port.
        """
        if self.command is None:
            return ()
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise BadSetting(f"command: {error}") from error
        if "{port}" not in self.command:
            raise BadSetting("command must say where to listen: --host {host} --port {port}")
        return tuple(word.replace("{host}", host).replace("{port}", str(port)) for word in words)

    def with_options(self, **options: Any) -> ClusterConfig:
        """The options of the command line that are not None replace those of the file.

        Relative paths of models start in the current folder.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if "model" in given and self.command is None:
            given["model"] = name_for_server(given["model"])
        if "load" in given:
            draft = draft_for_server(given["load"].draft)
            asked = asdict(replace(given["load"], draft=draft))
            changed = {k: v for k, v in asked.items() if v is not None}
            given["load"] = replace(self.load, **changed)
        return replace(self, **given)

    def with_default_model(self) -> ClusterConfig:
        """With the default model of this machine if there is none, so that all machines have it."""
        if self.model is not None:
            return self
        return replace(self, model=name_for_server(default_model()))


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
    found = dict(found)
    load = found.pop("load", {})
    types = {
        each.name: _TOML_TYPES[str(each.type).split()[0]]
        for each in fields(ClusterConfig)
        if each.name != "load"
    }
    for name, value in found.items():
        if name not in types:
            raise BadSetting(f"{place}: unknown key {name!r}{_instead_of(name, types)}")
        if type(value) not in (types[name], int if types[name] is float else types[name]):
            kind = _TYPE_NAMES[types[name]]
            raise BadSetting(f"{place}: {name} must be {kind}, not {value!r}")
    settings = dict(found)
    for name in settings.keys() & _PATHS:
        settings[name] = str((folder / settings[name]).absolute())
    try:
        read = _read_load_options(load)
        if "command" not in settings:
            settings["model"] = name_for_server(settings.get("model"), folder)
        read = replace(read, draft=draft_for_server(read.draft, folder))
        return ClusterConfig(**settings, load=read)
    except LocalgenError as error:
        raise BadSetting(f"{place}: {error.message}") from error


def _instead_of(name: str, types: Iterable[str]) -> str:
    """What may be meant by a key that there is not."""
    if name in {each.name for each in fields(LoadOptions)}:
        return ": it is a load option: put it under [load]"
    keys = [*types, "load"]
    hint = did_you_mean(name, {key: key for key in keys})
    return f".{hint}" if hint else f": there are {', '.join(sorted(keys))}"


def _read_load_options(table: Any) -> LoadOptions:
    """Raises BadSetting or InvalidRequest that names the option."""
    if not isinstance(table, dict):
        raise BadSetting(f"load must be a table of load options, not {table!r}")
    sizes = {
        name: parse_size(value, f"load.{name}")
        for name, value in table.items()
        if name in ("kv_ram", "kv_disk") and isinstance(value, str)
    }
    return LoadRequest(options=table | sizes).to_load_options()


def _listed(text: str | None) -> tuple[str, ...]:
    """The words of a text that are separated by commas."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _require_count(name: str, value: float, least: float, most: int) -> None:
    if not least <= value <= most:
        raise BadSetting(f"{name} must be {least} to {most}, not {value}")
