"""`--session`, `--continue` and `--no-history`, and the options of a continued session."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.sampling_params import GRAMMAR_FIELDS, SamplingParams
from localgen.backends.terminal_text import one_line
from localgen.chat.parameters import ModelOptions
from localgen.cli.completion_values import complete_session
from localgen.cli.remote_options import is_from_command_line

if TYPE_CHECKING:
    from localgen.chat.session_store import SessionRecord

_PANEL = "Sessions"
ContinueFlag = Annotated[
    bool,
    typer.Option(
        "--continue",
        help="Continue the latest stored session, with its model, system prompt and settings "
        "unless given.",
        rich_help_panel=_PANEL,
    ),
]
SessionOption = Annotated[
    str | None,
    typer.Option(
        help="Continue the stored session of this name or id; a new name starts a session.",
        metavar="NAME",
        autocompletion=complete_session,
        rich_help_panel=_PANEL,
    ),
]
HistoryFlag = Annotated[
    bool,
    typer.Option(
        "--history/--no-history",
        help="Store the conversation and the prompts of localgen chat (default: on).",
        envvar="LOCALGEN_HISTORY",
        show_envvar=False,
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]


def options_of_session(
    context: typer.Context, options: ModelOptions, record: SessionRecord, *, same_model: bool
) -> ModelOptions:
    """The options of a chat that continues a session: those on the command line, else stored ones.

    A new session keeps the options. same_model: False: the stored context, which is that of
    another model, is not used.
    """
    if not record.id:
        return options

    def is_given(name: str) -> bool:
        return is_from_command_line(context, name)

    names = [field.name for field in fields(SamplingParams) if is_given(field.name)]
    if not set(GRAMMAR_FIELDS).isdisjoint(names):  # at most one may be set
        names = [*names, *GRAMMAR_FIELDS]
    params = replace(record.params, **{name: getattr(options.params, name) for name in names})
    system = options.system if is_given("system") else record.conversation.system
    keeps_ctx = is_given("ctx") or not same_model
    return replace(
        options, params=params, system=system, ctx=options.ctx if keeps_ctx else record.ctx
    )


def other_server_notice(record: SessionRecord, url: str) -> str:
    """Notice that a stored session belongs to another server than `url`; empty if it does not."""
    if not record.id or record.server_url == url:
        return ""
    name, theirs = repr(record.name), one_line(record.server_url)
    if not theirs:
        return f"{name} was with the local server: without --url it continues there"
    return f"{name} was with {theirs}: --url {theirs} continues it there"
