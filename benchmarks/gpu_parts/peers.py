"""Other engines, each measured in turn with localgen."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

import torch

from benchmarks.gpu_parts import peer
from benchmarks.gpu_parts.bench import GpuBench
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.device import relative_error
from benchmarks.gpu_parts.probe import Probe
from benchmarks.gpu_parts.processes import ROOT
from benchmarks.gpu_parts.progress import case_begins, progress
from benchmarks.gpu_parts.report import CorrectnessCheck, Figures
from benchmarks.gpu_parts.workloads import alone, at_once

# maximum relative error: bfloat16 rounding differs in all layers of a large model
LOGITS = 0.1
_ROUND_S = 60.0
_ROUNDS = 3


class PeerFailed(Exception):
    """A peer cannot be measured; the message says why."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


class Peer:
    """A process of benchmarks.gpu_parts.peer with one peer. As a context manager it ends it."""

    def __init__(self, name: str, folder: Path, *, quick: bool) -> None:
        self.name = name
        slug = "".join(c if c.isalnum() else "-" for c in name)
        self.logits = folder / f"{slug}.pt"
        self._errors = folder / f"{slug}.log"
        more = ["--quick"] if quick else []
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_parts.peer", name, str(self.logits), *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def answer(self, timeout_s: float) -> dict[str, float]:
        """Wait for the next line. Raises PeerFailed if the process exits or takes too long."""
        try:
            line = self._lines.get(timeout=max(0.1, timeout_s))
        except queue.Empty:
            raise PeerFailed(self.name, f"no answer within {timeout_s:.0f} s") from None
        if not line:
            lines = self._errors.read_text(errors="replace").strip().splitlines()
            why = lines[-1][:300] if lines else "it exited without a message"
            raise PeerFailed(self.name, why)
        return json.loads(line)  # type: ignore[no-any-return]

    def round(self) -> Figures:
        """Measure one round. Raises PeerFailed."""
        assert self._process.stdin is not None
        try:
            print("round", file=self._process.stdin, flush=True)
        except OSError as error:
            raise PeerFailed(self.name, f"it exited: {error}") from None
        return self.answer(_ROUND_S)

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill the process, which frees its device memory."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def compare(bench: GpuBench, budget: Budget, side: str) -> None:
    """Compare localgen with a peer, if it is ready in time and computes the same logits."""
    quick = bench.report.quick
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Peer(side, Path(folder), quick=quick) as peer_process:
                _compare(bench, peer_process, budget)
        except PeerFailed as error:
            bench.report.skipped.append((error.name, str(error)))
            progress(f"skipped {error.name}: {error}")


def _compare(bench: GpuBench, other: Peer, budget: Budget) -> None:
    """Raises PeerFailed."""
    case_begins(f"{other.name}: load and compile")
    begun_s = time.monotonic()
    other.answer(bench.plan.peer_ready_s)
    progress(f"{other.name}: ready after {time.monotonic() - begun_s:.0f} s")
    if not _has_our_logits(bench, other):
        return
    plan, shape = bench.plan, bench.plan.plain
    alone_test = f"{plan.alone.prompt} in/{plan.alone.answer} out"
    batch_test = f"{plan.peer.requests} × {plan.peer.prompt} in/{plan.peer.answer} out"
    with bench.session(shape, plan.kv_tokens // 4) as session:

        def run() -> Figures:
            if other.name in peer.ALONE:
                return alone(bench, session, shape)
            return at_once(bench, session, shape, plan.peer)

        for _ in range(2):  # warm-up: compile and capture
            run()
        test = alone_test if other.name in peer.ALONE else batch_test
        sides = {f"localgen, {shape.name}": run, other.name: other.round}
        rounds = min(plan.rounds, _ROUNDS)
        bench.rounds("peers", f"{test}, {other.name}", sides, rounds, budget)


def _has_our_logits(bench: GpuBench, other: Peer) -> bool:
    shape, prompt = bench.plan.plain, peer.asked_prompt(bench.plan)
    model = bench.model(shape)
    ours = Probe(shape.spec, model.weights, max_len=len(prompt)).text(prompt)[-1].float().cpu()
    theirs = torch.load(other.logits, weights_only=True)
    check = CorrectnessCheck(f"logits of {other.name}", relative_error(theirs, ours), LOGITS)
    bench.check(check)
    return check.passed
