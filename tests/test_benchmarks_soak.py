"""benchmarks.soak at toy size, and that its checks can fail."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import soak
from benchmarks.soak_parts.processes import Sample
from benchmarks.soak_parts.report import Requests, check_memory


def test_a_small_soak_with_kills(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    soak.main(["--requests", "40", "--kills", "3", "--clients", "3", "--output", str(output)])
    result = json.loads(output.read_text())
    failed = {one["name"]: one["detail"] for one in result["checks"] if not one["met"]}
    # too short for samples of memory
    failed = {name: detail for name, detail in failed.items() if "memory" not in name}
    assert not failed
    assert sum(result["kills"].values()) >= 1
    ended = sum(sum(counts.values()) for counts in result["outcomes"]["without"].values())
    assert ended == 20


def test_requests_that_end_twice_or_never_are_found(tmp_path: Path) -> None:
    log = tmp_path / "client-1.jsonl"
    lines = [{"begin": number, "kind": "_chat"} for number in range(3)]
    ends = [{"end": number, "outcome": "answer", "seconds": 1} for number in (0, 0)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines + ends))
    requests = Requests()
    requests.read(log, was_killed=True)
    assert requests.wrong_ends == ["client-1.jsonl: no end [1, 2], several [0]"]


def test_memory_that_grows_is_found() -> None:
    flat = [Sample(at, 10**8) for at in range(40)]
    growing = [Sample(at, 10**8 + at * 10**6) for at in range(40)]
    memory = {("server", 1): growing, ("engine", 2): flat, ("engine", 3): growing[:10]}
    server, engine = check_memory(memory, since_s=0)
    assert (server.met, engine.met) == (False, True)
