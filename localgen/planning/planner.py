"""A name and what was asked for become plans, beside what is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from localgen.backends.errors import LocalgenError
from localgen.backends.formats.model_facts import ModelFacts
from localgen.backends.model_info import LoadOptions
from localgen.planning.find import Notify, find_draft_facts, find_model_facts
from localgen.planning.loaded_usage import LoadedUsage, find_loaded, with_loaded_options
from localgen.planning.plan import MemoryPlan, plan_memory
from localgen.planning.resources import machine_resources


@dataclass(frozen=True, slots=True)
class PlanReport:
    """One for each quantization that was asked for. loaded: the first one, where it is."""

    plans: tuple[MemoryPlan, ...]
    loaded: LoadedUsage | None


def plan_model(
    name: str | None,
    quants: Sequence[str],
    options: LoadOptions,
    stats: dict[str, Any],
    notify: Notify,
    remeasure: bool = False,
) -> PlanReport:
    """stats: the server's, with its loaded models. Raises what find and plan raise."""
    wanted = options.draft
    model, notify = name or os.environ.get("LOCALGEN_MODEL"), _without_repeats(notify)
    found, others = find_model_facts(model, quants, notify)
    machine = machine_resources(remeasure=remeasure)
    loaded = find_loaded(stats, found[0].path) if len(found) == 1 else None
    if loaded is not None:
        # as if it were not here: its own memory is what it may have
        machine = replace(machine, ram_bytes=machine.ram_bytes + _reclaimable_bytes(loaded))
        options = with_loaded_options(options, loaded)
    draft = _find_draft(options, wanted, model, found[0], notify)
    plans = tuple(plan_memory(facts, options, machine, others, draft=draft) for facts in found)
    if loaded is not None:
        plans = tuple(replace(one, reason=loaded.reason) for one in plans)
    return PlanReport(plans, loaded)


def _find_draft(
    options: LoadOptions,
    requested: str | None,
    model: str | None,
    facts: ModelFacts,
    notify: Notify,
) -> ModelFacts | None:
    """The draft model: the one that is wanted, or that the loaded model has as far as it is still
    here."""
    try:
        return find_draft_facts(options.draft, model, facts, notify)
    except LocalgenError as error:
        if requested is not None:
            raise
        notify(error.message)
        return None


def _without_repeats(notify: Notify) -> Notify:
    """What a model and its draft model both have to say need not be read twice."""
    said: set[str] = set()

    def new(line: str) -> None:
        if line not in said:
            said.add(line)
            notify(line)

    return new


def _reclaimable_bytes(loaded: LoadedUsage) -> int:
    """Main memory that would be free without it; mapped weights count as free already."""
    return 0 if loaded.gpu_bytes else loaded.unmapped_bytes
