"""Measure the cost of a JSON schema constraint during decoding."""

from __future__ import annotations

import json

from benchmarks.measure import RATE
from benchmarks.speed import LOCALGEN, Bench, Side
from benchmarks.streams import LocalgenSpeaker, decode_rate

# target: at least this share of the unconstrained tokens/s
LEAST = 0.9
HELD = "localgen, held to a JSON schema"
# with minItems 1000 an answer never ends before max_tokens; the schema forces no long strings
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


def grammar(bench: Bench) -> None:
    """Compare one greedy stream with and without a schema.

    The warm-up compiles the schema, so that compile time is not included.
    """
    client, model, tokens = bench.localgen.client(), bench.localgen.model, bench.plan.alone
    speakers = {
        LOCALGEN: LocalgenSpeaker(client, model),
        HELD: LocalgenSpeaker(client, model, json_schema=SCHEMA),
    }
    for speaker in speakers.values():
        speaker.ask("ab", 8)

    def side(speaker: LocalgenSpeaker) -> Side:
        return lambda number: {"rate": decode_rate([speaker.ask("ab", tokens + 1)])}

    found = bench.rounds({name: side(speaker) for name, speaker in speakers.items()})
    entered = bench.enter(f"tg{tokens}, JSON schema", RATE, found, "rate")
    bench.report.ratio(entered[HELD], entered[LOCALGEN], LEAST, at_least=True)
