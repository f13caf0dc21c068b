"""What holding an answer to a JSON schema costs while it is generated."""

from __future__ import annotations

import json

from benchmarks.measure import RATE
from benchmarks.speed import LOCALGEN, Bench, Side
from benchmarks.streams import LocalgenSpeaker, decode_rate

# at most a tenth of the tokens per second
LEAST = 0.9
HELD = "localgen, held to a JSON schema"
# an answer under it never ends before it is cut off; no run of characters is forced for long
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
    """One greedy stream, free and held to a schema. The schema was seen before: compiling it
    belongs to the first request that brings it."""
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
