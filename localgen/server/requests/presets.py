"""Presets of models.toml, applied to the requests that name them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.types import Request
from localgen.hub.models_file import read_models_file
from localgen.hub.preset import Preset
from localgen.hub.resolve import find_alias, find_preset
from localgen.server.models.disk_paths import without_folders
from localgen.server.requests.choices import offset_seed

_log = logging.getLogger("localgen.server")


@dataclass(frozen=True, slots=True)
class NamedSettings:
    """What models.toml has on the model name of a request.

    preset: None if the name is none. notes: for the answer, if the file has an error now.
    """

    name: str
    preset: Preset | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    async def find(cls, name: str) -> NamedSettings:
        """Read the file if it has changed. Raises BadSetting if it has had an error from the
        start."""
        # in a thread: the file may be on a slow disk
        return await asyncio.to_thread(cls._find, name)

    @classmethod
    def _find(cls, name: str) -> NamedSettings:
        preset = find_preset(name)
        if preset is None and find_alias(name) is None:
            return cls(name)
        problem = without_folders(read_models_file().problem)
        if not problem:
            return cls(name, preset)
        note = f"{problem}. Until then {name} is what it was before that edit"
        _log.warning("%s", note)
        return cls(name, preset, (note,))

    def apply(self, requests: Sequence[Request], n: int = 1) -> tuple[Request, ...]:
        """The requests with the preset's settings. n: choices per prompt, whose seeds differ."""
        preset = self.preset
        if preset is None:
            return tuple(requests)
        return tuple(
            _with_seed(preset.apply(request), request.params.seed, index % n)
            for index, request in enumerate(requests)
        )

    def load_options(self, options: LoadOptions, request_ctx: int | None = None) -> LoadOptions:
        """Options to load the model with, for a request with this context."""
        return self.preset.load_options(options, request_ctx) if self.preset else options

    def shown(self, info: ModelInfo) -> ModelInfo:
        """The loaded model by the name of the preset."""
        if self.preset is None:
            return info
        note = f"{self.name} is a preset of {info.name}"
        return replace(info, name=self.name, notes=(note, *self.notes, *info.notes))

    def require_ctx(self, request_ctx: int | None, info: ModelInfo) -> None:
        """Raise InvalidRequest if the preset asks for more context than the model has."""
        wanted = self.preset.ctx if self.preset and request_ctx is None else None
        if wanted is None or wanted <= info.ctx:
            return
        remedy = "lower its ctx in models.toml"
        if wanted <= info.ctx_train:
            stop = f"`localgen stop {info.name}`"
            remedy += f", or {stop} and load it with --ctx {wanted}"
        raise InvalidRequest(
            f"preset {self.name} asks for {wanted:,} tokens of context, {info.name} is loaded with "
            f"{info.ctx:,}: {remedy}",
            param="ctx",
        )


def _with_seed(request: Request, own_seed: int | None, choice: int) -> Request:
    if own_seed is not None or not choice:
        return request
    params = replace(request.params, seed=offset_seed(request.params.seed, choice))
    return replace(request, params=params)
