"""Entry point of `localgen`: runs a command, turns every error into one line and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from localgen import __version__
from localgen.backends.errors import DISK_FULL_ERRNOS, InvalidRequest, LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.cli import errors, messages
from localgen.cli.commands import SPELLINGS, LazyGroup
from localgen.config import BadSetting

_EPILOG = (
    "Each option of chat and run can also be set by an environment variable: --max-tokens by "
    "LOCALGEN_MAX_TOKENS. " + errors.exit_status_help()
)

# what other tools have taught people to type
_SPELLINGS = {name: f"--{name}" for name in SPELLINGS}
# what the system refuses is not an internal error: a full disk, a file without permission
_FILE_ERRORS = DISK_FULL_ERRNOS | {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
# of a descriptor without a name: standard output
_STREAM_ERRORS = DISK_FULL_ERRNOS | {errno.EBADF, errno.EIO}

app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    add_completion=False,
    suggest_commands=False,  # LazyGroup suggests them
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"localgen {__version__}")
        raise typer.Exit


@app.callback()
def localgen(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version)
    ] = False,
) -> None:
    """Run language models on your own machine."""


def main() -> None:
    """Entry point of the console script."""
    if "_LOCALGEN_COMPLETE" in os.environ:
        from localgen.cli import shells

        sys.exit(shells.run_completion(app, os.environ[shells.COMPLETE_ENV_VAR]))
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.exit(_print_error("standard output is closed", errors.OTHER_ERROR))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # on a terminal without UTF-8, print ? instead of failing in mid-answer
            stream.reconfigure(errors="replace")
    sys.exit(run_command_line(sys.argv[1:]))


def run_command_line(arguments: list[str]) -> int:
    """Run a command line and return its exit status. Errors are printed on stderr."""
    try:
        _require_utf8(arguments)
        for line in messages.misspelt_variables():
            print(one_line(line), file=sys.stderr)
        status = _invoke(_expand_spelling(arguments) or ["--help"])
        sys.stdout.flush()
        return status
    except LocalgenError as error:
        message = messages.error_message(error, arguments)
        # the value of an option, not of its variable
        is_usage = isinstance(error, BadSetting) and error.param and message.startswith("--")
        status = errors.USAGE_ERROR if is_usage else errors.exit_status(error.code)
        return _print_error(message, status)
    except typer.TyperException as error:
        return _print_error(messages.usage_message(error, arguments), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):  # Abort: Ctrl+C or Ctrl+D at a question
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the shell prompt starts on a new line
        return errors.INTERRUPTED
    except BrokenPipeError:
        return _handle_broken_pipe()
    except OSError as error:
        return _handle_os_error(error)
    except Exception as error:  # users never see a traceback
        return _report_crash(error)


def _expand_spelling(arguments: list[str]) -> list[str]:
    """Replace `help COMMAND` by `COMMAND --help`, and `version` by `--version`."""
    option = _SPELLINGS.get(arguments[0]) if arguments else None
    return [*arguments[1:], option] if option else arguments


def _require_utf8(arguments: list[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            # cut: a prompt may be long
            raise InvalidRequest(f"argument {argument[:60]!r} is not UTF-8 text") from error


def _invoke(arguments: list[str]) -> int:
    group = typer.main.get_command(app)
    try:
        # not group.main(): it has its own handling of Ctrl+C and broken pipes
        with group.make_context("localgen", arguments) as context:
            group.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0


def _print_error(message: str, status: int) -> int:
    print(f"localgen: {one_line(message)}", file=sys.stderr)
    return status


def _report_crash(error: Exception) -> int:
    where = errors.log_crash(error)
    name = type(error).__name__
    return _print_error(
        f"internal error ({name}: {error}); traceback in {where}", errors.INTERNAL_ERROR
    )


def _handle_broken_pipe() -> int:
    _discard_output()
    return errors.BROKEN_PIPE


def _handle_os_error(error: OSError) -> int:
    is_full = error.errno in DISK_FULL_ERRNOS
    if error.filename and error.errno in _FILE_ERRORS:
        place = str(error.filename)
    elif error.errno in _STREAM_ERRORS:
        place = "standard output"
        _discard_output()
    else:
        return _report_crash(error)
    status = errors.exit_status("disk_full") if is_full else errors.OTHER_ERROR
    return _print_error(f"{place}: {error.strerror}", status)


def _discard_output() -> None:
    # the interpreter flushes stdout at exit, which would fail again
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
