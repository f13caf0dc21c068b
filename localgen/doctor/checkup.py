"""Everything `localgen doctor` tells, as one value."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from localgen import __version__
from localgen.backends.errors import LocalgenError
from localgen.config import Settings
from localgen.doctor.findings import Finding, findings
from localgen.machine import system_info as machines
from localgen.machine.llama_build import BrokenBuild, LlamaBuild, probe
from localgen.machine.system_info import Machine
from localgen.placement.backend_choice import this_machine

if TYPE_CHECKING:
    from localgen.client import Client

PACKAGES = (
    *("llama-cpp-python", "fastapi", "uvicorn", "httpx", "msgspec", "gguf", "numpy"),
    *("torch", "triton", "safetensors", "tokenizers"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """server: its state in a few words. models: names that need no path.

    no_cuda: why the cuda backend cannot be used; None: it can.
    """

    version: str
    python: str
    packages: dict[str, str]
    machine: Machine
    llama: LlamaBuild | BrokenBuild
    no_cuda: str | None
    socket: str
    log: str
    state: str
    server: str
    models: tuple[str, ...]
    findings: tuple[Finding, ...]


def checkup(settings: Settings, client: Client) -> Checkup:
    """Look at everything; starts no server and loads no model."""
    machine, llama = machines.look(), probe()
    no_cuda = this_machine().why_no_cuda
    models, wrong = _models()
    return Checkup(
        version=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages={name: _version(name) for name in PACKAGES},
        machine=machine,
        llama=llama,
        no_cuda=no_cuda,
        socket=str(settings.socket_path),
        log=str(settings.log_path),
        state=str(settings.state_dir),
        server=_server(client),
        models=models,
        findings=(*_of_folders(settings), *wrong, *findings(machine, llama, no_cuda)),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _of_folders(settings: Settings) -> list[Finding]:
    try:
        settings.prepare()
    except LocalgenError as error:
        return [Finding(error.message, "then run localgen doctor again", error=True)]
    return []


def _models() -> tuple[tuple[str, ...], list[Finding]]:
    from localgen.hub.resolve import available

    try:
        found = tuple(model.name for model in available())
    except LocalgenError as error:
        return (), [Finding(error.message, "mend or remove that file")]
    return found, [] if found else [Finding("no model was found", "give a path to a .gguf file")]


def _server(client: Client) -> str:
    try:
        health = client.health()
    except LocalgenError as error:
        return error.message
    if health is None:
        return "not running; the first chat or run starts it"
    return f"version {health.version}, process {health.pid}, {health.active_requests} requests"
