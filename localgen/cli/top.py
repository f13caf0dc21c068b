"""`localgen top`."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from localgen.backends.errors import InvalidRequest
from localgen.cli.remote_options import KeyEnvOption, UrlOption

if TYPE_CHECKING:
    from localgen.client.endpoints import Endpoint


def command(url: UrlOption = None, api_key_env: KeyEnvOption = None) -> None:
    """Watch what the server does: speed, latency, memory, requests. Starts and loads nothing."""
    there = _endpoint(url, api_key_env)
    # Textual draws on stderr
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise InvalidRequest("top needs a terminal: localgen ps lists models without one")
    gc.disable()  # what is imported stays: Shell collects again once it is painted
    from localgen.config import Settings
    from localgen.tui.base_app import Shell
    from localgen.tui.themes import ThemeChoice
    from localgen.tui.top.app import TopApp, TopWatch

    settings = Settings.from_environment()

    def watch() -> TopWatch:
        from localgen.client.server_monitor import OwnWatch, RemoteWatch

        return OwnWatch(settings) if there is None else RemoteWatch(there)

    way_out = "localgen chat or localgen serve starts one." if there is None else ""
    where = "this machine" if there is None else there.where
    TopApp(watch, where, way_out, ThemeChoice(Shell.theme_file(settings.state_dir))).run()


def _endpoint(url: str | None, api_key_env: str | None) -> Endpoint | None:
    """The server that is meant; None: ours. InvalidRequest: it is none. BadSetting: no key."""
    if url is None:
        if api_key_env is not None:
            raise InvalidRequest("--api-key-env is for another server: give --url as well")
        return None
    from localgen.client.endpoints import endpoint, variable

    found = endpoint(url)
    found = replace(found, key_env=variable(api_key_env)) if api_key_env else found
    found.key()  # said now, not on the screen
    return found
