"""Invalid sampling settings are rejected, and the error names the field."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localgen.backends import sampling_params
from localgen.backends.engine.input_processor import MAX_LOGPROBS, MAX_STOP_STRINGS, InputProcessor
from localgen.backends.errors import InvalidRequest
from localgen.backends.runner.interface import Limits
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams
from localgen.backends.types import Request

VOCAB = 100
UNBOUNDED = ("top_k", "repeat_last_n", "dry_penalty_last_n", "dry_allowed_length")
# lowest and highest accepted value
EDGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (-1.0, 100.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 0.5),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    "adaptive_target": (-1.0, 1.0),
    "adaptive_decay": (0.0, 0.99),
    "mirostat": (0, 2),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 1.0),
    "repeat_penalty": (1e-3, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
}


class Bytes:
    """A tokenizer with one token per character."""

    vocab_size = VOCAB
    eos_token_ids = frozenset({0})
    bos = eos = ""
    infill_tokens = None

    def encode(self, text: str) -> list[int]:
        return [ord(character) % VOCAB for character in text]

    def encode_for_embedding(self, text: str) -> list[int]:
        return self.encode(text)

    def piece(self, token: int) -> bytes:
        return bytes([token])


def intake(
    unsupported: frozenset[str] = frozenset(), defaults: SamplingParams | None = None
) -> InputProcessor:
    limits = Limits(
        max_seqs=1,
        max_batch_tokens=8,
        max_outputs=1,
        max_len=64,
        kv_tokens=64,
        can_rewind=True,
        unsupported=unsupported,
    )
    return InputProcessor(
        limits=limits, tokenizer=Bytes(), template=None, defaults=defaults or SamplingParams()
    )


def base(**changed: Any) -> SamplingParams:
    return replace(BASE_SAMPLING, **changed)


def prepared(**asked: Any) -> SamplingParams:
    """The settings in force for a request with these settings."""
    request = Request(id="a", prompt="hello", params=SamplingParams(**asked))
    return intake().prepare(request).params


def refusal(**asked: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        prepared(**asked)
    assert "\n" not in caught.value.message
    return caught.value


def test_every_number_has_a_rule() -> None:
    """A new numeric field of SamplingParams needs bounds here."""
    others = {"dry_sequence_breakers", "logit_bias", "seed", "logprobs", "max_tokens", "min_tokens"}
    others |= {"stop", "stop_token_ids", "ignore_eos", "json_schema", "regex", "grammar"}
    others |= {"thinking_budget", "infill_sampler"}
    assert {field.name for field in fields(SamplingParams)} == {*EDGES, *UNBOUNDED} | others


def test_the_defaults_are_valid() -> None:
    sampling_params.validate_sampling_params(BASE_SAMPLING)
    assert prepared(seed=1) == replace(BASE_SAMPLING, seed=1)


@pytest.mark.parametrize("name", EDGES)
def test_both_edges_are_accepted_and_nothing_beyond(name: str) -> None:
    lowest, highest = EDGES[name]
    for value in (lowest, highest):
        sampling_params.validate_sampling_params(base(**{name: value}))
    step = 1 if name == "mirostat" else 1e-4
    for value in (lowest - step, highest + step, math.inf, -math.inf):
        error = refusal(**{name: value})
        assert error.param == name
        assert error.message.startswith(f"{name} is ")
        assert f"{lowest:g} to {highest:g}" in error.message


@pytest.mark.parametrize("name", UNBOUNDED)
def test_counts_have_a_lowest_value_only(name: str) -> None:
    lowest = -1 if name.endswith("last_n") else 0
    sampling_params.validate_sampling_params(base(**{name: lowest}))
    sampling_params.validate_sampling_params(base(**{name: 2**40}))
    assert refusal(**{name: lowest - 1}).param == name


@pytest.mark.parametrize("name", [*EDGES, *UNBOUNDED])
def test_nan_is_refused(name: str) -> None:
    assert refusal(**{name: math.nan}).param == name


@pytest.mark.parametrize("bias", [math.nan, math.inf, 1e39])
def test_a_bias_that_leaves_no_probabilities_is_refused(bias: float) -> None:
    error = refusal(logit_bias={7: bias})
    assert error.param == "logit_bias"
    assert "token 7" in error.message


@pytest.mark.parametrize("bias", [-math.inf, -100.0, 0.0, 100.0])
def test_a_bias_may_ban_or_force_a_token(bias: float) -> None:
    assert prepared(logit_bias={7: bias}).logit_bias == {7: bias}


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused(name: str, token: int) -> None:
    error = refusal(**{name: {token: 1.0} if name == "logit_bias" else (token,)})
    assert str(token) in error.message
    assert str(VOCAB) in error.message
    assert error.param == name


@pytest.mark.parametrize("breakers", [("",), ("a\0b",), ("é" * 21,), ("x",) * 33])
def test_dry_breakers_that_would_be_cut_or_skipped_are_refused(breakers: tuple[str, ...]) -> None:
    assert refusal(dry_sequence_breakers=breakers).param == "dry_sequence_breakers"


def test_dry_breakers_at_the_limits() -> None:
    for breakers in ((), ("é" * 20,), ("x",) * 32):
        assert prepared(dry_sequence_breakers=breakers).dry_sequence_breakers == breakers


# -- contradictions ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 40),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("typical_p", 0.5),
        ("top_n_sigma", 1.0),
        ("xtc_probability", 0.5),
        ("dynatemp_range", 0.5),
    ],
)
def test_mirostat_with_a_setting_it_replaces_is_rejected(
    version: int, name: str, value: float
) -> None:
    error = refusal(mirostat=version, **{name: value})
    assert error.param == name
    assert error.message == f"mirostat replaces {name}: leave one of them out"


def test_mirostat_overrides_defaults_that_nobody_asked_for() -> None:
    defaults = SamplingParams(top_k=20, top_p=0.8)
    request = Request(id="a", prompt="hello", params=SamplingParams(mirostat=2))
    assert intake(defaults=defaults).prepare(request).params.mirostat == 2


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"mirostat": 1, "temperature": 0.0}, "mirostat"),
        ({"mirostat": 2, "adaptive_target": 0.5}, "adaptive_target"),
        ({"temperature": 0.0, "adaptive_target": 0.5}, "adaptive_target"),
    ],
)
def test_conflicting_settings_are_rejected(asked: dict[str, Any], param: str) -> None:
    error = refusal(**asked)
    assert error.param == param
    assert "set one of them" in error.message


def test_the_contradiction_may_come_from_the_model_s_defaults() -> None:
    defaults = SamplingParams(mirostat=2)
    request = Request(id="a", prompt="hello", params=SamplingParams(temperature=0.0))
    with pytest.raises(InvalidRequest, match="mirostat cannot be used with temperature 0"):
        intake(defaults=defaults).prepare(request)


def test_unsupported_setting_is_rejected_unless_off() -> None:
    limited = intake(frozenset({"mirostat"}))
    off = Request(id="a", prompt="hello", params=SamplingParams(mirostat=0))
    assert limited.prepare(off).params.mirostat == 0
    asked = Request(id="a", prompt="hello", params=SamplingParams(mirostat=1))
    with pytest.raises(InvalidRequest, match="does not support mirostat") as caught:
        limited.prepare(asked)
    assert caught.value.param == "mirostat"


# -- the rest of a request --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs"),
        ({"stop": ("x",) * (MAX_STOP_STRINGS + 1)}, "stop"),
    ],
)
def test_other_invalid_fields_are_rejected(asked: dict[str, Any], param: str) -> None:
    assert refusal(**asked).param == param


def test_missing_seed_is_drawn() -> None:
    seeds = {prepared().seed for _ in range(8)}
    assert None not in seeds
    assert len(seeds) > 1
    assert prepared(seed=0).seed == 0


OPTIONAL = {
    "temperature": st.none() | st.floats(0, 2),
    "top_k": st.none() | st.integers(0, 100),
    "dry_sequence_breakers": st.none() | st.just(("x",)),
}


@given(st.builds(SamplingParams, **OPTIONAL), st.builds(SamplingParams, **OPTIONAL))
def test_the_request_wins_then_the_model_then_the_base(
    asked: SamplingParams, model: SamplingParams
) -> None:
    request = Request(id="a", prompt="hello", params=asked)
    got = intake(defaults=model).prepare(request).params
    for name in OPTIONAL:
        candidates = [getattr(params, name) for params in (asked, model, BASE_SAMPLING)]
        assert getattr(got, name) == next(value for value in candidates if value is not None)
