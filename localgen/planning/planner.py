"""Plan models by name, including the actual usage of a loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from localgen.backends.errors import LocalgenError
from localgen.backends.formats.model_facts import ModelFacts
from localgen.backends.model_info import LoadOptions
from localgen.hub.hf_client import Notify
from localgen.planning.find import find_draft_facts, find_model_facts
from localgen.planning.loaded_usage import LoadedUsage, find_loaded, with_loaded_options
from localgen.planning.plan import MemoryPlan, plan_memory
from localgen.planning.resources import MachineResources, machine_resources


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model to plan, in one or several quantizations, and the machine it would run on.

    others: quantizations to choose from. options: those of the loaded model where none are given.
    loaded: usage of the model, if it is loaded; its memory then counts as free.
    """

    facts: tuple[ModelFacts, ...]
    others: tuple[ModelFacts, ...]
    draft: ModelFacts | None
    options: LoadOptions
    machine: MachineResources
    loaded: LoadedUsage | None

    def plan(self, facts: ModelFacts) -> MemoryPlan:
        """Plan one of the quantizations on this machine. Raises like plan_memory."""
        return plan_memory(facts, self.options, self.machine, self.others, draft=self.draft)


@dataclass(frozen=True, slots=True)
class PlanReport:
    """One plan per requested quantization. loaded: usage of the first, if it is loaded."""

    plans: tuple[MemoryPlan, ...]
    loaded: LoadedUsage | None


def find_model(
    name: str | None,
    quants: Sequence[str],
    options: LoadOptions,
    stats: dict[str, Any],
    notify: Notify,
    remeasure: bool = False,
) -> PlannedModel:
    """Find a model by name. stats: the server's, with its loaded models.

    Raises like find_model_facts and find_draft_facts.
    """
    notify = _without_repeats(notify)
    found, others = find_model_facts(name, quants, notify)
    machine = machine_resources(notify, remeasure=remeasure)
    requested = options.draft
    loaded = find_loaded(stats, found[0].path) if len(found) == 1 else None
    if loaded is not None:
        # plan as if the model were not loaded: its own memory is available to it
        machine = replace(machine, ram_bytes=machine.ram_bytes + _reclaimable_bytes(loaded))
        options = with_loaded_options(options, loaded)
    draft = _find_draft(options, requested, name, found[0], notify)
    return PlannedModel(tuple(found), tuple(others), draft, options, machine, loaded)


def plan_model(found: PlannedModel) -> PlanReport:
    """Plan each quantization. Raises like plan_memory."""
    plans = tuple(map(found.plan, found.facts))
    if found.loaded is not None:
        plans = tuple(replace(one, reason=found.loaded.reason) for one in plans)
    return PlanReport(plans, found.loaded)


def _find_draft(
    options: LoadOptions,
    requested: str | None,
    model: str | None,
    facts: ModelFacts,
    notify: Notify,
) -> ModelFacts | None:
    """Find the draft model: the requested one, or the loaded model's if it is still available."""
    try:
        return find_draft_facts(options.draft, model, facts, notify)
    except LocalgenError as error:
        if requested is not None:
            raise
        notify(error.message)
        return None


def _without_repeats(notify: Notify) -> Notify:
    """Suppress repeated notices: a model and its draft model may cause the same ones."""
    printed: set[str] = set()

    def new(line: str) -> None:
        if line not in printed:
            printed.add(line)
            notify(line)

    return new


def _reclaimable_bytes(loaded: LoadedUsage) -> int:
    """Main memory that unloading the model would free; mapped weights already count as free."""
    return 0 if loaded.gpu_bytes else loaded.unmapped_bytes
