"""The loop: inbox → plan → launch, publish the step before, collect → apply."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from localgen.backends.engine.embeddings import Embeddings, Texts
from localgen.backends.engine.input_processor import Intake
from localgen.backends.engine.output_processor import Answer
from localgen.backends.engine.scheduler import Output, Scheduler
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine.speculation.speculation import MOST_DRAFTS, Speculation
from localgen.backends.engine.stats import Stats, finished
from localgen.backends.engine.token_budget import TokenBudget
from localgen.backends.errors import LocalgenError
from localgen.backends.runner.interface import (
    Chunk,
    LooksAhead,
    ModelRunner,
    NoRoom,
    StepFailed,
    StepResult,
)
from localgen.backends.runner.sequence import Sequence, State
from localgen.backends.types import (
    Delta,
    Embedded,
    EmbedRequest,
    Failed,
    Finished,
    Request,
    StepEvents,
)

STATS_INTERVAL_S = 0.25
# while nothing happens, what is said of the last minute ages
IDLE_STATS_S = 15.0
_NO_WAY_BACK = (
    "impossible: what is computed cannot be taken back (the model's kind, or --no-prefix-cache)"
)


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Mail = Sequence | Texts | _Cancel | Failed | Finished | _Stop


class Engine:
    """Serves requests to one model. submit, cancel and stop may be called from any thread.

    publish: called from the loop's thread with everything one step had to say.
    """

    def __init__(
        self,
        runner: ModelRunner,
        intake: Intake,
        *,
        itl_target_ms: float,
        max_queue: int,
        publish: Callable[[StepEvents], None],
        drafters: Seq[Drafter] = (),
        max_drafts: int = MOST_DRAFTS,
    ) -> None:
        self._runner = runner
        self._intake = intake
        self._publish = publish
        self._budget = TokenBudget(runner.limits.max_batch_tokens, itl_target_ms)
        self._scheduler = Scheduler(runner, budget=self._budget, max_queue=max_queue)
        ahead = runner if isinstance(runner, LooksAhead) and runner.limits.looks_ahead else None
        self._speculation = Speculation(
            drafters if runner.limits.can_rewind else (),
            most=max_drafts,
            why_none="switched off" if runner.limits.can_rewind else _NO_WAY_BACK,
            settle=ahead.settle if ahead else None,
        )
        self._embeddings = Embeddings(runner, itl_target_ms=itl_target_ms, max_queue=max_queue)
        self._stats = Stats()
        self._stats_at_s = 0.0
        self._inbox: queue.SimpleQueue[_Mail] = queue.SimpleQueue()
        self._cramped = False  # the step that comes is to be without drafts
        self._answers: dict[str, Answer] = {}
        self._unpublished: list[Output] = []
        self._stopped: list[Sequence] = []  # reached a stop string while a step was in flight
        self._deltas: list[Delta] = []
        self._finished: list[Finished] = []
        self._failed: list[Failed] = []
        # threads of their own, so that a long prompt delays neither the loop nor a cancel, and
        # thousands of texts no prompt
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self._text_preparer = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._preparing: set[str] = set()
        self._preparing_lock = threading.Lock()

    # -- from any thread --------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Take a request; it ends in exactly one Finished or Failed."""
        with self._preparing_lock:
            self._preparing.add(request.id)
        self._preparer.submit(self._prepare, request)

    def embed(self, request: EmbedRequest) -> None:
        """Take a request for vectors; it ends in exactly one Embedded or Failed."""
        with self._preparing_lock:
            self._preparing.add(request.id)
        self._text_preparer.submit(self._prepare, request)

    def cancel(self, request_id: str) -> None:
        """End a request within one step. Unknown ids are ignored."""
        with self._preparing_lock:
            if request_id in self._preparing:
                self._preparing.discard(request_id)
            else:
                self._inbox.put(_Cancel(request_id))

    def stop(self) -> None:
        """Leave `run` after the step in flight."""
        self._inbox.put(_Stop())

    def _prepare(self, request: Request | EmbedRequest) -> None:
        mail: _Mail
        try:
            if isinstance(request, Request):
                mail = self._intake.prepare(request)
            else:
                mail = self._intake.texts(request)
        except LocalgenError as error:
            mail = Failed(request.id, error.code, error.message, error.param)
        except Exception as error:  # a request must end, whatever our bug
            mail = Failed(request.id, "internal_error", f"{type(error).__name__}: {error}")
        with self._preparing_lock:
            if request.id not in self._preparing and isinstance(mail, Sequence):
                mail = finished(mail, "cancelled", stop=None, completion_tokens=0)
            if request.id not in self._preparing and isinstance(mail, Texts):
                mail = Failed(request.id, "cancelled", "the request was cancelled")
            self._preparing.discard(request.id)
            self._inbox.put(mail)

    # -- the loop ---------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stop. StepFailed: every request has failed and the model must be reloaded."""
        try:
            self._flush(idle=True)
            while self.step(wait=True):
                pass
        except StepFailed as error:
            self._fail_all(str(error))
            raise
        finally:
            self._preparer.shutdown(wait=False, cancel_futures=True)
            self._text_preparer.shutdown(wait=False, cancel_futures=True)
            self._speculation.close()

    def step(self, *, wait: bool) -> bool:
        """One turn of the loop; wait: sleep while there is nothing to do. False: told to stop."""
        self._end_stopped()
        if not self._receive(wait=wait):
            return False
        self._draft()
        chunks = self._scheduler.plan()
        if not chunks:
            if not self._embed(decoding=0):
                self._refuse_unplaceable()
            self._flush(idle=not self._embeddings.has_work)
            return True
        started_s = time.monotonic()
        ticket = self._runner.launch(chunks)
        self._flush(idle=False)
        try:
            result = self._runner.collect(ticket)
        except NoRoom:
            self._make_room(chunks)
            return True
        self._apply(chunks, result, started_s)
        self._embed(decoding=len(self._scheduler.decoding))
        return True

    def _draft(self) -> None:
        """Let sequences have drafts, where that pays."""
        if self._cramped:
            self._cramped = False
            return
        outputs = min(self._runner.limits.max_outputs, self._runner.limits.max_batch_tokens)
        decoding = self._scheduler.decoding
        drafts = self._speculation.propose(
            decoding,
            outputs=outputs,
            beside_prompts=len(decoding) < len(self._scheduler.running),
        )
        for seq, proposal in drafts.items():
            self._scheduler.draft(seq, proposal)

    def _embed(self, *, decoding: int) -> bool:
        """Compute a slice of the texts that wait for vectors; whether any waited."""
        if not self._embeddings.has_work:
            return False
        most = self._budget.tokens(decoding)
        self._scheduler.counters.prompt_tokens += self._embeddings.turn(beside=decoding, most=most)
        return True

    def _apply(self, chunks: list[Chunk], result: StepResult, started_s: float) -> None:
        now_s = time.monotonic()
        step_ms = (now_s - started_s) * 1e3 + self._speculation.waited_ms
        outputs = self._scheduler.apply(chunks, result, step_ms)
        self._stats.step(now_s, step_ms, chunks, outputs)
        self._speculation.observe(chunks, step_ms)
        self._unpublished += outputs

    def _receive(self, *, wait: bool) -> bool:
        """Read the inbox; False: told to stop."""
        busy = self._scheduler.has_work or self._embeddings.has_work
        idle = not (busy or self._unpublished)
        try:
            while True:
                mail = self._inbox.get(block=wait and idle, timeout=IDLE_STATS_S)
                if isinstance(mail, _Stop):
                    return False
                self._open(mail)
                idle = False
        except queue.Empty:
            return True

    def _open(self, mail: Sequence | Texts | _Cancel | Failed | Finished) -> None:
        match mail:
            case Sequence():
                self._accept(mail)
            case Texts():
                self._accept_texts(mail)
            case _Cancel(request_id):
                seq = self._scheduler.get(request_id)
                if seq:
                    self._cancel(seq)
                self._embeddings.cancel(request_id)
            case Failed():
                self._failed.append(mail)
                self._stats.ended(mail.request_id, "error")
            case Finished():
                self._finished.append(mail)
                self._stats.ended(mail.request_id, mail.reason)

    def _accept(self, seq: Sequence) -> None:
        try:
            self._scheduler.submit(seq)
        except LocalgenError as error:
            self._fail(seq, error.code, error.message)
        else:
            self._answers[seq.id] = Answer(seq, self._intake.tokenizer)

    def _accept_texts(self, texts: Texts) -> None:
        try:
            self._embeddings.submit(texts)
        except LocalgenError as error:
            self._failed.append(Failed(texts.id, error.code, error.message, error.param))
            self._stats.ended(texts.id, "error")

    def _cancel(self, seq: Sequence) -> None:
        self._scheduler.end(seq)
        answer = self._answers.pop(seq.id)
        rest = answer.rest()
        if rest:
            self._deltas.append(rest)
        self._finish(seq, "cancelled", None, answer.num_tokens)

    def _end_stopped(self) -> None:
        for seq in self._stopped:
            if seq.state is not State.ENDED:
                self._scheduler.end(seq)
        self._stopped.clear()

    # -- what cannot be computed ------------------------------------------------------------

    def _refuse_unplaceable(self) -> None:
        """Nobody runs and still the next request does not fit: it never will."""
        seq = self._scheduler.next_in_turn
        if self._scheduler.running or seq is None:
            return
        self._scheduler.end(seq)
        self._fail(
            seq,
            "out_of_memory",
            f"{len(seq.tokens):,} tokens do not fit the pool of "
            f"{self._runner.limits.kv_tokens:,} tokens",
        )

    def _make_room(self, chunks: Seq[Chunk]) -> None:
        """The backend found no room for a planned step: leave out the drafts, or else preempt one
        and keep all others."""
        self._cramped = any(chunk.num_drafts for chunk in chunks)
        for chunk in chunks:
            chunk.seq.drafts, chunk.seq.drawn_from = [], ()
        if self._cramped or self._scheduler.give_way():
            return
        for seq in self._scheduler.running:
            self._scheduler.end(seq)
            if seq.id in self._answers:
                self._fail(seq, "out_of_memory", "the KV cache has no room for the next token")

    def _fail_all(self, why: str) -> None:
        for seq in [*self._scheduler.running, *self._scheduler.queue]:
            if seq.id in self._answers:
                self._fail(seq, "engine_died", why)
        self._embeddings.fail_all("engine_died", why)
        self._flush(idle=True)

    def _fail(self, seq: Sequence, code: str, message: str) -> None:
        self._answers.pop(seq.id, None)
        self._failed.append(Failed(seq.id, code, message))
        self._stats.ended(seq.id, "error")

    # -- what is said -----------------------------------------------------------------------

    def _finish(self, seq: Sequence, reason: str, stop: str | None, tokens: int) -> None:
        drafting = self._speculation.of(seq)
        self._finished.append(
            finished(seq, reason, stop=stop, completion_tokens=tokens, drafting=drafting)
        )
        self._stats.ended(seq.id, reason)

    def _say(self, output: Output) -> None:
        answer = self._answers.get(output.seq.id)
        if answer is None:  # cancelled since, or past its stop string
            return
        delta = answer.take(output)
        if delta:
            self._deltas.append(delta)
        reason = "stop" if answer.stopped is not None else output.reason
        if reason == "stop" and answer.has_called:
            reason = "tool_calls"
        if reason:
            del self._answers[output.seq.id]
            self._finish(output.seq, reason, answer.stopped, answer.num_tokens)
            if not output.reason:
                self._stopped.append(output.seq)

    def _flush(self, *, idle: bool) -> None:
        """Publish what is known since the last step, with statistics now and then."""
        for output in self._unpublished:
            self._say(output)
        self._unpublished.clear()
        embedded = self._take_embedded()
        now_s = time.monotonic()
        snapshot = None
        if idle or now_s - self._stats_at_s >= STATS_INTERVAL_S:
            snapshot = self._stats.snapshot(
                now_s,
                self._scheduler,
                self._runner.usage(),
                self._budget.tokens(1),
                self._speculation.stats,
            )
            self._stats_at_s = now_s
        if self._deltas or self._finished or self._failed or snapshot or embedded:
            self._publish(
                StepEvents(
                    tuple(self._deltas),
                    tuple(self._finished),
                    tuple(self._failed),
                    snapshot,
                    embedded,
                )
            )
            self._deltas, self._finished, self._failed = [], [], []

    def _take_embedded(self) -> tuple[Embedded, ...]:
        """The vectors that are done; what went wrong with others joins the failures."""
        ended, self._embeddings.ended = self._embeddings.ended, []
        for end in ended:
            if isinstance(end, Failed):
                self._failed.append(end)
                self._stats.ended(end.request_id, _reason(end))
            else:
                self._stats.ended(end.request_id, "embedded")
        return tuple(end for end in ended if isinstance(end, Embedded))


def _reason(end: Failed) -> str:
    return end.code if end.code == "cancelled" else "error"
