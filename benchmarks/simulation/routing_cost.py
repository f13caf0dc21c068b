"""`python -m benchmarks.simulation.routing_cost`: CPU time of a gateway's decisions.

The table has 65,536 chunks and is full: prompts of 64 chunks behind system prompts, each of which
one replica or half of all have. A decision is PrefixTable.rank and add, the hashes of the prompt
are prompt_chunks.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.measure import ModelLine, Report, command
from localgen.cluster.config import ClusterConfig
from localgen.cluster.prefix_table import CHUNK_CHARS, PrefixTable, prompt_chunks

_REPLICAS = (10, 100, 1000)
_TABLE_CHUNKS = 65_536
_PROMPT_CHUNKS, _OWN_CHUNKS, _NUM_SYSTEMS, _MAX_LOAD = 64, 2, 100, 8
_DECISIONS, _ROUNDS = 300, 5


def cpu_us(action: Callable[[], object], times: int) -> float:
    """CPU time of one call in µs."""
    began_s = time.process_time()
    for _ in range(times):
        action()
    return (time.process_time() - began_s) / times * 1e6


def full_table(names: list[str], having: int, chance: random.Random) -> PrefixTable:
    """having: replicas that have each system prompt."""
    table = PrefixTable(_TABLE_CHUNKS)
    for number in range(_TABLE_CHUNKS // _OWN_CHUNKS):
        table.add(_chunks(number % _NUM_SYSTEMS, number), chance.choice(names))
    for system in range(_NUM_SYSTEMS):
        for name in chance.sample(names, having):
            table.add(_chunks(system, None), name)
    return table


def _chunks(system: int, own: int | None) -> list[bytes]:
    shared = [f"{system} {at}".encode() for at in range(_PROMPT_CHUNKS - _OWN_CHUNKS)]
    return shared + [f"own {own} {at}".encode() for at in range(_OWN_CHUNKS) if own is not None]


def decisions_us(replicas: int, having: int) -> Iterable[float]:
    chance = random.Random(replicas)
    names = [f"replica-{number}" for number in range(replicas)]
    table = full_table(names, having, chance)
    loads = {name: chance.randrange(_MAX_LOAD) for name in names}
    spill, new = ClusterConfig().spill, _TABLE_CHUNKS

    def decide() -> None:
        nonlocal new
        new += 1
        chunks = _chunks(new % _NUM_SYSTEMS, new)
        table.add(chunks, table.rank(chunks, loads, spill)[0])

    cpu_us(decide, _NUM_SYSTEMS)
    return [cpu_us(decide, _DECISIONS) for _ in range(_ROUNDS)]


def drop_ms(replicas: int) -> list[float]:
    """To forget a replica that died."""
    names = [f"replica-{number}" for number in range(replicas)]
    table = full_table(names, replicas // 2, random.Random(replicas))
    return [cpu_us(lambda name=name: table.drop(name), 1) / 1e3 for name in names[:_ROUNDS]]  # type: ignore[misc]


def main(arguments: list[str] | None = None) -> int:
    """Measure; prints a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m benchmarks.simulation.routing_cost"
    )
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    report = Report(ModelLine("", 0, 0), _ROUNDS, False, 1, {})
    text = "word " * (_PROMPT_CHUNKS * CHUNK_CHARS // len("word "))
    body = {"messages": [{"role": "system", "content": text}]}
    hashes = [cpu_us(lambda: prompt_chunks(body), _DECISIONS) for _ in range(_ROUNDS)]
    report.add(f"hashes of {_PROMPT_CHUNKS} chunks", "gateway", "µs", hashes)
    for replicas in _REPLICAS:
        for having in (1, replicas // 2):
            test = f"decision, {replicas} replicas, {having} have a system prompt"
            report.add(test, "gateway", "µs", list(decisions_us(replicas, having)))
        report.add(f"forget one of {replicas} replicas", "gateway", "ms", drop_ms(replicas))
    print(report.text())
    report.commands.append(command("benchmarks.simulation.routing_cost", arguments))
    report.save("simulation-routing", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
