"""A preset: a name for a model with a system prompt, sampling, context and thinking of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localgen.backends.errors import InvalidRequest
from localgen.backends.memory.kv_sizing import DEFAULT_CTX
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import (
    BASE_SAMPLING,
    GRAMMAR_FIELDS,
    REPLACED_BY_MIROSTAT,
    SAMPLERS,
    SamplingParams,
    validate_sampling_params,
)
from localgen.backends.types import Message, Request
from localgen.hub.latest_tag import without_latest

PRESET_PARAMETERS = (
    *(sampler.name for sampler in SAMPLERS),
    *("seed", "max_tokens", "thinking_budget", "stop", *GRAMMAR_FIELDS),
)
THINK_EFFORTS = ("low", "medium", "high")
_OWN_FIELDS = ("model", "system", "think", "ctx")
_LOWEST = {"seed": 0, "max_tokens": 1, "thinking_budget": 0}
_UNSET = SamplingParams()


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of the requests that name it, unless a request has its own.

    model: as the user wrote it; an alias, but no preset. think: off, on or a reasoning effort, or
    None for the model's default. ctx: limit of prompt and answer in tokens, or None for the
    model's context.
    """

    model: str
    system: str = ""
    think: bool | str | None = None
    ctx: int | None = None
    params: SamplingParams = _UNSET

    def apply(self, request: Request) -> Request:
        """The request with what it leaves open. As in Ollama, its own system message replaces ours.

        null, -1 and an empty list count as left open. A plain prompt gets no system prompt.
        """
        is_open = request.thinking is None and request.reasoning_effort is None
        think, effort = (None, self.think) if isinstance(self.think, str) else (self.think, None)
        return replace(
            request,
            messages=self._messages(request.messages),
            params=_merged(request.params, self.params),
            ctx=self.ctx if request.ctx is None else request.ctx,
            thinking=think if is_open else request.thinking,
            reasoning_effort=effort if is_open else request.reasoning_effort,
        )

    def load_options(self, requested: LoadOptions, request_ctx: int | None = None) -> LoadOptions:
        """Options of a load: a context above the default must be loaded, a smaller one need not.

        request_ctx: that of the request, which then needs no other.
        """
        has_own = requested.ctx is not None or request_ctx is not None
        if has_own or self.ctx is None or self.ctx <= DEFAULT_CTX:
            return requested
        return replace(requested, ctx=self.ctx)

    def sets(self, key: str) -> bool:
        """True if it sets a key of models.toml."""
        if key in _OWN_FIELDS:
            return getattr(self, key) not in (None, "")
        return key in PRESET_PARAMETERS and getattr(self.params, key) != getattr(_UNSET, key)

    def to_table(self) -> dict[str, Any]:
        """Its fields in models.toml, without those that are not set."""
        own = {name: getattr(self, name) for name in _OWN_FIELDS}
        chosen = {name: getattr(self.params, name) for name in PRESET_PARAMETERS}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in (own | chosen).items()
            if value not in (None, "", ())
        }

    def _messages(self, messages: tuple[Message, ...] | None) -> tuple[Message, ...] | None:
        if not messages or not self.system or messages[0].role == "system":
            return messages
        return (Message("system", self.system), *messages)


def parse_preset(table: object) -> Preset:
    """The preset of a table of models.toml. Raises InvalidRequest, which names the field."""
    import msgspec

    from localgen.backends.typed_data import convert

    if not isinstance(table, dict):
        raise InvalidRequest('expected a table, such as [preset.coder] with model = "smollm2"')
    known = (*_OWN_FIELDS, *PRESET_PARAMETERS)
    if unknown := next((name for name in table if name not in known), None):
        raise InvalidRequest(f"unknown field {unknown}: fields are {', '.join(known)}")
    if not isinstance(table.get("model"), str) or not table["model"].strip():
        raise InvalidRequest('model: give the name of a model, as in model = "smollm2"')
    own = {name: table[name] for name in _OWN_FIELDS if name in table}
    chosen = {name: table[name] for name in PRESET_PARAMETERS if name in table}
    try:
        preset = convert(own, Preset)
        params = convert(chosen, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_plain_reason(error)) from error
    preset = replace(preset, model=without_latest(preset.model), params=params)
    _validate(preset)
    return preset


def _plain_reason(error: Exception) -> str:
    """`temperature: Expected a number`: msgspec's reason has the name at its end, after `$.`."""
    reason, _, place = str(error).partition(" - at `$.")
    return f"{place.rstrip('`')}: {reason.replace('`', '').replace(' | null', '')}"


def _validate(preset: Preset) -> None:
    if isinstance(preset.think, str) and preset.think not in THINK_EFFORTS:
        efforts = ", ".join(THINK_EFFORTS)
        raise InvalidRequest(f"think is {preset.think!r}: give true, false or one of {efforts}")
    if preset.ctx is not None:
        _require_between("ctx", preset.ctx, 1, 2**31 - 1)
    for name, lowest in _LOWEST.items():
        value = getattr(preset.params, name)
        if value is not None:
            _require_between(name, value, lowest, 2**32 - 1)
    if sum(getattr(preset.params, name) is not None for name in GRAMMAR_FIELDS) > 1:
        raise InvalidRequest(f"give one of {', '.join(GRAMMAR_FIELDS)}")
    validate_sampling_params(preset.params.with_defaults(BASE_SAMPLING))


def _require_between(name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise InvalidRequest(f"{name} is {value:,}: give {lowest} to {highest:,}", param=name)


def _merged(requested: SamplingParams, ours: SamplingParams) -> SamplingParams:
    """Ours where the request sets nothing, without those of ours that exclude one of its own."""
    left_out: set[str] = set()
    if requested.mirostat:
        left_out |= set(REPLACED_BY_MIROSTAT)
    if any(getattr(requested, name) is not None for name in REPLACED_BY_MIROSTAT):
        left_out.add("mirostat")
    if any(getattr(requested, name) is not None for name in GRAMMAR_FIELDS):
        left_out |= set(GRAMMAR_FIELDS)
    added = {
        name: getattr(ours, name)
        for name in PRESET_PARAMETERS
        if name not in left_out and getattr(requested, name) == getattr(_UNSET, name)
    }
    return replace(requested, **added)
