"""Models of the hub, for those who talk to a server only: what there is, and fetching one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that can be pulled. size_bytes: of the default; None: not known without asking."""

    name: str
    title: str
    size_bytes: int | None


def offers() -> list[Offer]:
    """What has a short name, here or not."""
    from localgen.hub import catalog

    return [
        Offer(entry.alias, entry.title, entry.gguf.size(entry.gguf.quant))
        for entry in catalog.entries()
    ]


def can_pull(name: str) -> bool:
    """Whether a name means a model of the hub that is not here."""
    from localgen.hub.aliases import aliases
    from localgen.hub.reference import reference
    from localgen.hub.resolve import is_here, is_path

    meant = aliases().get(name, name)
    return not is_path(meant) and reference(meant) is not None and not is_here(name)


def pull(name: str, on_bytes: Callable[[int, int], None], say: Say = lambda line: None) -> str:
    """Fetch a model as `localgen pull` does; what it is called afterwards.

    on_bytes: gets how much of how many bytes is here, from time to time; what it raises ends the
    download, and the next one goes on from there. LocalgenErrors as hub.pull raises them.
    """
    from localgen.hub import pull

    plan = pull.plan(name, say)
    if plan.why:
        say(plan.why)
    if not plan.is_here:
        total = plan.size_bytes
        on_bytes(total - plan.left_bytes, total)
        pull.execute(plan, lambda here: on_bytes(here, total), say)
    return plan.name
