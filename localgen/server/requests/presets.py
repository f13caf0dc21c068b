"""Presets and adapters of models.toml, applied to the requests that name them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from localgen.backends.adapters import ADAPTER_BACKEND, AdapterRef
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Request
from localgen.hub.models_file import read_models_file
from localgen.hub.preset import Preset
from localgen.hub.resolve import find_adapter, find_alias, find_preset
from localgen.server.models.disk_paths import without_folders
from localgen.server.requests.choices import offset_seed

_UNSET = SamplingParams()
_log = logging.getLogger("localgen.server")


@dataclass(frozen=True, slots=True)
class NamedSettings:
    """What models.toml has on the model name of a request.

    preset, adapter: None if the name is none, nor of one. notes: for the answer, if the file has
    an error now.
    """

    name: str
    preset: Preset | None = None
    adapter: AdapterRef | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    async def find(cls, name: str) -> NamedSettings:
        """Read the file if it has changed. Raises BadSetting if it has had an error from the
        start."""
        # in a thread: the file may be on a slow disk
        return await asyncio.to_thread(cls._find, name)

    @classmethod
    def _find(cls, name: str) -> NamedSettings:
        if find_alias(name) is None:
            return cls(name)
        found = find_adapter(name)
        if found is not None:
            found[1].require_path(found[0])
        named = cls(name, find_preset(name), found[1].to_ref(found[0]) if found else None)
        problem = without_folders(read_models_file().problem)
        if not problem:
            return named
        note = f"{problem}. Until then {name} is what it was before that edit"
        _log.warning("%s", note)
        return replace(named, notes=(note,))

    def apply(self, requests: Sequence[Request], n: int = 1) -> tuple[Request, ...]:
        """The requests with the preset's settings. n: choices per prompt, whose seeds differ."""
        if self.adapter is not None:
            # as in llama-server, a request's own list replaces what it would have without
            own = (self.adapter,)
            requests = [replace(each, adapters=each.adapters or own) for each in requests]
        preset = self.preset
        if preset is None:
            return tuple(requests)
        return tuple(
            _with_seed(preset.apply(request), request.params.seed, index % n)
            for index, request in enumerate(requests)
        )

    def require_no_adapter(self) -> None:
        """Raise InvalidRequest if the name is an adapter: embeddings and ranking know none."""
        if self.adapter is not None:
            raise InvalidRequest(
                f"{self.name} is a LoRA adapter, which only generates text: name its model",
                param="model",
            )

    def load_options(self, options: LoadOptions, request_ctx: int | None = None) -> LoadOptions:
        """Options to load the model with, for a request with this context."""
        if self.adapter is not None and options.backend is None:
            options = replace(options, backend=ADAPTER_BACKEND)
        return self.preset.load_options(options, request_ctx) if self.preset else options

    def explained(
        self, error: LocalgenError, own: SamplingParams = _UNSET, own_ctx: int | None = None
    ) -> LocalgenError:
        """The error, with the name of the preset if one of its settings caused it.

        own, own_ctx: what the request itself sets.
        """
        # a load that fails in the engine has no param, and names the option
        is_load = error.message.startswith("--ctx ")
        key = "ctx" if is_load else (error.param or "").partition("[")[0]
        if key == "ctx":
            is_own = own_ctx is not None
        else:
            is_own = getattr(own, key, None) != getattr(_UNSET, key, None)
        if self.preset is None or is_own or not self.preset.sets(key):
            return error
        reason = error.message.removeprefix("--")
        message = f"models.toml: preset {self.name}: {reason}"
        return type(error)(message, param=error.param)

    def shown(self, info: ModelInfo) -> ModelInfo:
        """The loaded model by the name of the preset."""
        if self.preset is None and self.adapter is None:
            return info
        note = (
            f"{self.name} is {'an adapter' if self.preset is None else 'a preset'} of {info.name}"
        )
        return replace(info, name=self.name, notes=(note, *self.notes, *info.notes))

    def require_ctx(self, request_ctx: int | None, info: ModelInfo) -> None:
        """Raise InvalidRequest if the preset asks for more context than the model has."""
        wanted = self.preset.ctx if self.preset and request_ctx is None else None
        if wanted is None or wanted <= info.ctx:
            return
        remedy = "lower it"
        if wanted <= info.ctx_train:
            stop = f"`localgen stop {info.name}`"
            remedy += f", or {stop} and load it with --ctx {wanted}"
        raise InvalidRequest(
            f"ctx is {wanted:,}, {info.name} is loaded with {info.ctx:,} tokens: {remedy}",
            param="ctx",
        )


def _with_seed(request: Request, own_seed: int | None, choice: int) -> Request:
    if own_seed is not None or not choice:
        return request
    params = replace(request.params, seed=offset_seed(request.params.seed, choice))
    return replace(request, params=params)


def find_lora(name: str, scale: float | None) -> AdapterRef:
    """The adapter of models.toml with this name. scale: None for the one that it has there.

    Raises InvalidRequest if there is none, BadSetting.
    """
    known = read_models_file().adapters
    if name in known:
        known[name].require_path(name)
    else:
        raise InvalidRequest(
            f"lora: {name!r} is not an adapter of models.toml. Adapters: "
            f"{', '.join(known) or 'none'}",
            param="lora",
        )
    return known[name].to_ref(name, scale)
