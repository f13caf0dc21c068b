"""Measure the speed-up from a draft model with scripted acceptance rates.

Once as many drafts as the policy chooses, and once a fixed number in each step, so that what the
policy costs or misses shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.answers import decode_tok_s
from benchmarks.gpu_parts.bench import GpuBench
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.loaded import engine_session
from benchmarks.gpu_parts.progress import case_begins
from benchmarks.gpu_parts.report import Figures
from benchmarks.scripted_draft import FORCED_SAMPLING, FORCED_TOKEN, ScriptedDraftRunner
from benchmarks.session import Session
from localgen.backends.engine.speculation.allocation import DraftOption
from localgen.backends.engine.speculation.draft_model import ModelDrafter
from localgen.backends.engine.speculation.policy import Speculation

ACCEPTANCES = (0.5, 0.7, 0.9)
NUM_DRAFTS = (3, 5)


class FixedDrafts(Speculation):
    """Speculation that drafts num_drafts tokens in each step, whatever they cost."""

    def __init__(self, replaced: Speculation, num_drafts: int) -> None:
        super().__init__(replaced.drafters, replaced.costs, synchronize=replaced._synchronize)
        self._count = num_drafts

    def _num_drafts(self, options: Sequence[DraftOption | None], limit: int) -> list[int] | None:
        counts = [min(self._count, len(each.probs)) if each else 0 for each in options]
        return counts if 0 < sum(counts) <= limit else None

    def _is_lookup_due(self, count: int) -> bool:
        return count in self.costs


def drafts(bench: GpuBench, budget: Budget) -> None:
    """Compare decoding one sequence with and without the draft model."""
    plan = bench.plan
    kv_tokens = plan.alone.prompt + plan.alone.answer + 4096
    target = bench.runner(plan.plain, kv_tokens)
    draft = bench.runner(plan.small, kv_tokens, is_draft=True)
    prompt = bench.prompt(plan.plain, plan.alone.prompt)
    vocab = plan.plain.spec.vocab_size
    for alpha in ACCEPTANCES:
        sessions = {"plain": engine_session(target, vocab)}
        for count in (0, *NUM_DRAFTS):
            drafter = ModelDrafter(ScriptedDraftRunner(draft, FORCED_TOKEN, alpha), "scripted")
            drafting = engine_session(target, vocab, [drafter])
            if count:
                speculation = drafting.engine._speculation
                drafting.engine._speculation = FixedDrafts(speculation, count)
            sessions[f"{count or 'chosen'} drafts of {plan.small.name}"] = drafting
        sides = {
            name: partial(_figures, session, prompt, plan.alone.answer)
            for name, session in sessions.items()
        }
        case_begins(f"acceptance {alpha:g}: warm-up")
        for _ in range(2):  # warm-up: compile and capture, then measure step times
            for side in sides.values():
                side()
        bench.rounds("drafts", f"acceptance {alpha:g}", sides, plan.rounds, budget)
        for session in sessions.values():
            session.stop()
    for one in (target, draft):
        one.close()


def _figures(session: Session, prompt: list[int], tokens: int) -> Figures:
    (answer,) = session.ask([prompt], tokens, FORCED_SAMPLING)
    stats = session.stats.speculation
    return {
        "decode_tok_s": decode_tok_s([answer]),
        "tokens_a_step": stats.tokens_per_step,
        "speedup_estimated": stats.speedup,
    }
