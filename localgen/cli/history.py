"""`localgen history`: the stored conversations."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.arguments import JsonFlag
from localgen.cli.completion_values import complete_session
from localgen.cli.rm import YesFlag, confirm

if TYPE_CHECKING:
    from localgen.chat.session_store import SessionRecord, SessionStore, SessionSummary

SessionName = Annotated[
    str | None,
    typer.Argument(help="Name or id of a session.", autocompletion=complete_session),
]
DeleteFlag = Annotated[bool, typer.Option("--delete", help="Delete this session.")]


def command(
    name: SessionName = None,
    delete: DeleteFlag = False,
    yes: YesFlag = False,
    json: JsonFlag = False,
) -> None:
    """List the stored conversations of chat and tui, latest first.

    With NAME, print that one as Markdown; with --json, in the format of /save.
    """
    from localgen.chat.stored_sessions import (
        has_store,
        open_store,
        open_store_or_copy,
        require_session,
    )
    from localgen.cli.tables import print_notice
    from localgen.config import ServerSettings

    if name is None and delete:
        raise InvalidRequest("--delete: give the name or id of a session")
    if yes and not delete:
        raise InvalidRequest("--yes needs --delete")
    if json and delete:
        raise InvalidRequest("--json and --delete exclude each other")
    settings = ServerSettings.from_environment()
    settings.create_state_dir()

    def on_copy(why: str) -> None:
        if has_store(settings.state_dir):
            print_notice(f"{why}: shows a copy")

    with (
        open_store(settings.state_dir)
        if delete
        else open_store_or_copy(settings.state_dir, on_copy)
    ) as store:
        if name is None:
            _print_sessions(store, as_json=json)
        elif delete:
            _delete(store, require_session(store, name), ask=not yes)
        else:
            _print_session(store.read(require_session(store, name).id), as_json=json)


def _print_sessions(store: SessionStore, *, as_json: bool) -> None:
    from localgen.chat.stored_sessions import list_with_turns
    from localgen.cli import tables

    listed = list_with_turns(store)
    if as_json:
        tables.print_json(listed)
    elif listed:
        rows = [_cells(each) for each in listed]
        tables.print_table(("ID", "NAME", "TURNS", "MODEL", "CHANGED"), rows)
    else:
        tables.print_notice("no stored conversations: localgen chat starts one")


def _cells(listed: SessionSummary) -> tuple[str, ...]:
    from localgen.backends.terminal_text import escape_name

    changed = datetime.fromtimestamp(listed.changed_s).strftime("%Y-%m-%d %H:%M")
    turns = f"{listed.num_turns:,}"
    return (
        str(listed.id),
        escape_name(listed.name),
        turns,
        escape_name(listed.model or "default"),
        changed,
    )


def _delete(store: SessionStore, listed: SessionSummary, *, ask: bool) -> None:
    from localgen.backends.terminal_text import escape_name
    from localgen.backends.units import format_count

    name = escape_name(listed.name) or str(listed.id)
    if ask:
        confirm(f"Delete {name} ({format_count(listed.num_turns, 'turn')})?")
    store.delete(listed.id)
    typer.echo(f"{name} deleted")


def _print_session(record: SessionRecord, *, as_json: bool) -> None:
    from localgen.backends.terminal_text import escape_control_chars
    from localgen.chat.saved_chats import SavedChat, encode_chat
    from localgen.chat.transcript import transcript_markdown

    if as_json:
        chat = SavedChat(record.model or "", record.params, record.conversation)
        text = encode_chat(chat).decode()
    else:
        text = transcript_markdown(record.name, record.conversation).removesuffix("\n")
    # escape on a terminal only: files and pipes get the exact text
    typer.echo(escape_control_chars(text) if sys.stdout.isatty() else text)
