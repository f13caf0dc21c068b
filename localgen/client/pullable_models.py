"""Models of the hub, for those who talk to a server only: what there is, and fetching one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PullableModel:
    """A model that can be pulled. size_bytes: of the default; None: not known without asking."""

    name: str
    title: str
    size_bytes: int | None


def pullable_models() -> list[PullableModel]:
    """What has a short name, here or not."""
    from localgen.hub import catalog

    return [
        PullableModel(entry.alias, entry.title, entry.gguf.size(entry.gguf.quant))
        for entry in catalog.catalog_entries()
    ]


def can_pull(name: str) -> bool:
    """Whether a name means a model of the hub that is not here."""
    from localgen.hub.aliases import load_aliases
    from localgen.hub.reference import resolve_reference
    from localgen.hub.resolve import is_installed, is_path

    meant = load_aliases().get(name, name)
    return not is_path(meant) and resolve_reference(meant) is not None and not is_installed(name)


def pull_model(
    name: str, on_progress: Callable[[int, int], None], notify: Notify = lambda line: None
) -> str:
    """Fetch a model as `localgen pull` does; what it is called afterwards.

    on_progress: gets how much of how many bytes is here, from time to time; what it raises ends the
    download, and the next one goes on from there. LocalgenErrors as hub.pull raises them.
    """
    from localgen.hub import pull

    plan = pull.plan_pull(name, notify)
    if plan.quant_reason:
        notify(plan.quant_reason)
    if not plan.is_cached:
        total = plan.size_bytes
        on_progress(total - plan.remaining_bytes, total)
        pull.run_pull(plan, lambda here: on_progress(here, total), notify)
    return plan.name
