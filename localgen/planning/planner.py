"""A name and what was asked for become plans, beside what is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from localgen.backends.errors import LocalgenError
from localgen.backends.formats.model_facts import Facts
from localgen.backends.model_info import LoadOptions
from localgen.planning.find import Say, find, find_draft
from localgen.planning.loaded_usage import Loaded, as_loaded, loaded_in
from localgen.planning.plan import Plan, plan
from localgen.planning.resources import machine_here


@dataclass(frozen=True, slots=True)
class Plans:
    """One for each quantization that was asked for. loaded: the first one, where it is."""

    plans: tuple[Plan, ...]
    loaded: Loaded | None


def plans_of(
    name: str | None,
    quants: Sequence[str],
    asked: LoadOptions,
    stats: dict[str, Any],
    say: Say,
    measure_again: bool = False,
) -> Plans:
    """stats: the server's, with its loaded models. Raises what find and plan raise."""
    wanted = asked.draft
    model, say = name or os.environ.get("LOCALGEN_MODEL"), _once(say)
    found, others = find(model, quants, say)
    machine = machine_here(measure_again=measure_again)
    loaded = loaded_in(stats, found[0].path) if len(found) == 1 else None
    if loaded is not None:
        # as if it were not here: its own memory is what it may have
        machine = replace(machine, ram_bytes=machine.ram_bytes + _held(loaded))
        asked = as_loaded(asked, loaded)
    draft = _draft(asked, wanted, model, found[0], say)
    plans = tuple(plan(facts, asked, machine, others, draft=draft) for facts in found)
    if loaded is not None:
        plans = tuple(replace(one, reason=loaded.reason) for one in plans)
    return Plans(plans, loaded)


def _draft(
    asked: LoadOptions, wanted: str | None, model: str | None, facts: Facts, say: Say
) -> Facts | None:
    """The draft model: the one that is wanted, or that the loaded model has as far as it is still
    here."""
    try:
        return find_draft(asked.draft, model, facts, say)
    except LocalgenError as error:
        if wanted is not None:
            raise
        say(error.message)
        return None


def _once(say: Say) -> Say:
    """What a model and its draft model both have to say need not be read twice."""
    said: set[str] = set()

    def new(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return new


def _held(loaded: Loaded) -> int:
    """Main memory that would be free without it; mapped weights count as free already."""
    return 0 if loaded.gpu_bytes else loaded.unmapped_bytes
