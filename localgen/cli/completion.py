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
        Shell | None, typer.Argument(help="Which shell; the one you use by default.")
    ] = None,
) -> None:
    """Print what makes a shell complete commands, options, their values and names of models.

    For bash, in ~/.bashrc: eval "$(localgen completion bash)". For zsh, in ~/.zshrc behind
    compinit: eval "$(localgen completion zsh)". For fish: localgen completion fish >
    ~/.config/fish/completions/localgen.fish
    """
    from localgen.cli.shells import completion_script

    typer.echo(completion_script(shell or _default_shell()))


def _default_shell() -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in _SHELLS:
        said = f"there is no completion for {name}" if name else "SHELL does not say which it is"
        raise InvalidRequest(f"{said}: name one of {', '.join(_SHELLS)}")
    return name
