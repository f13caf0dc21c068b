"""The commands by name. A command's module is imported only when the command runs."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "chat": "Chat with a model in the terminal.",
    "tui": "Chat full-screen in several sessions, with live statistics.",
    "history": "List, print or delete stored conversations.",
    "run": "Answer one prompt, given as an argument or on standard input.",
    "warm": "Read a long system prompt ahead of time.",
    "launch": "Start a coding agent on a local model: claude, codex, opencode, aider, goose.",
    "embed": "Print embeddings of texts as JSON lines.",
    "ps": "List loaded models.",
    "top": "Monitor the server: speed, latency, memory, requests.",
    "list": "List local models (alias: ls).",
    "search": "Search the catalog of models, and see which fit in memory.",
    "pull": "Download a model from the hub, or resume a download.",
    "show": "Show a model's metadata, or which quantizations of it fit.",
    "bench": "Measure a model's speed, and how many people it serves.",
    "plan": "Estimate the memory use and speed of a model on this machine.",
    "quantize": "Quantize a 16-bit model and measure the quality loss.",
    "audit": "Tell how often the original would have said another token in your chats.",
    "rm": "Remove a model, or another name of one.",
    "cp": "Create an alias for a model.",
    "adapter": "Manage LoRA adapters, each a name for a model that it changes: add, list, rm.",
    "preset": "Manage names with a system prompt and settings of their own: add, list, rm.",
    "mcp": "Manage MCP servers, whose tools a model may call: add, list, rm.",
    "cluster": "Run several engines behind one address: up, status, down.",
    "kv": "Manage the computed prefixes on disk: list, rm, verify.",
    "stop": "Unload a model, or stop the server.",
    "serve": "Run the server in the foreground.",
    "logs": "Print the log of the background server and its engines.",
    "endpoint": "Manage named remote servers: add, list, rm.",
    "completion": "Print a shell completion script.",
    "doctor": "Check hardware, backends and server, and report problems.",
}
ALIASES = {"ls": "list"}
# words that are options: `localgen version`
SPELLINGS = ("help", "version")
# commands of other tools, and what they are here
_OTHER_NAMES = {
    **dict.fromkeys(("download", "install"), "pull"),
    **dict.fromkeys(("delete", "remove", "uninstall"), "rm"),
    **dict.fromkeys(("ask", "complete", "generate"), "run"),
    "info": "show",
    "models": "list",
    "status": "ps",
    "kill": "stop",
}
# commands of other tools that localgen does not have
_ADVICE = {
    "create": ": `localgen preset add NAME MODEL` gives a model a name with a system prompt and "
    "parameters, `localgen cp MODEL NAME` an alias",
    "quit": ": Ctrl+D leaves a chat, `localgen stop` stops the server",
}
# similarity from 0 to 1 of a suggestion: above that of create and chat
CLOSE = 0.65


def _similar_commands(word: str) -> str:
    """A question that names similar commands; empty if there are none."""
    names = (*COMMANDS, *ALIASES, *SPELLINGS)
    other = _OTHER_NAMES.get(word)
    close = [other] if other else difflib.get_close_matches(word, names, n=3, cutoff=CLOSE)
    return f". Did you mean {', '.join(map(repr, close))}?" if close else ""


class LazyGroup(TyperGroup):
    """Command group that lists all commands but imports only the one that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update(
            {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        known = [ALIASES.get(args[0], args[0]), *args[1:]]
        try:
            name, _, rest = super().resolve_command(ctx, known)
        except typer.TyperException as error:
            advice = _ADVICE.get(args[0]) or _similar_commands(args[0])
            if advice:
                error.message = f"{error.message.rstrip('.')}{advice}"
            raise
        assert name is not None
        return name, load_command(name), rest


class SectionedCommand(TyperCommand):
    """Command whose help has one section per option panel."""

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
    """Import and return a command of COMMANDS."""
    module = importlib.import_module(f"localgen.cli.{name}")
    if hasattr(module, "group"):
        return typer.main.get_command(module.group)
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(name, cls=SectionedCommand)(module.command)
    return typer.main.get_command(app)
