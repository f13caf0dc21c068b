"""Other engines in the same run: started during the checks, measured alternating with localgen."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType

import torch

from benchmarks.gpu_parts import peer
from benchmarks.gpu_parts.bench import GpuBench, Side, progress
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.device import relative_error
from benchmarks.gpu_parts.loaded import serving
from benchmarks.gpu_parts.probe import Probe
from benchmarks.gpu_parts.report import CorrectnessCheck, Figures
from benchmarks.gpu_parts.workloads import alone, at_once

ROOT = Path(__file__).parents[2]
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
    """A process of benchmarks.gpu_parts.peer with one peer."""

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

    def close(self) -> None:
        """Kill the process, which frees its device memory."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Peers:
    """All peers, started at once. As a context manager it ends them."""

    def __init__(self, *, quick: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.all = [Peer(name, folder, quick=quick) for name in (*peer.ALONE, *peer.BATCH)]

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all peers."""
        for one in self.all:
            one.close()
        self._folder.cleanup()


def compare(bench: GpuBench, peers: Peers, budget: Budget) -> None:
    """Compare localgen with the peers that are ready in time and compute the same logits."""
    ready = [one for one in peers.all if _is_ready(bench, one)]
    if not ready:
        return
    plan, shape = bench.plan, bench.plan.plain
    ours = f"localgen, {shape.name}"
    with serving(bench.model(shape), bench.device, kv_tokens=plan.kv_tokens // 4) as session:
        tests: tuple[tuple[str, Side, tuple[str, ...]], ...] = (
            (
                f"{plan.alone.prompt} in/{plan.alone.answer} out",
                lambda: alone(bench, session, shape),
                peer.ALONE,
            ),
            (
                f"{plan.peer.requests} × {plan.peer.prompt} in/{plan.peer.answer} out",
                lambda: at_once(bench, session, shape, plan.peer),
                peer.BATCH,
            ),
        )
        for test, run, names in tests:
            theirs: dict[str, Side] = {one.name: one.round for one in ready if one.name in names}
            for _ in range(2):  # warm-up: compile and capture
                run()
            while theirs and budget.fits(test):
                try:
                    bench.rounds("peers", test, {ours: run, **theirs}, _ROUNDS, budget)
                    break
                except PeerFailed as error:  # repeat the rounds without it
                    _skip(bench, error)
                    del theirs[error.name]


def _skip(bench: GpuBench, error: PeerFailed) -> None:
    bench.report.skipped.append((error.name, str(error)))
    progress(f"skipped {error.name}: {error}")


def _is_ready(bench: GpuBench, one: Peer) -> bool:
    """Wait until a peer is ready; return True if its logits equal localgen's."""
    try:
        one.answer(bench.peers_ready_s())
    except PeerFailed as error:
        _skip(bench, error)
        one.close()
        return False
    shape, prompt = bench.plan.plain, peer.asked_prompt(bench.plan)
    model = bench.model(shape)
    ours = Probe(shape.spec, model.weights, max_len=len(prompt)).text(prompt)[-1].float().cpu()
    theirs = torch.load(one.logits, weights_only=True)
    check = CorrectnessCheck(f"logits of {one.name}", relative_error(theirs, ours), LOGITS)
    bench.check(check)
    return check.passed
