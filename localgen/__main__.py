"""Entry point of the command `localgen`, and of `python -m localgen`."""

from __future__ import annotations

import signal


def main() -> None:
    """Import the program and run it. Ctrl+C during the import ends the process without a word."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from localgen.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
