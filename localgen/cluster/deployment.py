"""The deployments of Ray Serve: a gateway, and the replicas behind it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

import localgen
from localgen.backends.errors import ServerUnavailable
from localgen.cluster.config import MAX_PER_MACHINE, ClusterConfig, read_settings
from localgen.cluster.gateway import Choice, Gateway
from localgen.cluster.machines import Machines, require_version
from localgen.cluster.replica import EngineReplica
from localgen.cluster.totals import NO_REPLICA
from localgen.server.http.access import open_tcp_socket
from localgen.server.http.guard import GuardMiddleware
from localgen.server.http.private_ports import Listener, PrivatePorts
from localgen.server.http.rate_limit import RateLimiter
from localgen.server.serving import raise_open_file_limit, uvicorn_config

APP_NAME = "localgen"
REPLICAS, GATEWAY = "EngineReplica", "GatewayServer"
# the engines queue requests themselves
_MAX_ONGOING = 4096
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 10.0
_DRAIN_TIMEOUT_S = 15.0
_ASK_TIMEOUT_S = 10.0
# of a machine's resource `node:ADDRESS`, of which it has 1
_PART_OF_A_MACHINE = 0.001


class GatewayServer:
    """The gateway as an actor, which listens itself: Serve's proxy would be one hop more."""

    async def __init__(  # type: ignore[misc]
        self, config: ClusterConfig, version: str, replicas: DeploymentHandle[Any]
    ) -> None:
        require_version(version)
        access = config.access()
        self._replicas = replicas
        gateway = Gateway(self._choose, self._ask_all)
        ports = PrivatePorts(_refuse_to_listen)
        app = GuardMiddleware(gateway, access, RateLimiter(access.rate_limit), ports)
        raise_open_file_limit()
        self._server = uvicorn.Server(uvicorn_config(app))
        self._serving = asyncio.create_task(self._server.serve([open_tcp_socket(access)]))

    def check_health(self) -> None:
        """Raises RuntimeError if it no longer listens."""
        if self._serving.done():
            raise RuntimeError("the gateway no longer listens")

    @contextlib.asynccontextmanager
    async def _choose(
        self, chunks: Sequence[bytes], wanted: str | None, gone: frozenset[str]
    ) -> AsyncIterator[Choice]:
        """A slot of a replica. Raises ServerUnavailable if there is none and none is started."""
        chosen = self._replicas.get.choose_replica(tuple(chunks), wanted, gone)
        async with contextlib.AsyncExitStack() as stack:
            try:
                selection = await stack.enter_async_context(chosen)
            except (RayError, RayServeException) as error:
                raise ServerUnavailable(NO_REPLICA) from error
            yield Choice(selection.replica_id, selection.replica_metadata["url"])

    async def _ask_all(self, path: str) -> Sequence[tuple[str, bytes]]:
        asked = self._replicas.broadcast("get", path)
        try:
            answers = await asked.results_async(timeout_s=_ASK_TIMEOUT_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            raise ServerUnavailable(NO_REPLICA) from error
        return [answer for answer in answers if not isinstance(answer, Exception)]


def build_app(config: ClusterConfig, machines: Machines | None = None) -> serve.Application:
    """The application of a cluster. machines: spread it over them; by default, Ray chooses."""
    resources, most = {}, config.replicas_per_machine
    if machines is not None:
        resources = {f"node:{machines.gateway}": _PART_OF_A_MACHINE}
        if most is None:
            most = min(MAX_PER_MACHINE, math.ceil(config.replicas / machines.count))
    replicas = serve.deployment(
        name=REPLICAS,
        num_replicas=config.replicas,
        max_replicas_per_node=most,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=_DRAIN_TIMEOUT_S,
        request_router_config=RequestRouterConfig(
            request_router_class="localgen.cluster.router.PrefixRouter",
            request_router_kwargs={"spill": config.spill},
        ),
    )(EngineReplica)
    gateway = serve.deployment(
        name=GATEWAY,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": 0, "resources": resources},
        health_check_period_s=_HEALTH_PERIOD_S,
    )(GatewayServer)
    version = localgen.__version__
    return gateway.bind(config, version, replicas.bind(config, version))


def build_from_args(args: dict[str, Any]) -> serve.Application:
    """The application for a configuration file of Ray Serve, as RayService of KubeRay takes it.

    args: the keys of a cluster.toml, with absolute paths; the cluster is the one that runs it.
    Raises BadSetting that names the key.
    """
    return build_app(read_settings({"address": "auto"} | args, "args", Path("/")))


async def _refuse_to_listen() -> Listener:
    raise OSError("a cluster opens no private ports")
