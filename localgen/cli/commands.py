"""The commands by name. A command's file is imported when it is the one that runs."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "chat": "Talk to a model in the terminal.",
    "tui": "Talk in several sessions side by side, with the machine in view.",
    "run": "Answer one prompt, from the arguments or from standard input.",
    "ps": "List the models that are loaded.",
    "top": "Watch what the server does: speed, latency, memory, requests.",
    "list": "List the models that can be named (also: ls).",
    "pull": "Fetch a model from the hub, or go on with one that was interrupted.",
    "show": "Show what a model is, and which quantizations fit.",
    "plan": "Show what a model would take here, and how fast it can be.",
    "quantize": "Make a smaller model of one in 16 bits, and measure what it lost.",
    "rm": "Remove a model, or another name of one.",
    "cp": "Give a model another name.",
    "stop": "Unload a model, or stop the server.",
    "serve": "Run the server in the foreground.",
    "endpoint": "Give other servers names: add, list, rm.",
    "completion": "Print what makes a shell complete commands and names of models.",
    "doctor": "Show what was found on this machine, what is used, and why.",
}
ALIASES = {"ls": "list"}


class LazyGroup(TyperGroup):
    """Knows the commands by name and one line each; loads the one that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update(
            {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        known = [ALIASES.get(args[0], args[0]), *args[1:]]
        name, _, rest = super().resolve_command(ctx, known)
        assert name is not None
        return name, load_command(name), rest


class SectionedCommand(TyperCommand):
    """Its help has a section for each panel of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = "Options" if param.param_type_name == "option" else "Arguments"
                panel = getattr(param, "rich_help_panel", None) or kind
                sections.setdefault(panel, []).append(record)
        for panel, records in sections.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def load_command(name: str) -> Any:
    """The command of a name in COMMANDS, imported now."""
    module = importlib.import_module(f"localgen.cli.{name}")
    if hasattr(module, "group"):
        return typer.main.get_command(module.group)
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(name, cls=SectionedCommand)(module.command)
    return typer.main.get_command(app)
