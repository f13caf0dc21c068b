"""A method of all replicas of a deployment, called at once."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from localgen.backends.errors import LoadFailed

# of DeploymentBroadcastResponse, in Ray 2.60: its public methods give all answers or, if one
# replica hangs, none, and let calls run on after they are cancelled
_FETCH_CALLS = "_fetch_replica_results_async"


def require_broadcast() -> None:
    """Raise LoadFailed if this Ray has not what call_each() needs, which is no public method."""
    if not hasattr(DeploymentBroadcastResponse, _FETCH_CALLS):
        raise LoadFailed(
            f"Ray {ray.__version__} is not one that localgen cluster knows: "
            "pip install 'localgen[cluster]'"
        )


async def call_each(
    replicas: DeploymentHandle[Any], method: str, *arguments: Any, timeout_s: float | None
) -> list[Any]:
    """Return the result of each replica, or its exception: TimeoutError after timeout_s.

    Calls that take longer, and all if this is cancelled, are cancelled in the replicas. Returns
    nothing if there is no replica.
    """
    asked = replicas.broadcast(method, *arguments)
    try:
        calls = await asyncio.wait_for(getattr(asked, _FETCH_CALLS)(), timeout_s)
    except (RayError, RayServeException, TimeoutError):
        return []
    answers = (_answer(call, timeout_s) for call in calls)
    return list(await asyncio.gather(*answers, return_exceptions=True))


async def _answer(call: Any, timeout_s: float | None) -> Any:
    """call: a ReplicaResult of Ray."""
    try:
        return await asyncio.wait_for(call.get_async(), timeout_s)
    except (TimeoutError, asyncio.CancelledError):
        call.cancel()
        raise
