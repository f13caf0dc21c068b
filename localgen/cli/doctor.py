"""`localgen doctor`."""

from __future__ import annotations

from contextlib import closing

import typer

from localgen.cli.arguments import JsonFlag


def command(json: JsonFlag = False) -> None:
    """Show what was found on this machine, what is used, and why. Status 1: nothing can run."""
    from localgen.cli import doctor_report
    from localgen.client import Client
    from localgen.config import Settings
    from localgen.doctor.checkup import checkup

    settings = Settings.from_environment()
    with closing(Client(settings)) as client:
        found = checkup(settings, client)
    typer.echo(doctor_report.as_json(found) if json else doctor_report.as_text(found))
    if any(finding.error for finding in found.findings):
        raise typer.Exit(1)
