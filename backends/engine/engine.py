"""The engine loop: read the inbox, plan, launch, publish the previous step, collect, apply."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from localgen.backends.engine.answers import Answers
from localgen.backends.engine.embeddings import EmbeddingScheduler, EmbeddingTask
from localgen.backends.engine.held_prompts import HeldPrompts
from localgen.backends.engine.inbox import AnswerNow, Cancel
from localgen.backends.engine.input_processor import InputProcessor
from localgen.backends.engine.outbox import Outbox
from localgen.backends.engine.prefix_tiers import PrefixTiers
from localgen.backends.engine.preparation import Prepared, Preparer
from localgen.backends.engine.preparation_costs import AnyRequest
from localgen.backends.engine.scheduler import Scheduler, SequenceOutput
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine.speculation.policy import Speculation
from localgen.backends.engine.stats import StatsRecorder
from localgen.backends.engine.thinking_budgets import ThinkingBudgets
from localgen.backends.engine.token_budget import TokenBudget
from localgen.backends.engine_stats import SAVE_TIMEOUT_S
from localgen.backends.errors import LocalgenError
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.runner.interface import (
    AsyncRunner,
    Chunk,
    ModelRunner,
    NoRoom,
    StepFailed,
    StepResult,
    TieredRunner,
)
from localgen.backends.runner.sequence import Sequence, SequenceState
from localgen.backends.types import (
    MAX_DRAFT_TOKENS,
    EmbedRequest,
    Failed,
    Finished,
    Request,
    StepEvents,
    Tokenized,
    TokenizeRequest,
)

STATS_INTERVAL_S = 0.25
# idle engines publish too: the server takes one that sends nothing for twice as long for silent
IDLE_STATS_INTERVAL_S = 5.0
# one for requests that may take long to prepare, one for the others
_PREPARATION_THREADS = 2
_CANNOT_REWIND = (
    "impossible: computed tokens cannot be removed from the KV cache "
    "(model architecture, or --no-prefix-cache)"
)


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(frozen=True, slots=True)
class _Drained:
    """The disk has been written: more prefixes can be saved."""


_Mail = Sequence | EmbeddingTask | Tokenized | Cancel | AnswerNow | Failed | Finished | _Drained


class Engine:
    """Serves requests for one model. The submit methods, cancel and stop are thread-safe.

    publish: called from the engine thread with the events of each step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        input_processor: InputProcessor,
        *,
        itl_target_ms: float,
        max_queue: int,
        publish: Callable[[StepEvents], None],
        drafters: Seq[Drafter] = (),
        max_drafts: int = MAX_DRAFT_TOKENS,
        prefix_store: PrefixStore | None = None,
    ) -> None:
        self._runner = runner
        self._tiers = None
        if prefix_store is not None and isinstance(runner, TieredRunner):
            self._tiers = PrefixTiers(runner, prefix_store)
            prefix_store.on_drained(lambda: self._inbox.put(_Drained()))
        self._async_runner = runner if isinstance(runner, AsyncRunner) else None
        self._input_processor = input_processor
        self._outbox = Outbox(publish)
        self._budget = TokenBudget(runner.limits.max_batch_tokens, itl_target_ms)
        self._scheduler = Scheduler(
            runner, budget=self._budget, max_queue=max_queue, tiers=self._tiers
        )
        self._speculation = Speculation(
            drafters if runner.limits.can_rewind else (),
            self._budget.decode_costs,
            max_drafts=max_drafts,
            disabled_reason="switched off" if runner.limits.can_rewind else _CANNOT_REWIND,
            synchronize=self._synchronize,
        )
        self._embedding_scheduler = EmbeddingScheduler(
            runner, itl_target_ms=itl_target_ms, max_queue=max_queue
        )
        self._held_prompts = HeldPrompts(runner, prefix_store)
        self._stats = StatsRecorder()
        self._stats_at_s = 0.0
        self._inbox: queue.SimpleQueue[_Mail | _Stop] = queue.SimpleQueue()
        self._skip_drafts_once = False  # no drafts in the next step
        self._answers = Answers(
            input_processor.tokenizer,
            self._outbox,
            self._stats,
            no_drafts_reason=lambda: self._speculation.reason,
        )
        self._thinking_budgets = ThinkingBudgets(self._scheduler, input_processor.tokenizer)
        self._save_until_s = 0.0
        self._unpublished: list[SequenceOutput] = []
        self._is_decoding = False  # the last step computed no prompt
        # their text ended them while a step was in flight
        self._stopped_in_flight: list[Sequence] = []
        # separate threads: tokenizing a long prompt must not delay the loop or a cancellation, one
        # client's requests not those of others, and thousands of embedding inputs not prompts
        self._request_preparer = Preparer(
            self._prepare, self._inbox.put, threads=_PREPARATION_THREADS, name="input-processor"
        )
        self._embedding_preparer = Preparer(
            self._prepare, self._inbox.put, threads=1, name="embedding-input"
        )

    # -- thread-safe methods ----------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Submit a request; it ends with exactly one Finished or Failed event."""
        self._request_preparer.submit(request)

    def submit_embedding(self, request: EmbedRequest) -> None:
        """Submit an embedding request; it ends with exactly one Embedded or Failed event."""
        self._embedding_preparer.submit(request)

    def submit_tokenize(self, request: TokenizeRequest) -> None:
        """Submit a request for tokens; it ends with exactly one Tokenized or Failed event."""
        self._request_preparer.submit(request)

    def cancel(self, request_id: str) -> None:
        """Cancel a request, effective within one step. Unknown ids are ignored."""
        preparers = (self._request_preparer, self._embedding_preparer)
        if not any(preparer.cancel(request_id) for preparer in preparers):
            self._inbox.put(Cancel(request_id))

    def answer_now(self, request_id: str) -> None:
        """End the reasoning of a request, if it reasons, as an exceeded thinking budget does."""
        self._inbox.put(AnswerNow(request_id))

    def stop(self) -> None:
        """Make `run` return after the step in flight, and SAVE_TIMEOUT_S from now at the latest."""
        self._save_until_s = time.monotonic() + SAVE_TIMEOUT_S
        self._inbox.put(_Stop())

    def _prepare(self, request: AnyRequest) -> Prepared:
        match request:
            case Request():
                return self._input_processor.prepare(request)
            case EmbedRequest():
                return self._input_processor.prepare_embedding(request)
            case TokenizeRequest():
                return self._input_processor.tokenize(request)

    # -- the loop ---------------------------------------------------------------------------

    def run(self) -> None:
        """Serve requests until `stop`.

        Raises StepFailed after failing all requests; the model must then be reloaded.
        """
        try:
            self._flush(idle=True)
            while self.step(wait=True):
                pass
            self.save_prefixes(self._save_until_s)
        except StepFailed as error:
            self._fail_all(str(error))
            raise
        finally:
            self._request_preparer.close()
            self._embedding_preparer.close()
            self._speculation.close()

    def step(self, *, wait: bool) -> bool:
        """Run one iteration of the loop; return False after `stop`.

        wait: block while there is nothing to do.
        """
        self._end_stopped_sequences()
        if not self._drain_inbox(wait=wait):
            return False
        self._held_prompts.check()
        if self._thinking_budgets:
            self._unpublished += self._thinking_budgets.enforce(self._process_unpublished)
        self._propose_drafts()
        chunks = self._scheduler.plan()
        for seq, error in self._scheduler.take_rejected():
            self._answers.fail(seq, error.code, error.message)
        if not chunks:
            if not self._step_embeddings(num_decoding=0):
                self._fail_unschedulable()
            self._flush(idle=not self._embedding_scheduler.has_work)
            return True
        started_s = time.monotonic()
        ticket = self._runner.launch(chunks)
        # not with the first token of a request, nor if more than this step comes before the next
        was_decoding = self._is_decoding
        self._is_decoding = not self._scheduler.is_prefilling
        may_wait = was_decoding and self._is_decoding and not self._embedding_scheduler.has_work
        self._flush(idle=False, deltas_may_wait=may_wait)
        try:
            result = self._runner.collect(ticket)
        except NoRoom:
            self._recover_from_no_room(chunks)
            return True
        self._apply(chunks, result, started_s)
        if self._tiers is not None:
            self._tiers.save_while_busy()
        if self._embedding_scheduler.has_work:
            self._step_embeddings(num_decoding=len(self._scheduler.decoding))
        return True

    def _propose_drafts(self) -> None:
        """Set draft tokens for the next step where speculation is expected to pay."""
        if self._skip_drafts_once:
            self._skip_drafts_once = False
            return
        outputs = min(self._runner.limits.max_outputs, self._runner.limits.max_batch_tokens)
        decoding = self._scheduler.decoding
        drafts = self._speculation.propose(
            decoding,
            max_outputs=outputs,
            max_prefill_tokens=self._budget.prompt_tokens(len(decoding)),
            with_prompts=self._scheduler.is_prefilling,
        )
        for seq, proposal in drafts.items():
            self._scheduler.set_drafts(seq, self._thinking_budgets.limited(seq, proposal))

    def _synchronize(self) -> float:
        """Wait for a step launched ahead; return the milliseconds."""
        if self._async_runner is None or not self._runner.limits.runs_ahead:
            return 0.0
        started_s = time.monotonic()
        self._async_runner.synchronize()
        return (time.monotonic() - started_s) * 1e3

    def _step_embeddings(self, *, num_decoding: int) -> bool:
        """Compute a slice of the queued embedding requests; return False if there are none."""
        if not self._embedding_scheduler.has_work:
            return False
        most = self._budget.prompt_tokens(num_decoding)
        self._scheduler.counters.prompt_tokens += self._embedding_scheduler.step(
            num_decoding=num_decoding, max_tokens=most
        )
        return True

    def _apply(self, chunks: Seq[Chunk], result: StepResult, started_s: float) -> None:
        now_s = time.monotonic()
        step_ms = (now_s - started_s) * 1e3 + self._speculation.waited_ms
        is_typical = self._async_runner is None or not self._async_runner.is_warming_up
        outputs = self._scheduler.apply(chunks, result, step_ms, is_typical=is_typical)
        self._stats.record_step(now_s, step_ms, chunks, outputs)
        if self._speculation.drafters:
            self._speculation.observe(chunks, step_ms, is_typical=is_typical)
        self._unpublished += outputs

    def _drain_inbox(self, *, wait: bool) -> bool:
        """Handle all inbox items; return False after `stop`."""
        busy = self._scheduler.has_work or self._embedding_scheduler.has_work
        idle = not (busy or self._unpublished)
        self._set_idle(wait and idle)
        if wait and idle:
            self._prepare_until_mail()
        try:
            while True:
                mail = self._inbox.get(block=wait and idle, timeout=IDLE_STATS_INTERVAL_S)
                if isinstance(mail, _Stop):
                    return False
                self._set_idle(False)
                self._handle(mail)
                idle = False
        except queue.Empty:
            return True

    def _prepare_until_mail(self) -> None:
        before, flushed_s = self._num_unsaved(), time.monotonic()
        while self._inbox.empty() and self._prepare_while_idle():
            if time.monotonic() - flushed_s > IDLE_STATS_INTERVAL_S:
                self._flush(idle=True)  # the server gives up an engine that is silent
                flushed_s = time.monotonic()
        if self._num_unsaved() != before:  # `localgen warm` waits for it
            self._flush(idle=True)

    def _num_unsaved(self) -> int:
        return self._tiers.store.num_unsaved if self._tiers is not None else 0

    def _prepare_while_idle(self) -> bool:
        return self._prepare_runners() or (self._tiers is not None and self._tiers.prepare())

    def _prepare_runners(self) -> bool:
        if self._async_runner is not None and self._async_runner.prepare_while_idle():
            self._budget.decode_costs.clear()
            return True
        return self._speculation.prepare_while_idle()

    def _set_idle(self, is_idle: bool) -> None:
        if self._tiers is not None:
            self._tiers.set_idle(is_idle)

    def save_prefixes(self, deadline_s: float) -> None:
        """End all requests, and save what was computed until the deadline (monotonic seconds)."""
        if self._tiers is None:
            return
        for seq in self._scheduler.running:
            self._scheduler.end(seq)
        # copies of pages that are in flight are waited for only if nothing runs
        self._embedding_scheduler.close_batch()
        self._tiers.save_all(deadline_s)

    def _handle(self, item: _Mail) -> None:
        match item:
            case Sequence():
                self._enqueue(item)
            case EmbeddingTask():
                self._enqueue_embedding(item)
            case Cancel(request_id):
                seq = self._scheduler.get(request_id)
                if seq:
                    self._cancel(seq)
                self._embedding_scheduler.cancel(request_id)
            case AnswerNow(request_id):
                if seq := self._scheduler.get(request_id):
                    self._thinking_budgets.set(seq, 0)
            case Tokenized():
                self._outbox.add(item)
            case Failed():
                self._outbox.add(item)
                self._stats.record_end(item.request_id, "error")
            case Finished():
                self._outbox.add(item)
                self._stats.record_end(item.request_id, item.reason)
            case _Drained():
                pass  # the loop goes on

    def _enqueue(self, seq: Sequence) -> None:
        try:
            self._scheduler.submit(seq)
        except LocalgenError as error:
            self._answers.fail(seq, error.code, error.message)
        else:
            self._answers.start(seq)
            self._held_prompts.add(seq)
            if seq.params.thinking_budget is not None:
                self._thinking_budgets.set(seq, seq.params.thinking_budget)

    def _enqueue_embedding(self, task: EmbeddingTask) -> None:
        try:
            self._embedding_scheduler.submit(task)
        except LocalgenError as error:
            self._outbox.add(Failed(task.id, error.code, error.message, error.param))
            self._stats.record_end(task.id, "error")

    def _cancel(self, seq: Sequence) -> None:
        self._scheduler.end(seq)
        self._answers.cancel(seq)

    def _end_stopped_sequences(self) -> None:
        for seq in self._stopped_in_flight:
            if seq.state is not SequenceState.ENDED:
                self._scheduler.end(seq)
        self._stopped_in_flight.clear()

    # -- out of memory, failures ------------------------------------------------------------

    def _fail_unschedulable(self) -> None:
        """Fail the next request if it does not fit although nothing is running."""
        seq = self._scheduler.next_waiting
        if self._scheduler.running or seq is None:
            return
        self._scheduler.end(seq)
        self._answers.fail(
            seq,
            "out_of_memory",
            f"{len(seq.tokens):,} tokens do not fit the pool of "
            f"{self._runner.limits.kv_tokens:,} tokens",
        )

    def _recover_from_no_room(self, chunks: Seq[Chunk]) -> None:
        """Recover from a planned step that did not fit in the KV cache.

        Retry without drafts if there were any, else preempt one sequence. If only one is running,
        fail it.
        """
        self._skip_drafts_once = any(chunk.num_drafts for chunk in chunks)
        for chunk in chunks:
            chunk.seq.drafts, chunk.seq.draft_probs = [], ()
        if self._skip_drafts_once or self._scheduler.preempt_one():
            return
        for seq in self._scheduler.running:
            self._scheduler.end(seq)
            if seq in self._answers:
                self._answers.fail(
                    seq, "out_of_memory", "the KV cache has no room for the next token"
                )

    def _fail_all(self, message: str) -> None:
        for seq in [*self._scheduler.running, *self._scheduler.queue]:
            if seq in self._answers:
                self._answers.fail(seq, "engine_died", message)
        self._embedding_scheduler.fail_all("engine_died", message)
        self._flush(idle=True)

    # -- events -----------------------------------------------------------------------------

    def _flush(self, *, idle: bool, deltas_may_wait: bool = False) -> None:
        """Publish the events of the previous step, with statistics every STATS_INTERVAL_S.

        deltas_may_wait: see Outbox.publish.
        """
        self._process_unpublished()
        self._collect_embedded()
        now_s = time.monotonic()
        snapshot = held_chunks = None
        if idle or now_s - self._stats_at_s >= STATS_INTERVAL_S:
            snapshot = self._stats.snapshot(
                now_s,
                self._scheduler,
                self._runner,
                self._budget.prompt_tokens(1),
                self._speculation,
                self._tiers.store if self._tiers is not None else None,
            )
            self._stats_at_s = now_s
            held_chunks = self._held_prompts.take_report()
        self._outbox.publish(snapshot, deltas_may_wait=deltas_may_wait, held_chunks=held_chunks)

    def _process_unpublished(self) -> None:
        self._stopped_in_flight += self._answers.process(self._unpublished)
        self._unpublished.clear()

    def _collect_embedded(self) -> None:
        """Move finished and failed embedding requests to the outbox."""
        ended, self._embedding_scheduler.results = self._embedding_scheduler.results, []
        for end in ended:
            self._outbox.add(end)
            reason = "embedded"
            if isinstance(end, Failed):
                reason = "cancelled" if end.code == "cancelled" else "error"
            self._stats.record_end(end.request_id, reason)
