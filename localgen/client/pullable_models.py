"""Models of the hub for the model picker: list and download them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localgen.hub.hf_client import Notify


@dataclass(frozen=True, slots=True)
class PullableModel:
    """A model with an alias. size_bytes: of the default quantization, or None if unknown.

    fits: whether the memory that is free now has room for it; None if its size is unknown.
    """

    name: str
    title: str
    size_bytes: int | None
    fits: bool | None = None


def pullable_models() -> list[PullableModel]:
    """smollm2 and the catalog's models, installed or not."""
    from localgen.hub import catalog
    from localgen.hub.packaged import SMOLLM2, SMOLLM2_TITLE, SMOLLM2_WHEEL_BYTES
    from localgen.hub.quant_choice import QuantOption, available_memory, fit_quants

    memory = available_memory()
    models = [PullableModel(SMOLLM2, SMOLLM2_TITLE, SMOLLM2_WHEEL_BYTES, fits=True)]
    for entry in catalog.catalog_entries():
        size_bytes, fits = entry.gguf.size(entry.gguf.quant), None
        if size_bytes:
            (fit,) = fit_quants([QuantOption(entry.gguf.quant, size_bytes)], memory, entry)
            fits = fit.place is not None
        models.append(PullableModel(entry.alias, entry.title, size_bytes, fits))
    return models


def can_pull(name: str) -> bool:
    """True if the name is that of a model on the hub which is not installed."""
    from localgen.hub.packaged import SMOLLM2
    from localgen.hub.reference import resolve_reference
    from localgen.hub.resolve import expand_alias, is_installed, is_path

    target = expand_alias(name)
    is_known = target == SMOLLM2 or (not is_path(target) and resolve_reference(target) is not None)
    return is_known and not is_installed(name)


def pull_model(
    name: str, on_progress: Callable[[int, int], None], notify: Notify = lambda line: None
) -> str:
    """Download a model as `localgen pull` does and return its name.

    on_progress: called with downloaded and total bytes. An exception that it raises stops the
    download; the next one resumes it, except for smollm2. Raises the errors of hub.pull and
    hub.packaged.
    """
    from localgen.hub import pull
    from localgen.hub.packaged import SMOLLM2, install_smollm2
    from localgen.hub.resolve import expand_alias

    if expand_alias(name) == SMOLLM2:
        install_smollm2(on_progress)
        return SMOLLM2
    plan = pull.plan_pull(name, notify)
    if plan.quant_reason:
        notify(plan.quant_reason)
    if not plan.is_cached:
        total = plan.size_bytes
        on_progress(total - plan.remaining_bytes, total)
        pull.run_pull(plan, lambda here: on_progress(here, total), notify)
    return plan.name
