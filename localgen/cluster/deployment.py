"""The deployments of Ray Serve: a gateway, and the replicas behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from localgen.backends.errors import ServerUnavailable
from localgen.cluster.config import ClusterConfig
from localgen.cluster.gateway import Choice, Gateway
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
# a replica that leaves ends its answers first
_DRAIN_TIMEOUT_S = 600.0
_METRICS_INTERVAL_S, _LOOK_BACK_S, _UPSCALE_DELAY_S = 1.0, 3.0, 3.0
_ASK_TIMEOUT_S = 10.0


class GatewayServer:
    """The gateway as an actor, which listens itself: Serve's proxy would be one hop more."""

    async def __init__(self, config: ClusterConfig, replicas: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
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
        except (RayError, RayServeException, TimeoutError):
            return []  # there is no replica now
        return [answer for answer in answers if not isinstance(answer, Exception)]


def build_app(config: ClusterConfig) -> serve.Application:
    """The application of a cluster."""
    replicas = serve.deployment(
        name=REPLICAS,
        **_number_of_replicas(config),
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
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=_HEALTH_PERIOD_S,
    )(GatewayServer)
    return gateway.bind(config, replicas.bind(config))


def end_replicas() -> None:
    """Let all replicas end; without this, Serve would wait until their requests are answered."""
    replicas = serve.get_deployment_handle(REPLICAS, APP_NAME)
    with contextlib.suppress(RayError, RayServeException, TimeoutError):
        replicas.broadcast("end").results(timeout_s=_ASK_TIMEOUT_S, return_exceptions=True)


def _number_of_replicas(config: ClusterConfig) -> dict[str, Any]:
    """The arguments of serve.deployment that say how many replicas there are."""
    if config.max_replicas is None:
        return {"num_replicas": config.replicas}
    policy = {"target_requests": config.target_requests, "ttft_slo_ms": config.ttft_slo_ms}
    scaling = AutoscalingConfig(
        min_replicas=config.min_replicas,
        initial_replicas=config.replicas,
        max_replicas=config.max_replicas,
        metrics_interval_s=_METRICS_INTERVAL_S,
        look_back_period_s=_LOOK_BACK_S,
        upscale_delay_s=_UPSCALE_DELAY_S,
        downscale_delay_s=config.downscale_delay_s,
        policy=AutoscalingPolicy(
            policy_function="localgen.cluster.autoscaling:ScalingPolicy", policy_kwargs=policy
        ),
    )
    return {"autoscaling_config": scaling}


async def _refuse_to_listen() -> Listener:
    raise OSError("a cluster opens no private ports")
