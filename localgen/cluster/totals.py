"""Statistics of all replicas in the form of one server's, each model under its replica's name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import localgen
from localgen.server.stats.loads import ServerLoad

# loaded models, in Ollama's API
PS_PATH = "/api/ps"
# field of /v1/stats
REPLICAS = "replicas"
NO_REPLICA = "no replica is ready: try again"
_NO_REPLICA_STATS = {"server": {"status": "ok", "version": localgen.__version__}}
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")


def merged_stats(answers: Sequence[tuple[str, bytes]]) -> dict[str, Any]:
    """/v1/stats of the cluster: the first replica's, with the models and requests of all.

    REPLICAS has what each replica said.
    """
    found = sorted((replica, json.loads(body)) for replica, body in answers)
    total: dict[str, Any] = dict(found[0][1]) if found else dict(_NO_REPLICA_STATS)
    total["models"] = [
        # clients tell models apart by their ids
        model | {key: f"{model[key]}@{replica}" for key in ("name", "id")} | {"replica": replica}
        for replica, stats in found
        for model in stats["models"]
    ]
    ended = [
        each | {"model": f"{each['model']}@{replica}"}
        for replica, stats in found
        for each in stats.get("ended") or ()
    ]
    total["ended"] = sorted(ended, key=lambda each: each["ended_ago_s"])
    total[REPLICAS] = dict(found)
    return total


def count_requests(stats: Mapping[str, Any]) -> tuple[int, int]:
    """Running and waiting requests of a replica, also those that wait for a load or for memory.

    stats: its /v1/stats.
    """
    running = 0
    waiting = sum(stats.get("server", {}).get("waiting_for_memory", {}).values())
    for model in stats["models"]:
        engine = model.get("stats")
        if engine is None:  # it is being loaded
            waiting += model.get("active_requests", 0)
        else:
            running += engine["running"]
            waiting += engine["waiting"]
    return running, waiting


def merged_loads(answers: Iterable[tuple[str, bytes]]) -> ServerLoad:
    """The sum of the replicas' loads, from what they answered to /v1/loads."""
    return sum((ServerLoad.from_body(json.loads(body)) for _, body in answers), ServerLoad())


def merged_ps(answers: Iterable[tuple[str, bytes]]) -> dict[str, Any]:
    """/api/ps of the cluster: each model that a replica has loaded, once."""
    found = [model for _, body in sorted(answers) for model in json.loads(body)["models"]]
    return {"models": list({model["name"]: model for model in reversed(found)}.values())}


def merged_metrics(answers: Iterable[tuple[str, bytes]]) -> str:
    """/metrics of the cluster: all samples with a label `replica`, each family once."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, body in answers:
        family = ""
        for line in body.decode().splitlines():
            if line.startswith("# "):
                _, kind, family, *_ = line.split(" ", 3)
                lines = heads.setdefault(family, [])
                if not any(each.startswith(f"# {kind} ") for each in lines):
                    lines.append(line)
            elif match := _SAMPLE.match(line):
                name, labels, value = match.groups()
                parts = [labels] if labels else []
                labelled = ",".join([*parts, f'replica="{replica}"'])
                samples.setdefault(family, []).append(f"{name}{{{labelled}}} {value}")
    lines = []
    for family, found in samples.items():
        lines += [*heads.get(family, ()), *found]
    return "\n".join([*lines, ""])
