"""`localgen completion`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from localgen.backends.errors import InvalidRequest

Shell = Literal["bash", "zsh", "fish"]
_SHELLS = ("bash", "zsh", "fish")


def command(
    shell: Annotated[
        Shell | None, typer.Argument(help="Shell (default: the one in $SHELL).")
    ] = None,
) -> None:
    """Print a shell completion script for commands, options, option values and model names.

    For bash, add to ~/.bashrc: eval "$(localgen completion bash)". For zsh, add to ~/.zshrc after
    compinit: eval "$(localgen completion zsh)". For fish: localgen completion fish >
    ~/.config/fish/completions/localgen.fish
    """
    from localgen.cli.shells import completion_script

    typer.echo(completion_script(shell or _default_shell()))


def _default_shell() -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in _SHELLS:
        problem = (
            f"no completion script for {name}" if name else "cannot detect the shell from $SHELL"
        )
        raise InvalidRequest(f"{problem}: give one of {', '.join(_SHELLS)}")
    return name
