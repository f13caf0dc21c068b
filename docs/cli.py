"""Makes docs/cli.md from the command line itself: `python docs/cli.py`, or `make docs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from localgen.cli import errors
from localgen.cli.commands import ALIASES, COMMANDS, load_command
from localgen.cli.main import app

PAGE = Path(__file__).with_name("cli.md")
_OPENING = """\
# The command line

Made by `make docs` from the commands themselves; `localgen COMMAND --help` says the same.
Each option that names a variable takes its value from there when it is not given.
"""


def page() -> str:
    """The whole page."""
    group = typer.main.get_command(app)
    parts = [_OPENING, _list_of_commands()]
    with typer.Context(group, info_name="localgen") as context:
        for name in COMMANDS:
            parts += _sections(name, load_command(name), context)
    return "\n".join([*parts, _exit_statuses()])


def _list_of_commands() -> str:
    rows = [
        f"| [`localgen {name}`](#localgen-{name}) | {says} |" for name, says in COMMANDS.items()
    ]
    return "\n".join(["| command | |", "|---|---|", *rows, ""])


def _sections(name: str, command: Any, parent: Any) -> list[str]:
    """The section of a command, and those of the commands below it."""
    with typer.Context(command, info_name=name, parent=parent) as context:
        path = context.command_path
        usage = " ".join([path, *command.collect_usage_pieces(context)])
        lines = [f"## {path}", "", f"    {usage}", "", command.help or COMMANDS[name], ""]
        aliases = [alias for alias, meant in ALIASES.items() if path == f"localgen {meant}"]
        lines += [f"Also `localgen {alias}`.\n" for alias in aliases]
        for panel, params in _panels(command, context).items():
            lines += [f"**{panel}**", "", *(_param(param, context) for param in params), ""]
        below = getattr(command, "commands", {})
        sections = [part for each in below for part in _sections(each, below[each], context)]
    return ["\n".join(lines), *sections]


def _panels(command: Any, context: Any) -> dict[str, list[Any]]:
    """Its arguments and options, in the sections of its help."""
    panels: dict[str, list[Any]] = {}
    for param in command.get_params(context):
        if param.get_help_record(context) is not None:
            kind = "Options" if param.param_type_name == "option" else "Arguments"
            panel = getattr(param, "rich_help_panel", None) or kind
            panels.setdefault(panel, []).append(param)
    return panels


def _param(param: Any, context: Any) -> str:
    names, says = param.get_help_record(context)
    told = isinstance(param.envvar, str) and param.envvar not in says
    variable = f" `{param.envvar}`" if told else ""
    return f"- `{names.strip()}` {' '.join(says.split())}{variable}"


def _exit_statuses() -> str:
    return f"## Exit statuses\n\n{errors.exit_status_help()}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
