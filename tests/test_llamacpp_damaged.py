"""The error for a damaged model file gives a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import TINY_GGUF

from localgen.backends.errors import LoadFailed
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.model_info import LoadOptions, ModelLoadRequest

WHOLE = Path(TINY_GGUF).read_bytes()


@pytest.mark.parametrize(
    "content",
    [b"GGUF\x03\0\0\0garbage", b"<html>not here</html>", WHOLE[:40], WHOLE[:2_000], WHOLE[:-1_000]],
    ids=["header", "page", "first key", "metadata", "tensors"],
)
def test_damaged_file_error_says_to_download_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(LoadFailed, match="the file is incomplete or not GGUF, download it again"):
        load_llamacpp_model(ModelLoadRequest("m", str(path), LoadOptions()), lambda share: None)
