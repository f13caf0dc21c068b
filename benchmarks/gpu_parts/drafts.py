"""Measure the speed-up from a draft model with scripted acceptance rates."""

from __future__ import annotations

from functools import partial

from benchmarks.answers import decode_tok_s
from benchmarks.gpu_parts.bench import GpuBench
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.loaded import engine_session
from benchmarks.gpu_parts.progress import case_begins
from benchmarks.gpu_parts.report import Figures
from benchmarks.scripted_draft import FORCED_SAMPLING, FORCED_TOKEN, ScriptedDraftRunner
from benchmarks.session import Session
from localgen.backends.engine.speculation.draft_model import ModelDrafter

ACCEPTANCES = (0.5, 0.7, 0.9)


def drafts(bench: GpuBench, budget: Budget) -> None:
    """Compare decoding one sequence with and without the draft model."""
    plan = bench.plan
    kv_tokens = plan.alone.prompt + plan.alone.answer + 4096
    target = bench.runner(plan.plain, kv_tokens)
    draft = bench.runner(plan.small, kv_tokens, is_draft=True)
    prompt = bench.prompt(plan.plain, plan.alone.prompt)
    vocab = plan.plain.spec.vocab_size
    for alpha in ACCEPTANCES:
        drafter = ModelDrafter(ScriptedDraftRunner(draft, FORCED_TOKEN, alpha), "scripted")
        sessions = {
            "plain": engine_session(target, vocab),
            f"drafts of {plan.small.name}": engine_session(target, vocab, [drafter]),
        }
        sides = {
            name: partial(_figures, session, prompt, plan.alone.answer)
            for name, session in sessions.items()
        }
        case_begins(f"acceptance {alpha:g}: warm-up")
        for side in sides.values():
            side()  # warm-up: compile, capture, and let the engine measure step times
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
