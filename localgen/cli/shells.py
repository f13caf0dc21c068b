"""Shell completion for bash, zsh and fish.

The shell sets _LOCALGEN_COMPLETE to complete_bash, complete_zsh or complete_fish, runs localgen and
reads its output. Typer parses the command line up to the cursor. The scripts are our own: bash
splits names at colons, and each completion must take one call only.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer._completion_classes import BashComplete, FishComplete, ZshComplete

from localgen.cli.completion_values import complete_path

PROGRAM_NAME = "localgen"
COMPLETE_ENV_VAR = "_LOCALGEN_COMPLETE"
# a slow disk must not block the shell
_TIMEOUT_S = 2.0

_BASH_SCRIPT = """\
%(complete_func)s() {
    local IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \\
        %(autocomplete_var)s=complete_bash "$1" 2>/dev/null ) )
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]] && type compopt &>/dev/null; then
        compopt -o nospace
    fi
}
complete -o default -F %(complete_func)s %(prog_name)s"""
_ZSH_SCRIPT = """\
#compdef %(prog_name)s
%(complete_func)s() {
    eval "$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" \\
        %(autocomplete_var)s=complete_zsh ${words[1]} 2>/dev/null)"
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi"""
_FISH_SCRIPT = """\
function %(complete_func)s
    set -lx %(autocomplete_var)s complete_fish
    set -lx _TYPER_COMPLETE_ARGS (commandline -cp | string collect)
    %(prog_name)s 2>/dev/null
end
complete --command %(prog_name)s --no-files --arguments "(%(complete_func)s)\""""


class _BashCompletion(BashComplete):
    """Bash splits words at `:` and `=` and after `@`, and replaces only the last part."""

    source_template = _BASH_SCRIPT
    _num_prefix_chars = 0

    def get_completion_args(self) -> tuple[list[str], str]:
        args, incomplete = super().get_completion_args()
        *args, incomplete = _join_words([*args, incomplete])
        value = incomplete.partition("=")[2] if incomplete.startswith("-") else incomplete
        self._num_prefix_chars = max(value.rfind(sign) for sign in ":=@") + 1
        return args, incomplete

    def complete(self) -> str:
        items = self.get_completions(*self.get_completion_args())
        # if there are no values, bash completes file names (complete -o default)
        return "\n".join(
            item.value[self._num_prefix_chars :] for item in items if item.type == "plain"
        )


def _join_words(words: Sequence[str]) -> list[str]:
    """Join the words that bash split at `:`, `=` or `@`."""
    joined: list[str] = []
    for word in words:
        if joined and (word in (":", "=") or joined[-1].endswith((":", "=", "@"))):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


class _ZshCompletion(ZshComplete):
    source_template = _ZSH_SCRIPT

    def complete(self) -> str:
        items = self.get_completions(*self.get_completion_args())
        if not items or any(item.type != "plain" for item in items):
            return "_files"
        if all(item.value.endswith(("/", ".gguf")) for item in items):
            return "_files -g '*.gguf'"  # zsh continues inside folders
        pairs = " ".join(self.format_completion(item) for item in items)
        return f"_arguments '*: :(({pairs}))'"

    def format_completion(self, item: Any) -> str:
        # escaped twice: for the single quotes and for the double quotes inside them
        value = re.sub(r"[^\w./@+~-]", lambda sign: "\\\\" + sign[0], item.value, flags=re.ASCII)
        says = re.sub(r"['\"\\$`:]", " ", item.help or "")
        return f'"{value}":"{says}"' if says else f'"{value}"'


class _FishCompletion(FishComplete):
    source_template = _FISH_SCRIPT

    def complete(self) -> str:
        args, incomplete = self.get_completion_args()
        items = self.get_completions(args, incomplete)
        if not items or any(item.type != "plain" for item in items):
            return "\n".join(complete_path(incomplete))
        return "\n".join(self.format_completion(item) for item in items)

    def format_completion(self, item: Any) -> str:
        return f"{item.value}\t{' '.join(item.help.split())}" if item.help else str(item.value)


class _NoConversion:
    """Stand-in for Typer's value conversion: returns the value unchanged."""

    def coerce(self, value: Any, **_: Any) -> Any:
        return value


_SHELLS: dict[str, Any] = {"bash": _BashCompletion, "zsh": _ZshCompletion, "fish": _FishCompletion}


def completion_script(shell: str) -> str:
    """The script that registers the completion in a shell."""
    found = _SHELLS[shell](None, {}, PROGRAM_NAME, COMPLETE_ENV_VAR)
    return str(found.source_template % found.source_vars())


def run_completion(app: typer.Typer, instruction: str) -> int:
    """Print the completions at the cursor and return the exit status.

    On any error nothing is printed, because the shell cannot show it. A timeout ends the process
    with status 1.
    """
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.setitimer(signal.ITIMER_REAL, _TIMEOUT_S)
    # skip value conversion: a partial value may be invalid, and it takes half of the total time
    setattr(typer.core, "build_runtime_param", lambda _: _NoConversion())  # noqa: B010
    try:
        text = _completer(app, instruction.removeprefix("complete_")).complete()
    except Exception:
        return 1
    sys.stdout.write(text + "\n" if text else "")
    return 0


def _completer(app: typer.Typer, shell: str) -> Any:
    return _SHELLS[shell](typer.main.get_command(app), {}, PROGRAM_NAME, COMPLETE_ENV_VAR)
