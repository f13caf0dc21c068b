"""Prompt tokens that a coding agent's session computes, with and without --stabilize.

A session is recorded: twenty turns behind a head of 20,000 tokens, with scripted tool calls. What
changes from turn to turn without a meaning is that of real agents. The model is a random layer of
the built-in model's width with its tokenizer: which tokens are computed does not depend on weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import httpx

from benchmarks import measure
from benchmarks.termination import ended_by_sigterm
from localgen.hub.packaged import BUILT_IN_PATH

RESULTS = Path(__file__).parent / "results"
CTX = 32_768
TURNS, HEAD_RULES, NUM_TOOLS = 20, 1000, 12
BACKENDS = {"llamacpp": ("--backend", "llamacpp"), "cuda": ("--backend", "cuda", "--device", "cpu")}
_START_S, _ANSWER_S = 120.0, 900.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of a request's prompt: in all, and from the prefix cache."""

    prompt: int
    cached: int


@dataclass(frozen=True, slots=True)
class Run:
    """A session on a server. cached_share: the least share of a turn's old tokens, see `shares`."""

    backend: str
    noise: bool
    stabilize: bool
    turns: tuple[Turn, ...]

    @property
    def computed(self) -> int:
        """Prompt tokens computed after the first turn."""
        return sum(turn.prompt - turn.cached for turn in self.turns[1:])

    @property
    def shares(self) -> list[float]:
        """The share of each earlier prompt that the next turn found in the cache."""
        pairs = zip(self.turns, self.turns[1:], strict=False)
        return [min(1.0, turn.cached / before.prompt) for before, turn in pairs]


class Recording:
    """The requests of a session. noise: whether heads change as those of real agents do."""

    def __init__(self, *, rules: int = HEAD_RULES, noise: bool) -> None:
        self._rules, self._noise = rules, noise
        self._random = random.Random(7)
        self._said: list[dict[str, Any]] = []

    def request(self, number: int) -> dict[str, Any]:
        """Return the body of turn `number`, from 0."""
        if number:
            self._said += self._work(number)
        self._said.append({"role": "user", "content": f"Step {number}: fix file {number}.py."})
        messages = [{"role": "system", "content": self._head(number)}, *self._said]
        if self._noise:  # in the last message only; the next request has it no more
            left = 200_000 - 1_000 * number
            reminder = f"\n<system-reminder>{left} tokens left</system-reminder>"
            messages[-1] = self._said[-1] | {"content": self._said[-1]["content"] + reminder}
        fixed = {"max_tokens": 2, "temperature": 0}
        return {"messages": messages, "tools": self._tools(), **fixed}

    def _head(self, number: int) -> str:
        """The system message: an attribution header, rules, and the state of the project."""
        turn = number if self._noise else 0
        rules = "\n".join(
            f"Rule {rule}: keep item {rule * 7919 % 1013} of list {rule * 31 % 97} in order."
            for rule in range(self._rules)
        )
        # the working folder and its state change in the middle of a session
        folder, files = ("src", turn // 10) if turn >= 10 else (".", 0)
        return (
            f"x-anthropic-billing-header: cc_version=2.1.9; cch={turn * 7919 % 4096:03x};\n"
            f"Today is 2026-11-{25 + turn // 10}, the time is 23:{30 + turn}:05.\n{rules}\n"
            f"Working folder: /project/{folder}\nGit status: {files} files changed\n"
        )

    def _tools(self) -> list[dict[str, Any]]:
        fields = {"path": {"type": "string"}, "line": {"type": "integer"}}
        names = [f"tool_{number}" for number in range(NUM_TOOLS)]
        if self._noise:
            self._random.shuffle(names)
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": f"Does what {name} does to a file.",
                    "parameters": {"type": "object", "properties": fields},
                },
            }
            for name in names
        ]

    @staticmethod
    def _work(number: int) -> list[dict[str, Any]]:
        """The messages after a request: a tool call and its result, then a text."""
        arguments = json.dumps({"path": f"{number}.py", "line": number})
        call = {"name": f"tool_{number % NUM_TOOLS}", "arguments": arguments}
        result = "\n".join(f"{line}: value = {line * number % 89}" for line in range(8))
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        return [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": result},
            {"role": "assistant", "content": f"File {number}.py is fixed."},
        ]


