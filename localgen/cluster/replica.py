"""The actor of a replica: starts its server, watches it, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import httpx

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.cluster.autoscaling import scaling_stats
from localgen.cluster.config import GATEWAY, ClusterConfig
from localgen.cluster.machines import Build, require_version
from localgen.cluster.managing import ReplicaRequest
from localgen.cluster.model_download import ensure_installed
from localgen.cluster.other_engine import engine_stats, kill_session, loads_of
from localgen.cluster.posted import Place, Posted
from localgen.cluster.replica_server import ReplicaOptions
from localgen.cluster.route import KV_ADDRESS, KV_ADDRESSES, URL, routing_stats
from localgen.cluster.running import REPLICA_DIRS
from localgen.cluster.token_charges import TokenCharges, Totals
from localgen.config import ServerSettings
from localgen.hub.models_file import read_models_file
from localgen.machine.python_process import python_command, python_environment
from localgen.server.http.access import host_and_port
from localgen.server.requests.caller import GATEWAY_HEADER
from localgen.server.requests.protocol import encode_json
from localgen.server.stats import loads

_START_TIMEOUT_S = 600.0
_POLL_S = 0.1
_LOOPBACK = "127.0.0.1"
_HEALTH_TIMEOUT_S = 5.0
# for its requests to end; the server itself gives them five seconds, another engine ten
_END_TIMEOUT_S = 15.0
# of another engine than localgen, which has none
_OWN_STATS = frozenset({"/v1/stats", loads.PATH})


class ReplicaFailed(RuntimeError):
    """The server of a replica does not start, or has ended."""


class EngineReplica:
    """A localgen server with its engines, as an actor of Ray Serve.

    config, build: of the cluster. Ray calls __init__, check_health, record_*
    and __del__.
    """

    async def __init__(self, config: ClusterConfig, build: Build) -> None:  # type: ignore[misc]
        require_version(build.version)
        import ray
        from ray import serve

        access = config.access()
        self.name = serve.get_replica_context().replica_id.unique_id
        node = ray.get_runtime_context().get_node_id()
        self._place = Place(self.name, socket.gethostname(), node)
        self._host = _LOOPBACK if config.address is None else _own_address()
        self._port = _free_port(self._host)
        self._headers = {"Authorization": f"Bearer {access.keys[0]}"} if access.keys else {}
        self._runtime_dir = ServerSettings.from_environment().runtime_dir / REPLICA_DIRS.replace(
            "*", self.name
        )
        self._runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._is_ending, self._secret = False, build.secret
        self._charges = TokenCharges(self._read_tokens, self._charge)
        self._charging: asyncio.Task[object] | None = None
        self._model, self._command = config.model or "", config.command
        self._needs_metrics = config.command is not None and config.max_replicas is not None
        self._health_path = "/livez" if config.command is None else "/health"
        shares = config.share_prefixes and config.command is None
        kv_listen = self._kv_listen() if shares else ""
        await self._install(config)
        self._server = self._start(config, access.keys, kv_listen)
        self._client = httpx.AsyncClient(base_url=self.url, headers=self._headers)
        await self._wait_until_ready()
        stats = await self.record_routing_stats()
        self._kv_address = stats[KV_ADDRESSES].get("", "")
        if shares and not self._kv_address:
            print("prefixes of this model cannot be shared: see `localgen show`", file=sys.stderr)
        if config.token_limit() is not None:
            self._charging = asyncio.create_task(self._charges.run())

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    def record_replica_metadata(self) -> dict[str, str]:
        """For gateways; see route.py. Ray asks once, when it is ready."""
        return {URL: self.url, KV_ADDRESS: self._kv_address}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Its models, and which prompts it holds and where, for routers."""
        own_names: dict[str, str] = {}
        with contextlib.suppress(LocalgenError):  # the server reports a damaged file
            own_names = (await asyncio.to_thread(read_models_file)).models
        return routing_stats(await self._stats({GATEWAY_HEADER: self._secret}), own_names)

    async def check_health(self) -> None:
        """Raises ReplicaFailed if the server has ended, or an error of httpx if it hangs."""
        if self._is_ending:
            return
        self._require_running()
        reply = await self._client.get(self._health_path, timeout=_HEALTH_TIMEOUT_S)
        reply.raise_for_status()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Its load, for ScalingPolicy."""
        return scaling_stats(await self._stats())

    async def get(self, path: str) -> tuple[str, bytes]:
        """Its name, and the body of a GET of its server. Raises httpx.HTTPError without one."""
        if self._command is not None and path in _OWN_STATS:
            stats = await self._stats()
            body = stats if path == "/v1/stats" else loads_of(stats)
            return self.name, encode_json(body)
        reply = await self._client.get(path, timeout=_HEALTH_TIMEOUT_S)
        reply.raise_for_status()
        return self.name, reply.content

    async def place(self) -> Place:
        return self._place

    async def send(self, request: ReplicaRequest, receivers: Collection[Place]) -> Posted | None:
        """Send a request to its server if it is for this replica, and log a refusal.

        Returns None if it is for others.
        """
        if self._place not in receivers:
            return None
        reply = await self._client.request(
            request.method,
            request.path,
            content=request.body,
            headers={"Content-Type": "application/json"},
            timeout=None,
        )
        posted = Posted(self._place, reply.status_code, reply.content)
        if not posted.is_success:
            print(f"error: {request.path}: {posted.message}", file=sys.stderr)
        return posted

    async def end(self) -> None:
        """Let the server end: its requests have a few seconds, and then an error event. Waits."""
        self._close_pipe()
        await asyncio.to_thread(self._server.wait)

    def _close_pipe(self) -> None:
        self._is_ending = True
        if self._charging is not None:
            self._charging.cancel()
        assert self._server.stdin is not None
        self._server.stdin.close()

    def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is None:
            return
        if self._charging is not None and not self._is_ending:
            self._charge_rest()
        self._close_pipe()
        try:
            server.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()
        kill_session(server.pid)
        with contextlib.suppress(OSError):
            shutil.rmtree(self._runtime_dir)

    async def _read_tokens(self) -> Totals:
        """The tokens of each account since the start."""
        stats = await self._stats({GATEWAY_HEADER: self._secret})
        tokens: dict[str, int] = stats["tokens_by_account"]
        return tokens

    async def _charge(self, tokens: Totals) -> None:
        from ray import serve

        # waits for a gateway that starts anew, and fails if the one that was asked ends
        await serve.get_deployment_handle(GATEWAY).charge.remote(tokens)

    def _charge_rest(self) -> None:
        """Charge the tokens of the last second; for __del__, which may not await anything."""
        from ray import serve

        headers = self._headers | {GATEWAY_HEADER: self._secret}
        try:
            stats = httpx.get(f"{self.url}/v1/stats", headers=headers).json()
            if new := self._charges.new_tokens(stats["tokens_by_account"]):
                serve.get_deployment_handle(GATEWAY).charge.remote(new)
        except Exception as error:  # the server must end all the same
            print(f"the last tokens are not charged: {one_line(str(error))}", file=sys.stderr)

    async def _stats(self, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        if self._command is not None:
            reply = await self._client.get("/metrics", timeout=_HEALTH_TIMEOUT_S)
            metrics = reply.text if reply.is_success else ""
            return engine_stats(self._model, self._server.pid, metrics)
        reply = await self._client.get("/v1/stats", headers=headers, timeout=_HEALTH_TIMEOUT_S)
        stats: dict[str, Any] = reply.json()
        return stats

    async def _install(self, config: ClusterConfig) -> None:
        """Download the model if it is not installed. Raises ReplicaFailed if that fails."""

        def say(line: str) -> None:
            print(line, file=sys.stderr)

        try:
            await asyncio.to_thread(ensure_installed, config, say)
        except LocalgenError as error:
            say(f"error: {one_line(error.message)}")
            raise ReplicaFailed(error.message) from error

    def _kv_listen(self) -> str:
        """Where other replicas fetch prefixes: on other machines too, if there may be some."""
        if self._host == _LOOPBACK:
            return f"{self._runtime_dir}/"
        return host_and_port(self._host, 0)

    def _start(
        self, config: ClusterConfig, keys: tuple[str, ...], kv_listen: str
    ) -> subprocess.Popen[bytes]:
        options = ReplicaOptions(
            config=config.to_json(),
            host=self._host,
            port=self._port,
            keys=keys,
            kv_listen=kv_listen,
            secret=self._secret,
        )
        server = subprocess.Popen(
            python_command("localgen.cluster.replica_server"),
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            start_new_session=True,
            env=python_environment() | {"LOCALGEN_RUNTIME_DIR": str(self._runtime_dir)},
        )
        assert server.stdin is not None
        server.stdin.write(json.dumps(asdict(options)).encode() + b"\n")
        server.stdin.flush()
        return server

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            self._require_running()
            with contextlib.suppress(httpx.HTTPError):
                reply = await self._client.get("/health")
                if reply.is_success:
                    break
            await asyncio.sleep(_POLL_S)
        else:
            raise ReplicaFailed(f"the server of replica {self.name} is not ready")
        if self._needs_metrics and not (await self._client.get("/metrics")).is_success:
            print("error: the engine has no /metrics, which max_replicas needs", file=sys.stderr)
            raise ReplicaFailed("the engine has no /metrics")

    def _require_running(self) -> None:
        if (status := self._server.poll()) is not None:
            kill_session(self._server.pid)
            raise ReplicaFailed(f"the server of replica {self.name} ended with status {status}")


def _free_port(host: str) -> int:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # of the interface that the others reach
