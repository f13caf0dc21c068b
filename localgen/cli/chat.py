"""`localgen chat`."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from localgen.backends.errors import InvalidRequest
from localgen.chat.parameters import ModelOptions
from localgen.cli.arguments import ModelArgument, ModelOption, read_prompt, split_model_and_prompt
from localgen.cli.mcp_options import McpAllowOption, McpOption, open_chat_tools
from localgen.cli.options import takes_model_options
from localgen.cli.pull import run_or_offer_pull
from localgen.cli.remote_options import (
    KeyEnvOption,
    UrlOption,
    create_client,
    endpoint_from_options,
    launch_server_early,
    options_for_endpoint,
)
from localgen.cli.session_options import (
    ContinueFlag,
    HistoryFlag,
    SessionOption,
    options_of_session,
    other_server_notice,
)

if TYPE_CHECKING:
    from rich.console import Console

    from localgen.chat.chat_storage import ChatStorage
    from localgen.client.endpoints import Endpoint
    from localgen.client.launch import EarlyLaunch
    from localgen.mcp_tools.chat_tools import ChatTools
    from localgen.repl.load_progress import LoadProgressLine


@takes_model_options
def command(
    context: typer.Context,
    options: ModelOptions,
    model: ModelArgument = None,
    named_model: ModelOption = None,
    latest: ContinueFlag = False,
    session: SessionOption = None,
    history: HistoryFlag = True,
    url: UrlOption = None,
    api_key_env: KeyEnvOption = None,
    mcp: McpOption = None,
    mcp_allow: McpAllowOption = None,
) -> None:
    """Chat with a model in the terminal.

    Conversations are stored: --continue opens the latest again, and localgen history lists them.
    If standard input or output is not a terminal, read one prompt from standard input and print a
    plain-text answer.
    """
    endpoint = endpoint_from_options(context, url, api_key_env)
    options = replace(options_for_endpoint(options, endpoint), save_prefix=history)
    if model is not None and named_model is not None:
        raise InvalidRequest(f"two models: {model!r} and that of --model")
    words = [] if model is None else [model]
    default = endpoint.model if endpoint else None
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    from localgen.chat.session_choice import SessionChoice
    from localgen.config import ServerSettings

    choice = SessionChoice(session, latest, history)
    choice.validate(at_terminal=at_terminal)
    named = _require_model(words, default, named_model)
    if not at_terminal:
        prompt = read_prompt(None)
        with open_chat_tools(mcp, mcp_allow, options.params) as tools:
            _answer_piped_prompt(endpoint, named, prompt, options, tools)
        return
    settings = ServerSettings.from_environment()
    settings.create_state_dir()
    early = launch_server_early(endpoint)
    from localgen.chat.chat_storage import open_chat_storage
    from localgen.hub.resolve import name_for_server

    with (
        open_chat_storage(settings.state_dir, choice) as storage,
        open_chat_tools(mcp, mcp_allow, options.params) as tools,
    ):
        record, url = storage.record, endpoint.url if endpoint else ""
        stored = record.model if record.server_url == url else None
        name = _require_model(words, stored or default, named_model)
        is_same = name_for_server(name) == name_for_server(record.model)
        merged = options_of_session(context, options, record, same_model=is_same)
        storage = replace(storage, warning=other_server_notice(record, url))
        _chat(endpoint, name, options_for_endpoint(merged, endpoint), storage, tools, early)


def _require_model(words: list[str], default: str | None, named: str | None) -> str | None:
    """The model to load, or None for the server's default. Raises InvalidRequest for a prompt."""
    model, sentence = split_model_and_prompt(words, default, model=named)
    if sentence is not None:
        raise InvalidRequest("chat takes a model, not a prompt: use localgen run for one prompt")
    return model


def _answer_piped_prompt(
    endpoint: Endpoint | None,
    model: str | None,
    prompt: str,
    options: ModelOptions,
    tools: ChatTools,
) -> None:
    early = launch_server_early(endpoint)
    from localgen.cli.one_shot import answer_prompt, stderr_console

    loading = _loading_line(stderr_console(), model)
    with closing(create_client(endpoint, loading.notify, early)) as client:
        answer_prompt(client, loading, model, prompt, options, tools)


def _chat(
    endpoint: Endpoint | None,
    model: str | None,
    options: ModelOptions,
    storage: ChatStorage,
    tools: ChatTools,
    early: EarlyLaunch | None,
) -> None:
    from rich.console import Console

    from localgen.repl.start_chat import start_chat

    loading = _loading_line(Console(highlight=False), model)
    with closing(create_client(endpoint, loading.notify, early)) as client:
        start = partial(start_chat, client, loading, model, options, storage, tools)
        if endpoint is not None:
            start()
        else:
            run_or_offer_pull(model, start, draft=options.load.draft)


def _loading_line(console: Console, model: str | None) -> LoadProgressLine:
    from localgen.hub.packaged import default_model
    from localgen.repl.load_progress import LoadProgressLine

    return LoadProgressLine(console, model or default_model())
