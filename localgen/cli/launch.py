"""`localgen launch`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.model_info import LoadOptions
from localgen.cli import tables
from localgen.cli.agents import AGENTS, Agent, AgentModel, without_proxy
from localgen.cli.completion_values import complete_model
from localgen.cli.options import Stabilize
from localgen.cli.pull import run_or_offer_pull
from localgen.hub.packaged import default_model

if TYPE_CHECKING:
    from localgen.backends.model_info import ModelInfo
    from localgen.client import LocalClient

# the instructions and tools of an agent alone take up to 20,000 tokens
DEFAULT_CTX = 65_536
MIN_CTX = 16_384
# a person may think for longer than an idle model stays loaded, and its cache with it
_KEEP_ALIVE = "4h"


def command(
    agent: Annotated[str, typer.Argument(help=f"One of {', '.join(AGENTS)}.", metavar="AGENT")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the agent, after --.", metavar="[-- ARGS]"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", help="Model.", autocompletion=complete_model),
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--ctx",
            help=f"Context length in tokens (default: up to {DEFAULT_CTX:,}, as much as fits).",
            metavar="<int>",
            min=1,
        ),
    ] = None,
    stabilize: Stabilize = False,
) -> None:
    """Start a coding agent that uses a local model.

    The agent gets the address of the server, a key that is valid while it runs, and the model by
    variables and arguments; none of its files is changed. Stays until the agent ends, and exits
    with its status.
    """
    chosen = _find_agent(agent)
    program = shutil.which(chosen.program)
    if program is None:
        raise InvalidRequest(f"{chosen.program} is not installed: {chosen.install}")
    from localgen.client.launch import launch_early
    from localgen.config import ServerSettings

    early = launch_early(ServerSettings.from_environment())
    from localgen.client import LocalClient

    with closing(LocalClient(notify=tables.print_notice, early=early)) as client:
        client.connect()
        run_or_offer_pull(
            model, lambda: _run(client, chosen, program, model, ctx, stabilize, arguments or [])
        )


def _find_agent(name: str) -> Agent:
    """Raises InvalidRequest for an agent that is not known."""
    if name not in AGENTS:
        raise InvalidRequest(f"no agent {name!r}: use {', '.join(AGENTS)}")
    return AGENTS[name]


def _run(
    client: LocalClient,
    agent: Agent,
    program: str,
    model: str | None,
    ctx: int | None,
    stabilize: bool,
    arguments: list[str],
) -> None:
    name = model or default_model()
    info = _load(client, name, ctx)
    kept = f" (it is loaded with that already, --ctx asked for {ctx:,})" if ctx else ""
    with client.private_port(stabilize=stabilize) as port:
        tables.print_notice(
            f"{agent.program} uses {name} with a context of {info.ctx:,} tokens"
            f"{kept if info.ctx != ctx else ''}"
            f"{', prompts are stabilized' if port.stabilize else ''}{_warning(info)}"
        )
        settings = agent.settings(AgentModel(port.url, port.key, name, info.ctx))
        environment = os.environ | settings.variables | without_proxy(os.environ)
        status = _wait([program, *settings.arguments, *arguments], environment)
    raise typer.Exit(status)


def _load(client: LocalClient, model: str, ctx: int | None) -> ModelInfo:
    """Load the model with a context for agents, as far as it fits.

    A model that is loaded already keeps its context if that is large enough. Raises InvalidRequest
    for a path: agents name models.
    """
    from rich.console import Console

    from localgen.backends.formats.model_facts import read_model_shape
    from localgen.hub.resolve import resolve_model
    from localgen.repl.load_progress import LoadProgressLine

    file = resolve_model(model, allow_paths=False)
    shape = read_model_shape(file)
    trained = shape.ctx_train if shape is not None and shape.ctx_train else DEFAULT_CTX
    wanted = min(trained, DEFAULT_CTX) if ctx is None else ctx
    with LoadProgressLine(Console(stderr=True, highlight=False), file.name) as line:
        for running in client.running_models():
            if running.path == str(file.path) and running.ctx >= min(wanted, ctx or MIN_CTX):
                return client.load(model, LoadOptions(), line.update, keep_alive=_KEEP_ALIVE)
        while True:
            try:
                options = LoadOptions(ctx=wanted)
                return client.load(model, options, line.update, keep_alive=_KEEP_ALIVE)
            except OutOfMemory:
                if ctx is not None or wanted <= MIN_CTX:
                    raise
                wanted = max(wanted // 2, MIN_CTX)


def _warning(info: ModelInfo) -> str:
    if info.ctx >= MIN_CTX:
        return ""
    return f"; agents need {MIN_CTX:,} or more: expect errors, and answers that lead nowhere"


def _wait(command: list[str], environment: dict[str, str]) -> int:
    """Run a program in the foreground; return its exit status as a shell does.

    Ctrl+C is for the program, which may not end by it.
    """
    # not SIG_IGN, which the program would inherit
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        status = subprocess.run(command, env=environment, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status
