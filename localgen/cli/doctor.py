"""`localgen doctor`."""

from __future__ import annotations

from contextlib import closing

import typer

from localgen.cli.arguments import JsonFlag


def command(json: JsonFlag = False) -> None:
    """Check hardware, backends and server, and report problems.

    Exit status 1 if no model can run.
    """
    from localgen.cli import doctor_report
    from localgen.client import LocalClient
    from localgen.config import ServerSettings
    from localgen.doctor.checkup import run_checkup

    settings = ServerSettings.from_environment()
    with closing(LocalClient(settings)) as client:
        found = run_checkup(settings, client)
    typer.echo(doctor_report.checkup_json(found) if json else doctor_report.checkup_text(found))
    if any(finding.error for finding in found.findings):
        raise typer.Exit(1)
