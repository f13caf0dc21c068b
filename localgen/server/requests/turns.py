"""Conversations in the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from localgen.backends.types import Message

_JOINED_ROLES = ("system", "user")


def join_turns(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Join neighbouring messages of the system, and of the user: many templates refuse two.

    Agents send their notes about the environment as messages of their own.
    """
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and last.role == message.role and message.role in _JOINED_ROLES:
            joined[-1] = replace(last, content=f"{last.content}\n\n{message.content}")
        else:
            joined.append(message)
    return tuple(joined)
