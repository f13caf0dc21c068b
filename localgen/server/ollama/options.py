"""`options` and `keep_alive` of Ollama requests: sampling, limits, load options."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SAMPLERS
from localgen.server.models.resident import KeepAlive
from localgen.server.requests.body import (
    Int32,
    StrictModel,
    reject_unsupported_fields,
    with_sampler_fields,
)
from localgen.server.requests.choices import NUM_SEEDS

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"\d{1,12}(?:\.\d{1,12})?"
_DURATION_PART = re.compile(rf"({_NUMBER})(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"(-?)((?:{_DURATION_PART.pattern})+|{_NUMBER})")
# num_gpu at or above this means all layers
_ALL_LAYERS = 999
# unsupported options, with their values that have no effect
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "tfs_z": (1,),
    "penalize_newline": (True,),
    "numa": (False,),
    "main_gpu": (0,),
    "low_vram": (False,),
    "f16_kv": (True,),
    "logits_all": (False,),
    "vocab_only": (False,),
    "embedding_only": (False,),
}


def parse_ollama_keep_alive(value: float | str | None) -> KeepAlive | None:
    """Parse keep_alive. Returns None if it is not set; negative values mean no limit.

    Raises InvalidRequest if it is not a duration.
    """
    if value is None or value == "":
        return None
    match = _DURATION.fullmatch(str(value).strip()) if isinstance(value, str) else None
    if isinstance(value, str) and match is None:
        raise InvalidRequest(
            f"keep_alive is {value[:40]!r}: use seconds, a duration such as 30s, 5m or 1h30m, 0, "
            "or -1 for no limit",
            param="keep_alive",
        )
    if match is None:
        seconds = float(value)
    else:
        parts = _DURATION_PART.findall(match[2])
        seconds = sum(float(amount) * _UNITS_S[unit] for amount, unit in parts)
        seconds = seconds if parts else float(match[2])
        seconds = -1.0 if match[1] and seconds else seconds
    return KeepAlive(None if seconds < 0 else seconds)


_SAMPLERS = tuple(sampler for sampler in SAMPLERS if sampler.in_ollama)
if TYPE_CHECKING:
    _SamplerFields = StrictModel
else:
    _SamplerFields = with_sampler_fields(StrictModel, _SAMPLERS)


class OllamaOptions(_SamplerFields):
    """Options of a request. None: the default of the model or of this machine.

    num_keep: accepted but without effect, since contexts are never shifted.
    """

    seed: int | None = None
    num_predict: Int32 | None = None
    num_keep: Int32 | None = None
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    num_ctx: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    num_batch: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    num_gpu: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    num_thread: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, options: Any) -> Any:
        return reject_unsupported_fields(options, _UNSUPPORTED)

    def sampling_fields(self) -> dict[str, Any]:
        """Keyword arguments for SamplingParams. Raises InvalidRequest for invalid numbers."""
        return {sampler.name: getattr(self, sampler.name) for sampler in _SAMPLERS} | {
            "seed": self._resolved_seed(),
            "max_tokens": self._resolved_max_tokens(),
            "stop": tuple(self.stop or ()),
        }

    def to_load_options(self) -> LoadOptions:
        """Convert to load options. num_ctx is not one: it limits the request."""
        layers = self.num_gpu if self.num_gpu != -1 else None
        return LoadOptions(
            gpu_layers=-1 if layers is not None and layers >= _ALL_LAYERS else layers,
            threads=self.num_thread or None,
            max_batch_tokens=self.num_batch,
            mmap=self.use_mmap,
            mlock=self.use_mlock,
        )

    def _resolved_seed(self) -> int | None:
        if self.seed is not None and self.seed >= NUM_SEEDS:
            raise InvalidRequest(f"seed is {self.seed}, it must be below 2**32", param="seed")
        # negative: random
        return None if self.seed is None or self.seed < 0 else self.seed

    def _resolved_max_tokens(self) -> int | None:
        wanted = self.num_predict
        if wanted is None or wanted in (-1, -2):
            return None
        if wanted < 1:
            raise InvalidRequest(
                f"num_predict is {wanted}: use 1 or more, or -1 for no limit", param="num_predict"
            )
        return wanted
