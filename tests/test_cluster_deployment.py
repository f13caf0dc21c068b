"""What the deployments of Ray Serve get, and a method of all replicas, each of which may hang."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed, which needs 500 MB: make test-cluster")
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentBroadcastResponse

from localgen.backends.errors import LoadFailed
from localgen.cluster.broadcast import call_each, require_broadcast
from localgen.cluster.config import ClusterConfig
from localgen.cluster.deployment import build_app, build_from_args

LONG_S = 30.0


class Call:
    """The answer of a replica, an exception to be raised, or None of one that hangs."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.is_cancelled = answer, False

    async def get_async(self) -> Any:
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A handle of replicas that answer so. Ray's own object collects their answers."""

    def __init__(self, *calls: Call) -> None:
        self.calls, self.asked = list(calls), list[Any]()

    def broadcast(self, *asked: Any) -> DeploymentBroadcastResponse:
        self.asked.append(asked)

        async def send() -> list[Call]:
            if not self.calls:
                raise RayActorError
            return self.calls

        return DeploymentBroadcastResponse(send(), None)


def call(handle: Handle, timeout_s: float | None = 0.05) -> list[Any]:
    return asyncio.run(call_each(handle, "get", "/x", timeout_s=timeout_s))


def test_answers_in_time_count_though_one_replica_hangs() -> None:
    hanging, failing = Call(None), Call(ValueError("no"))
    handle = Handle(Call("a"), hanging, failing, Call("b"))
    first, late, failed, last = call(handle)
    assert (first, failed, last) == ("a", failing.answer, "b")
    assert isinstance(late, TimeoutError)
    assert [each.is_cancelled for each in handle.calls] == [False, True, False, False]
    assert handle.asked == [("get", "/x")]


def test_without_a_replica_there_is_no_answer() -> None:
    assert call(Handle()) == []


def test_who_leaves_ends_the_calls() -> None:
    handle = Handle(Call(None), Call("b"))

    async def leave() -> None:
        calling = asyncio.create_task(call_each(handle, "post", timeout_s=None))
        await asyncio.sleep(0.01)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(calling, LONG_S)

    asyncio.run(leave())
    assert handle.calls[0].is_cancelled


def test_a_ray_without_the_private_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_broadcast()
    monkeypatch.delattr(DeploymentBroadcastResponse, "_fetch_replica_results_async")
    with pytest.raises(LoadFailed, match=r"Ray 2\..* pip install 'localgen\[cluster\]'"):
        require_broadcast()


def test_prompt_replicas_record_no_trace() -> None:
    """Those that answer do, so each prompt is in it once."""
    config = ClusterConfig(model="tiny", prompt_replicas=1, record_trace="/tmp/trace.jsonl")
    gateway = build_app(config)._bound_deployment
    of_cluster, _, answering, computing = gateway.init_args
    configs = [each._bound_deployment.init_args[0] for each in (answering, computing)]
    assert of_cluster == configs[0] == config
    assert configs[1] == replace(config, record_trace=None)


def test_all_machines_have_the_model_that_the_first_one_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCALGEN_MODEL", "tiny")
    of_gateway, build, replicas = build_from_args({})._bound_deployment.init_args
    of_replicas, _ = replicas._bound_deployment.init_args
    assert of_gateway.model == of_replicas.model == build.model == "tiny"
