"""The deployments of Ray Serve: a gateway, and the replicas behind it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import uvicorn
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

import localgen
from localgen.backends.errors import LoadFailed, LocalgenError, ServerUnavailable
from localgen.cluster.broadcast import call_each
from localgen.cluster.config import (
    GATEWAY,
    MAX_PER_MACHINE,
    PROMPT_REPLICAS,
    REPLICAS,
    ClusterConfig,
    read_settings,
)
from localgen.cluster.gateway import Gateway
from localgen.cluster.machines import Build, Machines, require_version
from localgen.cluster.managing import ReplicaRequest
from localgen.cluster.model_download import model_name
from localgen.cluster.posted import Place, Posted
from localgen.cluster.replica import EngineReplica
from localgen.cluster.route import URL, Asked, Choice, InFlight, RoutedRequest
from localgen.cluster.running import DRAIN_TIMEOUT_S
from localgen.cluster.totals import NO_REPLICA
from localgen.server.http.access import open_tcp_socket
from localgen.server.http.guard import GuardMiddleware
from localgen.server.http.private_ports import Listener, PrivatePorts
from localgen.server.http.rate_limit import RateLimiter
from localgen.server.serving import raise_open_file_limit, uvicorn_config

APP_NAME = "localgen"
# the engines queue requests themselves
_MAX_ONGOING = 4096
# of all replicas together, before the cluster is ready: most reasons stay
_START_TRIES = 1
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 10.0
# a replica that leaves ends its answers first
_DRAIN_TIMEOUT_S = 600.0
# in which a router learns what a replica has loaded
_REPORT_PERIOD_S = 2.0
_METRICS_INTERVAL_S, _LOOK_BACK_S, _UPSCALE_DELAY_S = 1.0, 3.0, 3.0
# of a replica for its statistics: less than clients wait for those of all
_ASK_TIMEOUT_S = 6.0
_END_TIMEOUT_S, _DELETE_TIMEOUT_S, _POLL_S = 20.0, 60.0, 0.2
# of a machine's resource `node:ADDRESS`, of which it has 1
_PART_OF_A_MACHINE = 0.001


class GatewayServer:
    """The gateway as an actor, which listens itself: Serve's proxy would be one hop more."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ClusterConfig,
        build: Build,
        replicas: DeploymentHandle[Any],
        prompt_replicas: DeploymentHandle[Any] | None = None,
    ) -> None:
        require_version(build.version)
        access = config.access()
        self._all = [replicas] if prompt_replicas is None else [replicas, prompt_replicas]
        self._in_flight = InFlight()
        choose = [partial(self._choose, each) for each in self._all]
        replica_key = access.keys[0] if config.command is not None and access.keys else None
        self._gateway = Gateway(
            choose[0],
            self._ask_all,
            choose[1] if prompt_replicas else None,
            self._send_all if config.command is None else None,
            default_names={"", config.model or "", build.model},
            secret=build.secret if config.command is None else None,
            replica_key=replica_key,
            stabilizes=config.stabilize,
            timeout_s=config.timeout_s,
        )
        ports = PrivatePorts(_refuse_to_listen)
        self._rates = RateLimiter(access.rate_limit)
        app = GuardMiddleware(self._gateway, access, self._rates, ports)
        raise_open_file_limit()
        self._server = uvicorn.Server(uvicorn_config(app))
        self._serving = asyncio.create_task(self._server.serve([open_tcp_socket(access)]))

    def check_health(self) -> None:
        """Raises RuntimeError if it no longer listens."""
        if self._serving.done():
            raise RuntimeError("the gateway no longer listens")

    async def drain(self) -> int:
        """Refuse new requests from now on. Returns the number of running ones."""
        return self._gateway.drain()

    async def end(self) -> None:
        """End the running requests with an error, and wait until it is sent."""
        await self._gateway.end()

    async def charge(self, tokens: Mapping[str, int]) -> None:
        """Charge accounts for tokens that a replica has computed."""
        for account, count in tokens.items():
            self._rates.charge(account, count)

    @contextlib.asynccontextmanager
    async def _choose(
        self, replicas: DeploymentHandle[Any], asked: Asked, gone: frozenset[str]
    ) -> AsyncIterator[Choice]:
        """A slot of a replica. Raises ServerUnavailable if there is none and none is started."""
        route = RoutedRequest(asked.chunks, asked.model, asked.wanted, gone, self._in_flight)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(route.end)
            try:
                chosen = replicas.get.choose_replica(route)
                selection = await stack.enter_async_context(chosen)
            except (RayError, RayServeException) as error:
                raise ServerUnavailable(NO_REPLICA) from error
            route.assign(selection.replica_id)
            yield route.choice(selection.replica_id, selection.replica_metadata[URL])

    async def _ask_all(self, path: str) -> Sequence[tuple[str, bytes]]:
        answers = await self._call_all("get", path, timeout_s=_ASK_TIMEOUT_S)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _send_all(self, request: ReplicaRequest) -> list[Posted]:
        replicas = self._all[:1] if request.answering_only else self._all
        found = await self._call_all("place", timeout_s=_ASK_TIMEOUT_S, replicas=replicas)
        places = [each for each in found if isinstance(each, Place)]
        receivers = request.receivers(places)
        answers = await self._call_all("send", request, receivers, replicas=replicas)
        posted = [each for each in answers if isinstance(each, Posted)]
        ended = receivers - {each.place for each in posted}
        posted += [Posted.without_answer(each, "it has ended") for each in sorted(ended, key=str)]
        if len(places) < len(found):
            posted.append(Posted.without_answer(None, "it does not answer"))
        return posted

    async def _call_all(
        self,
        method: str,
        *arguments: Any,
        timeout_s: float | None = None,
        replicas: Sequence[DeploymentHandle[Any]] | None = None,
    ) -> list[Any]:
        """The result of a method of each replica, or its exception."""
        asked = self._all if replicas is None else replicas
        calls = (call_each(each, method, *arguments, timeout_s=timeout_s) for each in asked)
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]