def write_model(target: Path) -> Path:
    """Write the built-in model's first layer with a context length of CTX."""
    reader = gguf.GGUFReader(BUILT_IN_PATH)
    writer = gguf.GGUFWriter(target, "llama")
    changes = {"llama.context_length": CTX, "llama.block_count": 1}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, changes.get(key, field.contents()), field.types[0], inner)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or tensor.name.startswith("blk.0."):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@contextlib.contextmanager
def serving(model: Path, backend: str, *, stabilize: bool) -> Iterator[httpx.Client]:
    """A server of its own with the model, in a temporary folder. Raises RuntimeError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    extra = ("--stabilize",) if stabilize else ()
    options = ("--port", port, *BACKENDS[backend], "--ctx", str(CTX), *extra)
    with tempfile.TemporaryDirectory(prefix="localgen-bench-") as folder:
        log = Path(folder) / "log"
        own = {"LOCALGEN_RUNTIME_DIR": f"{folder}/run", "LOCALGEN_STATE_DIR": f"{folder}/state"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "localgen.cli.main", "serve", str(model), *options],
                env=os.environ | own | {"XDG_RUNTIME_DIR": folder},
                stdout=output,
                stderr=output,
            )
        url = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(base_url=url, timeout=_ANSWER_S, trust_env=False) as http:
                _await(http, process, log)
                yield http
        finally:
            process.terminate()
            process.wait()


def _await(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/health").status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server does not answer: {log.read_text(errors='replace')[-500:]}")


def play(
    http: httpx.Client, recording: Recording, turns: int = TURNS, model: str | None = None
) -> tuple[Turn, ...]:
    """Send a session's requests; return what each computed. Raises RuntimeError for a refusal."""
    counted = []
    for number in range(turns):
        body = recording.request(number) | ({"model": model} if model else {})
        reply = http.post("/v1/chat/completions", json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"turn {number}: {reply.text}")
        timings = reply.json()["timings"]
        counted.append(Turn(timings["cache_n"] + timings["prompt_n"], timings["cache_n"]))
        print(f"turn {number}: {counted[-1]}", file=sys.stderr)
    return tuple(counted)


def table(runs: list[Run]) -> str:
    """Format the runs: what is computed after the first turn, and the least cached share."""
    head = ("backend", "noise", "--stabilize", "head", "computed later", "least cached", "mean")
    rows = [
        (
            run.backend,
            "yes" if run.noise else "no",
            "yes" if run.stabilize else "no",
            f"{run.turns[0].prompt:,}",
            f"{run.computed:,}",
            f"{min(run.shares):.1%}",
            f"{sum(run.shares) / len(run.shares):.1%}",
        )
        for run in runs
    ]
    return measure.table(head, rows)


def record(runs: list[Run], arguments: list[str] | None) -> dict[str, Any]:
    """Return the result file's contents."""
    return {
        "command": measure.command("benchmarks.agent_sessions", arguments),
        "machine": measure.machine(),
        "versions": measure.versions(),
        "runs": [
            {
                "backend": run.backend,
                "noise": run.noise,
                "stabilize": run.stabilize,
                "computed_after_first": run.computed,
                "least_cached_share": min(run.shares),
                "turns": [{"prompt": turn.prompt, "cached": turn.cached} for turn in run.turns],
            }
            for run in runs
        ],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the sessions. Returns 1 if a session failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m benchmarks.agent_sessions"
    )
    parser.add_argument("--backend", choices=BACKENDS, nargs="+", default=list(BACKENDS))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--rules", type=int, default=HEAD_RULES, help="length of the head")
    parser.add_argument("--json", action="store_true", help="print the result file's contents")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.turns < 2:
        parser.error("--turns: at least 2")
    runs = []
    try:
        with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="localgen-bench-") as folder:
            model = write_model(Path(folder) / "one-layer.gguf")
            for backend in options.backend:
                for noise, stabilize in ((False, False), (True, True), (True, False)):
                    with serving(model, backend, stabilize=stabilize) as http:
                        recording = Recording(rules=options.rules, noise=noise)
                        turns = play(http, recording, options.turns)
                    runs.append(Run(backend, noise, stabilize, turns))
                    print(table(runs[-1:]), file=sys.stderr)
    except (RuntimeError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = record(runs, arguments)
    day = time.strftime("%Y%m%d")
    target = options.output or RESULTS / f"agent-sessions-{day}.json"
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found) if options.json else table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
