"""Random requests from the server's own OpenAPI schema: none ends in an internal error."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from serving import ServerHarness, server_harness

# of the routes for agents, and of all others
CASES = 2000
MAX_GROWTH_BYTES = 200 << 20
_SENT = ("method", "url", "params", "headers", "json")
# paths that end the server, contact the hub, or remove the developer's models
_LEFT_OUT = {"/v1/shutdown", "/api/pull", "/api/delete"}
_OF_AGENTS = {
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/tokenize", "/detokenize", "/apply-template"),
}


@pytest.fixture(scope="module")
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        built.start()
        yield built


def operations(served: ServerHarness, *, of_agents: bool) -> list[Any]:
    """The operations with a body: paths without one have only one request."""
    schema = schemathesis.openapi.from_dict(served.http.get("/openapi.json").json())
    found = [r.ok() for r in schema.get_all_operations() if isinstance(r, Ok)]
    with_body = [o for o in found if o.path not in _LEFT_OUT and o.body]
    return [o for o in with_body if (o.path in _OF_AGENTS) is of_agents]


@pytest.mark.parametrize("of_agents", [False, True], ids=["others", "agents"])
def test_no_made_up_request_ends_in_an_internal_error(
    served: ServerHarness, of_agents: bool
) -> None:
    tried = operations(served, of_agents=of_agents)
    assert len(tried) >= 6
    model = served.model("echo")
    kept = _store(served, model)
    before = _bytes(served)
    statuses: Counter[int] = Counter()
    per_mode = -(-CASES // (2 * len(tried)))
    for operation in tried:
        for mode in GenerationMode:
            _try(served, model, operation.as_strategy(generation_mode=mode), per_mode, statuses)
    assert statuses[500] == 0, statuses
    assert statuses.total() >= CASES, statuses
    assert statuses[400] > 100, statuses
    assert served.http.get("/health").status_code == 200
    assert _bytes(served) - before < MAX_GROWTH_BYTES
    follow_up = {"model": model, "input": "two", "previous_response_id": kept}
    assert served.http.post("/v1/responses", json=follow_up).status_code == 200


def test_made_up_ids_find_and_delete_no_response(served: ServerHarness) -> None:
    dice, kept = random.Random(5), _store(served, served.model("echo"))
    for _ in range(200):
        name = quote("".join(chr(dice.choice((*range(256), 0x1F600))) for _ in range(9)), safe="")
        path = f"/v1/responses/{dice.choice((name, kept[:-1], kept + 'a', kept.upper()))}"
        for method in ("GET", "DELETE"):
            assert served.http.request(method, path).status_code in (404, 405)
    assert served.http.get(f"/v1/responses/{kept}").json()["id"] == kept
    assert served.http.delete(f"/v1/responses/{kept}").json()["deleted"] is True


def _store(served: ServerHarness, model: str) -> str:
    """The id of a new stored response."""
    reply = served.http.post("/v1/responses", json={"model": model, "input": "one"})
    return str(reply.json()["id"])


def _bytes(served: ServerHarness) -> int:
    return int(psutil.Process(served.pid()).memory_info().rss)


def _try(served: ServerHarness, model: str, cases: Any, count: int, statuses: Counter[int]) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def ask(case: Any) -> None:
        # most random names are no model's; without a name it would be the built-in one, not a fake
        if isinstance(case.body, dict) and len(str(case.body.get("model") or "")) % 4 != 1:
            case.body["model"] = model
        sent = case.as_transport_kwargs(base_url="http://test")
        known = {name: sent[name] for name in _SENT if name in sent}
        # one connection each: generating a request may take longer than the keep-alive
        known["headers"]["connection"] = "close"
        reply = served.http.request(**known, content=sent.get("data"))
        statuses[reply.status_code] += 1
        assert reply.status_code != 500, (case, reply.text)

    ask()
