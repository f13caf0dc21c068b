"""benchmarks.hostile runs, and an answer without a token is not taken for a fast one."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from benchmarks import hostile


def test_a_quick_run(tmp_path: Path) -> None:
    output = tmp_path / "hostile.json"
    assert hostile.main(["--quick", "--clients", "2", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert len(result["checks"]) == len(hostile.LOADS) == 3
    assert len(result["series"]) == 6
    assert all(0 < value < 60 for one in result["series"][::2] for value in one["values"])


def test_a_refused_request_is_an_error() -> None:
    refuse = httpx.MockTransport(lambda request: httpx.Response(503, text="{}"))
    with (
        httpx.Client(base_url="http://test", transport=refuse) as http,
        pytest.raises(RuntimeError, match="status 503"),
    ):
        hostile.first_token_s(http)
