"""Random requests from the server's own OpenAPI schema: none ends in an internal error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from serving import ServerHarness, server_harness

CASES = 2000
_SENT = ("method", "url", "params", "headers", "json")
# paths that end the server, contact the hub, or remove the developer's models
_LEFT_OUT = {"/v1/shutdown", "/api/pull", "/api/delete"}


@pytest.fixture(scope="module")
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        built.start()
        yield built


def test_no_made_up_request_ends_in_an_internal_error(served: ServerHarness) -> None:
    schema = schemathesis.openapi.from_dict(served.http.get("/openapi.json").json())
    found = [r.ok() for r in schema.get_all_operations() if isinstance(r, Ok)]
    # paths without a body have only one request
    operations = [o for o in found if o.path not in _LEFT_OUT and o.body]
    assert len(operations) >= 4
    model = served.model("echo")
    statuses: Counter[int] = Counter()
    per_mode = -(-CASES // (2 * len(operations)))
    for operation in operations:
        for mode in GenerationMode:
            _try(served, model, operation.as_strategy(generation_mode=mode), per_mode, statuses)
    assert statuses[500] == 0, statuses
    assert statuses.total() >= CASES, statuses
    assert statuses[400] > 100, statuses
    assert served.http.get("/health").status_code == 200


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
