"""The order of a list of sessions: forks below the session that they were copied from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from localgen.chat.session_store import SessionSummary


def in_tree_order(sessions: Sequence[SessionSummary]) -> list[SessionSummary]:
    """Sessions with their depth, each followed by its forks; the latest family first.

    A fork of a session that is not among them is a root.
    """
    latest_s = {each.id: each.changed_s for each in sessions}  # change of it and its forks
    forks: dict[int | None, list[SessionSummary]] = {}
    for each in sorted(sessions, key=lambda each: -each.id):  # forks before their source
        source = each.forked_from
        if source is not None and (source not in latest_s or source >= each.id):
            source = None
        if source is not None:
            latest_s[source] = max(latest_s[source], latest_s[each.id])
        forks.setdefault(source, []).append(each)
    ordered = []
    waiting = [(each, 0) for each in _latest_last(forks.get(None, ()), latest_s)]
    while waiting:
        each, depth = waiting.pop()
        ordered.append(replace(each, depth=depth))
        below = _latest_last(forks.get(each.id, ()), latest_s)
        waiting += [(fork, depth + 1) for fork in below]
    return ordered


def _latest_last(
    sessions: Iterable[SessionSummary], latest_s: dict[int, float]
) -> list[SessionSummary]:
    return sorted(sessions, key=lambda each: (latest_s[each.id], each.id))
