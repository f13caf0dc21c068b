"""Measure the cost of a JSON schema constraint during decoding."""

from __future__ import annotations

import json

from benchmarks.measure import RATE
from benchmarks.speed import LOCALGEN, CpuBench, Side
from benchmarks.streams import LocalgenBenchClient, decode_rate

# target: minimum share of the unconstrained tokens/s
MIN_SHARE = 0.9
CONSTRAINED = "localgen, constrained to a JSON schema"
# 1,000 items never end before max_tokens; the schema forces no long strings
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "size": {"type": "number"},
        "sure": {"type": "boolean"},
    },
    "required": ["name", "tags", "size", "sure"],
    "additionalProperties": False,
}
SCHEMA = json.dumps({"type": "array", "items": _RECORD, "minItems": 1000})


def grammar(bench: CpuBench) -> None:
    """Compare one greedy stream with and without a JSON schema.

    The warm-up compiles the schema.
    """
    terminal, model, tokens = bench.localgen.client(), bench.localgen.model, bench.plan.alone
    clients = {
        LOCALGEN: LocalgenBenchClient(terminal, model),
        CONSTRAINED: LocalgenBenchClient(terminal, model, json_schema=SCHEMA),
    }
    for client in clients.values():
        client.ask("ab", 8)

    def side(client: LocalgenBenchClient) -> Side:
        return lambda number: {"rate": decode_rate([client.ask("ab", tokens + 1)])}

    found = bench.rounds({name: side(client) for name, client in clients.items()})
    entered = bench.enter(f"tg{tokens}, JSON schema", RATE, found, "rate")
    bench.report.ratio(entered[CONSTRAINED], entered[LOCALGEN], MIN_SHARE, at_least=True)
