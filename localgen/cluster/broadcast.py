"""A method of all replicas of a deployment, called at once."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle


async def call_each(
    replicas: DeploymentHandle[Any], method: str, *arguments: Any, timeout_s: float | None
) -> list[Any]:
    """Return the result of each replica, or its exception: TimeoutError after timeout_s.

    Calls that take longer, and all if this is cancelled, are cancelled in the replicas. Returns
    nothing if there is no replica.
    """
    asked = replicas.broadcast(method, *arguments)
    try:
        # the public methods give all answers or, if one replica hangs, none
        calls = await asyncio.wait_for(asked._fetch_replica_results_async(), timeout_s)
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
