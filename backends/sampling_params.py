"""Sampling parameters: the one table of samplers, and which settings make sense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args, get_type_hints

from localgen.backends.errors import InvalidRequest, LocalgenError

# the json_schema of `format: json` and `json_object`
ANY_JSON_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A row of the table.

    default: where neither the request nor the model says otherwise. lowest, highest: inclusive, or
    None for no number. flag: command-line option. hf_key: in generation_config.json. gguf_key: in a
    GGUF file, after `general.sampling.`. in_ollama: an option of Ollama's API. in_openai: a field
    of OpenAI's API. aliases: other names that users know. name, value_type: those of the field.
    """

    default: float | tuple[str, ...]
    lowest: float | None
    highest: float | None
    flag: str
    help: str
    hf_key: str = ""
    gguf_key: str = ""
    in_ollama: bool = False
    in_openai: bool = False
    aliases: tuple[str, ...] = ()
    name: str = ""
    value_type: Any = float

    @property
    def bounds(self) -> str:
        """The range in words; empty if it has none."""
        if self.lowest is None or self.highest is None:
            return ""
        is_open = self.highest == math.inf
        return f"at least {self.lowest:g}" if is_open else f"{self.lowest:g} to {self.highest:g}"


def _sampler(
    default: float | tuple[str, ...],
    lowest: float | None,
    highest: float | None,
    flag: str,
    help: str,
    **names: Any,
) -> Any:
    row = Sampler(default=default, lowest=lowest, highest=highest, flag=flag, help=help, **names)
    return field(default=None, metadata={"sampler": row})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. None: the model's own default, else BASE_SAMPLING.

    temperature 0 is greedy. mirostat 1 or 2 replaces top_k, top_p, min_p and typical_p.
    repeat_last_n and dry_penalty_last_n count tokens; -1 is the whole context.
    logprobs: None for none, n for the n best at each position besides the chosen one.
    min_tokens: no end of text and no stop string before that many tokens.
    thinking_budget: most tokens of reasoning, after which it is ended, or None for no limit.
    json_schema, regex, grammar (GBNF or Lark): constrain the answer; at most one of them.
    infill_sampler: llama.cpp's, after the others: it ends the answer where no token is likely.
    """

    # fmt: off
    temperature: float | None = _sampler(
        0.8, 0.0, 100.0, "--temp", "Temperature; 0: greedy.",
        hf_key="temperature", gguf_key="temp", in_ollama=True, in_openai=True,
        aliases=("temp",))
    top_k: int | None = _sampler(
        40, 0, math.inf, "--top-k", "Keep the k most likely tokens; 0: all.",
        hf_key="top_k", gguf_key="top_k", in_ollama=True)
    top_p: float | None = _sampler(
        0.95, 0.0, 1.0, "--top-p", "Keep the most likely tokens up to this total probability.",
        hf_key="top_p", gguf_key="top_p", in_ollama=True, in_openai=True)
    min_p: float | None = _sampler(
        0.05, 0.0, 1.0, "--min-p", "Drop tokens below this share of the most likely one.",
        hf_key="min_p", gguf_key="min_p", in_ollama=True)
    typical_p: float | None = _sampler(
        1.0, 0.0, 1.0, "--typical-p", "Locally typical sampling; 1: off.",
        in_ollama=True, aliases=("typical",))
    top_n_sigma: float | None = _sampler(
        -1.0, -1.0, 100.0, "--top-n-sigma", "Keep logits within n sigma of the best; -1: off.")
    xtc_probability: float | None = _sampler(
        0.0, 0.0, 1.0, "--xtc-probability", "How often XTC drops the best tokens; 0: off.",
        gguf_key="xtc_probability")
    xtc_threshold: float | None = _sampler(
        0.1, 0.0, 0.5, "--xtc-threshold", "XTC counts tokens above this probability.",
        gguf_key="xtc_threshold")
    dynatemp_range: float | None = _sampler(
        0.0, 0.0, 100.0, "--dynatemp-range", "Dynamic temperature: range; 0: off.")
    dynatemp_exponent: float | None = _sampler(
        1.0, 0.0, 100.0, "--dynatemp-exp", "Dynamic temperature: exponent.")
    adaptive_target: float | None = _sampler(
        -1.0, -1.0, 1.0, "--adaptive-target", "Adaptive-p: target; below 0: off.")
    adaptive_decay: float | None = _sampler(
        0.9, 0.0, 0.99, "--adaptive-decay", "Adaptive-p: decay.")
    mirostat: int | None = _sampler(
        0, 0, 2, "--mirostat", "Mirostat 1 or 2 instead of top-k, top-p, …; 0: off.",
        gguf_key="mirostat", in_ollama=True)
    mirostat_tau: float | None = _sampler(
        5.0, 0.0, 100.0, "--mirostat-ent", "Mirostat's target entropy.",
        gguf_key="mirostat_tau", in_ollama=True)
    mirostat_eta: float | None = _sampler(
        0.1, 0.0, 1.0, "--mirostat-lr", "Mirostat's learning rate.",
        gguf_key="mirostat_eta", in_ollama=True)
    repeat_penalty: float | None = _sampler(
        1.0, 1e-3, 100.0, "--repeat-penalty", "Penalty of recent tokens; 1: off.",
        hf_key="repetition_penalty", gguf_key="penalty_repeat", in_ollama=True,
        aliases=("repetition_penalty",))
    repeat_last_n: int | None = _sampler(
        64, -1, math.inf, "--repeat-last-n", "Tokens that the penalties count; -1: all.",
        gguf_key="penalty_last_n", in_ollama=True)
    presence_penalty: float | None = _sampler(
        0.0, -100.0, 100.0, "--presence-penalty", "Penalty of tokens that occurred; 0: off.",
        in_ollama=True, in_openai=True)
    frequency_penalty: float | None = _sampler(
        0.0, -100.0, 100.0, "--frequency-penalty", "Penalty for each occurrence; 0: off.",
        in_ollama=True, in_openai=True)
    dry_multiplier: float | None = _sampler(
        0.0, 0.0, 100.0, "--dry-multiplier", "Strength of the DRY penalty; 0: off.")
    dry_base: float | None = _sampler(
        1.75, 1.0, 100.0, "--dry-base", "Growth of DRY with the length of the repetition.")
    dry_allowed_length: int | None = _sampler(
        2, 0, math.inf, "--dry-allowed-length", "Longest repetition without a DRY penalty.")
    dry_penalty_last_n: int | None = _sampler(
        -1, -1, math.inf, "--dry-penalty-last-n", "Tokens that DRY searches; -1: all.")
    dry_sequence_breakers: tuple[str, ...] | None = _sampler(
        ("\n", ":", '"', "*"), None, None, "--dry-sequence-breaker",
        "Text at which a repetition ends (may be repeated).")
    # fmt: on
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    thinking_budget: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    infill_sampler: bool = False

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """These settings, each None replaced by that of `defaults`."""
        missing = {
            f.name: getattr(defaults, f.name) for f in fields(self) if getattr(self, f.name) is None
        }
        return replace(self, **missing)


def _read_table() -> tuple[Sampler, ...]:
    hints = get_type_hints(SamplingParams)
    return tuple(
        replace(row, name=f.name, value_type=get_args(hints[f.name])[0])
        for f in fields(SamplingParams)
        if (row := f.metadata.get("sampler"))
    )


SAMPLERS = _read_table()
_defaults: dict[str, Any] = {sampler.name: sampler.default for sampler in SAMPLERS}
BASE_SAMPLING = SamplingParams(**_defaults)
# what the parameters do that are not in the table
PARAMETER_HELP = {
    "logit_bias": "ID=BIAS added to a logit",
    "seed": "Seed of the random stream",
    "max_tokens": "Maximum number of generated tokens",
    "min_tokens": "Minimum number of generated tokens",
    "thinking_budget": "Maximum number of reasoning tokens, after which the model answers",
    "stop": "Stop string that ends the answer",
    "stop_token_ids": "Stop token id that ends the answer",
    "ignore_eos": "Ignore the end-of-sequence token",
    "json_schema": "JSON schema for the answer",
    "regex": "Regular expression for the answer",
    "grammar": "GBNF or Lark grammar for the answer",
}

# an infinite logit leaves no probabilities
_MAX_BIAS = 1e6
# each is matched against the whole vocabulary; llama.cpp silently truncates longer ones
_MAX_SEQUENCE_BREAKERS = 32
_MAX_SEQUENCE_BREAKER_BYTES = 40
_MAX_INFILL_TOKENS = 100


# at most one may be set
GRAMMAR_FIELDS = ("json_schema", "regex", "grammar")
_EXCLUDE_TOOLS = ("regex", "grammar")


def excludes_tools(params: SamplingParams) -> str:
    """The name of the parameter that is set and excludes tools; empty if none is."""
    return next((name for name in _EXCLUDE_TOOLS if getattr(params, name) is not None), "")


def validate_sampling_params(params: SamplingParams) -> None:
    """Raises InvalidRequest for a value out of range or settings that exclude each other."""
    for sampler in SAMPLERS:
        name, lowest, highest = sampler.name, sampler.lowest, sampler.highest
        if lowest is None or highest is None:
            continue
        value = getattr(params, name)
        if not lowest <= value <= highest:  # NaN fails too
            raise InvalidRequest(f"{name} is {value:g}, it must be {sampler.bounds}", param=name)
    for token, bias in params.logit_bias.items():
        if not bias <= _MAX_BIAS:  # NaN fails too; -inf is allowed and bans the token
            raise InvalidRequest(
                f"logit_bias of token {token} is {bias:g}, it must be a number up to {_MAX_BIAS:g}",
                param="logit_bias",
            )
    _validate_sequence_breakers(params.dry_sequence_breakers or ())
    if params.infill_sampler:
        _validate_infill_sampler(params)
    if params.mirostat and not params.temperature:
        raise InvalidRequest(
            "mirostat cannot be used with temperature 0 (greedy): set one of them",
            param="mirostat",
        )
    if params.mirostat and uses_adaptive_p(params):
        raise InvalidRequest(
            "mirostat and adaptive_target both choose the token: set one of them",
            param="adaptive_target",
        )
    if uses_adaptive_p(params) and not params.temperature:
        raise InvalidRequest(
            "adaptive_target cannot be used with temperature 0 (greedy): set one of them",
            param="adaptive_target",
        )


def _validate_infill_sampler(params: SamplingParams) -> None:
    """Raise InvalidRequest where an end of text, which it may choose, is not allowed.

    It compares the texts of all pairs of tokens that are left.
    """
    for name in ("json_schema", "regex", "grammar", "min_tokens", "ignore_eos", "mirostat"):
        if getattr(params, name):
            raise InvalidRequest(
                f"samplers: infill cannot be used with {name}: leave one of them out",
                param="samplers",
            )
    if not 1 <= (params.top_k or 0) <= _MAX_INFILL_TOKENS:
        raise InvalidRequest(
            f"samplers: infill needs top_k before it, of 1 to {_MAX_INFILL_TOKENS} tokens",
            param="samplers",
        )


def _validate_sequence_breakers(breakers: tuple[str, ...]) -> None:
    name = "dry_sequence_breakers"
    if len(breakers) > _MAX_SEQUENCE_BREAKERS:
        raise InvalidRequest(f"more than {_MAX_SEQUENCE_BREAKERS} {name}", param=name)
    for text in breakers:
        if (
            not 0 < len(text.encode(errors="replace")) <= _MAX_SEQUENCE_BREAKER_BYTES
            or "\0" in text
        ):
            raise InvalidRequest(
                f"{name}: {text!r} must be 1 to {_MAX_SEQUENCE_BREAKER_BYTES} bytes without NUL",
                param=name,
            )


# samplers that mirostat replaces
REPLACED_BY_MIROSTAT = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "dynatemp_range",
)


def reject_mirostat_conflicts(requested: SamplingParams) -> None:
    """Raises InvalidRequest if a request sets mirostat and a sampler that mirostat replaces."""
    if not requested.mirostat:
        return
    for name in REPLACED_BY_MIROSTAT:
        if getattr(requested, name) is not None:
            raise InvalidRequest(f"mirostat replaces {name}: leave one of them out", param=name)


def uses_penalties(params: SamplingParams) -> bool:
    """True if penalties are active, so that sampling depends on the previous tokens."""
    return bool(params.repeat_last_n) and (
        params.repeat_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)
    )


def uses_adaptive_p(params: SamplingParams) -> bool:
    """True if adaptive-p sampling is enabled."""
    return params.adaptive_target is not None and params.adaptive_target >= 0


def model_sampling_defaults(
    values: Mapping[str, object],
) -> tuple[SamplingParams, tuple[str, ...]]:
    """A model's own defaults, and a note if they are invalid and therefore ignored.

    values: as a model's files have them, by field; None is left out.
    """
    try:
        known: dict[str, Any] = {
            sampler.name: _number(sampler, values[sampler.name])
            for sampler in SAMPLERS
            if values.get(sampler.name) is not None
        }
        defaults = SamplingParams(**known)
        validate_sampling_params(defaults.with_defaults(BASE_SAMPLING))
    except (LocalgenError, ValueError) as error:
        # or every request that names no settings of its own would fail
        return SamplingParams(), (f"the model's own sampling defaults are ignored: {error}",)
    return defaults, ()


def _number(sampler: Sampler, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{sampler.hf_key or sampler.name} is {value!r}")
    # isfinite raises for integers too large for a float
    if abs(value) > 1e300 or not math.isfinite(value):
        raise ValueError(f"{sampler.hf_key or sampler.name} is {value!r:.40}")
    number: float = sampler.value_type(value)
    return number
