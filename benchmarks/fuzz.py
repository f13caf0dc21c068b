"""Fuzz what takes input of others: HTTP, model files, templates, schemas, state files.

    python -m benchmarks.fuzz [--minutes N] [--seed S] [--targets http,gguf] [--corpus DIR]
    python -m benchmarks.fuzz --replay FILE...

Input is valid input, changed. It must be accepted, or refused with a clear error. A finding is
anything else: another exception, a crash, a hang, more memory than a gigabyte, a status of 5xx, or
a server that no longer answers. DIR has one file for each finding and the state, with how to repeat
them: after Ctrl+C, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from benchmarks.fuzz_parts.http_target import HttpTarget
from benchmarks.fuzz_parts.targets import TARGETS
from benchmarks.fuzz_parts.worker import Outcome, Worker

NAMES = ("http", *TARGETS)
# seconds for a target until the next one has its turn
_TURN_S = 5.0
Run = Callable[[bytes], Outcome]


@dataclass
class State:
    """Progress of a run. targets: number of the next input and counts of outcomes, by target.

    findings: by the name of their file in the corpus.
    """

    path: Path
    seed: int
    targets: dict[str, dict[str, int]] = field(default_factory=dict)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, corpus: Path, seed: int) -> State:
        """The state of this seed in a folder, or a new one."""
        path = corpus / f"state-{seed}.json"
        if not path.exists():
            return cls(path, seed)
        known = json.loads(path.read_text())
        return cls(path, seed, known["targets"], known["findings"])

    def save(self) -> None:
        content = {"seed": self.seed, "targets": self.targets, "findings": self.findings}
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(content, indent=1) + "\n")
        fresh.replace(self.path)

    def counts(self, target: str) -> dict[str, int]:
        return self.targets.setdefault(target, {"next": 0})


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    with ExitStack() as stack:
        worker = stack.enter_context(Worker())
        http = HttpTarget()
        stack.callback(http.close)
        runs: dict[str, Run] = {name: _worker_run(worker, name) for name in TARGETS}
        runs["http"] = http.run
        if options.replay:
            sys.exit(replay(options.replay, runs))
        makers = {name: target.make for name, target in TARGETS.items()} | {"http": http.make}
        options.corpus.mkdir(parents=True, exist_ok=True)
        state = State.load(options.corpus, options.seed)
        deadline_s = time.monotonic() + 60 * options.minutes
        try:
            while time.monotonic() < deadline_s:
                for name in options.targets:
                    turn(state, name, makers[name], runs[name])
        except KeyboardInterrupt:
            print("interrupted: the same command goes on from here", file=sys.stderr)
        finally:
            state.save()
    print(table(state))
    sys.exit(1 if state.findings else 0)


def turn(state: State, name: str, make: Callable[[random.Random], bytes], run: Run) -> None:
    """Some seconds of one target."""
    counts = state.counts(name)
    ends_s = time.monotonic() + _TURN_S
    while time.monotonic() < ends_s:
        number = counts["next"]
        content = make(random.Random(f"{state.seed}:{name}:{number}"))
        outcome = run(content)
        counts["next"] = number + 1
        counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
        if outcome.is_finding:
            keep(state, name, number, content, outcome)
    state.save()


def keep(state: State, name: str, number: int, content: bytes, outcome: Outcome) -> None:
    """Write a finding to the corpus; of several with the same cause, the smallest."""
    signature = hashlib.sha256(f"{outcome.kind}:{outcome.where}".encode()).hexdigest()[:8]
    suffix = HttpTarget.suffix if name == "http" else TARGETS[name].suffix
    path = state.path.with_name(f"{name}-{signature}{suffix}")
    known = state.findings.get(path.name)
    if known is None:
        print(f"{name} {number}: {outcome.kind}: {outcome.where}", file=sys.stderr)
    found = known or {"kind": outcome.kind, "where": outcome.where, "times": 0}
    found["times"] += 1
    if known is None or len(content) < known["bytes"]:
        path.write_bytes(content)
        found |= {"bytes": len(content), "number": number, "detail": outcome.detail}
        found["repeat"] = f"python -m benchmarks.fuzz --replay {path.name}"
    state.findings[path.name] = found


def replay(paths: Sequence[Path], runs: dict[str, Run]) -> int:
    """Run files of a corpus, named TARGET-anything. Returns 1 if one is still a finding."""
    status = 0
    for path in paths:
        outcome = runs[path.name.partition("-")[0]](path.read_bytes())
        print(f"{path.name}: {outcome.kind} {outcome.where}\n{outcome.detail}")
        status |= outcome.is_finding
    return status


def table(state: State) -> str:
    lines = [f"{'target':<12} {'inputs':>8} {'accepted':>9} {'refused':>8} {'findings':>9}"]
    for name, counts in state.targets.items():
        accepted, refused = counts.get("accepted", 0), counts.get("refused", 0)
        found = sum(file.startswith(f"{name}-") for file in state.findings)
        lines.append(f"{name:<12} {counts['next']:>8} {accepted:>9} {refused:>8} {found:>9}")
    for file, finding in state.findings.items():
        lines.append(f"{file}: {finding['times']} times {finding['kind']}: {finding['where']}")
    lines.append(f"corpus: {state.path.parent}")
    return "\n".join(lines)


def _worker_run(worker: Worker, name: str) -> Run:
    return lambda content: worker.run(name, content)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="default: 60")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--targets", type=_targets, default=NAMES, help=",".join(NAMES))
    corpus = platformdirs.user_cache_path("localgen", appauthor=False) / "fuzz"
    parser.add_argument("--corpus", type=Path, default=corpus, help="default: %(default)s")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="run these again")
    return parser.parse_args(arguments)


def _targets(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(NAMES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    main()
