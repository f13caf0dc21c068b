"""Editing text in the user's editor."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from localgen.backends.errors import InvalidRequest


def edit_in_editor(text: str) -> str:
    """Edit text in $VISUAL or $EDITOR. Raises InvalidRequest if the editor cannot run."""
    try:
        editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prompt.md"
            path.write_text(text, encoding="utf-8", errors="replace")
            subprocess.run([*editor, str(path)], check=True)
            return path.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise InvalidRequest(f"$EDITOR did not run, the prompt is as it was: {error}") from error