def build_app(config: ClusterConfig, machines: Machines | None = None) -> serve.Application:
    """The application of a cluster. machines: spread it over them; by default, Ray chooses."""
    count = None if machines is None else machines.count
    name = ""
    with contextlib.suppress(LocalgenError):  # on this machine, it may not exist
        name = model_name(config)
    build = Build(localgen.__version__, secrets.token_hex(16), name)
    most = config.max_replicas or config.replicas
    bound = [_replicas(REPLICAS, config, build, most, count, **_number_of_replicas(config))]
    if prompt := config.prompt_replicas:
        # their prompts are in the traces of the replicas that answer
        own = replace(config, record_trace=None)
        bound.append(_replicas(PROMPT_REPLICAS, own, build, prompt, count, num_replicas=prompt))
    resources = {f"node:{machines.gateway}": _PART_OF_A_MACHINE} if machines else {}
    gateway = serve.deployment(
        name=GATEWAY,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": 0, "resources": resources},
        health_check_period_s=_HEALTH_PERIOD_S,
        # one line for each charge of a replica
        logging_config=LoggingConfig(enable_access_log=False),
    )(GatewayServer)
    return gateway.bind(config, build, *bound)


def build_from_args(args: dict[str, Any]) -> serve.Application:
    """The application for a configuration file of Ray Serve, as RayService of KubeRay takes it.

    args: the keys of a cluster.toml, with absolute paths; the cluster is the one that runs it.
    Raises BadSetting that names the key.
    """
    config = read_settings({"address": "auto"} | args, "args", Path("/"))
    return build_app(config.with_default_model())


def _replicas(
    name: str,
    config: ClusterConfig,
    build: Build,
    most: int,
    machines: int | None,
    **number: Any,
) -> serve.Application:
    """A deployment of at most `most` replicas, spread over the machines, or as Ray chooses.

    number: arguments of serve.deployment that say how many there are.
    """
    per_machine = config.replicas_per_machine
    if per_machine is None and machines is not None:
        per_machine = min(MAX_PER_MACHINE, math.ceil(most / machines))
    deployment = serve.deployment(
        name=name,
        max_replicas_per_node=per_machine,
        max_ongoing_requests=_MAX_ONGOING,
        max_constructor_retry_count=_START_TRIES,
        ray_actor_options={"num_cpus": 0, "num_gpus": config.gpus_per_replica},
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=_DRAIN_TIMEOUT_S,
        # one line for each question of the gateway
        logging_config=LoggingConfig(enable_access_log=False),
        request_router_config=RequestRouterConfig(
            request_router_class="localgen.cluster.router.PrefixRouter",
            request_router_kwargs={"spill": config.spill},
            request_routing_stats_period_s=_REPORT_PERIOD_S,
        ),
        **number,
    )
    return deployment(EngineReplica).bind(config, build)


def drain(at_once: threading.Event) -> None:
    """Let running requests be answered while new ones are refused.

    Returns after DRAIN_TIMEOUT_S at the latest, or when at_once is set.
    """
    deadline, was_said = time.monotonic() + DRAIN_TIMEOUT_S, False
    while not at_once.is_set() and time.monotonic() < deadline:
        answers = _call_all(GATEWAY, "drain", _ASK_TIMEOUT_S)
        running = sum(each for each in answers if isinstance(each, int))
        # one that hangs may have some; one that has ended has none
        if not running and not any(isinstance(each, TimeoutError) for each in answers):
            return
        if not was_said:
            print(f"waiting up to {DRAIN_TIMEOUT_S:.0f} s for running requests", file=sys.stderr)
            was_said = True
        at_once.wait(_POLL_S)


def end_servers(config: ClusterConfig) -> None:
    """End the running requests with an error, then all servers, and wait for that.

    Without this, Serve would wait until the requests are answered.
    """
    _call_all(GATEWAY, "end", _ASK_TIMEOUT_S)
    for name in (REPLICAS, PROMPT_REPLICAS) if config.prompt_replicas else (REPLICAS,):
        _call_all(name, "end", _END_TIMEOUT_S)


def _call_all(deployment: str, method: str, timeout_s: float) -> list[Any]:
    """Results of a method of a deployment's actors, or exceptions; a TimeoutError if one hangs."""
    try:
        called = serve.get_deployment_handle(deployment, APP_NAME).broadcast(method)
        return list(called.results(timeout_s=timeout_s, return_exceptions=True))
    except TimeoutError as error:
        return [error]
    except (RayError, RayServeException):
        return []


def delete_app() -> None:
    """Delete the application from a Ray cluster that keeps running; its requests are cut off.

    Raises LoadFailed if that takes too long.
    """
    serve.delete(APP_NAME, _blocking=False)
    deadline = time.monotonic() + _DELETE_TIMEOUT_S
    while APP_NAME in serve.status().applications:
        for actor in ray.util.list_named_actors(all_namespaces=True):
            # else Serve waits until their requests end, also those of a gateway that was killed
            if actor["name"].startswith(f"SERVE_REPLICA::{APP_NAME}#"):
                with contextlib.suppress(ValueError, RayError):
                    ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
        if time.monotonic() > deadline:
            raise LoadFailed("the cluster that was there does not end: look at `serve status`")
        time.sleep(_POLL_S)


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
