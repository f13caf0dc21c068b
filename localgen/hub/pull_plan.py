"""The files that a pull downloads."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.hub.download import downloaded_bytes
from localgen.hub.hf_client import repo_folder
from localgen.hub.repository import RemoteFile


@dataclass(frozen=True, slots=True)
class PullPlan:
    """The files a pull downloads. name: the model's name afterwards.

    quant_reason: why this quantization was chosen, if the user did not choose it.
    """

    name: str
    repo: str
    commit: str
    files: tuple[RemoteFile, ...]
    quant_reason: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def remaining_bytes(self) -> int:
        """Bytes not downloaded yet."""
        return sum(file.size_bytes - downloaded_bytes(self.repo, file) for file in self.files)

    @property
    def is_cached(self) -> bool:
        """True if every file is in the cache's snapshot."""
        snapshot = repo_folder(self.repo) / "snapshots" / self.commit
        return all((snapshot / file.path).exists() for file in self.files)
