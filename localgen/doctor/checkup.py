"""The report of `localgen doctor`."""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from localgen import __version__
from localgen.backends.errors import DISK_FULL_ERRNOS, LocalgenError
from localgen.config import BadSetting, ServerSettings
from localgen.doctor.findings import Finding, collect_findings
from localgen.machine import system_info
from localgen.machine.busy_processes import BusyProgram, busy_programs
from localgen.machine.llama_build import BrokenBuild, LlamaBuild, probe_llamacpp
from localgen.machine.system_info import SystemInfo
from localgen.placement.backend_choice import detect_hardware

if TYPE_CHECKING:
    from localgen.client import LocalClient

PACKAGES = (
    *("llama-cpp-python", "fastapi", "uvicorn", "httpx", "msgspec", "gguf", "numpy"),
    *("torch", "triton", "safetensors", "tokenizers"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """The report. server: a short description of its state. models: names of the installed models.

    busy: the other programs that use the processor now, the busiest first. no_cuda: why the cuda
    backend cannot run; None if it can.
    """

    version: str
    python: str
    packages: dict[str, str]
    machine: SystemInfo
    busy: tuple[BusyProgram, ...]
    llama: LlamaBuild | BrokenBuild
    no_cuda: str | None
    socket: str
    log: str
    state: str
    server: str
    models: tuple[str, ...]
    findings: tuple[Finding, ...]


def run_checkup(settings: ServerSettings, client: LocalClient) -> Checkup:
    """Collect the report. Starts no server and loads no model."""
    machine, llama = system_info.read_system_info(), probe_llamacpp()
    no_cuda = detect_hardware().cuda_unavailable_reason
    models, wrong = _list_models()
    server, unreachable = _server_state(client)
    return Checkup(
        version=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages={name: _version(name) for name in PACKAGES},
        machine=machine,
        busy=busy_programs(),
        llama=llama,
        no_cuda=no_cuda,
        socket=str(settings.socket_path),
        log=str(settings.log_path),
        state=str(settings.state_dir),
        server=server,
        models=models,
        findings=(
            *_folder_findings(settings),
            *unreachable,
            *wrong,
            *collect_findings(machine, llama, no_cuda),
        ),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _folder_findings(settings: ServerSettings) -> list[Finding]:
    again = "then run localgen doctor again"
    try:
        settings.create_dirs()
        _write_a_file(settings.state_dir)
    except LocalgenError as error:
        return [Finding(error.message, again, error=True)]
    except OSError as error:
        is_full = error.errno in DISK_FULL_ERRNOS
        remedy = "free space there, or set LOCALGEN_STATE_DIR" if is_full else "allow it"
        reason = "the disk is full" if is_full else error.strerror
        message = f"cannot write to the folder {settings.state_dir}: {reason}"
        return [Finding(message, f"{remedy}, {again}", error=True)]
    return []


def _write_a_file(folder: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=folder, prefix="doctor-") as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())  # a file system may report only then that it is full


def _list_models() -> tuple[tuple[str, ...], list[Finding]]:
    from localgen.hub.resolve import installed_models

    try:
        found = tuple(model.name for model in installed_models())
    except LocalgenError as error:
        return (), [Finding(error.message, "fix or remove that file")]
    return found, [] if found else [Finding("no model found", "use a path to a .gguf file")]


def _server_state(client: LocalClient) -> tuple[str, list[Finding]]:
    try:
        health = client.health()
    except BadSetting:  # _folder_findings reports it
        return "not asked: its folder is not safe", []
    except LocalgenError as error:
        return "no valid answer", [Finding(error.message, "then run localgen doctor again")]
    if health is None:
        return "not running; the first chat or run starts it", []
    state = f"version {health.version}, process {health.pid}, {health.active_requests} requests"
    return state, []
