"""Totals of the scheduler since the engine started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the engine started."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafting_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
