"""A GGUF file with a longer context than its model was trained with.

Times do not depend on what the text means, so a small model can stand for long prompts. Its answers
beyond the trained context mean nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf


def stretch(model: Path, ctx: int, folder: Path) -> Path:
    """Write a copy whose metadata names a context of ctx tokens, and return its path.

    All else stays as it is. Raises KeyError if the file names no context.
    """
    copy = folder / f"{model.stem}-ctx-{ctx}.gguf"
    shutil.copyfile(model, copy)
    reader = gguf.GGUFReader(copy, "r+")
    architecture = reader.fields["general.architecture"].contents()
    field = reader.fields[f"{architecture}.context_length"]
    field.parts[field.data[0]][0] = ctx
    reader.data.flush()
    return copy
