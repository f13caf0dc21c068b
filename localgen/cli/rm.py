"""`localgen rm`."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest, LocalgenError, ModelBusy
from localgen.backends.terminal_text import one_line
from localgen.cli.completion_values import complete_removable_model

YesFlag = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")]


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="Model of the cache, alias, preset or adapter.",
            autocompletion=complete_removable_model,
        ),
    ],
    yes: YesFlag = False,
) -> None:
    """Remove a model from the cache, or another name. Files that other models use are kept."""
    from localgen.backends.units import format_size
    from localgen.cli import tables
    from localgen.hub.remove import kind_of_name, plan_removal

    if (kind := kind_of_name(model)) is not None:
        _remove_name(model, kind, yes=yes)
        return
    found = plan_removal(model)
    _require_not_loaded(found.name)
    if not yes:
        confirm(f"Remove {found.name} ({format_size(found.freed_bytes)})?")
    found.execute()
    kept = f"; {format_size(found.linked_bytes)} outside of the cache are kept"
    freed = f"{found.name} removed, {format_size(found.freed_bytes)} freed"
    tables.print_line(f"{freed}{kept if found.linked_bytes else ''}")


def _remove_name(name: str, kind: str, *, yes: bool) -> None:
    from localgen.cli import tables
    from localgen.hub.models_file import read_models_file
    from localgen.hub.remove import remove_name

    target = read_models_file().models[name]
    if not yes:
        confirm(f"Remove the {kind} {name} of {target}?")
    remove_name(name)
    kept = f"; {target} is kept" if _is_installed(target) else ""
    article = "a" if kind == "preset" else "an"
    tables.print_line(f"{name} is no longer {article} {kind}{kept}")


def _is_installed(name: str) -> bool:
    from localgen.hub.resolve import is_installed

    try:
        return is_installed(name)
    except LocalgenError:
        return False  # the file of aliases may hold anything


def _require_not_loaded(name: str) -> None:
    from localgen.client import LocalClient

    with closing(LocalClient()) as client:
        loaded = [running.name for running in client.running_models()]
    if name in loaded:
        raise ModelBusy(f"{name} is loaded: localgen stop {name} unloads it")


def confirm(question: str) -> None:
    if sys.stdin is None or not sys.stdin.isatty():
        raise InvalidRequest("no terminal to ask for confirmation: use --yes to remove it")
    if not typer.confirm(one_line(question), err=True):
        raise typer.Exit(1)
