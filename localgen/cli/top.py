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
    """Monitor the server: speed, latency, memory, requests. Does not start the server."""
    there = _endpoint_from_options(url, api_key_env)
    # Textual draws on stderr
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise InvalidRequest("top needs a terminal: localgen ps lists models without one")
    gc.disable()  # imports make no garbage; BaseApp enables it after the first paint
    from localgen.config import ServerSettings
    from localgen.tui.base_app import BaseApp
    from localgen.tui.themes import ThemeChoice
    from localgen.tui.top.app import TopApp, TopServerMonitor

    settings = ServerSettings.from_environment()

    def watch() -> TopServerMonitor:
        from localgen.client.server_monitor import LocalServerMonitor, RemoteServerMonitor

        return LocalServerMonitor(settings) if there is None else RemoteServerMonitor(there)

    way_out = "localgen chat or localgen serve starts one." if there is None else ""
    where = "this machine" if there is None else there.display_name
    TopApp(watch, where, way_out, ThemeChoice(BaseApp.theme_file(settings.state_dir))).run()


def _endpoint_from_options(url: str | None, api_key_env: str | None) -> Endpoint | None:
    """Return the endpoint of --url, or None for the local server.

    Raises InvalidRequest if the URL or name is invalid, BadSetting if the API key is not set.
    """
    if url is None:
        if api_key_env is not None:
            raise InvalidRequest("--api-key-env is for a remote server: give --url as well")
        return None
    from localgen.client.endpoints import resolve_endpoint, validate_env_var_name

    found = resolve_endpoint(url)
    found = replace(found, key_env=validate_env_var_name(api_key_env)) if api_key_env else found
    found.api_key()  # report a missing key before the screen opens
    return found
