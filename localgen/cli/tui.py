"""`localgen tui`."""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.chat.parameters import ModelOptions
from localgen.cli.arguments import ModelArgument, split_model_and_prompt
from localgen.cli.mcp_options import McpAllowOption, McpOption, open_chat_tools
from localgen.cli.options import takes_model_options
from localgen.cli.remote_options import (
    KeyEnvOption,
    UrlOption,
    create_client,
    create_monitor,
    endpoint_from_options,
    options_for_endpoint,
)

_NUM_SUGGESTED = 5


@takes_model_options
def command(
    context: typer.Context,
    options: ModelOptions,
    model: ModelArgument = None,
    url: UrlOption = None,
    api_key_env: KeyEnvOption = None,
    mcp: McpOption = None,
    mcp_allow: McpAllowOption = None,
    inline: Annotated[
        bool, typer.Option("--inline", help="Draw below the shell's prompt, not full-screen.")
    ] = False,
) -> None:
    """Chat full-screen in several sessions. The options apply to new sessions."""
    endpoint = endpoint_from_options(context, url, api_key_env)
    options = options_for_endpoint(options, endpoint)
    words = [] if model is None else [model]
    model, sentence = split_model_and_prompt(words, endpoint.model if endpoint else None)
    if sentence is not None:
        raise InvalidRequest("tui takes a model, not a prompt: use localgen run for one prompt")
    # the screen is drawn on stderr
    if not all(
        stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)
    ):
        raise InvalidRequest("tui needs a terminal: use localgen run without one")
    if endpoint is not None:
        endpoint.api_key()  # report a missing key before the screen opens
    gc.disable()  # imports make no garbage; BaseApp enables it after the first paint
    from localgen.chat.stored_sessions import open_store_or_copy
    from localgen.cli.tables import print_notice
    from localgen.client.suggested_models import suggested_models
    from localgen.config import ServerSettings
    from localgen.hub.resolve import name_for_server
    from localgen.tui.base_app import BaseApp
    from localgen.tui.chat.app import ChatApp
    from localgen.tui.chat.app_context import AppContext
    from localgen.tui.chat.session_manager import SessionManager
    from localgen.tui.preferences import Preferences

    settings = ServerSettings.from_environment()
    settings.create_state_dir()
    unwritable: list[str] = []
    with (
        open_chat_tools(mcp, mcp_allow, options.params) as tools,
        open_store_or_copy(settings.state_dir, unwritable.append) as store,
    ):
        notice = f"conversations are not kept: {unwritable[0]}" if unwritable else ""
        app_context = AppContext(
            store=store,
            make_client=lambda notify: create_client(endpoint, notify),
            options=options,
            state_dir=settings.state_dir,
            server_url="" if endpoint is None else endpoint.url,
            model=name_for_server(model) if endpoint is None else model,
            notice=notice,
            suggest_models=partial(suggested_models, _NUM_SUGGESTED),
            tools=tools,
        )
        where = "this machine" if endpoint is None else endpoint.display_name
        preferences = Preferences(BaseApp.preferences_file(settings.state_dir))
        make_monitor = partial(create_monitor, endpoint, settings)
        ChatApp(SessionManager(app_context), make_monitor, where, preferences).run(inline=inline)
        if notice:
            print_notice(notice)
