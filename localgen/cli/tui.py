"""`localgen tui`."""

from __future__ import annotations

import gc
import sys
from contextlib import closing

import typer

from localgen.backends.errors import InvalidRequest
from localgen.chat.parameters import ModelOptions
from localgen.cli.arguments import ModelArgument, model_and_prompt
from localgen.cli.options import takes_model_options
from localgen.cli.remote_options import KeyEnvOption, UrlOption, applicable, client_of, endpoint_of


@takes_model_options
def command(
    context: typer.Context,
    options: ModelOptions,
    model: ModelArgument = None,
    url: UrlOption = None,
    api_key_env: KeyEnvOption = None,
) -> None:
    """Talk in several sessions side by side. The options are those of new sessions."""
    there = endpoint_of(context, url, api_key_env)
    options = applicable(options, there)
    model, sentence = model_and_prompt(model, None, there.model if there else None)
    if sentence is not None:
        raise InvalidRequest("tui takes a model, not a prompt: localgen run answers one prompt")
    # the screen is drawn on stderr
    if not all(
        stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)
    ):
        raise InvalidRequest("tui needs a terminal: localgen run answers prompts without one")
    if there is not None:
        there.key()  # said now, not on the screen
    gc.disable()  # what is imported stays: Shell collects again once it is painted
    from localgen.chat.database import Writer
    from localgen.chat.session_store import Sessions
    from localgen.config import Settings
    from localgen.tui.base_app import Shell
    from localgen.tui.chat.active_session import House
    from localgen.tui.chat.app import ChatApp
    from localgen.tui.chat.session_manager import Desk
    from localgen.tui.feed import Watch
    from localgen.tui.themes import ThemeChoice

    settings = Settings.from_environment()
    settings.prepare_state()

    def watch() -> Watch:
        from localgen.client.server_monitor import OwnWatch, RemoteWatch

        return OwnWatch(settings) if there is None else RemoteWatch(there)

    with (
        closing(Writer(settings.state_dir / "writers")) as writer,
        closing(Sessions(settings.state_dir / "sessions.db", writer)) as store,
    ):
        house = House(
            store=store,
            make_client=lambda say: client_of(there, say),
            options=options,
            state_dir=settings.state_dir,
            url="" if there is None else there.url,
            model=model,
        )
        where = "this machine" if there is None else there.where
        choice = ThemeChoice(Shell.theme_file(settings.state_dir))
        ChatApp(Desk(house), watch, where, choice).run()
